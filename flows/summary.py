"""What a recipe's results add up to: the rows of its ablation table, its time and its memory. Light: starts nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flows.recipe import Recipe
from stages.artifacts import StageResult

if TYPE_CHECKING:
    from flows.ablation import AblationTable

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
    from flows.ablation import ablation_table

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
