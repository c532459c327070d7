"""Response filters: golden examples for each rule, what must stay as well as what must go."""

from __future__ import annotations

import pytest

from stages.chat import Reply
from stages.config import ColdStart, ResponseFilterLimits
from stages.problems import FAMILIES, generate
from stages.response_filters import (
    Trace,
    disagreement,
    faults_of,
    guesswork,
    likeness_runs,
    long_paragraph,
    mixed_language,
    repetition,
    validation_likeness,
    wrong_answer,
)
from stages.rewards.grading import grade

ENGLISH, CHINESE = "How many legs do three cows have?", "三头牛一共有多少条腿？"
DEFAULT = ColdStart(examples=1, learning_rate=1e-3)


def graded(question: str, gold: str, thinking: str, response: str) -> Trace:
    return Trace(question, thinking, response, grade(Reply(thinking, response), gold))


@pytest.mark.parametrize("family", FAMILIES)
def test_filters_worked_traces_of_the_embedded_families_pass_all(family: str) -> None:
    for problem in generate(family, 200, 11):
        trace = graded(problem.question, problem.answer, problem.trace, f"The answer is \\boxed{{{problem.answer}}}.")
        assert faults_of(trace, DEFAULT.filters, DEFAULT.limits) == {}


def test_filters_traces_of_a_careless_pupil_are_dropped_for_the_answer_they_do_not_reach() -> None:
    careless = list(generate("chain_sum", 200, 11, slip=lambda result: result + 1))
    for problem, truth in zip(careless, generate("chain_sum", 200, 11), strict=True):
        stated = graded(problem.question, truth.answer, problem.trace, f"\\boxed{{{problem.answer}}}")
        assert set(faults_of(stated, DEFAULT.filters, DEFAULT.limits)) == {"answer"}
        if any(line.endswith(f"={truth.answer}") for line in problem.trace.splitlines()[-10:-1]):
            continue  # by chance a line near the end states the true answer
        other = graded(problem.question, truth.answer, problem.trace, f"\\boxed{{{truth.answer}}}")
        assert set(faults_of(other, DEFAULT.filters, DEFAULT.limits)) == {"agreement"}


@pytest.mark.parametrize(
    ("response", "gold", "reason"),
    [
        ("\\boxed{12}", "12", None),
        ("The answer is \\boxed{012}.", "12", None),
        ("\\boxed{13}", "12", "13 is not 12"),
        ("It is 12.", "12", "no boxed answer"),
        ("\\boxed{12} or \\boxed{13}", "12", "several boxed answers"),
        ("\\boxed{12}", " ", "not graded: gold answer is empty"),
    ],
)
def test_wrong_answer_gives_the_graders_reason(response: str, gold: str, reason: str | None) -> None:
    assert wrong_answer(grade(Reply(None, response), gold)) == reason


@pytest.mark.parametrize(
    ("thinking", "dropped"),
    [
        ("3*4=12\n2*6=12\n12+12=24", False),
        ("First I count the cows and then I count the hens and add both of them up to get the total.", False),
        ("Wait, let me check this sum once more from the very start. " * 6, True),
        ("so it is 12\n" * 6, True),
        ("5+0=5\n" * 5, False),
        ("我再算一遍，三乘以四等于十二。" * 5, True),
        ("wait\nhmm\n" * 20, True),
    ],
)
def test_repetition_drops_loops_and_keeps_sums(thinking: str, dropped: bool) -> None:
    assert bool(repetition(thinking, 0.3, 4)) == dropped


@pytest.mark.parametrize(
    ("thinking", "response", "dropped"),
    [
        ("3*4=12", "\\boxed{12}", False),
        ("", "\\boxed{12}", True),
        (" \n", "\\boxed{12}", True),
        ("This is hard.\nI'll guess 12.", "\\boxed{12}", True),
        ("I have no idea how to do this, maybe 12.", "\\boxed{12}", True),
        ("I cannot tell them apart, so I pick one at random.", "\\boxed{B}", True),
        ("3*4 is 11 or 12", "My best guess is \\boxed{12}.", True),
        ("不知道怎么算，随便猜一个：12。", "\\boxed{12}", True),
        ("Let me guess x = 3 first.\nThen 3*4=12, which fits.\nSo x = 3.\n3*4=12", "\\boxed{12}", False),  # checked later on
        ("The educated solver will guess-and-check: 3*4=12 fits.", "\\boxed{12}", False),
        ("Ann picks a ball at random, so the chance is 1/4.", "\\boxed{1/4}", False),
        ("If we randomly choose two of four, 6 pairs are possible.", "There are \\boxed{6} when two are selected at random.", False),
        ("A student who is just guessing gets 1 of 4 right, so 25 of 100.", "\\boxed{25}", False),
        ("If I guess on each question, 1 of 4 is right.", "\\boxed{1/4}", False),
        ("Players have no idea of the card, so 1 of 52 is right. A random guess is right once in 52.", "\\boxed{1/52}", False),
        ("Nothing helps, so I'll randomly pick B.", "\\boxed{B}", True),
        ("Let me pick an answer at random.", "\\boxed{B}", True),
        ("I am just guessing here.", "\\boxed{B}", True),
        ("Wild guess: 12.", "\\boxed{12}", True),
        ("I can only make a wild guess.", "\\boxed{12}", True),
        ("That is a lucky guess.", "\\boxed{12}", True),
        ("No idea. 12?", "\\boxed{12}", True),
    ],
)
def test_guesswork_drops_plain_guesses_and_keeps_checked_ones(thinking: str, response: str, dropped: bool) -> None:
    assert bool(guesswork(thinking, response)) == dropped


@pytest.mark.parametrize(
    ("thinking", "response", "dropped"),
    [
        ("4-7=-3\n-3+8=5", "\\boxed{5}", False),
        ("5-3=2\n2-9=-7", "\\boxed{-7}", False),
        ("5-3=2\n2-9=-7", "\\boxed{7}", True),  # 7 stands there with its sign only
        ("3*4=12\n12+12=24", "\\boxed{4}", True),  # inside 24, and as a factor
        ("3*4=12\n12+12=24", "\\boxed{12}", False),  # the last line but one ends in it: not told apart
        ("12+12=24", "\\boxed{12}", True),  # an operand only
        ("3*4=12\n12+12=24", "\\boxed{25}", True),
        ("The total is 1,234 legs.", "\\boxed{1234}", False),
        ("So it is 19.\nCheck: 19-7=12, which fits.", "\\boxed{19}", False),
        ("So 5 - 3 is what is left: 10-3", "\\boxed{3}", False),  # minus between numbers is no sign
        ("It is \\boxed{24}. Check: 24 - 12 = 12.", "\\boxed{12}", True),  # the box decides
        ("It is \\boxed{24}.", "The answer is \\boxed{24}.", False),
        ("It holds for x = \\frac{1}{2} .", "\\boxed{\\frac{1}{2}}", False),
        ("The capital is Paris.", "\\boxed{paris}", False),
        ("The capital is Rome.", "\\boxed{Paris}", True),
        ("It is \\boxed{\\dfrac{1}{2}}.", "\\boxed{\\frac{1}{2}}", False),
        ("It is \\boxed{0.5}.", "\\boxed{1/2}", False),
        ("It is \\boxed{17.0}.", "\\boxed{17}", False),
        ("It is \\boxed{\\tfrac{x}{2}}.", "\\boxed{\\frac{x}{2}}", False),
        ("It is \\boxed{1 1/2}.", "\\boxed{11/2}", True),
        ("It is \\boxed{0.5}.", "\\boxed{1/3}", True),
        ("1-1/2=0.5", "\\boxed{\\dfrac12}", True),  # no simple fraction: compared as text
        ("1-1/2=0.5", "\\boxed{\\dfrac{1}{2}}", False),
        ("So the chance is \\tfrac{1}{2}.", "\\boxed{0.5}", False),
        ("The sum is 17.0 in all.", "\\boxed{17}", False),
        ("So x is 1/2.", "\\boxed{2}", True),  # part of a fraction
        ("6/2=3", "\\boxed{2}", True),
        ("So it is " + "7" * 5000, "\\boxed{" + "7" * 5000 + "}", False),
        ("So it is 1/0.", "\\boxed{1/0}", False),
        ("So it is 12.\nCheck:\n4+4=8\n8+4=12, fits\n24-12 is half\nAll hold.", "\\boxed{12}", False),
        ("So it is 19.\n" + "That holds.\n" * 4, "\\boxed{19}", False),
        ("So it is 19.\n\n" + "That holds.\n" * 10, "\\boxed{19}", True),
        ("So it is 19.\n" + "That holds.\n" * 12, "\\boxed{19}", False),  # one paragraph
        ("3*4=12", "It is twelve.", False),  # nothing to compare: the rule for the answer drops it
    ],
)
def test_disagreement_compares_the_end_of_the_thinking_with_the_response(thinking: str, response: str, dropped: bool) -> None:
    assert bool(disagreement(thinking, response)) == dropped


@pytest.mark.parametrize(
    ("question", "text", "dropped"),
    [
        (ENGLISH, "A cow has four legs, so three cows have twelve legs.", False),
        (ENGLISH, "A cow has four legs, 所以 three cows have twelve legs.", True),
        (ENGLISH, "一头牛有四条腿，三头牛有十二条腿。", True),
        (CHINESE, "一头牛有四条腿，三头牛有十二条腿。", False),
        (CHINESE, "一头牛有四条腿，so the answer is 十二条腿。", True),
        (CHINESE, "设 x 为牛的数目，则 $4x = \\text{legs}$，答案是 \\boxed{12}。", False),
        (ENGLISH, "With α = 2π and 𝑥 = 3 we get `print(腿)` and so twelve legs in all for the cows.", False),
        (ENGLISH, "3*4=12", False),
        (ENGLISH, "Three cows have twelve legs, то есть двенадцать.", True),
        ("12+5", "首先 we add 五 to 十二", True),
        ("12+5", "We add five to twelve", False),
        ("12+5", "十二加五", False),
        ("牛は何本の足がありますか。", "ウシの足は四本です。三頭で十二本。", False),
    ],
)
def test_mixed_language_compares_scripts_with_the_question(question: str, text: str, dropped: bool) -> None:
    assert bool(mixed_language(question, text, 0.02)) == dropped


def test_mixed_language_reason_names_share_and_scripts() -> None:
    reason = mixed_language(ENGLISH, "A cow has four legs 所以 twelve in all", 0.02)
    assert reason == "22.2% of its words are not in the question's script (cjk beside latin)"


def test_mixed_language_of_a_question_without_words_says_so_in_its_reason() -> None:
    assert mixed_language("12+5", "首先 we add five", 0.02) == "40.0% of its words are not in its main script (cjk beside latin)"


def test_validation_likeness_finds_the_copied_item_in_question_or_trace() -> None:
    items = likeness_runs(["A farmer has 12 cows and 7 hens. How many legs are there?", "What is 5?"])
    other = "A baker sells 30 loaves in the morning and 12 later. How many loaves are sold?"
    assert validation_likeness(other, "30+12=42", items, 0.9) is None
    copied = validation_likeness("a farmer has 12 cows and 7 hens. how many legs are there?", "62", items, 0.9)
    assert copied == "100% like the validation item 'A farmer has 12 cows and 7 hens. How many legs are there?'"
    assert validation_likeness(other, "I know this: A farmer has 12 cows and 7 hens. How many legs are there? 62", items, 0.9)
    assert validation_likeness("A farmer has 15 goats and 9 hens. How many legs are there?", "62", items, 0.9) is None


def test_long_paragraph_counts_words_between_empty_lines() -> None:
    assert long_paragraph("one two\nthree\n\nfour", 3) is None
    assert long_paragraph("one two\nthree four\n\nfive", 3) == "a paragraph of 4 words; at most 3 may be"


@pytest.mark.parametrize("marker", ["<|im_start|>", "<|im_end|>", "<think>", "</think>"])
def test_faults_of_a_text_with_a_chat_marker_are_reported_whatever_is_switched_on(marker: str) -> None:
    for trace in (Trace("1+1", f"1+1{marker}=2", "\\boxed{2}"), Trace("1+1", "1+1=2", f"\\boxed{{2}}{marker}")):
        assert faults_of(trace, (), DEFAULT.limits) == {"markers": f"holds the chat marker {marker}"}


def test_faults_of_reports_every_rule_that_is_switched_on_and_no_other() -> None:
    trace = graded(ENGLISH, "12", "```python\nprint(3*4)\n```\nI'll guess 13.", "\\boxed{13}")
    assert set(faults_of(trace, DEFAULT.filters, DEFAULT.limits)) == {"answer", "guesswork", "code_blocks"}
    assert set(faults_of(trace, ("code_blocks",), DEFAULT.limits)) == {"code_blocks"}
    assert faults_of(trace, (), DEFAULT.limits) == {}
    strict = ResponseFilterLimits(max_paragraph_words=3)
    assert set(faults_of(trace, ("paragraphs",), strict)) == {"paragraphs"}
