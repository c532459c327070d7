"""A stage in a process of its own, supervised: limit, Ctrl-C, death, and no orphan left behind.

Imports of torch and vLLM take some 12 to 16 s, so they are paid once: the standard library's fork
server imports `stages.preload`, and each stage's process is forked from it in milliseconds. Whatever
ends a stage, its whole process group goes with it and finished stages stay as they are.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from stages import child
from stages.artifacts import CONFIG, LOG, METRICS, StageResult, is_there, last_checkpoint, read_result, write_json
from stages.errors import StageError

GRACE_S = 5.0
_TICK_S = 0.2
_LOCK = "lock"
_START_METHOD = multiprocessing.get_context("forkserver")

OnRecord = Callable[[dict[str, Any]], None]
OnLines = Callable[[list[str]], None]


def warm_up() -> None:
    """Start the fork server, which imports what stages need while the caller goes on. Costs nothing when it runs."""
    quiet = "ignore::UserWarning:multiprocessing.resource_tracker"  # stages end by os._exit; their semaphores are cleaned up here
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = f"{before},{quiet}" if before else quiet  # read once, by the tracker's process
    try:
        with _without_main():
            _START_METHOD.set_forkserver_preload(["stages.preload"])
            forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


def launch(
    stage_dir: Path,
    content: Mapping[str, Any],
    *,
    on_start: Callable[[], None] = lambda: None,
    on_record: OnRecord = lambda record: None,
    on_lines: OnLines = lambda lines: None,
    setting: str | None = None,
    module: str | None = None,
) -> StageResult:
    """Run one stage in its folder to the end and return its result.

    `content` is what `config.json` will hold. An unfinished folder is continued when a trainer left a
    checkpoint there, else emptied first. `on_start` is called when the folder is ready, `on_record` with
    each new record of `metrics.jsonl`, `on_lines` with the new lines of `log.txt`. `setting` is the
    node's name for `--set` (its own by default), `module` overrides the module that holds `run`.
    Raises StageError, naming stage, cause, log and remedy. On any exception, KeyboardInterrupt
    included, the stage's processes are ended first.
    """
    stage_dir.mkdir(parents=True, exist_ok=True)
    with _locked(stage_dir, content["node"]):
        if (result := read_result(stage_dir)) is not None and all(is_there(output.path) for output in result.outputs.values()):
            return result  # another conductor finished it since this one planned
        if last_checkpoint(stage_dir) is None:
            _empty(stage_dir)
        for stale in (stage_dir / child.ERROR, stage_dir / "result.json"):
            stale.unlink(missing_ok=True)
        write_json(stage_dir / CONFIG, content)
        on_start()
        records, lines = _Tail(stage_dir / METRICS), _Tail(stage_dir / LOG)

        def follow() -> None:
            for line in records.new():
                with suppress(ValueError):  # a line that a kill cut short
                    on_record(json.loads(line))
            if fresh := lines.new():
                on_lines(fresh)

        _supervise(stage_dir, content, setting or content["node"], module, follow)
        result = read_result(stage_dir)
        if result is None:
            raise StageError(f"{content['node']} ended without a result; see {stage_dir / LOG}")
        return result


def _supervise(stage_dir: Path, content: Mapping[str, Any], setting: str, module: str | None, follow: Callable[[], None]) -> None:
    """Start the process, follow it to its end, and leave none of its group alive."""
    limit_s = 60 * float(content["config"]["max_minutes"])
    process = _START_METHOD.Process(target=child.main, args=(str(stage_dir), module), name=content["node"])
    try:
        with _without_main():
            process.start()
        deadline = time.monotonic() + limit_s
        while not wait([process.sentinel], _TICK_S):
            follow()
            if time.monotonic() > deadline:
                raise StageError(
                    f"{content['node']} ran past its limit of {limit_s / 60:g} minutes ({setting}.max_minutes) and was ended; "
                    f"raise the limit with --set {setting}.max_minutes={2 * limit_s / 60:g} and run again. Log: {stage_dir / LOG}"
                )
        follow()
    except (EOFError, ConnectionError, BrokenPipeError) as error:
        raise StageError(
            f"{content['node']}: the process that starts stages has died ({type(error).__name__}), often for lack of memory; "
            "free some memory and run the same command again. Finished stages are kept"
        ) from error
    finally:
        _end(process)
    if process.exitcode != 0:
        raise StageError(_cause(stage_dir, content["node"], process.exitcode))


def _end(process: ForkServerProcess) -> None:
    """End the process and its group: SIGTERM, then SIGKILL after GRACE_S. What outlives the process goes at once."""
    if process.pid is None:
        return
    try:
        if process.exitcode is None:
            _signal(process, signal.SIGTERM)
            process.join(GRACE_S)
    finally:  # also when a second Ctrl-C cuts the wait short
        _signal(process, signal.SIGKILL)
        process.join(GRACE_S)


def _signal(process: ForkServerProcess, number: signal.Signals) -> None:
    assert process.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
        return
    if process.exitcode is None:  # not yet the leader of its group
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _cause(stage_dir: Path, node: str, status: int | None) -> str:
    """Why a stage's process ended, for people."""
    log = stage_dir / LOG
    kept = f"Log: {log}. Finished stages are kept; the same command continues from here"
    error = stage_dir / child.ERROR
    if error.exists():
        content = json.loads(error.read_text())
        if content["user_error"]:
            return f"{node}: {content['message']}\n{kept}"
        return f"{node} failed with {content['type']}: {content['message']}\nThe traceback is in the log. {kept}"
    if status is not None and status < 0:
        name = signal.Signals(-status).name
        hint = "; most often the system was out of memory: lower the stage's batch or engine sizes, or free memory"
        return f"{node} was ended by {name}{hint if name == 'SIGKILL' else ''}.\n{kept}"
    return f"{node} ended with status {status}, saying: {_last_line(log)}\n{kept}"


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "nothing")


def _empty(stage_dir: Path) -> None:
    for path in stage_dir.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink()


@contextmanager
def _locked(stage_dir: Path, node: str) -> Iterator[None]:
    """Hold the stage folder. The kernel frees the lock with the process, however it ends. Raises StageError when taken."""
    with (stage_dir / _LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise StageError(
                f"{node} is being run by process {holder} ({stage_dir}); wait for it, or end it with: kill {holder}"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide `__main__`, which multiprocessing would import again in every child: it is this command, or Prefect's engine."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class _Tail:
    """The complete lines that were added to a file since the last look; what is there at the start is old."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = path.stat().st_size if path.exists() else 0

    def new(self) -> list[str]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            complete, newline, _ = file.read().rpartition(b"\n")
        self.offset += len(complete) + len(newline)
        return complete.decode(errors="replace").split("\n") if newline else []
