"""A stage that does what it is told, for the tests of the supervisor; and the command, read while it runs."""

from __future__ import annotations

import os
import re
import select
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from playwright.sync_api import Browser, sync_playwright

from flows.plan import Step, remember
from flows.servers.serving import VARIABLE
from stages.artifacts import CheckpointRef, DatasetRef, StageResult, digest_of_file, write_json
from stages.config import BasePretraining

FAKE_STAGE = '''
"""What it does is written in its config.json under `do`."""
import json, os, signal, subprocess, sys, time
from pathlib import Path
from stages.artifacts import CheckpointRef, StageOutput, digest_of_folder
from stages.errors import DataError
from stages.records import Recorder

def fill(path):
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))

def run(config, inputs, stage_dir, seed):
    print("hello from the stage", flush=True)
    recorder = Recorder(stage_dir)
    do = json.loads((stage_dir / "config.json").read_text())["do"]
    if do in ("work", "work_slowly"):
        for _ in range(45 if do == "work_slowly" else 0):
            time.sleep(0.1)
            recorder.metrics(0, {})
        with recorder.busy() as work:
            work.tokens = 7
        recorder.progress(1, 2, "step")
        recorder.metrics(1, {"train/loss": 0.5})
        (stage_dir / "checkpoint").mkdir()
        (stage_dir / "checkpoint" / "x").write_text(str(seed))
        path = stage_dir / "checkpoint"
        ref = CheckpointRef(name="m", digest=digest_of_folder(path), path=path, producer="p")
        leads = os.getpgrp() == os.getpid()
        return StageOutput({"model": ref}, {"group": float(leads), "server": float(os.getppid())})
    if do == "environment":
        print("variables:", *sorted(os.environ), flush=True)
        return StageOutput({}, {})
    if do == "edit":
        Path(next(iter(json.loads((stage_dir / "config.json").read_text())["key"]["files"]))).write_text("edited")
        return StageOutput({}, {})
    if do == "bad_data":
        raise DataError("3 of 4 rows cannot be read; the rule is at most 5 %; mend rows.jsonl")
    if do == "bug":
        raise ValueError("no such thing")
    if do == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)
    if do == "exit":
        os._exit(7)
    if do == "undeclared":
        return StageOutput({"surprise": CheckpointRef(name="m", digest="", path=stage_dir, producer="p")}, {})
    if do == "other_disk_full":
        fill(Path("/dev/full"))
    if do == "fill":
        fill(stage_dir / "filler")
    if do == "fill_and_vanish":
        try:
            fill(stage_dir / "filler")
        except OSError:
            os._exit(3)
    if do == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (stage_dir / "server").write_text(str(os.getppid()))
    (stage_dir / "pids").write_text(f"{os.getpid()} {grandchild.pid}")
    recorder.progress(0, 2, "step")
    if do == "killed_with_grandchild":
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    while do == "chatter":
        print("still here", flush=True)
        time.sleep(0.05)
    grandchild.wait()
'''


@pytest.fixture
def fake_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stage folder to be; the module `fake_stage` can be imported here and in children."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "fake_stage.py").write_text(FAKE_STAGE)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    return tmp_path / "stages" / "base_pretraining" / "0123456789abcdef"


@pytest.fixture
def content() -> Callable[..., dict[str, Any]]:
    """`config.json` of the fake stage, by what it does; settings may be given."""

    def of(do: str, **settings: float) -> dict[str, Any]:
        config = BasePretraining.model_validate({"max_minutes": 2.0, **settings}).model_dump(mode="json")
        identity = {"stage": "base_pretraining", "node": "base", "fingerprint": "f", "key": {"seed": 1}}
        return {**identity, "config": config, "inputs": {}, "seed": 1, "do": do}

    return of


@pytest.fixture
def until_gone(fake_stage: Path) -> Callable[[], None]:
    """Wait until the fake stage's process and its grandchild are gone."""

    def wait(limit_s: float = 20.0) -> None:
        pids = [int(pid) for pid in (fake_stage / "pids").read_text().split()]
        end, pause = time.monotonic() + limit_s, threading.Event()
        while any(_alive(pid) for pid in pids):
            assert time.monotonic() < end, f"{pids} are still alive"
            pause.wait(0.05)

    return wait


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# ---- a step that is done as if it had run ---------------------------------------------------


def _finish(home: Path, recipe: str, step: Step, content: str) -> StageResult:
    assert step.folder is not None
    assert step.fingerprint is not None
    assert step.key is not None
    step.folder.mkdir(parents=True, exist_ok=True)
    outputs: dict[str, CheckpointRef | DatasetRef] = {}
    for name, kind in step.node.config.writes.items():
        path = step.folder / name
        path.write_text(f"{step.node.name} {name} {content}")
        common: dict[str, Any] = {"name": name, "digest": digest_of_file(path), "path": path, "producer": step.fingerprint}
        outputs[name] = CheckpointRef(**common) if kind == "model" else DatasetRef(**common, rows=1)
    result = StageResult(
        stage=step.node.stage, fingerprint=step.fingerprint, key=step.key, outputs=outputs, metrics={},
        seconds=1, busy_seconds=1, tokens=1, peak_memory_mib=1, versions={},
    )  # fmt: skip
    write_json(step.folder / "result.json", result.model_dump(mode="json"))
    remember(home, recipe, step)
    return result


@pytest.fixture
def finish() -> Callable[[Path, str, Step, str], StageResult]:
    """Does as if a recipe's step had run in a home: outputs that hold `content`, a result, and the memory of its key."""
    return _finish


# ---- a browser ------------------------------------------------------------------------------


_CHROMIUM = Path("/usr/bin/chromium")


@contextmanager
def _chromium() -> Iterator[Browser]:
    quiet = ["no-sandbox", "disable-gpu", "disable-background-networking", "disable-component-update", "disable-sync"]
    quiet += ["no-first-run", "disable-quic"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(_CHROMIUM), args=[f"--{option}" for option in quiet])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def chromium() -> Callable[[], AbstractContextManager[Browser]]:
    """Starts Debian's Chromium, without a window and without calls of its own; skips where it is not installed."""
    if not _CHROMIUM.exists():
        pytest.skip(f"the pages are looked at in a browser, and {_CHROMIUM} is not installed")
    return _chromium


# ---- the command, as a user runs it ---------------------------------------------------------


class Process(NamedTuple):
    """A live process of a project home."""

    pid: int
    parent: int
    command: str


class Command:
    """`posttrain` in a home, read while it runs."""

    limit_s = 3600.0

    def __init__(self, home: Path, *arguments: str, folder: Path | None = None, **environment: str) -> None:
        known = {name: value for name, value in os.environ.items() if name not in VARIABLE.values()}
        self.home, self.said = home, ""
        self.process = subprocess.Popen(
            [Path(sys.executable).with_name("posttrain"), *arguments],
            env=known | {"POSTTRAIN_HOME": str(home)} | environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.out = self.process.stdout
        self.deadline = time.monotonic() + self.limit_s

    def read(self, until: float) -> bool:
        """Take in what it says until that time (monotonic seconds). False when it has ended."""
        while (left := min(until, self.deadline) - time.monotonic()) > 0:
            if not self.out.closed and not select.select([self.out], [], [], left)[0]:
                return True
            if self.out.closed or not (chunk := os.read(self.out.fileno(), 65536)):
                self.out.close()
                self.process.wait()
                return False
            self.said += chunk.decode(errors="replace")
        assert time.monotonic() < self.deadline, self.said
        return True

    def wait_for(self, pattern: str) -> bool:
        """Read until it says something of that form. False when it has ended before."""
        while not re.search(pattern, self.said):
            if not self.read(time.monotonic() + 0.2):
                return re.search(pattern, self.said) is not None
        return True

    def end(self) -> int:
        """Read to its end; returns its exit status."""
        while self.read(time.monotonic() + 1.0):
            pass
        return self.process.returncode

    def processes(self) -> list[Process]:
        """Every live process that has this home in its environment."""
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with suppress(OSError):
                if f"POSTTRAIN_HOME={self.home}".encode() not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    continue
                state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    found.append(Process(pid, int(parent), Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()))
        return found

    def states(self) -> dict[str, dict[str, list[str]]]:
        """Of `prefect` and `mlflow`: the name of a run, to the states of the runs of that name, oldest first."""
        with sqlite3.connect(f"file:{self.home}/prefect/prefect.db?mode=ro", uri=True) as prefect:
            flows = prefect.execute("SELECT name, state_type FROM flow_run ORDER BY created").fetchall()
        with sqlite3.connect(f"file:{self.home}/mlflow.db?mode=ro", uri=True) as mlflow:
            tracked = mlflow.execute("SELECT name, status FROM runs ORDER BY start_time").fetchall()
        found: dict[str, dict[str, list[str]]] = {"prefect": {}, "mlflow": {}}
        for kind, rows in (("prefect", flows), ("mlflow", tracked)):
            for name, state in rows:
                found[kind].setdefault(name, []).append(state)
        return found


@pytest.fixture
def posttrain() -> Iterator[Callable[..., Command]]:
    """Starts `posttrain` in a home; what is left of it at the end is killed."""
    started: list[Command] = []

    def start(home: Path, *arguments: str, **options: Any) -> Command:
        started.append(Command(home, *arguments, **options))
        return started[-1]

    yield start
    for command in started:
        for process in command.processes():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        command.process.wait()
        command.out.close()
