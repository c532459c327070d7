"""Stages in real processes: results, failures, limits, kills, locks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from flows.launch import launch
from stages.config import BasePretraining
from stages.errors import StageError

FAKE_STAGE = '''
"""A stage for these tests: what it does is written in its config.json under `do`."""
import json, os, signal, subprocess, sys, time
from stages.artifacts import CheckpointRef, StageOutput, digest_of_folder
from stages.errors import DataError
from stages.records import Recorder

def run(config, inputs, stage_dir, seed):
    print("hello from the stage", flush=True)
    recorder = Recorder(stage_dir)
    do = json.loads((stage_dir / "config.json").read_text())["do"]
    if do == "work":
        with recorder.busy() as work:
            work.tokens = 7
        recorder.progress(1, 2, "step")
        recorder.metrics(1, {"train/loss": 0.5})
        (stage_dir / "checkpoint").mkdir()
        (stage_dir / "checkpoint" / "x").write_text(str(seed))
        path = stage_dir / "checkpoint"
        ref = CheckpointRef(name="m", digest=digest_of_folder(path), path=path, producer="p")
        leads, tracked = os.getpgrp() == os.getpid(), "MLFLOW_TRACKING_URI" in os.environ
        return StageOutput({"model": ref}, {"group": float(leads), "tracked": float(tracked)})
    if do == "bad_data":
        raise DataError("3 of 4 rows cannot be read; the rule is at most 5 %; mend rows.jsonl")
    if do == "bug":
        raise ValueError("no such thing")
    if do == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "exit":
        os._exit(7)
    if do == "undeclared":
        return StageOutput({"surprise": CheckpointRef(name="m", digest="", path=stage_dir, producer="p")}, {})
    if do == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (stage_dir / "pids").write_text(f"{os.getpid()} {grandchild.pid}")
    recorder.progress(0, 2, "step")
    if do == "killed_with_grandchild":
        os.kill(os.getpid(), signal.SIGKILL)
    grandchild.wait()
'''


@pytest.fixture
def fake_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stage folder to be; the module `fake_stage` can be imported here and in children."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "fake_stage.py").write_text(FAKE_STAGE)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    return tmp_path / "stages" / "base_pretraining" / "0123456789abcdef"


def content(do: str, max_minutes: float = 2.0) -> dict[str, Any]:
    config = BasePretraining(max_minutes=max_minutes).model_dump(mode="json")
    identity = {"stage": "base_pretraining", "node": "base", "fingerprint": "f", "key": {"seed": 1}}
    return {**identity, "config": config, "inputs": {}, "seed": 1, "do": do}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], limit_s: float = 20.0) -> None:
    end, pause = time.monotonic() + limit_s, threading.Event()
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < end, f"{pids} are still alive"
        pause.wait(0.05)


def pids_of(stage_dir: Path) -> list[int]:
    return [int(pid) for pid in (stage_dir / "pids").read_text().split()]


def test_launch_working_stage_returns_its_result(fake_stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    records: list[dict[str, Any]] = []
    lines: list[str] = []
    result = launch(fake_stage, content("work"), on_record=records.append, on_lines=lines.extend, module="fake_stage")
    assert result.tokens == 7
    assert result.seconds > 0
    assert result.peak_memory_mib > 1
    assert "torch" in result.versions
    assert result.metrics == {"group": 1.0, "tracked": 0.0}
    assert [record["progress"] for record in records if "progress" in record] == [[1, 2, "step"]]
    assert lines == ["hello from the stage"]


def test_launch_finished_folder_returns_the_old_result(fake_stage: Path) -> None:
    first = launch(fake_stage, content("work"), module="fake_stage")
    assert launch(fake_stage, content("bug"), module="fake_stage") == first


def test_launch_finished_folder_whose_output_is_emptied_runs_again(fake_stage: Path) -> None:
    launch(fake_stage, content("work"), module="fake_stage")
    (fake_stage / "checkpoint" / "x").unlink()
    launch(fake_stage, content("work"), module="fake_stage")
    assert (fake_stage / "checkpoint" / "x").exists()


def test_launch_in_a_thread_returns_its_result(fake_stage: Path) -> None:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(launch(fake_stage, content("work"), module="fake_stage")))
    thread.start()
    thread.join()
    assert len(results) == 1


@pytest.mark.parametrize(
    ("do", "said"),
    [
        ("bad_data", "base: 3 of 4 rows cannot be read; the rule is at most 5 %; mend rows.jsonl"),
        ("bug", "base failed with ValueError: no such thing"),
        ("killed", "base was ended by SIGKILL; most often the system was out of memory"),
        ("exit", "base ended with status 7, saying: hello from the stage"),
        ("undeclared", "base: the stage wrote ['surprise']"),
    ],
)
def test_launch_failing_stage_names_cause_and_log(fake_stage: Path, do: str, said: str) -> None:
    with pytest.raises(StageError) as failure:
        launch(fake_stage, content(do), module="fake_stage")
    assert said in str(failure.value)
    assert str(fake_stage / "log.txt") in str(failure.value)
    assert not (fake_stage / "result.json").exists()


def test_launch_bug_in_stage_leaves_traceback_in_log(fake_stage: Path) -> None:
    with pytest.raises(StageError):
        launch(fake_stage, content("bug"), module="fake_stage")
    assert 'raise ValueError("no such thing")' in (fake_stage / "log.txt").read_text()


@pytest.mark.parametrize("do", ["wait", "stubborn"])
def test_launch_past_the_limit_ends_the_whole_group(fake_stage: Path, do: str) -> None:
    with pytest.raises(StageError, match=r"ran past its limit of 0.05 minutes \(base.max_minutes\)"):
        launch(fake_stage, content(do, max_minutes=0.05), module="fake_stage")
    wait_until_gone(pids_of(fake_stage))


def test_launch_past_the_limit_names_the_setting_that_raises_it(fake_stage: Path) -> None:
    with pytest.raises(StageError, match=r"raise the limit with --set evaluation.max_minutes=0.02 and"):
        launch(fake_stage, content("wait", max_minutes=0.01), setting="evaluation", module="fake_stage")


def test_launch_interrupted_ends_the_whole_group(fake_stage: Path) -> None:
    def interrupt(record: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell inherits it as ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(fake_stage, content("wait"), on_record=interrupt, module="fake_stage")
    finally:
        signal.signal(signal.SIGINT, before)
    wait_until_gone(pids_of(fake_stage))


def test_launch_failing_callback_ends_the_whole_group(fake_stage: Path) -> None:
    def fail(record: dict[str, Any]) -> None:
        raise RuntimeError("the conductor broke")

    with pytest.raises(RuntimeError, match="the conductor broke"):
        launch(fake_stage, content("wait"), on_record=fail, module="fake_stage")
    wait_until_gone(pids_of(fake_stage))


def test_launch_dying_stage_takes_its_group_along(fake_stage: Path) -> None:
    with pytest.raises(StageError, match="SIGKILL"):
        launch(fake_stage, content("killed_with_grandchild"), module="fake_stage")
    wait_until_gone(pids_of(fake_stage))


def test_launch_twice_at_once_names_the_holder(fake_stage: Path) -> None:
    said: list[str] = []

    def again(record: dict[str, Any]) -> None:
        try:
            launch(fake_stage, content("wait"), module="fake_stage")
        except StageError as error:
            said.append(str(error))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(fake_stage, content("wait"), on_record=again, module="fake_stage")
    assert f"base is being run by process {os.getpid()}" in said[0]


def test_launch_unfinished_folder_without_checkpoint_starts_afresh(fake_stage: Path) -> None:
    (fake_stage / "checkpoint").mkdir(parents=True)
    (fake_stage / "metrics.jsonl").write_text('{"busy_seconds": 100, "tokens": 1000}\n')
    assert launch(fake_stage, content("work"), module="fake_stage").tokens == 7


def test_launch_unfinished_folder_with_checkpoint_continues(fake_stage: Path) -> None:
    (fake_stage / "trainer" / "sft" / "checkpoint-4").mkdir(parents=True)
    (fake_stage / "trainer" / "sft" / "checkpoint-4" / "trainer_state.json").write_text("{}")
    (fake_stage / "metrics.jsonl").write_text('{"busy_seconds": 100, "tokens": 1000}\n')
    assert launch(fake_stage, content("work"), module="fake_stage").tokens == 1007


def test_conductor_killed_takes_the_stage_along(fake_stage: Path, tmp_path: Path) -> None:
    program = f"""
        import os, signal, sys
        from pathlib import Path
        sys.path.insert(0, {str(tmp_path / "modules")!r})
        from flows.launch import launch
        die = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        launch(Path({str(fake_stage)!r}), {content("wait")!r}, on_record=die, module="fake_stage")
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    wait_until_gone(pids_of(fake_stage))
