"""Owner: a process is named so that no later one can be taken for it."""

from __future__ import annotations

import os
import subprocess
import sys

from flows.owner import is_gone, process_identity


def identity_of(pid: int) -> str:
    return process_identity(f":{pid}:")


def test_is_gone_this_process_or_a_foreign_machine_is_not() -> None:
    assert not is_gone(process_identity())
    assert process_identity() == process_identity(process_identity())
    assert not is_gone("elsewhere:1:1")
    assert not is_gone("")


def test_is_gone_process_ended_but_not_yet_waited_for_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        owner = identity_of(process.pid)
        assert not is_gone(owner)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_gone(owner)
    assert is_gone(owner)


def test_is_gone_process_id_used_again_by_another_process_is_gone() -> None:
    host, pid, started = process_identity().split(":")
    assert is_gone(f"{host}:{pid}:{int(started) - 1}")
