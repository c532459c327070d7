"""What every run is made of: batches of metrics, tags and params, notes with links, pointers, data sets, and their names."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from getpass import getuser
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag

from flows.tracking.connection import Connection
from flows.tracking.outbox import Call
from stages.artifacts import DatasetRef

BATCH = 900
"""Most metrics in one request (MLflow takes 1000)."""
_PARAMS = 100
_PARAM_CHARACTERS = 500
_DIGEST_CHARACTERS = 32
_NOTE = "mlflow.note.content"
_BREAK, _AFTER_TABLE = "  \n", "\n\n"
_LINKS_IN_NOTE = 12
_SECRET_NAME = re.compile(r"TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIAL|(^|_)KEY$|AUTH_STRING")
_SECRET_CHARACTERS = 6
"""Shorter values are words that a text may hold by chance."""


def create_run(connection: Connection, call: Call, name: str, tags: Mapping[str, str]) -> str:
    """Open a run in the experiment of the call's recipe, from the time of the call. Returns its id.

    A call that is sent again finds the run that it opened before MLflow went away.
    """
    experiment, opened = connection.experiment(call.recipe), re.sub(r"[^\w.]", "_", name)
    mark = f"{call.run} {opened}"
    if found := _opened_by(connection, experiment, mark):
        return found[0]
    run = connection.client.create_run(experiment, start_time=call.time_ms, tags={**tags, "call": mark}, run_name=name)
    return str(run.info.run_id)


def close_run(connection: Connection, run: str, status: str, time_ms: int) -> None:
    """Set a run's end. A hung server may have taken one request to open it several times: the empty twins are deleted."""
    connection.client.set_terminated(run, status, end_time=time_ms)
    found = connection.client.get_run(run)
    if mark := found.data.tags.get("call"):
        for twin in _opened_by(connection, found.info.experiment_id, mark):
            if twin != run:
                connection.client.delete_run(twin)


def _opened_by(connection: Connection, experiment: str, mark: str) -> list[str]:
    return [str(run.info.run_id) for run in connection.client.search_runs([experiment], f"tags.call = '{mark}'", max_results=20)]


def log_batch(
    connection: Connection, run: str, metrics: Sequence[Metric] = (), tags: Mapping[str, str] | None = None, params: Sequence[Param] = ()
) -> str:
    """Log metrics, tags and params in pieces that MLflow takes. Returns the run id."""
    pieces = max(1, math.ceil(len(metrics) / BATCH), math.ceil(len(params) / _PARAMS))
    for i in range(pieces):
        connection.client.log_batch(
            run,
            metrics=metrics[i * BATCH : (i + 1) * BATCH],
            params=params[i * _PARAMS : (i + 1) * _PARAMS],
            tags=[RunTag(key, value) for key, value in (tags or {}).items()],
        )
    return run


def set_note(connection: Connection, run: str, lines: Iterable[str]) -> None:
    """The text on a run's page, in Markdown: links, sentences, a table. Empty ones are left out.

    The page shows its first three or so, so lines break without a gap; only a table needs an empty line behind it.
    """
    shown = list(filter(None, lines))
    text = "".join(f"{line}{_AFTER_TABLE if line.startswith('|') else _BREAK}" for line in shown)
    connection.client.set_tag(run, _NOTE, text.strip())


def note(connection: Connection, run: str) -> list[str]:
    """The lines of a run's note; a table is one."""
    text = connection.client.get_run(run).data.tags.get(_NOTE, "")
    return re.split(f"{_AFTER_TABLE}|{_BREAK}", text) if text else []


def add_to_note(connection: Connection, run: str, head: str, linked: str) -> None:
    """Put a link behind `head` ("Read by") in a run's note, once; of many the newest stay."""
    lines = note(connection, run)
    if not linked or any(linked in line for line in lines):
        return
    at = next((i for i, line in enumerate(lines) if line.startswith(f"{head} ")), len(lines))
    before = lines[at].removeprefix(f"{head} ").split(" · ") if at < len(lines) else []
    set_note(connection, run, [*lines[:at], f"{head} {' · '.join([*before, linked][-_LINKS_IN_NOTE:])}", *lines[at + 1 :]])


def run_page(experiment: str, run: str | None) -> str | None:
    """Address of a run's page within MLflow; None without a run."""
    return f"#/experiments/{experiment}/runs/{run}?workflowType=machine_learning" if run else None


def model_page(experiment: str, model: str) -> str:
    """Address of a checkpoint's page within MLflow."""
    return f"#/experiments/{experiment}/models/{model}?workflowType=machine_learning"


def point(connection: Connection, recipe_run: str, node: str, run: str, *, is_evaluation: bool) -> None:
    """Name a stage's or an evaluation's run on the recipe run that it is part of."""
    if recipe_run:
        connection.client.set_tag(recipe_run, f"{'eval' if is_evaluation else 'stage'}_run.{node}", run)


def dataset_input(ref: DatasetRef, context: str) -> DatasetInput:
    """A data set with our own digest, as an input of that context."""
    dataset = Dataset(
        name=ref.name,
        digest=ref.digest[:_DIGEST_CHARACTERS],
        source_type="local",
        source=json.dumps({"uri": ref.path.as_uri()}),
        profile=json.dumps({"rows": ref.rows}),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", context)])


def params(config: Mapping[str, Any]) -> list[Param]:
    """Scalars of a nested config under dotted names; lists as JSON."""
    flat: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and (value or not prefix):
            for key, part in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), part)
        else:
            flat[metric_name(prefix)] = (json.dumps(value) if isinstance(value, list | tuple | Mapping) else str(value))[:_PARAM_CHARACTERS]

    walk("", config)
    return [Param(key, value) for key, value in flat.items()]


def metric_name(metric: str) -> str:
    """A name that MLflow takes: letters, digits and `_ - . space : /`, at most 250."""
    return re.sub(r"[^\w\-. :/]", "_", metric)[:250]


def place(index: int, node: str) -> str:
    """Value of the `stage` tag: sorts in recipe order."""
    return f"{index:02d}-{node}"


def link(label: str, url: str | None) -> str:
    """A Markdown link; empty without an address."""
    return f"[{label}]({url})" if url else ""


def without_secrets(text: str) -> str:
    """The text without the values of environment variables that hold a password, a token or a key."""
    values = {value for name, value in os.environ.items() if len(value) >= _SECRET_CHARACTERS and _SECRET_NAME.search(name.upper())}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "***")
    return text


def user_name() -> str:
    """Who runs this, for MLflow's column of users."""
    try:
        return getuser()
    except (KeyError, OSError):
        return "unknown"


def now_ms() -> int:
    """Milliseconds since 1970, as MLflow counts time."""
    return int(time.time() * 1000)
