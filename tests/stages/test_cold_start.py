"""Cold start: the filters and the review decide which traces are learnt from, and the table says so."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import CheckpointRef, DatasetRef
from stages.cold_start import run
from stages.config import ColdStart
from stages.errors import DataError
from stages.tables import read_rows
from stages.trace_review import write_review

NewStage = Callable[[str], Path]
Problems = Callable[[Sequence[dict[str, Any]]], DatasetRef]
SETTINGS: dict[str, Any] = {"examples": 3, "epochs": 1, "batch_size": 2, "learning_rate": 1e-3, "max_tokens": 128}
ROWS: list[dict[str, Any]] = [
    {"problem_id": f"p{index}", "question": f"{index}+1", "answer": str(index + 1), "trace": f"{index}+1={index + 1}", "response": None}
    for index in range(6)
]


def test_cold_start_learns_from_the_first_traces_that_pass_and_says_why_the_others_do_not(
    random_model: CheckpointRef, new_stage: NewStage, problems: Problems
) -> None:
    rows = [dict(row) for row in ROWS]
    rows[0]["trace"] = "I'll guess 1."
    rows[2]["response"] = "It is \\boxed{4}."
    output = run(ColdStart(**SETTINGS), {"model": random_model, "traces": problems(rows)}, new_stage("cold_start"), 0)
    selection = read_rows(output.outputs["selection"])
    assert [row["used"] for row in selection] == [False, True, False, True, True, False]
    assert [row["dropped_by"] for row in selection] == ["guesswork", "", "answer, agreement", "", "", ""]
    assert selection[0]["reason"] == 'guesswork: says "I\'ll guess"'
    assert output.metrics["train/examples"] == 3
    assert (output.metrics["cold_start/traces"], output.metrics["cold_start/passed"]) == (6, 4)
    assert output.metrics["cold_start/dropped/guesswork"] == output.metrics["cold_start/dropped/answer"] == 1
    assert output.metrics["cold_start/dropped/repetition"] == 0


def test_cold_start_with_filters_that_drop_nothing_makes_the_model_that_no_filters_make(
    random_model: CheckpointRef, new_stage: NewStage, problems: Problems
) -> None:
    inputs = {"model": random_model, "traces": problems(ROWS)}
    digests = {
        run(ColdStart.model_validate(SETTINGS | changed), inputs, new_stage("cold_start"), 0).outputs["model"].digest
        for changed in ({}, {"filters": []})
    }
    assert len(digests) == 1


def test_cold_start_similar_to_validation_is_dropped_when_asked_for(
    random_model: CheckpointRef, new_stage: NewStage, problems: Problems
) -> None:
    config = ColdStart.model_validate(SETTINGS | {"filters": ["validation"]})
    inputs = {"model": random_model, "traces": problems(ROWS), "validation": problems([{"question": "2+1"}])}
    output = run(config, inputs, new_stage("cold_start"), 0)
    assert [row["used"] for row in read_rows(output.outputs["selection"])] == [True, True, False, True, False, False]
    assert output.metrics["cold_start/dropped/validation"] == 1


def test_cold_start_uses_what_people_kept_as_they_edited_it(
    random_model: CheckpointRef, new_stage: NewStage, problems: Problems, tmp_path: Path
) -> None:
    review = tmp_path / "review.jsonl"
    write_review(ROWS, review)
    lines = [json.loads(line) for line in review.read_text().splitlines()]
    lines[0]["decision"] = "drop"
    lines[1] |= {"trace": "one more than 1 is 2", "response": "So \\boxed{2}."}
    lines[2]["trace"] = "I'll guess 3."  # an edit is filtered like any trace
    review.write_text("\n".join(map(json.dumps, lines)))
    config = ColdStart.model_validate(SETTINGS | {"review": review})
    assert config.files() == (review,)
    inputs = {"model": random_model, "traces": problems(ROWS)}
    output = run(config, inputs, new_stage("cold_start"), 0)
    assert [(row["problem_id"], row["used"]) for row in read_rows(output.outputs["selection"])] == [
        ("p1", True),
        ("p2", False),
        ("p3", True),
        ("p4", True),
        ("p5", False),
    ]


@pytest.mark.parametrize(
    ("settings", "trace", "says"),
    [
        ({"filters": ["validation"]}, "1+1=2", "the filter `validation` and the input `validation` belong together"),
        ({}, None, "none of 1 problems has a trace; cold start needs worked traces"),
        ({"filters": []}, "1+1=2</think>", r"no trace of 1 passes the filters \(dropped by markers 1\)"),
        ({}, "I'll guess 2.", r"no trace of 1 passes the filters \(dropped by guesswork 1\)"),
    ],
)
def test_cold_start_without_a_trace_to_learn_from_is_a_data_error_with_the_rule(
    random_model: CheckpointRef, new_stage: NewStage, problems: Problems, settings: dict[str, Any], trace: str | None, says: str
) -> None:
    rows = [{"question": "1+1", "answer": "2", "trace": trace}]
    config = ColdStart.model_validate(SETTINGS | settings)
    with pytest.raises(DataError, match=says):
        run(config, {"model": random_model, "traces": problems(rows)}, new_stage("cold_start"), 0)
