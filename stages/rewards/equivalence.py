"""Do an answer and the gold answer mean the same? Three-valued: right, wrong, or not graded with the reason.

The cheap ways come first: equal text, equal plain numbers. Then both sides are read as what they are
(number, list, set, tuple, interval, matrix, relation, words) and compared part by part; formulas are
compared by value (`expressions`). What our grammar does not cover (sums, integrals, limits, unknown functions)
goes to math-verify, whose parser builds sympy objects from a grammar and evaluates no text as code. sympy
can take for ever: run this in the pool (`pool.Pool`), which ends it.

Conventions, where mathematics leaves a choice
  numbers     a decimal is the number that it writes: 0.333 is not 1/3, 3.14 is not pi; 0.\\overline{3} is 1/3.
              1,234 outside brackets and 1 234 are 1234; (1,234) is a pair. 1 1/2 is 3/2. -0 is 0. 2^10 is 1024.
  percent     3% is 0.03, never 3.
  units       a missing unit is right, on either side; another unit is wrong; nothing is converted: 100 cm is not 1 m,
              180 degrees is not pi, $5 is not EUR 5. A trailing noun (12 ways) is a unit. A number base (101_2) too.
  names       x = 3 is 3 and 3 = x, never y = 3; letters differ by case; words do not. ABC is not ACB. m + n = 70 as an answer is 70.
  lists       1, 2 and "1 or 2" are unordered and equal {1, 2}; (1, 2) is ordered and equals neither. A set ignores
              repetition, a list does not. One element stands for itself: {3} is 3. \\pm 2 is the list of 2 and -2.
  intervals   (1, 2) is the pair and the open interval alike; brackets count; 1 < x < 2 is (1, 2); unions are merged.
  systems     x = 1, y = 2 is (x, y) = (1, 2), and (1, 2) with its names in alphabetical order.
  relations   equations are equal up to a factor that is not zero, inequalities up to one above zero.
  matrices    any brackets; a vector is not a tuple; \\langle 1, 2 \\rangle is the tuple (1, 2).
  ratios      1:2 is neither 2:4 nor 1/2.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from stages.rewards.answer_forms import Formula, Interval, Items, Matrix, Named, Relation, Value, Words, intervals, number_of, read_value
from stages.rewards.expressions import (
    TooLargeError,
    Tree,
    UndecidedError,
    UnreadableError,
    constants,
    proportional,
    real,
    same_value,
    variables,
)
from stages.rewards.extraction import final_answer, innermost, plain
from stages.rewards.grading import Grade, Verdict
from stages.rewards.pool import Job, Pool

GRADER = "math-2"
"""Name and version of this grader, stored with what it decides."""

LIBRARY = "math-verify: "
"""How the reason of a grade begins that math-verify decided."""

MAX_CHARACTERS = 2_000

_SPACE = re.compile(r"(?<!\d) | (?!\d)")
"""A space that says nothing: not between two digits."""
_NUMBER = re.compile(r"[+-]?\d{1,40}(?:\.\d{1,40})?")
_NAMES_IN_ORDER = re.compile(r"[A-Z](?: [A-Z]){2}")
"""ABC: three points or choices, no product; longer runs of letters are words."""
_POUNDS = (("pound", "£"), ("pound", "lb"))


def grade_response(response: str, gold: str, *, only_boxed: bool = True) -> Grade:
    """Grade the final answer of a response (without its thinking) against the gold answer."""
    answer, reason = final_answer(response, only_boxed=only_boxed)
    if answer is None:
        return Grade(Verdict.WRONG, reason)
    return equivalent(answer, gold)


def equivalent(answer: str, gold: str) -> Grade:
    """Whether an answer means the same as the gold answer, by the conventions above.

    Never raises for a text of any kind; what is too large to compute, or a gold answer that cannot be
    read, is not graded. It may run long on what it hands to sympy.
    """
    if not gold.strip():
        return Grade(Verdict.NOT_GRADED, "gold answer is empty")
    if not answer.strip():
        return Grade(Verdict.WRONG, "answer is empty")
    for what, text in (("gold answer", gold), ("answer", answer)):
        if len(text) > MAX_CHARACTERS:
            return Grade(Verdict.NOT_GRADED, f"{what} of {len(text):,} characters; at most {MAX_CHARACTERS:,} are read")
    given, wanted = plain(innermost(answer)), plain(innermost(gold))
    if not wanted:
        return Grade(Verdict.NOT_GRADED, "gold answer is empty")
    if _SPACE.sub("", given) == _SPACE.sub("", wanted):
        return Grade(Verdict.RIGHT, "same text")
    comparison = _Comparison()
    try:
        if _NUMBER.fullmatch(given) and _NUMBER.fullmatch(wanted):
            right = Fraction(given) == Fraction(wanted)
        else:
            right = comparison.same(read_value(given), read_value(wanted))
    except TooLargeError as error:
        return Grade(Verdict.NOT_GRADED, f"too large to compute: {error}")
    except (UndecidedError, UnreadableError) as error:
        return Grade(Verdict.NOT_GRADED, f"neither equal nor different for certain: {error}")
    except RecursionError:
        return Grade(Verdict.NOT_GRADED, "nested too deeply")
    except _GoldUnreadableError as error:
        return Grade(Verdict.NOT_GRADED, f"gold answer cannot be read: {error}")
    by = LIBRARY if comparison.library else ""
    return Grade(Verdict.RIGHT, f"{by}same value") if right else Grade(Verdict.WRONG, f"{by}{_short(given)} is not {_short(wanted)}")


WARM_UP = tuple(
    Job(equivalent, pair)
    for pair in (
        (r"\sum_{k=1}^{n} k", r"\frac{n(n+1)}{2}"),
        (r"\int_0^1 x \, dx", r"\frac{1}{2}"),
        (r"2\sin x\cos x", r"\sin 2x"),
    )
)
"""For a pool that grades mathematics: the imports (math-verify takes seconds) and the caches of the parsers."""


def math_pool(workers: int | None = None, *, seconds: float = 5.0, memory_mib: int = 1024) -> Pool:
    """A pool for `equivalent` and `grade_response`, with their imports paid before the first job."""
    return Pool(workers, seconds=seconds, memory_mib=memory_mib, warm_up=WARM_UP)


def _short(text: str) -> str:
    text = "".join(character if character.isprintable() else "\ufffd" for character in text[:41])
    return text if len(text) <= 40 else f"{text[:37]}..."


class _GoldUnreadableError(ValueError):
    """Neither our grammar nor math-verify's covers the gold answer."""


class _Comparison:
    """Compares two values; remembers whether math-verify had to decide a part."""

    def __init__(self) -> None:
        self.library = False

    def same(self, answer: Value, gold: Value) -> bool:
        """Raises TooLargeError, UndecidedError, _GoldUnreadableError."""
        if isinstance(answer, Named) or isinstance(gold, Named):
            return self._named(answer, gold)
        answer, gold = _unwrapped(answer), _unwrapped(gold)
        if isinstance(answer, Relation) and isinstance(gold, Formula):
            answer = _sum_asked_for(answer)
        if isinstance(answer, Formula) and isinstance(gold, Formula):
            return self._formulas(answer, gold)
        if isinstance(answer, Words) or isinstance(gold, Words):
            return isinstance(answer, Words) and isinstance(gold, Words) and _stem(answer.text) == _stem(gold.text)
        if isinstance(gold, Formula) and gold.tree is None and not _FOR_LIBRARY.search(gold.text):
            raise _GoldUnreadableError(_short(gold.text))
        if isinstance(answer, Matrix) and isinstance(gold, Matrix):
            if [len(row) for row in answer.rows] != [len(row) for row in gold.rows]:
                return False
            cells = zip(itertools.chain(*answer.rows), itertools.chain(*gold.rows), strict=True)
            return all(self.same(one, other) for one, other in cells)
        if isinstance(answer, Relation) and isinstance(gold, Relation):
            return answer.sign == gold.sign and _same_relation(answer, gold)
        if isinstance(answer, Items) and isinstance(gold, Items) and "union" not in (answer.kind, gold.kind):
            return self._items(answer, gold)
        if any(isinstance(value, Interval) or (isinstance(value, Items) and value.kind == "union") for value in (answer, gold)):
            return self._ranges(answer, gold)
        return False

    def _named(self, answer: Value, gold: Value) -> bool:
        if isinstance(answer, Named) and isinstance(gold, Named):
            if _letters(answer.name) == _letters(gold.name):
                return self.same(answer.value, gold.value)
            one, other = _as_relation(answer), _as_relation(gold)
            return one is not None and other is not None and _linked(one, other) and _same_relation(one, other)
        name, value = (answer, gold) if isinstance(answer, Named) else (gold, answer)
        assert isinstance(name, Named)
        if isinstance(value, Relation):
            relation = _as_relation(name)
            return relation is not None and value.sign == "=" and _same_relation(relation, value)
        if isinstance(value, Items) and value.kind == "system":
            return False
        return self.same(answer.value, gold) if isinstance(answer, Named) else self.same(answer, name.value)

    def _formulas(self, answer: Formula, gold: Formula) -> bool:
        if not _same_unit(answer.unit, gold.unit):
            return False
        if answer.text == gold.text and (answer.tree is None or answer.tree == gold.tree):
            return True
        if _NAMES_IN_ORDER.fullmatch(answer.text) and _NAMES_IN_ORDER.fullmatch(gold.text):
            return False
        if answer.tree is None or gold.tree is None:
            if not _FOR_LIBRARY.search(f"{answer.text} {gold.text}"):
                if gold.tree is None:
                    raise _GoldUnreadableError(_short(gold.text))
                return False
            self.library = True
            return _by_library(answer.text, gold.text)
        ends = [real(tree) if "infty" in formula.text else None for tree, formula in ((answer.tree, answer), (gold.tree, gold))]
        if any(end is not None for end in ends):
            return ends[0] == ends[1]
        if "infty" in constants(answer.tree) and "infty" not in constants(gold.tree):
            return False
        return same_value(answer.tree, gold.tree)

    def _items(self, answer: Items, gold: Items) -> bool:
        kinds = {answer.kind, gold.kind}
        if kinds == {"system", "tuple"}:
            system, values = (answer, gold) if answer.kind == "system" else (gold, answer)
            named = sorted((item for item in system.items if isinstance(item, Named)), key=lambda item: _letters(item.name))
            ordered = Items("tuple", tuple(item.value for item in named))
            return self._items(ordered, values) if system is answer else self._items(values, ordered)
        if len(kinds) == 1 and kinds <= {"tuple", "ratio", "sequence"}:
            return len(answer.items) == len(gold.items) and all(
                self.same(one, other) for one, other in zip(answer.items, gold.items, strict=True)
            )
        if kinds <= {"set", "list"} or kinds == {"system"}:
            return self._unordered(answer.items, gold.items, repeats="set" not in kinds)
        return False

    def _unordered(self, answer: Sequence[Value], gold: Sequence[Value], *, repeats: bool) -> bool:
        if not repeats:
            return all(any(self._same_item(one, other) for other in gold) for one in answer) and all(
                any(self._same_item(one, other) for one in answer) for other in gold
            )
        left = list(answer)
        for other in gold:
            found = next((index for index, one in enumerate(left) if self._same_item(one, other)), None)
            if found is None:
                return False
            del left[found]
        return not left

    def _same_item(self, answer: Value, gold: Value) -> bool:
        """As `same`; a set within a set or list is no element: {{1}, {2}} is not {1, 2}."""
        return _is_set(answer) == _is_set(gold) and self.same(answer, gold)

    def _ranges(self, answer: Value, gold: Value) -> bool:
        try:
            given, wanted = intervals(answer), intervals(gold)
        except UnreadableError:
            return False
        try:
            given, wanted = _merged(given), _merged(wanted)
        except UnreadableError:
            return self._matching(given, wanted)
        return len(given) == len(wanted) and all(self._same_interval(one, other) for one, other in zip(given, wanted, strict=True))

    def _matching(self, given: list[Interval], wanted: list[Interval]) -> bool:
        """Whether each interval with letters at its ends has its like."""
        return len(given) == len(wanted) and all(any(self._same_interval(one, other) for one in given) for other in wanted)

    def _same_interval(self, answer: Interval, gold: Interval) -> bool:
        brackets = (answer.low_closed, answer.high_closed) == (gold.low_closed, gold.high_closed)
        return brackets and self._formulas(answer.low, gold.low) and self._formulas(answer.high, gold.high)


def _unwrapped(value: Value) -> Value:
    """A set or list of one element is the element."""
    while isinstance(value, Items) and value.kind in ("set", "list") and len(value.items) == 1 and not _is_set(value.items[0]):
        value = value.items[0]
    return value


def _is_set(value: Value) -> bool:
    return isinstance(value, Items) and value.kind == "set"


def _sum_asked_for(relation: Relation) -> Value:
    """The value of `m + n = 70`, a sum of letters with its value; other relations as they are."""
    letters = relation.left.operation == "add" and all(part.operation == "variable" for part in relation.left.parts)
    if relation.sign != "=" or not letters or variables(relation.right):
        return relation
    return Formula(relation.right, "")


def _stem(words: str) -> str:
    return re.sub(r"[^\w ]", "", words)


def _letters(name: str) -> str:
    return re.sub(r"[\s{}]", "", name)


def _same_unit(one: str, other: str) -> bool:
    if one.startswith("!") or other.startswith("!"):
        return one == other
    return not one or not other or one == other or (one, other) in _POUNDS or (other, one) in _POUNDS


def _as_relation(named: Named) -> Relation | None:
    value = named.value
    if not isinstance(value, Formula) or value.tree is None or "(" in named.name:
        return None
    return Relation("=", Tree("variable", value=_letters(named.name).removeprefix("\\")), value.tree)


def _linked(one: Relation, other: Relation) -> bool:
    """Two equations in the same several variables; x = 3 and y = 3 are not."""
    return _variables(one) == _variables(other) and len(_variables(one)) > 1


def _variables(relation: Relation) -> frozenset[str]:
    return variables(relation.left) | variables(relation.right)


def _same_relation(one: Relation, other: Relation) -> bool:
    differences = [Tree("add", (side.left, Tree("negative", (side.right,)))) for side in (one, other)]
    return proportional(differences[0], differences[1], positive=one.sign not in ("=", "ne"))


def _merged(ranges: Sequence[Interval]) -> list[Interval]:
    """Intervals in order, those that touch joined. Raises UnreadableError when an end is no number."""
    found: list[Interval] = []
    for interval in sorted(ranges, key=lambda interval: (number_of(interval.low), not interval.low_closed)):
        low, high = number_of(interval.low), number_of(interval.high)
        if low > high or (low == high and not (interval.low_closed and interval.high_closed)):
            raise UnreadableError("an empty interval")
        before = found[-1] if found else None
        touches = before is not None and low == number_of(before.high) and (before.high_closed or interval.low_closed)
        if before is None or (low >= number_of(before.high) and not touches):
            found.append(interval)
        elif high > number_of(before.high) or (high == number_of(before.high) and interval.high_closed):
            found[-1] = before._replace(high=interval.high, high_closed=interval.high_closed)
    return found


# --- math-verify ---


def _by_library(answer: str, gold: str) -> bool:
    """What math-verify says of two formulas in LaTeX. Raises _GoldUnreadableError, TooLargeError."""
    from math_verify import verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that we switch its alarm off
    answer, gold = map(_in_braces, (answer, gold))
    for text in (answer, gold):
        _refuse_towers(text)
    read_by_library = _library_parser()
    try:
        wanted = read_by_library(gold)
    except MemoryError:
        raise
    except Exception as error:  # the parser raises plain Exception
        raise _GoldUnreadableError(_short(gold)) from error
    try:
        given = read_by_library(answer)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - as above; an answer that says nothing readable is wrong
        return False
    try:
        return bool(verify(wanted, given, timeout_seconds=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception as error:  # sympy raises anything
        raise UndecidedError(f"math-verify failed with {type(error).__name__}") from error


def _in_braces(text: str) -> str:
    """LaTeX whose fractions and roots have braces, as math-verify's parser needs them behind a space, and no decimals."""
    text = re.sub(r"\\frac (\d)(\d)", r"\\frac { \1 } { \2 } ", re.sub(r"\\sqrt (\d+)", r"\\sqrt { \1 }", text))
    return _DECIMAL.sub(_as_fraction, text)


def _as_fraction(decimal: re.Match[str]) -> str:
    """A decimal as a fraction: math-verify rounds floats to six digits."""
    number = Fraction(decimal.group())
    return f"\\frac {{ {number.numerator} }} {{ {number.denominator} }}"


def _library_parser() -> Callable[[str], object]:
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from math_verify.grader import should_treat_as_complex

    letters = ConversionConfig(lowercase_symbols=False)

    def parse(text: str) -> object:
        return latex2sympy(text, is_real=not should_treat_as_complex(text), normalization_config=None, conversion_config=letters)

    return parse


_FOR_LIBRARY = re.compile(r"\\(?:sum|prod|i?int|lim|cap|begin|operatorname)\b|[fghFGH] \(")
"""What math-verify reads and our grammar does not. The rest that ours refuses is refused: math-verify reads 45' as 45."""

_DECIMAL = re.compile(r"\d*\.\d+")

_LARGE = re.compile(
    r"\d{31}|\^ (?:\{ )?(?:- )?\d{4}|\d{4} !|\) !|\} !|\^ \{[^{}]*\^|\\(?:begin|sum|prod|int|lim)\b(?:.*\\(?:sum|prod|int|lim)\b){3}"
)


def _refuse_towers(text: str) -> None:
    if found := _LARGE.search(text):
        raise TooLargeError(f"{_short(found.group())} goes to no symbolic algebra")
