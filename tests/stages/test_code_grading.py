"""Answers that are programs: what is right, and what earns nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stages.rewards.code import (
    CodeTests,
    grade_code,
    grade_program,
    program_of,
)
from stages.rewards.grading import Verdict
from stages.rewards.sandbox import Limits

QUICK = Limits(cpu_s=1, wall_s=3.0)
ROWS = [json.loads(line) for line in (Path(__file__).parents[2] / "datasets" / "code_problems.jsonl").read_text().splitlines()]

needs_bwrap = pytest.mark.usefixtures("bubblewrap")

DOUBLE = CodeTests.model_validate({"tests": [{"input": "21\n", "expected": "42\n"}, {"input": "-4\n", "expected": "-8"}]})
TWICE = CodeTests.model_validate({"function": "twice", "tests": [{"input": [21], "expected": 42}, {"input": ["ab"], "expected": "abab"}]})


def reply(program: str) -> str:
    return f"Here is my program.\n\n```python\n{program}\n```\n"


def gold(tests: Sequence[tuple[Any, Any]], **settings: Any) -> str:
    return json.dumps(settings | {"tests": [{"input": given, "expected": expected} for given, expected in tests]})


@needs_bwrap
@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row["id"]))
def test_code_shipped_problems_solutions_are_right_and_wrong_ones_wrong(row: dict[str, Any]) -> None:
    tests = CodeTests.model_validate(row["gold"])
    assert len(row["solutions"]) >= 2
    assert len(row["wrong"]) >= 2
    for solution in row["solutions"]:
        assert grade_program(solution, tests).verdict is Verdict.RIGHT, solution
    for solution in row["wrong"]:
        grade = grade_program(solution, tests)
        assert grade.verdict is Verdict.WRONG, solution
        assert grade.reason.endswith("another output"), grade  # it runs, and is wrong


def test_code_shipped_problems_have_an_identity_a_question_and_a_generator() -> None:
    assert len({row["id"] for row in ROWS}) == len(ROWS) >= 12
    assert {bool(row["gold"].get("function")) for row in ROWS} == {True, False}
    assert all(row["question"] and row["generator"] for row in ROWS)


@needs_bwrap
@pytest.mark.parametrize(
    ("program", "verdict", "reason"),
    [
        ("print(2 * int(input()))", Verdict.RIGHT, "2 tests passed"),
        ("n = int(input())\nprint(n + n, end='   \\n\\n')", Verdict.RIGHT, "2 tests passed"),
        ("print(42)", Verdict.WRONG, "test 2 of 2: another output"),
        ("print(int(input()) * 2.0)", Verdict.WRONG, "test 1 of 2: another output"),
        ("print('The answer is', 2 * int(input()))", Verdict.WRONG, "test 1 of 2: another output"),
        ("pass", Verdict.WRONG, "test 1 of 2: nothing was printed"),
        ("print(2 * int(input()))\nraise ValueError('late')", Verdict.WRONG, "test 1 of 2: status 1: ValueError: late"),
        ("print(2 * int(input()), flush=True)\nwhile True: pass", Verdict.WRONG, "test 1 of 2: more than 1 s of processor time"),
    ],
)
def test_code_standard_input_tests_decide_by_what_is_printed(program: str, verdict: Verdict, reason: str) -> None:
    assert grade_program(program, DOUBLE, QUICK) == (verdict, reason)


@needs_bwrap
@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("def twice(x): return x + x", Verdict.RIGHT),
        ("def twice(x):\n    print('noise', 42)\n    return x * 2", Verdict.RIGHT),
        ("twice = lambda x: x * 2\nif __name__ == '__main__':\n    twice(input())", Verdict.RIGHT),
        ("def twice(x): return 42", Verdict.WRONG),
        ("def twice(x): return str(x * 2)", Verdict.WRONG),
        ("def twice(x): return [x * 2]", Verdict.WRONG),
        ("def twice(x): print(x * 2)", Verdict.WRONG),
        ("def twice(): return 42", Verdict.WRONG),
        ("def double(x): return x * 2", Verdict.WRONG),
        ("twice = 42", Verdict.WRONG),
        ("def twice(x): return {x * 2}", Verdict.WRONG),
        ("def twice(x): return True if x == 21 else x * 2", Verdict.WRONG),
    ],
)
def test_code_function_tests_decide_by_what_is_returned(program: str, verdict: Verdict) -> None:
    assert grade_program(program, TWICE, QUICK).verdict is verdict


STEALING = """
import gc, os, sys
found = []
frame = sys._getframe()
while frame:
    found.append(repr({**frame.f_globals, **frame.f_locals})[:100000])
    frame = frame.f_back
found += [repr(thing) for thing in gc.get_objects() if isinstance(thing, (dict, list, tuple)) and len(repr(thing)) < 5000][:2000]
for top in ("/tmp", "/dev", "/program.py", "/solution.py", "."):
    for folder, _, names in os.walk(top):
        found += [open(os.path.join(folder, name)).read() for name in names]
for path in ("/program.py", "/dev/stdin"):
    found.append(open(path).read())
for fd in range(64):
    try:
        os.lseek(fd, 0, 0)
        found.append(os.read(fd, 100000).decode("utf-8", "replace"))
    except OSError:
        pass
found.append(repr(os.environ) + repr(sys.argv) + repr(sys.orig_argv))
"""


@needs_bwrap
def test_code_expected_output_is_nowhere_in_the_sandbox() -> None:
    search = "\nimport re\nprint(*sorted(set(re.findall('zq8[0-9]-expect[a-z]+', str(found)))))"
    secret = "zq81-expected"
    nowhere = (Verdict.WRONG, "test 1 of 1: nothing was printed")
    assert grade_program(STEALING + search, CodeTests.model_validate_json(gold([("some input", secret)]))) == nowhere
    assert grade_program(STEALING + search, CodeTests.model_validate_json(gold([(secret, secret)]))).verdict is Verdict.RIGHT
    search = "\nimport re\ndef f(x): return re.findall('zq8[0-9]-expect[a-z]+', str(found))[0]"
    missing = grade_program(STEALING + search, CodeTests.model_validate_json(gold([(["some input"], secret)], function="f")))
    assert missing.reason.endswith("IndexError: list index out of range")
    assert (
        grade_program(STEALING + search, CodeTests.model_validate_json(gold([([secret], secret)], function="f"))).verdict is Verdict.RIGHT
    )


@needs_bwrap
@pytest.mark.parametrize(
    "attack",
    [
        "exit(0)",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "import os, signal\nsignal.signal(signal.SIGALRM, lambda *_: os._exit(0))\nsignal.setitimer(0, 0.01)\nsignal.pause()",
        "import atexit, os; atexit.register(os._exit, 0)",
        "import atexit; atexit.register(print, 'passed')",
        "import sys; sys.settrace(lambda *_: sys.exit(0))",
        "import threading, os; threading.Timer(0.01, os._exit, (0,)).start()",
        "import json; json.dumps = lambda *_, **__: 'true'",
        "import json; json.loads = json.load = lambda *_, **__: {'expected': 1}",
        "import builtins; builtins.print = lambda *_, **__: None; builtins.all = builtins.any = lambda *_: True",
        "import builtins; builtins.__import__ = lambda *_, **__: None",
        "import builtins; builtins.exec = builtins.compile = lambda *_, **__: None",
        "import sys; sys.stdout = type('Out', (), {'write': lambda *_: 0, 'flush': lambda *_: 0})()",
        "import unittest, sys; sys.modules['unittest'] = sys.modules['pytest'] = sys; unittest.TestCase.run = lambda *_: None",
        """
import os
for fd in range(1, 64):
    try:
        os.write(fd, b'{"verdict": "right", "passed": true, "exit-code": 0}')
    except OSError:
        pass
""",
        "import os\nfor fd in range(64):\n    try:\n        os.close(fd)\n    except OSError:\n        pass",
        "import os; os.write(1, b'42\\n-8\\n')",
        """
class Same:
    __eq__ = lambda *_: True
    __hash__ = None
    __str__ = __repr__ = lambda *_: 'equal'
def twice(x): return Same()
print(Same())
""",
        """
class Number(int):
    __eq__ = lambda *_: True
    __repr__ = __str__ = lambda *_: '42'
def twice(x): return Number(7)
print(7)
""",
        "def twice(x):\n    import os\n    os.write(1, b'42')\n    os._exit(0)\nprint(41)",
        "def twice(x): return float('nan')\nprint('nan')",
        "def twice(x): return [42] * 3\nprint('42 42 42')",
        "def twice(x):\n    loop = []\n    loop.append(loop)\n    return loop\nprint([[]])",
        "def twice(x):\n    deep = []\n    for _ in range(900): deep = [deep]\n    return deep\nprint('[' * 100000)",
        "def twice(x): return 10 ** 5000\nimport sys; sys.set_int_max_str_digits(0); print(10 ** 5000)",
    ],
)
def test_code_attack_on_the_verdict_earns_nothing(attack: str) -> None:
    for tests in (DOUBLE, TWICE):
        grade = grade_program(attack, tests, QUICK)
        assert grade.verdict is Verdict.WRONG, grade
        assert grade.reason.startswith(("test 1 of 2", "test 2 of 2"))


@needs_bwrap
def test_code_each_test_is_a_fresh_run() -> None:
    count = """
import os
path = "/tmp/count"
n = int(open(path).read()) if os.path.exists(path) else 0
open(path, "w").write(str(n + 1))
"""
    same = CodeTests.model_validate_json(gold([("x", "0"), ("x", "0"), ("x", "0")]))
    assert grade_program(count + "print(n)", same).verdict is Verdict.RIGHT
    called = CodeTests.model_validate_json(gold([([], 0), ([], 0)], function="f"))
    assert (
        grade_program(count + "calls = 0\ndef f():\n    global calls\n    calls += 1\n    return n + calls - 1", called).verdict
        is Verdict.RIGHT
    )


def test_code_sandbox_that_fails_is_not_graded_and_never_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for program in ("print(42)", "exit(0)"):
        grade = grade_code(reply(program), gold([("21\n", "42")]))
        assert grade.verdict is Verdict.NOT_GRADED
        assert "bwrap" in grade.reason


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ("42", "Input should be an object"),
        ("{", "Invalid JSON"),
        ('{"tests": []}', "tests"),
        (gold([("1", "")]), "not empty"),
        (gold([("1", " \n")]), "not empty"),
        (gold([(1, "1")]), "texts"),
        (gold([("1", 1)]), "texts"),
        (gold([("1", 1)], function="f"), "list of its arguments"),
        (gold([([1], 1)], function="f()"), "function"),
        (gold([([1], 1)], function="import os"), "function"),
        (gold([("1", "1")], tolerence=0.1), "tolerence"),
    ],
)
def test_code_tests_that_cannot_be_read_are_not_graded(tests: str, reason: str) -> None:
    grade = grade_code(reply("print(1)"), tests)
    assert grade.verdict is Verdict.NOT_GRADED
    assert reason in grade.reason


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("text\n```py\nprint(1)\n```\ntext\n~~~python3\nprint(2)\n~~~\nend", "print(2)\n"),
        ("```python\nprint(1)\n```\nwhich prints\n```text\n1\n```", None),
        ("```python\nprint(1)\n```\nand now\n```python\nprint(", None),  # cut off
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("1. Like this:\n\n   ```python\n   if 1:\n       print(1)\n\n   ```\n", "if 1:\n    print(1)\n\n"),
        ("```python\ns = '''\n    ```\n'''\n```", "s = '''\n    ```\n'''\n"),  # deeper than a closing fence may stand
        ("```python\n~~~\n```\n", "~~~\n"),
        ("```python\n\n```", None),
        ("```c\nint main;\n```", None),
        ("print(1)", None),
        ("", None),
        ("```Python\r\nprint(1)\r\n```", "print(1)\r\n"),
        ("```python title=x\nprint(1)\n```", "print(1)\n"),
        ("`print(1)` and ```print(2)```", None),
    ],
)
def test_code_program_is_the_last_closed_block_of_python(response: str, program: str | None) -> None:
    assert program_of(response) == program


@pytest.mark.parametrize(
    "response",
    [
        *("~" * 20_000 + "`", "~~~" + "a" * 20_000 + "`", "```" + "\t" * 20_000 + "a" * 20_000 + "`", "`" * 20_000 + "x`"),
        *(" " * 200_000 + "```", "~~~\nx\n" * 20_000, "```python\n" * 20_000, "```\n" + (" " * 99 + "x\n") * 2_000 + "```"),
    ],
    ids=lambda text: f"{text[:6]!r} {len(text)}",
)
def test_code_fences_of_any_response_are_read_in_no_time(response: str) -> None:
    start = time.process_time()
    program_of(response)
    assert time.process_time() - start < 1


def test_code_response_without_a_program_is_wrong() -> None:
    assert grade_code("I cannot.", gold([("1", "1")])) == (Verdict.WRONG, "no closed block of Python code")


@needs_bwrap
def test_code_response_with_a_program_is_graded() -> None:
    assert grade_code(reply("print(int(input()) + 1)"), gold([("1", "2"), ("2", "3")])) == (Verdict.RIGHT, "2 tests passed")


@needs_bwrap
@pytest.mark.parametrize(
    ("value", "expected", "tolerance", "verdict"),
    [
        (0.1 + 0.2, 0.3, None, Verdict.WRONG),
        (0.1 + 0.2, 0.3, 1e-9, Verdict.RIGHT),
        (1e6 + 0.5, 1e6, 1e-6, Verdict.RIGHT),
        (1e6 + 2, 1e6, 1e-6, Verdict.WRONG),
        (1, 1.0, None, Verdict.RIGHT),
        (True, 1, None, Verdict.WRONG),
        (1, True, None, Verdict.WRONG),
        (0, None, None, Verdict.WRONG),
        (None, None, None, Verdict.RIGHT),
        ((1, [2, 3]), [1, [2, 3]], None, Verdict.RIGHT),
        ([1, 2], [2, 1], None, Verdict.WRONG),
        ([1, 2], [1, 2, 3], None, Verdict.WRONG),
        ({"a": 1.0000001}, {"a": 1}, 1e-6, Verdict.RIGHT),
        ({"a": 1, "b": 2}, {"a": 1}, None, Verdict.WRONG),
        ("1", 1, 0.5, Verdict.WRONG),
        ("a b", "a  b", None, Verdict.WRONG),
        ("a\n", "a", None, Verdict.WRONG),
        ("", "", None, Verdict.RIGHT),
        (float("inf"), 1e300, 0.5, Verdict.WRONG),
    ],
)
def test_code_values_are_compared_by_value_and_kind(value: Any, expected: Any, tolerance: float | None, verdict: Verdict) -> None:
    tests = CodeTests.model_validate({"function": "f", "tolerance": tolerance, "tests": [{"input": [], "expected": expected}]})
    program = f"inf = float('inf')\ndef f(): return {value!r}"
    assert grade_program(program, tests).verdict is verdict


@needs_bwrap
@pytest.mark.parametrize(
    ("printed", "expected", "tolerance", "verdict"),
    [
        ("a  \nb\n\n", "a\nb", None, Verdict.RIGHT),
        ("a\r\nb", "a\nb", None, Verdict.RIGHT),
        ("a\n\nb", "a\nb", None, Verdict.WRONG),
        (" a", "a", None, Verdict.WRONG),
        ("A", "a", None, Verdict.WRONG),
        ("0.333333", "0.3333333", None, Verdict.WRONG),
        ("0.333333 x", "0.3333333 x", 1e-5, Verdict.RIGHT),
        ("0.33", "0.3333333", 1e-5, Verdict.WRONG),
        ("1 2\n3", "1\n2 3", 1e-5, Verdict.WRONG),
        ("1 2", "1 2 3", 1e-5, Verdict.WRONG),
        ("nan", "1", 0.5, Verdict.WRONG),
        ("inf", "1", 0.5, Verdict.WRONG),
        ("x", "y", 0.5, Verdict.WRONG),
    ],
)
def test_code_printed_lines_are_compared_without_trailing_space(
    printed: str, expected: str, tolerance: float | None, verdict: Verdict
) -> None:
    tests = CodeTests.model_validate({"tolerance": tolerance, "tests": [{"input": "", "expected": expected}]})
    assert grade_program(f"import sys\nsys.stdout.write({printed!r})", tests).verdict is verdict


def test_code_tests_that_ask_for_not_a_number_are_not_graded() -> None:
    for expected in (float("nan"), [1, {"a": float("nan")}]):
        grade = grade_code(reply("def f(): return float('nan')"), gold([([], expected)], function="f"))
        assert grade.verdict is Verdict.NOT_GRADED
        assert "test 1: nothing equals NaN" in grade.reason
