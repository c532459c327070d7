"""Formulas as trees, and whether two trees have the same value. No text is ever evaluated as code.

`read` turns marks into a tree by recursive descent; `same_value` compares two trees.

Rational values are compared exactly. Others are computed with 50 and with 100 digits, and as many more as the largest or
smallest number on the way has: e^{500} + 1 is not e^{500}. A true difference stays as it is, the rounding of an equality
shrinks by the 50 digits between. What stays open is computed with 400, then given up as `UndecidedError`. Formulas with
variables are compared at fixed points, positive, negative and whole, wherever both sides are real. What would take long (a
power of more than a million bits, a large factorial, deep nesting) is refused as `TooLargeError` before it is computed.

Conventions: `a/bc` is a/(bc); `2\\frac12` and `2 1/2` are mixed numbers; `2^10` is 2^{10}; `\\log` has base 10;
an odd root of a negative number is real; `e` and `i` are the constants; letters are variables, by case.
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Any, NamedTuple

MAX_MARKS = 1_000
MAX_DEPTH = 60
MAX_BITS = 1_000_000
"""Of a power; about 300,000 decimal digits."""
MAX_SPREAD = 5_000
"""Decimal digits between 1 and the largest or smallest number on the way to a value that is not rational; points past it are left out."""
MAX_FACTORIAL = 3_000
MAX_NUMBER_EXPONENT = 3_000
POINTS = 14
WHOLE_POINTS = 3
"""At whole numbers, where rounding up and rounding down plus one differ."""
ENOUGH_POINTS = 4


class UnreadableError(ValueError):
    """A text that this grammar does not cover."""


class TooLargeError(ValueError):
    """A value that would take too long or too much memory to compute."""


class UndecidedError(ValueError):
    """Neither equality nor difference could be shown."""


class _UndefinedError(ArithmeticError):
    """No real value at a point."""


class Mark(NamedTuple):
    """One token: a number, a letter, a word, a command or another character."""

    kind: str
    """number, letter, word, command or sign."""
    text: str
    spaced: bool
    """White space stands before it."""
    quoted: bool = False
    """It comes from a \\text{...}."""
    number: Fraction | None = None


class Tree(NamedTuple):
    """A formula: an operation and what it is applied to; a leaf holds its value."""

    operation: str
    parts: tuple[Tree, ...] = ()
    value: Any = None
    """Fraction of a number, name of a variable, a constant or a function."""


_NAMES = ("arcsinh", "arccosh", "arctanh", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sin", "cos", "tan", "sec", "csc", "cot")
_FUNCTIONS = frozenset((*_NAMES, "asin", "acos", "atan", "ln", "log", "lg", "exp"))
_SEVERAL = frozenset(("max", "min", "gcd", "lcm"))
_PLAIN_NAMES = _FUNCTIONS | _SEVERAL | {"sqrt", "pi", "infinity", "infty", "frac"}
_OPENED = re.compile(r"\s*[({]")
_ALIASES = {
    "leq": "le", "leqslant": "le", "geq": "ge", "geqslant": "ge", "neq": "ne", "lt": "<", "gt": ">", "simeq": "approx",
    "infinity": "infty", "varnothing": "emptyset", "backslash": "setminus", "lor": "or", "vee": "or", "land": "and", "wedge": "and",
    "lbrace": "{", "rbrace": "}", "lang": "langle", "rang": "rangle", "lvert": "|", "rvert": "|", "vert": "|", "colon": ":", "ast": "*",
    "binomial": "binom", "dbinom": "binom", "tbinom": "binom", "ldots": "dots", "cdots": "dots", "asin": "arcsin", "acos": "arccos",
    "atan": "arctan", "lg": "log", "overline": "bar", "widehat": "hat", "overrightarrow": "vec", "bigcup": "cup", "cr": "\\",
}  # fmt: skip
_ACCENTS = frozenset(("hat", "vec", "bar", "overline", "tilde", "dot", "ddot", "mathbb", "mathcal", "widehat", "overrightarrow"))
_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho varrho sigma tau upsilon phi "
    "varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar imath jmath"
)
_LETTERS = frozenset(_GREEK.split())
_TOKEN = re.compile(
    r"(?P<repeating>\d*\.\d*(?:\\overline\s*\{\d+\}|\\bar\s*\{\d+\}|\\dot\s*\{\d\}|\(\d+\)))"
    r"|(?P<number>(?:\d+(?:\.\d+|\.(?=\s*(?:[,;)\]\\]|$)))?|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|\\text\s*\{(?P<quoted>[^{}]*)\}"
    r"|\\(?P<environment>begin|end)\s*\{(?P<name>[a-zA-Z]+)\*?\}"
    r"|\\(?P<command>[A-Za-z]+|.)"
    r"|(?P<dots>\.\.\.)"
    r"|(?P<letters>[A-Za-z]+)"
    r"|(?P<sign>\*\*|<=|>=|!=|[^\sA-Za-z0-9])"
)
_SIGN_NAMES = {"<=": "le", ">=": "ge", "!=": "ne"}


def marks(text: str, units: frozenset[str] = frozenset()) -> list[Mark]:
    """Tokens of a plain text (`extraction.plain`). Runs of two or more letters that name no function are words.

    A run of two or three letters outside `units` stands for its letters one by one, unless it is quoted.
    Raises TooLargeError past MAX_MARKS.
    """
    found: list[Mark] = []
    end = 0
    for match in _TOKEN.finditer(text):
        spaced, end = match.start() > end or (end > 0 and text[end - 1] == " "), match.end()
        found += _marks_of(match, spaced, units)
        if len(found) > MAX_MARKS:
            raise TooLargeError(f"more than {MAX_MARKS} marks")
    return found


def _marks_of(match: re.Match[str], spaced: bool, units: frozenset[str]) -> list[Mark]:
    kind, text = str(match.lastgroup), match.group()
    if kind == "number":
        return [Mark("number", text, spaced, number=_number(text))]
    if kind == "repeating":
        return [Mark("number", text, spaced, number=_repeating(text))]
    if kind == "quoted":
        inner = [mark._replace(quoted=True) for mark in _quoted(match.group("quoted"), spaced)]
        return [mark._replace(spaced=True) if index == 0 else mark for index, mark in enumerate(inner)]
    if kind == "name":
        return [Mark("command", f"{match.group('environment')}:{match.group('name')}", spaced)]
    if kind == "command":
        name = match.group("command")
        return [Mark("command", _ALIASES.get(name, name), spaced)]
    if kind == "dots":
        return [Mark("command", "dots", spaced)]
    if kind == "letters":
        if text in _SEVERAL and not _OPENED.match(match.string, match.end()):
            return [Mark("word", text, spaced)]  # 15 min
        return _letters(text, spaced, units)
    if text in _SIGN_NAMES:
        return [Mark("command", _SIGN_NAMES[text], spaced)]
    return [Mark("sign", "^" if text == "**" else text, spaced)]


def _letters(text: str, spaced: bool, units: frozenset[str]) -> list[Mark]:
    if text in _PLAIN_NAMES:
        return [Mark("command", _ALIASES.get(text, text), spaced)]
    if len(text) == 1:
        return [Mark("letter", text, spaced)]
    if text.lower() in ("and", "or"):
        return [Mark("command", text.lower(), spaced)]
    if len(text) > 3 or text.lower() in units:
        return [Mark("word", text, spaced)]
    return [Mark("letter", letter, spaced and index == 0) for index, letter in enumerate(text)]


def _quoted(text: str, spaced: bool) -> list[Mark]:
    """Words, numbers and signs of a \\text{...}; a single letter there is a word too, e and i apart."""
    found, end = [], 0
    for match in re.finditer(r"(?P<number>\d+(?:\.\d+)?)|(?P<word>[^\W\d_]+(?:['’-][^\W\d_]+)*)|(?P<sign>\S)", text):
        spaced, end = spaced or match.start() > end, match.end()
        if match.lastgroup == "number":
            found.append(Mark("number", match.group(), spaced, number=_number(match.group())))
        elif match.lastgroup == "word" and match.group().lower() in ("and", "or"):
            found.append(Mark("command", match.group().lower(), spaced))
        elif match.lastgroup == "word" and match.group().lower() == "infinity":
            found.append(Mark("command", "infty", spaced))
        elif match.lastgroup == "word" and text.strip() in ("e", "i", "d"):
            found.append(Mark("letter", match.group(), spaced))
        else:
            found.append(Mark("word" if match.lastgroup == "word" else "sign", match.group(), spaced))
        spaced = False
    return found


def _number(text: str) -> Fraction:
    mantissa, _, exponent = text.lower().partition("e")
    if len(exponent) > 6 or (exponent and abs(int(exponent)) > MAX_NUMBER_EXPONENT) or len(mantissa) > MAX_NUMBER_EXPONENT:
        raise TooLargeError(f"a number with an exponent past {MAX_NUMBER_EXPONENT} or as many digits")
    return Fraction(text)


def _repeating(text: str) -> Fraction:
    whole, _, rest = text.partition(".")
    start = re.match(r"\d*", rest)
    once = start.group() if start else ""
    period = "".join(re.findall(r"\d", rest[len(once) :]))
    if len(once) + len(period) > 100:
        raise TooLargeError("a repeating decimal of more than 100 digits")
    tail = Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(once))
    return Fraction(int((whole or "0") + once), 10 ** len(once)) + tail


def read(tokens: Sequence[Mark]) -> Tree:
    """The tree of a formula. Raises UnreadableError where the grammar ends, TooLargeError past MAX_DEPTH."""
    reader = _Reader(tokens)
    tree = reader.sum()
    if reader.at < len(tokens):
        raise UnreadableError(f"cannot read {tokens[reader.at].text!r} here")
    return tree


class _Reader:
    """One pass over the tokens; each method reads what its name says and stands behind it."""

    def __init__(self, tokens: Sequence[Mark]) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0
        self.bars = 0

    def peek(self, ahead: int = 0) -> Mark | None:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else None

    def next_is(self, *texts: str, ahead: int = 0) -> bool:
        mark = self.peek(ahead)
        return mark is not None and mark.kind in ("sign", "command") and mark.text in texts

    def take(self, text: str) -> None:
        if not self.next_is(text):
            raise UnreadableError(f"{text!r} is missing")
        self.at += 1

    def sum(self) -> Tree:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooLargeError(f"nested deeper than {MAX_DEPTH}")
        terms = [self.signed()]
        while self.next_is("+", "-"):
            terms.append(self.signed())
        self.depth -= 1
        return terms[0] if len(terms) == 1 else Tree("add", tuple(terms))

    def signed(self) -> Tree:
        negative = False
        while self.next_is("+", "-"):
            negative ^= self.tokens[self.at].text == "-"
            self.at += 1
        term = self.product()
        return Tree("negative", (term,)) if negative else term

    def product(self) -> Tree:
        left = self.chain()
        while self.next_is("*", "cdot", "times", "/", "div"):
            divides = self.tokens[self.at].text in ("/", "div")
            self.at += 1
            if self.next_is("-", "+"):
                sign = self.tokens[self.at].text
                self.at += 1
                right = Tree("negative", (self.chain(),)) if sign == "-" else self.chain()
            else:
                right = self.chain()
            left = Tree("divide" if divides else "multiply", (left, right))
        return left

    def chain(self) -> Tree:
        """Factors side by side, without a sign between them."""
        left = self.factor()
        while self.starts_factor():
            left = Tree("multiply", (left, self.factor()))
        return left

    def mixed(self) -> Tree | None:
        """`2\\frac{1}{2}` and `2 1/2`; None when there is something else."""
        whole = self.peek()
        if whole is None or whole.number is None or not whole.text.isdigit():
            return None
        if self.next_is("frac", ahead=1):
            start, self.at = self.at, self.at + 1
            fraction = self.atom()
            parts = [part.value for part in fraction.parts if part.operation == "number"]
            if fraction.operation == "divide" and len(parts) == 2 and all(part.denominator == 1 for part in parts) and parts[0] < parts[1]:
                return Tree("number", value=whole.number + parts[0] / parts[1])
            self.at = start
            return None
        over, slash, under = self.peek(1), self.peek(2), self.peek(3)
        if over and slash and under and over.number and under.number and over.spaced and slash.text == "/":
            if not (over.text.isdigit() and under.text.isdigit() and over.number < under.number):
                raise UnreadableError("two numbers side by side")
            self.at += 4
            return Tree("number", value=whole.number + over.number / under.number)
        return None

    def starts_factor(self) -> bool:
        mark = self.peek()
        if mark is None:
            return False
        if mark.kind == "number":
            before = self.tokens[self.at - 1]
            if before.kind == "number" and not (mark.spaced and self.tokens[self.at - 2].text == "^"):  # n^2 2^n
                raise UnreadableError("two numbers side by side")
            return True
        if mark.kind == "letter":
            return True
        if mark.kind == "sign":
            return mark.text in "({[" or (mark.text == "|" and not self.bars)
        if mark.kind == "command":
            return mark.text in _LETTERS | _FUNCTIONS | _ACCENTS | _SEVERAL or mark.text in (
                "frac", "sqrt", "pi", "binom", "lfloor", "lceil", "infty"
            )  # fmt: skip
        return False

    def factor(self) -> Tree:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooLargeError(f"nested deeper than {MAX_DEPTH}")
        base = self.mixed() or self.atom()
        while True:
            if self.next_is("^"):
                self.at += 1
                base = self.raised(base)
            elif self.next_is("!"):
                self.at += 1
                if self.next_is("!"):
                    raise UnreadableError("a double factorial")
                base = Tree("factorial", (base,))
            elif self.next_is("%"):
                self.at += 1
                base = Tree("divide", (base, Tree("number", value=Fraction(100))))
            else:
                break
        self.depth -= 1
        return base

    def raised(self, base: Tree) -> Tree:
        if self.next_is("circ") or (self.next_is("{") and self.next_is("circ", ahead=1) and self.next_is("}", ahead=2)):
            self.at += 1 if self.next_is("circ") else 3
            degree = Tree("divide", (Tree("constant", value="pi"), Tree("number", value=Fraction(180))))
            return Tree("multiply", (base, degree))
        return Tree("power", (base, self.argument()))

    def argument(self) -> Tree:
        """What an exponent, a root or a fraction takes: a braced formula, else one sign, number, letter or command."""
        if self.next_is("{"):
            return self.group("{", "}")
        if self.next_is("("):
            return self.group("(", ")")
        if self.next_is("-", "+"):
            sign = self.tokens[self.at].text
            self.at += 1
            inner = self.argument()
            return Tree("negative", (inner,)) if sign == "-" else inner
        atom = self.atom()
        if self.next_is("^"):  # a tower leans to the right
            self.at += 1
            return Tree("power", (atom, self.argument()))
        return atom

    def group(self, opens: str, closes: str) -> Tree:
        self.take(opens)
        bars, self.bars = self.bars, 0
        inner = self.sum()
        self.bars = bars
        self.take(closes)
        return inner

    def digit_or_group(self) -> Tree:
        """The argument of \\frac or \\sqrt: braces, or one digit of a number (`\\frac12`)."""
        mark = self.peek()
        if mark is not None and mark.kind == "number" and mark.text.isdigit() and len(mark.text) > 1:
            rest = mark._replace(text=mark.text[1:], number=Fraction(mark.text[1:]), spaced=False)
            self.tokens = [*self.tokens[: self.at], mark._replace(text=mark.text[0]), rest, *self.tokens[self.at + 1 :]]
            self.at += 1
            return Tree("number", value=Fraction(mark.text[0]))
        return self.group("{", "}") if self.next_is("{") else self.atom()

    def atom(self) -> Tree:
        mark = self.peek()
        if mark is None:
            raise UnreadableError("the formula ends too early")
        if mark.kind == "number":
            self.at += 1
            if self.next_is("_"):
                raise UnreadableError("a number with a subscript")
            return Tree("number", value=mark.number)
        if mark.kind == "letter":
            return self.variable()
        if mark.kind == "sign":
            if mark.text in "([{":
                return self.group(mark.text, {"(": ")", "[": "]", "{": "}"}[mark.text])
            if mark.text == "|":
                return self.absolute()
            raise UnreadableError(f"cannot read {mark.text!r}")
        if mark.kind == "command":
            return self.command(mark.text)
        raise UnreadableError(f"the word {mark.text!r} in a formula")

    def absolute(self) -> Tree:
        self.take("|")
        self.bars += 1
        inner = self.sum()
        self.bars -= 1
        self.take("|")
        return Tree("absolute", (inner,))

    def variable(self) -> Tree:
        """A letter with its subscript and primes; `e` and `i` alone are the constants."""
        name = self.tokens[self.at].text
        self.at += 1
        if self.next_is("_"):
            self.at += 1
            name += f"_{self.raw()}"
        while self.next_is("'"):
            self.at += 1
            name += "'"
        if name in ("e", "i"):
            return Tree("constant", value=name)
        if name in ("f", "g", "h", "F", "G") and self.next_is("("):
            raise UnreadableError(f"the function {name}")
        return Tree("variable", value=name)

    def raw(self) -> str:
        """The text of a subscript or of what an accent stands over."""
        if not self.next_is("{"):
            if (mark := self.peek()) is None:
                raise UnreadableError("a subscript is missing")
            self.at += 1
            return mark.text
        self.at += 1
        texts: list[str] = []
        while not self.next_is("}"):
            if (mark := self.peek()) is None or self.next_is("{"):
                raise UnreadableError("a subscript with braces inside")
            texts.append(mark.text)
            self.at += 1
        self.at += 1
        return "".join(texts)

    def command(self, name: str) -> Tree:
        if name in _LETTERS:
            self_as_letter = self.tokens[self.at]._replace(kind="letter")
            self.tokens = [*self.tokens[: self.at], self_as_letter, *self.tokens[self.at + 1 :]]
            return self.variable()
        self.at += 1
        if name in ("pi", "infty"):
            return Tree("constant", value=name)
        if name in _ACCENTS:
            return Tree("variable", value=f"{name}({self.raw()})")
        if name == "frac":
            return Tree("divide", (self.digit_or_group(), self.digit_or_group()))
        if name == "binom":
            return Tree("binomial", (self.digit_or_group(), self.digit_or_group()))
        if name == "sqrt":
            return self.root()
        if name in ("lfloor", "lceil"):
            inner = self.sum()
            self.take("rfloor" if name == "lfloor" else "rceil")
            return Tree("floor" if name == "lfloor" else "ceiling", (inner,))
        if name == "{":
            raise UnreadableError("a set in a formula")
        if name in _SEVERAL:
            return self.several(name)
        if name in _FUNCTIONS:
            return self.function(name)
        raise UnreadableError(f"the command {name!r}")

    def root(self) -> Tree:
        index = Tree("number", value=Fraction(2))
        if self.next_is("["):
            index = self.group("[", "]")
        mark = self.peek()
        if mark is not None and mark.kind == "number" and not self.next_is("{"):  # of a plain text, all digits: sqrt 12
            self.at += 1
            radicand = Tree("number", value=mark.number)
        else:
            radicand = self.group("(", ")") if self.next_is("(") else self.digit_or_group()
        return Tree("power", (radicand, Tree("divide", (Tree("number", value=Fraction(1)), index))))

    def several(self, name: str) -> Tree:
        closes = "}" if self.next_is("{") else ")"
        self.take("{" if closes == "}" else "(")
        parts = [self.sum()]
        while self.next_is(","):
            self.at += 1
            parts.append(self.sum())
        self.take(closes)
        return Tree(name, tuple(parts))

    def function(self, name: str) -> Tree:
        """A function with what stands behind it: a group, else factors up to a sign or the next function."""
        base = Tree("number", value=Fraction(10))
        if name == "log" and self.next_is("_"):
            self.at += 1
            base = self.argument()
        power: Tree | None = None
        if self.next_is("^"):
            self.at += 1
            power = self.argument()
            if power == Tree("negative", (Tree("number", value=Fraction(1)),)):
                if name not in ("sin", "cos", "tan"):
                    raise UnreadableError(f"the inverse of {name}")
                name, power = f"arc{name}", None
        if self.next_is("(", "{", "["):
            opens = self.tokens[self.at].text
            inner = self.group(opens, {"(": ")", "{": "}", "[": "]"}[opens])
        else:
            inner = self.factor()
            while self.starts_factor() and not self.next_is(*_FUNCTIONS):
                inner = Tree("multiply", (inner, self.factor()))
        call = Tree("log", (inner, base)) if name == "log" else Tree("call", (inner,), name)
        return call if power is None else Tree("power", (call, power))


def variables(tree: Tree) -> frozenset[str]:
    """Names of the variables of a tree."""
    own = frozenset((tree.value,)) if tree.operation == "variable" else frozenset()
    return own.union(*(variables(part) for part in tree.parts))


def constants(tree: Tree) -> frozenset[str]:
    """Names of the constants of a tree: pi, e, i, infty."""
    own = frozenset((tree.value,)) if tree.operation == "constant" else frozenset()
    return own.union(*(constants(part) for part in tree.parts))


def real(tree: Tree) -> float | None:
    """The value of a tree without variables as a float, infinities too; None when it has none."""
    sign = -1.0 if tree.operation == "negative" else 1.0
    inner = tree.parts[0] if tree.operation == "negative" else tree
    if inner == Tree("constant", value="infty"):
        return sign * math.inf
    try:
        found = float(_float(_value(tree, {}, complex_too=False)))
    except (UnreadableError, _UndefinedError, OverflowError, TypeError):  # TypeError: a complex value
        return None
    return found if math.isfinite(found) else None


def same_value(left: Tree, right: Tree) -> bool:
    """Whether two formulas have the same value wherever both are real.

    Raises UndecidedError when too few points allow both, TooLargeError for what would take too long.
    """
    if left == right:
        return True
    names = sorted(variables(left) | variables(right))
    complex_too = "i" in constants(left) | constants(right)
    if not names:
        return _same_constants(left, right, complex_too)
    for with_complex in sorted({complex_too, True}):  # complex values only where there are hardly any real ones
        agreed = 0
        for point in _points(names):
            try:
                if not _same_at(left, right, point, with_complex):
                    return False
            except _UndefinedError:
                continue
            agreed += 1
        if agreed >= ENOUGH_POINTS:
            return True
    raise UndecidedError("too few points where both are defined")


def _same_constants(left: Tree, right: Tree, complex_too: bool) -> bool:
    """Without variables: real values first, complex ones when there are none; what has none at all differs from what has one."""
    with suppress(_UndefinedError):
        return _same_at(left, right, {}, complex_too)
    with suppress(_UndefinedError):
        return _same_at(left, right, {}, True)
    if _defined(left) == _defined(right):
        raise UndecidedError("neither has a value")
    return False


def _defined(tree: Tree) -> bool:
    try:
        _value(tree, {}, complex_too=True)
    except _UndefinedError:
        return False
    return True


def proportional(left: Tree, right: Tree, *, positive: bool) -> bool:
    """Whether `left` is a constant times `right`, not zero; with `positive` a constant above zero.

    Raises as `same_value`.
    """
    complex_too = "i" in constants(left) | constants(right)
    for point in _points(sorted(variables(left) | variables(right))):
        try:
            if _value(left, point, complex_too=complex_too) == 0 or _value(right, point, complex_too=complex_too) == 0:
                continue
        except _UndefinedError:
            continue
        one, other = _at(left, point), _at(right, point)  # left / right is one / other everywhere
        sign = real(Tree("divide", (one, other)))
        if positive and (sign is None or sign < 0):
            return False
        return same_value(Tree("multiply", (left, other)), Tree("multiply", (right, one)))
    return False


def _at(tree: Tree, point: Mapping[str, Fraction]) -> Tree:
    """The tree with its variables replaced by numbers."""
    if tree.operation == "variable":
        return Tree("number", value=point[tree.value])
    return tree._replace(parts=tuple(_at(part, point) for part in tree.parts))


def _same_at(left: Tree, right: Tree, point: Mapping[str, Fraction], complex_too: bool) -> bool:
    import mpmath

    more, sizes = 0, [0]
    with mpmath.workdps(50):
        one, other = (_value(side, point, complex_too=complex_too, sizes=sizes) for side in (left, right))
        if isinstance(one, Fraction) and isinstance(other, Fraction):
            return one == other
        rough = abs(_float(one) - _float(other))
    if (spread := max(sizes) * 302 // 1000) > 20:
        if spread > MAX_SPREAD and point:
            raise _UndefinedError
        if spread > MAX_SPREAD:
            largest = max(abs(_float(one)), abs(_float(other)))
            if rough > largest * mpmath.mpf(10) ** -20 and _size(largest) > max(sizes) - 64:  # nothing larger cancelled out
                return False
            raise TooLargeError(f"numbers of more than {MAX_SPREAD:,} digits that are not rational")
        more = -(-spread // 100) * 100
        with mpmath.workdps(50 + more):
            rough = abs(_float(_value(left, point, complex_too=complex_too)) - _float(_value(right, point, complex_too=complex_too)))
    for digits in (100 + more, 400 + more):
        with mpmath.workdps(digits):
            one, other = _float(_value(left, point, complex_too=complex_too)), _float(_value(right, point, complex_too=complex_too))
            fine, size = abs(one - other), max(abs(one), abs(other))
            if fine == 0 or (rough == 0 and fine < size * mpmath.mpf(10) ** (10 - digits)):
                return True
            if abs(rough - fine) <= fine / 1000:
                return False
            if fine <= rough * mpmath.mpf(10) ** -30:
                return True
            rough = fine
    raise UndecidedError("too close to tell apart")


@functools.lru_cache(maxsize=256)
def _points_of(names: tuple[str, ...]) -> tuple[Mapping[str, Fraction], ...]:
    if not names:
        return ({},)
    drawn = random.Random(20_240_229)
    found = []
    for index in range(POINTS):
        size = (1, 1, 10, 40)[index % 4]
        point = {}
        for name in names:
            number = Fraction(drawn.randint(1, 997 * size), 997)
            point[name] = -number if index >= 2 * ENOUGH_POINTS and drawn.random() < 0.7 else number
        found.append(point)
    found += [{name: Fraction(drawn.randint(-9, 9)) for name in names} for _ in range(WHOLE_POINTS)]
    return tuple(found)


def _points(names: Sequence[str]) -> tuple[Mapping[str, Fraction], ...]:
    return _points_of(tuple(names))


def _float(number: Any) -> Any:
    import mpmath

    return mpmath.mpf(number.numerator) / number.denominator if isinstance(number, Fraction) else number


def _value(tree: Tree, point: Mapping[str, Fraction], *, complex_too: bool, sizes: list[int] | None = None) -> Any:
    """A Fraction while the value is rational, else an mpmath number of the working precision.

    `sizes` takes the binary digits between 1 and each number on the way that is not rational or goes into one that is not.
    """
    import mpmath

    operation = tree.operation
    if operation == "number":
        return tree.value
    if operation == "variable":
        if tree.value not in point:
            raise UnreadableError(f"the variable {tree.value}")
        return point[tree.value]
    if operation == "constant":
        if tree.value == "infty":
            raise UnreadableError("infinity in a formula")
        return {"pi": +mpmath.mp.pi, "e": +mpmath.mp.e, "i": mpmath.mpc(0, 1)}[tree.value]
    parts = [_value(part, point, complex_too=complex_too, sizes=sizes) for part in tree.parts]
    if operation in _SEVERAL:
        return _several(operation, parts)
    if any(not isinstance(part, Fraction) for part in parts) and operation in ("add", "multiply", "divide"):
        parts = [_float(part) for part in parts]
    match operation:
        case "add":
            found = sum(parts[1:], parts[0])
        case "negative":
            found = -parts[0]
        case "multiply":
            found = parts[0] * parts[1]
        case "divide":
            if parts[1] == 0:
                raise _UndefinedError
            found = parts[0] / parts[1]
        case "power":
            found = _power(parts[0], parts[1], complex_too)
        case "absolute":
            found = abs(parts[0])
        case "factorial":
            found = _factorial(parts[0])
        case "binomial":
            found = _binomial(parts[0], parts[1])
        case "floor" | "ceiling":
            found = _whole(parts[0], up=operation == "ceiling")
        case "log":
            found = _logarithm(parts[0], parts[1], complex_too)
        case "call":
            found = _call(tree.value, _float(parts[0]), complex_too)
        case _:
            raise UnreadableError(operation)
    if isinstance(found, Fraction):
        if max(found.numerator.bit_length(), found.denominator.bit_length()) > MAX_BITS:
            raise TooLargeError("a number of more than a million bits")
        return found
    if isinstance(found, mpmath.mpc):
        if found.imag == 0:
            found = found.real
        elif not complex_too:
            raise _UndefinedError
    if not mpmath.isfinite(found):
        raise _UndefinedError
    if sizes is not None:
        sizes.extend(_size(number) for number in (*parts, found) if number != 0)
    return found


def _size(number: Any) -> int:
    import mpmath

    if isinstance(number, Fraction):
        return abs(number.numerator.bit_length() - number.denominator.bit_length())
    return abs(int(mpmath.mag(number)))


def _power(base: Any, exponent: Any, complex_too: bool) -> Any:
    import mpmath

    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if base == 0:
            if exponent <= 0:
                raise _UndefinedError
            return Fraction(0)
        if base in (1, -1) and exponent.denominator == 1:
            return base if exponent.numerator % 2 else Fraction(1)
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator == 1:
            if abs(exponent) * bits > MAX_BITS:
                raise TooLargeError("a power of more than a million bits")
            return base**exponent.numerator
        if base < 0 and exponent.denominator % 2 and not complex_too:
            found = _power(-base, exponent, complex_too)
            return -found if exponent.numerator % 2 else found
        if base < 0 and not complex_too:
            raise _UndefinedError
        if base > 0 and (root := _exact_root(base, exponent.denominator)) is not None:
            return _power(root, Fraction(exponent.numerator), complex_too)
    base, exponent = _float(base), _float(exponent)
    if base == 0:
        if mpmath.re(exponent) <= 0:
            raise _UndefinedError
        return Fraction(0)
    if abs(exponent) * (abs(mpmath.log(abs(base), 2)) + 1) > MAX_BITS:
        raise TooLargeError("a power of more than a million bits")
    return mpmath.power(base, exponent)


def _exact_root(base: Fraction, degree: int) -> Fraction | None:
    if degree > 64 or max(base.numerator.bit_length(), base.denominator.bit_length()) > 4096:
        return None
    roots = [_integer_root(number, degree) for number in (base.numerator, base.denominator)]
    return Fraction(roots[0], roots[1]) if roots[0] is not None and roots[1] is not None else None


def _integer_root(number: int, degree: int) -> int | None:
    low, high = 0, 1 << (number.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= number else (low, middle - 1)
    return low if low**degree == number else None


def _factorial(number: Any) -> Any:
    """Of a whole number exactly, of others by the gamma function."""
    import mpmath

    if isinstance(number, mpmath.mpc):
        raise _UndefinedError
    if abs(number) > MAX_FACTORIAL:
        raise TooLargeError(f"a factorial past {MAX_FACTORIAL}!")
    if isinstance(number, Fraction) and number.denominator == 1:
        if number < 0:
            raise _UndefinedError
        return Fraction(math.factorial(int(number)))
    return mpmath.gamma(_float(number) + 1)


def _binomial(number: Any, chosen: Any) -> Any:
    import mpmath

    if any(isinstance(part, mpmath.mpc) for part in (number, chosen)):
        raise _UndefinedError
    if max(abs(number), abs(chosen)) > MAX_FACTORIAL:
        raise TooLargeError(f"a binomial past {MAX_FACTORIAL}")
    if all(isinstance(part, Fraction) and part.denominator == 1 and part >= 0 for part in (number, chosen)):
        return Fraction(math.comb(int(number), int(chosen)))
    return mpmath.binomial(_float(number), _float(chosen))


def _whole(number: Any, *, up: bool) -> Fraction:
    import mpmath

    if isinstance(number, mpmath.mpc):
        raise _UndefinedError
    if isinstance(number, Fraction):
        return Fraction(math.ceil(number) if up else math.floor(number))
    return Fraction(int(mpmath.ceil(number) if up else mpmath.floor(number)))


def _several(operation: str, parts: list[Any]) -> Any:
    import mpmath

    if any(isinstance(part, mpmath.mpc) for part in parts):
        raise _UndefinedError
    if operation in ("max", "min"):
        return max(parts, key=_float) if operation == "max" else min(parts, key=_float)
    if any(not isinstance(part, Fraction) or part.denominator != 1 for part in parts):
        raise _UndefinedError
    numbers = [int(part) for part in parts]
    return Fraction(math.gcd(*numbers) if operation == "gcd" else math.lcm(*numbers))


def _logarithm(number: Any, base: Any, complex_too: bool) -> Any:
    import mpmath

    if number == 0 or base in (0, 1):
        raise _UndefinedError
    if not complex_too and not (isinstance(number, mpmath.mpc) or isinstance(base, mpmath.mpc)) and (number < 0 or base < 0):
        raise _UndefinedError
    if isinstance(number, Fraction) and isinstance(base, Fraction):
        for power in range(-20, 21):  # whole powers are exact
            if max(base.numerator.bit_length(), base.denominator.bit_length()) < 64 and base**power == number:
                return Fraction(power)
    return mpmath.log(_float(number)) / mpmath.log(_float(base))


def _call(name: str, argument: Any, complex_too: bool) -> Any:
    import mpmath

    if name in ("exp", "sinh", "cosh", "tanh") and abs(argument) > MAX_BITS:
        raise TooLargeError("an exponential of more than a million bits")
    if name == "ln":
        if argument == 0 or (not complex_too and argument < 0):
            raise _UndefinedError
        return mpmath.log(argument)
    if name.removeprefix("arc") in _NAMES and abs(argument) > mpmath.mpf(10) ** 1000:
        raise TooLargeError("an angle past 10^1000")
    short = f"a{name[3:]}" if name.startswith("arc") else name
    try:
        return getattr(mpmath, short)(argument)
    except (ValueError, ZeroDivisionError) as error:
        raise _UndefinedError from error
