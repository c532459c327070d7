"""Tests for code problems: inputs by generator programs, outputs by agreement of known solutions, and which problems may be kept.

As in Kimi k1.5 (arXiv 2501.12599, 2.3.5): 50 inputs a problem, a test where at least 7 of 10 known solutions give the same output,
and a problem only where at least 9 of 10 pass the tests that are left; generators that give at least 40 tests are taken. Ours
besides: the tests of a problem must not all have the same output, which a program that prints it would pass.

Generators and solutions run in the sandbox, as answers do (`stages/rewards/code.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor
from fractions import Fraction
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from stages.chat import RESERVED
from stages.rewards.code import CodeTests, FunctionName, Output, Test, output_of
from stages.rewards.sandbox import DEFAULT_LIMITS, Limits, run_program

VERSION = 1
"""Of the rules; raised when they make other tests of the same problem."""
SOLUTIONS = 10
"""Known solutions a problem in Kimi k1.5."""
AGREEMENT = Fraction(7, 10)
"""Share of the solutions that must give the same output to an input."""
PASSING = Fraction(9, 10)
"""Share of the solutions that must pass every kept test."""


def _listed(value: Any) -> Any:
    """One program as a list of one."""
    return [value] if isinstance(value, str) else value


def _none_if_null(value: Any) -> Any:
    """A column that tables fill with null where a row has nothing."""
    return () if value is None else value


_OrNull = BeforeValidator(_none_if_null)


class Problem(BaseModel):
    """A code problem without tests: the columns of a row that decide them."""

    model_config = ConfigDict(frozen=True)

    question: str = Field(description="What is asked.")
    solutions: tuple[str, ...] = Field(min_length=2, description="Programs known to be right; Kimi k1.5 takes 10 submissions.")
    generator: Annotated[tuple[str, ...], BeforeValidator(_listed), _OrNull] = Field(
        (),
        description="A program, or several, that reads a seed from standard input and prints one input; of a function the JSON list of "
        "its arguments.",
    )
    inputs: Annotated[tuple[JsonValue, ...], _OrNull] = Field((), description="Ready inputs: texts, or of a function lists of arguments.")
    function: FunctionName | None = Field(None, description="Function to call; without it programs read standard input and print.")

    @model_validator(mode="after")
    def _fit(self) -> Problem:
        if not self.question.strip():
            raise ValueError("the question is empty")
        if marker := _marker(self.question):
            raise ValueError(f"the question holds {marker}, a marker of the chat format")
        if len(set(self.solutions)) < 2:
            raise ValueError("the solutions are one program, which agrees with itself; give at least 2 different ones")
        if not self.generator and not self.inputs:
            raise ValueError("there is neither `generator` nor `inputs`; give a program that prints inputs, or a list of them")
        for number, given in enumerate(self.inputs, 1):
            if self.function is None and not isinstance(given, str):
                raise ValueError(f"input {number} is no text; without `function` an input is what a program reads")
            if self.function is not None and (not isinstance(given, list) or _as_gold(given) is None):
                raise ValueError(f"input {number} is no list of arguments in JSON; of a function an input is that")
        return self


class Rules(NamedTuple):
    """How many inputs a problem gets, and how many tests it must have."""

    inputs: int = 50
    """Different inputs a problem, which generators fill up to. Ready inputs are all tried."""
    min_tests: int = 40
    """Fewest tests of a kept problem."""
    seed: int = 0
    """First seed of the generators; the others follow it."""


class Made(BaseModel):
    """What became of a problem."""

    model_config = ConfigDict(frozen=True)

    answer: str = Field("", description="JSON of `CodeTests`; empty when the problem is dropped.")
    rule: str = Field("", description="The rule that drops the problem, in a few words; empty when it is kept.")
    reason: str = Field("", description="What the rule found.")
    inputs: int = Field(0, description="Different inputs that were there.")
    tests: int = Field(0, description="Of them tests that the solutions agree on.")
    solutions: int = Field(0, description="Known solutions.")
    passing: int = Field(0, description="Of them those that pass every test; 0 without a test.")


class Inputs(NamedTuple):
    """What the runs of a generator gave."""

    different: list[JsonValue]
    """Each input once, in the order of the seeds."""
    fault: str
    """Why the first run that gave none did not; empty when each did."""


class Selection(NamedTuple):
    """Which candidate tests may be trusted, by `select_tests`."""

    expected: dict[int, JsonValue]
    """The agreed output of each kept test, by the index of its input."""
    passing: tuple[int, ...]
    """Indices of the solutions that pass every kept test."""
    rule: str
    """The rule that drops the problem, in a few words; empty when it is kept."""
    fault: str
    """Why the problem is dropped; empty when it is kept."""


def digest_of(problem: Problem, rules: Rules) -> str:
    """SHA-256 over everything that decides the tests of a problem; its question does not."""
    content = [VERSION, problem.model_dump(mode="json", exclude={"question"}), rules]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def make_tests(problem: Problem, rules: Rules, threads: Executor, limits: Limits = DEFAULT_LIMITS) -> Made:
    """Inputs, outputs and verdict of one problem; its programs run side by side in `threads`.

    A problem with fewer inputs than tests are asked for is dropped before a solution runs. Raises SandboxError.
    """
    inputs, fault = _candidates(problem, rules, threads, limits)
    counts = {"inputs": len(inputs), "solutions": len(problem.solutions)}
    if len(inputs) < rules.min_tests:
        reason = f"{len(inputs)} different inputs, fewer than {rules.min_tests} tests"
        return Made(rule="few inputs", reason=f"{reason}; a generator's run failed: {fault}" if fault else reason, **counts)
    tests, selection = validate_tests(
        inputs, problem.solutions, threads, function=problem.function, min_tests=rules.min_tests, limits=limits
    )
    counts |= {"tests": len(selection.expected), "passing": len(selection.passing) if selection.expected else 0}
    if tests is None:
        return Made(rule=selection.rule, reason=selection.fault, **counts)
    answer = tests.model_dump_json(exclude_defaults=True)
    if marker := _marker(answer):
        return Made(rule="chat marker", reason=f"a test holds {marker}, a marker of the chat format", **counts)
    return Made(answer=answer, **counts)


def _candidates(problem: Problem, rules: Rules, threads: Executor, limits: Limits) -> Inputs:
    """Ready inputs, and those of the generators, in equal parts, up to the number asked for."""
    found = {json.dumps(given, sort_keys=True): given for given in problem.inputs}
    missing, faults = max(0, rules.inputs - len(found)), []
    for place, generator in enumerate(problem.generator):
        count = missing // len(problem.generator) + (place < missing % len(problem.generator))
        more = generate_inputs(generator, threads, count, rules.seed, function=problem.function is not None, limits=limits)
        found |= {json.dumps(given, sort_keys=True): given for given in more.different}
        faults.append(more.fault)
    return Inputs(list(found.values()), next(filter(None, faults), ""))


def generate_inputs(
    generator: str,
    threads: Executor,
    count: int = 50,
    seed: int = 0,
    *,
    function: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> Inputs:
    """At most `count` different inputs that a generator program prints, each run with another seed on standard input.

    With `function` it prints the list of arguments as JSON. Runs that fail give no input. Raises SandboxError.
    """
    found: dict[str, JsonValue] = {}
    faults: list[str] = []
    for outcome in threads.map(lambda number: run_program(generator, f"{number}\n", limits), range(seed, seed + count)):
        if outcome.fault or not outcome.output.strip():
            faults.append(outcome.fault or "nothing was printed")
        elif not function:
            found[outcome.output] = outcome.output
        elif (arguments := _arguments(outcome.output)) is not None and (text := _as_gold(arguments)) is not None:
            found[text] = arguments
        else:
            faults.append("no list of arguments in JSON was printed")
    return Inputs(list(found.values()), next(iter(faults), ""))


def select_tests(
    outputs: Sequence[Sequence[Output]],
    *,
    agreement: Fraction = AGREEMENT,
    passing: Fraction = PASSING,
    min_tests: int = 1,
) -> Selection:
    """Kimi k1.5's rules (arXiv 2501.12599, 2.3.5) on the outputs of k solutions to each candidate input.

    `outputs[i][j]` is what solution j made of input i. A test is kept when at least `agreement` of the
    solutions give the same value; a fault agrees with nothing, and so does a value that no gold answer can hold. The
    problem is kept when at least `passing` of the solutions pass every kept test, `min_tests` tests are left, and they do not all
    have the same output.
    """
    if not outputs or not outputs[0]:
        return Selection({}, (), "few inputs", "no inputs or no solutions")
    solutions = len(outputs[0])
    texts = [[None if output.fault else _as_gold(output.value) for output in row] for row in outputs]
    agreed: dict[int, str] = {}
    for index, row in enumerate(texts):
        votes = Counter(text for text in row if text is not None).most_common(1)
        if votes and votes[0][1] >= agreement * solutions:
            agreed[index] = votes[0][0]
    passed = tuple(j for j in range(solutions) if all(texts[index][j] == text for index, text in agreed.items()))
    rule = fault = ""
    if len(agreed) < min_tests:
        rule, fault = "few tests agreed on", f"{len(agreed)} tests of {len(outputs)} are left, fewer than {min_tests}"
    elif len(passed) < passing * solutions:
        rule, fault = "few solutions pass", f"{len(passed)} of {solutions} solutions pass the tests, fewer than {passing}"
    elif len(set(agreed.values())) == 1:
        rule, fault = "one output", "all tests have the same output"
    faults = Counter(output.fault for row in outputs for output in row if output.fault)
    if rule and faults:
        fault += f"; {faults.total()} runs of {solutions * len(outputs)} failed, the most with {faults.most_common(1)[0][0]}"
    return Selection({index: json.loads(text) for index, text in agreed.items()}, passed, rule, fault)


def validate_tests(
    inputs: Sequence[JsonValue],
    solutions: Sequence[str],
    threads: Executor,
    *,
    function: str | None = None,
    min_tests: int = 1,
    limits: Limits = DEFAULT_LIMITS,
) -> tuple[CodeTests | None, Selection]:
    """Run every known solution on every candidate input; the tests, when `select_tests` keeps the problem, and why not.

    Outputs are held to be the same only when they are equal, so a problem with a tolerance or with several right
    outputs loses its tests here. Raises SandboxError: a failure of the sandbox must not look like disagreement.
    """
    runs = [(solution, given) for given in inputs for solution in solutions]
    found = list(threads.map(lambda run: output_of(run[0], run[1], function, limits), runs))
    outputs = [found[start : start + len(solutions)] for start in range(0, len(found), len(solutions))]
    selection = select_tests(outputs, min_tests=min_tests)
    if selection.fault:
        return None, selection
    tests = tuple(Test(input=inputs[index], expected=expected) for index, expected in selection.expected.items())
    return CodeTests(function=function, tests=tests), selection


def _arguments(text: str) -> list[JsonValue] | None:
    """The list of arguments that a generator printed, if it is one."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, list) else None


def _as_gold(value: JsonValue) -> str | None:
    """The JSON of a value; None for one that a gold answer cannot hold: infinities, NaN, half characters, very deep nests."""
    try:
        text = json.dumps(value, sort_keys=True, allow_nan=False)
        CodeTests.model_validate_json(f'{{"function": "f", "tests": [{{"input": [], "expected": {text}}}]}}')
    except (ValueError, RecursionError):
        return None
    return text


def _marker(text: str) -> str | None:
    """The first marker of the chat format in a text."""
    return next((marker for marker in RESERVED if marker in text), None)
