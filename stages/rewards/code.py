"""Answers that are programs: does the program pass every hidden test?

A problem's gold answer is the JSON of `CodeTests`. Each test is a fresh run in the sandbox (`stages/rewards/sandbox.py`). The
program gets the input of one test and nothing else; what it should print or return never enters the sandbox and
is compared outside. So a program can forge no verdict: whatever it patches, it can only hand over an
output, and the one output that counts is the right one. Where tests come from: `stages/rewards/code_tests.py`.
"""

from __future__ import annotations

import json
import re
from itertools import chain
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from stages.rewards.grading import Grade, Verdict
from stages.rewards.sandbox import DEFAULT_LIMITS, Limits, SandboxError, run_program

_FENCE = re.compile(r"^([ ]*+)(`{3,}+|~{3,}+)[ \t]*+([^\s`]*+)[^`\n]*+$", re.MULTILINE)
_PYTHON = {"", "python", "python3", "py"}

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)?$")]
"""A function, or Class.method."""


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Test(_Closed):
    """One run of the program: text in and text out, or arguments in and a value out."""

    __test__ = False  # not one of pytest's

    input: JsonValue = Field(description="Standard input, or the list of arguments of the function.")
    expected: JsonValue = Field(description="What must be printed, or the value that must be returned.")


class CodeTests(_Closed):
    """The gold answer of a code problem."""

    function: FunctionName | None = Field(
        None, description="Function to call, or Class.method; without it the program reads standard input and prints."
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
