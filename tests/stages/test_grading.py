"""The grader: what counts as right, what as wrong, and what is not graded at all."""

from __future__ import annotations

import time

import pytest

from stages.chat import Reply, parse_reply
from stages.rewards.grading import Verdict, boxed_answers, grade, normalise


def verdict(response: str, gold: str) -> Verdict:
    return grade(Reply("some thinking", response), gold).verdict


@pytest.mark.parametrize(
    ("response", "gold"),
    [
        (r"\boxed{19}", "19"),
        (r"The answer is \boxed{19}. I hope this helps!", "19"),
        (r"\boxed{ 19 }", "19"),
        (r"\boxed{$19$}", "19"),
        (r"\boxed{+19}", "19"),
        (r"\boxed{0019}", "19"),
        ("\\boxed{\u0661\u0669}", "19"),  # the same digits in another script
        (r"\boxed{19}", "0019"),
        (r"\boxed{-0}", "0"),
        (r"\boxed{000}", "0"),
        ("\\boxed{\u22127}", "-7"),
        ("\\boxed{\u2212 7}", "-7"),
        (r"\boxed{-7}", "\u22127"),
        (r"\boxed{1,234,567}", "1234567"),
        (r"\boxed{-1,234}", "-1234"),
        ("\\boxed{\uff11\uff12}", "12"),  # full-width digits
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{two  words}", "two words"),
    ],
)
def test_grade_equal_after_normalisation_is_right(response: str, gold: str) -> None:
    assert verdict(response, gold) is Verdict.RIGHT


@pytest.mark.parametrize(
    ("response", "gold"),
    [
        (r"\boxed{18}", "19"),
        (r"\boxed{-19}", "19"),
        (r"\boxed{190}", "19"),
        (r"\boxed{1}", "10"),
        (r"\boxed{12,34}", "1234"),  # not a thousands separator
        (r"\boxed{1 9}", "19"),
        (r"\boxed{}", "19"),
        (r"\boxed{\boxed{19}}", "19"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{3}"),
        ("19", "19"),
        ("The answer is 19.", "19"),
        (r"boxed{19}", "19"),
        ("", "19"),
    ],
)
def test_grade_another_or_no_boxed_answer_is_wrong(response: str, gold: str) -> None:
    assert verdict(response, gold) is Verdict.WRONG


def test_grade_superscript_is_not_a_digit() -> None:
    assert verdict("\\boxed{10\u00b2}", "102") is Verdict.WRONG


@pytest.mark.parametrize("gold", ["", "  ", "$ $", "\n"])
def test_grade_empty_gold_is_not_graded(gold: str) -> None:
    for response in (r"\boxed{}", r"\boxed{3}", ""):
        found = grade(Reply("x", response), gold)
        assert found.verdict is Verdict.NOT_GRADED
        assert found.reason == "gold answer is empty"


def test_grade_several_boxes_are_wrong_even_when_all_are_right() -> None:
    found = grade(Reply("x", r"\boxed{19} or \boxed{19}"), "19")
    assert (found.verdict, found.reason) == (Verdict.WRONG, "several boxed answers")


def test_grade_box_that_is_not_closed_is_wrong_with_that_reason() -> None:
    for response in (r"\boxed{19", r"\boxed{\frac{1}{2}", r"\boxed{19} and \boxed{1"):
        found = grade(Reply("x", response), "19")
        assert (found.verdict, found.reason) == (Verdict.WRONG, "box is not closed")


def test_grade_the_thinking_is_never_read() -> None:
    assert grade(Reply(r"\boxed{19}", "I do not know."), "19").reason == "no boxed answer"
    assert grade(Reply(r"\boxed{1} \boxed{2} \boxed{", r"\boxed{19}"), "19").verdict is Verdict.RIGHT


def test_grade_thinking_that_was_cut_off_is_never_read() -> None:
    cut = parse_reply("<think>\n12+7=19, so \\boxed{19}")
    assert grade(cut, "19").verdict is Verdict.WRONG


def test_grade_reason_of_a_wrong_answer_names_both_values_and_stays_short() -> None:
    assert grade(Reply("x", r"\boxed{018}"), "19").reason == "18 is not 19"
    assert len(grade(Reply("x", "\\boxed{" + "9" * 5_000 + "}"), "19").reason) < 100


def test_boxed_answers_keeps_nested_braces_and_order() -> None:
    assert boxed_answers(r"\boxed{a{b}{c{d}}} then \boxed{2}") == ["a{b}{c{d}}", "2"]
    assert boxed_answers("no box, some {braces}") == []
    assert boxed_answers(r"} \boxed{1}") == ["1"]


@pytest.mark.parametrize(
    "response",
    [
        "\\boxed{" * 20_000,
        "\\boxed{}" * 20_000,
        "{" * 100_000 + r"\boxed{1}",
        "\\boxed{" + "1," * 50_000 + "}",
        "\\boxed{" + "0" * 100_000 + "}",
        "\\boxed{" + " " * 100_000 + "}",
        "\x00\\boxed{\x00}\ud800",
        "\\boxed{\u202e91}",
    ],
)
def test_grade_hostile_response_is_wrong_and_quick(response: str) -> None:
    start = time.process_time()
    assert verdict(response, "19") is Verdict.WRONG
    assert time.process_time() - start < 2


@pytest.mark.parametrize("answer", ["7", "-7", "0", "two words", r"\frac{1}{2}", "1,5", "3.50"])
def test_normalise_is_idempotent(answer: str) -> None:
    assert normalise(normalise(answer)) == normalise(answer)
