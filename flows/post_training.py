"""The recipe as one flow: one call a stage, each taking handles that earlier calls returned. Read this first.

A recipe (`flows/recipes/*.yaml`) says which stages there are and what each reads. A handle names an
artifact in the folder of the stage that made it; nothing else travels between stages.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import NamedTuple

from prefect import flow
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.runtime import flow_run
from prefect.utilities.urls import url_for

from flows.ablation import AblationTable, Row, draw
from flows.launch import warm_up
from flows.plan import Outputs, Step, find_model, home_folder, make_plan, remember
from flows.recipe import Recipe, load_recipe
from flows.stage import RecipeRun, run_stage
from flows.summary import Totals, table_of, totals
from flows.terminal import screen
from flows.tracking import Tracker
from stages.artifacts import write_json


class Outcome(NamedTuple):
    """What a recipe run leaves: its table (None without evaluations), what it cost, and the pages that show it."""

    table: AblationTable | None
    totals: Totals
    links: Mapping[str, str]


def _run_name() -> str:
    given = flow_run.parameters
    return ":".join(filter(None, [given["recipe"], given.get("stage"), ",".join(given.get("overrides") or []) or "default"]))


@flow(name="post-training", flow_run_name=_run_name, persist_result=False)
def post_training(recipe: str = "tiny", overrides: list[str] | None = None, stage: str | None = None) -> Outcome:
    """Run a recipe from its first stage to its ablation table; what is finished already is reused.

    1. Plan: what will be reused, resumed and run, and why.
    2. Every stage in recipe order, in a process of its own, with the handles that it reads.
    3. The ablation table: every model that was made, scored on every benchmark.

    Args:
        recipe: Name of a recipe that comes with posttrain, or path of your own YAML file.
        overrides: Settings to change, each `stage.key=value`, for instance `reasoning_rl.learning_rate=1e-4`.
        stage: Only this stage and what it needs; the whole recipe when left out.
    """
    start = time.monotonic()
    run, handles, plan = _open(load_recipe(recipe, overrides or []), stage)
    create_table_artifact(key="plan", table=plan, description="What will run, and why")
    with run.closing():
        for node in run.nodes:
            handles[node.name] = run_stage(run, node, handles)
        return _close(run, start)


def _open(recipe: Recipe, stage: str | None) -> tuple[RecipeRun, dict[str, Outputs], list[dict[str, str]]]:
    """Plan the recipe, fetch the models that it starts from, and open its tracking run."""
    home = home_folder()
    wanted = recipe.upto(stage) if stage else recipe
    steps = make_plan(wanted, home)
    if any(step.action != "reuse" for step in steps):
        warm_up()
    home.mkdir(parents=True, exist_ok=True)
    needed = {source.node for node in wanted.nodes for source in node.inputs.values() if source.output is None}
    handles: dict[str, Outputs] = {}
    for name in needed:
        model = find_model(name, recipe.models[name], home, download=True)
        assert model is not None
        handles[name] = {"model": model}
    tracker = Tracker(os.environ["MLFLOW_TRACKING_URI"], recipe.name, home)
    tracker.reap()
    tracking_run = tracker.start_recipe(
        variant=f"{recipe.variant} (only {stage})" if stage else recipe.variant,
        overrides=dict(recipe.overrides),
        recipe_yaml=recipe.text,
        config_hash=recipe.config_hash,
        prefect_url=url_for("flow-run", flow_run.id),
    )
    return RecipeRun(recipe, wanted.nodes, home, tracker, tracking_run, screen(), stage), handles, [_row(step) for step in steps]


def _close(run: RecipeRun, start: float) -> Outcome:
    """Draw up the table, hand it to Prefect and MLflow, and remember where it can be seen."""
    name, table = run.recipe.name, None if run.only else table_of(run.recipe, run.results)
    links = {"Prefect run": url_for("flow-run", flow_run.id) or ""}
    figure = table_json = None
    if table is not None:
        figure, table_json = (run.home / "recipes" / f"{name}.{kind}" for kind in ("ablation.png", "ablation.json"))
        draw(table, figure)
        write_json(table_json, table.to_json())
        scores = [_scores(row) for row in table.rows]
        create_table_artifact(key="ablation", table=scores, description="Score of every model on every benchmark")
        links["figure"] = str(figure)
    run.tracker.finish_recipe(run.tracking_run, table=table, figure=figure, table_json=table_json, status="FINISHED")
    links |= {f"MLflow: {label}": address for label, address in run.tracker.links(run.tracking_run).items()}
    create_markdown_artifact("\n".join(f"- [{label}]({address})" for label, address in links.items()), key="links")
    spent = totals({name: run.results[name] for name in run.ran}, time.monotonic() - start)
    if not run.only:
        last = {"variant": run.recipe.variant, "links": list(links.items()), "totals": spent._asdict()}
        fingerprints = {node: result.fingerprint for node, result in run.results.items()}
        remember(run.home, name, last={**last, "fingerprints": fingerprints, "table": table.to_json() if table else []})
    return Outcome(table, spent, links)


def _scores(row: Row) -> dict[str, str]:
    """A row of the table as text, one column a benchmark and mode."""
    shown = {f"{cell.benchmark} {cell.mode}": f"{cell.mean:.2f} [{cell.low:.2f}, {cell.high:.2f}]" for cell in row.cells}
    return {"stage": row.node, **shown, "tokens": f"{row.tokens:,}", "seconds": f"{row.seconds:.0f}"}


def send_the_rest(timeout_s: float = 10.0) -> None:
    """Send the logs and events that Prefect's threads still hold; once the server is stopped, they would wait for it for a minute."""
    APILogWorker.drain_all(timeout=timeout_s)
    EventsWorker.drain_all(timeout=timeout_s)


def _row(step: Step) -> dict[str, str]:
    return {"stage": step.node.name, "plan": step.action, "why": step.why}
