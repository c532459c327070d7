"""The command: what it prints, its exit status, and what it does not import or create."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pyarrow import Table, parquet
from typer.testing import CliRunner, Result

from flows import cli
from flows.cli import app
from flows.launch import launch
from flows.plan import Step, home_folder, make_plan, remember
from flows.recipe import load_recipe
from stages.artifacts import CheckpointRef, DatasetRef, StageResult, digest_of_file, write_json

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
SAMPLES = [
    {
        "benchmark": "sums", "mode": "thinking", "problem_id": f"p{problem}", "sample": sample, "seed": 0, "graded": True,
        "correct": sample == 0, "reason": "", "format_ok": True, "flag_followed": True, "tokens": 20, "thinking_tokens": 10,
        "finish": "stop", "preference": 0.5, "completion": "x",
    }
    for problem in range(4) for sample in range(2)
]  # fmt: skip
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


def pretend(step: Step) -> None:
    """Leave a result as if the step had run; every output is a file of samples."""
    assert step.folder is not None
    assert step.fingerprint is not None
    step.folder.mkdir(parents=True)
    outputs: dict[str, CheckpointRef | DatasetRef] = {}
    for name in step.node.config.writes:
        path = step.folder / f"{name}.parquet"
        parquet.write_table(Table.from_pylist(SAMPLES), path)
        outputs[name] = DatasetRef(name=name, digest=digest_of_file(path), path=path, producer=step.fingerprint, rows=len(SAMPLES))
    result = StageResult(
        stage=step.node.stage, fingerprint=step.fingerprint, key={}, outputs=outputs, metrics={},
        seconds=1, busy_seconds=1, tokens=1, peak_memory_mib=1, versions={},
    )  # fmt: skip
    write_json(step.folder / "result.json", result.model_dump(mode="json"))


def test_table_shows_what_has_finished_with_these_settings_only(project: Path) -> None:
    base = project / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    (base / "model.safetensors").write_text("weights")
    evaluated = f"models: {{base: {base}}}\nevaluation: {{benchmarks: curation, samples: 2}}\nstages:"
    rates = "  pass_rates: {from: {model: base, problems: curation.rl}}\n"
    (project / "scored.yaml").write_text(RECIPE.replace("stages:", evaluated) + rates)
    for place in (0, 1):
        pretend(make_plan(load_recipe(str(project / "scored.yaml")), home_folder())[place])
    (row,) = json.loads(posttrain("table", "../scored.yaml", "--json").stdout)
    assert row["node"] == "base"
    other = posttrain("table", "../scored.yaml", "--set", "evaluation.samples=4")
    assert other.exit_code == 1
    assert "no evaluation of small has finished with these settings" in " ".join(other.output.split())


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
    assert "pass_rates needs what has not been made with these settings: curation (never ran)" in text
    assert "posttrain stage curation --recipe ../rates.yaml --set pass_rates.attempts=4" in text


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["check", "../small.yaml"], 0, "small: 1 stages, curation alone"),
        (["check", "../small.yaml", "--set", "curation.benchmark_sise=3"], 2, "did you mean benchmark_size?"),
        (["run", "../small.yaml", "--set", "curation.benchmark_size=1"], 2, "must be greater than or equal to 2"),
        (["run", "no_such_recipe"], 2, "there is no recipe 'no_such_recipe'"),
        (["stage", "curations", "--recipe", "../small.yaml"], 2, "did you mean curation?"),
        (["table", "../small.yaml"], 1, "no evaluation of small has finished with these settings"),
        (["table", "../small.yaml", "--set", "seed=1"], 1, "make one: posttrain run ../small.yaml --set seed=1"),
        (["plan"], 2, "RECIPE"),
        (["plan", "../small.yaml", "--no-such-option"], 2, "No such option"),
    ],
)
def test_command_ends_with_a_status_and_a_text_that_helps(project: Path, arguments: list[str], status: int, said: str) -> None:
    result = posttrain(*arguments)
    assert result.exit_code == status
    assert said in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_command_that_is_suggested_stays_whole_in_a_shell(project: Path) -> None:
    (project / "two words.yaml").write_text(RECIPE)
    override = "curation.exclude=['proof', 'multi-part']"
    result = posttrain("table", "../two words.yaml", "--set", override)
    assert result.exit_code == 1
    suggested = " ".join(result.output.split()).partition("make one: ")[2]
    assert shlex.split(suggested)[:5] == ["posttrain", "run", "../two words.yaml", "--set", override]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_command_that_inherited_an_ignored_signal_is_interrupted_by_it(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)  # as a shell does for what a script starts in the background
    try:
        with pytest.raises(SystemExit) as ended, cli._reported(False):
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert ended.value.code == 130


@pytest.mark.parametrize("command", ["run", "plan", "stage", "up", "check", "table", "sync", "tests"])
def test_help_teaches_with_an_example(command: str) -> None:
    result = posttrain(command, "--help")
    assert result.exit_code == 0
    assert f"Example: posttrain {command}" in result.output
