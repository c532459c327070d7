"""What an answer stands for: a number, words, a list, a set, a tuple, an interval, a matrix, a name with its value, a relation.

`read_value` reads the marks of a plain text (`extraction.plain`) into one of these; formulas inside them are trees
(`expressions`). What neither grammar covers becomes words, or a formula without a tree. The conventions are told in
`equivalence`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

from stages.rewards.expressions import MAX_DEPTH, Mark, TooLargeError, Tree, UnreadableError, marks, read, real, variables

MAX_ITEMS = 60
_OPENS, _CLOSES = frozenset(("(", "[", "{", "langle")), frozenset((")", "]", "}", "rangle"))
_RELATIONS = frozenset(("=", "<", ">", "le", "ge", "ne", "in", "approx", "equiv"))
_FLIPPED = {"<": ">", ">": "<", "le": "ge", "ge": "le", "=": "=", "ne": "ne"}
_CURRENCIES = {"dollar": "$", "euro": "euro", "pound": "£", "yen": "yen", "rupee": "rupee"}
_SYNONYMS = {
    "m": "meter metre mtr", "cm": "centimeter centimetre", "mm": "millimeter millimetre", "km": "kilometer kilometre",
    "in": "inch inches", "ft": "foot feet", "yd": "yard", "mi": "mile", "g": "gram gm gramme", "kg": "kilogram kilo", "mg": "milligram",
    "lb": "lbs", "pound": "", "oz": "ounce", "l": "liter litre", "ml": "milliliter millilitre", "gal": "gallon", "s": "sec second",
    "min": "minute mins", "h": "hr hour hrs", "day": "", "week": "wk", "month": "", "year": "yr", "deg": "degree degs", "rad": "radian",
    "$": "dollar usd buck", "cent": "", "euro": "eur", "km/h": "kmh kph kmph", "mi/h": "mph", "unit": "", "n": "newton", "j": "joule",
    "w": "watt", "v": "volt", "pm": "", "am": "", "ha": "hectare", "acre": "", "people": "person", "hz": "hertz", "kw": "kilowatt",
    "yen": "jpy", "rupee": "inr rs", "yuan": "rmb cny",
    "celsius": "", "fahrenheit": "", "ton": "tonne", "man": "men", "child": "children", "way": "", "time": "", "point": "pts pt",
}  # fmt: skip
_UNITS = {word: unit for unit, words in _SYNONYMS.items() for word in (unit, *words.split())}
_SHORT_WORDS = "sq cu per pct no yes the an not odd all is of to at be if one two six ten red"
_SHORT = frozenset(word + end for word in _UNITS for end in ("", "s") if 1 < len(word) < 4) | set(_SHORT_WORDS.split())
"""Words of two and three letters; other runs of so few letters are variables side by side."""
_LONE_UNITS = frozenset("msghLlNJWV")
_FACTORS = {"hundred": 100, "thousand": 1_000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_TURNING_WORDS = "below under less fewer more negative minus not over above remainder plus least most except off early late"
_TURNS = frozenset((*_TURNING_WORDS.split(), *_FACTORS, "basis", "mille", "permille", "wrong", "incorrect", "false"))
"""Words behind a number that make it another: 5 below is not 5."""
_OPERATIONS = (
    "squared cubed factorial doubled tripled halved root choose divided multiplied raised mod modulo by to through thru until point "
    "halves thirds fourths fifths sixths sevenths eighths ninths tenths hundredths thousandths millionths billionths quadrillion lakh crore"
)
_FIRST_TURNS = frozenset(_OPERATIONS.split())
"""Words that do so where they come first: 5 tenths, 5 choose two."""
_NUMBER_WORDS = "half third two three four five six seven eight nine ten eleven twelve"
_LAST_TURNS = frozenset(_NUMBER_WORDS.split())
"""And where they come last: 5 of seven, 35 per cent of one half."""
_REALS = frozenset(("all real numbers", "all reals", "all real", "real numbers"))
_NOISE = frozenset(("the", "a", "an", "of", "is", "are"))
_MATRICES = frozenset(("matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix", "array"))


class Formula(NamedTuple):
    """One value; `tree` is None when our grammar does not cover `text`."""

    tree: Tree | None
    text: str
    unit: str = ""


class Words(NamedTuple):
    """An answer in words."""

    text: str


class Items(NamedTuple):
    """Several values."""

    kind: Literal["set", "list", "sequence", "tuple", "union", "system", "ratio"]
    items: tuple[Value, ...]


class Interval(NamedTuple):
    """From `low` to `high`."""

    low: Formula
    high: Formula
    low_closed: bool
    high_closed: bool


class Matrix(NamedTuple):
    """Rows of values."""

    rows: tuple[tuple[Value, ...], ...]


class Named(NamedTuple):
    """`name = value`, or a name with the interval it lies in."""

    name: str
    value: Value


class Relation(NamedTuple):
    """An equation or inequality between two formulas; `sign` is =, <, le, ne."""

    sign: str
    left: Tree
    right: Tree


Value = Formula | Words | Items | Interval | Matrix | Named | Relation


def read_value(text: str) -> Value:
    """What a plain text (`extraction.plain`) stands for. Raises TooLargeError."""
    tokens = _with_percent(marks(text, _SHORT))
    if max(itertools.accumulate(map(_depth, tokens)), default=0) > MAX_DEPTH:
        raise TooLargeError(f"nested deeper than {MAX_DEPTH}")
    try:
        return _list(tokens)
    except UnreadableError:
        return _unreadable(tokens)


def _with_percent(tokens: list[Mark]) -> list[Mark]:
    words = ("percent", "percents", "percentage", "pct")
    found: list[Mark] = []
    for mark in tokens:
        name = mark.text.lower() if mark.kind == "word" else ""
        if name == "cent" and found and found[-1].text.lower() == "per":
            found[-1] = Mark("sign", "%", found[-1].spaced)
        else:
            found.append(Mark("sign", "%", mark.spaced) if name in words else mark)
    return found


def _unreadable(tokens: Sequence[Mark]) -> Value:
    words = [mark.text.casefold() for mark in tokens if mark.kind in ("word", "letter")]
    signs = ("and", "or", "-", "'", ",", "(", ")", "{", "}", "no")
    if any(mark.kind == "word" for mark in tokens) and all(mark.kind in ("word", "letter") or mark.text in signs for mark in tokens):
        return Words(_without_noise(words))
    return Formula(None, _text(tokens))


def _text(tokens: Sequence[Mark]) -> str:
    """LaTeX for the tokens, one space between two: what math-verify gets, and what texts are compared by."""
    return " ".join(_source(mark) for mark in tokens)


def _source(mark: Mark) -> str:
    if mark.kind == "command":
        environment, _, name = mark.text.partition(":")
        return f"\\{environment}{{{name}}}" if name else f"\\{mark.text}"
    return f"\\text{{{mark.text}}}" if mark.kind == "word" else mark.text


def _split(tokens: Sequence[Mark], separators: frozenset[str]) -> tuple[list[list[Mark]], list[str]]:
    """Cut at separators outside brackets; the pieces, and the separators between them."""
    pieces: list[list[Mark]] = [[]]
    found: list[str] = []
    depth = 0
    for mark in tokens:
        depth += _depth(mark)
        if depth == 0 and mark.kind in ("sign", "command") and mark.text in separators:
            pieces.append([])
            found.append(mark.text)
        else:
            pieces[-1].append(mark)
    return pieces, found


_LIST_SEPARATORS = frozenset((",", ";", "and", "or"))


def _list(tokens: Sequence[Mark]) -> Value:
    """A list, or the one value that stands there."""
    if tokens and tokens[0].text in ("[", "]") and tokens[-1].text in ("[", "]") and "".join((tokens[0].text, tokens[-1].text)) != "[]":
        return _interval(tokens)  # ]1, 2[
    pieces, separators = _split(tokens, _LIST_SEPARATORS)
    values = [Words("...") if [mark.text for mark in piece] == ["dots"] else _one(piece) for piece in pieces if piece]
    if not values:
        raise UnreadableError("nothing is there")
    if len(values) == 1 and len(separators) <= 1:
        return values[0]
    values = _flat(values)
    if len(values) > MAX_ITEMS:
        raise TooLargeError(f"more than {MAX_ITEMS} items")
    if Words("...") in values:
        return Items("sequence", tuple(values))
    first = values[0]
    if isinstance(first, Named) and not any(isinstance(value, Named | Relation) for value in values[1:]):
        return Named(first.name, Items("list", (first.value, *values[1:])))
    named = [value for value in values if isinstance(value, Named)]
    if len(named) == len(values):
        if len({value.name for value in named}) == 1:
            return Named(named[0].name, _joined([value.value for value in named], "and" in separators))
        return Items("list" if "or" in separators else "system", tuple(values))
    return Items("list", tuple(values))


def _joined(values: list[Value], narrows: bool) -> Value:
    """Several statements about one name: ranges join to a union, or with `and` to what they share."""
    ranges = [value for value in values if isinstance(value, Interval)]
    if len(ranges) < len(values):
        return Items("list", tuple(values))
    if not narrows:
        return Items("union", tuple(values))
    found = ranges[0]
    for other in ranges[1:]:
        if number_of(other.low) > number_of(found.low):
            found = found._replace(low=other.low, low_closed=other.low_closed)
        if number_of(other.high) < number_of(found.high):
            found = found._replace(high=other.high, high_closed=other.high_closed)
    return found


def number_of(formula: Formula) -> float:
    """The value of an end of an interval; infinities too. Raises UnreadableError for what is no number."""
    found = None if formula.tree is None else real(formula.tree)
    if found is None:
        raise UnreadableError("an end of an interval that is no number")
    return found


def _one(tokens: Sequence[Mark]) -> Value:
    """One value: a relation, a set in any notation, a matrix, words, or a formula with its unit."""
    if not tokens:
        raise UnreadableError("nothing is there")
    pieces, signs = _split(tokens, _RELATIONS)
    if signs:
        return _relation(pieces, signs)
    is_set = tokens[0].text == "{" and _enclosed(tokens)
    if not is_set and any(mark.kind == "command" and mark.text in ("pm", "mp") for mark in tokens):
        return Items("list", (_one(_with_sign(tokens, "+", "-")), _one(_with_sign(tokens, "-", "+"))))
    pieces, signs = _split(tokens, frozenset(("cup",)))
    if signs:
        return Items("union", tuple(_one(piece) for piece in pieces))
    if (found := _without(tokens) or _set(tokens)) is not None:
        return found
    if all(mark.kind == "word" for mark in tokens):
        return _words(tokens)
    if (scaled := _scaled(tokens)) is not None:
        return scaled
    pieces, signs = _split(tokens, frozenset((":",)))
    if signs and all(pieces):
        return Items("ratio", tuple(_one(piece) for piece in pieces))
    return _measured(tokens)


def _with_sign(tokens: Sequence[Mark], plus: str, minus: str) -> list[Mark]:
    signs = {"pm": plus, "mp": minus}
    return [Mark("sign", signs[mark.text], mark.spaced) if mark.kind == "command" and mark.text in signs else mark for mark in tokens]


def _words(tokens: Sequence[Mark]) -> Value:
    if len(tokens) == 1 and len(tokens[0].text) == 1:
        return Formula(Tree("variable", value=tokens[0].text), tokens[0].text)
    text = _without_noise([mark.text.casefold() for mark in tokens])
    return _line() if text in _REALS else Words(text)


def _without_noise(words: Sequence[str]) -> str:
    """Words without articles; the last one may be a name: plan A."""
    return " ".join(word for index, word in enumerate(words) if word not in _NOISE or index == len(words) - 1)


def _depth(mark: Mark) -> int:
    """1 for a mark that opens a bracket, -1 for one that closes one."""
    if mark.kind not in ("sign", "command"):
        return 0
    return (mark.text in _OPENS or mark.text.startswith("begin:")) - (mark.text in _CLOSES or mark.text.startswith("end:"))


def _enclosed(tokens: Sequence[Mark]) -> bool:
    """Whether the first bracket closes at the last token."""
    if len(tokens) < 2 or tokens[0].text not in _OPENS or tokens[-1].text not in _CLOSES or "word" in (tokens[0].kind, tokens[-1].kind):
        return False
    depth = 0
    for index, mark in enumerate(tokens):
        depth += _depth(mark)
        if depth == 0:
            return index == len(tokens) - 1
    return False


def _set(tokens: Sequence[Mark]) -> Value | None:
    """What brackets, braces and the signs of sets hold; None when the tokens are no such thing."""
    first = tokens[0]
    if first.kind == "command" and first.text == "emptyset" and len(tokens) == 1:
        return Items("set", ())
    if _is_line(tokens):
        return _line()
    if first.kind == "command" and first.text.startswith("begin:"):
        return _matrix(tokens)
    if first.kind == "letter" and first.text.isupper() and _enclosed(tokens[1:]) and tokens[1].text == "(":
        tokens = tokens[1:]  # the name of a point
        if len(_split(tokens[1:-1], frozenset(","))[0]) < 2:
            return None
    if not _enclosed(tokens):
        return None
    first, inner, kind = tokens[0], tokens[1:-1], (tokens[0].text, tokens[-1].text)
    pieces, _ = _split(inner, frozenset((",", ";")))
    if first.text == "{":
        if first.kind == "sign" and len(pieces) == 1:
            return _one(inner)
        return _braces(inner, pieces)
    if kind == ("langle", "rangle"):
        return Items("tuple", tuple(_one(piece) for piece in pieces))
    if len(pieces) == 1:
        return _list(inner) if kind in (("(", ")"), ("[", "]")) else None
    if len(pieces) == 2 and kind != ("(", ")"):
        return _interval(tokens)
    if len(pieces) > MAX_ITEMS:
        raise TooLargeError(f"more than {MAX_ITEMS} items")
    values = tuple(_one(piece) for piece in pieces)
    if len(values) == 2 and any(_infinite(value) for value in values):
        return _interval(tokens)
    return Items("tuple", values)


def _without(tokens: Sequence[Mark]) -> Value | None:
    """Intervals with points taken out of them, `[0, 3] \\setminus \\{1\\}`; None when the tokens are no such thing."""
    pieces, signs = _split(tokens, frozenset(("setminus", "-") if _is_line(tokens[:4]) else ("setminus",)))
    if len(signs) != 1 or not all(pieces):
        return None
    taken = _one(pieces[1])
    points = [item for item in (taken.items if isinstance(taken, Items) else (taken,)) if isinstance(item, Formula)]
    found = intervals(_one(pieces[0]))
    if not points or not found or (isinstance(taken, Items) and len(points) < len(taken.items)):
        raise UnreadableError("a set without something else than points")
    for point in sorted(points, key=number_of):
        found = [part for interval in found for part in _cut(interval, point)]
    return Items("union", tuple(found))


def _cut(interval: Interval, point: Formula) -> list[Interval]:
    low, at, high = number_of(interval.low), number_of(point), number_of(interval.high)
    if not low <= at <= high:
        return [interval]
    below = [Interval(interval.low, point, interval.low_closed, False)] if low < at else []
    above = [Interval(point, interval.high, False, interval.high_closed)] if at < high else []
    return below + above


def intervals(value: Value) -> list[Interval]:
    """The intervals of a union, a pair as an open one, a point as a closed one. Raises UnreadableError for anything else."""
    if isinstance(value, Interval):
        return [value]
    if isinstance(value, Formula):
        return [Interval(value, value, True, True)]
    if isinstance(value, Items) and value.kind == "tuple" and len(value.items) == 2:
        low, high = value.items
        if isinstance(low, Formula) and isinstance(high, Formula):
            return [Interval(low, high, False, False)]
    if isinstance(value, Items) and value.kind in ("union", "list"):
        return [interval for item in value.items for interval in intervals(item)]
    if isinstance(value, Items) and value.kind == "set" and not any(isinstance(item, Items) for item in value.items):  # points are none
        return [interval for item in value.items for interval in intervals(item)]
    raise UnreadableError("no interval")


def _is_line(tokens: Sequence[Mark]) -> bool:
    """Whether the tokens are \\mathbb{R}."""
    return [mark.text for mark in tokens] == ["mathbb", "{", "R", "}"]


def _line() -> Interval:
    infinity = Tree("constant", value="infty")
    return Interval(Formula(Tree("negative", (infinity,)), "- \\infty"), Formula(infinity, "\\infty"), False, False)


def _braces(inner: Sequence[Mark], pieces: list[list[Mark]]) -> Value:
    if not inner:
        return Items("set", ())
    builder, _ = _split(inner, frozenset(("|", ":", "mid")))
    if len(builder) == 2 and len(pieces) == 1:
        return _list(builder[1])
    if len(pieces) > MAX_ITEMS:
        raise TooLargeError(f"more than {MAX_ITEMS} items")
    return Items("set", tuple(_flat(_one(piece) for piece in pieces)))


def _flat(values: Iterable[Value]) -> list[Value]:
    """Values with the two that \\pm stands for in its place."""
    return [item for value in values for item in (value.items if isinstance(value, Items) and value.kind == "list" else (value,))]


def _interval(tokens: Sequence[Mark]) -> Interval:
    pieces, _ = _split(tokens[1:-1], frozenset((",", ";")))
    if len(pieces) != 2:
        raise UnreadableError("an interval without two ends")
    low, high = _measured(pieces[0]), _measured(pieces[1])
    return Interval(low, high, tokens[0].text == "[", tokens[-1].text == "]")


def _infinite(value: Value) -> bool:
    return isinstance(value, Formula) and value.tree is not None and math.isinf(real(value.tree) or 0)


def _matrix(tokens: Sequence[Mark]) -> Value | None:
    name = tokens[0].text.removeprefix("begin:")
    if name not in (*_MATRICES, "cases") or tokens[-1].text != f"end:{name}":
        return None
    inner = list(tokens[1:-1])
    if name == "cases":
        if any(mark.text == "&" for mark in inner):
            raise UnreadableError("a function in pieces")
        return _list([Mark("sign", ",", True) if mark.text == "\\" else mark for mark in inner])
    if name == "array":
        inner = inner[[mark.text for mark in inner].index("}") + 1 :] if inner and inner[0].text == "{" else inner
    rows, _ = _split([mark for mark in inner if mark.text != "hline"], frozenset("\\"))
    cells = [[_one(cell) for cell in _split(_without_gap(row), frozenset("&"))[0]] for row in rows if row]
    if sum(len(row) for row in cells) > 400:
        raise TooLargeError("a matrix of more than 400 cells")
    if not cells or len({len(row) for row in cells}) > 1:
        raise UnreadableError("rows of different lengths")
    return Matrix(tuple(tuple(row) for row in cells))


def _scaled(tokens: Sequence[Mark]) -> Value | None:
    """A factor before a matrix, taken into its cells; None when the tokens are no such thing."""
    start = next((index for index, mark in enumerate(tokens) if mark.text.startswith("begin:")), 0)
    start -= start > 0 and tokens[start - 1].text in ("(", "[")
    matrix = _set(tokens[start:]) if start > 0 else None
    if not isinstance(matrix, Matrix):
        return None
    before = tokens[: start - (tokens[start - 1].text in ("cdot", "times", "*"))]
    factor = Tree("negative", (Tree("number", value=Fraction(1)),)) if [mark.text for mark in before] == ["-"] else read(before)
    return Matrix(tuple(tuple(_times(factor, cell) for cell in row) for row in matrix.rows))


def _times(factor: Tree, cell: Value) -> Formula:
    if not isinstance(cell, Formula) or cell.tree is None:
        raise UnreadableError("a factor before a matrix of something else than formulas")
    return Formula(Tree("multiply", (factor, cell.tree)), "", cell.unit)


def _without_gap(row: list[Mark]) -> list[Mark]:
    """A row without the [2pt] that may follow a line break."""
    if len(row) < 3 or row[0].text != "[" or row[1].kind != "number" or "]" not in (texts := [mark.text for mark in row]):
        return row
    end = texts.index("]")
    return row[end + 1 :] if "".join(texts[2:end]) in ("pt", "em", "ex", "mm", "cm") else row


def _relation(pieces: list[list[Mark]], signs: list[str]) -> Value:
    if not all(pieces):
        raise UnreadableError("a relation without a side")
    if "approx" in signs:  # what stands before it is exact, a name apart
        at = signs.index("approx")
        if at > 0 or not _NAME.fullmatch(_text(pieces[0])):
            return _relation(pieces[: at + 1], signs[:at]) if at else _one(pieces[0])
    signs = ["=" if sign in ("approx", "equiv") else sign for sign in signs]
    if signs == ["in"]:
        return Named(_text(pieces[0]), _one(pieces[1]))
    if "in" in signs:
        raise UnreadableError("a relation within a relation")
    if all(sign == "=" for sign in signs):
        return _equation(pieces)
    sides = [read(piece) for piece in pieces]
    names = [index for index, side in enumerate(sides) if side.operation == "variable"]
    if len(sides) == 2:
        return _inequality(sides, signs[0], pieces)
    if len(sides) == 3 and names == [1] and signs[0] in ("<", "le") and signs[1] in ("<", "le"):
        return Named(_text(pieces[1]), Interval(_formula(pieces[0]), _formula(pieces[2]), signs[0] == "le", signs[1] == "le"))
    if len(sides) == 3 and names == [1] and signs[0] in (">", "ge") and signs[1] in (">", "ge"):
        return Named(_text(pieces[1]), Interval(_formula(pieces[2]), _formula(pieces[0]), signs[1] == "ge", signs[0] == "ge"))
    raise UnreadableError("a chain of relations")


def _formula(tokens: Sequence[Mark]) -> Formula:
    return Formula(read(tokens), _text(tokens))


def _inequality(sides: list[Tree], sign: str, pieces: list[list[Mark]]) -> Value:
    left, right = sides
    if left.operation != "variable" and right.operation == "variable" and not variables(left):
        left, right, sign, pieces = right, left, _FLIPPED[sign], pieces[::-1]
    if left.operation == "variable" and not variables(right):
        name, end, line = _text(pieces[0]), _formula(pieces[1]), _line()
        if sign == "ne":
            return Named(name, Items("union", (Interval(line.low, end, False, False), Interval(end, line.high, False, False))))
        if sign in ("<", "le"):
            return Named(name, Interval(line.low, end, False, sign == "le"))
        return Named(name, Interval(end, line.high, sign == "ge", False))
    if sign in (">", "ge"):
        left, right, sign = right, left, _FLIPPED[sign]
    return Relation(sign, left, right)


_NAME = re.compile(
    r"(?:m )?(?:\\angle |\\triangle |\\(?:sin|cos|tan) )?(?:\\?[A-Za-z]+|\\[a-z]+ \{ [A-Za-z ]+ \}|[A-Z](?: [A-Z]){1,3})"
    r"(?: _ (?:\w+|\{[^{}]*\}))?(?: ')*(?: \^ \{ - 1 \})?(?: \( \\?[A-Za-z]+(?: , \\?[A-Za-z]+)* \))?|[A-Zfgh] \( [^-+=]* \)"
)
"""x, x_1, x', f(x), f^{-1}(x), AB, angle ABC, sin A, \\vec{v}, f(3), P(X > 2)."""


def _equation(pieces: list[list[Mark]]) -> Value:
    texts = [_text(piece) for piece in pieces]
    named = [bool(_NAME.fullmatch(text)) and text not in ("e", "i", r"\pi", r"\infty", r"\emptyset") for text in texts]
    if all(mark.kind == "word" for mark in pieces[0]):
        return _one(pieces[-1])  # Area = 5
    if named[0]:
        if len(pieces) > 2 and all(named[:-1]):
            return Items("system", tuple(Named(text, _one(pieces[-1])) for text in texts[:-1]))
        return Named(texts[0], _one(pieces[-1]))
    if named[-1] and len(pieces) == 2:
        return Named(texts[1], _one(pieces[0]))
    if _enclosed(pieces[0]) and (names := _split(pieces[0][1:-1], frozenset(","))[0])[1:]:
        value = _one(pieces[-1])
        if isinstance(value, Items) and value.kind == "tuple" and len(value.items) == len(names):
            return Items("system", tuple(Named(_text(name), item) for name, item in zip(names, value.items, strict=True)))
        return Named(texts[0], value)
    if len(pieces) == 2:
        left, right = read(pieces[0]), read(pieces[1])
        if variables(left) | variables(right):
            return Relation("=", left, right)
    return _one(pieces[-1])


# --- units ---


def _measured(tokens: Sequence[Mark]) -> Formula:
    """A formula, with the unit or noun that stands before or behind it."""
    tokens, unit = _currency(tokens)
    cut = _unit_start(tokens)
    factor = 1
    if cut is not None:
        label, tokens = tokens[cut:], tokens[:cut]
        words = [mark.text for mark in label]
        while words and label[0].kind == "word" and words[0].lower() in _FACTORS:
            factor, words = factor * _FACTORS[words[0].lower()], words[1:]
        unit = unit or _unit(words)
    if (base := _base(tokens)) is not None:
        tokens, unit = tokens[:1], f"base{base}"
    if not tokens:
        raise UnreadableError("a unit alone")
    text = _text(tokens)
    try:
        tree = read(tokens)
    except UnreadableError:
        if any(mark.kind == "word" for mark in tokens):
            raise
        return Formula(None, text, unit)
    if cut is not None and (variables(tree) or real(tree) is None) and not _known(unit):
        raise UnreadableError("a word behind a formula")
    return Formula(tree if factor == 1 else Tree("multiply", (tree, Tree("number", value=Fraction(factor)))), text, unit)


def _base(tokens: Sequence[Mark]) -> str | None:
    """The base of a number with a subscript from 2 to 36; 1_000 has none."""
    after = [mark.text for mark in tokens[1:]]
    if tokens and tokens[0].kind == "number" and (len(after) == 2 or (len(after) == 4 and (after[1], after[3]) == ("{", "}"))):
        base = after[1 if len(after) == 2 else 2]
        if after[0] == "_" and base in map(str, range(2, 37)):
            return base
    return None


def _currency(tokens: Sequence[Mark]) -> tuple[Sequence[Mark], str]:
    at = 1 if len(tokens) > 1 and tokens[0].text == "-" else 0
    if len(tokens) > at + 1 and tokens[at].kind == "command" and tokens[at].text in _CURRENCIES:
        return [*tokens[:at], *tokens[at + 1 :]], _CURRENCIES[tokens[at].text]
    return tokens, ""


def _unit_start(tokens: Sequence[Mark]) -> int | None:
    """Where the unit begins, when everything from there on can be a unit's."""
    start = next((index for index in range(1, len(tokens)) if _starts_unit(tokens, index)), None)
    if start is None or any(mark.kind == "word" for mark in tokens[:start]):
        return None
    functions = any(mark.kind == "command" and mark.text in ("sin", "cos", "tan", "cot", "sec", "csc") for mark in tokens[:start])
    if functions and tokens[start].text == "^":
        return None
    signs = {"^", "/", "{", "}", "circ", "cdot", "*", "-", "(", ")", ".", "'", *_CURRENCIES}
    for before, mark in itertools.pairwise(tokens[start - 1 :]):
        if mark.kind == "number" and before.text not in ("^", "{"):
            return None
        if mark.kind not in ("word", "letter", "number") and mark.text not in signs:
            return None
    return start


def _starts_unit(tokens: Sequence[Mark], index: int) -> bool:
    mark, before = tokens[index], tokens[index - 1]
    if mark.kind == "word":
        return mark.quoted or mark.spaced or mark.text.lower() in _SHORT
    if mark.kind == "command":
        return mark.text in _CURRENCIES
    if mark.text == "^":
        return any(following.text == "circ" for following in tokens[index + 1 : index + 3])
    if mark.kind == "letter" and mark.text in _LONE_UNITS and mark.spaced and before.kind == "number":
        if any(earlier.kind == "letter" for earlier in tokens[:index]):
            return False
        signs = {"^", "/", "{", "}", *_LONE_UNITS}
        return all(following.kind == "number" or following.text in signs for following in tokens[index + 1 :])
    return False


def _unit(words: Sequence[str]) -> str:
    """One spelling for a unit."""
    found: list[str] = []
    power = ""
    for word in words:
        word = word.casefold()
        if word in ("^", "{", "}", "cdot", "*", "-", "(", ")", ".", "'") or word in _NOISE:
            continue
        if word in ("square", "sq", "squared", "cubic", "cu", "cubed"):
            power = "2" if word[0] == "s" else "3"
        elif word == "per":
            found.append("/")
        elif word == "circ":
            found.append("deg")
        else:
            found.append(_spelling(word, found))
    text = "".join(found) + power
    words = [word.casefold() for word in words]
    turned = _TURNS & set(words) or "times" in words[:-1] or (words and (words[0] in _FIRST_TURNS or words[-1] in _LAST_TURNS))
    return f"!{text}" if turned else text


def _spelling(word: str, before: list[str]) -> str:
    if before[-1:] == ["deg"] and word in ("c", "f"):
        return "celsius" if word == "c" else "fahrenheit"
    for form in (word, word.removesuffix("s"), word.removesuffix("es")):
        if form in _UNITS:
            return _UNITS[form]
    return word.removesuffix("s") if len(word) > 3 else word


def _known(unit: str) -> bool:
    return all(part in _UNITS for part in re.findall(r"[a-z$]+", unit))
