"""An ablation of one stage: its variants and seeds from one upstream, each with its evaluation, and the table that compares them.

What the variants share runs once: upstream artifacts come from an earlier run, or from what is finished with
the recipe's settings, and a variant that is finished already is reused.
"""

from __future__ import annotations

import time
from typing import Annotated

from prefect import State, flow
from prefect.runtime import flow_run
from prefect.states import Cancelled
from prefect.utilities.urls import url_for
from pydantic import Field

from flows.history import keep
from flows.plan import home_folder
from flows.post_training import (
    NoStageName,
    Outcome,
    Overrides,
    RecipeName,
    RunName,
    StageName,
    closing_links,
    finish_record,
    given_models,
    make_ready,
    name_asked_for,
    open_job,
    open_part,
    show_comparison,
    show_plan,
)
from flows.request import Request, Sweep, prepare_sweep
from flows.scores.comparison import Measured, compare
from flows.servers.reconcile import own
from flows.stage import RecipeRun, RunCancelled, run_stage
from flows.summary import measured, totals
from stages.errors import PosttrainError, StageError

Vary = Annotated[
    list[Annotated[str, Field(pattern=r"^\S+=.+$")]],
    Field(min_length=1, description="Settings of the stage with the values to try, each `key=a,b`; the first values are the baseline."),
]


def _run_name() -> str:
    given = flow_run.parameters
    seeds = f", {given['seeds']} seeds" if given["seeds"] > 1 else ""
    return name_asked_for(f"{given['stage']} {'; '.join(given['vary'])}{seeds}")


@flow(name="ablation", flow_run_name=_run_name, persist_result=False)
def ablation(
    recipe: RecipeName = "tiny",
    stage: StageName = "reasoning_rl",
    vary: Vary = ["loss=dapo,dr_grpo"],  # noqa: B006 - the default that the form shows
    seeds: Annotated[int, Field(ge=1, le=20)] = 1,
    overrides: Overrides = [],  # noqa: B006
    of_run: RunName = "",
    compare_at: NoStageName = "",
    force: bool = False,
    dry_run: bool = False,
) -> Outcome | State | None:
    """Run variants of one stage from one upstream, with several seeds, and compare them on the benchmarks.

    Args:
        recipe: A recipe that comes with posttrain, or the path of your own .yaml file.
        stage: The stage to vary.
        vary: Settings of the stage with the values to try, each `key=a,b`; every combination is a variant, the first is the baseline.
        seeds: Training runs a variant; the first has the recipe's seed, the others the ones after it.
        overrides: Settings that all variants share, each `stage.key=value`.
        of_run: Take settings and upstream artifacts from this earlier run: `tiny-3`, `latest`, or an MLflow or Prefect run id.
        compare_at: The stage whose evaluation is compared; the varied one, or the first evaluated one after it, when left empty.
        force: Run the variants even if they are finished; earlier results are set aside, not lost.
        dry_run: Only plan: what would be reused, resumed and run, and why.
    """
    start = time.monotonic()
    own(flow_run.id)
    asked = Request(recipe=recipe, overrides=tuple(overrides), of_run=of_run or None, force=force)
    sweep = prepare_sweep(asked, home_folder(), stage, vary, seeds, compare_at or None)
    if dry_run:
        for job in sweep.jobs:
            show_plan(job.steps)
        return None
    make_ready(sweep.jobs)
    whole = open_job(sweep.jobs[0], "; ".join(vary), kind="ablation", stage=stage, compared_at=sweep.compared_at)
    try:
        with whole.closing():
            return _run(whole, sweep, start)
    except (RunCancelled, KeyboardInterrupt) as error:
        return Cancelled(message=str(error) or "Ctrl-C")


def _run(whole: RecipeRun, sweep: Sweep, start: float) -> Outcome:
    """Every variant and seed in turn, then the comparison. A variant that fails is left out, and told at the end."""
    found: list[Measured] = []
    parts: list[RecipeRun] = []
    failed: list[str] = []
    several = len({variant.seed for variant in sweep.variants}) > 1
    for variant, job in zip(sweep.variants, sweep.jobs, strict=True):
        label = f"{variant.name} seed={variant.seed}" if several else variant.name
        part = open_part(whole, job, label)
        parts.append(part)
        try:
            with part.closing():
                _run_variant(part)
        except RunCancelled:
            raise
        except PosttrainError as error:
            failed.append(f"{label}: {error}")
            continue
        finish_record(part, {})
        found += measured(whole.home, part.record, sweep.compared_at, variant=variant.name, trained=sweep.stage)
    whole.record = keep(whole.home, whole.record, parts=tuple(part.record.id for part in parts))
    comparison = compare(sweep.stage, found) if len({item.variant for item in found}) > 1 else None
    if comparison is not None:
        show_comparison(whole, comparison)
    if failed:
        raise StageError(f"{len(failed)} of {len(parts)} variants failed; the others are kept. " + "\n".join(failed))
    whole.tracker.finish_recipe(whole.tracking_run, table=None, figure=None, table_json=None, status="FINISHED")
    links = {"Prefect run": url_for("flow-run", flow_run.id) or "", **closing_links(whole, first=sweep.stage)}
    finish_record(whole, links)
    spent = totals({f"{part.record.id}.{name}": part.results[name] for part in parts for name in part.ran}, time.monotonic() - start)
    return Outcome(whole.record.id, None, comparison, spent, links)


def _run_variant(part: RecipeRun) -> None:
    """The varied stage and what leads from it to the evaluation; what lies before is there."""
    handles = given_models(part.job.recipe)
    varied = set(part.job.whole.after(part.job.stage or ""))
    for step in part.job.steps:
        if step.node.name in varied:
            handles[step.node.name] = run_stage(part, step.node, handles)
        else:
            assert step.result is not None
            handles[step.node.name] = step.result.outputs
            part.finish(step, step.result)
