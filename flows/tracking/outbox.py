"""What MLflow could not take yet: calls kept on disk in order, sent again when it answers.

Files under `<home>/tracking/`: `unsent.jsonl` holds the calls; `runs.json` maps the run ids given
out while MLflow was away to the real ones.
"""

from __future__ import annotations

import fcntl
import json
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from stages.artifacts import write_json

_AWAY = "away-"


class Call(NamedTuple):
    """A call for MLflow. `run` is the id given out for the run that the call starts, if it starts one."""

    recipe: str
    name: str
    arguments: dict[str, Any]
    time_ms: int
    run: str | None


class Outbox:
    """The unsent calls of a project home. Safe for several processes."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "tracking"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._calls = self.folder / "unsent.jsonl"
        self._runs = self.folder / "runs.json"

    def __len__(self) -> int:
        return len(self._read()) if self._calls.exists() else 0

    def real(self, run_id: str) -> str | None:
        """The run id that MLflow knows, or None when the run has not been sent yet."""
        if not run_id.startswith(_AWAY):
            return run_id
        run = self._given().get(run_id)
        return None if run is None else str(run)

    def add(self, recipe: str, name: str, arguments: dict[str, Any], *, starts_run: bool) -> str:
        """Keep a call. Returns the id given out for the run it starts, or an empty text."""
        run = f"{_AWAY}{uuid.uuid4().hex}" if starts_run else None
        with self._locked(), self._calls.open("a") as file:
            file.write(json.dumps(Call(recipe, name, arguments, int(time.time() * 1000), run)._asdict()) + "\n")
        return run or ""

    def send(self, perform: Callable[[Call], str | None]) -> int:
        """Give the calls to `perform`, oldest first, until it returns None (MLflow is away). Returns how many went."""
        sent = 0
        with self._locked():
            calls = self._read()
            while calls and (run := perform(calls[0])) is not None:
                done = calls.pop(0)
                if done.run is not None:
                    write_json(self._runs, {**self._given(), done.run: run})
                temporary = self._calls.with_suffix(".new")
                temporary.write_text("".join(json.dumps(call._asdict()) + "\n" for call in calls))
                temporary.replace(self._calls)
                sent += 1
        return sent

    def _given(self) -> dict[str, Any]:
        given: dict[str, Any] = json.loads(self._runs.read_text()) if self._runs.exists() else {}
        return given

    def _read(self) -> list[Call]:
        return [Call(**json.loads(line)) for line in self._calls.read_text().splitlines()] if self._calls.exists() else []

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
