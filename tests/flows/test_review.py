"""Review of traces: by file alone, and as a flow that waits for its form."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from flows.plan import make_plan
from flows.recipe import load_recipe
from flows.review import check_of, check_review, export_traces, use_of
from stages.artifacts import RESULT, DatasetRef, StageResult, digest_of_file, write_json
from stages.config import Curation
from stages.errors import ArtifactError, ConfigError, DataError

RECIPE = """
name: small
description: a cold start
models: {base: datasets/tiny_base}
stages:
  curation:
    sources: [{kind: reasoning_gym, family: chain_sum, size: 60, parameters: {min_terms: 4, max_terms: 5}}]
    benchmarks: {sums: [{kind: reasoning_gym, family: chain_sum, size: 20, parameters: {min_terms: 4, max_terms: 5}}]}
    pools: {cold_start: {share: 0.25, with_trace: true}, rl: {share: 0.25}, preference: {share: 0.25}, distillation: {share: 0.25}}
  cold_start:
    from: {model: base, traces: curation.cold_start}
    examples: 4
    learning_rate: 1.0e-3
"""
ROWS = [
    {"problem_id": f"p{index}", "question": f"{index}+1", "answer": str(index + 1), "trace": f"{index}+1={index + 1}"} for index in range(4)
]


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    return str(path)


@pytest.fixture
def home(tmp_path: Path, recipe: str) -> Path:
    """A home in which the recipe's curation has finished."""
    home = tmp_path / "home"
    step = next(step for step in make_plan(load_recipe(recipe), home) if step.node.name == "curation")
    assert step.folder is not None
    assert step.fingerprint is not None
    assert step.key is not None
    path = step.folder / "data" / "cold_start.parquet"
    path.parent.mkdir(parents=True)
    parquet.write_table(pa.Table.from_pylist(ROWS), path)
    ref = DatasetRef(name="curation.cold_start", digest=digest_of_file(path), path=path, producer=step.folder.name, rows=len(ROWS))
    result = StageResult(
        stage="curation",
        fingerprint=step.fingerprint,
        key=step.key,
        outputs=dict.fromkeys(Curation.writes, ref),
        metrics={},
        seconds=0,
        busy_seconds=0,
        tokens=0,
        peak_memory_mib=0,
        versions={},
    )
    write_json(step.folder / RESULT, result.model_dump(mode="json"))
    return home


def edit(path: Path, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("\n".join(map(json.dumps, lines)))


def test_review_by_file_takes_the_edited_traces_and_names_the_command(recipe: str, home: Path) -> None:
    path, count = export_traces(recipe, [], "cold_start", home)
    assert (path.parent, count) == (home / "reviews", 4)
    assert check_review(recipe, [], "cold_start", home, path) == 4
    edit(path, lambda lines: lines[0].update(decision="drop"))
    assert export_traces(recipe, [], "cold_start", home) == (path, 4)  # the work is left alone
    assert check_review(recipe, [], "cold_start", home, path) == 3
    command = use_of(recipe, [], "cold_start", path)
    override = command.partition("--set ")[2]
    node = next(node for node in load_recipe(recipe, [override]).nodes if node.name == "cold_start")
    assert node.config.files() == (path,)


def test_review_command_writes_the_file_and_checks_an_edited_one(recipe: str, home: Path) -> None:
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"POSTTRAIN_HOME": str(home)}
        program = [sys.executable, "-c", "from flows.cli import app; app()", "review", recipe, *arguments]
        return subprocess.run(program, env=environment, capture_output=True, text=True, check=False)

    written = command("--json")
    content = json.loads(written.stdout)
    assert content["traces"] == 4
    edit(Path(content["file"]), lambda lines: lines[0].update(decision="drop"))
    checked = command("--check", content["file"])
    assert (checked.returncode, f"--set cold_start.review={content['file']}" in checked.stdout + checked.stderr) == (0, True)
    edit(Path(content["file"]), lambda lines: lines[1].update(answer="other"))
    refused = command("--check", content["file"])
    assert (refused.returncode, "line 2" in refused.stdout + refused.stderr) == (1, True)


@pytest.mark.parametrize("folder", ["plain", "two words", "it's #1: [new] $HOME"])
def test_review_commands_carry_settings_and_stage_and_survive_a_shell(recipe: str, tmp_path: Path, folder: str) -> None:
    path, mine = tmp_path / folder / "x.jsonl", str(tmp_path / folder / "small.yaml")
    path.parent.mkdir()
    Path(mine).write_text(RECIPE)
    overrides = ["seed=3", "cold_start.filters=[answer, language]", "cold_start.review=old.jsonl"]
    path.touch()
    check = shlex.split(check_of(mine, overrides, "cold_start", path))
    settings = [word for item in overrides for word in ("--set", item)]
    assert check == ["posttrain", "review", mine, "--stage", "cold_start", *settings, "--check", str(path)]
    use = shlex.split(use_of(mine, overrides, "cold_start", path))
    assert use[:3] == ["posttrain", "run", mine]
    assert set(use[3::2]) == {"--set"}
    node = next(node for node in load_recipe(mine, use[4::2]).nodes if node.name == "cold_start")
    assert node.config.files() == (path,)
    assert node.config.model_dump()["filters"] == ("answer", "language")
    with pytest.raises(ArtifactError) as raised:
        export_traces(mine, overrides[:2], "cold_start", tmp_path / "empty")
    assert shlex.split(str(raised.value).partition("run it first: ")[2]) == [
        "posttrain", "stage", "curation", "--recipe", mine, *settings[:4],
    ]  # fmt: skip


def test_review_changes_what_is_planned_for_the_cold_start_when_the_file_changes(recipe: str, home: Path) -> None:
    path, _ = export_traces(recipe, [], "cold_start", home)
    override = use_of(recipe, [], "cold_start", path).partition("--set ")[2]

    def fingerprint(*overrides: str) -> str | None:
        return next(step.fingerprint for step in make_plan(load_recipe(recipe, overrides), home) if step.node.name == "cold_start")

    before, reviewed = fingerprint(), fingerprint(override)
    edit(path, lambda lines: lines[0].update(trace="one more than nothing"))
    assert len({before, reviewed, fingerprint(override)}) == 3


def test_review_of_a_node_that_is_no_cold_start_names_those_there_are(recipe: str, home: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no cold start called 'curation'.*it has: cold_start"):
        export_traces(recipe, [], "curation", home)


def test_review_before_the_traces_are_made_names_the_stage_to_run(recipe: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"curation.cold_start has not finished .* posttrain stage curation --recipe"):
        export_traces(recipe, [], "cold_start", tmp_path / "empty")


def test_review_file_with_a_changed_answer_is_refused_with_its_line(recipe: str, home: Path) -> None:
    path, _ = export_traces(recipe, [], "cold_start", home)
    edit(path, lambda lines: lines[2].update(answer="9"))
    with pytest.raises(DataError, match="line 3: answer was changed to '9'"):
        check_review(recipe, [], "cold_start", home, path)


@pytest.mark.slow
def test_review_flow_waits_for_its_form_and_again_after_a_file_with_a_fault(
    recipe: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateName
    from prefect.client.schemas.objects import FlowRun
    from prefect.testing.utilities import prefect_test_harness

    from flows.review_flow import review_traces

    monkeypatch.setenv("POSTTRAIN_HOME", str(home))
    pause = threading.Event()

    def waiting(client: Any, done: Any) -> FlowRun:
        """The run of the flow, once it waits."""
        until = time.monotonic() + 120
        paused = FlowRunFilter(state=FlowRunFilterState(name=FlowRunFilterStateName(any_=["Paused"])))
        while not (found := client.read_flow_runs(flow_run_filter=paused)):
            assert not done.done(), done.exception()
            assert time.monotonic() < until
            pause.wait(0.2)
        return found[0]

    with prefect_test_harness(server_startup_timeout=180), get_client(sync_client=True) as client, ThreadPoolExecutor(1) as pool:
        done = pool.submit(copy_context().run, review_traces, recipe=recipe, timeout_hours=0.1)  # with the settings of the harness
        run = waiting(client, done)
        path = next((home / "reviews").glob("cold_start-*.jsonl"))
        edit(path, lambda lines: lines[1].update(digest="0" * 64))
        client.resume_flow_run(run.id, run_input={"file": str(path), "decision": "use", "reviewer": "A"})
        run = waiting(client, done)
        path.unlink()
        assert export_traces(recipe, [], "cold_start", home)[0] == path
        edit(path, lambda lines: lines[1].update(decision="drop"))
        client.resume_flow_run(run.id, run_input={"file": str(path), "decision": "use", "reviewer": "A"})
        assert done.result(timeout=60) == use_of(recipe, [], "cold_start", path)
