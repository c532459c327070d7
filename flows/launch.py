"""A stage in a process of its own, supervised: limits, cancel, Ctrl-C, death, and no orphan left behind.

Imports of torch and vLLM take some 12 to 16 s, so they are paid once: the standard library's fork
server imports `stages.preload`, and each stage's process is forked from it in milliseconds. Whatever
ends a stage, its whole process group goes with it and finished stages stay as they are.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from flows.holding import free_mib, no_space, says_full, writing
from stages import child
from stages.artifacts import CONFIG, LOG, METRICS, RESULT, StageResult, last_checkpoint, read_result, write_json
from stages.errors import StageError

GRACE_S = 5.0
_TICK_S = 0.2
_DUMP_S = 2.0
_NEARLY_FULL_MIB = 1.0
_SERVER_GONE = 255
"""The status that multiprocessing gives a process when the fork server, which would know it, has died."""
_START_METHOD = multiprocessing.get_context("forkserver")
_hiding_main = threading.Lock()

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
    stop: Callable[[], None] = lambda: None,
    setting: str | None = None,
    module: str | None = None,
) -> StageResult:
    """Run one stage in its folder to the end and return its result.

    The caller holds the folder (`flows.holding.hold`) and has decided that the stage runs: a result that
    is there is replaced. `content` is what `config.json` will hold. An unfinished folder is continued when
    a trainer left a checkpoint there, else emptied first. `on_start` is called when the folder is ready,
    `on_record` with each new record of `metrics.jsonl`, `on_lines` with the new lines of `log.txt`, and
    `stop` a few times a second, to end the stage by raising. `setting` is the node's name for `--set` (its
    own by default), `module` overrides the module that holds `run`.
    Raises StageError, naming stage, cause, log and remedy, and whatever a callback raises. On any
    exception, KeyboardInterrupt included, the stage's processes are ended first.
    """
    with writing(stage_dir):
        stage_dir.mkdir(parents=True, exist_ok=True)
        if last_checkpoint(stage_dir) is None:
            _empty(stage_dir)
        for stale in (stage_dir / child.ERROR, stage_dir / RESULT):
            stale.unlink(missing_ok=True)
        write_json(stage_dir / CONFIG, content)
    on_start()
    records, lines = _Tail(stage_dir / METRICS), _Tail(stage_dir / LOG)

    def follow() -> bool:
        """Hand on what is new; whether the stage recorded something."""
        recorded = records.new()
        for record in recorded:
            if (parsed := _parse(record)) is not None:
                on_record(parsed)
        if fresh := lines.new():
            on_lines(fresh)
        return bool(recorded)

    _supervise(stage_dir, content, setting or content["node"], module, follow, stop)
    result = read_result(stage_dir)
    if result is None:
        raise StageError(f"{content['node']} ended without a result; see {stage_dir / LOG}")
    return result


def _supervise(
    stage_dir: Path, content: Mapping[str, Any], setting: str, module: str | None, follow: Callable[[], bool], stop: Callable[[], None]
) -> None:
    """Start the process, follow it to its end, and leave none of its group alive."""
    node, config, log = content["node"], content["config"], stage_dir / LOG
    process = _START_METHOD.Process(target=child.main, args=(str(stage_dir), module), name=node)
    try:
        _start(process, stop)
        started = heard = time.monotonic()
        while not wait([process.sentinel], _TICK_S):
            stop()
            if follow():
                heard = time.monotonic()
            if (past := _past_limit(config, started, heard)) is not None:
                what, limit = past
                stacks = "the stacks of its threads are in the log" if _dump_stacks(process, log) else "it gave no sign of where it was"
                follow()
                raise StageError(
                    f"{node} {what} {config[limit]:g} minutes ({setting}.{limit}) and was ended; {stacks}. If it only needs longer, "
                    f"raise the limit with --set {setting}.{limit}={2 * config[limit]:g} and run again. Log: {log}"
                )
        follow()
    finally:
        _end(process)
    if process.exitcode != 0:
        raise StageError(_cause(stage_dir, node, process.exitcode))


def _past_limit(config: Mapping[str, Any], started: float, heard: float) -> tuple[str, str] | None:
    """What a stage did too long and the setting that limits it, or None. Times are of `time.monotonic`, in seconds."""
    now = time.monotonic()
    if now - started > 60 * config["max_minutes"]:
        return "ran past its limit of", "max_minutes"
    if now - heard > 60 * config["max_idle_minutes"]:
        return "recorded neither progress nor metrics for", "max_idle_minutes"
    return None


def _start(process: ForkServerProcess, stop: Callable[[], None]) -> None:
    """Start the process; a fork server that died since the last stage is replaced.

    A new server answers when its imports are done, so a thread waits for that and `stop` is heard meanwhile.
    Raises StageError when no process can be had.
    """
    failures: list[Exception] = []
    given_up = threading.Event()

    def start() -> None:
        try:
            with _without_main():
                _start_or_retry(process)
        except Exception as error:  # noqa: BLE001 - raised below, in the thread that asked
            failures.append(error)
        if given_up.is_set():
            _end(process)

    thread = threading.Thread(target=start, name=f"start-{process.name}", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_TICK_S)
            stop()
    except BaseException:
        given_up.set()
        raise
    for error in failures:
        if not isinstance(error, (EOFError, OSError)):
            raise error
        raise StageError(
            f"{process.name}: no process could be started for it ({type(error).__name__}: {error}), most often for lack of memory; "
            "free some memory and run the same command again. Finished stages are kept"
        ) from error


def _start_or_retry(process: ForkServerProcess) -> None:
    for _ in range(2):
        with suppress(EOFError, ConnectionError):  # the server is dead or dying; the next start makes a new one
            process.start()
            return
        time.sleep(_TICK_S)
    process.start()


def _dump_stacks(process: ForkServerProcess, log: Path) -> bool:
    """Have the stage write the stacks of its threads into its log (`stages.child`); whether they came. A stopped process has none."""
    assert process.pid is not None
    tail, came, end = _Tail(log), False, time.monotonic() + _DUMP_S
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGUSR1)
    while time.monotonic() < end and not wait([process.sentinel], 0.05):
        fresh = tail.new()
        if came and not fresh:
            break
        came = came or any("(most recent call first)" in line for line in fresh)
    return came


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
        if says_full(content["message"]):
            return f"{node}: {no_space(stage_dir, content['message'])}. Log: {log}"
        if content["user_error"]:
            return f"{node}: {content['message']}\n{kept}"
        return f"{node} failed with {content['type']}: {content['message']}\nThe traceback is in the log. {kept}"
    last = _last_line(log)
    if status is not None and status < 0:
        name = signal.Signals(-status).name
        hint = "; most often the system was out of memory: lower the stage's batch or engine sizes, or free memory"
        ended = f"was ended by {name}{hint if name == 'SIGKILL' else ''}."
    elif status == _SERVER_GONE:
        ended = "was ended with the process that starts stages, most often for lack of memory: free some memory."
    else:
        ended = f"ended with status {status}, saying: {last}"
    if says_full(last) or free_mib(stage_dir) < _NEARLY_FULL_MIB:  # a full disk takes no error.json either
        return f"{node}: {no_space(stage_dir, f'the stage {ended}')}. Log: {log}"
    return f"{node} {ended}\n{kept}"


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "nothing")


def _empty(stage_dir: Path) -> None:
    for path in stage_dir.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide `__main__`, which multiprocessing would import again in every child: it is this command, or Prefect's engine."""
    with _hiding_main:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _parse(line: str) -> dict[str, Any] | None:
    """A record, or None for a line that a kill cut short."""
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return record


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
