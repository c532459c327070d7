"""The command: what it prints, its exit status, and what it does not import or create."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flows.cli import app
from flows.launch import launch
from flows.plan import home_folder, make_plan, remember
from flows.recipe import load_recipe

RECIPE = """
name: small
description: curation alone
stages:
  curation:
    sources: [{kind: reasoning_gym, family: chain_sum, size: 60, parameters: {min_terms: 4, max_terms: 5}}]
    benchmarks: {sums: [{kind: reasoning_gym, family: chain_sum, size: 20, parameters: {min_terms: 4, max_terms: 5}}]}
    benchmark_size: 8
    pools: {cold_start: {share: 0.25, with_trace: true}, rl: {share: 0.25}, preference: {share: 0.25}, distillation: {share: 0.25}}
"""
HEAVY = ("torch", "transformers", "vllm", "trl", "prefect", "mlflow")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, with a recipe of one cheap real stage beside it."""
    (tmp_path / "small.yaml").write_text(RECIPE)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delenv("POSTTRAIN_HOME", raising=False)
    return tmp_path


def posttrain(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


def finish_curation(project: Path) -> None:
    """Run the recipe's one stage for real, in a process of its own, without servers."""
    (step,) = make_plan(load_recipe(str(project / "small.yaml")), home_folder())
    assert step.folder is not None
    node = step.node
    launch(
        step.folder,
        {"stage": node.stage, "node": node.name, "fingerprint": step.fingerprint, "key": step.key, "inputs": {}, "seed": node.seed}
        | {"config": node.config.model_dump(mode="json")},
    )
    remember(home_folder(), "small", step, last={"variant": "default", "links": [["Prefect run", "http://127.0.0.1:1/x"]]})


def test_plan_leaves_an_empty_folder_empty(project: Path) -> None:
    result = posttrain("plan", "../small.yaml")
    assert result.exit_code == 0
    assert "never ran" in result.output
    assert list((project / "work").iterdir()) == []


def test_plan_json_says_action_and_reason(project: Path) -> None:
    (step,) = json.loads(posttrain("plan", "../small.yaml", "--json").stdout)
    assert (step["node"], step["action"], step["why"]) == ("curation", "run", "never ran")


def test_run_with_all_finished_prints_where_to_look_and_starts_nothing(project: Path) -> None:
    finish_curation(project)
    program = f"""
import sys
from flows.cli import app
try:
    app(["run", "../small.yaml"])
finally:
    print("heavy:", [name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "small is up to date" in done.stdout
    assert "http://127.0.0.1:1/x" in done.stdout
    assert "heavy: []" in done.stdout


def test_run_json_with_all_finished_writes_one_document(project: Path) -> None:
    finish_curation(project)
    content = json.loads(posttrain("run", "../small.yaml", "--json").stdout)
    assert content["totals"]["stages_run"] == 0
    assert content["links"] == {"Prefect run": "http://127.0.0.1:1/x"}


def test_plan_after_a_run_names_the_changed_setting(project: Path) -> None:
    finish_curation(project)
    assert "reuse" in posttrain("plan", "../small.yaml").output
    assert "curation.benchmark_size 8 -> 9" in posttrain("plan", "../small.yaml", "--set", "curation.benchmark_size=9").output


def test_stage_that_is_finished_says_so(project: Path) -> None:
    finish_curation(project)
    result = posttrain("stage", "curation", "--recipe", "../small.yaml")
    assert result.exit_code == 0
    assert "curation is up to date" in result.output


def test_stage_without_its_inputs_names_the_command_that_makes_them(project: Path) -> None:
    rates = "  pass_rates: {from: {model: base, problems: curation.rl}}\n"
    base = project / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    (base / "model.safetensors").write_text("weights")
    (project / "rates.yaml").write_text(RECIPE.replace("stages:", f"models: {{base: {base}}}\nstages:") + rates)
    result = posttrain("stage", "pass_rates", "--recipe", "../rates.yaml", "--set", "pass_rates.attempts=4")
    assert result.exit_code == 1
    text = " ".join(result.output.split())
    assert "pass_rates needs what has not been made with these settings: curation.rl (never ran)" in text
    assert "posttrain stage curation --recipe ../rates.yaml --set 'pass_rates.attempts=4'" in text


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["check", "../small.yaml"], 0, "small: 1 stages, curation alone"),
        (["check", "../small.yaml", "--set", "curation.benchmark_sise=3"], 2, "did you mean benchmark_size?"),
        (["run", "../small.yaml", "--set", "curation.benchmark_size=1"], 2, "must be greater than or equal to 2"),
        (["run", "no_such_recipe"], 2, "there is no recipe 'no_such_recipe'"),
        (["stage", "curations", "--recipe", "../small.yaml"], 2, "did you mean curation?"),
        (["table", "../small.yaml"], 1, "no evaluation of small has finished"),
        (["plan"], 2, "RECIPE"),
        (["plan", "../small.yaml", "--no-such-option"], 2, "No such option"),
    ],
)
def test_command_ends_with_a_status_and_a_text_that_helps(project: Path, arguments: list[str], status: int, said: str) -> None:
    result = posttrain(*arguments)
    assert result.exit_code == status
    assert said in " ".join(result.output.split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ["run", "plan", "stage", "up", "check", "table", "sync"])
def test_help_teaches_with_an_example(command: str) -> None:
    result = posttrain(command, "--help")
    assert result.exit_code == 0
    assert f"Example: posttrain {command}" in result.output
