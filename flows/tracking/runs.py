"""The runs of a recipe: opened, pointed to one another and closed. Each function performs one call, live or kept.

Stage runs are flat, so that a filter finds them; an evaluation is nested in the run whose model it scores.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from mlflow.entities import LoggedModelInput, Metric
from pydantic import TypeAdapter

from flows.owner import is_gone
from flows.tracking import views
from flows.tracking.checkpoints import Logged, log_checkpoint, model_of
from flows.tracking.connection import SAMPLES, Connection, every
from flows.tracking.entries import (
    add_to_note,
    close_run,
    create_run,
    dataset_input,
    link,
    log_batch,
    metric_name,
    model_page,
    params,
    place,
    point,
    run_page,
    set_note,
    user_name,
    without_secrets,
)
from flows.tracking.forwarder import forward
from flows.tracking.links import write_views
from flows.tracking.outbox import Call
from flows.tracking.scores import attach_scores
from flows.tracking.table import log_columns, log_table
from stages.artifacts import METRICS, REPORT, CheckpointRef, DatasetRef, StageResult

_LOG_BYTES = 2_000_000
_TABLE_ROWS = 1_000
_VARIANTS = "posttrain.variants"
_VARIANTS_KEPT = 400
_MARK_CHARACTERS = 8
_TITLES = {"recipe": "Recipe", "rerun": "Rerun of a stage of recipe", "ablation": "Ablation of a stage of recipe"}
_INPUTS: TypeAdapter[dict[str, CheckpointRef | DatasetRef]] = TypeAdapter(dict[str, CheckpointRef | DatasetRef])


def start_recipe(connection: Connection, call: Call) -> str:
    """Open a recipe's run, with its text, its overrides and the meaning of its metrics. Returns its id."""
    given, variant, kind = call.arguments, call.arguments["variant"], call.arguments["kind"]
    run_of_what = given["run"] or call.recipe
    tags = {
        "kind": kind,
        "run": given["run"],
        "of_run": given["of_run"],
        "recipe": call.recipe,
        "variant": variant,
        "config_hash": given["config_hash"],
        "owner": given["owner"],
        "mlflow.runColor": _colour(connection, call.recipe, variant),
        "mlflow.user": user_name(),
        "mlflow.source.name": f"posttrain run {call.recipe}",
        "prefect": given["prefect_url"],
        "mlflow.source.git.commit": given["commit"],
        **{f"drift.{stage}": why for stage, why in given["drift"].items()},
    }
    what = run_of_what if kind == "recipe" else " ".join(filter(None, [run_of_what, kind, given["of_run"] and f"of {given['of_run']}"]))
    run = create_run(connection, call, f"{what}:{variant}", {name: text for name, text in tags.items() if text})
    log_batch(connection, run, params=params(given["overrides"]))
    connection.client.log_text(run, given["recipe_yaml"], "recipe.yaml")
    connection.client.log_dict(run, views.settings("metrics.yaml"), "metrics_explained.yaml")
    drifted = [f"`{stage}` was reused in spite of a change: {why}." for stage, why in given["drift"].items()]
    about = f"{_TITLES[kind]} `{call.recipe}`{f' ({what})' if given['run'] else ''}, variant `{variant}`."
    set_note(connection, run, [" ".join([about, link("Prefect run", given["prefect_url"])]).strip(), *drifted])
    return run


def start_stage(connection: Connection, call: Call) -> str:
    """Open a stage's or an evaluation's run, with its settings, inputs and lineage. Returns its id."""
    given = call.arguments
    inputs = _INPUTS.validate_python(given["inputs"])
    is_evaluation = given["stage"] == "evaluation"
    logged = {name: _logged(connection, call, ref) for name, ref in inputs.items()}
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
        **({"label": given["label"]} if given["label"] else {}),
        **({"prefect": given["prefect_url"]} if given["prefect_url"] else {}),
    }
    scored = logged.get("model") if is_evaluation else None
    if scored and scored.maker:
        tags["mlflow.parentRunId"] = scored.maker
    name = given["label"] or f"{given['node']}:{given['variant'].replace(given['node'] + '.', '')}"
    run = create_run(connection, call, name, tags)
    log_batch(connection, run, params=params({"stage": given["stage"], "seed": given["seed"], **given["config"]}))
    datasets = [dataset_input(ref, "eval" if is_evaluation else "train") for ref in inputs.values() if isinstance(ref, DatasetRef)]
    known = [LoggedModelInput(found.model) for found in logged.values() if found.model]
    if datasets or known:
        connection.client.log_inputs(run, datasets=datasets, models=known)
    connection.client.log_dict(run, given["config"], "config.json")
    _note_lineage(connection, call, run, name, logged)
    point(connection, given["recipe_run"], given["node"], run, is_evaluation=is_evaluation)
    return run


def _logged(connection: Connection, call: Call, ref: CheckpointRef | DatasetRef) -> Logged:
    """An input's model in MLflow, if it is one, and the run that made it."""
    if isinstance(ref, CheckpointRef):
        return model_of(connection, call, ref)
    found = connection.client.search_runs(
        [connection.experiment(call.recipe)],
        f"tags.fingerprint = '{ref.producer}'",
        order_by=["attributes.end_time DESC"],
        max_results=1,
    )
    return Logged(None, str(found[0].info.run_id) if found else None)


def _note_lineage(connection: Connection, call: Call, run: str, name: str, logged: Mapping[str, Logged]) -> None:
    """The run's note, with a link to the maker of each input; a link back in the note of each maker."""
    given, experiment = call.arguments, connection.experiment(call.recipe)
    parts = [link("Recipe run", run_page(experiment, given["recipe_run"])), link("Prefect run", given["prefect_url"])]
    reads = []
    for key, ref in given["inputs"].items():
        label = ref["name"] if key in ref["name"] else f"{key}: {ref['name']}"
        reads.append(link(label, run_page(experiment, logged[key].maker)) or f"{label} ({ref['digest'][:12]})")
    heading = "Scores" if given["stage"] == "evaluation" else "Reads"
    set_note(connection, run, [" · ".join(filter(None, parts)), f"{heading} {' · '.join(reads)}" if reads else ""])
    if given["stage"] != "evaluation":
        for maker in dict.fromkeys(found.maker for found in logged.values() if found.maker):
            add_to_note(connection, maker, "Read by", link(name, run_page(experiment, run)))


def _colour(connection: Connection, recipe: str, variant: str) -> str:
    """One colour a variant, by the order in which variants appeared; that order is a tag of the experiment."""
    experiment = connection.experiment(recipe)
    known: list[str] = json.loads(connection.client.get_experiment(experiment).tags.get(_VARIANTS, "[]"))
    mark = hashlib.sha256(variant.encode()).hexdigest()[:_MARK_CHARACTERS]
    if mark not in known:
        known.append(mark)
        if len(known) <= _VARIANTS_KEPT:
            connection.client.set_experiment_tag(experiment, _VARIANTS, json.dumps(known))
    colours: list[str] = views.settings("views.yaml").get("colours", ["#1f77b4"])
    return colours[known.index(mark) % len(colours)]


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
            connection.part(partial(_note_evaluated, connection, run, tags))
    for file in sorted((log.parent / REPORT).glob("*")) if log is not None else ():
        connection.part(partial(_report, connection, run, file))
    if log is not None and log.exists():
        text = without_secrets(log.read_bytes()[-_LOG_BYTES:].decode(errors="replace"))
        connection.part(partial(connection.client.log_text, run, text, "log.txt"))
    close_run(connection, run, given["status"], call.time_ms)
    return ""


def _report(connection: Connection, run: str, file: Path) -> None:
    """A file of a stage's report; the first rows of a Parquet file as a table that the page can show."""
    if file.suffix != ".parquet":
        connection.client.log_artifact(run, str(file), REPORT)
        return
    from pyarrow import parquet

    with parquet.ParquetFile(file) as rows:
        for batch in rows.iter_batches(_TABLE_ROWS):
            log_columns(connection, run, f"{REPORT}/{file.stem}.json", batch.to_pydict())
            break


def _note_evaluated(connection: Connection, run: str, tags: Mapping[str, str]) -> None:
    """A link to a finished evaluation in the note of the run that made the checkpoint."""
    if parent := tags.get("mlflow.parentRunId"):
        info = connection.client.get_run(run).info
        add_to_note(connection, parent, "Evaluated by", link(info.run_name, run_page(info.experiment_id, run)))


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
    made = {name: ref for name, ref in result.outputs.items() if isinstance(ref, CheckpointRef)}
    models = [log_checkpoint(connection, run, tags, name, ref) for name, ref in made.items()]
    experiment = connection.client.get_run(run).info.experiment_id
    for ref, model in zip(made.values(), models, strict=True):
        add_to_note(connection, run, "Checkpoint", link(ref.name, model_page(experiment, model)))
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
        connection.part(partial(connection.client.log_inputs, given["recipe_run"], models=[LoggedModelInput(model)]))
    return ""


def finish_recipe(connection: Connection, call: Call) -> str:
    """Record table and figure, close the recipe's run, write the views."""
    given, run = call.arguments, call.arguments["run_id"]
    if given["rows"]:
        connection.part(partial(log_table, connection, run, call.recipe, given["rows"], call.time_ms))
    for file, folder in ((given["figure"], None), (given["table_json"], "table")):
        if file and Path(file).exists():
            connection.part(partial(connection.client.log_artifact, run, file, folder))
    close_run(connection, run, given["status"], call.time_ms)
    connection.part(partial(write_views, connection, call.recipe))
    return ""


def close_dead_runs(connection: Connection, call: Call) -> str:
    """Close the recipe's runs that claim to run although their process on this machine is gone."""
    found = [connection.find_experiment(name) for name in (call.recipe, f"{call.recipe}{SAMPLES}")]
    close_dead(connection, [identity for identity, active in filter(None, found) if active])
    return ""


def close_dead(connection: Connection, experiments: Sequence[str]) -> None:
    """Close the runs of these experiments that claim to run although their process on this machine is gone."""
    client, running = connection.client, "attributes.status = 'RUNNING'"
    claimed = list(every(lambda token: client.search_runs(experiments, running, page_token=token))) if experiments else []
    for run in claimed:
        if not is_gone(run.data.tags.get("owner", "")):
            continue
        run = client.get_run(run.info.run_id)
        if run.info.status == "RUNNING":  # it may have been finished since it was found
            last = max([metric.timestamp for metric in run.data._metric_objs] + [run.info.start_time])
            client.set_terminated(run.info.run_id, "KILLED", end_time=last)
