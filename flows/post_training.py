"""The recipe as one flow: one call a stage, each taking handles that earlier calls returned. Read this first.

A recipe (`flows/recipes/*.yaml`) says which stages there are and what each reads. A handle names an
artifact in the folder of the stage that made it; nothing else travels between stages.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from uuid import UUID

from prefect import State, flow
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.client.orchestration import get_client
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.runtime import flow_run
from prefect.states import Cancelled
from prefect.utilities.urls import url_for
from pydantic import Field

from flows.audit import require_host
from flows.history import keep, open_run
from flows.launch import warm_up
from flows.models import find_model, models_used
from flows.plan import Outputs, Step, home_folder, remember
from flows.recipe import Recipe
from flows.request import Job, Request, prepare
from flows.scores.ablation import AblationTable, Row, draw
from flows.scores.comparison import Comparison, Line, Measured, compare
from flows.servers.reconcile import own
from flows.stage import RecipeRun, RunCancelled, run_stage
from flows.summary import Totals, measured, table_of, totals
from flows.terminal import screen
from flows.tracking import Tracker
from stages.artifacts import CheckpointRef, write_json

RecipeName = Annotated[str, Field(pattern=r"^[a-z0-9_]+$|[.]ya?ml$", description="A recipe that comes with posttrain, or a .yaml file.")]
Overrides = Annotated[list[Annotated[str, Field(pattern=r"^\S+=.+$")]], Field(description="Settings to change, each `stage.key=value`.")]
StageName = Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
NoStageName = Annotated[str, Field(pattern=r"^[a-z0-9_]*$")]
RunName = Annotated[str, Field(description="Earlier run to start from: `tiny-3`, `latest`, or an MLflow or Prefect run id; empty: none.")]
StageNames = Annotated[list[StageName], Field(description="Stages whose last result is reused although their key has changed.")]


_NAME_CHARACTERS = 100


class Outcome(NamedTuple):
    """What a run leaves: its short id, its tables (None without evaluations), what it cost, and the pages that show it."""

    run: str
    table: AblationTable | None
    comparison: Comparison | None
    totals: Totals
    links: Mapping[str, str]


def name_asked_for(what: str) -> str:
    """Name of the flow run at hand until it has a record: the recipe, what is done, and the run that it starts from."""
    given = flow_run.parameters
    of = f", of {given['of_run']}" if given["of_run"] else ""
    return f"{'plan of ' if given['dry_run'] else ''}{Path(given['recipe']).stem}: {what}{of}"


def _run_name() -> str:
    given = flow_run.parameters
    stages = [f"{word} {given[field]}" for field, word in (("only", "only"), ("start_from", "from")) if given[field]]
    return name_asked_for(", ".join([*stages, *given["overrides"]]) or "default")


@flow(name="post-training", flow_run_name=_run_name, persist_result=False)
def post_training(
    recipe: RecipeName = "tiny",
    overrides: Overrides = [],  # noqa: B006 - the default that the form shows
    only: NoStageName = "",
    start_from: NoStageName = "",
    of_run: RunName = "",
    force: bool = False,
    accept_drift: StageNames = [],  # noqa: B006
    dry_run: bool = False,
) -> Outcome | State | None:
    """Run a recipe from its first stage to its ablation table; what is finished already is reused.

    1. Plan: what will be reused, resumed and run, and why.
    2. Every stage in recipe order, in a process of its own, with the handles that it reads.
    3. The ablation table: every model that was made, scored on every benchmark.

    Args:
        recipe: A recipe that comes with posttrain, or the path of your own .yaml file.
        overrides: Settings to change, each `stage.key=value`, for instance `reasoning_rl.learning_rate=1e-4`.
        only: Only this stage and the evaluation of its model; the whole recipe when left empty.
        start_from: Only this stage and every stage that reads it, directly or not.
        of_run: Take settings, and the stages that are not run, from this earlier run: `tiny-3`, `latest`, or an MLflow or Prefect run id.
        force: Run what was asked for even if it is finished; the earlier result is set aside, not lost.
        accept_drift: Stages whose last result is reused although their code or settings have changed; the run is marked.
        dry_run: Only plan: what would be reused, resumed and run, and why.
    """
    asked = Request(
        recipe=recipe,
        overrides=tuple(overrides),
        only=only or None,
        start_from=start_from or None,
        of_run=of_run or None,
        force=force,
        accept_drift=tuple(accept_drift),
    )
    return conduct(asked, dry_run=dry_run)


def conduct(asked: Request, *, dry_run: bool = False) -> Outcome | State | None:
    """Plan and run a request within a flow run. None after a dry run, a Cancelled state when the user ended it."""
    start, home = time.monotonic(), home_folder()
    own(flow_run.id)
    job = prepare(asked, home)
    show_plan(job.steps)
    if dry_run:
        return None
    make_ready([job])
    run = open_job(job, job.whole.variant, kind="recipe" if job.is_whole else "rerun", stage=job.stage)
    handles = given_models(job.recipe)
    try:
        with run.closing():
            for node in job.recipe.nodes:
                handles[node.name] = run_stage(run, node, handles)
            return _close(run, start)
    except (RunCancelled, KeyboardInterrupt) as error:
        return Cancelled(message=str(error) or "Ctrl-C")


def make_ready(jobs: Sequence[Job]) -> None:
    """When there is a stage to run: see that the host has what its grader needs, and start the process that stages are forked from."""
    if nodes := [step.node for job in jobs for step in job.to_run]:
        require_host(nodes)
        warm_up()


def given_models(recipe: Recipe) -> dict[str, Outputs]:
    """Handles of the models that the recipe starts from, fetched when they are not here yet."""
    home = home_folder()
    home.mkdir(parents=True, exist_ok=True)
    handles: dict[str, Outputs] = {}
    for name in models_used(recipe):
        model = find_model(name, recipe.models[name], home, download=True)
        assert model is not None
        handles[name] = {"model": model}
    return handles


def open_job(job: Job, variant: str, **about: Any) -> RecipeRun:
    """Open the record and the tracking run of a job, and name the flow run after it. `about` goes into the record."""
    home, whole = home_folder(), job.whole
    prefect_run, address = str(flow_run.id), url_for("flow-run", flow_run.id)
    tracker = Tracker(os.environ["MLFLOW_TRACKING_URI"], whole.name, home)
    tracker.reap()
    record = open_run(home, whole.name, **_content(job), variant=whole.variant, prefect_run=prefect_run, **about)
    what = f"{record.stage} {variant.replace(f'{record.stage}.', '')}" if record.stage else variant
    shown = what if len(what) <= _NAME_CHARACTERS else f"{len(whole.overrides)} settings changed"
    with get_client(sync_client=True) as client:
        client.update_flow_run(UUID(prefect_run), name=f"{record.id}: {shown}{f', of {record.of_run}' if record.of_run else ''}")
    tracking_run = tracker.start_recipe(
        run=record.id,
        kind=record.kind,
        of_run=record.of_run,
        drift={step.node.name: step.drift for step in job.steps if step.drift},
        variant=what,
        overrides=dict(whole.overrides),
        recipe_yaml=whole.text,
        config_hash=whole.config_hash,
        prefect_url=address,
    )
    record = keep(home, record, mlflow_run=tracking_run)
    return RecipeRun(job, home, tracker, tracking_run, screen(), record, UUID(prefect_run))


def open_part(whole: RecipeRun, job: Job, label: str) -> RecipeRun:
    """Open the record of one variant of an ablation; its stages belong to the ablation's tracking run."""
    about = {"kind": "rerun", "stage": whole.record.stage, "part_of": whole.record.id}
    record = open_run(whole.home, job.whole.name, **_content(job), variant=label, **about)
    return RecipeRun(job, whole.home, whole.tracker, whole.tracking_run, whole.screen, record, whole.flow_run, label)


def _content(job: Job) -> dict[str, Any]:
    """What every record keeps of its job."""
    return {"overrides": dict(job.whole.overrides), "text": job.whole.text, "of_run": job.of.id if job.of else None}


def show_plan(steps: Sequence[Step]) -> None:
    """The plan as a table on the flow run's page."""
    rows = [{"stage": step.node.name, "plan": step.action, "why": step.why} for step in steps]
    create_table_artifact(key="plan", table=rows, description="What will run, and why")


def _close(run: RecipeRun, start: float) -> Outcome:
    """Draw up the tables, hand them to Prefect and MLflow, and remember where they can be seen."""
    name, job = run.job.whole.name, run.job
    table = None if job.request.only else table_of(job.whole, run.results)
    links = {"Prefect run": url_for("flow-run", flow_run.id) or ""}
    figure = table_json = None
    if table is not None:
        figure, table_json = (run.home / "recipes" / f"{name}.{kind}" for kind in ("ablation.png", "ablation.json"))
        figure.parent.mkdir(parents=True, exist_ok=True)
        draw(table, figure)
        write_json(table_json, table.to_json())
        scores = [_scores(row) for row in table.rows]
        create_table_artifact(key="ablation", table=scores, description="Score of every model on every benchmark")
        links["figure"] = str(figure)
    beside = _beside(run)
    if beside is not None:
        show_comparison(run, beside)
    if job.is_whole:
        made = {alias: run.results[node].outputs["model"] for alias, node in job.whole.release.items()}
        if released := {alias: ref for alias, ref in made.items() if isinstance(ref, CheckpointRef)}:
            run.tracker.release(run.tracking_run, released)
    run.tracker.finish_recipe(run.tracking_run, table=table, figure=figure, table_json=table_json, status="FINISHED")
    links |= closing_links(run, first=job.stage)
    spent = totals({name: run.results[name] for name in run.ran}, time.monotonic() - start)
    finish_record(run, links)
    if job.is_whole:
        last = {"variant": job.whole.variant, "links": list(links.items()), "totals": spent._asdict()}
        fingerprints = {node: result.fingerprint for node, result in run.results.items()}
        remember(run.home, name, last={**last, "fingerprints": fingerprints, "table": table.to_json() if table else []})
    return Outcome(run.record.id, table, beside, spent, links)


def closing_links(run: RecipeRun, *, first: str | None) -> dict[str, str]:
    """The MLflow pages of a run: on the flow run's page all of them; returned without the variants of stages, but of the one asked for."""
    pages = run.tracker.links(run.tracking_run)
    own = f"variants of {first}"
    pages = dict(sorted(pages.items(), key=lambda item: item[0] not in ("comparison", own)))
    create_markdown_artifact(
        "\n".join(f"- [{label}]({address})" for label, address in pages.items()), key="links", description="Pages of this run in MLflow"
    )
    shown = {label: address for label, address in pages.items() if label == own or not label.startswith("variants of")}
    return {f"MLflow: {label}": address for label, address in shown.items()}


def finish_record(run: RecipeRun, links: Mapping[str, str]) -> None:
    """Close the record of a run that ended well."""
    run.record = keep(run.home, run.record, status="finished", finished=round(time.time(), 1), links=dict(links))


def _beside(run: RecipeRun) -> Comparison | None:
    """The stage that was run again beside the run that it was taken from; None when there is nothing to compare."""
    stage, of = run.job.stage, run.job.of
    if stage is None or of is None:
        return None
    found: list[Measured] = []
    for record in (of, run.record):
        found += measured(run.home, record, stage, variant=f"{record.id} {record.variant}")
    same = len({item.samples for item in found}) < len(found)
    return None if same or len(found) < 2 else compare(stage, found)


def show_comparison(run: RecipeRun, comparison: Comparison) -> None:
    """The comparison on the flow run's page and in MLflow."""
    rows = [_compared(row) for row in comparison.rows]
    create_table_artifact(key="comparison", table=rows, description=f"Variants of {comparison.stage}; baseline: {comparison.baseline}")
    title = f"Variants of {comparison.stage}, compared with {comparison.baseline}"
    run.tracker.log_comparison(run.tracking_run, comparison.to_json()["rows"], title)


def _compared(row: Line) -> dict[str, str]:
    """A row of a comparison as text, the verdict where it is seen without scrolling."""
    return {
        "variant": row.variant,
        "benchmark": f"{row.benchmark} {row.mode}",
        "pass@1": f"{row.mean:.2f} [{row.low:.2f}, {row.high:.2f}]",
        "change": "" if row.difference is None else f"{row.difference:+.3f} [{row.difference_low:+.3f}, {row.difference_high:+.3f}]",
        "verdict": row.verdict,
        "p": "" if row.p_adjusted is None else f"{row.p_adjusted:.3f}",
        "problems": str(row.n_problems),
        "seeds": str(len(row.seeds)),
        "tokens": f"{row.tokens:,}",
        "seconds": f"{row.seconds:.0f}",
    }


def _scores(row: Row) -> dict[str, str]:
    """A row of the table as text, one column a benchmark and mode."""
    shown = {f"{cell.benchmark} {cell.mode}": f"{cell.mean:.2f} [{cell.low:.2f}, {cell.high:.2f}]" for cell in row.cells}
    return {"stage": row.node, **shown, "tokens": f"{row.tokens:,}", "seconds": f"{row.seconds:.0f}"}


def send_the_rest(timeout_s: float = 10.0) -> None:
    """Send the logs and events that Prefect's threads still hold; once the server is stopped, they would wait for it for a minute."""
    APILogWorker.drain_all(timeout=timeout_s)
    EventsWorker.drain_all(timeout=timeout_s)
