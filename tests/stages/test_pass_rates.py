"""Pass rates: the estimate, the table and the band."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import CheckpointRef, DatasetRef
from stages.config import EngineConfig, PassRates
from stages.errors import DataError
from stages.pass_rates import beta_binomial, run
from stages.tables import read_rows

NewStage = Callable[[str], Path]
Problems = Callable[[Sequence[dict[str, Any]]], DatasetRef]
ROWS = [
    {"problem_id": f"p{index}", "question": f"{index}+{7 - index}", "answer": answer, "family": "sums"}
    for index, answer in enumerate(("7", "8", "7", "8"))
]


@pytest.mark.parametrize(
    ("right", "attempts", "mean", "low", "high"),
    [
        (0, 8, 1 / 10, 1 - 0.975 ** (1 / 9), 1 - 0.025 ** (1 / 9)),  # Beta(1, 9): F(x) = 1 - (1 - x)^9
        (8, 8, 9 / 10, 0.025 ** (1 / 9), 0.975 ** (1 / 9)),  # Beta(9, 1): F(x) = x^9
        (1, 1, 2 / 3, 0.025**0.5, 0.975**0.5),  # Beta(2, 1): F(x) = x^2
        (0, 0, 1 / 2, 0.025, 0.975),  # the prior
        (4, 8, 1 / 2, 0.212009, 0.787991),
    ],
)
def test_beta_binomial_is_the_posterior_worked_by_hand(right: int, attempts: int, mean: float, low: float, high: float) -> None:
    assert beta_binomial(right, attempts) == pytest.approx((mean, low, high), abs=1e-5)


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


@pytest.mark.slow
def test_pass_rates_empty_band_is_a_data_error_that_shows_the_rates(
    random_model: CheckpointRef, new_stage: NewStage, problems: Problems, small_engine: EngineConfig
) -> None:
    config = PassRates.model_validate({"attempts": 2, "sampler": {"max_new_tokens": 4}, "engine": small_engine.model_dump()})
    with pytest.raises(
        DataError, match=r"pass_rates\.band would be empty: no pass rate lies in \[0.125, 0.875\] \(mean 0.00, never solved 100%"
    ):
        run(config, {"model": random_model, "problems": problems(ROWS)}, new_stage("pass_rates"), 0)
