"""`posttrain audit`: what it looks at, what it prints, its exit status, and what MLflow gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from typer.testing import CliRunner, Result

from flows.audit import audit_recipe, gold_answers, rows_of
from flows.cli import app
from flows.recipe import load_recipe
from flows.tracking import Tracker
from flows.tracking.views import meaning
from stages.rewards.audit import Attack, Audit, CodeAttack, EquivalencePair, shipped_rows

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
    assert golds[:2] == [
        {"problem_id": f"sources[0] problems.jsonl row {row}", "question": question, "answer": answer}
        for row, question, answer in ((1, "3+4", "7"), (2, "4+4", "8"))
    ]
    assert len(golds) == 2 + 1000 + 20  # of a large source the first thousand
    assert gold_answers(None) == []


@pytest.mark.slow
def test_audit_of_a_sound_recipe_prints_a_table_and_ends_with_status_0(recipe: Path) -> None:
    result = posttrain("audit", str(recipe), "--no-mlflow")
    assert result.exit_code == 0, result.output
    for check in ("gold answers earn full marks", "equivalent answers are right", "attacks earn nothing", "hostile programs reach nothing"):
        assert check in result.output
    assert "FAILED" not in result.output
    assert not (recipe.parent / "home" / "tracking").exists()


@pytest.mark.slow
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


def test_audit_without_a_recipe_has_no_gold_answers_and_looks_at_the_shipped_rows() -> None:
    kinds = {type(row) for row in shipped_rows()}
    assert kinds == {Attack, CodeAttack, EquivalencePair}
    assert Audit(()).passed
