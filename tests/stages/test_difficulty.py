"""Difficulty: the filters by their sources' numbers, and stopping early without changing one decision."""

from __future__ import annotations

import random
from typing import Any

import pytest
from pydantic import ValidationError

from stages.config import PassRates
from stages.difficulty import Evidence, beta_binomial, dropped_by, guess_tries, is_settled, rate_rules


def kept_of_8(**settings: Any) -> list[int]:
    """How many right answers of 8 a problem may have to be kept."""
    config = PassRates.model_validate(settings)
    return [right for right in range(9) if not dropped_by(Evidence(right, 8), config)]


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


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        (["band"], [1, 2, 3, 4, 5, 6, 7]),
        (["kimi_easy"], [0, 1, 2, 3, 4, 5, 6, 7]),  # no cut at the hard end
        (["olmo3"], [0, 1, 2, 3, 4, 5]),  # 5 of 8 is 62.5 %, which stays
        (["skywork"], [1, 2, 3, 4, 5, 6, 7]),
        (["qwen2_5_math"], [2, 3, 4, 5]),
        (["big_math"], [2, 3, 4, 5, 6]),
        (["band", "olmo3"], [1, 2, 3, 4, 5]),
        ([], [0, 1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_filter_on_rates_of_eight_keeps_what_its_source_keeps(filters: list[str], kept: list[int]) -> None:
    assert kept_of_8(filters=filters) == kept


def test_filter_limits_that_are_set_move_the_cut() -> None:
    assert kept_of_8(filters=["band"], band=[0.5, 0.75]) == [4, 5, 6]
    assert kept_of_8(filters=["olmo3"], olmo3_max_rate=0.25) == [0, 1, 2]
    assert kept_of_8(filters=["kimi_easy"], kimi_easy_rate=0.75) == [0, 1, 2, 3, 4, 5]


def test_guess_filters_drop_what_is_guessed_within_their_tries() -> None:
    config = PassRates.model_validate({"filters": ["kimi_guess", "qwen3_guess"]})
    assert guess_tries(config) == 8
    assert guess_tries(PassRates.model_validate({"filters": ["qwen3_guess"]})) == 1
    assert guess_tries(PassRates()) == 0
    assert dropped_by(Evidence(4, 8, guesses=(False,) * 8), config) == {}
    late = dropped_by(Evidence(4, 8, guesses=(False,) * 7 + (True,)), config)
    assert late == {"kimi_guess": "guess 8 without thinking is right, 8 are allowed"}
    assert set(dropped_by(Evidence(4, 8, guesses=(True,)), config)) == {"kimi_guess", "qwen3_guess"}


@pytest.mark.parametrize(
    ("first", "second", "drops"), [(False, False, False), (True, False, True), (False, True, True), (True, True, True)]
)
def test_s1_filter_of_two_models_keeps_only_what_neither_solves(first: bool, second: bool, drops: bool) -> None:
    config = PassRates.model_validate({"filters": ["s1"]})
    assert bool(dropped_by(Evidence(3, 8, first_right=first, second_right=second), config)) == drops


def test_problem_without_a_graded_attempt_is_dropped_as_not_graded_by_any_filters() -> None:
    for filters in ([], ["kimi_easy"], ["olmo3"]):
        assert dropped_by(Evidence(0, 0), PassRates.model_validate({"filters": filters})) == {"not_graded": "no attempt could be graded"}


def test_reason_of_a_drop_names_counts_and_rule() -> None:
    assert dropped_by(Evidence(7, 8), PassRates.model_validate({"filters": ["olmo3"]})) == {"olmo3": "7 of 8 right, kept is [0, 0.625]"}


@pytest.mark.parametrize("filters", [["band"], ["olmo3"], ["kimi_easy"], ["band", "olmo3", "big_math"], ["qwen2_5_math"], []])
@pytest.mark.parametrize("not_graded", [0.0, 0.2])
def test_stopping_when_settled_gives_every_filter_the_decision_of_full_sampling(filters: list[str], not_graded: float) -> None:
    config = PassRates.model_validate({"filters": filters, "band": [0.25, 0.75]})
    rules, generator, drawn = list(rate_rules(config).values()), random.Random(7), 0
    for _ in range(3000):
        rate = generator.random()
        outcomes = [None if generator.random() < not_graded else generator.random() < rate for _ in range(8)]
        counts = [(outcomes[:n].count(True), n - outcomes[:n].count(None)) for n in range(9)]
        stop = next(n for n in range(1, 9) if is_settled(rules, *counts[n], 8 - n))
        assert set(dropped_by(Evidence(*counts[stop]), config)) == set(dropped_by(Evidence(*counts[8]), config))
        drawn += stop
    assert drawn < 3000 * 8


def test_settled_is_reached_exactly_when_no_outcome_can_change_the_decision() -> None:
    band = list(rate_rules(PassRates()).values())  # [0.125, 0.875]: one right and one wrong suffice
    assert not is_settled(band, 0, 0, 8)
    assert not is_settled(band, 0, 7, 1)
    assert not is_settled(band, 7, 7, 1)
    assert is_settled(band, 0, 8, 0)
    assert is_settled(band, 1, 2, 6)
    assert not is_settled(band, 1, 1, 7)
    olmo3 = list(rate_rules(PassRates.model_validate({"filters": ["olmo3"]})).values())
    assert not is_settled(olmo3, 5, 5, 3)  # three wrong answers would bring it down to 62.5 %
    assert is_settled(olmo3, 6, 8, 0)
    assert is_settled(olmo3, 6, 6, 2)  # 6 of 8 is still too many
    assert is_settled(olmo3, 0, 6, 2)


def test_pass_rates_filter_named_twice_is_refused_with_the_list() -> None:
    with pytest.raises(ValidationError, match=r"filters \['band', 'band'\]: one is named twice"):
        PassRates.model_validate({"filters": ["band", "band"]})
