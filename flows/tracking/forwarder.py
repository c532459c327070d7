"""A stage's `metrics.jsonl`, sent to its run while it grows. How far it went is kept beside it, so that the rest can be sent later.

An attempt that resumes from a checkpoint writes some steps again. Its run gets every step once, as it was
written last: new lines are sent as they come, and what earlier attempts wrote and it did not, at the end.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mlflow.entities import Metric

from flows.tracking.connection import Connection
from flows.tracking.entries import BATCH, log_batch, metric_name
from stages.artifacts import write_json

EVERY_S = 3.0
FORWARDED = "forwarded.json"
"""File beside `metrics.jsonl`: the run that it goes to, the offset up to which it went, and from where to where the lines of
`earlier` attempts lie that have not been sent."""


class Forwarder:
    """Sends a stage's metrics to MLflow every few seconds, from a thread of its own."""

    def __init__(self, connection: Connection, run_id: str, metrics_file: Path) -> None:
        self._connection, self._run, self._file = connection, run_id, metrics_file
        self._closing = threading.Event()
        self._complete = False
        marker = metrics_file.with_name(FORWARDED)
        if run_id and (not marker.exists() or json.loads(marker.read_text())["run"] != run_id):
            earlier = metrics_file.stat().st_size if metrics_file.exists() else 0
            write_json(marker, {"run": run_id, "offset": earlier, "earlier": [0, earlier]})  # another attempt: the new run gets all lines
        self._thread = threading.Thread(target=self._send, name=f"forward-{metrics_file.parent.name}", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 15.0) -> bool:
        """Send the rest and stop; waits at most timeout_s. True when everything went; what did not is sent by `Tracker.sync`."""
        self._closing.set()
        self._thread.join(timeout_s)
        return self._complete

    def _send(self) -> None:
        while not self._closing.wait(EVERY_S):
            forward(self._connection, self._run, self._file, growing=True)
        self._complete = forward(self._connection, self._run, self._file)


def forward(connection: Connection, run_id: str, metrics_file: Path, *, growing: bool = False) -> bool:
    """Send the complete lines of a metrics file that have not been sent to this run; earlier attempts' not while it is growing.

    True when none is left.
    """
    run = connection.outbox.real(run_id)
    if not run or not metrics_file.exists():
        return not run_id or not metrics_file.exists()
    marker = metrics_file.with_name(FORWARDED)
    state = json.loads(marker.read_text()) if marker.exists() else {}
    known = connection.outbox.real(str(state.get("run", "-"))) == run
    offset, earlier = (int(state["offset"]), state.get("earlier", [0, 0])) if known else (0, [0, 0])

    def send(metrics: list[Metric], tags: dict[str, str]) -> bool:
        return not connection.is_away() and connection.attempt(partial(log_batch, connection, run, metrics, tags)) is not None

    for metrics, tags, end in _lines(metrics_file, offset):
        if not send(metrics, tags):
            return False
        offset = end
        write_json(marker, {"run": run, "offset": offset, "earlier": earlier})
    if not growing and earlier[0] < earlier[1]:
        for metrics, _, end in _lines(metrics_file, *earlier):  # their progress is past
            if not send(metrics, {}):
                return False
            write_json(marker, {"run": run, "offset": offset, "earlier": [end, earlier[1]]})
    return True


def _lines(file: Path, start: int, stop: int | None = None) -> Iterator[tuple[list[Metric], dict[str, str], int]]:
    """The complete lines between two offsets as batches: metrics, tags, and the offset behind them.

    Of a metric that is there several times at one step, the last record of the file counts.
    """
    last = {(name, record["step"]): end for record, end in _records(file, start) for name in record.get("metrics", {})}
    metrics: list[Metric] = []
    tags: dict[str, str] = {}
    end = start
    for record, end in _records(file, start, stop):
        at = int(record.get("time", 0) * 1000)
        metrics += [
            Metric(metric_name(name), value, at, record["step"])
            for name, value in record.get("metrics", {}).items()
            if math.isfinite(value) and last.get((name, record["step"]), end) <= end
        ]
        if "progress" in record:
            done, total, what = record["progress"]
            tags["progress"] = f"{done} of {total} {what}"
        if len(metrics) >= BATCH:
            yield metrics, tags, end
            metrics, tags = [], {}
    if metrics or tags:
        yield metrics, tags, end


def _records(file: Path, start: int, stop: int | None = None) -> Iterator[tuple[dict[str, Any], int]]:
    """The records of a file's complete lines between two offsets, each with the offset behind it; a line cut by a kill is an empty one."""
    with file.open("rb") as lines:
        lines.seek(start)
        while (stop is None or lines.tell() < stop) and (line := lines.readline()).endswith(b"\n"):
            try:
                record = json.loads(line)
            except ValueError:
                record = {}
            yield record, lines.tell()
