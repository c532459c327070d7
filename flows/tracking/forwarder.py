"""A stage's `metrics.jsonl`, sent to its run while it grows. How far it went is kept beside it, so that the rest can be sent later."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from mlflow.entities import Metric

from flows.tracking.connection import Connection
from flows.tracking.entries import BATCH, log_batch, metric_name
from stages.artifacts import write_json

EVERY_S = 3.0
FORWARDED = "forwarded.json"
"""File beside `metrics.jsonl`: the run that it goes to and the offset up to which it went."""


class Forwarder:
    """Sends a stage's metrics to MLflow every few seconds, from a thread of its own."""

    def __init__(self, connection: Connection, run_id: str, metrics_file: Path) -> None:
        self._connection, self._run, self._file = connection, run_id, metrics_file
        self._closing = threading.Event()
        self._complete = False
        marker = metrics_file.with_name(FORWARDED)
        if run_id and (not marker.exists() or json.loads(marker.read_text())["run"] != run_id):
            write_json(marker, {"run": run_id, "offset": 0})  # another attempt: the new run gets all lines
        self._thread = threading.Thread(target=self._send, name=f"forward-{metrics_file.parent.name}", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 15.0) -> bool:
        """Send the rest and stop; waits at most timeout_s. True when everything went; what did not is sent by `Tracker.sync`."""
        self._closing.set()
        self._thread.join(timeout_s)
        return self._complete

    def _send(self) -> None:
        while not self._closing.wait(EVERY_S):
            forward(self._connection, self._run, self._file)
        self._complete = forward(self._connection, self._run, self._file)


def forward(connection: Connection, run_id: str, metrics_file: Path) -> bool:
    """Send the complete lines of a metrics file that have not been sent to this run. True when none is left."""
    run = connection.outbox.real(run_id)
    if not run or not metrics_file.exists():
        return not run_id or not metrics_file.exists()
    marker = metrics_file.with_name(FORWARDED)
    state = json.loads(marker.read_text()) if marker.exists() else {}
    offset = int(state["offset"]) if connection.outbox.real(str(state.get("run", "-"))) == run else 0
    for metrics, tags, end in _lines(metrics_file, offset):
        if connection.is_away() or connection.attempt(partial(log_batch, connection, run, metrics, tags)) is None:
            return False
        write_json(marker, {"run": run, "offset": end})
    return True


def _lines(file: Path, offset: int) -> Iterable[tuple[list[Metric], dict[str, str], int]]:
    """The complete lines after the offset as batches: metrics, tags, and the offset behind them."""
    metrics: list[Metric] = []
    tags: dict[str, str] = {}
    end = offset
    with file.open("rb") as lines:
        lines.seek(offset)
        while (line := lines.readline()).endswith(b"\n"):
            try:
                record = json.loads(line)
            except ValueError:
                record = {}
            at = int(record.get("time", 0) * 1000)
            metrics += [
                Metric(metric_name(name), value, at, record["step"])
                for name, value in record.get("metrics", {}).items()
                if math.isfinite(value)
            ]
            if "progress" in record:
                done, total, what = record["progress"]
                tags["progress"] = f"{done} of {total} {what}"
            end = lines.tell()
            if len(metrics) >= BATCH:
                yield metrics, tags, end
                metrics, tags = [], {}
    if end > offset:
        yield metrics, tags, end
