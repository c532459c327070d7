"""Checkpoints as LoggedModels. Where the store is a folder of this machine, ours are hard-linked in place, given ones copied."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mlflow.entities import LoggedModelOutput
from mlflow.utils.file_utils import local_file_uri_to_path

from flows.tracking.connection import Connection
from flows.tracking.entries import close_run, create_run, place, point, user_name
from flows.tracking.outbox import Call
from stages.artifacts import CheckpointRef


class Logged(NamedTuple):
    """A checkpoint in MLflow: its LoggedModel and the run that made it; None for what is not there."""

    model: str | None
    maker: str | None


def model_of(connection: Connection, call: Call, ref: CheckpointRef) -> Logged:
    """The LoggedModel with this content. A model that was given, not made, gets a run of its own the first time."""
    found = connection.client.search_logged_models(
        [connection.experiment(call.recipe)], filter_string=f"tags.digest = '{ref.digest}'", max_results=1
    )
    if found:
        model, maker = str(found[0].model_id), found[0].source_run_id
    elif ref.producer != "given":
        return Logged(None, None)
    else:
        tags = {
            "kind": "stage",
            "stage": place(0, ref.name),
            "node": ref.name,
            "stage_kind": "given",
            "recipe": call.recipe,
            "variant": "given",
            "fingerprint": ref.digest,
            "mlflow.user": user_name(),
            "mlflow.source.name": str(ref.path),
            "mlflow.note.content": f"Model that the recipe starts from: {ref.path}",
            "mlflow.runColor": "#7f7f7f",
        }
        maker = create_run(connection, call, ref.name, tags)
        model = log_checkpoint(connection, maker, tags, "model", ref)
        connection.client.set_tag(maker, "out_model", model)
        close_run(connection, maker, "FINISHED", call.time_ms)
    if ref.producer == "given" and maker:
        point(connection, call.arguments["recipe_run"], ref.name, maker, is_evaluation=False)
    return Logged(model, maker)


def log_checkpoint(connection: Connection, run: str, tags: Mapping[str, str], output: str, ref: CheckpointRef) -> str:
    """Make a LoggedModel of a checkpoint. It is there, as failed, even when its files cannot be stored: runs keep their lineage."""
    experiment = connection.client.get_run(run).info.experiment_id
    same = f"source_run_id = '{run}' AND tags.digest = '{ref.digest}' AND status = 2"  # 2 is READY; the word matches nothing
    if found := connection.client.search_logged_models([experiment], filter_string=same, max_results=1):
        return str(found[0].model_id)
    label = tags["node"] if output in ("model", tags["node"]) else f"{tags['node']}-{output}"
    variant = "" if tags["stage_kind"] == "given" else f"-{tags['variant']}"
    model = connection.client.create_logged_model(
        experiment,
        name=re.sub(r"[/:.%\"']", "_", tags.get("label") or label + variant),
        source_run_id=run,
        model_type="checkpoint",
        tags={
            "node": tags["node"],
            "stage": tags["stage"],
            "variant": tags["variant"],
            "recipe": tags["recipe"],
            "fingerprint": tags["fingerprint"],
            "digest": ref.digest,
            "path": str(ref.path),
        },
    )
    if model.artifact_location.startswith(("file:", "/")):
        stored = connection.part(partial(_store, ref, Path(local_file_uri_to_path(model.artifact_location))))
    else:
        stored = connection.part(partial(connection.client.log_model_artifacts, model.model_id, str(ref.path)))
    connection.client.log_outputs(run, [LoggedModelOutput(model.model_id, 0)])
    connection.client.finalize_logged_model(model.model_id, "READY" if stored else "FAILED")
    return str(model.model_id)


def _store(ref: CheckpointRef, target: Path) -> None:
    """Put a checkpoint's files into the store, for reading only. The files of a given model belong to the user: they are copied."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(ref.path, target, copy_function=shutil.copy2 if ref.producer == "given" else _link, dirs_exist_ok=True)
    for file in target.rglob("*"):
        if file.is_file():
            file.chmod(0o444)


def _link(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # another device, or a file system without links
        shutil.copy2(source, target)
