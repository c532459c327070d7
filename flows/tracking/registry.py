"""Released checkpoints: one registered model a recipe, a version a checkpoint, and aliases that protect it from being freed."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.utils.file_utils import local_file_uri_to_path
from pydantic import TypeAdapter

from flows.tracking.checkpoints import model_of
from flows.tracking.connection import Connection, every
from flows.tracking.entries import add_to_note, link
from flows.tracking.outbox import Call
from stages.artifacts import CheckpointRef

_MODELS: TypeAdapter[dict[str, CheckpointRef]] = TypeAdapter(dict[str, CheckpointRef])
_SOURCE = "models:/"


def release(connection: Connection, call: Call) -> str:
    """Give each checkpoint a version, or find the one it has, and set the aliases. Returns an empty text."""
    name, recipe_run = call.recipe, call.arguments["recipe_run"]
    _registered(connection, name)
    for alias, ref in _MODELS.validate_python(call.arguments["models"]).items():
        connection.part(partial(_release, connection, call, alias, ref))
    connection.client.set_tag(recipe_run, "registry", name)
    return ""


def _release(connection: Connection, call: Call, alias: str, ref: CheckpointRef) -> None:
    version = _version(connection, call, ref)
    connection.client.set_registered_model_alias(call.recipe, alias, version)
    page = f"#/models/{call.recipe}/versions/{version}?workflowType=machine_learning"
    add_to_note(connection, call.arguments["recipe_run"], "Released", link(f"{alias}: {ref.name}", page))


def _registered(connection: Connection, name: str) -> None:
    """Make the recipe's registered model unless it is there."""
    about = (
        f"Checkpoints that runs of recipe `{name}` released, a version each. Aliases point to the newest release; "
        "`posttrain gc` never frees a checkpoint that has one."
    )
    try:
        connection.client.create_registered_model(name, description=about, tags={"recipe": name})
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _version(connection: Connection, call: Call, ref: CheckpointRef) -> str:
    """The version with the checkpoint's content; made when there is none."""
    client, name, recipe_run = connection.client, call.recipe, call.arguments["recipe_run"]
    if found := client.search_model_versions(f"name = '{name}' AND tags.digest = '{ref.digest}'", max_results=1):
        return str(found[0].version)
    logged = model_of(connection, call, ref)
    if logged.model is None:
        raise MlflowException(f"{ref.name} ({ref.digest[:12]}) is not among the checkpoints of experiment {name}, so it gets no version")
    model, run = client.get_logged_model(logged.model), client.get_run(recipe_run)
    tags = {
        "recipe_run": recipe_run,
        "run": run.data.tags.get("run", ""),
        "variant": run.data.tags.get("variant", ""),
        "node": model.tags.get("node", ""),
        "digest": ref.digest,
    }
    made = client.create_model_version(
        name,
        source=f"{_SOURCE}{logged.model}",
        run_id=logged.maker,
        tags=tags,
        description=f"{ref.name} of {run.info.run_name}",
        model_id=logged.model,
        await_creation_for=0,
    )
    return str(made.version)


def aliased(connection: Connection) -> frozenset[str]:
    """Digests of all checkpoints that have an alias in any registered model, or will have one when kept calls are sent.

    Raises MlflowException when one cannot be read.
    """
    kept = [call.arguments["models"] for call in connection.outbox.calls() if call.name == "release"]
    digests = {str(ref["digest"]) for models in kept for ref in models.values()}
    for model in every(lambda token: connection.client.search_registered_models(page_token=token)):
        for version in set(model.aliases.values()):
            digests.add(_digest(connection, connection.client.get_model_version(model.name, version)))
    return frozenset(filter(None, digests))


def _digest(connection: Connection, version: ModelVersion) -> str:
    """The content of a version: its tag, or that of the LoggedModel it was made from by hand; empty for other models."""
    if digest := version.tags.get("digest"):
        return str(digest)
    if not str(version.source).startswith(f"{_SOURCE}m-"):
        return ""
    try:
        return str(connection.client.get_logged_model(str(version.source).removeprefix(_SOURCE)).tags.get("digest", ""))
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return ""  # deleted by hand; there is nothing left to keep


def forget(connection: Connection, digests: Iterable[str]) -> int:
    """Delete the LoggedModels of this home with these contents, their files and their versions; none with an alias. Returns bytes freed."""
    kept, freed = aliased(connection), 0
    if not (experiments := connection.own_experiments()):
        return 0
    for digest in dict.fromkeys(digests):
        if digest in kept:
            continue
        models = connection.client.search_logged_models(experiments, filter_string=f"tags.digest = '{digest}'")
        for model in models:
            freed += _delete_files(connection.home, model.artifact_location)  # first, so that a kill in between leaves none behind
            for version in connection.client.search_model_versions(f"source_path = '{_SOURCE}{model.model_id}'"):
                connection.client.delete_model_version(version.name, version.version)
            connection.client.delete_logged_model(model.model_id)
    return freed


def _delete_files(home: Path, location: str) -> int:
    """Delete a checkpoint's folder in the home's store. Returns the bytes that no other hard link keeps."""
    if not location.startswith(("file:", "/")):
        return 0
    folder, store = Path(local_file_uri_to_path(location)).resolve(), (home / "artifacts").resolve()
    if not folder.is_dir() or not folder.is_relative_to(store) or folder == store:
        return 0
    sizes = [status.st_size for file in folder.rglob("*") if file.is_file() and (status := file.lstat()).st_nlink == 1]
    shutil.rmtree(folder)
    return sum(sizes)
