"""Answers that are equal to the gold answer and solve nothing; answers in other forms that do."""

from __future__ import annotations

import pytest

from stages.chat import Reply
from stages.rewards.tasks import Task, grade_task


@pytest.mark.parametrize(
    ("question", "gold", "answer", "verdict"),
    [
        ("Compute 17 \\cdot 23 now.", "391", "391", "right"),
        ("Compute 17 \\cdot 23 now.", "391", "17 \\cdot 23", "wrong"),
        ("Compute 17 \\cdot 23 now.", "391", "17 \\times 23", "wrong"),
        ("Compute 17 \\cdot 23 now.", "391", "x = 23 \\cdot 17", "wrong"),
        ("Compute 17 \\cdot 23 now.", "391", "17 \\cdot 23 + 0", "wrong"),  # a number more does not make it a value
        ("Compute 17 \\cdot 23 now.", "391", "17 \\cdot 23 + y - y", "wrong"),
        ("Compute 17 \\cdot 23 now.", "391", "400 - 9", "wrong"),
        ("What is 3+4?", "7", "(3 + 4)", "wrong"),
        ("What is 3+4?", "7", "x = 7", "right"),
        ("Simplify \\sqrt{50}-\\sqrt{8}.", "3\\sqrt{2}", "\\sqrt{50} - \\sqrt8", "wrong"),
        ("Simplify \\sqrt{50}-\\sqrt{8}.", "3\\sqrt{2}", "\\sqrt{18}", "right"),
        ("Find \\sum_{k=1}^{40} k^2.", "22140", "\\sum_{j=1}^{40} j^2", "wrong"),
        ("Find \\sum_{k=1}^{40} k^2.", "22140", "22{,}140", "right"),
        ("How many ways are there to choose 3 of 10?", "120", "\\binom{10}{3}", "wrong"),
        ("How many ways are there to choose 3 of 10?", "120", "120 \\text{ ways}", "right"),
        ("What is 2^{10}?", "1024", "2^{10}", "wrong"),
        ("Reduce \\frac{6}{8}.", "\\frac{3}{4}", "\\frac{6}{8}", "wrong"),
        ("Of 8 marbles 6 are red. How likely is red?", "\\frac{3}{4}", "6/8", "right"),
        ("Of 4 cups 3 are full. How much is that?", "0.75", "\\frac{3}{4} \\text{ cup}", "right"),
        ("A lorry carries 32 loads of a million.", "32000000", "3.2 \\times 10^7", "right"),
        ("Solve x^2 - x - 1 = 0 for x > 0.", "\\frac{1+\\sqrt5}{2}", "\\frac{1}{2} + \\frac{\\sqrt5}{2}", "right"),
        ("Which number is 1 less 2i?", "1-2i", "-2i + 1", "right"),
        ("What is p + q?", "70", "p + q = 51 + 19 = 70", "right"),
        ("What is 51 + 19?", "70", "70 = 51 + 19", "wrong"),
        ("Find \\tan 15^\\circ.", "\\tan 15^\\circ", "2-\\sqrt{3}", "right"),
        ("Which two?", "\\pm 6", "6 \\text{ and } -6", "right"),
        ("Expand (x+1)^2.", "x^2+2x+1", "1 + 2x + x^2", "right"),
        ("Factor x^2 - 5x + 6.", "(x-2)(x-3)", "(x-3)(x-2)", "right"),
        ("Take the root of x.", "x^{1/2}", "\\sqrt{x}", "right"),
        ("Solve x^2 = 9.", "-3, 3", "x = 3 \\text{ or } x = -3", "right"),
    ],
)
def test_math_answer_that_is_an_expression_in_place_of_its_value_is_wrong(question: str, gold: str, answer: str, verdict: str) -> None:
    found = grade_task(Reply("hm", f"\\boxed{{{answer}}}"), Task(gold, "math", question=question))
    assert found.verdict == verdict, found.reason
