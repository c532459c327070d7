"""Is an answer in mathematics an expression in place of its value? It is equal to the gold answer, and solves nothing.

A policy that is rewarded for whatever equals the gold answer learns to write the question down. So, beside equality, an
answer must not be an expression out of the question (`\\frac{6}{8}` where that was to be reduced), made of the question's
numbers, or with arithmetic left to do where the gold answer has none (`3+4` for 7). Where the gold answer holds variables
or functions, other forms are answers and only what stands in the question counts.
"""

from __future__ import annotations

import re
from collections import Counter

_OPERATION = re.compile(r"[\w)}\]][-+*/^=×·÷!]|\\(?:[dt]?frac|cdot|times|div|sqrt|[dt]?binom|choose)")
_DIGITS = re.compile(r"\d+")
_ONE_FRACTION = re.compile(r"-?(?:\\[dt]?frac(?:\{\d+\}\{\d+\}|\d\d)|\d+/\d+)(?:\\?[A-Za-z%]*)")
_LEFT_TO_DO = (
    re.compile(r"[\d)}\]](?:[-+−±]|\\pm|\\mp)[\di({\\.√]"),
    re.compile(r"[\d)}\]](?:[*×·÷]|\\cdot|\\times|\\div)(?!10\^)[\d({\\.√]"),
    re.compile(r"\\(?:sum|prod|int|lim)(?![A-Za-z])"),
)
"""Arithmetic that was not done, by kind: additions, products (scientific notation is none), sums over a range and the like."""
_NO_VARIABLES = re.compile(
    r"\\(?:[dt]?frac|sqrt|pi|left|right|circ|infty|cdot|times|div|pm|mp)(?![A-Za-z])|(?<![A-Za-z])[A-Za-z](?:\([A-Za-z]\))?=(?!=)|(?<![A-Za-z\\])i(?![A-Za-z])"
)
"""What of a formula holds letters but neither variable nor function: how it is set, the name that it is given, i."""
_TEXT = re.compile(r"\\(?:text|mathrm)\{[^{}]*\}")


def is_unsolved(answer: str, gold: str, question: str) -> bool:
    """Whether an answer that equals the gold answer is an expression in its place. Without a question nothing is."""
    answer, gold, question = (re.sub(r"[\s$]|\\[,;:! ]", "", _TEXT.sub(",", text)) for text in (answer, gold, question))
    if not question or answer == gold:
        return False
    value = answer.rpartition("=")[2].strip(",")
    numbers, wanted, asked = (Counter(_DIGITS.findall(text)) for text in (value, gold, question))
    if answer in question and numbers != wanted and _OPERATION.search(answer):
        return True
    if re.search(r"[A-Za-z]", _NO_VARIABLES.sub("", gold)):
        return False
    if numbers and numbers != wanted and numbers <= asked and _OPERATION.search(value) and not _ONE_FRACTION.fullmatch(value):
        return True
    return any(kind.search(value) and not kind.search(gold) for kind in _LEFT_TO_DO)
