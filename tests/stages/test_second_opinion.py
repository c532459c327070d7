"""The second grader: a seeded sample, what it compares, and the weak grader that it shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stages.rewards.equivalence import LIBRARY, equivalent, math_pool
from stages.rewards.grading import Grade, Verdict
from stages.rewards.pool import Pool
from stages.rewards.second_opinion import Graded, math_verify_grade, second_opinion


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with math_pool(1, seconds=20) as opened:
        yield opened


def answers(count: int) -> list[tuple[str, str]]:
    """Half are right, in another writing; half are wrong."""
    return [(rf"\frac{{{2 * number + number % 2}}}{{2}}", str(number)) for number in range(count)]


def test_second_opinion_on_a_sound_grader_has_no_disagreement(pool: Pool) -> None:
    graded = [Graded(answer, gold, equivalent(answer, gold)) for answer, gold in answers(40)]
    assert {item.grade.verdict for item in graded} == {Verdict.RIGHT, Verdict.WRONG}
    found = second_opinion(graded, pool, share=1.0, seed=0)
    assert (found.sampled, found.compared, found.disagreements, found.rate) == (40, 40, (), 0.0)


def test_second_opinion_on_a_grader_that_says_right_to_all_shows_each_wrong_one(pool: Pool) -> None:
    graded = [Graded(answer, gold, Grade(Verdict.RIGHT, "looks fine")) for answer, gold in answers(40)]
    found = second_opinion(graded, pool, share=1.0, seed=0)
    assert found.rate == 0.5
    assert [item.graded for item in found.disagreements] == graded[1::2]
    assert {item.second.verdict for item in found.disagreements} == {Verdict.WRONG}


def test_second_opinion_sample_depends_on_the_seed_alone(pool: Pool) -> None:
    graded = [Graded(answer, gold, Grade(Verdict.RIGHT, "looks fine")) for answer, gold in answers(60)]
    first, again, other = (second_opinion(graded, pool, share=0.25, seed=seed) for seed in (1, 1, 2))
    assert first.sampled == 15
    assert first == again
    assert first.disagreements != other.disagreements


def test_second_opinion_leaves_out_what_was_not_graded_or_came_from_math_verify(pool: Pool) -> None:
    graded = [
        Graded("7", "8", Grade(Verdict.NOT_GRADED, "timed out after 5 s")),
        Graded("7", "8", Grade(Verdict.RIGHT, f"{LIBRARY}same value")),
    ]
    found = second_opinion(graded, pool, share=1.0, seed=0)
    assert (found.sampled, found.compared, found.rate) == (0, 0, None)


def test_math_verify_grade_gold_that_it_cannot_read_is_not_graded() -> None:
    assert math_verify_grade("7", "").verdict is Verdict.NOT_GRADED
    assert math_verify_grade("0.5", r"\frac12").verdict is Verdict.RIGHT
    assert math_verify_grade("0.4", r"\frac12").verdict is Verdict.WRONG
