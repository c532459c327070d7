"""What a recipe's results add up to: the rows of its ablation table, its time and its memory. Light: starts nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flows.history import Record, find_run, read_runs, results_of_run
from flows.plan import read_state
from flows.recipe import Recipe, load_again
from stages.artifacts import StageResult
from stages.errors import ArtifactError

if TYPE_CHECKING:
    from flows.scores.ablation import AblationTable
    from flows.scores.comparison import Measured

Results = Mapping[str, StageResult]


class Totals(NamedTuple):
    """Costs of one command. Times in seconds of wall time; memory is the largest stage's, MiB."""

    wall_seconds: float
    busy_seconds: float
    peak_memory_mib: float
    stages_run: int

    @property
    def busy_share(self) -> float:
        """Share of the wall time spent inside trainers and engine."""
        return self.busy_seconds / self.wall_seconds if self.wall_seconds else 0.0


def totals(ran: Results, wall_seconds: float) -> Totals:
    """Totals of the stages that ran, not of those that were reused."""
    return Totals(
        round(wall_seconds, 1),
        round(sum(result.busy_seconds for result in ran.values()), 1),
        max((result.peak_memory_mib for result in ran.values()), default=0.0),
        len(ran),
    )


def table_of(recipe: Recipe, results: Results) -> AblationTable | None:
    """The ablation table of the evaluations among `results`, in recipe order; None when there is none.

    A row is the model that an evaluation read; its cost is that of the stage which made the model.
    """
    from flows.scores.ablation import ablation_table

    rows: list[tuple[str, str | None, Path, float, int]] = []
    for model, samples in samples_of(recipe, results).items():
        made, before = results.get(model), recipe.stage_before(model)
        cost = (made.seconds, made.tokens) if made else (0.0, 0)
        rows.append((model, before if before in {row[0] for row in rows} else None, samples, *cost))
    return ablation_table(rows) if rows else None


def samples_of(recipe: Recipe, results: Results) -> dict[str, Path]:
    """The `samples.parquet` of each evaluation among `results`, by the model that it read, in recipe order."""
    return {
        node.inputs["model"].node: results[node.name].outputs["samples"].path
        for node in recipe.nodes
        if node.stage == "evaluation" and node.name in results and "samples" in results[node.name].outputs
    }


def measured(home: Path, record: Record, stage: str, *, variant: str, trained: str | None = None) -> list[Measured]:
    """A run's evaluation of a stage's model, for a comparison; empty when it has none.

    Costs are those of `trained`, by default that stage.
    """
    from flows.scores.comparison import Measured

    recipe, results = load_again(record.text, record.overrides), results_of_run(home, record)
    trained = trained or stage
    evaluation, made = results.get(recipe.evaluation_of(stage) or ""), results.get(trained)
    if evaluation is None or made is None:
        return []
    seed = int(record.overrides.get(f"{trained}.seed", recipe.seed))
    return [Measured(variant, seed, evaluation.outputs["samples"].path, made.tokens, made.seconds)]


def lined_up(home: Path, records: Sequence[Record], stage: str | None) -> tuple[str, list[Measured]]:
    """The stage at which runs are compared, and their evaluations of its model; an ablation stands for its variants.

    Without `stage`: what an ablation or rerun was about, else the last stage that all have evaluated.
    Raises ArtifactError when the runs have no such stage in common.
    """
    parts = [part for record in records for part in ([find_run(home, name) for name in record.parts] if record.parts else [record])]
    about = next((record.compared_at or record.stage for record in records if record.stage), None)
    order = [node.name for node in load_again(parts[0].text, parts[0].overrides).nodes] if parts else []
    for name in [stage] if stage else [about, *reversed(order)] if about else [*reversed(order)]:
        found = [measured(home, part, name, variant=_named(part, parts), trained=part.stage if part.part_of else None) for part in parts]
        if found and all(found):
            return name, [item for items in found for item in items]
    named = ", ".join(part.id for part in parts)
    raise ArtifactError(
        f"{named}: {f'not all have evaluated {stage}' if stage else 'they have no evaluated stage in common'}; see posttrain runs"
    )


def _named(part: Record, parts: Sequence[Record]) -> str:
    """What a run is called beside others: a variant of an ablation by what is varied, without its seed; others by their id, too."""
    if part.part_of and all(other.part_of == part.part_of for other in parts):
        return part.variant.rpartition(" seed=")[0] or part.variant
    return f"{part.id} {part.variant}"


def needed(home: Path, keep: int) -> dict[str, str]:
    """Fingerprint to reason: what the newest `keep` runs of each recipe have, what runs now, and what a next run would reuse."""
    found: dict[str, str] = {}
    runs = read_runs(home)
    for recipe in {run.recipe for run in runs}:
        own = [run for run in runs if run.recipe == recipe]
        for run in own[-keep:] + [run for run in own if run.status == "running"]:
            found |= {node.fingerprint: f"run {run.id} has it" for node in run.nodes.values()}
        found |= {node["fingerprint"]: f"{recipe} would reuse it" for node in read_state(home, recipe).get("nodes", {}).values()}
    return found
