"""Formulas as trees: what has the same value, what is refused before it is computed."""

from __future__ import annotations

import time

import pytest

from stages.rewards.expressions import TooLargeError, Tree, UndecidedError, UnreadableError, marks, proportional, read, same_value


def tree(text: str) -> Tree:
    return read(marks(text))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (r"\frac12", "0.5"),
        (r"1\frac{1}{2}", "3/2"),
        ("1 1/2", "1.5"),
        ("2^10", "1024"),
        ("1/2x", r"\frac{1}{2x}"),
        ("(x+1)^2", "x^2+2x+1"),
        (r"\sqrt2+\sqrt3", r"\sqrt{5+2\sqrt6}"),
        (r"\sin 2x", r"2\sin x\cos x"),
        (r"\sin x\cos y", r"\cos y\sin x"),
        (r"\sqrt[3]{-8}", "-2"),
        (r"\sqrt{x}\sqrt{y}", r"\sqrt{xy}"),
        (r"e^{i\pi}", "-1"),
        (r"\arcsin x+\arccos x", r"\frac{\pi}{2}"),
        (r"0.1\overline{6}", r"\frac16"),
        (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"),
        ("10^{200}", r"10^{100}\cdot 10^{100}"),
        ("e^{500}", "(e^{250})^2"),
        (r"e^{-500}\cdot e^{500}", "1"),
        (r"\frac{2024!}{2023!}\pi", r"2024\pi"),
        (r"2^{8000}\sqrt2", r"\sqrt{2^{16001}}"),
        (r"\lfloor x+1\rfloor", r"\lfloor x\rfloor+1"),
        (r"\bar{z}", r"\overline{z}"),
        (r"\lcm(4,6)", "12"),
    ],
)
def test_same_value_of_equal_formulas_is_true_both_ways(left: str, right: str) -> None:
    assert same_value(tree(left), tree(right))
    assert same_value(tree(right), tree(left))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (r"e^{-200}", r"e^{-201}"),  # both are zero to any fixed number of digits
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
        (r"e^{\pi\sqrt{163}}", "262537412640768744"),  # equal to thirty digits
        ("10^{200}+1", "10^{200}"),
        (r"\sqrt{10^{60}+1}", "10^{30}"),
        ("e^{500}+1", "e^{500}"),  # equal to a hundred digits
        (r"e^{e^6}+x", "e^{e^6}"),
        (r"\pi^{1000}-10^{-30}", r"\pi^{1000}"),
        (r"\pi+e^{-2000}", r"\pi"),
        (r"\pi^{80000}", r"\pi^{80001}"),
        (r"5+10^{-900}\sqrt2", "5"),
        ("|x|", "x"),
        (r"\sqrt{x^2}", "x"),
        ("X", "x"),
        ("x_1", "x_2"),
        ("-2^2", "4"),
        (r"\sin x^2", r"\sin^2 x"),
        (r"\sqrt{-4}", "2"),
        ("k!", "k"),
        (r"\frac10", "1"),
        (r"\lceil x\rceil", r"\lfloor x\rfloor+1"),  # at whole numbers
        (r"\max(x,y)", r"x+y"),
    ],
)
def test_same_value_of_near_misses_is_false_both_ways(left: str, right: str) -> None:
    assert not same_value(tree(left), tree(right))
    assert not same_value(tree(right), tree(left))


def test_same_value_of_two_formulas_without_a_value_is_undecided() -> None:
    with pytest.raises(UndecidedError):
        same_value(tree(r"\frac10"), tree(r"\ln 0"))


@pytest.mark.parametrize(
    "text",
    [
        "10^{10^{10}}",
        "9^9^9^9^9",
        "7+e^{100000}-e^{100000}",
        "100000!",
        "((9!)!)!",
        r"\binom{99999}{5}",
        "e^{e^{e^{e^e}}}",
        r"\tan(10^{9999})",
        "(10^{9999})^{9999}",
    ],
)
def test_same_value_of_what_is_too_large_is_refused_at_once(text: str) -> None:
    start = time.process_time()
    with pytest.raises(TooLargeError):
        same_value(tree(text), tree("7"))
    assert time.process_time() - start < 2


@pytest.mark.parametrize("text", ["1e999999999", "x+" * 2_000, "(" * 200 + "x" + ")" * 200, r"\frac{1}{" * 100 + "1" + "}" * 100])
def test_read_of_what_is_too_long_or_too_deep_is_refused(text: str) -> None:
    with pytest.raises(TooLargeError):
        tree(text)


@pytest.mark.parametrize(
    "text", ["", "1 2", "x +", "f(x)", r"\sum_{k=1}^3 k", "(1", "1)", r"\frac{1}", "5'", "2, 3", "__import__('os')", "|x", "15 min", "10.x"]
)
def test_read_outside_the_grammar_says_so(text: str) -> None:
    with pytest.raises(UnreadableError):
        tree(text)


def test_proportional_a_factor_counts_and_its_sign_where_asked() -> None:
    assert proportional(tree("2x-2y"), tree("y-x"), positive=False)
    assert not proportional(tree("2x-2y"), tree("y-x"), positive=True)
    assert proportional(tree(r"\sqrt{2}x-2"), tree(r"x-\sqrt{2}"), positive=True)
    assert not proportional(tree("x-y"), tree("x+y"), positive=False)
    assert not proportional(tree("x-x"), tree("x-y"), positive=False)
