"""Equivalence of answers: the shipped pairs, what is not graded, and properties that hold for any text."""

from __future__ import annotations

import json
import string
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.rewards.equivalence import LIBRARY, equivalent, grade_response, math_pool
from stages.rewards.grading import Grade, Verdict
from stages.rewards.pool import Job, Pool
from stages.rewards.second_opinion import math_verify_grade

PAIRS = Path(__file__).parents[2] / "datasets" / "equivalence.jsonl"
MIN_PAIRS, MIN_RECALL = 400, 0.99


class Pair(NamedTuple):
    form: str
    gold: str
    answer: str
    equivalent: bool


def pairs() -> list[Pair]:
    return [Pair(**json.loads(line)) for line in PAIRS.read_text(encoding="utf-8").splitlines()]


def graded(pool: Pool, grader: Callable[[str, str], Grade], rows: Sequence[Pair]) -> list[Grade]:
    return pool.grade([Job(grader, (row.answer, row.gold)) for row in rows])


def counts(rows: Sequence[Pair], grades: Sequence[Grade]) -> Counter[tuple[bool, Verdict]]:
    return Counter((row.equivalent, grade.verdict) for row, grade in zip(rows, grades, strict=True))


def test_equivalence_pairs_that_ship_are_many_balanced_and_all_different() -> None:
    rows = pairs()
    share = sum(row.equivalent for row in rows) / len(rows)
    assert len(rows) >= MIN_PAIRS
    assert 0.48 <= share <= 0.52
    assert len({(row.gold, row.answer) for row in rows}) == len(rows)
    both_ways = {row.form for row in rows if row.equivalent} & {row.form for row in rows if not row.equivalent}
    assert both_ways == {row.form for row in rows}  # every form has pairs of both kinds


def test_equivalent_on_the_shipped_pairs_has_no_false_positive_and_nearly_full_recall() -> None:
    rows = pairs()
    with math_pool(seconds=20) as pool:
        grades = graded(pool, equivalent, rows)
    found = counts(rows, grades)
    assert [(row, grade) for row, grade in zip(rows, grades, strict=True) if not row.equivalent and grade.verdict is Verdict.RIGHT] == []
    assert found[True, Verdict.RIGHT] >= MIN_RECALL * sum(row.equivalent for row in rows)


@pytest.mark.slow
def test_equivalent_beside_math_verify_alone_is_better_in_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    rows = pairs()
    with math_pool(seconds=20) as pool:
        ours, alone = graded(pool, equivalent, rows), graded(pool, math_verify_grade, rows)
    with capsys.disabled():
        print(f"\n{'':<16}{'':>7}{'ours':>28}{'math-verify alone':>28}")
        print(f"{'form':<16}{'pairs':>7}" + f"{'recall':>10}{'false pos':>10}{'open':>8}" * 2)
        for form in [*dict.fromkeys(row.form for row in rows), "all"]:
            chosen = [index for index, row in enumerate(rows) if form in (row.form, "all")]
            line = f"{form:<16}{len(chosen):>7}"
            for grades in (ours, alone):
                found = counts([rows[index] for index in chosen], [grades[index] for index in chosen])
                equal = sum(count for (same, _), count in found.items() if same)
                left = sum(count for (_, verdict), count in found.items() if verdict is Verdict.NOT_GRADED)
                line += f"{found[True, Verdict.RIGHT] / equal:>10.1%}{found[False, Verdict.RIGHT]:>10}{left:>8}"
            print(line)
    first, second = counts(rows, ours), counts(rows, alone)
    assert first[True, Verdict.RIGHT] > second[True, Verdict.RIGHT]
    assert first[False, Verdict.RIGHT] < second[False, Verdict.RIGHT]


@pytest.mark.parametrize(
    ("answer", "gold", "reason"),
    [
        ("7", "", "gold answer is empty"),
        ("7", "$ $", "gold answer is empty"),
        ("7" * 3_000, "7", "answer of 3,000 characters; at most 2,000 are read"),
        ("7", "7" * 3_000, "gold answer of 3,000 characters; at most 2,000 are read"),
        ("10^{10^{10}}", "7", "too large to compute: a power of more than a million bits"),
        ("7", "(" * 300 + "1" + ")" * 300, "too large to compute: nested deeper than 60"),
        ("7", r"\overline{AB} \parallel \overline{CD}", "gold answer cannot be read: "),
        (r"\frac{1}{0}", r"\ln 0", "neither equal nor different for certain: neither has a value"),
    ],
)
def test_equivalent_what_cannot_be_decided_is_not_graded_with_the_reason(answer: str, gold: str, reason: str) -> None:
    found = equivalent(answer, gold)
    assert found.verdict is Verdict.NOT_GRADED
    assert found.reason.startswith(reason)


@pytest.mark.parametrize("answer", ["", " ", "I do not know", "{", "\x00", "\ud800", r"\frac{}{}", "7'", "7 8", "x" * 1_999])
def test_equivalent_an_answer_that_says_nothing_is_wrong(answer: str) -> None:
    found = equivalent(answer, "7")
    assert found.verdict is Verdict.WRONG
    assert found.reason.isprintable()
    assert len(found.reason) < 120


def test_equivalent_reason_names_both_sides_and_the_library_where_it_decided() -> None:
    assert equivalent("18", "19") == (Verdict.WRONG, "18 is not 19")
    found = equivalent(r"\sum_{k=1}^{3} k", "6")
    assert found == (Verdict.RIGHT, f"{LIBRARY}same value")


def test_grade_response_takes_the_last_box_and_nothing_else_by_default() -> None:
    assert grade_response(r"\boxed{3} no, \boxed{0.5}", r"\frac12").verdict is Verdict.RIGHT
    assert grade_response("The answer is 0.5", r"\frac12") == (Verdict.WRONG, "no boxed answer")
    assert grade_response("The answer is 0.5", r"\frac12", only_boxed=False).verdict is Verdict.RIGHT
    assert grade_response(r"\boxed{0.5} \boxed{", r"\frac12") == (Verdict.WRONG, "box is not closed")
    assert grade_response(r"\boxed{0.5}", r"\boxed{\frac12}").verdict is Verdict.RIGHT


@settings(max_examples=200, deadline=None)
@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_equivalent_of_integers_in_any_writing_follows_their_value(one: int, other: int) -> None:
    writings = (str(one), f"{one:,}", f"{one}.0", rf"\frac{{{2 * one}}}{{2}}", f"${one}$", f"x = {one}", f"{one}\\text{{ cm}}", f"{one}.")
    writings += (
        f"{100 * one}\\%",
        rf"\left({one}\right)",
        rf"\{{{one}\}}",
        rf"\text{{Answer: {one}}}",
        rf"\sqrt[3]{{{one**3}}}",
        f"\u2066{one}",
    )
    for writing in writings:
        assert equivalent(writing, str(one)).verdict is Verdict.RIGHT
        assert (equivalent(writing, str(other)).verdict is Verdict.RIGHT) == (one == other)


@settings(max_examples=200, deadline=None)
@given(st.fractions(-1000, 1000, max_denominator=500), st.fractions(-1000, 1000, max_denominator=500))
def test_equivalent_of_fractions_and_pairs_follows_their_value_and_order(one: Fraction, other: Fraction) -> None:
    def latex(number: Fraction) -> str:
        return rf"\frac{{{3 * number.numerator}}}{{{3 * number.denominator}}}"

    same = one == other
    assert (equivalent(latex(one), str(other)).verdict is Verdict.RIGHT) == same
    assert equivalent(f"({latex(one)}, {other})", f"({one},{latex(other)})").verdict is Verdict.RIGHT
    assert (equivalent(f"({other}, {one})", f"({one},{other})").verdict is Verdict.RIGHT) == same
    assert equivalent(rf"\{{{other}, {latex(one)}\}}", rf"\{{{one}, {other}\}}").verdict is Verdict.RIGHT


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=string.ascii_letters + string.digits + r"\{}()[]^_+-*/=<>,.|!% ", max_size=30))
def test_equivalent_of_a_text_with_itself_is_never_wrong(text: str) -> None:
    assert equivalent(text, text).verdict is not Verdict.WRONG or not text.strip()
