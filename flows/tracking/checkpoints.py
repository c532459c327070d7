"""Checkpoints as LoggedModels, in place: hard links where the store is a folder of this machine."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from mlflow.entities import LoggedModelOutput
from mlflow.exceptions import MlflowException
from mlflow.utils.file_utils import local_file_uri_to_path

from flows.tracking.connection import Connection
from flows.tracking.entries import create_run, place, point, user_name
from flows.tracking.outbox import Call
from stages.artifacts import CheckpointRef


def model_of(connection: Connection, call: Call, ref: CheckpointRef) -> str | None:
    """The LoggedModel with this content. A model that was given, not made, gets a run of its own the first time."""
    experiment = connection.experiment(call.recipe)
    found = connection.client.search_logged_models([experiment], filter_string=f"tags.digest = '{ref.digest}'", max_results=1)
    if found:
        model, maker = str(found[0].model_id), found[0].source_run_id
    elif ref.producer != "given":
        return None
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
        connection.client.set_terminated(maker, "FINISHED", end_time=call.time_ms)
    if ref.producer == "given" and maker:
        point(connection, call.arguments["recipe_run"], ref.name, maker, is_evaluation=False)
    return model


def log_checkpoint(connection: Connection, run: str, tags: Mapping[str, str], output: str, ref: CheckpointRef) -> str:
    """Make a LoggedModel of a checkpoint: hard links where the store is a folder of this machine, else a copy through the server."""
    experiment = connection.client.get_run(run).info.experiment_id
    same = f"source_run_id = '{run}' AND tags.digest = '{ref.digest}' AND status = 2"  # 2 is READY; the word matches nothing
    if found := connection.client.search_logged_models([experiment], filter_string=same, max_results=1):
        return str(found[0].model_id)
    label = tags["node"] if output in ("model", tags["node"]) else f"{tags['node']}-{output}"
    variant = "" if tags["stage_kind"] == "given" else f"-{tags['variant']}"
    model = connection.client.create_logged_model(
        experiment,
        name=re.sub(r"[/:.%\"']", "_", label + variant),
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
    try:
        if model.artifact_location.startswith(("file:", "/")):
            _link_folder(ref.path, Path(local_file_uri_to_path(model.artifact_location)))
        else:
            connection.client.log_model_artifacts(model.model_id, str(ref.path))
    except (MlflowException, OSError):
        connection.client.finalize_logged_model(model.model_id, "FAILED")
        raise
    connection.client.log_outputs(run, [LoggedModelOutput(model.model_id, 0)])
    connection.client.finalize_logged_model(model.model_id, "READY")
    return str(model.model_id)


def _link_folder(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    same_device = source.stat().st_dev == target.parent.stat().st_dev
    shutil.copytree(source, target, copy_function=os.link if same_device else shutil.copy2, dirs_exist_ok=True)
    for file in target.rglob("*"):
        if file.is_file():
            file.chmod(0o444)
