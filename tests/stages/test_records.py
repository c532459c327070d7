"""metrics.jsonl: what a stage writes while it runs, and what is left of it after a crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stages.records import Recorder, read_records, work_done


def test_recorder_lines_come_back_in_order_with_times(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.metrics(3, {"train/loss": 1.5})
    recorder.progress(4, 9, "step")
    records = list(read_records(tmp_path / "metrics.jsonl"))
    assert [{key: value for key, value in record.items() if key != "time"} for record in records] == [
        {"step": 3, "metrics": {"train/loss": 1.5}},
        {"progress": [4, 9, "step"]},
    ]
    assert records[0]["time"] <= records[1]["time"]


def test_recorder_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    Recorder(tmp_path).metrics(1, {"a": float("nan"), "b": float("inf"), "c": 2.0})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["metrics"] == {"c": 2.0}


def test_busy_seconds_and_tokens_add_up_over_attempts_and_count_failed_work(tmp_path: Path) -> None:
    with Recorder(tmp_path).busy() as work:
        work.tokens = 30

    def break_down() -> None:
        with Recorder(tmp_path).busy() as work:
            work.tokens = 12
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        break_down()
    seconds, tokens = work_done(tmp_path / "metrics.jsonl")
    assert tokens == 42
    assert 0 <= seconds < 5


def test_read_records_line_cut_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    Recorder(tmp_path).progress(1, 2, "step")
    with path.open("a") as file:
        file.write('{"time": 1.0, "progr')
    assert [record["progress"] for record in read_records(path)] == [[1, 2, "step"]]


def test_read_records_lines_after_a_cut_line_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"time": 1.0, "progr')  # the first attempt died here
    Recorder(tmp_path).progress(1, 3, "step")
    Recorder(tmp_path).progress(2, 3, "step")
    assert [record["progress"][0] for record in read_records(path)] == [1, 2]


def test_read_records_missing_file_is_empty(tmp_path: Path) -> None:
    assert list(read_records(tmp_path / "metrics.jsonl")) == []
    assert work_done(tmp_path / "metrics.jsonl") == (0, 0)
