"""Rejection sampling: only right, finished, well-formed traces are kept, the shortest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import CheckpointRef, DatasetRef
from stages.chat import Reply
from stages.config import EngineConfig, RejectionSampling
from stages.errors import DataError
from stages.rejection_sampling import run
from stages.rewards.grading import Verdict, grade
from stages.tables import read_rows

pytestmark = pytest.mark.slow
NewStage = Callable[[str], Path]
Problems = Callable[[Sequence[dict[str, Any]]], DatasetRef]
ROWS = [{"problem_id": f"p{index}", "question": f"{index}+{7 - index}", "answer": "8" if index == 1 else "7"} for index in range(4)]


def test_rejection_sampling_keeps_verified_traces_of_solved_problems(
    pupil: CheckpointRef, new_stage: NewStage, problems: Problems, small_engine: EngineConfig
) -> None:
    config = RejectionSampling.model_validate(
        {"problems": 3, "attempts": 8, "keep_per_problem": 2, "sampler": {"max_new_tokens": 48}, "engine": small_engine.model_dump()}
    )
    output = run(config, {"model": pupil, "problems": problems(ROWS)}, new_stage("rejection_sampling"), 0)
    rows = read_rows(output.outputs["traces"])
    assert {row["problem_id"] for row in rows} == {"p0", "p2"}  # p1 is never right, p3 is past the limit
    for problem_id in ("p0", "p2"):
        kept = [row for row in rows if row["problem_id"] == problem_id]
        assert 1 <= len(kept) <= 2
        assert len({row["trace"] for row in kept}) == len(kept)
        assert [row["tokens"] for row in kept] == sorted(row["tokens"] for row in kept)
    for row in rows:
        assert row.keys() == {"problem_id", "question", "answer", "answer_type", "grading", "trace", "response", "tokens"}
        assert row["trace"].strip()
        assert grade(Reply(row["trace"], row["response"]), "7").verdict is Verdict.RIGHT
        assert "think>" not in row["trace"] + row["response"]
    assert output.metrics["rejection/kept"] == len(rows)
    assert output.metrics["rejection/solved_share"] == pytest.approx(2 / 3)


def test_rejection_sampling_same_trace_drawn_twice_is_kept_in_its_shortest_form(
    pupil: CheckpointRef, new_stage: NewStage, problems: Problems, small_engine: EngineConfig
) -> None:
    """The pupil thinks one trace and closes in four styles, of which the bare box is by far the shortest."""
    config = RejectionSampling.model_validate(
        {"problems": 1, "attempts": 32, "sampler": {"max_new_tokens": 48, "temperature": 0.8}, "engine": small_engine.model_dump()}
    )
    output = run(config, {"model": pupil, "problems": problems(ROWS)}, new_stage("rejection_sampling"), 0)
    assert [row["response"] for row in read_rows(output.outputs["traces"])] == ["\\boxed{7}"]


def test_rejection_sampling_nothing_right_is_a_data_error(
    random_model: CheckpointRef, new_stage: NewStage, problems: Problems, small_engine: EngineConfig
) -> None:
    config = RejectionSampling.model_validate({"attempts": 2, "sampler": {"max_new_tokens": 4}, "engine": small_engine.model_dump()})
    with pytest.raises(
        DataError, match=r"rejection_sampling\.traces would be empty: none of 8 samples was right, finished and well-formed"
    ):
        run(config, {"model": random_model, "problems": problems(ROWS)}, new_stage("rejection_sampling"), 0)
