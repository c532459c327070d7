"""Is the final answer right? Exact match of the one boxed answer after normalisation.

For the answer types of the embedded default (integers and short strings) an exact match decides
both ways. A gold answer that cannot be read is `not graded`, never `wrong`: the sample leaves
advantages, pass rates and denominators.
"""

from __future__ import annotations

import re
import unicodedata
from enum import StrEnum
from typing import NamedTuple

from stages.chat import Reply

GRADER = "exact-2"
"""Name and version of this grader, stored with every pass rate."""

_BOXED = "\\boxed{"
_PLAIN_SIGNS = {0x2212: "-", 0xFF0D: "-", 0xFF0B: "+", 0xFF0C: ",", 0xFF0E: "."}
"""Minus, and full-width minus, plus, comma and full stop."""


class Verdict(StrEnum):
    """Three values, so that a failure of the grader is never a failure of the model."""

    RIGHT = "right"
    WRONG = "wrong"
    NOT_GRADED = "not_graded"


class Grade(NamedTuple):
    """A verdict and why."""

    verdict: Verdict
    reason: str


def grade(reply: Reply, gold: str) -> Grade:
    """Grade the response part of a reply against the gold answer; the thinking is never read."""
    wanted = normalise(gold)
    if not wanted:
        return Grade(Verdict.NOT_GRADED, "gold answer is empty")
    boxes = boxed_answers(reply.response)
    if boxes is None:
        return Grade(Verdict.WRONG, "box is not closed")
    if len(boxes) != 1:
        return Grade(Verdict.WRONG, "no boxed answer" if not boxes else "several boxed answers")
    found = normalise(boxes[0])
    return Grade(Verdict.RIGHT, "match") if found == wanted else Grade(Verdict.WRONG, f"{found[:40]} is not {wanted[:40]}")


def boxed_answers(text: str) -> list[str] | None:
    """The contents of every `\\boxed{...}` with nested braces; None when one is not closed. `\\{` and `\\}` are signs, no braces."""
    answers, start = [], text.find(_BOXED)
    while start >= 0:
        depth, end = 1, start + len(_BOXED)
        while end < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 2 if text[end] == "\\" else 1
        if depth:
            return None
        answers.append(text[start + len(_BOXED) : end - 1])
        start = text.find(_BOXED, end)
    return answers


def normalise(answer: str) -> str:
    """Unicode-normal, one space for any run of spaces, a plain minus, no leading `+` or zeros on integers."""
    text = "".join(  # full-width forms and other digits become plain; a superscript is not a digit and stays
        str(unicodedata.decimal(character)) if character.isdecimal() else character for character in unicodedata.normalize("NFC", answer)
    )
    text = text.translate(_PLAIN_SIGNS).strip().strip("$").strip()
    text = re.sub(r"\s+", " ", text)
    if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+", text):
        text = text.replace(",", "")
    integer = re.fullmatch(r"([+-]?)\s?(\d+)", text)
    if integer and text.isascii():
        digits = integer.group(2).lstrip("0") or "0"
        return f"-{digits}" if integer.group(1) == "-" and digits != "0" else digits
    return text
