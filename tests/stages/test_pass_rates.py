"""Pass rates: the tables, the filters at work on a model, and sampling in rounds that stops early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import CheckpointRef, DatasetRef
from stages.config import EngineConfig, PassRates
from stages.difficulty import beta_binomial
from stages.errors import DataError
from stages.pass_rates import run
from stages.tables import read_rows

NewStage = Callable[[str], Path]
Problems = Callable[[Sequence[dict[str, Any]]], DatasetRef]
ROWS = [
    {"problem_id": f"p{index}", "question": f"{index}+{7 - index}", "answer": answer, "family": "sums"}
    for index, answer in enumerate(("7", "8", "7", "8"))
]


@pytest.mark.slow
def test_pass_rates_table_counts_attempts_and_the_band_keeps_its_problems(
    pupil: CheckpointRef, new_stage: NewStage, problems: Problems, small_engine: EngineConfig
) -> None:
    config = PassRates.model_validate(
        {
            "attempts": 4,
            "problems": 3,
            "band": [0.5, 1.0],
            "sampler": {"max_new_tokens": 48, "temperature": 0.6},
            "engine": small_engine.model_dump(),
        }
    )
    output = run(config, {"model": pupil, "problems": problems(ROWS)}, new_stage("pass_rates"), 0)
    rows = read_rows(output.outputs["pass_rates"])
    assert [row["problem_id"] for row in rows] == ["p0", "p1", "p2"]
    for row in rows:
        assert (row["attempts"], row["not_graded"], row["model"]) == (4, 0, pupil.digest)
        assert row["pass_rate"] == row["right"] / 4
        assert (row["posterior_mean"], row["posterior_low"], row["posterior_high"]) == pytest.approx(beta_binomial(row["right"], 4))
    assert rows[0]["pass_rate"] >= 0.5
    assert rows[1]["pass_rate"] == 0
    assert rows[2]["pass_rate"] >= 0.5
    band = read_rows(output.outputs["band"])
    assert band == [{**ROWS[index], "pass_rate": rows[index]["pass_rate"]} for index in (0, 2)]
    assert output.metrics["pass_rates/mean"] == pytest.approx(sum(row["pass_rate"] for row in rows) / 3)
    assert output.metrics["pass_rates/in_band"] == pytest.approx(2 / 3)
    assert output.metrics["pass_rates/dropped/band"] == 1
    assert output.metrics["pass_rates/attempts_saved"] == 0
    assert [row["dropped_by"] for row in rows] == ["", "band", ""]
    assert rows[1]["reason"] == "band: 0 of 4 right, kept is [0.5, 1]"

    attempts = read_rows(output.outputs["attempts"])
    assert [(row["problem_id"], row["attempt"]) for row in attempts] == [(f"p{index}", number) for index in range(3) for number in range(4)]
    assert len({row["seed"] for row in attempts}) == 12
    for row in rows:
        own = [attempt for attempt in attempts if attempt["problem_id"] == row["problem_id"]]
        assert sum(attempt["verdict"] == "right" for attempt in own) == row["right"]
        assert sum(attempt["tokens"] for attempt in own) / 4 == row["tokens_mean"]
        for key in ("model", "template", "sampler", "grader"):
            assert {attempt[key] for attempt in own} == {row[key]}


@pytest.mark.slow
def test_pass_rates_that_stop_when_certain_draw_the_same_samples_and_decide_the_same(
    pupil: CheckpointRef, new_stage: NewStage, problems: Problems, small_engine: EngineConfig
) -> None:
    rows = [
        {"problem_id": f"p{index}", "question": f"{index}+{7 - index}", "answer": "7" if index % 3 else "8", "family": "sums"}
        for index in range(12)
    ]
    settings = {"sampler": {"max_new_tokens": 48, "temperature": 1.8}, "engine": small_engine.model_dump(), "band": [0.25, 1.0]}
    outputs = [
        run(
            PassRates.model_validate(settings | {"stop_when_certain": stops}),
            {"model": pupil, "problems": problems(rows)},
            new_stage("pass_rates"),
            0,
        )
        for stops in (False, True)
    ]
    full, stopped = ({(row["problem_id"], row["attempt"]): row for row in read_rows(output.outputs["attempts"])} for output in outputs)
    assert len(full) == 96
    assert len(stopped) < 96
    assert {key: full[key] for key in stopped} == stopped
    kept = [[row["problem_id"] for row in read_rows(output.outputs["band"])] for output in outputs]
    assert kept[0] == kept[1]
    assert outputs[0].metrics["pass_rates/dropped/band"] == outputs[1].metrics["pass_rates/dropped/band"] > 0
    assert outputs[1].metrics["pass_rates/attempts_saved"] == pytest.approx(1 - len(stopped) / 96)


@pytest.mark.slow
def test_pass_rates_guess_and_two_model_filters_drop_what_is_guessed_or_solved(
    pupil: CheckpointRef, random_model: CheckpointRef, new_stage: NewStage, problems: Problems, small_engine: EngineConfig
) -> None:
    config = PassRates.model_validate(
        {
            "attempts": 2,
            "filters": ["kimi_guess", "qwen3_guess", "s1"],
            "kimi_guess_tries": 3,
            "sampler": {"max_new_tokens": 48, "temperature": 0.6},
            "engine": small_engine.model_dump(),
        }
    )
    inputs = {"model": pupil, "second_model": random_model, "problems": problems(ROWS)}
    output = run(config, inputs, new_stage("pass_rates"), 0)
    rows = read_rows(output.outputs["pass_rates"])
    assert [row["problem_id"] for row in read_rows(output.outputs["band"])] == ["p1", "p3"]
    assert rows[0]["dropped_by"] == "kimi_guess, qwen3_guess, s1"
    assert rows[0]["reason"].endswith("s1: solved by the model at the first try")
    assert (rows[0]["guesses"], rows[0]["second_model_attempts"], rows[0]["second_model_right"]) == (3, 1, 0)
    attempts = read_rows(output.outputs["attempts"])
    assert [sum(row["purpose"] == purpose for row in attempts) for purpose in ("attempt", "guess", "second_model")] == [8, 12, 4]
    for row in attempts:
        assert row["model"] == (random_model if row["purpose"] == "second_model" else pupil).digest
        assert row["thinking"] == (row["purpose"] != "guess")
    assert all("<think>" not in row["completion"] for row in attempts if row["purpose"] == "guess" and row["verdict"] == "right")


@pytest.mark.parametrize("settings", [{"filters": ["s1"]}, {}])
def test_pass_rates_s1_and_second_model_without_each_other_are_a_data_error(
    settings: dict[str, Any], random_model: CheckpointRef, new_stage: NewStage, problems: Problems
) -> None:
    inputs = {"model": random_model, "problems": problems(ROWS)} | ({} if settings else {"second_model": random_model})
    with pytest.raises(DataError, match="the filter `s1` and the input `second_model` belong together"):
        run(PassRates.model_validate(settings), inputs, new_stage("pass_rates"), 0)


def test_pass_rates_problem_that_stands_twice_is_a_data_error(random_model: CheckpointRef, new_stage: NewStage, problems: Problems) -> None:
    with pytest.raises(DataError, match="a problem_id stands twice"):
        run(PassRates(), {"model": random_model, "problems": problems([*ROWS, ROWS[0]])}, new_stage("pass_rates"), 0)


@pytest.mark.slow
def test_pass_rates_empty_band_is_a_data_error_that_shows_the_rates(
    random_model: CheckpointRef, new_stage: NewStage, problems: Problems, small_engine: EngineConfig
) -> None:
    config = PassRates.model_validate({"attempts": 2, "sampler": {"max_new_tokens": 4}, "engine": small_engine.model_dump()})
    with pytest.raises(
        DataError, match=r"pass_rates\.band would be empty: no pass rate lies in \[0.125, 0.875\] \(mean 0.00, never solved 100%"
    ):
        run(config, {"model": random_model, "problems": problems(ROWS)}, new_stage("pass_rates"), 0)
