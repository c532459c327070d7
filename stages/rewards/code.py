"""Answers that are programs: does the program pass every hidden test? And which tests may be trusted?

A problem's gold answer is the JSON of `CodeTests`. Each test is a fresh run in the sandbox (`stages/rewards/sandbox.py`). The
program gets the input of one test and nothing else; what it should print or return never enters the sandbox and
is compared outside. So a program can forge no verdict: whatever it patches, it can only hand over an
output, and the one output that counts is the right one.

Tests are generated and validated as in Kimi k1.5 (arXiv 2501.12599, 2.3.5): programs that write inputs, outputs by
agreement of at least 7 of 10 known solutions, and a problem only where at least 9 of 10 pass the tests that are left.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import chain
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from stages.rewards.grading import Grade, Verdict
from stages.rewards.sandbox import DEFAULT_LIMITS, Limits, SandboxError, run_program

_FENCE = re.compile(r"^([ ]*+)(`{3,}+|~{3,}+)[ \t]*+([^\s`]*+)[^`\n]*+$", re.MULTILINE)
_PYTHON = {"", "python", "python3", "py"}


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Test(_Closed):
    """One run of the program: text in and text out, or arguments in and a value out."""

    __test__ = False  # not one of pytest's

    input: JsonValue = Field(description="Standard input, or the list of arguments of the function.")
    expected: JsonValue = Field(description="What must be printed, or the value that must be returned.")


class CodeTests(_Closed):
    """The gold answer of a code problem."""

    function: str | None = Field(
        None,
        pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)?$",
        description="Function to call, or Class.method; without it the program reads standard input and prints.",
    )
    tolerance: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="Largest relative or absolute error of a number; without it numbers are compared exactly."
    )
    tests: tuple[Test, ...] = Field(min_length=1, description="Every test must pass.")

    @model_validator(mode="after")
    def _fit(self) -> CodeTests:
        for number, test in enumerate(self.tests, 1):
            if self.function is not None and not isinstance(test.input, list):
                raise ValueError(f"test {number}: the input of a function is the list of its arguments")
            if self.function is None and not (isinstance(test.input, str) and isinstance(test.expected, str) and test.expected.strip()):
                raise ValueError(f"test {number}: input and expected output are texts, the latter not empty")
            if _has_nan(test.expected):
                raise ValueError(f"test {number}: nothing equals NaN, so no program could pass")
        return self


class Output(NamedTuple):
    """What a program made of one input."""

    fault: str
    """Empty when there is a value."""
    value: JsonValue


class Selection(NamedTuple):
    """Which candidate tests may be trusted, by `select_tests`."""

    expected: dict[int, JsonValue]
    """The agreed output of each kept test, by the index of its input."""
    passing: tuple[int, ...]
    """Indices of the solutions that pass every kept test."""
    fault: str
    """Why the problem is dropped; empty when it is kept."""


def grade_code(response: str, gold: str, limits: Limits = DEFAULT_LIMITS) -> Grade:
    """Grade the program in the last code block of a response against the tests in `gold` (JSON of `CodeTests`).

    Not graded: tests that cannot be read, or a sandbox that failed.
    """
    try:
        tests = CodeTests.model_validate_json(gold)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        return Grade(Verdict.NOT_GRADED, f"the tests cannot be read: {'.'.join(map(str, first['loc']))} {first['msg']}".replace("  ", " "))
    program = program_of(response)
    if program is None:
        return Grade(Verdict.WRONG, "no closed block of Python code")
    return grade_program(program, tests, limits)


def grade_program(program: str, tests: CodeTests, limits: Limits = DEFAULT_LIMITS) -> Grade:
    """Run a program on each test in turn; the first test that fails decides. `limits` hold for each run."""
    for number, test in enumerate(tests.tests, 1):
        try:
            fault, value = output_of(program, test.input, tests.function, limits)
        except SandboxError as error:
            return Grade(Verdict.NOT_GRADED, str(error))
        same = _same_text if tests.function is None else _same_value
        if not fault and not same(value, test.expected, tests.tolerance):
            fault = "another output"
        if fault:
            return Grade(Verdict.WRONG, f"test {number} of {len(tests.tests)}: {fault}")
    return Grade(Verdict.RIGHT, f"{len(tests.tests)} tests passed")


def program_of(response: str) -> str | None:
    """The text of the last fenced block when it is closed and Python or without a language, else None.

    A last block that is not closed was cut off: it is no program, and no earlier block takes its place.
    """
    found: str | None = None
    opening: re.Match[str] | None = None
    for fence in _FENCE.finditer(response):
        indent, mark, language = fence.groups()
        if opening is None:
            opening, found = fence, None
        elif mark.startswith(opening[2]) and not language and len(indent) <= len(opening[1]) + 3:
            if opening[3].lower() in _PYTHON:
                found = re.sub(rf"^ {{0,{len(opening[1])}}}", "", response[opening.end() + 1 : fence.start()], flags=re.MULTILINE)
            opening = None
    return found if opening is None and found and found.strip() else None


def output_of(program: str, given: JsonValue, function: str | None = None, limits: Limits = DEFAULT_LIMITS) -> Output:
    """Run a program on one input: what it prints, lines without trailing space, or what its function returns.

    Raises SandboxError when the sandbox failed.
    """
    if function is None:
        outcome = run_program(program, str(given), limits)
        printed = _lines(outcome.output)
        return Output(outcome.fault or ("" if printed else "nothing was printed"), printed)
    outcome = run_program(_CALL, json.dumps({"program": program, "function": function, "arguments": given}), limits)
    if outcome.fault:
        return Output(outcome.fault, None)
    try:
        return Output("", json.loads(outcome.output))
    except (ValueError, RecursionError):
        return Output("no value was returned", None)


def generate_inputs(
    generator: str,
    count: int = 50,
    seed: int = 0,
    *,
    function: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> list[JsonValue]:
    """At most `count` different inputs that a generator program prints, each run with another seed on standard input.

    With `function` it prints the list of arguments as JSON. Runs that fail give no input. Raises SandboxError.
    """
    found: dict[str, JsonValue] = {}
    for number in range(seed, seed + count):
        outcome = run_program(generator, f"{number}\n", limits)
        if outcome.fault or not outcome.output.strip():
            continue
        if not function:
            found[outcome.output] = outcome.output
            continue
        try:
            arguments = json.loads(outcome.output)
        except (ValueError, RecursionError):
            continue
        if isinstance(arguments, list) and (text := _as_gold(arguments)) is not None:
            found[text] = arguments
    return list(found.values())


def select_tests(
    outputs: Sequence[Sequence[Output]],
    *,
    agreement: Fraction = Fraction(7, 10),
    passing: Fraction = Fraction(9, 10),
    min_tests: int = 1,
) -> Selection:
    """Kimi k1.5's rules (arXiv 2501.12599, 2.3.5) on the outputs of k solutions to each candidate input.

    `outputs[i][j]` is what solution j made of input i. A test is kept when at least `agreement` of the
    solutions give the same value; a fault agrees with nothing, and so does a value that no gold answer can hold. The
    problem is kept when at least `passing` of the solutions pass every kept test. (Kimi k1.5 has 10 solutions, 50 inputs a
    problem, and takes generators that give at least 40 tests.) Ours besides: the kept tests must not all have the same
    output, which a program that prints it would pass; `min_tests` of them must be left.
    """
    if not outputs or not outputs[0]:
        return Selection({}, (), "no inputs or no solutions")
    solutions = len(outputs[0])
    texts = [[None if output.fault else _as_gold(output.value) for output in row] for row in outputs]
    agreed: dict[int, str] = {}
    for index, row in enumerate(texts):
        votes = Counter(text for text in row if text is not None).most_common(1)
        if votes and votes[0][1] >= agreement * solutions:
            agreed[index] = votes[0][0]
    passed = tuple(j for j in range(solutions) if all(texts[index][j] == text for index, text in agreed.items()))
    fault = ""
    if len(agreed) < min_tests:
        fault = f"{len(agreed)} tests of {len(outputs)} are left, fewer than {min_tests}"
    elif len(passed) < passing * solutions:
        fault = f"{len(passed)} of {solutions} solutions pass the tests, fewer than {passing}"
    elif len(set(agreed.values())) == 1:
        fault = "all tests have the same output"
    return Selection({index: json.loads(text) for index, text in agreed.items()}, passed, fault)


def validate_tests(
    inputs: Sequence[JsonValue],
    solutions: Sequence[str],
    *,
    function: str | None = None,
    min_tests: int = 1,
    limits: Limits = DEFAULT_LIMITS,
) -> tuple[CodeTests | None, Selection]:
    """Run every known solution on every candidate input; the tests, when `select_tests` keeps the problem, and why not.

    Outputs are held to be the same only when they are equal, so a problem with a tolerance or with several right
    outputs loses its tests here. Raises SandboxError: a failure of the sandbox must not look like disagreement.
    """
    outputs = [[output_of(solution, given, function, limits) for solution in solutions] for given in inputs]
    selection = select_tests(outputs, min_tests=min_tests)
    if selection.fault:
        return None, selection
    tests = tuple(Test(input=inputs[index], expected=expected) for index, expected in selection.expected.items())
    return CodeTests(function=function, tests=tests), selection


def _as_gold(value: JsonValue) -> str | None:
    """The JSON of a value; None for one that a gold answer cannot hold: infinities, NaN, half characters, very deep nests."""
    try:
        text = json.dumps(value, sort_keys=True, allow_nan=False)
        CodeTests.model_validate_json(f'{{"function": "f", "tests": [{{"input": [], "expected": {text}}}]}}')
    except (ValueError, RecursionError):
        return None
    return text


def _has_nan(value: JsonValue) -> bool:
    if isinstance(value, list | dict):
        return any(map(_has_nan, value.values() if isinstance(value, dict) else value))
    return value != value


def _lines(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def _same_text(found: Any, expected: Any, tolerance: float | None) -> bool:
    """Whether two printed texts are the same line by line; with a tolerance also word by word, numbers within it."""
    lines, wanted = _lines(found).split("\n"), _lines(expected).split("\n")
    if lines == wanted or tolerance is None:
        return lines == wanted
    words, wanted_words = [line.split() for line in lines], [line.split() for line in wanted]
    if list(map(len, words)) != list(map(len, wanted_words)):
        return False
    pairs = zip(chain(*words), chain(*wanted_words), strict=True)
    return all(one == other or _close(one, other, tolerance) for one, other in pairs)


def _same_value(found: JsonValue, expected: JsonValue, tolerance: float | None) -> bool:
    """Whether two values are equal. True is not 1, a text is not a number, and NaN equals nothing."""
    if isinstance(expected, list):
        return (
            isinstance(found, list)
            and len(found) == len(expected)
            and all(_same_value(one, other, tolerance) for one, other in zip(found, expected, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and found.keys() == expected.keys()
            and all(_same_value(found[key], expected[key], tolerance) for key in expected)
        )
    if expected is None or isinstance(expected, bool | str) or isinstance(found, bool):
        return type(found) is type(expected) and found == expected
    return isinstance(found, int | float) and (found == expected or (tolerance is not None and _close(found, expected, tolerance)))


def _close(found: Any, expected: Any, tolerance: float) -> bool:
    """Whether two numbers are within `tolerance`, relative or absolute; infinities and NaN never are."""
    try:
        one, other = float(found), float(expected)
    except (ValueError, OverflowError):
        return False
    return abs(one - other) <= tolerance * max(1.0, abs(other)) < float("inf")


_CALL = """
import json, os, sys
call = json.loads(sys.stdin.read())
channel = os.dup(1)
os.dup2(2, 1)
names = {"__name__": "solution"}
exec(compile(call["program"], "/solution.py", "exec"), names)
owner, _, name = call["function"].rpartition(".")
function = getattr(names[owner](), name) if owner else names[name]
os.write(channel, json.dumps(function(*call["arguments"])).encode())
"""
"""Calls a function inside the sandbox; what the program prints goes to standard error."""
