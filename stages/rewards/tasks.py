"""Graders by type of answer: text, mathematics, exact, number, multiple choice, JSON schema, programs, reasoning-gym's own scorers.

A problem's row says the type (`answer_type`) and what belongs to it (`grading`, a JSON object): the choices of a
multiple-choice question, the tolerance of a number, the entry of a reasoning-gym problem. Without either, the answer is
graded as text (`stages/rewards/grading.py`). What may take long runs in processes that are killed at a limit.

A gold answer, a schema or an entry that cannot be used is never the model's fault: the reply is not graded.
"""

from __future__ import annotations

import ast
import atexit
import functools
import inspect
import json
import math
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from importlib.metadata import version
from typing import Any, NamedTuple, get_args

from stages.chat import Reply
from stages.config import AnswerType
from stages.rewards.code import grade_code
from stages.rewards.equivalence import GRADER as MATH_GRADER
from stages.rewards.equivalence import MAX_CHARACTERS, equivalent
from stages.rewards.extraction import final_answer, innermost
from stages.rewards.grading import GRADER as TEXT_GRADER
from stages.rewards.grading import Grade, Verdict, boxed_answers, grade, normalise
from stages.rewards.pool import Job, Pool, usable_cores
from stages.rewards.second_opinion import Graded, SecondOpinion, math_verify_grade, second_opinion
from stages.rewards.unsolved import is_unsolved

ANSWER_TYPES: tuple[str, ...] = get_args(AnswerType)
VERSION = 1
"""Of the graders that stand in this file."""
MAX_ANSWER_CHARACTERS = 20_000
"""A longer answer is wrong: no gold answer is that long (curation keeps none)."""
_MAX_EXPONENT = 400
_MAX_DEPTH = 64
_SHOWN = 40
UNBOXED = frozenset({"json_schema", "code"})
"""Types whose answer is the response, or a block of it, and stands in no box."""
_WARM_UP = {
    "math": ("\\sum_{k=1}^{4} k", ""),  # which our own grammar leaves to math-verify
    "json_schema": ('{"const": 7}', ""),
    "reasoning_gym": ("7", '{"family": "chain_sum"}'),
}
"""Types whose graders may take long, with gold answer and `grading` of a first task that makes their processes import what they need."""
_RUNS_TEXT = frozenset({"eval", "exec", "parse_expr", "sympify", "S", "__import__"})
"""Functions that run text as code; sympy's parsers are among them."""
_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL)
_LETTER = re.compile(r"[(\[]?([A-Za-z])(?:[)\].:]+|$)\s*(.*)", re.DOTALL)
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textit)\{([^{}]*)\}")
_FRACTION = re.compile(r"([+-]?)\s*(?:\\[dt]?frac\{(\d+)\}\{(\d+)\}|(\d+)\s*/\s*(\d+))")
_PROBES: tuple[Any, ...] = (None, 0, "", [])
"""Values of four types that say nothing: a schema that accepts them all asks for no type of value."""
_NOT_FINITE = re.compile(r"(?<![a-z])s?(?:nan\d*|inf(?:inity)?)j?(?![a-z])|\d\.?e[+-]?\d{4}", re.IGNORECASE)
"""Not a number, infinity, and exponents that take for ever: every comparison with a NaN is false, so scorers take it for near."""
_LONE_NUMBER = re.compile(r"[^\d]*?([+-]?\d[\d,]*(?:\.\d+)?(?:/\d+)?)[^\d]*")
"""One number with words around it, but no second one."""
_SAYS_NOTHING = "no answer"


def rules_of(answer_type: str) -> str:
    """Name and version of the rules that grade a type, kept with what they decide."""
    match answer_type:
        case "text":
            return TEXT_GRADER
        case "math":
            return f"{MATH_GRADER}, math-verify {version('math-verify')}"
        case "reasoning_gym":
            return f"reasoning-gym {version('reasoning-gym')}"
    return f"{answer_type}-{VERSION}"


class Task(NamedTuple):
    """How the reply to a problem is graded."""

    gold: str
    answer_type: str = "text"
    grading: str = ""
    """JSON object with what the type needs beside the gold answer; empty for nothing."""
    question: str = ""
    """What was asked: an expression out of it is no answer in mathematics."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Task:
        """How answers to the problem of a row are graded."""
        return cls(row["answer"], row.get("answer_type") or "text", row.get("grading") or "", row["question"])

    @property
    def boxed(self) -> bool:
        """Whether an answer stands in a box, as the gold answer could. A schema and tests are what answers are held against, and none."""
        return self.answer_type not in UNBOXED


Grader = Callable[[Sequence[Reply], Sequence[Task]], list[Grade]]
"""Grades of replies, in their order."""


def grade_tasks(replies: Sequence[Reply], tasks: Sequence[Task]) -> list[Grade]:
    """Grade replies by their tasks' types, in their order.

    What cannot take long is graded here, programs in sandboxes side by side, the rest in a pool: past its limits a reply
    is not graded.
    """
    grades: dict[int, Grade] = {}
    waiting: dict[str, list[int]] = {}
    for index, task in enumerate(tasks):
        if task.answer_type in _WARM_UP or task.answer_type == "code":
            waiting.setdefault(task.answer_type, []).append(index)
        else:
            grades[index] = grade_task(replies[index], task)
    for answer_type, indices in waiting.items():
        asked = [(replies[index], tasks[index]) for index in indices]
        if answer_type == "code":
            with ThreadPoolExecutor(usable_cores()) as threads:
                found = list(threads.map(lambda pair: grade_task(*pair), asked))
        else:
            found = _pool(answer_type, os.getpid()).grade([Job(grade_task, pair) for pair in asked])
        grades |= zip(indices, found, strict=True)
    return [grades[index] for index in range(len(tasks))]


def second_grades(pairs: Sequence[tuple[str, str]]) -> list[Grade]:
    """What math-verify alone says of answers and their gold answers, by its own means."""
    return _pool("math", os.getpid()).grade([Job(math_verify_grade, pair) for pair in pairs])


def second_opinion_of(replies: Sequence[Reply], tasks: Sequence[Task], grades: Sequence[Grade], share: float, seed: int) -> SecondOpinion:
    """What math-verify alone says of a sample of the grades in mathematics."""
    graded = [
        Graded(answer, innermost(task.gold), found)
        for reply, task, found in zip(replies, tasks, grades, strict=True)
        if task.answer_type == "math" and (answer := final_answer(reply.response, only_boxed=True, one_box=True).answer) is not None
    ]
    if not graded or not share:
        return SecondOpinion(0, 0, ())
    return second_opinion(graded, _pool("math", os.getpid()), share=share, seed=seed)


@functools.cache
def _pool(answer_type: str, process: int) -> Pool:
    """The processes that grade answers of a type, for the time of this process; a fork of it has its own."""
    gold, grading = _WARM_UP[answer_type]
    pool = Pool(warm_up=[Job(grade_task, (Reply(None, "\\boxed{7}"), Task(gold, answer_type, grading)))])
    atexit.register(pool.close)
    return pool


def grade_task(reply: Reply, task: Task) -> Grade:
    """Grade a reply by its task's type. The thinking is never read."""
    try:
        detail = json.loads(task.grading) if task.grading else {}
    except (ValueError, RecursionError):
        detail = None
    if not isinstance(detail, dict):
        return Grade(Verdict.NOT_GRADED, f"`grading` is no JSON object: {task.grading[:_SHOWN]!r}")
    if task.answer_type == "text":
        return grade(reply, task.gold)
    if task.answer_type == "json_schema":
        return json_schema(reply.response, task.gold)
    if task.answer_type == "code":
        return grade_code(reply.response, task.gold)
    if task.answer_type == "math":
        found, reason = final_answer(reply.response, only_boxed=True, one_box=True)
        if found is None:
            return Grade(Verdict.WRONG, reason)
        if len(found) > MAX_CHARACTERS >= len(task.gold):
            return Grade(Verdict.WRONG, f"the answer has {len(found)} characters, at most {MAX_CHARACTERS} are read")
        found_grade = equivalent(found, gold := innermost(task.gold))
        if found_grade.verdict is Verdict.RIGHT and is_unsolved(found, gold, task.question):
            return Grade(Verdict.WRONG, f"{found[:_SHOWN]} is an expression, not its value")
        return found_grade
    answer = _one_box(reply.response)
    if isinstance(answer, Grade):
        return answer
    match task.answer_type:
        case "exact":
            return exact(answer, task.gold)
        case "number" | "integer":
            return number(answer, task.gold, relative=detail.get("relative", 0.0), absolute=detail.get("absolute", 0.0))
        case "multiple_choice":
            return multiple_choice(answer, task.gold, detail.get("choices", []))
        case "reasoning_gym":
            return reasoning_gym_score(answer, task.gold, detail)
    return Grade(Verdict.NOT_GRADED, f"no grader for answers of the type {task.answer_type!r}; known are {', '.join(ANSWER_TYPES)}")


def gold_reply(task: Task) -> Reply | None:
    """A reply with the gold answer and nothing else; None where that is no answer but what answers are held against."""
    return Reply("x", f"\\boxed{{{task.gold}}}") if task.boxed else None


def empty_reply(task: Task) -> Reply:
    """A reply of the right form with nothing in it."""
    return Reply("x", "\\boxed{}" if task.boxed else "")


def _one_box(response: str) -> str | Grade:
    """The content of the one box, or the grade of a reply without it."""
    boxes = boxed_answers(response)
    if boxes is None:
        return Grade(Verdict.WRONG, "box is not closed")
    if len(boxes) != 1:
        return Grade(Verdict.WRONG, "no boxed answer" if not boxes else "several boxed answers")
    if len(boxes[0]) > MAX_ANSWER_CHARACTERS:
        return Grade(Verdict.WRONG, f"the answer has {len(boxes[0])} characters, at most {MAX_ANSWER_CHARACTERS} are read")
    return boxes[0]


def exact(answer: str, gold: str) -> Grade:
    """Right for the gold answer's own characters, spaces around them aside."""
    if not gold.strip():
        return Grade(Verdict.NOT_GRADED, "gold answer is empty")
    return _decided(answer.strip() == gold.strip(), answer, gold)


def number(answer: str, gold: str, *, relative: float = 0.0, absolute: float = 0.0) -> Grade:
    """Right when the answer is a number within max(absolute, relative * |gold|) of the gold answer; all are read exactly.

    Read are integers and decimals, thousands separators, scientific notation and simple fractions. Not finite is no number.
    """
    if not all(type(value) in (int, float) and 0 <= value < float("inf") for value in (relative, absolute)):
        return Grade(Verdict.NOT_GRADED, f"tolerance {relative!r}, {absolute!r}: the rule is numbers from 0")
    wanted, found = read_number(gold), read_number(answer)
    if wanted is None:
        return Grade(Verdict.NOT_GRADED, f"gold answer {gold[:_SHOWN]!r} is no number")
    if found is None:
        return Grade(Verdict.WRONG, f"{answer[:_SHOWN]!r} is no number")
    return _decided(abs(found - wanted) <= max(Fraction(str(absolute)), Fraction(str(relative)) * abs(wanted)), answer, gold)


def read_number(text: str) -> Fraction | None:
    """The exact value of a number as people write it; None for anything else, and for what is past 10^400."""
    plain = normalise(text)
    if fraction := _FRACTION.fullmatch(plain):
        sign, *parts = fraction.groups()
        digits = [part for part in parts if part is not None]
        if max(map(len, digits)) > _MAX_EXPONENT:
            return None
        above, below = map(int, digits)
        return Fraction(-above if sign == "-" else above, below) if below else None
    if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?", plain):
        plain = plain.replace(",", "")
    plain = re.sub(r"\s*(?:\\times|\\cdot|×|\*)\s*10\s*\^\s*\{?\s*([+-]?\d+)\s*\}?$", r"e\1", plain)
    if not plain.isascii() or not re.fullmatch(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", plain):
        return None
    try:
        value = Decimal(plain)
    except InvalidOperation:
        return None
    return Fraction(value) if abs(value.adjusted()) <= _MAX_EXPONENT else None


def multiple_choice(answer: str, gold: str, choices: Sequence[str]) -> Grade:
    """Right for the letter of the right choice, its text, or both when they belong together.

    `gold` is a letter or the text of a choice; `choices` are the texts, from A on (without them only letters are compared).
    """
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        return Grade(Verdict.NOT_GRADED, f"choices {str(choices)[:_SHOWN]!r} are no list of texts")
    texts = [_plain(choice) for choice in choices]
    wanted, found = _choice(gold, texts), _choice(answer, texts)
    if wanted is None or len(texts) > 26 or len(set(texts)) < len(texts):
        return Grade(Verdict.NOT_GRADED, f"gold answer {gold[:_SHOWN]!r} is no choice out of {len(texts)} different ones")
    if found is None:
        return Grade(Verdict.WRONG, f"{answer[:_SHOWN]!r} is no single choice")
    return _decided(found == wanted, answer, gold)


def _plain(text: str) -> str:
    return normalise(_TEXT_COMMAND.sub(r"\1", text)).casefold()


def _choice(text: str, texts: list[str]) -> int | None:
    """Which choice a text names; None for none, or for a letter and a text that do not belong together."""
    if _plain(text) in texts:
        return texts.index(_plain(text))
    lettered = _LETTER.fullmatch(_TEXT_COMMAND.sub(r"\1", text).strip().strip("$").strip())
    if lettered is None:
        return None
    index, rest = ord(lettered.group(1).upper()) - ord("A"), _plain(lettered.group(2))
    if texts and index >= len(texts):
        return None
    return index if not rest or (texts and rest == texts[index]) else None


def json_schema(response: str, schema_text: str) -> Grade:
    """Right when the response, or its one fenced block, is one JSON value that the schema accepts (2020-12).

    The gold answer is the schema; `const` or `enum` in it ask for a value. No reference outside it is followed. Repeated
    keys, NaN and Infinity are no JSON, nor is a number that no double holds. A schema that accepts values of every type
    (`required` without `type`) is not graded: a policy would answer null.
    """
    import jsonschema
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:
        schema = json.loads(schema_text)
        jsonschema.Draft202012Validator.check_schema(schema)
    except (ValueError, jsonschema.SchemaError, RecursionError) as error:
        return Grade(Verdict.NOT_GRADED, f"the gold answer is no JSON schema: {str(error).splitlines()[0][:80]}")
    if schema in (True, {}):
        return Grade(Verdict.NOT_GRADED, "the schema accepts anything")
    text = response.strip()
    if len(text) > MAX_ANSWER_CHARACTERS:
        return Grade(Verdict.WRONG, f"the answer has {len(text)} characters, at most {MAX_ANSWER_CHARACTERS} are read")
    fenced = _FENCE.fullmatch(text)
    try:
        value = json.loads(
            fenced.group(1) if fenced else text,
            object_pairs_hook=without_repeats,
            parse_constant=_no_constant,
            parse_float=lambda digits: _in_range(digits, float),
            parse_int=lambda digits: _in_range(digits, int),
        )
    except (ValueError, RecursionError) as error:
        return Grade(Verdict.WRONG, f"no JSON: {str(error)[:80]}")
    if _is_deep(value):
        return Grade(Verdict.WRONG, f"nested more than {_MAX_DEPTH} deep")
    registry: Registry[Any] = Registry()
    validator = jsonschema.Draft202012Validator(schema, registry=registry)
    try:
        if all(validator.is_valid(probe) for probe in _PROBES):
            return Grade(Verdict.NOT_GRADED, "the schema asks for no type: it accepts null, 0, an empty text and an empty list")
        fault = next(validator.iter_errors(value), None)
    except (Unresolvable, RecursionError) as error:
        return Grade(Verdict.NOT_GRADED, f"the schema cannot be followed: {type(error).__name__}")
    return Grade(Verdict.RIGHT, "valid") if fault is None else Grade(Verdict.WRONG, f"{fault.json_path}: {fault.message[:80]}")


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [inner for item in level if isinstance(item, dict | list) for inner in (item.values() if isinstance(item, dict) else item)]
    return bool(level)


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object of its pairs. Raises ValueError for a key that is given twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _in_range(digits: str, read: Callable[[str], float]) -> float:
    if math.isinf(float(digits)):
        raise ValueError(f"{digits[:_SHOWN]} is past what a double holds")
    return read(digits)


def reasoning_gym_score(answer: str, gold: str, entry: Mapping[str, Any]) -> Grade:
    """Right for full marks of the family's own scorer; its partial marks, also for an answer with others around it, are wrong.

    `entry` is `{"family", "question", "metadata"}` of the problem. A scorer that runs the answer as code is refused. Many scorers
    swallow their own failures, so one that gives the gold answer less than full marks grades nothing, nor does one that gives
    full marks to an answer that says nothing. Wrong whatever the scorer says: NaN and infinity (every comparison with a NaN is
    false, and a scorer takes it for near), exponents past 999 that it would compute for ever, and, where the gold answer is a
    number, several numbers or one of another sign.
    """
    family = entry.get("family", "")
    scorer = _scorer(family)
    if isinstance(scorer, str):
        return Grade(Verdict.NOT_GRADED, scorer)

    def marks(text: str) -> float:
        try:
            return scorer(text, {"question": entry.get("question", ""), "answer": gold, "metadata": entry.get("metadata", {})})
        except ValueError:  # it cannot read the text
            return 0.0

    try:
        if (full := marks(gold)) < 1.0:
            return Grade(Verdict.NOT_GRADED, f"the scorer of {family} gives the gold answer {full:g} of 1")
        with suppress(Exception):  # a scorer that fails on it does not pay it
            if marks(_SAYS_NOTHING) >= 1.0:
                return Grade(Verdict.NOT_GRADED, f"the scorer of {family} gives full marks to {_SAYS_NOTHING!r}")
        right = not _is_imitation(answer, gold) and marks(answer) >= 1.0
    except Exception as error:  # noqa: BLE001 - another library's scorer: whatever it raises is not the model's fault
        return Grade(Verdict.NOT_GRADED, f"the scorer of {family} failed: {type(error).__name__}")
    return _decided(right, answer, gold)


def _is_imitation(answer: str, gold: str) -> bool:
    """Whether an answer is what scorers take for right and is not: not finite, or beside a number several or another sign."""
    if _NOT_FINITE.search(answer) and not _NOT_FINITE.search(gold):
        return True
    wanted, found = read_number(gold), read_number(answer)
    if wanted is None:
        return False
    if found is None:
        lone = _LONE_NUMBER.fullmatch(normalise(answer))
        found = lone and read_number(lone.group(1))
    return found is None or (found > 0) != (wanted > 0) or (found < 0) != (wanted < 0)


@functools.cache
def _scorer(family: str) -> Callable[[str, dict[str, Any]], float] | str:
    """A family's scorer, or why there is none to use."""
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    if family not in DATASETS:
        return f"reasoning-gym has no family {family!r}"
    try:
        scorer: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(family)
    except Exception as error:  # noqa: BLE001 - a family that cannot be made from its defaults
        return f"the family {family} has no scorer by itself: {error}"
    runs = _calls(scorer) & _RUNS_TEXT
    if runs:
        return f"the scorer of {family} runs the answer as code ({', '.join(sorted(runs))}); a policy would learn to use that"
    return scorer


def _calls(method: Any) -> set[str]:
    """Names of what a method calls, and of what the methods and functions of its own module that it calls do."""
    module = inspect.getmodule(method)
    tree = ast.parse(inspect.getsource(module)) if module is not None else ast.Module([], [])
    bodies = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    own = ast.parse(textwrap.dedent(inspect.getsource(method)))
    found: set[str] = set()
    waiting = _called(own)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting |= _called(bodies[name]) if name in bodies else set()
    return found


def _called(tree: ast.AST) -> set[str]:
    return {ast.unparse(node.func).rpartition(".")[2] for node in ast.walk(tree) if isinstance(node, ast.Call)}


def _decided(is_right: bool, answer: str, gold: str) -> Grade:
    return Grade(Verdict.RIGHT, "match") if is_right else Grade(Verdict.WRONG, f"{answer.strip()[:_SHOWN]} is not {gold.strip()[:_SHOWN]}")
