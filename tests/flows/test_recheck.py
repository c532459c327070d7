"""`posttrain recheck`: pools of an earlier run against a benchmark that was added later, and `posttrain review` by its command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from flows.history import Finished, keep, open_run
from flows.plan import make_plan, read_result
from flows.recheck import described, recheck
from flows.recipe import load_recipe
from stages.artifacts import RESULT, StageResult, write_json
from stages.curation import run
from stages.errors import ArtifactError, ConfigError, DataError

WORDS = [f"w{number}" for number in range(20)]
RECIPE = """
name: small
description: pools
models: {base: datasets/tiny_base}
stages:
  curation:
    sources: [{kind: file, path: %s}]
    benchmarks: {old: [{kind: reasoning_gym, family: chain_sum, size: 8, parameters: {min_terms: 4, max_terms: 5}}]}
    pools: {rl: {share: 0.5}, preference: {share: 0.5}}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which a recipe run has curated questions of twenty words."""
    folder = tmp_path_factory.mktemp("recheck")
    questions = [" ".join(WORDS), "something else entirely", *(f"question number {number} of many" for number in range(6))]
    source = folder / "problems.jsonl"
    source.write_text("".join(json.dumps({"question": question, "answer": "1"}) + "\n" for question in questions))
    path, home = folder / "small.yaml", folder / "home"
    path.write_text(RECIPE % source)
    recipe = load_recipe(str(path))
    step = make_plan(recipe, home)[0]
    assert step.folder is not None
    assert step.fingerprint is not None
    assert step.key is not None
    step.folder.mkdir(parents=True)
    output = run(step.node.config, {}, step.folder, 0)  # type: ignore[arg-type]
    result = StageResult(
        stage="curation",
        fingerprint=step.fingerprint,
        key=step.key,
        outputs=output.outputs,
        metrics={},
        seconds=0,
        busy_seconds=0,
        tokens=0,
        peak_memory_mib=0,
        versions={},
    )
    write_json(step.folder / RESULT, result.model_dump(mode="json"))
    assert read_result(step.folder) is not None
    nodes = {"curation": Finished(stage="curation", fingerprint=step.fingerprint)}
    keep(home, open_run(home, "small", kind="recipe", text=recipe.text, overrides={}, variant="default"), nodes=nodes, status="finished")
    return home


def benchmark(folder: Path, *questions: str, column: str = "question") -> str:
    path = folder / "added.jsonl"
    path.write_text("".join(json.dumps({column: question, "answer": "1"}) + "\n" for question in questions))
    return str(path)


def command(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"POSTTRAIN_HOME": str(home)}
    program = [sys.executable, "-c", "from flows.cli import app; app()", *arguments]
    return subprocess.run(program, env=environment, capture_output=True, text=True, check=False)


def test_recheck_of_an_added_benchmark_names_pool_rule_and_both_texts(home: Path, tmp_path: Path) -> None:
    source = described(benchmark(tmp_path, " ".join([*WORDS[4:14], "other"]), "Something  ELSE entirely", "new"), "question")
    found = recheck(home, "added", source, "latest")
    hits = {(row["rule"], row["question"]): row for row in found.findings.hits.to_pylist()}
    assert ("same_question", "something else entirely") in hits
    run_hit = hits["open_r1", " ".join(WORDS)]
    assert run_hit["evidence"] == " ".join(WORDS[4:12])
    assert run_hit["benchmark_question"] == " ".join([*WORDS[4:14], "other"])
    assert run_hit["source"] in ("rl", "preference")
    assert found.file is not None
    assert parquet.read_table(found.file).equals(found.findings.hits)


def test_recheck_of_a_benchmark_that_nothing_overlaps_writes_no_file(home: Path, tmp_path: Path) -> None:
    found = recheck(home, "clean", described(benchmark(tmp_path, "nothing of the kind"), "question"), "small-1")
    assert (len(found.findings.hits), found.file) == (0, None)


@pytest.mark.parametrize(("run", "error"), [("small-9", ArtifactError), ("latest", DataError)])
def test_recheck_that_cannot_be_done_says_what_is_missing(home: Path, tmp_path: Path, run: str, error: type[Exception]) -> None:
    source = described(benchmark(tmp_path, "", column="question"), "question")
    with pytest.raises(error, match="small-1" if run == "small-9" else "no row"):
        recheck(home, "bad", source, run)


def rows_file(folder: Path, *rows: dict[str, Any], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("rest", [{}, {"answer": None}, {"answer": ""}, {"answer": ["a", "list"]}])
def test_recheck_needs_no_answers_to_find_a_pool_question(home: Path, tmp_path: Path, rest: dict[str, Any]) -> None:
    rows = [{"question": f"unheard of {number}"} | rest for number in range(9)] + [{"question": "something else entirely"} | rest]
    found = recheck(home, "added", described(rows_file(tmp_path, *rows), "question"), "latest")
    assert {row["benchmark_question"] for row in found.findings.hits.to_pylist()} == {"something else entirely"}
    assert (found.rows, found.compared) == (10, 10)


def test_recheck_compares_a_question_of_any_length(home: Path, tmp_path: Path) -> None:
    long = " ".join([*("x" * 99 for _ in range(400)), *WORDS])
    found = recheck(home, "added", described(rows_file(tmp_path, {"question": long}), "question"), "latest")
    assert {row["question"] for row in found.findings.hits.to_pylist()} == {" ".join(WORDS)}


def test_recheck_with_too_many_rows_without_a_question_is_a_data_error_with_their_rows(home: Path, tmp_path: Path) -> None:
    good = [{"question": f"unheard of {number}"} for number in range(19)]
    found = recheck(home, "added", described(rows_file(tmp_path, *good, {"question": None}), "question"), "latest")
    assert (found.rows, found.compared) == (20, 19)
    bad = rows_file(tmp_path, *good[:18], {"question": None}, {"question": " "})
    with pytest.raises(DataError, match=r"(?s)2 of 20 rows \(10.0%\).*max_bad_share = 0.05.*row 19: the question is missing\n  row 20"):
        recheck(home, "added", described(bad, "question"), "latest")


@pytest.mark.parametrize("name", ["../../evil", "a/b", "", ".hidden", "..", "[red]", "a b", "a\n", "a" * 101])
def test_recheck_name_that_is_no_file_name_is_refused_before_anything_is_read(home: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"--name .*must be 1 to 100 letters"):
        recheck(home, name, described(str(tmp_path / "nowhere.jsonl"), "question"), "latest")


def test_recheck_of_an_id_takes_the_listed_source_and_an_unknown_one_is_a_file() -> None:
    assert described("short_sums", "question").kind == "reasoning_gym"
    assert described("mine.jsonl", "ask").model_dump()["question"] == "ask"
    with pytest.raises(ConfigError, match="short_sums"):
        described("mine.jsonl", 3)  # type: ignore[arg-type]


def test_recheck_command_prints_a_table_and_json(home: Path, tmp_path: Path) -> None:
    file = benchmark(tmp_path, "something else entirely", column="ask")
    shown = command(home, "recheck", file, "--name", "added", "--question", "ask")
    assert (shown.returncode, "same_question" in shown.stderr + shown.stdout) == (0, True), shown.stderr
    assert "1 of 1 questions compared" in shown.stdout
    content: dict[str, Any] = json.loads(command(home, "recheck", file, "--question", "ask", "--json").stdout)
    assert (content["run"], content["rows"], content["compared"]) == ("small-1", 1, 1)
    assert content["hits"][0]["benchmark_question"] == "something else entirely"


def test_recheck_command_missing_file_is_an_error_with_its_name(home: Path) -> None:
    failed = command(home, "recheck", "nowhere.jsonl")
    assert failed.returncode == 1
    assert "nowhere.jsonl" in failed.stdout + failed.stderr
