"""Stages in real processes: results, failures, limits, callbacks."""

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
from stages.artifacts import StageResult, read_result
from stages.errors import StageError

Content = Callable[..., dict[str, Any]]


def test_launch_working_stage_returns_its_result(fake_stage: Path, content: Content) -> None:
    records: list[dict[str, Any]] = []
    lines: list[str] = []
    result = launch(fake_stage, content("work"), on_record=records.append, on_lines=lines.extend, module="fake_stage")
    assert result.tokens == 7
    assert result.seconds > 0
    assert result.peak_memory_mib > 1
    assert "torch" in result.versions
    assert result.metrics["group"] == 1.0
    assert [record["progress"] for record in records if "progress" in record] == [[1, 2, "step"]]
    assert lines == ["hello from the stage"]


def test_launch_finished_folder_replaces_the_result(fake_stage: Path, content: Content) -> None:
    launch(fake_stage, content("work"), module="fake_stage")
    launch(fake_stage, content("work") | {"seed": 2}, module="fake_stage")
    assert (fake_stage / "checkpoint" / "x").read_text() == "2"


def test_launch_failing_in_a_finished_folder_leaves_no_result(fake_stage: Path, content: Content) -> None:
    launch(fake_stage, content("work"), module="fake_stage")
    with pytest.raises(StageError):
        launch(fake_stage, content("bug"), module="fake_stage")
    assert read_result(fake_stage) is None


def test_launch_in_a_thread_returns_its_result(fake_stage: Path, content: Content) -> None:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(launch(fake_stage, content("work"), module="fake_stage")))
    thread.start()
    thread.join()
    assert len(results) == 1


def test_launch_asked_for_twice_at_once_runs_once(fake_stage: Path, content: Content) -> None:
    starts: list[str] = []
    results: list[StageResult] = []

    def ask() -> None:
        with hold(fake_stage, "base"):
            found = read_result(fake_stage)
            results.append(found or launch(fake_stage, content("work"), on_start=lambda: starts.append("x"), module="fake_stage"))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert starts == ["x"]
    assert results[0] == results[1]


def test_launch_stage_sees_neither_tracking_variables_nor_secrets(fake_stage: Path, content: Content, tmp_path: Path) -> None:
    program = f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(tmp_path / "modules")!r})
        from flows.launch import launch
        launch(Path({str(fake_stage)!r}), {content("environment")!r}, module="fake_stage")
    """
    secret = (
        "MLFLOW_TRACKING_URI",
        "PREFECT_API_URL",
        "POSTTRAIN_PASSWORD",
        "POSTTRAIN_PASSWORD_FILE",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
    )
    kept = ("HF_HOME", "POSTTRAIN_HOME")  # a fork server of its own, which starts with these
    environment = os.environ | dict.fromkeys((*secret, *kept), "x")
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment, check=True, timeout=60)
    (line,) = [line for line in (fake_stage / "log.txt").read_text().splitlines() if line.startswith("variables:")]
    assert set(line.split()) & {*secret, *kept} == set(kept)


@pytest.mark.parametrize(
    ("do", "said"),
    [
        ("bad_data", "base: 3 of 4 rows cannot be read; the rule is at most 5 %; mend rows.jsonl"),
        ("bug", "base failed with ValueError: no such thing"),
        ("killed", "base was ended by SIGKILL; most often the system was out of memory"),
        ("terminated", "base was ended by SIGTERM."),
        ("exit", "base ended with status 7, saying: hello from the stage"),
        ("undeclared", "base: the stage wrote ['surprise']"),
    ],
)
def test_launch_failing_stage_names_cause_and_log(fake_stage: Path, content: Content, do: str, said: str) -> None:
    with pytest.raises(StageError) as failure:
        launch(fake_stage, content(do), module="fake_stage")
    assert said in str(failure.value)
    assert str(fake_stage / "log.txt") in str(failure.value)
    assert not (fake_stage / "result.json").exists()


def test_launch_bug_in_stage_leaves_traceback_in_log(fake_stage: Path, content: Content) -> None:
    with pytest.raises(StageError):
        launch(fake_stage, content("bug"), module="fake_stage")
    assert 'raise ValueError("no such thing")' in (fake_stage / "log.txt").read_text()


@pytest.mark.parametrize("do", ["wait", "stubborn"])
def test_launch_past_the_limit_ends_the_whole_group(fake_stage: Path, content: Content, until_gone: Callable[[], None], do: str) -> None:
    with pytest.raises(StageError, match=r"ran past its limit of 0.05 minutes \(base.max_minutes\)"):
        launch(fake_stage, content(do, max_minutes=0.05), module="fake_stage")
    until_gone()
    assert "in run" in (fake_stage / "log.txt").read_text()  # where it was


def test_launch_past_the_limit_names_the_setting_that_raises_it(fake_stage: Path, content: Content) -> None:
    with pytest.raises(StageError, match=r"raise the limit with --set evaluation.max_minutes=0.02 and"):
        launch(fake_stage, content("wait", max_minutes=0.01), setting="evaluation", module="fake_stage")


@pytest.mark.parametrize("do", ["wait", "chatter"])
def test_launch_without_new_records_ends_the_group_and_says_where_it_was(
    fake_stage: Path, content: Content, until_gone: Callable[[], None], do: str
) -> None:
    lines: list[str] = []
    with pytest.raises(StageError) as failure:
        launch(fake_stage, content(do, max_idle_minutes=0.03), on_lines=lines.extend, setting="evaluation", module="fake_stage")
    said = str(failure.value)
    assert "base recorded neither progress nor metrics for 0.03 minutes (evaluation.max_idle_minutes) and was ended" in said
    assert "the stacks of its threads are in the log" in said
    assert "--set evaluation.max_idle_minutes=0.06" in said
    assert any("fake_stage.py" in line and line.endswith("in run") for line in lines)
    until_gone()


def test_launch_with_records_coming_outlives_the_idle_limit(fake_stage: Path, content: Content) -> None:
    result = launch(fake_stage, content("work_slowly", max_idle_minutes=0.05), module="fake_stage")
    assert result.seconds > 60 * 0.05


def test_launch_stopped_process_past_the_idle_limit_is_ended(fake_stage: Path, content: Content, until_gone: Callable[[], None]) -> None:
    with pytest.raises(StageError, match="it gave no sign of where it was"):
        launch(fake_stage, content("stopped", max_idle_minutes=0.01), module="fake_stage")
    until_gone()


def test_launch_interrupted_ends_the_whole_group(fake_stage: Path, content: Content, until_gone: Callable[[], None]) -> None:
    def interrupt(record: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell inherits it as ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(fake_stage, content("wait"), on_record=interrupt, module="fake_stage")
    finally:
        signal.signal(signal.SIGINT, before)
    until_gone()


@pytest.mark.parametrize("error", [RuntimeError, ValueError, ConnectionError])
def test_launch_failing_callback_ends_the_whole_group(
    fake_stage: Path, content: Content, until_gone: Callable[[], None], error: type[Exception]
) -> None:
    def fail(record: dict[str, Any]) -> None:
        raise error("the conductor broke")

    with pytest.raises(error, match="the conductor broke"):
        launch(fake_stage, content("wait"), on_record=fail, module="fake_stage")
    until_gone()


def test_launch_stopped_by_its_caller_ends_the_whole_group(fake_stage: Path, content: Content, until_gone: Callable[[], None]) -> None:
    def stop() -> None:
        if (fake_stage / "pids").exists():
            raise ConnectionError("cancelled on the page")

    with pytest.raises(ConnectionError, match="cancelled on the page"):
        launch(fake_stage, content("stubborn"), stop=stop, module="fake_stage")
    until_gone()


def test_launch_stop_that_takes_a_second_is_asked_between_looks(fake_stage: Path, content: Content) -> None:
    asked: list[float] = []

    def stop() -> None:
        asked.append(time.monotonic())
        threading.Event().wait(1.0)

    records: list[dict[str, Any]] = []
    launch(fake_stage, content("work_slowly"), on_record=records.append, stop=stop, module="fake_stage")
    assert 2 <= len(asked) <= 12
    assert [record["progress"] for record in records if "progress" in record] == [[1, 2, "step"]]


def test_launch_unfinished_folder_without_checkpoint_starts_afresh(fake_stage: Path, content: Content) -> None:
    (fake_stage / "checkpoint").mkdir(parents=True)
    (fake_stage / "metrics.jsonl").write_text('{"busy_seconds": 100, "tokens": 1000}\n')
    assert launch(fake_stage, content("work"), module="fake_stage").tokens == 7


def test_launch_unfinished_folder_with_checkpoint_continues(fake_stage: Path, content: Content) -> None:
    (fake_stage / "trainer" / "sft" / "checkpoint-4").mkdir(parents=True)
    (fake_stage / "trainer" / "sft" / "checkpoint-4" / "trainer_state.json").write_text("{}")
    (fake_stage / "metrics.jsonl").write_text('{"busy_seconds": 100, "tokens": 1000}\n{"busy_sec')
    records: list[dict[str, Any]] = []
    assert launch(fake_stage, content("work"), on_record=records.append, module="fake_stage").tokens == 1007
    assert len(records) == 3  # neither the old ones nor the one that was cut short
