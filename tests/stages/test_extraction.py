"""The answer out of a response, and its typography made plain."""

from __future__ import annotations

import time

import pytest

from stages.rewards.extraction import final_answer, innermost, plain


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{7}", "7"),
        (r"So it is \boxed{\frac{1}{2}}. I hope this helps!", r"\frac{1}{2}"),
        (r"First \boxed{1}, then \boxed{2}.", "2"),  # the last box
        (r"\boxed{a{b}{c{d}}}", "a{b}{c{d}}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed {7}", "7"),
        (r"\fbox{7}", "7"),
        (r"\boxed{\left\{x = 1\right.} or so", r"\left\{x = 1\right."),  # an escaped brace is a sign
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{}", ""),
        ("The answer is 8, no: \\boxed{7}\nThe answer is 9", "7"),  # a box counts more than words
        ("It follows.\n#### 42", "42"),
        ("The final answer is $x = 3$.", "$x = 3$."),
        ("Answer: 5\nAnswer: 6", "6"),
    ],
)
def test_final_answer_of_a_response_is_its_last_box_or_last_stated_answer(response: str, answer: str) -> None:
    assert final_answer(response).answer == answer


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (r"\boxed{7", "box is not closed"),
        (r"\boxed{7\}", "box is not closed"),
        (r"\boxed{7} and then \boxed{8", "box is not closed"),  # an earlier box is never the answer of a reply that was cut
        ("seven", "no final answer"),
        ("", "no final answer"),
    ],
)
def test_final_answer_of_a_response_without_one_is_none_with_the_reason(response: str, reason: str) -> None:
    assert final_answer(response) == (None, reason)


def test_final_answer_where_the_format_counts_takes_one_box_and_nothing_else() -> None:
    assert final_answer("The answer is 7", only_boxed=True) == (None, "no boxed answer")
    assert final_answer("The answer is 7", one_box=True) == (None, "no boxed answer")
    assert final_answer(r"\boxed{7} \boxed{7}", one_box=True) == (None, "several boxed answers")
    assert final_answer(r"\boxed{7} \boxed{8}", only_boxed=True).answer == "8"
    assert final_answer(r"\boxed{7}", one_box=True).answer == "7"


def test_innermost_text_without_a_box_stays_as_it_is() -> None:
    assert innermost("a {b}") == "a {b}"
    assert innermost(r"x \boxed{\boxed{3}}") == "3"


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("\u22127", "-7"),
        ("\uff11\uff12", "12"),
        ("\u0661\u0669", "19"),
        ("10\u00b2", "10^{2}"),  # never 102
        ("10\u207b\u2075", "10^{-5}"),
        ("x\u2082", "x_{2}"),
        ("\u00bd", r"\frac{1}{2}"),
        ("3\u20444", "3/4"),
        ("\u03c0", r"\pi"),
        ("\u221a3", r"\sqrt 3"),
        ("1\u200b2", "12"),
        ("\u202a1\u00ad2\u202c\u200f", "12"),  # marks of direction, a soft hyphen
        ("2\u20623", r"2\cdot 3"),  # a times without a glyph
        ("1\u20632", "1,2"),
        ("7\ufe0f", "7"),
        ("2\U0001d70b", r"2\pi"),
        ("75\u02da", r"75^\circ"),
        ("1\u30012", "1,2"),
        ("\u20117", "-7"),
        ("75\u00a2", r"75\text{ cents}"),
        (r"75\text{\textdegree}", r"75^\circ"),
        (r"75 \deg", r"75^\circ"),
        (r"\deg f", r"\deg f"),
        (r"\nicefrac12", r"\frac12"),
        (r"{8\choose3}", r"\binom{8}{3}"),
        ("3.2 x 10^7", r"3.2\times 10^7"),
        ("3 x^7", "3 x^7"),
        ("+/- 6", r"\pm 6"),
        (r"\text{\$}5", r"\dollar 5"),
        (r"\underline{\frac{1}{2}}", r"{\frac{1}{2}}"),
        (r"\textcolor{red}{7}", "{7}"),
        (r"\Large 7", "7"),
        ("`7`", "7"),
        (r"\text{Answer: 7}", "7"),
        (r"\text{yes.}", r"\text{yes}"),
        ("7\\ ", "7"),
        (r"\mathbb R", r"\mathbb{R}"),
        (r"\operatorname{lcm}(4,6)", r"\lcm(4,6)"),
        (r"$\left\{\begin{aligned}x&=1\\y&=2\end{aligned}\right.$", r"\begin{cases}x =1\\y =2\end{cases}"),
        ("30\u00b0", r"30^\circ"),
        (r"30\degree", r"30^\circ"),
        (r"\left(\,1,\;2\,\right)", "( 1, 2 )"),
        (r"\dfrac12", r"\frac12"),
        (r"\mathrm{cm}", r"\text{cm}"),
        (r"\mathbf{5}", "5"),
        ("$12$", "12"),
        ("$$12$$", "12"),
        (r"\(12\)", "12"),
        (r"\[12\]", "12"),
        ("**7**", "7"),
        ("2**7", "2**7"),
        ("1,234,567", "1234567"),
        ("1,234.5", "1234.5"),
        (r"1{,}234", "1234"),
        (r"1\,234", "1234"),
        ("10 000", "10000"),
        ("(1,234)", "(1,234)"),
        (r"\{1,234\}", r"\{1,234\}"),
        ("1, 234", "1, 234"),
        ("12,34", "12,34"),
        ("1,2345", "1,2345"),
        ("1 2", "1 2"),
        (r"50\%", "50%"),
        (r"\$5", r"\dollar 5"),
        ("$5", r"\dollar 5"),
        ("-$5", r"\dollar -5"),
        ("The answer is 5.", "5"),
        ("= 5", "5"),
        (r"\begin{pmatrix}1\\ 2\\[2pt] 3\end{pmatrix}", r"\begin{pmatrix}1\\ 2\\[2pt] 3\end{pmatrix}"),
    ],
)
def test_plain_ways_to_write_the_same_become_one(text: str, same: str) -> None:
    assert plain(text) == same
    assert plain(same) == same


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 20_000,
        "\\boxed{" * 20_000 + "}" * 20_000,
        "final answer " * 20_000,
        "answer: " * 20_000,
        "#### " * 20_000,
        "$" * 100_000,
        "1," * 50_000,
        "1 234" * 20_000,
        ",123" * 30_000,
        "{" * 100_000,
        "\\text{" * 20_000,
        "\\left\\{\\begin{array}{l}" * 5_000,
        "\\left\\{\\begin{array}{l}\\end{array}" * 4_000,
        "{1\\choose" * 20_000,
        "1x10" * 20_000,
        "\\underline\\color{red}" * 5_000,
        "\u00b2" * 100_000,
        " " * 100_000,
    ],
    ids=lambda text: repr(text[:14]),
)
def test_final_answer_and_plain_of_a_hostile_response_are_quick(text: str) -> None:
    start = time.process_time()
    final_answer(text)
    innermost(text)
    plain(text)
    assert time.process_time() - start < 2
