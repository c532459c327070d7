"""Tests for code problems: which inputs, which outputs, and which problems may be trusted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from stages.errors import RewardError
from stages.rewards.code import CodeTests, Output, grade_program
from stages.rewards.code_tests import Made, Problem, Rules, digest_of, generate_inputs, make_tests, select_tests, validate_tests
from stages.rewards.grading import Verdict

ROWS = [json.loads(line) for line in (Path(__file__).parents[2] / "datasets" / "code_problems.jsonl").read_text().splitlines()]

needs_bwrap = pytest.mark.usefixtures("bubblewrap")


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as found:
        yield found


ODD_VALUES = ["float('nan')", "float('inf')", "[-float('inf')]", "'\\ud800'", "{'\\udfff': 1}", "nested(900)", "nested(300)"]


@needs_bwrap
@pytest.mark.parametrize("value", ODD_VALUES)
def test_tests_hold_no_value_that_their_own_solutions_would_not_give_back(value: str, threads: ThreadPoolExecutor) -> None:
    """Not a number equals nothing, and no JSON holds it, an infinity, half a character or a very deep list."""
    solution = f"def nested(n): return [nested(n - 1)] if n else []\ndef f(x): return {value} if x == 1 else x"
    tests, selection = validate_tests([[0], [1], [2]], [solution] * 10, threads, function="f")
    assert sorted(selection.expected) == [0, 2]
    assert tests is not None
    assert grade_program(solution, tests) == (Verdict.RIGHT, "2 tests passed")


@needs_bwrap
@pytest.mark.parametrize("value", ODD_VALUES)
def test_generator_inputs_that_no_tests_can_hold_are_not_generated(value: str, threads: ThreadPoolExecutor) -> None:
    generator = f"""
import json
def nested(n): return [nested(n - 1)] if n else []
x = int(input())
print(json.dumps([x, {value} if x == 1 else x]))
"""
    assert generate_inputs(generator, threads, 3, function=True).different == [[0, 0], [2, 2]]


def votes(text: str) -> list[Output]:
    """One test's outputs, a letter a solution; a dot is a solution that failed."""
    return [Output("status 1", None) if letter == "." else Output("", letter) for letter in text]


@pytest.mark.parametrize(
    ("rows", "kept", "passing"),
    [
        (["aaaaaaaaaa", "bbbbbbbbbb"], {0: "a", 1: "b"}, 10),
        (["aaaaaaaaaa", "bbbbbbbbbc"], {0: "a", 1: "b"}, 9),  # 9 of 10 pass
        (["aaaaaaaaaa", "bbbbbbbbb."], {0: "a", 1: "b"}, 9),
        (["aaaaaaaaaa", "bbbbbbbbbb", "ccccccdddd"], {0: "a", 1: "b"}, 10),  # 6 of 10 agree: the test goes
        (["aaaaaaaaaa", "bbbbbbbbbb", "cccccc...."], {0: "a", 1: "b"}, 10),
        (["aaaaaaaaaa", "bbbbbbbbbb", ".........."], {0: "a", 1: "b"}, 10),
        (["aaaaaaaaax", "bbbbbbbbbx"], {0: "a", 1: "b"}, 9),  # the same solution fails both
    ],
)
def test_selection_keeps_tests_by_seven_of_ten_and_problems_by_nine(rows: list[str], kept: dict[int, str], passing: int) -> None:
    selection = select_tests([votes(row) for row in rows])
    assert (selection.expected, len(selection.passing), selection.fault) == (kept, passing, "")


@pytest.mark.parametrize(
    ("rows", "min_tests", "fault"),
    [
        (["aaaaaaaaaa", "bbbbbbbccc"], 1, "7 of 10 solutions pass the tests, fewer than 9/10"),  # 7 agree: the test stays
        (["aaaaaaaaaa", "bbbbbbbbcc"], 1, "8 of 10 solutions pass the tests, fewer than 9/10"),
        (["xaaaaaaaaa", "bxbbbbbbbb"], 1, "8 of 10 solutions pass the tests, fewer than 9/10"),  # each fails another test
        (["aaaaaabbbb", "ccccccdddd"], 1, "0 tests of 2 are left, fewer than 1"),
        (["aaaaaaaaaa", "bbbbbbbbbb", "ccccccdddd"], 3, "2 tests of 3 are left, fewer than 3"),
        (["aaaaaaaaaa", "aaaaaaaaaa"], 1, "all tests have the same output"),
        ([], 1, "no inputs or no solutions"),
    ],
)
def test_selection_drops_a_problem_and_says_why(rows: list[str], min_tests: int, fault: str) -> None:
    assert select_tests([votes(row) for row in rows], min_tests=min_tests).fault == fault


def test_selection_rules_hold_for_any_number_of_solutions() -> None:
    assert select_tests([votes("aaa"), votes("bbc")]).expected == {0: "a"}  # 2 of 3 is less than 7 of 10
    assert select_tests([votes("aaaa"), votes("bbbc")]).fault == "3 of 4 solutions pass the tests, fewer than 9/10"
    assert len(select_tests([votes("a" * 20), votes("b" * 18 + "cc")]).passing) == 18


@needs_bwrap
def test_generator_gives_different_inputs_the_same_for_a_seed(threads: ThreadPoolExecutor) -> None:
    generator = "import random\nr = random.Random(int(input()))\nprint(r.randint(1, 5))"
    first = generate_inputs(generator, threads, 12, seed=3).different
    assert first == generate_inputs(generator, threads, 12, seed=3).different
    assert len(first) == len(set(map(str, first))) <= 5
    lists = "print({0: '[1, [2]]', 1: 'no list', 2: '7', 3: '[]'}.get(int(input())) or 1 / 0)"
    assert generate_inputs(lists, threads, 5, function=True).different == [[1, [2]], []]


@needs_bwrap
def test_validation_runs_solutions_and_hands_over_tests_that_grade(threads: ThreadPoolExecutor) -> None:
    right = ["print(max(map(int, input().split())))", "print(sorted(map(int, input().split()))[-1])"] * 5
    careless = "print(max(input().split()))"  # compares texts: wrong for 9 10
    inputs = ["1 2", "9 10", "3 1 2"]
    tests, selection = validate_tests(inputs, [*right[:9], careless], threads)
    assert selection.passing == tuple(range(9))
    assert tests is not None
    assert [test.expected for test in tests.tests] == ["2", "10", "3"]
    assert grade_program(careless, tests).verdict is Verdict.WRONG
    dropped, selection = validate_tests(inputs, [*right[:8], careless, careless], threads)
    assert dropped is None
    assert selection.fault == "8 of 10 solutions pass the tests, fewer than 9/10"


@needs_bwrap
@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row["id"]))
def test_shipped_generators_make_tests_that_the_solutions_agree_on(row: dict[str, Any], threads: ThreadPoolExecutor) -> None:
    function = row["gold"].get("function")
    inputs = generate_inputs(row["generator"], threads, 6, seed=11, function=function is not None).different
    assert len(inputs) >= 3
    if row["gold"].get("tolerance") is None:
        tests, selection = validate_tests(inputs, row["solutions"], threads, function=function, min_tests=3)
        assert tests is not None, selection.fault


@needs_bwrap
def test_generator_that_fails_says_what_its_first_failed_run_did(threads: ThreadPoolExecutor) -> None:
    assert generate_inputs("assert int(input()) > 1, 'low'\nprint(1)", threads, 3).fault == "status 1: AssertionError: low"
    assert generate_inputs("pass", threads, 1).fault == "nothing was printed"
    assert generate_inputs("print('1 2')", threads, 1, function=True).fault == "no list of arguments in JSON was printed"
    assert generate_inputs("print(input())", threads, 2).fault == ""


def test_selection_of_a_dropped_problem_says_how_its_runs_failed() -> None:
    rows = [[Output("status 1: NameError: x", None)] * 3 + [Output("killed", None)] for _ in range(2)]
    selection = select_tests(rows)
    assert selection.rule == "few tests agreed on"
    assert selection.fault == "0 tests of 2 are left, fewer than 1; 8 runs of 8 failed, the most with status 1: NameError: x"


RIGHT = ["print(max(map(int, input().split())))", "print(sorted(map(int, input().split()))[-1])"] * 5
CARELESS = "print(max(input().split()))"  # compares texts: wrong for 9 10
SEEDED = "n = int(input())\nprint(n, 2 * n)"


def problem(**columns: Any) -> Problem:
    return Problem.model_validate({"question": "Print the largest number.", "solutions": RIGHT} | columns)


@needs_bwrap
def test_problem_with_ready_inputs_has_them_all_and_generators_fill_up_in_equal_parts(threads: ThreadPoolExecutor) -> None:
    ready = ["9 10\n", "3 1 2\n", "9 10\n"]
    other = "print(-int(input()), 0)"
    made = make_tests(problem(inputs=ready, generator=[SEEDED, other]), Rules(7, 7, seed=4), threads)
    assert (made.inputs, made.tests, made.solutions, made.passing, made.rule, made.reason) == (7, 7, 10, 10, "", "")
    tests = CodeTests.model_validate_json(made.answer)
    assert [test.input for test in tests.tests] == ["9 10\n", "3 1 2\n", "4 8\n", "5 10\n", "6 12\n", "-4 0\n", "-5 0\n"]
    assert grade_program(RIGHT[0], tests).verdict is Verdict.RIGHT
    assert grade_program(CARELESS, tests).verdict is Verdict.WRONG
    assert make_tests(problem(inputs=ready, generator=SEEDED), Rules(1, 1), threads).tests == 2  # ready inputs are never cut


@needs_bwrap
@pytest.mark.parametrize(
    ("columns", "rules", "expected"),
    [
        (
            {"generator": "print(7, int(input()) % 2)"},
            Rules(3, 3),
            Made(rule="few inputs", reason="2 different inputs, fewer than 3 tests", inputs=2, solutions=10),
        ),
        (
            {"generator": "raise ValueError('seed')"},
            Rules(2, 1),
            Made(
                rule="few inputs",
                reason="0 different inputs, fewer than 1 tests; a generator's run failed: status 1: ValueError: seed",
                solutions=10,
            ),
        ),
        (
            {"inputs": ["9 10", "1 2"], "solutions": [*RIGHT[:8], CARELESS, CARELESS]},
            Rules(2, 2),
            Made(
                rule="few solutions pass",
                reason="8 of 10 solutions pass the tests, fewer than 9/10",
                inputs=2, tests=2, solutions=10, passing=8,
            ),
        ),
        (
            {"inputs": ["9 10", "1 2"], "solutions": [*RIGHT[:6], *[CARELESS] * 4]},
            Rules(2, 2),
            Made(
                rule="few tests agreed on",
                reason="1 tests of 2 are left, fewer than 2",
                inputs=2, tests=1, solutions=10, passing=10,
            ),
        ),
        (
            {"inputs": ["9", "9 1"]},
            Rules(2, 2),
            Made(rule="one output", reason="all tests have the same output", inputs=2, tests=2, solutions=10, passing=10),
        ),
        (
            {"inputs": ["<think>", "b"], "solutions": ["print(input())", "print(input().strip())"]},
            Rules(2, 2),
            Made(
                rule="chat marker",
                reason="a test holds <think>, a marker of the chat format",
                inputs=2, tests=2, solutions=2, passing=2,
            ),
        ),
    ],
)  # fmt: skip
def test_problem_that_breaks_a_rule_is_dropped_and_says_which(
    columns: dict[str, Any], rules: Rules, expected: Made, threads: ThreadPoolExecutor
) -> None:
    assert make_tests(problem(**columns), rules, threads) == expected


@needs_bwrap
def test_problem_of_a_function_has_arguments_for_inputs(threads: ThreadPoolExecutor) -> None:
    columns = {"function": "f", "inputs": [[1, "a"], [2, "b"]], "solutions": ["def f(n, x): return n * x", "f = lambda n, x: x * n"]}
    tests = CodeTests.model_validate_json(make_tests(problem(**columns), Rules(2, 2), threads).answer)
    assert tests.function == "f"
    assert [(test.input, test.expected) for test in tests.tests] == [([1, "a"], "a"), ([2, "b"], "bb")]


def test_problem_on_a_host_without_a_sandbox_is_never_dropped(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for columns in ({"generator": SEEDED}, {"inputs": ["1", "2"]}):
        with pytest.raises(RewardError, match="bwrap"):
            make_tests(problem(**columns), Rules(2, 2), threads)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"inputs": ["1"], "question": " "}, "the question is empty"),
        ({"inputs": ["1"], "question": "Write <think> here"}, "the question holds <think>"),
        ({"inputs": ["1"], "question": None}, "valid string"),
        ({"inputs": ["1"], "solutions": RIGHT[:1]}, "at least 2"),
        ({"inputs": ["1"], "solutions": [RIGHT[0], RIGHT[0]]}, "the solutions are one program"),
        ({"inputs": ["1"], "solutions": "print(1)"}, "valid tuple"),
        ({"inputs": ["1"], "solutions": [1, 2]}, "valid string"),
        ({}, "neither `generator` nor `inputs`"),
        ({"generator": None, "inputs": []}, "neither `generator` nor `inputs`"),
        ({"generator": 7}, "valid tuple"),
        ({"generator": [7]}, "valid string"),
        ({"inputs": "1"}, "valid tuple"),
        ({"inputs": ["1", 2]}, "input 2 is no text"),
        ({"inputs": ["1"], "function": "f"}, "input 1 is no list of arguments"),
        ({"inputs": [[1], [float("nan")]], "function": "f"}, "input 2 is no list of arguments"),
        ({"inputs": [[1]], "function": "f()"}, "match pattern"),
    ],
)
def test_problem_that_cannot_be_one_says_why(columns: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        problem(**columns)


def test_problem_digest_is_that_of_what_decides_the_tests() -> None:
    base = {"generator": SEEDED}
    same = [{"question": "Other words"}, {"generator": [SEEDED]}, {"inputs": None}, {"function": None}, {"id": "x"}]
    others = [{"generator": "print(1)"}, {"inputs": ["1"]}, {"solutions": RIGHT[:9]}, {"function": "f"}]
    digest = digest_of(problem(**base), Rules())
    assert [digest_of(problem(**(base | columns)), Rules()) == digest for columns in same] == [True] * len(same)
    digests = {digest_of(problem(**(base | columns)), Rules()) for columns in others}
    digests |= {digest_of(problem(**base), rules) for rules in (Rules(49), Rules(50, 39), Rules(50, 40, 1))}
    assert len(digests - {digest}) == len(others) + 3
