"""Processes that are kept running: tied to the thread that starts them, started again when they die, ended with all they started."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

START_LIMIT_S = 240.0
STOP_LIMIT_S = 8.0
RESTARTS = 3
RESTARTS_WITHIN_S = 600.0
_LITTLE_SPACE = 16 * 2**20
# The kernel sends SIGTERM to the process when the thread that started it is gone, however it went.
_TIED = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""

Say = Callable[[str], None]
Start = Callable[[], tuple[Sequence[str], Mapping[str, str]]]


class Kept:
    """One process that is kept running. `look` is called again and again by one thread, to which the process is tied.

    `failure` says, in words with the end of the log and the remedy, why it does not run any more and is
    not started again: it died before it was ready the first time, took too long, or died too often.
    """

    def __init__(self, name: str, start: Start, is_ready: Callable[[], bool], log: Path, cwd: Path, say: Say) -> None:
        """`start` gives arguments and environment of the process each time that it is started; it may clear up first."""
        self.name, self.log, self.cwd, self.failure = name, log, cwd, ""
        self.is_ready = False
        self.process: subprocess.Popen[bytes] | None = None
        self._start, self._asked, self._say = start, is_ready, say
        self._began = 0.0
        self._how = ""
        self._restarts: list[float] = []

    def look(self) -> None:
        """Start the process when it does not run, and notice when it is ready."""
        if self.failure:
            return
        if self.process is None:
            self._run()
        elif (status := self.process.poll()) is not None:
            self._died(status)
        elif not self.is_ready:
            if self._asked():
                self.is_ready = True
                if self._how:
                    self._say(f"{self.name} {self._how}; started again after {time.monotonic() - self._began:.1f} s")
            elif time.monotonic() - self._began > START_LIMIT_S:
                self._fail(f"has not been ready within {START_LIMIT_S:.0f} s")

    def _run(self) -> None:
        self._began = time.monotonic()
        try:
            arguments, environment = self._start()
            with self.log.open("ab" if self._restarts else "wb") as file:
                self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and arguments
                    [sys.executable, "-c", _TIED, str(os.getpid()), *arguments],
                    env={**environment, "PYTHONSAFEPATH": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    cwd=self.cwd,
                    start_new_session=True,
                )
        except OSError as error:
            self.failure = f"{self.name} cannot be started: {refusal(self.log, error)}"

    def _died(self, status: int) -> None:
        assert self.process is not None
        self._how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        now = time.monotonic()
        self._restarts = [when for when in self._restarts if now - when < RESTARTS_WITHIN_S]
        if not self.is_ready and not self._restarts:
            self._fail(self._how)
        elif len(self._restarts) == RESTARTS:
            self._fail(f"{self._how}, for the {RESTARTS + 1}th time within {RESTARTS_WITHIN_S / 60:.0f} minutes")
        else:
            end([self.process])
            self._restarts.append(now)
            self.is_ready = False
            self._run()

    def _fail(self, how: str) -> None:
        free = shutil.disk_usage(self.log.parent).free
        full = f"Its disk has only {free / 2**20:.1f} MiB left. " if free < _LITTLE_SPACE else ""
        self.failure = (
            f"{self.name} {how}. {full}The end of {self.log}:\n{_tail(self.log)}\n"
            "Mend the cause and run the same command again; finished stages are kept"
        )


def refusal(path: Path, error: OSError) -> str:
    """What a folder or file of the home refused, and the remedy."""
    return (
        f"{error.filename or path}: {error.strerror}; the home must be a folder that can be written to, with free space: "
        "mend that, or choose another home with POSTTRAIN_HOME"
    )


def end(processes: Iterable[subprocess.Popen[bytes]], limit_s: float = STOP_LIMIT_S) -> None:
    """End processes and their groups: politely first, by force after the limit or at a second Ctrl-C."""
    processes = list(processes)
    for process in processes:
        process.terminate()
    until = time.monotonic() + limit_s
    try:
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def marked(mark: str) -> list[int]:
    """Process ids, without this one, whose environment at their start held the mark (`NAME=value`)."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid != os.getpid() and mark.encode() in _environ(pid)]


def end_marked(mark: str, limit_s: float = STOP_LIMIT_S) -> None:
    """End all processes with the mark: politely first, by force after the limit or at a second Ctrl-C."""
    until = time.monotonic() + limit_s
    asked: set[int] = set()
    try:
        while (left := marked(mark)) and time.monotonic() < until:
            _signal(set(left) - asked, signal.SIGTERM)
            asked |= set(left)
            time.sleep(0.1)
    finally:
        while left := marked(mark):
            _signal(left, signal.SIGKILL)
            time.sleep(0.05)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _tail(log: Path, lines: int = 12) -> str:
    try:
        text = log.read_text(errors="replace")
    except OSError as error:
        return f"  (cannot be read: {error.strerror})"
    return "\n".join(f"  {line}" for line in text.rstrip().splitlines()[-lines:])
