"""`posttrain tests`: problems with known solutions in, a source of curation out; stopped anywhere, it continues."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pytest
import yaml
from pyarrow import parquet
from typer.testing import CliRunner

from flows.cli import app
from flows.plan import make_plan
from flows.recipe import load_recipe
from stages.config import FileSource
from stages.curation import run
from stages.rewards.code import grade_code
from stages.rewards.grading import Verdict
from stages.sources import Place, read_source

SHIPPED = {
    row["id"]: row
    for row in map(json.loads, (Path(__file__).parents[2] / "datasets" / "code_problems.jsonl").read_text().splitlines())
    if row["gold"].get("tolerance") is None
}
LARGEST = ["print(max(map(int, input().split())))", "print(sorted(map(int, input().split()))[-1])"] * 5
CARELESS = "print(max(input().split()))"  # compares texts: wrong for 9 10
NO_ROOM = """
for fd in /proc/$$/fd/*; do
    case $(readlink $fd) in
        /memfd:*) if grep -q unlucky $fd; then echo bwrap: no room >&2; exit 1; fi ;;
    esac
done
"""
QUICK = ("--inputs", "3", "--min-tests", "2")

needs_bwrap = pytest.mark.usefixtures("bubblewrap")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "home"))
    return tmp_path


def shipped(*names: str) -> list[dict[str, Any]]:
    """Rows of the shipped problems as a user writes them, each with its identity as another column."""
    columns = ("id", "question", "generator", "solutions")
    return [{key: SHIPPED[name][key] for key in columns} | {"function": SHIPPED[name]["gold"].get("function")} for name in names]


def largest(**columns: Any) -> dict[str, Any]:
    return {"question": "Print the largest number.", "solutions": LARGEST, "inputs": ["9 10", "3 1 2", "5 4"]} | columns


def written(folder: Path, *rows: Any) -> Path:
    """A file of problems; a row that is a text is a line as it is."""
    path = folder / "problems.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def made(path: Path, *arguments: str, status: int = 0) -> tuple[dict[str, Any], str]:
    """What the command reports, and what it says on the terminal."""
    result = CliRunner().invoke(app, ["tests", str(path), *(arguments or QUICK), "--json"])
    assert result.exit_code == status, result.output
    return json.loads(result.stdout or "{}"), " ".join(result.stderr.split())


def read(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().split("\n")[:-1]]


def reply(program: str) -> str:
    return f"```python\n{program}\n```"


@needs_bwrap
def test_tests_of_shipped_problems_grade_their_own_solutions_right_and_others_wrong(folder: Path) -> None:
    names = ("balanced-brackets", "roman", "longest-increasing")  # standard input, a function, a method
    path = written(folder, *(row | {"level": "easy"} for row in shipped(*names)))
    report, _ = made(path, "--inputs", "8", "--min-tests", "5", "--seed", "5")
    assert (report["rows"], report["kept"], report["dropped"], report["fewer_solutions"]) == (3, 3, {}, 3)
    rows = read(report["out"])
    assert [set(row) for row in rows] == [{"id", "question", "level", "answer"}] * 3
    assert [row["id"] for row in rows] == [*names]
    for row in rows:
        for solution in SHIPPED[row["id"]]["solutions"]:
            assert grade_code(reply(solution), row["answer"]).verdict is Verdict.RIGHT
        for solution in SHIPPED[row["id"]]["wrong"]:
            assert grade_code(reply(solution), row["answer"]).verdict is Verdict.WRONG


@needs_bwrap
def test_tests_drop_problems_by_kimis_shares_with_reason_counts_and_the_row(folder: Path) -> None:
    rows = [
        largest(id=1, solutions=[*LARGEST[:9], CARELESS]),
        largest(id=2, solutions=[*LARGEST[:8], CARELESS, CARELESS]),
        largest(id=3, inputs=["9 10", "8 10", "2"], solutions=[*LARGEST[:6], *[CARELESS] * 4]),
    ]
    path = written(folder, *rows)
    report, _ = made(path)
    assert [row["id"] for row in read(report["out"])] == [1]
    assert grade_code(reply(CARELESS), read(report["out"])[0]["answer"]).verdict is Verdict.WRONG
    assert report["dropped"] == {"few solutions pass": 1, "few tests agreed on": 1}
    assert report["fewer_solutions"] == 0
    assert read(report["dropped_to"]) == [
        {
            "row": 2, "rule": "few solutions pass", "reason": "8 of 10 solutions pass the tests, fewer than 9/10",
            "inputs": 3, "tests": 3, "solutions": 10, "passing": 8, "problem": rows[1],
        },
        {
            "row": 3, "rule": "few tests agreed on", "reason": "1 tests of 3 are left, fewer than 2",
            "inputs": 3, "tests": 1, "solutions": 10, "passing": 10, "problem": rows[2],
        },
    ]  # fmt: skip


@needs_bwrap
def test_tests_print_what_was_kept_and_dropped_and_how_to_train_on_it(folder: Path) -> None:
    path = written(folder, largest(solutions=LARGEST[:2]), largest(inputs=["1"]), largest(inputs=["1 2"]))
    result = CliRunner().invoke(app, ["tests", str(path), *QUICK])
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert f"1 of 3 problems kept, 3 to 3 tests each, 3.0 on average: {folder}/problems.tests.jsonl" in said
    assert f"2 dropped: {folder}/problems.tests.dropped.jsonl" in said
    assert "few inputs 2 row 2: 1 different inputs, fewer than 2 tests" in said
    assert "Problems with fewer than 10 known solutions: 1;" in said
    assert f"- {{kind: file, path: {folder}/problems.tests.jsonl, answer_type: code}}" in said


@needs_bwrap
def test_tests_need_four_fifths_of_the_inputs_where_nothing_else_is_said(folder: Path) -> None:
    few = {"solutions": LARGEST[:2]}
    path = written(folder, *(largest(**few, inputs=[f"{number} 7" for number in range(count)]) for count in (39, 40)))
    report, _ = made(path, "--seed", "3")
    assert report["tests"] == {"fewest": 40, "mean": 40.0}
    assert report["examples"] == {"few inputs": "row 1: 39 different inputs, fewer than 40 tests"}


@needs_bwrap
@pytest.mark.slow
def test_tests_are_a_source_of_curation_by_the_lines_that_are_printed(folder: Path) -> None:
    asked = "Write a program that prints the largest number. Is 7 > 3, true or false?"
    long = largest(question=asked, generator="print(int(input()), 5000 * '7 ')")
    path = written(folder, *shipped("word-order", "make-change"), long, largest())
    report, _ = made(path, "--inputs", "6", "--min-tests", "3")
    source = FileSource(path=Path(report["out"]), answer_type="code")
    assert [row.unreadable for row in read_source(Place(0, None, "made", source, 0))] == [None] * 4
    recipe = yaml.safe_load(report["recipe"])
    assert recipe["stages"]["curation"]["max_characters"] == report["longest"] > 20_000
    sums = {"kind": "reasoning_gym", "family": "chain_sum", "size": 20}
    recipe["stages"]["curation"] |= {"benchmarks": {"sums": [sums]}, "benchmark_size": 8, "pools": {"rl": {"share": 1.0}}}
    (folder / "small.yaml").write_text(yaml.safe_dump(recipe | {"name": "small"}))
    (step,) = make_plan(load_recipe(str(folder / "small.yaml")), folder / "home")
    assert step.folder is not None
    step.folder.mkdir(parents=True)
    output = run(step.node.config, {}, step.folder, 0)  # type: ignore[arg-type]
    kept = parquet.read_table(output.outputs["rl"].path).to_pylist()
    assert {row["answer"] for row in kept} == {row["answer"] for row in read(report["out"])}
    assert {row["answer_type"] for row in kept} == {"code"}
    with duckdb.connect(str(step.folder / "data" / "curation.duckdb"), read_only=True) as database:
        assert database.execute("select count(*) from quarantine").fetchall() == [(0,)]


@needs_bwrap
def test_tests_take_bad_rows_out_with_a_reason_and_do_the_others(folder: Path) -> None:
    odd = largest(question="Größte Zahl\u2028\x85 – 数 \x1b[31m", note={"deep": [1, None]}, answer="old")
    deep = f'{{"question": "x", "solutions": ["1", "2"], "function": "f", "inputs": [[{"[" * 500}{"]" * 500}]]}}'
    lines = [deep, "[1]", '{"a": "\\ud800"}', largest(solutions=[]), "", {"question": "x"}, largest(inputs=[1]), odd]
    path = written(folder, *lines)
    with path.open("ab") as file:
        file.write(b"\xff\xfe\n")
    report, _ = made(path)
    (row,) = read(report["out"])
    assert {name: row[name] for name in ("question", "note")} == {"question": odd["question"], "note": odd["note"]}
    assert json.loads(row["answer"])["tests"][0] == {"input": "9 10", "expected": "10"}
    bad = read(report["dropped_to"])
    assert {row["rule"] for row in bad} == {"bad row"}
    assert [(row["row"], row["reason"]) for row in bad] == [
        (1, "inputs.0: Recursion error - maximum validation depth exceeded"),
        (2, "a JSON list, the rule is an object"),
        (3, "not JSON in UTF-8: UnicodeEncodeError"),
        (4, "solutions: Tuple should have at least 2 items after validation, not 0"),
        (6, "solutions: Field required"),
        (7, "input 1 is no text; without `function` an input is what a program reads"),
        (9, "not JSON in UTF-8: UnicodeDecodeError"),
    ]
    assert [bad[1]["problem"], bad[3]["problem"]] == ["[1]", lines[3]]
    assert report["dropped"] == {"bad row": 7}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "it has no rows"),
        (["", "  "], "it has no rows"),
        (["[", largest(solutions=[])], "none of its 2 rows is a problem; the first, row 1: not JSON in UTF-8: JSONDecodeError"),
    ],
)
def test_tests_of_a_file_without_a_problem_name_the_first_reason(folder: Path, rows: Sequence[Any], said: str) -> None:
    path = written(folder, *rows)
    assert f"{path}: {said}" in made(path, status=1)[1]
    assert [*folder.iterdir()] == [path]


@needs_bwrap
def test_tests_of_problems_that_are_all_dropped_end_with_status_1_and_the_first_reason(folder: Path) -> None:
    path = written(folder, largest(inputs=["1"]), largest(inputs=["1 2", "2 1"]))
    report, said = made(path, status=1)
    assert (report["kept"], report["tests"], Path(report["out"]).read_text()) == (0, None, "")
    assert "none of 2 problems is kept" in said
    assert "row 1: 1 different inputs, fewer than 2 tests" in said


def test_tests_refuse_files_that_cannot_be_meant_and_touch_nothing(folder: Path) -> None:
    path = written(folder, largest())
    precious = folder / "precious.jsonl"
    precious.write_text("mine")
    for arguments, status, said in [
        ((folder / "missing.jsonl",), 1, "missing.jsonl is missing; PROBLEMS is a JSONL file"),
        ((folder,), 1, "is a folder; PROBLEMS is a JSONL file"),
        ((path, "--out", folder / "out.parquet"), 2, "must end in .jsonl"),
        ((path, "--out", path), 2, "would write over its own input"),
        ((path, "--out", precious), 2, "was not written by this command"),
    ]:
        report, text = made(*map(str, arguments), status=status)  # type: ignore[arg-type]
        assert (report, said in text) == ({}, True), text
    path.rename(folder / "a.dropped.jsonl")
    assert "its own input" in made(folder / "a.dropped.jsonl", "--out", str(folder / "a.jsonl"), status=2)[1]
    assert precious.read_text() == "mine"
    assert sorted(item.name for item in folder.iterdir()) == ["a.dropped.jsonl", "precious.jsonl"]


def test_tests_on_a_host_without_a_sandbox_are_refused_before_anything_runs(folder: Path, posttrain: Callable[..., Any]) -> None:
    path = written(folder, largest(), largest(solutions=[]))
    command = posttrain(folder / "home", "tests", str(path), PATH=str(folder / "empty"))
    assert command.end() == 1
    assert "no sandbox on this host: the command `bwrap` (bubblewrap) is not there" in command.said
    assert "apt-get install bubblewrap" in command.said
    assert [*folder.iterdir()] == [path]


@needs_bwrap
def test_tests_that_the_sandbox_fails_on_are_left_for_the_next_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bubblewrap that has no room for programs with a certain word in them."""
    fake = folder / "bin" / "bwrap"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\nPATH=/usr/bin:/bin\n{NO_ROOM}exec {shutil.which("bwrap")} "$@"\n')
    fake.chmod(0o755)
    path = written(folder, largest(id=1), largest(id=2, solutions=[f"{LARGEST[0]}  # unlucky", LARGEST[1]]), largest(id=3))
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
        report, said = made(path, status=1)
    assert (report["kept"], report["undone"], report["dropped"]) == (2, [2], {})
    assert [row["id"] for row in read(report["out"])] == [1, 3]
    assert "1 of 3 problems are not done (rows 2): no sandbox on this host: bwrap: no room." in said
    assert "The others are finished; the same command does these" in said
    report, _ = made(path)
    assert (report["kept"], report["undone"], report["reused"]) == (3, [], 2)
    assert [row["id"] for row in read(report["out"])] == [1, 2, 3]


@needs_bwrap
def test_tests_again_reuse_all_that_did_not_change_and_mix_nothing(folder: Path) -> None:
    seeded = largest(inputs=[], generator="n = int(input())\nprint(n, 20 - n)")
    path = written(folder, seeded, largest(id=2))
    first, _ = made(path)
    out = Path(first["out"])
    before = out.read_bytes()
    again, _ = made(path)
    assert (first["reused"], again["reused"], out.read_bytes()) == (0, 2, before)
    other, _ = made(path, *QUICK, "--seed", "5")
    assert other["reused"] == 0
    assert [test["input"] for test in json.loads(read(out)[0]["answer"])["tests"]] == ["5 15\n", "6 14\n", "7 13\n"]
    back, _ = made(path)
    assert (back["reused"], out.read_bytes()) == (2, before)
    written(folder, seeded | {"solutions": LARGEST[1:]}, largest(id="other", question="What is the largest?"), largest(id=3))
    changed, _ = made(path)
    assert (changed["rows"], changed["kept"], changed["reused"]) == (3, 3, 2)
    assert [row["question"] for row in read(out)[1:]] == ["What is the largest?", "Print the largest number."]


@needs_bwrap
@pytest.mark.slow
def test_tests_killed_in_between_continue_to_the_same_bytes(folder: Path, posttrain: Callable[..., Any]) -> None:
    path = written(folder, *shipped("run-lengths", "gcd-of-many", "roman", "life"), largest(solutions=LARGEST[:1]), *shipped("make-change"))
    out = folder / "killed.jsonl"
    arguments = ("tests", str(path), "--inputs", "6", "--min-tests", "2", "--out", str(out))
    killed = posttrain(folder / "killed", *arguments)
    while not (finished := [*(folder / "killed" / "code_tests").glob("*.json")]):
        assert killed.read(time.monotonic() + 0.05), killed.said
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.end()
    (folder / "killed" / "code_tests" / finished[0].name).write_text('{"answer": "{')  # cut in half, as after a power cut
    resumed = posttrain(folder / "killed", *arguments)
    assert resumed.end() == 0, resumed.said
    bytes_ = [out.read_bytes(), out.with_suffix(".dropped.jsonl").read_bytes()]
    whole, _ = made(path, *arguments[2:6], "--out", str(folder / "whole.jsonl"))
    assert (whole["reused"], whole["kept"]) == (0, 5)
    assert [Path(whole["out"]).read_bytes(), Path(whole["dropped_to"]).read_bytes()] == bytes_


@needs_bwrap
@pytest.mark.slow
def test_tests_interrupted_say_what_is_kept_and_write_no_half_file(folder: Path, posttrain: Callable[..., Any]) -> None:
    path = written(folder, largest(), largest(inputs=[], generator="import time\ntime.sleep(3)"))
    command = posttrain(folder / "home", "tests", str(path), "--inputs", "400", "--min-tests", "2")
    while not [*(folder / "home" / "code_tests").glob("*.json")]:
        assert command.read(time.monotonic() + 0.05), command.said
    command.process.send_signal(signal.SIGINT)
    assert command.end() == 130
    assert "Finished problems are kept; the same command continues from here" in command.said
    assert "Traceback" not in command.said
    assert not (folder / "problems.tests.jsonl").exists()


@needs_bwrap
def test_tests_without_room_leave_the_old_file_and_continue(folder: Path, small_disk: Path) -> None:
    path = written(folder, largest())
    report, _ = made(path, *QUICK, "--out", str(small_disk / "out.jsonl"))
    before = Path(report["out"]).read_bytes()
    written(folder, largest(note="x" * (3 << 20)))
    _, said = made(path, *QUICK, "--out", report["out"], status=1)
    assert f"{report['out']} cannot be written: No space left on device; free some space, or choose another --out" in said
    assert Path(report["out"]).read_bytes() == before
    assert sorted(item.name for item in small_disk.iterdir()) == ["out.dropped.jsonl", "out.jsonl"]
    assert made(path)[0]["reused"] == 1
