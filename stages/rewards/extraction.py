"""The final answer out of a response, and its text made plain: one way to write what can be written in many.

`final_answer` takes the last box. A last box that is not closed is no answer, even when an earlier one
is: a reply that was cut off must not be paid for a value on the way. Without any box, the last
`#### ...`, "final answer is ..." or "answer: ..." line counts, unless a box is asked for.

`plain` knows typography only, never mathematics: Unicode digits, signs, superscripts and Greek letters,
LaTeX spacing, sizes and fonts, the marks around a formula, thousands separators outside brackets.
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

from stages.rewards.grading import boxed_answers

_FINAL = (
    re.compile(r"^####[ \t]*(\S[^\n]*)$", re.MULTILINE),
    re.compile(r"(?i:\bfinal answer\b[^\n:=]{0,40}?(?:\bis\b|:|=))[ \t]*(\S[^\n]*)"),
    re.compile(r"(?i:\banswer\b(?:[ \t]+is\b|[ \t]*:))[ \t]*(\S[^\n]*)"),
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ", "0123456789+-()n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₍₎", "0123456789+-()")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋₍₎]+")
_SIGNS = {
    **dict.fromkeys("−–—‒﹣－‐‑", "-"),
    **dict.fromkeys("×✕", r"\times "),
    **dict.fromkeys("·⋅∙", r"\cdot "),
    **dict.fromkeys("≤⩽", r"\le "),
    **dict.fromkeys("≥⩾", r"\ge "),
    **dict.fromkeys("∅⌀", r"\emptyset "),
    "\u2062": r"\cdot ",  # times, comma and plus without a glyph
    "\u2063": ",",
    "\u2064": "+",
    "\ufe0e": "",  # as text, as emoji
    "\ufe0f": "",
    "、": ",",
    "。": ".",
    "∆": r"\Delta ",
    "˚": r"^\circ ",
    "¢": r"\text{ cents}",
    "÷": r"\div ",
    "∕": "/",
    "⁄": "/",
    "√": r"\sqrt ",
    "∛": r"\sqrt[3] ",
    "∞": r"\infty ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "±": r"\pm ",
    "∓": r"\mp ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∖": r"\setminus ",
    "∈": r"\in ",
    "°": r"^\circ ",
    "º": r"^\circ ",
    "℃": r"^\circ C",
    "℉": r"^\circ F",
    "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "′": "'",
    "€": r"\euro ",
    "£": r"\pound ",
    "¥": r"\yen ",
    "₹": r"\rupee ",
}
_GREEK_NAMES = "alpha beta gamma delta epsilon zeta eta theta kappa mu nu xi pi rho sigma tau phi chi psi omega"
_GREEK = {
    unicodedata.lookup(f"GREEK {size} LETTER {name.upper()}"): f"\\{name if size == 'SMALL' else name.capitalize()} "
    for name in _GREEK_NAMES.split()
    for size in ("SMALL", "CAPITAL")
} | {"λ": r"\lambda ", "Λ": r"\Lambda "}
_FONTS = re.compile(r"\\(?:text(?:rm|bf|it|sf|tt|normal|up|md)|math(?:rm|up)|mbox|hbox|operatorname\*?)\s*(?=\{)")
_BOLD = re.compile(r"\\(?:math(?:bf|it|sf|tt|normal)|boldsymbol|bm|pmb)(?:\s*\{([^{}]*)\}|\s+(\w)|\s*(\d))")
_OVER = re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}")
_CHOOSE = re.compile(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}")
_MARKDOWN = re.compile(r"^(?:\*\*([^*]+)\*\*|`([^`]+)`)(?=[.,;]?$)")
_CASES = re.compile(
    r"\$*\s*\\left\s*\\(?:\{|lbrace)\s*\\begin\{(array|aligned|matrix)\}(?:\{[lcr| ]*\})?(.*)\\end\{\1\}\s*\\right\s*\.\s*\$*",
    re.DOTALL,
)
_SEVERAL = re.compile(r"\\text\{(gcd|lcm|max|min)\}\s*(?=\()")
_POWER_OF_TEN = re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)")
_LOOKS = re.compile(r"\\(?:underline|(?:text)?color\s*\{[A-Za-z]+\})\s*(?=\{)")
_NO_MEANING = re.compile(
    r"\\(?:left|right)\s*\.|\\(?:displaystyle|textstyle|limits|nolimits|left|right|[bB]ig{1,2}[lrm]?|mathrm|rm|bf|it|[lL]arge|LARGE|[hH]uge)(?![A-Za-z])"
)
_SPACES = re.compile(r"(?<!\\)\\(?:[,;: >]|$|quad(?![a-z])|qquad(?![a-z])|hspace\{[^{}]*\}|enspace(?![a-z])|thinspace(?![a-z]))|~|\\\n")
_GROUPED = re.compile(r"(?<![\d.,/^_])\d{1,3}(?: \d{3})+(?![\d/]|\.?\d)")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!,?\d)")
_ORDINAL = re.compile(r"(\d)(?:\^?\{?\\text\{ ?(?:th|st|nd|rd) ?\}\}?|\^\{(?:th|st|nd|rd)\}|(?:th|st|nd|rd)\b)")
_LEAD = re.compile(r"(?:\\text\{)?\s*(?i:(?:the )?(?:final )?answer(?: is|:)|approximately|about)\s*:?\s*\}?\s*(?=\S)")


class Extraction(NamedTuple):
    """What a response gives as its answer; None, and why, when it gives none."""

    answer: str | None
    reason: str


def final_answer(response: str, *, only_boxed: bool = False, one_box: bool = False) -> Extraction:
    """The answer of a response: its last box, else (unless `only_boxed`) its last line that names an answer.

    `one_box` refuses a response with several boxes, for where the format counts.
    """
    boxes = boxed_answers(response.replace(r"\fbox{", r"\boxed{").replace(r"\boxed {", r"\boxed{"))
    if boxes is None:
        return Extraction(None, "box is not closed")
    if len(boxes) > 1 and one_box:
        return Extraction(None, "several boxed answers")
    if boxes:
        return Extraction(innermost(boxes[-1]), "boxed")
    if only_boxed or one_box:
        return Extraction(None, "no boxed answer")
    for pattern in _FINAL:
        if found := pattern.findall(response):
            return Extraction(found[-1].strip(), "stated")
    return Extraction(None, "no final answer")


def innermost(text: str) -> str:
    """The content of a box, of a box in a box, and so on five times; text without a box as it is."""
    for _ in range(5):
        boxes = boxed_answers(text)
        if not boxes:
            return text
        text = boxes[-1]
    return text


def plain(text: str) -> str:
    """An answer with its typography made plain; `plain(plain(text)) == plain(text)` for what people write."""
    text = _RAISED.sub(lambda run: "^{" + run.group().translate(_SUPERSCRIPTS) + "}", text)
    text = _LOWERED.sub(lambda run: "_{" + run.group().translate(_SUBSCRIPTS) + "}", text)
    text = "".join(_character(character) for character in text)
    text = unicodedata.normalize("NFKC", text).strip()
    text = re.sub(r",\\!\s*", ",", text).replace(r"\!", "")
    text = _MARKDOWN.sub(r"\1\2", text)
    if system := _CASES.fullmatch(text):
        text = rf"\begin{{cases}}{system[2].replace('&', ' ')}\end{{cases}}"
    text = _LOOKS.sub("", text)
    text = _FONTS.sub(r"\\text", text)
    text = _SEVERAL.sub(r"\\\1", text)
    text = _BOLD.sub(r"\1\2\3", text)
    text = _OVER.sub(r"\\frac{\1}{\2}", text)
    text = _CHOOSE.sub(r"\\binom{\1}{\2}", text)
    text = re.sub(r"\\(?:[dtcs]|nice)frac(?![A-Za-z])", r"\\frac", text)
    text = _POWER_OF_TEN.sub(r"\\times ", text).replace("+/-", r"\pm ")
    text = re.sub(r"(?<!\\)\\(?:[()]|\[(?!\d+\.?\d*\s*(?:pt|em|ex|mm)\])|\])", " ", text)
    text = re.sub(r"\{\\(?:rm|bf|it|text)\s+([^{}]*)\}", r"\\text{\1}", text)
    text = _NO_MEANING.sub("", text)
    text = _SPACES.sub(" ", text)
    text = _dollars(text)
    text = re.sub(r"\^?\\(?:text)?degree(?![a-z])|(?<=\d)\s*\\deg(?![a-z])", r"^\\circ ", text.replace(r"\%", "%").replace("{,}", ","))
    text = re.sub(r"\\text\{\s*(\\dollar|\^\\circ)\s*\}", r"\1 ", text)
    text = re.sub(r"\\(?:mathbb|Bbb)\s*([A-Z])(?![A-Za-z])", r"\\mathbb{\1}", re.sub(r"\.(?=\}$)", "", text))
    text = re.sub(r"\s+", " ", text).strip()
    if (whole := re.fullmatch(r"\\text\{([^{}]*)\}", text)) and _LEAD.match(whole[1]):
        text = whole[1].strip()
    text = re.sub(r"^(?:\\approx|=|:)\s*", "", _LEAD.sub("", text, count=1) if _LEAD.match(text) else text)
    text = re.sub(r"\b([ap])\.m\b\.?", r"\1m", text)
    text = text.rstrip(" .,;") if not text.endswith(("...", r"\.")) else text
    text = _ORDINAL.sub(r"\1", text)
    text = _GROUPED.sub(lambda run: run.group().replace(" ", ""), text)
    return _without_thousands(text)


def _character(character: str) -> str:
    if character.isascii():
        return character
    if character in _SIGNS:
        return _SIGNS[character]
    if unicodedata.category(character) == "Cf":  # of no width, or the direction of the text
        return ""
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    usual = unicodedata.normalize("NFKC", character)
    if usual in _GREEK:
        return _GREEK[usual]
    parts = usual.split("⁄")
    if len(parts) == 2 and all(part.isdecimal() for part in parts):  # one half in one character
        return f"\\frac{{{parts[0]}}}{{{parts[1]}}}"
    return character


def _dollars(text: str) -> str:
    """Paired dollar signs mark a formula and go; an escaped or a lone leading one is a currency."""
    text = text.replace(r"\$", r"\dollar ")
    if text.count("$") % 2 == 0:
        return text.replace("$", " ").strip()
    return re.sub(r"\$", "", re.sub(r"^(-?)\s*\$\s*(?=[\d.])", r"\\dollar \1", text))


def _without_thousands(text: str) -> str:
    """`1,234` outside brackets becomes `1234`; `(1,234)` and `{1,234}` keep their comma."""
    parts, depth, done = [], 0, 0
    for found in _THOUSANDS.finditer(text):
        between = text[done : found.start()]
        depth += sum(between.count(mark) for mark in ("(", "[", r"\{")) - sum(between.count(mark) for mark in (")", "]", r"\}"))
        parts += [between, found.group().replace(",", "") if depth == 0 else found.group()]
        done = found.end()
    return "".join((*parts, text[done:]))
