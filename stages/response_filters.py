"""Which worked traces are fit to learn from: Qwen3's six rules and R1's readability rules, as pure functions.

Each rule takes text and gives the reason to drop it, or None. `markers` is always on: text with a chat marker would
be read as another turn, or as the end of the thinking. The papers name the rules (Qwen3, arXiv
2505.09388, 4.1; R1, arXiv 2501.12948, 2.3.1 and 2.3.3) and publish neither wording nor limits, so the
wording here and the limits (`ResponseFilterLimits`) are ours.
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from stages.chat import RESERVED
from stages.config import ResponseFilter, ResponseFilterLimits
from stages.rewards.grading import Grade, Verdict, boxed_answers, normalise

MARKERS = "markers"
"""Name of the rule that no setting turns off."""
Runs = frozenset[tuple[str, ...]]
"""The runs of consecutive words of a text."""

_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_TOKEN = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W\d_{_UNSPACED}]+")
_FORMULA = re.compile(r"```.*?```|`[^`\n]*`|\$[^$]*\$|\\[A-Za-z]+", re.DOTALL)
_WRITER = (
    r"(?<!\bif )(?<!\bwhen )(?<!\bsuppose )\b(?:i|we)"
    r"(?:'ll|'m|'re|'d|'ve| will| am| are| would| must| have to| had to| can only| could only)?"
)
_HOW = r"(?: (?:just|only|simply|wildly|randomly|blindly|merely|really|still|be|making|take|make|taking|hazard))*"
_GUESS = re.compile(
    rf"{_WRITER}{_HOW} (?:an? (?:\w+ )?)?guess(?:ed|ing|work)?\b|\b(?:let me|let's){_HOW} (?:an? (?:\w+ )?)?guess\b"
    r"|\bmy (?:best )?guess is\b|\b(?:this|that|it|mine)(?: is|'s)(?: just| only| but)? an? (?:\w+ )?guess\b"
    r"|(?:^|[.;,!?]\s*)(?:just|wildly|simply|wild|random|lucky|blind|pure) guess(?:ing|work)?(?=\s*(?:[:,.;!]|$))"
    r"|(?:\bso,? i|\bi'll|\bi will|\blet me|\bi'd|\bi (?:must|have to|can only))(?: just| simply)?"
    r" (?:randomly (?:pick|choose|select)|(?:pick|choose|select|answer)\b[^.\n]{0,30}? at random)\b"
    rf"|{_WRITER}{_HOW}(?: have| had)? no (?:idea|clue)\b|(?:^|[.;,!?]\s*)no (?:idea|clue)\b"
    r"|\bnot sure,? (?:so|but) (?:i'll|i will|let's) (?:say|go with|pick)\b"
    r"|瞎猜|乱猜|随便猜|猜一个|蒙一个",
    re.IGNORECASE | re.MULTILINE,
)
_NUMBER = re.compile(
    r"(?:(?<![\w.\-])|(?<=[\w)]-)|(?<=[\w)] - ))"  # a minus between numbers is no sign
    r"-?(?:\\frac\{-?\d+\}\{\d+\}|\d+/\d+|\d+(?:\.\d+)?)"
    r"(?!\w|\.\d|\s*[-+*/×·^=]\s*[-\d(])"
)
"""A number that a text gives: neither part of another one nor an operand or left of an equals sign."""
_DIGITS = r"\d{1,300}"
_REPEATED_RUN, _LIKENESS_RUN = 8, 3
_TAIL_LINES, _TAIL_CHARACTERS = 2, 300
_ENDING_LINES = 10


class Trace(NamedTuple):
    """A worked answer to a problem."""

    question: str
    thinking: str
    response: str
    grade: Grade | None = None
    """Of the response, for the rule `answer`."""


def faults_of(
    trace: Trace, filters: Sequence[ResponseFilter], limits: ResponseFilterLimits, validation: Mapping[str, Runs] | None = None
) -> dict[str, str]:
    """The filters that drop a trace, each with its reason, `markers` before those that are asked for; empty when it passes.

    `validation` is what `likeness_runs` gives.
    """
    marker = chat_marker(trace.thinking) or chat_marker(trace.response)
    found = {MARKERS: None if marker is None else f"holds the chat marker {marker}"}
    found |= {name: _fault(name, trace, limits, validation or {}) for name in filters}
    return {name: reason for name, reason in found.items() if reason is not None}


def _fault(name: ResponseFilter, trace: Trace, limits: ResponseFilterLimits, validation: Mapping[str, Runs]) -> str | None:
    match name:
        case "answer":
            assert trace.grade is not None
            return wrong_answer(trace.grade)
        case "repetition":
            return repetition(trace.thinking, limits.max_repeated_share, limits.max_line_repeats)
        case "guesswork":
            return guesswork(trace.thinking, trace.response)
        case "agreement":
            return disagreement(trace.thinking, trace.response)
        case "language":
            return mixed_language(trace.question, f"{trace.thinking}\n{trace.response}", limits.max_foreign_share)
        case "validation":
            return validation_likeness(trace.question, f"{trace.thinking}\n{trace.response}", validation, limits.max_similarity)
        case "paragraphs":
            return long_paragraph(trace.thinking, limits.max_paragraph_words)
        case "code_blocks":
            return "the thinking holds a code block" if "```" in trace.thinking else None


def chat_marker(text: str) -> str | None:
    """The first of the chat template's markers that a text holds."""
    return next((marker for marker in RESERVED if marker in text), None)


def wrong_answer(grade: Grade) -> str | None:
    """Qwen3 (1): the final answer must be right; one that cannot be graded is not verified, which the reason says."""
    verdict, reason = grade
    if verdict is Verdict.RIGHT:
        return None
    return f"not graded: {reason}" if verdict is Verdict.NOT_GRADED else reason


def repetition(thinking: str, max_repeated_share: float, max_line_repeats: int) -> str | None:
    """Qwen3 (2), R1: no substantial repetition: runs of eight words that came before, or one line over and over."""
    tokens = _TOKEN.findall(thinking)
    runs = [tuple(tokens[start : start + _REPEATED_RUN]) for start in range(len(tokens) - _REPEATED_RUN + 1)]
    share = 1 - len(set(runs)) / len(runs) if runs else 0.0
    if share > max_repeated_share:
        return f"{share:.0%} of its {_REPEATED_RUN}-word runs occurred before; at most {max_repeated_share:.0%} may"
    lines, again = [line.strip() for line in thinking.splitlines() if line.strip()], 0
    for before, line in itertools.pairwise(lines):
        again = again + 1 if line == before else 0
        if again > max_line_repeats:
            return f"the line {line[:40]!r} follows itself more than {max_line_repeats} times"
    return None


def guesswork(thinking: str, response: str) -> str | None:
    """Qwen3 (3): no plain guessing: an answer without any thinking, or one that says so where it ends.

    A guess on the way that is checked later does not count: only the end of the thinking and the response are read.
    Nor does chance in the problem's own matter ("Ann picks at random"): the writer must be the one who guesses.
    """
    if not _TOKEN.search(thinking):
        return "an answer without thinking"
    found = _GUESS.search(_tail(thinking)) or _GUESS.search(response)
    return f"says {found.group(0)!r}" if found else None


def disagreement(thinking: str, response: str) -> str | None:
    """Qwen3 (4): the thinking must end in the answer that the response gives.

    The last box of the thinking decides; without one, the answer must stand in its last paragraph or its last ten
    lines. Numbers are compared as numbers (1/2, 0.5, \\dfrac{1}{2}). A response without one boxed answer says nothing
    that could be compared: the rule `answer` is for that.
    """
    given = boxed_answers(response)
    if not given or len(given) != 1:
        return None
    answer, reached = normalise(given[0]), boxed_answers(thinking)
    if reached:
        last = normalise(reached[-1])
        return None if _same(last, answer) else f"the thinking ends in {last[:40]!r}, the response in {answer[:40]!r}"
    return None if _states(_ending(thinking), answer) else f"the end of the thinking does not hold {answer[:40]!r}"


def mixed_language(question: str, text: str, max_foreign_share: float) -> str | None:
    """Qwen3 (5), R1: the trace keeps to the script of the question; formulas, code and single Latin letters do not count.

    For a question without words it is the script of most words of the trace. Two languages of one script
    (English, French) are not told apart.
    """
    found = _scripts(text)
    if not found:
        return None
    wanted = _scripts(question)
    home = (wanted or found).most_common(1)[0][0]
    share = 1 - found[home] / found.total()
    if share <= max_foreign_share:
        return None
    other = next(script for script, _ in found.most_common() if script != home)
    whose = "the question's" if wanted else "its main"
    return f"{share:.1%} of its words are not in {whose} script ({other.lower()} beside {home.lower()})"


def likeness_runs(questions: Sequence[str]) -> dict[str, Runs]:
    """The three-word runs of every validation question, for `validation_likeness`."""
    return {question: _runs(question) for question in questions}


def validation_likeness(question: str, text: str, validation: Mapping[str, Runs], max_similarity: float) -> str | None:
    """Qwen3 (6): neither the question nor the trace is too much like a validation item.

    Likeness is the share of three-word runs that question and item have in common (Jaccard), or the
    share of the item's runs that the trace holds, whichever is larger.
    """
    asked, written = _runs(question), _runs(text)
    for item, runs in validation.items():
        likeness = max(len(asked & runs) / len(asked | runs), len(written & runs) / len(runs)) if runs else 0.0
        if likeness > max_similarity:
            return f"{likeness:.0%} like the validation item {item[:60]!r}"
    return None


def long_paragraph(thinking: str, max_words: int) -> str | None:
    """R1 (2.3.3): no long paragraphs in the thinking."""
    longest = max((len(_TOKEN.findall(part)) for part in re.split(r"\n\s*\n", thinking)), default=0)
    return f"a paragraph of {longest} words; at most {max_words} may be" if longest > max_words else None


def _runs(text: str) -> Runs:
    tokens = [token.casefold() for token in _TOKEN.findall(text)]
    size = min(_LIKENESS_RUN, len(tokens))
    return frozenset(tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)) if size else frozenset()


def _tail(thinking: str) -> str:
    lines = [line for line in thinking.splitlines() if line.strip()]
    return "\n".join(lines[-_TAIL_LINES:])[-_TAIL_CHARACTERS:]


def _ending(thinking: str) -> str:
    """The last paragraph or the last ten lines, whichever is more."""
    text = thinking.rstrip()
    lines = [line for line in text.splitlines() if line.strip()]
    return max(re.split(r"\n[^\S\n]*\n", text)[-1], "\n".join(lines[-_ENDING_LINES:]), key=len)


def _value(text: str) -> Fraction | None:
    """A plain number, a decimal one or a simple fraction as a number; None for everything else."""
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", re.sub(r"\s*([/{}])\s*", r"\1", _one_fraction(text).strip()))
    found = re.fullmatch(
        rf"([+-]?)(?:({_DIGITS}(?:\.{_DIGITS})?|\.{_DIGITS})|({_DIGITS})/({_DIGITS})|\\frac{{(-?{_DIGITS})}}{{({_DIGITS})}})", plain
    )
    if found is None:
        return None
    sign, number, *pairs = found.groups()
    top, bottom = (number, "1") if number else next(pair for pair in (pairs[:2], pairs[2:]) if pair[0])
    if not Fraction(bottom):
        return None
    return (-1 if sign == "-" else 1) * Fraction(top) / Fraction(bottom)


def _one_fraction(text: str) -> str:
    return re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)


def _same(one: str, other: str) -> bool:
    """Whether two answers are the same number, or the same text."""
    value = _value(one)
    return value == _value(other) if value is not None else _one_fraction(one) == _one_fraction(other)


def _states(text: str, answer: str) -> bool:
    """Whether a text gives an answer: a number that is neither part of another one nor an operand or left of an equals sign;
    another answer without regard to spaces and case.
    """
    wanted = _value(answer)
    if wanted is None:
        given, stated = ("".join(_one_fraction(each).split()).casefold() for each in (answer, text))
        return given in stated
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", _one_fraction(text.replace("\u2212", "-")))
    return any(_value(found.group()) == wanted for found in _NUMBER.finditer(plain))


def _scripts(text: str) -> Counter[str]:
    """Words by script."""
    found = Counter(_script(word) for word in _WORD.findall(_FORMULA.sub(" ", text)))
    del found[""]
    return found


@functools.lru_cache(maxsize=65536)
def _script(word: str) -> str:
    """The script of a word's first letter; none for signs of formulas: Greek, styled letters, single Latin ones."""
    script = unicodedata.name(word[0], "").split(" ")[0]
    if script in ("HIRAGANA", "KATAKANA"):  # Japanese writes in three scripts
        return "CJK"
    if script in ("GREEK", "MATHEMATICAL", "DOUBLE-STRUCK", "SCRIPT", "MODIFIER", "") or (script == "LATIN" and len(word) == 1):
        return ""
    return script
