"""Curriculum: weights as stated, orders as named, rates that follow the rollouts, mastered problems that leave."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from pydantic import ValidationError
from scipy.stats import chisquare

from stages.config import CurriculumConfig
from stages.curriculum import Curriculum, Standing, draw
from stages.errors import DataError
from stages.problems import seed_of

RATES = [0.0, 0.125, 0.25, 0.5, 0.75, 0.875, 1.0, 0.5]


def course(*, steps: int = 10, per_step: int = 2, seed: int = 0, topics: str = "aaaabbbb", **settings: Any) -> Curriculum:
    return Curriculum(CurriculumConfig.model_validate(settings), list(topics), steps, per_step, seed)


def counts(curriculum: Curriculum, rates: list[float], steps: int) -> list[int]:
    standings = curriculum.start(rates)
    drawn = Counter(choice.problem for step in range(steps) for choice in curriculum.choose(standings, step))
    return [drawn[index] for index in range(len(rates))]


def test_uniform_order_takes_all_in_turn_each_pass_shuffled_by_the_seed() -> None:
    curriculum = course(per_step=3, steps=8)
    assert curriculum.is_plain
    standings = curriculum.start([None] * 8)
    order = [choice.problem for step in range(8) for choice in curriculum.choose(standings, step)]
    passes = [random.Random(seed_of(0, "order", number)).sample(range(8), 8) for number in range(3)]
    assert order == [*passes[0], *passes[1], *passes[2]]


@pytest.mark.parametrize("per_step", [1, 3])
def test_prioritised_order_draws_in_proportion_to_one_minus_the_rate(per_step: int) -> None:
    steps = 6000
    observed = counts(course(order="prioritised", per_step=per_step), RATES, steps)
    weights = [1 - rate for rate in RATES]
    stated = [steps * per_step * weight / sum(weights) for weight in weights]
    assert observed[6] == 0  # rate 1
    observed, stated = observed[:6] + observed[7:], stated[:6] + stated[7:]
    assert chisquare(observed, stated).pvalue > 0.01
    assert chisquare(observed, [sum(observed) / 7] * 7).pvalue < 1e-9  # the test would see equal weights


def test_prioritised_order_with_topics_balanced_gives_each_topic_half() -> None:
    steps = 6000
    observed = counts(course(order="prioritised", per_step=1, balance_topics=True, topics="abbbbbbb"), [0.5] * 8, steps)
    assert chisquare(observed, [steps / 2] + [steps / 14] * 7).pvalue > 0.01


def test_draw_of_several_gives_each_its_exact_chance_and_never_one_twice() -> None:
    weights = [0.5, 1.0, 1.5, 2.0, 0.0, 10.0]  # the last would come twice in three: it is certain, the others share two places
    generator, seen = random.Random(3), Counter[int]()
    for _ in range(20000):
        drawn = draw(weights, 3, generator)
        assert len(set(drawn)) == 3
        seen.update(drawn)
    assert seen[5] == 20000
    assert seen[4] == 0
    assert [seen[index] / 20000 for index in range(4)] == pytest.approx([0.2, 0.4, 0.6, 0.8], abs=0.02)


@pytest.mark.parametrize("count", [1, 2, 5, 16, 299])
def test_draw_from_random_weights_always_fills_its_places(count: int) -> None:
    generator = random.Random(count)
    for _ in range(200):
        weights = [generator.random() ** 4 for _ in range(300)]
        drawn = draw(weights, count, generator)
        assert len(drawn) == len(set(drawn)) == count


def test_easy_to_hard_order_goes_from_the_highest_rates_to_the_lowest() -> None:
    curriculum = course(order="easy_to_hard", steps=4)
    standings = curriculum.start(RATES)
    taken = [[choice.rate for choice in curriculum.choose(standings, step)] for step in range(4)]
    assert taken == [[1.0, 0.875], [0.75, 0.5], [0.5, 0.25], [0.125, 0.0]]
    assert curriculum.choose(standings, 0)[0].why == "easy_to_hard: rank 1 of 8"


def test_band_order_takes_only_rates_inside_and_says_so() -> None:
    curriculum = course(order="band", band=[0.25, 0.5])
    standings = curriculum.start(RATES)
    drawn = [choice for step in range(200) for choice in curriculum.choose(standings, step)]
    assert {choice.problem for choice in drawn} == {2, 3, 7}
    assert {choice.why for choice in drawn} == {"band: 0.25 in [0.25, 0.5]", "band: 0.5 in [0.25, 0.5]"}


def test_band_order_with_too_few_inside_takes_those_and_fills_up() -> None:
    curriculum = course(order="band", band=[0.25, 0.5], per_step=5)
    drawn = curriculum.choose(curriculum.start(RATES), 0)
    assert {choice.problem for choice in drawn[:3]} == {2, 3, 7}
    assert len({choice.problem for choice in drawn}) == 5
    assert [choice.why for choice in drawn[3:]] == ["fill: band has 3 for 5 places"] * 2
    assert [choice.weight for choice in drawn[3:]] == [0, 0]


def test_warmup_then_hard_order_is_the_uniform_one_until_the_change() -> None:
    curriculum, plain = course(order="warmup_then_hard", uniform_steps=6, hard_below=0.5), course()
    standings = curriculum.start(RATES)
    for step in range(6):
        assert [choice.problem for choice in curriculum.choose(standings, step)] == [
            choice.problem for choice in plain.choose(standings, step)
        ]
    after = {choice.problem for step in range(6, 200) for choice in curriculum.choose(standings, step)}
    assert after == {0, 1, 2}


def test_live_counts_move_the_rate_from_the_start_towards_the_rollouts() -> None:
    curriculum = course(live=True, prior_tries=8)
    standings = curriculum.observe(curriculum.start([0.5, 0.5, None]), {0: (8, 8), 2: (0, 4)})
    assert [standing.rate for standing in standings] == pytest.approx([(4 + 8) / 16, 0.5, 4 / 12])
    standings = curriculum.observe(standings, {0: (8, 8)})
    assert standings[0] == Standing(0.5, (4 + 16) / 24, 16, 16)


def test_live_exponential_update_goes_a_part_of_the_way() -> None:
    curriculum = course(live=True, update="exponential", update_rate=0.25)
    standings = curriculum.observe(curriculum.start([0.5]), {0: (8, 8)})
    assert standings[0].rate == pytest.approx(0.625)
    assert curriculum.observe(standings, {0: (0, 8)})[0].rate == pytest.approx(0.46875)


def test_rates_that_are_not_live_stay_as_they_were() -> None:
    curriculum = course(order="prioritised")
    standings = curriculum.start(RATES)
    assert curriculum.observe(standings, {0: (8, 8)}) == standings


@pytest.mark.parametrize("order", ["uniform", "easy_to_hard", "prioritised", "warmup_then_hard"])
def test_mastered_problem_leaves_after_enough_tries_and_returns_only_to_fill(order: str) -> None:
    curriculum = course(order=order, live=True, retire_at=0.75, retire_after=16, prior_tries=1, per_step=2)
    standings = curriculum.start([0.5] * 4)
    standings = curriculum.observe(standings, {0: (8, 8)})
    assert not standings[0].retired  # too few tries
    standings = curriculum.observe(standings, {0: (8, 8), 1: (0, 16)})
    assert standings[0].retired
    assert not standings[1].retired
    assert all(choice.problem != 0 for step in range(10) for choice in curriculum.choose(standings, step))
    standings = curriculum.observe(standings, {2: (16, 16), 3: (16, 16)})
    drawn = curriculum.choose(standings, 9)
    assert drawn[0].problem == 1
    assert drawn[1].why == f"fill: {order} has 1 for 2 places, so mastered ones return"


def test_choices_of_a_step_depend_on_standings_step_and_seed_alone() -> None:
    curriculum = course(order="prioritised", per_step=3)
    standings = curriculum.start(RATES)
    straight = [curriculum.choose(standings, step) for step in range(10)]
    assert [curriculum.choose(standings, step) for step in reversed(range(10))][::-1] == straight
    assert [course(order="prioritised", per_step=3, seed=1).choose(standings, step) for step in range(10)] != straight


def test_order_without_the_rates_it_needs_is_a_data_error_unless_live() -> None:
    with pytest.raises(DataError, match="1 of 2 problems have no pass_rate; the order prioritised needs one"):
        course(order="prioritised").start([0.5, None])
    assert course(order="prioritised", live=True).start([None])[0].rate == 0.5


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"retire_at": 0.9}, "retire_at needs the rollouts' success rates"),
        ({"order": "easy_to_hard", "balance_topics": True}, "topics cannot be balanced"),
        ({"band": [0.8, 0.2]}, "the rule is low <= high"),
    ],
)
def test_curriculum_settings_that_do_not_fit_together_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        CurriculumConfig.model_validate(settings)
