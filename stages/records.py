"""What a running stage writes for others to follow: `metrics.jsonl`, live, one JSON object a line.

A line is `{"time", "step", "metrics"}`, `{"time", "progress": [done, total, what]}` or
`{"time", "busy_seconds", "tokens"}`. The conductor tails the file; a stage never talks to Prefect or
MLflow. Light ground: imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.artifacts import METRICS


class Recorder:
    """Appends to the `metrics.jsonl` of a stage folder."""

    def __init__(self, stage_dir: Path) -> None:
        self.path = stage_dir / METRICS

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record metrics at a step. Values that are not finite are left out: they wreck charts."""
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        self._append({"step": step, "metrics": finite})

    def progress(self, done: int, total: int, what: str) -> None:
        """Record how far long work has come; `what` names the unit, for instance `step`."""
        self._append({"progress": [done, total, what]})

    @contextmanager
    def busy(self) -> Iterator[Work]:
        """Count the time inside as work of a trainer or the engine, with the tokens it handled."""
        work, start = Work(), time.perf_counter()
        try:
            yield work
        finally:
            self._append({"busy_seconds": round(time.perf_counter() - start, 4), "tokens": work.tokens})

    def _append(self, content: Mapping[str, object]) -> None:
        with self.path.open("ab+") as file:
            cut = file.tell() > 0 and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"  # an attempt died within a line
            line = json.dumps({"time": round(time.time(), 3), **content}) + "\n"
            file.write(("\n" if cut else "").encode() + line.encode())


@dataclass
class Work:
    """What a `busy` block handled; the caller adds tokens generated or trained on."""

    tokens: int = 0


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a `metrics.jsonl`; a line cut short by a crash is left out."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def work_done(path: Path) -> tuple[float, int]:
    """Seconds inside trainers and engine, and tokens handled, over all attempts in a stage folder."""
    records = [record for record in read_records(path) if "busy_seconds" in record]
    return sum(record["busy_seconds"] for record in records), sum(record["tokens"] for record in records)
