"""The type of an answer holds from sampling to learning: who grades it, whether it has a box, whether its gold answer can be learnt."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from stages import cold_start, distillation, evaluation, fusion, rejection_sampling
from stages.artifacts import CheckpointRef, DatasetRef
from stages.config import ColdStart, Distillation, EngineConfig, Evaluation, Fusion, RejectionSampling
from stages.errors import DataError
from stages.tables import read_rows

NewStage = Callable[[str], Path]
Problems = Callable[[Sequence[dict[str, Any]]], DatasetRef]
SUPERVISED = {"examples": 8, "epochs": 1, "batch_size": 2, "learning_rate": 1e-3, "max_tokens": 160}
SCHEMA = json.dumps({"type": "object", "properties": {"x": {"const": 7}}, "required": ["x"]})
TESTS = json.dumps({"function": "f", "tests": [{"input": [3], "expected": 4}]})


def rows_of(answer_type: str, *answers: str) -> list[dict[str, Any]]:
    return [
        {"problem_id": f"{answer_type}{index}", "question": f"{index}+{7 - index}", "answer": answer, "family": "sums"}
        | {"answer_type": answer_type, "grading": "", "benchmark": "standard"}
        for index, answer in enumerate(answers)
    ]


@pytest.fixture
def sampling(small_engine: EngineConfig) -> dict[str, Any]:
    return {"sampler": {"max_new_tokens": 48, "temperature": 0.6}, "engine": small_engine.model_dump()}


@pytest.mark.slow
def test_json_answers_are_sampled_scored_and_learnt_from_by_their_schema(
    json_pupil: CheckpointRef, random_model: CheckpointRef, new_stage: NewStage, problems: Problems, sampling: dict[str, Any]
) -> None:
    asked = problems(rows_of("json_schema", *[SCHEMA] * 3))
    sampled = rejection_sampling.run(
        RejectionSampling.model_validate({"attempts": 4, **sampling}), {"model": json_pupil, "problems": asked}, new_stage("sampling"), 0
    ).outputs["traces"]
    traces = read_rows(sampled)
    assert {(row["response"], row["answer"], row["answer_type"]) for row in traces} == {('{"x": 7}', SCHEMA, "json_schema")}

    learnt = cold_start.run(ColdStart.model_validate(SUPERVISED), {"model": random_model, "traces": sampled}, new_stage("cold_start"), 0)
    assert learnt.metrics["cold_start/passed"] == len(traces)

    config = Evaluation.model_validate({"samples": 2, "flag_problems": 0, **sampling})
    scored = read_rows(evaluation.run(config, {"model": json_pupil, "benchmarks": asked}, new_stage("evaluation"), 0).outputs["samples"])
    right = [row for row in scored if row["correct"] and row["finish"] == "stop" and row["flag_followed"]]
    assert len(right) > len(scored) / 2
    assert all(row["format_ok"] for row in right)

    taught = distillation.run(
        Distillation.model_validate({**SUPERVISED, **sampling, "attempts": 4}),
        {"model": random_model, "teacher": json_pupil, "problems": asked},
        new_stage("distillation"),
        0,
    )
    assert {(row["response"], row["answer_type"]) for row in read_rows(taught.outputs["traces"])} == {('{"x": 7}', "json_schema")}


def test_cold_start_traces_are_held_against_their_answers_by_type(
    random_model: CheckpointRef, new_stage: NewStage, problems: Problems
) -> None:
    half = rows_of("math", "\\frac{1}{2}", "\\frac{1}{2}", "\\frac{1}{2}")
    for row, response in zip(half, ("\\boxed{0.5}", "\\boxed{0.4}", None), strict=True):
        row |= {"trace": "half of one is \\boxed{\\frac{1}{2}}" if response != "\\boxed{0.4}" else "\\boxed{0.4}", "response": response}
    config = ColdStart.model_validate(SUPERVISED)
    output = cold_start.run(config, {"model": random_model, "traces": problems(half)}, new_stage("cold_start"), 0)
    assert [row["dropped_by"] for row in read_rows(output.outputs["selection"])] == ["", "answer", ""]


@pytest.mark.usefixtures("bubblewrap")
def test_cold_start_programs_are_run_and_tests_are_never_learnt_as_an_answer(
    random_model: CheckpointRef, new_stage: NewStage, problems: Problems
) -> None:
    programs = rows_of("code", TESTS, TESTS, TESTS)
    responses = ("```python\ndef f(x):\n    return x + 1\n```", "```python\ndef f(x):\n    return x\n```", None)
    for row, response in zip(programs, responses, strict=True):
        row |= {"trace": "one more than it is given", "response": response}
    config = ColdStart.model_validate(SUPERVISED)
    output = cold_start.run(config, {"model": random_model, "traces": problems(programs)}, new_stage("cold_start"), 0)
    selection = read_rows(output.outputs["selection"])
    assert [row["dropped_by"] for row in selection] == ["", "answer", "response"]
    assert selection[1]["reason"] == "answer: test 1 of 1: another output"
    assert selection[2]["reason"] == "response: it has none, and its gold answer (code) is what answers are held against"
    assert output.metrics["cold_start/dropped/response"] == 1


@pytest.mark.parametrize("answer_type", ["code", "json_schema"])
def test_stage_that_learns_gold_answers_learns_no_tests_and_no_schemas(
    answer_type: str, random_model: CheckpointRef, new_stage: NewStage, problems: Problems
) -> None:
    gold = {"code": TESTS, "json_schema": SCHEMA}[answer_type]
    thinking = problems([{"question": "3+4", "trace": "3+4=7", "response": "\\boxed{7}"}])
    mixed, none = problems(rows_of(answer_type, gold) + rows_of("text", "7")), problems(rows_of(answer_type, gold, gold))
    fused = fusion.run(
        Fusion.model_validate(SUPERVISED | {"examples": 3, "thinking_share": 0.34}),
        {"model": random_model, "thinking": thinking, "direct": mixed},
        new_stage("fusion"),
        0,
    )
    assert fused.metrics["train/examples"] == 2
    assert fused.metrics["fusion/thinking_share"] == 0.5
    with pytest.raises(DataError, match=r"curation\.rl: none of 2 problems has an answer to learn: .* set thinking_share to 1"):
        fusion.run(Fusion.model_validate(SUPERVISED), {"model": random_model, "thinking": thinking, "direct": none}, new_stage("fusion"), 0)

    control = distillation.run(
        Distillation.model_validate(SUPERVISED), {"model": random_model, "problems": mixed}, new_stage("distillation"), 0
    )
    assert [row["answer"] for row in read_rows(control.outputs["traces"])] == ["7"]
    with pytest.raises(
        DataError, match="without a teacher the gold answers are learnt, and a schema or the tests of a program is no answer"
    ):
        distillation.run(Distillation.model_validate(SUPERVISED), {"model": random_model, "problems": none}, new_stage("distillation"), 0)
