"""The command as a user runs it: real servers, real processes, and what is on disk and in MLflow afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from flows.plan import make_plan
from flows.recipe import load_recipe
from flows.servers.serving import VARIABLE
from stages.artifacts import is_there

RECIPE = """
name: small
description: two curations, cheap and independent
stages:
  first: &settings
    stage: curation
    sources: [{kind: reasoning_gym, family: chain_sum, size: 60, parameters: {min_terms: 4, max_terms: 5}}]
    benchmarks: {sums: [{kind: reasoning_gym, family: chain_sum, size: 20, parameters: {min_terms: 4, max_terms: 5}}]}
    benchmark_size: 8
    pools: {cold_start: {share: 0.25, with_trace: true}, rl: {share: 0.25}, preference: {share: 0.25}, distillation: {share: 0.25}}
  second: *settings
"""


def posttrain(folder: Path, *arguments: str) -> str:
    """Run the command in a folder, with a home of its own there; returns what it printed. It must end well."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLE.values()}
    done = subprocess.run(
        [Path(sys.executable).with_name("posttrain"), *arguments],
        env=environment | {"POSTTRAIN_HOME": str(folder / "home")},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def runs(home: Path) -> dict[str, Run]:
    """Run name to run, in the experiment of the recipe."""
    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    experiment = client.get_experiment_by_name("small")
    assert experiment is not None
    return {str(run.info.run_name): client.get_run(run.info.run_id) for run in client.search_runs([experiment.experiment_id])}


@pytest.mark.slow
def test_run_leaves_results_and_finished_runs_and_is_up_to_date_afterwards(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(RECIPE)
    home = tmp_path / "home"

    posttrain(tmp_path, "stage", "second", "--recipe", "small.yaml")
    alone = runs(home)
    assert {run.info.status for run in alone.values()} == {"FINISHED"}
    assert set(alone) == {"small-1 rerun:second default", "second:default"}
    assert alone["second:default"].data.tags["stage"] == "01-second"  # its place in the whole recipe

    assert "starting Prefect and MLflow" in posttrain(tmp_path, "run", "small.yaml")
    for step in make_plan(load_recipe(str(tmp_path / "small.yaml")), home):
        assert step.action == "reuse", step.why
        assert step.result is not None
        assert all(is_there(output.path) for output in step.result.outputs.values())
    whole = runs(home)
    assert {run.info.status for run in whole.values()} == {"FINISHED"}
    assert set(whole) - set(alone) == {"small-2:default", "first:default"}
    recipe = whole["small-2:default"].data.tags
    assert recipe["stage_run.first"] == whole["first:default"].info.run_id
    assert recipe["stage_run.second"] == alone["second:default"].info.run_id
    assert whole["first:default"].data.tags["stage"] == "00-first"
    assert whole["first:default"].data.metrics["cost/seconds"] > 0

    said = posttrain(tmp_path, "run", "small.yaml")
    assert "small is up to date" in said
    assert "starting" not in said
