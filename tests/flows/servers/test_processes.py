"""Processes: kept running, started again a few times and no more, tied, and ended with all they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flows.servers.processes import RESTARTS, Kept, end, end_marked, marked

STAYS = "import os, sys, time; print('up', flush=True); open(sys.argv[1], 'a').close(); time.sleep(600)"
STUBBORN = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


def until(true: Callable[[], bool], look: Callable[[], None] = lambda: None, limit_s: float = 30.0) -> None:
    """Look again and again until it is true."""
    pause = threading.Event()
    for _ in range(int(limit_s / 0.05)):
        look()
        if true():
            return
        pause.wait(0.05)
    raise AssertionError("it has not come true")


def keep(folder: Path, code: str, said: list[str]) -> Kept:
    ready = folder / "ready"

    def start() -> tuple[Sequence[str], Mapping[str, str]]:
        ready.unlink(missing_ok=True)
        return [sys.executable, "-c", code, str(ready)], dict(os.environ)

    return Kept("The worker", start, ready.exists, folder / "worker.log", folder, said.append)


def kill(kept: Kept) -> None:
    assert kept.process is not None
    kept.process.kill()
    kept.process.wait()


def test_kept_killed_is_started_again_three_times_and_then_fails_with_its_log(tmp_path: Path) -> None:
    said: list[str] = []
    kept = keep(tmp_path, STAYS, said)
    for number in range(RESTARTS + 1):
        until(lambda: kept.is_ready, kept.look)
        assert len(said) == number
        kill(kept)
        kept.look()
    assert all("The worker was ended by SIGKILL; started again after" in text for text in said)
    for part in (
        "The worker was ended by SIGKILL, for the 4th time within 10 minutes",
        str(tmp_path / "worker.log"),
        "  up",
        "Mend the cause",
    ):
        assert part in kept.failure
    before = kept.process
    kept.look()
    assert kept.process is before


def test_kept_dies_before_it_is_ready_fails_at_once(tmp_path: Path) -> None:
    said: list[str] = []
    kept = keep(tmp_path, "print('disk is full'); raise SystemExit(3)", said)
    until(lambda: bool(kept.failure), kept.look)
    assert "The worker ended with status 3" in kept.failure
    assert "disk is full" in kept.failure
    assert not said


def test_kept_log_cannot_be_written_names_path_and_home(tmp_path: Path) -> None:
    (tmp_path / "worker.log").mkdir()
    kept = keep(tmp_path, STAYS, [])
    kept.look()
    assert str(tmp_path / "worker.log") in kept.failure
    assert "POSTTRAIN_HOME" in kept.failure


def test_kept_process_ends_with_the_thread_that_starts_it(tmp_path: Path) -> None:
    kept = keep(tmp_path, STAYS, [])
    thread = threading.Thread(target=until, args=(lambda: kept.is_ready, kept.look))
    thread.start()
    thread.join()
    assert kept.process is not None
    assert kept.process.wait(20) == -signal.SIGTERM


def test_end_process_ignores_sigterm_kills_it_and_its_group() -> None:
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]).wait()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    end([process], limit_s=0.2)
    assert process.stdout.read() == b""  # ends when the grandchild has gone, too
    process.stdout.close()


def test_end_marked_finds_descendants_in_other_sessions_and_nothing_else() -> None:
    mark, other = "POSTTRAIN_TEST_MARK=a", "POSTTRAIN_TEST_MARK=ab"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], start_new_session=True).wait()"
    with (
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=dict([mark.split("=")])) as process,
        subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, env=dict([other.split("=")])) as bystander,
    ):
        assert process.stdout is not None
        assert bystander.stdout is not None
        process.stdout.readline()
        bystander.stdout.readline()
        assert len(marked(mark)) == 2
        end_marked(mark, limit_s=0.2)
        assert process.stdout.read() == b""
        assert marked(mark) == []
        assert bystander.poll() is None
        bystander.kill()
