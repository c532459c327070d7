"""`posttrain audit`: what it looks at, what it prints, its exit status, and what MLflow gets."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from rich.console import Console
from typer.testing import CliRunner, Result

from flows.audit import StageAudit, audit_recipe, gold_answers, render, require_host, rows_of
from flows.cli import app
from flows.recipe import load_recipe
from flows.tracking import Tracker
from flows.tracking.views import meaning
from stages.errors import ConfigError
from stages.rewards.audit import Attack, Audit, Check, CodeAttack, EquivalencePair, shipped_rows

RECIPE = """
name: small
models: {base: nowhere}
stages:
  curation:
    sources:
      - {kind: file, path: PROBLEMS, max_bad_share: 1.0}
      - {kind: reasoning_gym, family: chain_sum, size: 1200}
    benchmarks: {sums: [{kind: reasoning_gym, family: chain_sum, size: 20}]}
    pools: {rl: {share: 0.5}, preference: {share: 0.5}}
  reasoning_rl: {from: {model: base, problems: curation.rl}, steps: 1, learning_rate: 1.0e-4}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe of one stage that trains on rewards, over two good problems of a file, two rows that cannot be used, and sums."""
    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "home"))
    rows = [("3+4", "7"), ("4+4", " 8 "), (None, "9"), ("5+5", " ")]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE.replace("PROBLEMS", str(tmp_path / "problems.jsonl")))
    return path


def posttrain(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


def told(result: Result) -> str:
    return " ".join(result.output.split())


def test_gold_answers_of_a_recipe_are_those_of_all_its_sources_that_can_be_read(recipe: Path) -> None:
    golds = gold_answers(load_recipe(str(recipe)))
    assert [(row["problem_id"], row["question"], row["answer"], row["answer_type"]) for row in golds[:2]] == [
        ("sources[0] problems.jsonl row 1", "3+4", "7", "text"),
        ("sources[0] problems.jsonl row 2", "4+4", "8", "text"),
    ]
    assert len(golds) == 2 + 1000 + 20  # of a large source the first thousand
    assert gold_answers(None) == []


@pytest.mark.slow
@pytest.mark.usefixtures("bubblewrap")
def test_audit_of_a_sound_recipe_prints_a_table_and_ends_with_status_0(recipe: Path) -> None:
    result = posttrain("audit", str(recipe), "--no-mlflow")
    assert result.exit_code == 0, result.output
    for check in ("gold answers earn full marks", "equivalent answers are right", "attacks earn nothing", "hostile programs reach nothing"):
        assert check in result.output
    assert "FAILED" not in result.output
    assert not (recipe.parent / "home" / "tracking").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("bubblewrap")
def test_audit_with_rows_of_ones_own_that_fail_prints_them_and_ends_with_status_1(recipe: Path) -> None:
    mine = recipe.parent / "mine.jsonl"
    mine.write_text(json.dumps({"attack": "mine [odd]", "gold": "7", "completion": "\\boxed{7}", "must_not_earn": ["accuracy"]}) + "\n")
    result = posttrain("audit", str(recipe), "--set", f"reasoning_rl.audit.rows=[{mine}]", "--no-mlflow", "--json")
    assert result.exit_code == 1
    assert "mine [odd] (text), '\\\\boxed{7}': earns accuracy" in told(result)
    assert "the audit failed for reasoning_rl; a policy would be trained on wrong rewards" in told(result)
    rows = json.loads(result.stdout)
    bad = [row for row in rows if not row["passed"]]
    assert [(row["stage"], row["metric"], row["failed"]) for row in bad] == [("reasoning_rl", "audit/attacks_paid", 2)]  # as text, as math
    assert {row["stage"] for row in rows} == {"reasoning_rl", "programs"}


def test_audit_on_paper_shows_what_failed_and_one_of_what_a_rule_lets_through() -> None:
    lenient = Check("equivalent answers are right", "audit/recall", 500, 2, 0.996, "a share", True, ("'[a]' for 'b': wrong", "second"))
    strict = Check("attacks earn nothing", "audit/attacks_paid", 170, 7, 7.0, "none", False, ("first [x]", "other"))
    out = io.StringIO()
    render([StageAudit("rl", Audit((lenient, strict)))], Console(file=out, width=200))
    text = out.getvalue()
    assert "rl: equivalent answers are right: 2 of 500 did not, which its rule allows; for instance\n  '[a]' for 'b': wrong\n" in text
    assert "second" not in text
    assert "rl: attacks earn nothing: 7 of 170 failed, the first 2\n  first [x]\n  other\n" in text
    assert text.endswith("1 of 2 checks failed\n")
    out.seek(0)
    render([StageAudit("rl", Audit((lenient,)))], Console(file=out, width=200))
    assert "all 1 checks passed" in out.getvalue()


def test_audit_of_a_recipe_that_is_wrong_ends_with_status_2_before_anything_is_looked_at(recipe: Path) -> None:
    result = posttrain("audit", str(recipe), "--set", "reasoning_rl.audit.min_recal=1", "--no-mlflow")
    assert result.exit_code == 2
    assert "min_recall" in told(result)
    assert posttrain("audit", "--set", "x.y=1").exit_code == 2


def test_audit_with_rows_that_are_not_there_ends_with_status_1_and_the_remedy(recipe: Path) -> None:
    result = posttrain("audit", str(recipe), "--set", "reasoning_rl.audit.rows=[nowhere.jsonl]", "--no-mlflow")
    assert result.exit_code == 1
    assert "nowhere.jsonl cannot be read" in told(result)


@pytest.mark.slow
def test_audit_in_mlflow_is_a_run_with_metrics_table_and_note_which_fails_with_a_check(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    found = audit_recipe(load_recipe(str(recipe)), tmp_path / "home", lambda _: None)
    good = rows_of(found)
    bad = [good[0] | {"passed": False, "failed": 2, "examples": ["one | two", "three"], "value": 0.5}, *good[1:]]
    tracker = Tracker(uri, "small", tmp_path / "home")
    runs = [tracker.log_audit(rows) for rows in (good, bad)]
    client = MlflowClient(tracking_uri=uri)
    first, second = (client.get_run(run) for run in runs)
    assert (first.info.status, second.info.status) == ("FINISHED", "FAILED")
    assert first.data.tags["kind"] == "audit"
    assert first.data.metrics["audit/recall/reasoning_rl"] == 1.0
    assert second.data.metrics["audit/gold_right/reasoning_rl"] == 0.5
    assert [name for name in first.data.metrics if meaning(name) is None] == []
    assert "| reasoning_rl | gold answers earn full marks |" in first.data.tags["mlflow.note.content"]
    assert "**FAILED**" in second.data.tags["mlflow.note.content"]
    table: dict[str, Any] = json.loads(Path(client.download_artifacts(runs[1], "audit.json", str(tmp_path))).read_text())
    assert table["columns"][:3] == ["stage", "name", "metric"]
    assert table["data"][0][-1] == "one | two\nthree"


@pytest.fixture
def programs(recipe: Path) -> Path:
    """The recipe with programs as the answers of its file."""
    recipe.write_text(recipe.read_text().replace("max_bad_share: 1.0", "max_bad_share: 1.0, answer_type: code"))
    return recipe


@pytest.mark.parametrize("stage", ["pass_rates", "cold_start", "rejection_sampling", "rlhf", "distillation", "evaluation"])
def test_host_without_the_key_of_any_stages_judge_is_told_by_its_setting(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    judge = f"{stage}.judge={{address: http://127.0.0.1:9/v1, model: m, key_variable: JUDGE_KEY}}"
    with pytest.raises(ConfigError, match=rf"{stage}\.judge\.key_variable names JUDGE_KEY, which is not set"):
        require_host(load_recipe("tiny", [judge]).nodes)


def test_host_without_a_judges_key_is_told_before_anything_runs_and_by_its_setting(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    judge = "reasoning_rl.judge={address: http://127.0.0.1:9/v1, model: m, key_variable: JUDGE_KEY}"
    with pytest.raises(ConfigError, match=r"reasoning_rl\.judge\.key_variable names JUDGE_KEY, which is not set"):
        require_host(load_recipe(str(recipe), [judge]).nodes)
    result = posttrain("audit", str(recipe), "--set", judge, "--no-mlflow")
    assert result.exit_code == 2
    assert "names JUDGE_KEY, which is not set" in told(result)
    assert "gold answers" not in result.output
    assert posttrain("check", str(recipe), "--set", judge).exit_code == 2
    monkeypatch.setenv("JUDGE_KEY", "sk-1")
    assert posttrain("check", str(recipe), "--set", judge).exit_code == 0
    assert posttrain("check", str(recipe)).exit_code == 0


def test_host_without_a_sandbox_is_told_for_a_recipe_of_programs_and_for_no_other(programs: Path, recipe: Path) -> None:
    code = (
        "import sys\nfrom flows.audit import require_host\nfrom flows.recipe import load_recipe\n"
        "from stages.rewards.sandbox import SandboxError\n"
        "try:\n    require_host(load_recipe(sys.argv[1]).nodes)\nexcept SandboxError as error:\n    print(error)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": str(recipe.parent)}

    def said() -> str:
        return subprocess.run([sys.executable, "-c", code, str(recipe)], env=environment, capture_output=True, text=True, check=True).stdout

    told_of_programs = said()
    assert told_of_programs.startswith("answers of sources[0] problems.jsonl are programs, which cannot be graded here; no sandbox")
    assert "apt-get install bubblewrap" in told_of_programs
    programs.write_text(programs.read_text().replace("answer_type: code", "answer_type: text"))
    assert said() == ""


def test_audit_without_a_recipe_has_no_gold_answers_and_looks_at_the_shipped_rows() -> None:
    kinds = {type(row) for row in shipped_rows()}
    assert kinds == {Attack, CodeAttack, EquivalencePair}
    assert Audit(()).passed
