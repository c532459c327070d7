"""What MLflow could not take yet: calls kept on disk in order, sent again when it answers.

Files under `<home>/tracking/`: `unsent.jsonl` holds the calls; `runs.json` maps the run ids given
out while MLflow was away to the real ones.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from stages.artifacts import replacing, write_json

_AWAY = "away-"


class Call(NamedTuple):
    """A call for MLflow. `run` is the id given out for the run that the call starts, if it starts one."""

    recipe: str
    name: str
    arguments: dict[str, Any]
    time_ms: int
    run: str | None


def new_run() -> str:
    """An id to give out for a run that MLflow may open later."""
    return f"{_AWAY}{uuid.uuid4().hex}"


class Outbox:
    """The unsent calls of a project home. Safe for several processes."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "tracking"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._calls = self.folder / "unsent.jsonl"
        self._runs = self.folder / "runs.json"

    def __len__(self) -> int:
        return len(self.calls())

    def calls(self) -> list[Call]:
        """The kept calls, oldest first; a line that a kill cut short is none."""
        calls = []
        for line in self._calls.read_text().splitlines() if self._calls.exists() else []:
            with suppress(ValueError):
                calls.append(Call(**json.loads(line)))
        return calls

    def real(self, run_id: str) -> str | None:
        """The run id that MLflow knows, or None when the run has not been sent yet."""
        if not run_id.startswith(_AWAY):
            return run_id
        run = self._given().get(run_id)
        return None if run is None else str(run)

    def add(self, call: Call) -> str:
        """Keep a call. Returns the id given out for the run it starts, or an empty text."""
        with self._locked(), self._calls.open("a+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")  # behind a line that a kill cut short
            file.write(f"{json.dumps(call._asdict())}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        return call.run or ""

    def send(self, perform: Callable[[Call], str | None]) -> int:
        """Give the calls to `perform`, oldest first, until it returns None (MLflow is away). Returns how many went."""
        sent = 0
        with self._locked():
            calls = self.calls()
            while calls and (run := perform(calls[0])) is not None:
                done = calls.pop(0)
                if done.run is not None:
                    write_json(self._runs, {**self._given(), done.run: run})
                with replacing(self._calls) as file:
                    file.writelines(json.dumps(call._asdict()) + "\n" for call in calls)
                sent += 1
        return sent

    def _given(self) -> dict[str, Any]:
        given: dict[str, Any] = json.loads(self._runs.read_text()) if self._runs.exists() else {}
        return given

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
