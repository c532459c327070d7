"""The runs of a recipe: opened, pointed to one another and closed. Each function performs one call, live or kept.

Stage runs are flat, so that a filter finds them; an evaluation is nested in the run whose model it scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from mlflow.entities import LoggedModelInput, Metric
from pydantic import TypeAdapter

from flows.tracking import views
from flows.tracking.checkpoints import log_checkpoint, model_of
from flows.tracking.connection import Connection
from flows.tracking.entries import create_run, dataset_input, link, log_batch, metric_name, params, place, point, set_note, user_name
from flows.tracking.forwarder import forward
from flows.tracking.links import write_views
from flows.tracking.outbox import Call
from flows.tracking.scores import attach_scores
from flows.tracking.table import log_table
from stages.artifacts import METRICS, CheckpointRef, DatasetRef, StageResult

_LOG_BYTES = 2_000_000
_INPUTS: TypeAdapter[dict[str, CheckpointRef | DatasetRef]] = TypeAdapter(dict[str, CheckpointRef | DatasetRef])


def start_recipe(connection: Connection, call: Call) -> str:
    """Open a recipe's run, with its text, its overrides and the meaning of its metrics. Returns its id."""
    given, variant = call.arguments, call.arguments["variant"]
    tags = {
        "kind": "recipe",
        "recipe": call.recipe,
        "variant": variant,
        "config_hash": given["config_hash"],
        "owner": given["owner"],
        "mlflow.runColor": _colour(connection, call.recipe, variant),
        "mlflow.user": user_name(),
        "mlflow.source.name": f"posttrain run {call.recipe}",
        **({"prefect": given["prefect_url"]} if given["prefect_url"] else {}),
        **({"mlflow.source.git.commit": given["commit"]} if given["commit"] else {}),
    }
    run = create_run(connection, call, f"{call.recipe}:{variant}", tags)
    log_batch(connection, run, params=params(given["overrides"]))
    connection.client.log_text(run, given["recipe_yaml"], "recipe.yaml")
    connection.client.log_dict(run, views.settings("metrics.yaml"), "metrics_explained.yaml")
    set_note(connection, run, [f"Recipe `{call.recipe}`, variant `{variant}`.", link("Prefect run", given["prefect_url"])])
    return run


def start_stage(connection: Connection, call: Call) -> str:
    """Open a stage's or an evaluation's run, with its settings, inputs and lineage. Returns its id."""
    given = call.arguments
    experiment, inputs = connection.experiment(call.recipe), _INPUTS.validate_python(given["inputs"])
    is_evaluation = given["stage"] == "evaluation"
    models = {name: model_of(connection, call, ref) for name, ref in inputs.items() if isinstance(ref, CheckpointRef)}
    tags = {
        "kind": "eval" if is_evaluation else "stage",
        "stage": place(given["index"], given["node"]),
        "node": given["node"],
        "stage_kind": given["stage"],
        "recipe": call.recipe,
        "recipe_run": given["recipe_run"],
        "variant": given["variant"],
        "fingerprint": given["fingerprint"],
        "owner": given["owner"],
        "mlflow.runColor": _colour(connection, call.recipe, given["variant"]),
        "mlflow.user": user_name(),
        "mlflow.source.name": f"stages/{given['stage']}.py",
        **({"prefect": given["prefect_url"]} if given["prefect_url"] else {}),
    }
    scored = models.get("model") if is_evaluation else None
    if scored and (parent := connection.client.get_logged_model(scored).source_run_id):
        tags["mlflow.parentRunId"] = parent
    run = create_run(connection, call, f"{given['node']}:{given['variant'].replace(given['node'] + '.', '')}", tags)
    log_batch(connection, run, params=params({"stage": given["stage"], "seed": given["seed"], **given["config"]}))
    datasets = [dataset_input(ref, "eval" if is_evaluation else "train") for ref in inputs.values() if isinstance(ref, DatasetRef)]
    known = [LoggedModelInput(model) for model in models.values() if model]
    if datasets or known:
        connection.client.log_inputs(run, datasets=datasets, models=known)
    connection.client.log_dict(run, given["config"], "config.json")
    set_note(
        connection,
        run,
        [
            link("Recipe run", f"#/experiments/{experiment}/runs/{given['recipe_run']}"),
            link("Prefect run", given["prefect_url"]),
            *(f"- {name}: `{ref.name}` ({ref.digest[:12]}), {ref.path}" for name, ref in inputs.items()),
        ],
    )
    point(connection, given["recipe_run"], given["node"], run, is_evaluation=is_evaluation)
    return run


def _colour(connection: Connection, recipe: str, variant: str) -> str:
    """One colour a variant, by the order in which variants appeared."""
    runs = connection.client.search_runs([connection.experiment(recipe)], "tags.kind = 'recipe'", order_by=["attributes.start_time ASC"])
    known = list(dict.fromkeys([*(run.data.tags.get("variant", "") for run in runs), variant]))
    colours: list[str] = views.settings("views.yaml").get("colours", ["#1f77b4"])
    return colours[known.index(variant) % len(colours)]


def finish_stage(connection: Connection, call: Call) -> str:
    """Record what a stage left and close its run. Returns an empty text, as do all that open no run."""
    given = call.arguments
    run, log = given["run_id"], Path(given["log"]) if given["log"] else None
    tags = connection.client.get_run(run).data.tags
    if log is not None:
        forward(connection, run, log.with_name(METRICS))
    if given["result"] is not None:
        result = StageResult.model_validate(given["result"])
        connection.part(partial(_final_metrics, connection, run, result, call.time_ms))
        connection.part(partial(_outputs, connection, run, tags, result, given["recipe_run"]))
        connection.part(partial(connection.client.log_dict, run, given["result"], "result.json"))
        if tags.get("kind") == "eval":
            connection.part(partial(attach_scores, connection, run, tags, result, call.time_ms))
    if log is not None and log.exists():
        text = log.read_bytes()[-_LOG_BYTES:].decode(errors="replace")
        connection.part(partial(connection.client.log_text, run, text, "log.txt"))
    connection.client.set_terminated(run, given["status"], end_time=call.time_ms)
    return ""


def _final_metrics(connection: Connection, run: str, result: StageResult, time_ms: int) -> None:
    """What the live metrics did not already hold, and what the stage cost."""
    live = connection.client.get_run(run).data.metrics
    values = {
        **{metric_name(name): value for name, value in result.metrics.items() if metric_name(name) not in live},
        "cost/seconds": result.seconds,
        "cost/busy_seconds": result.busy_seconds,
        "cost/tokens": float(result.tokens),
        "cost/peak_memory_mib": result.peak_memory_mib,
    }
    log_batch(connection, run, [Metric(name, value, time_ms, 0) for name, value in values.items() if math.isfinite(value)])


def _outputs(connection: Connection, run: str, tags: Mapping[str, str], result: StageResult, recipe_run: str) -> None:
    """Checkpoints as LoggedModels, data sets as inputs of context `output`."""
    written = [dataset_input(ref, "output") for ref in result.outputs.values() if isinstance(ref, DatasetRef)]
    if written:
        connection.client.log_inputs(run, datasets=written)
    models = [log_checkpoint(connection, run, tags, name, ref) for name, ref in result.outputs.items() if isinstance(ref, CheckpointRef)]
    if models:
        connection.client.set_tag(run, "out_model", models[0])
        if recipe_run:
            connection.client.log_inputs(recipe_run, models=[LoggedModelInput(model) for model in models])


def reuse_stage(connection: Connection, call: Call) -> str:
    """Point from a recipe run to a stage run that was finished earlier."""
    given = call.arguments
    tags = connection.client.get_run(given["run_id"]).data.tags
    point(connection, given["recipe_run"], given["node"], given["run_id"], is_evaluation=tags.get("kind") == "eval")
    if (parent := tags.get("mlflow.parentRunId")) and (scored := connection.client.get_run(parent).data.tags).get("stage_kind") == "given":
        point(connection, given["recipe_run"], scored["node"], parent, is_evaluation=False)
    if model := tags.get("out_model"):
        connection.client.log_inputs(given["recipe_run"], models=[LoggedModelInput(model)])
    return ""


def finish_recipe(connection: Connection, call: Call) -> str:
    """Record table and figure, close the recipe's run, write the views."""
    given, run = call.arguments, call.arguments["run_id"]
    if given["rows"]:
        connection.part(partial(log_table, connection, run, call.recipe, given["rows"], call.time_ms))
    for file, folder in ((given["figure"], None), (given["table_json"], "table")):
        if file and Path(file).exists():
            connection.part(partial(connection.client.log_artifact, run, file, folder))
    connection.client.set_terminated(run, given["status"], end_time=call.time_ms)
    connection.part(partial(write_views, connection, call.recipe))
    return ""
