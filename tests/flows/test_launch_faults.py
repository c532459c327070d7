"""What dies, fills up or is not allowed while stages run: nothing is left running, and the text says what to do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.holding import hold
from flows.launch import launch
from flows.plan import read_result
from stages.artifacts import digest_of_file
from stages.errors import StageError

Content = Callable[..., dict[str, Any]]


def test_stage_dying_takes_its_group_along(fake_stage: Path, content: Content, until_gone: Callable[[], None]) -> None:
    with pytest.raises(StageError, match="SIGKILL"):
        launch(fake_stage, content("killed_with_grandchild"), module="fake_stage")
    until_gone()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_stage_killed_by_someone_takes_its_group_along(
    fake_stage: Path, content: Content, until_gone: Callable[[], None], number: signal.Signals
) -> None:
    def kill(record: dict[str, Any]) -> None:
        os.kill(int((fake_stage / "pids").read_text().split()[0]), number)

    with pytest.raises(StageError, match=f"base was ended by {number.name}"):
        launch(fake_stage, content("wait"), on_record=kill, module="fake_stage")
    until_gone()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_conductor_killed_takes_the_stage_along(
    fake_stage: Path, content: Content, until_gone: Callable[[], None], tmp_path: Path, number: signal.Signals
) -> None:
    program = f"""
        import os, sys
        from pathlib import Path
        sys.path.insert(0, {str(tmp_path / "modules")!r})
        from flows.launch import launch
        die = lambda _: os.kill(os.getpid(), {number:d})
        launch(Path({str(fake_stage)!r}), {content("wait")!r}, on_record=die, module="fake_stage")
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=60)
    assert ended.returncode == -number
    until_gone()


def test_file_that_changes_while_a_stage_runs_leaves_no_result_under_its_old_key(
    fake_stage: Path, content: Content, tmp_path: Path
) -> None:
    source = tmp_path / "problems.jsonl"
    source.write_text("as planned")
    asked = content("edit") | {"key": {"files": {str(source): digest_of_file(source)}}}
    with pytest.raises(StageError, match=r"problems\.jsonl changed since the run was planned"):
        launch(fake_stage, asked, module="fake_stage")
    assert read_result(fake_stage) is None


def test_fork_server_killed_between_stages_is_replaced(fake_stage: Path, content: Content) -> None:
    servers = set()
    for _ in range(5):
        server = int(launch(fake_stage, content("work"), module="fake_stage").metrics["server"])
        servers.add(server)
        os.kill(server, signal.SIGKILL)  # not waited for: the next stage may meet it while it dies
    assert len(servers) == 5


def test_fork_server_killed_during_a_stage_ends_that_stage_alone(
    fake_stage: Path, content: Content, until_gone: Callable[[], None]
) -> None:
    def kill(record: dict[str, Any]) -> None:
        os.kill(int((fake_stage / "server").read_text()), signal.SIGKILL)

    with pytest.raises(StageError, match="was ended with the process that starts stages"):
        launch(fake_stage, content("wait"), on_record=kill, module="fake_stage")
    until_gone()
    assert launch(fake_stage, content("work"), module="fake_stage").tokens == 7


def test_fork_server_that_does_not_answer_is_not_waited_for_by_a_stop(
    fake_stage: Path, content: Content, until_gone: Callable[[], None]
) -> None:
    server = int(launch(fake_stage, content("work"), module="fake_stage").metrics["server"])
    os.kill(server, signal.SIGSTOP)
    asked: list[None] = []

    def stop() -> None:
        asked.append(None)
        if len(asked) == 3:
            raise KeyboardInterrupt

    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(fake_stage, content("wait"), stop=stop, module="fake_stage")
    finally:
        os.kill(server, signal.SIGCONT)
    assert time.monotonic() - began < 5
    for thread in threading.enumerate():
        if thread.name == "start-base":
            thread.join(20)  # it ends what the server has started meanwhile
            assert not thread.is_alive()
    if (fake_stage / "pids").exists():
        until_gone()
    assert launch(fake_stage, content("work"), module="fake_stage").tokens == 7


@pytest.mark.parametrize("do", ["fill", "fill_and_vanish"])
def test_disk_full_during_a_stage_is_said_and_mended_by_space(fake_stage: Path, content: Content, small_disk: Path, do: str) -> None:
    stage_dir = small_disk / "stages" / "base_pretraining" / "0123"
    with pytest.raises(StageError) as failure:
        launch(stage_dir, content(do), module="fake_stage")
    said = str(failure.value)
    assert "base: no space is left on a disk" in said
    assert f"{stage_dir} has 0.0 MiB free; free some space and run the same command again; finished stages are kept" in said
    (stage_dir / "filler").unlink()
    assert launch(stage_dir, content("work"), module="fake_stage").tokens == 7


def test_disk_full_elsewhere_is_said_with_its_place(fake_stage: Path, content: Content) -> None:
    with pytest.raises(StageError, match=r"no space is left on a disk: \[Errno 28\] No space left on device") as failure:
        launch(fake_stage, content("other_disk_full"), module="fake_stage")
    assert str(fake_stage / "log.txt") in str(failure.value)


def test_disk_full_before_a_stage_is_refused(content: Content, small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(bytes(2**22))
    stage_dir = small_disk / "stages" / "base_pretraining" / "0123"
    with pytest.raises(StageError, match=r"(?s)no space is left on a disk.*free some space") as failure, hold(stage_dir, "base"):
        launch(stage_dir, content("work"), module="fake_stage")
    assert str(small_disk) in str(failure.value)


def test_disk_that_cannot_be_written_is_refused_by_lock_and_launch(content: Content, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    stage_dir = small_disk / "stages" / "base_pretraining" / "0123"
    with pytest.raises(StageError, match=r"stages/base_pretraining/0123 cannot be written: .*Read-only.*POSTTRAIN_HOME"):
        launch(stage_dir, content("work"), module="fake_stage")
    with pytest.raises(StageError, match=r"0123.lock cannot be written: .*Read-only"), hold(stage_dir, "base"):
        pass


def test_folder_whose_parent_is_a_file_is_refused_with_path_and_remedy(fake_stage: Path, content: Content) -> None:
    fake_stage.parents[1].write_text("not a folder")
    with pytest.raises(StageError, match=r"0123456789abcdef cannot be written: .*set POSTTRAIN_HOME to another folder"):
        launch(fake_stage, content("work"), module="fake_stage")
