"""What every run is made of: batches of metrics, tags and params, notes, pointers, data sets, and their names."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from getpass import getuser
from pathlib import Path
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


def create_run(connection: Connection, call: Call, name: str, tags: Mapping[str, str]) -> str:
    """Open a run in the experiment of the call's recipe, from the time of the call. Returns its id."""
    run = connection.client.create_run(connection.experiment(call.recipe), start_time=call.time_ms, tags=dict(tags), run_name=name)
    return str(run.info.run_id)


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


def set_note(connection: Connection, run: str, paragraphs: Iterable[str]) -> None:
    """The text on a run's page, in Markdown; empty paragraphs are left out."""
    connection.client.set_tag(run, "mlflow.note.content", "\n\n".join(filter(None, paragraphs)))


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


def process_identity(like: str = "") -> str:
    """`host:pid:start` of this process, or of the process that the text names; other text when that process is gone."""
    pid = like.split(":")[1] if like else str(os.getpid())
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = "gone"
    return f"{socket.gethostname()}:{pid}:{started}"


def user_name() -> str:
    """Who runs this, for MLflow's column of users."""
    try:
        return getuser()
    except (KeyError, OSError):
        return "unknown"


def now_ms() -> int:
    """Milliseconds since 1970, as MLflow counts time."""
    return int(time.time() * 1000)
