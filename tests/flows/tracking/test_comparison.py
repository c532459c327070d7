"""A comparison of variants on the run of an ablation, and their samples side by side."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import mlflow
import pytest

from flows.tracking import Tracker, VariantSamples


def row(variant: str, mean: float, difference: float | None, verdict: str, **given: Any) -> dict[str, Any]:
    return {
        "variant": variant,
        "seeds": [1, 2],
        "benchmark": "easy",
        "mode": "thinking",
        "n_problems": 64,
        "n_samples": 256,
        "mean": mean,
        "low": mean - 0.05,
        "high": mean + 0.05,
        "seed_means": [mean - 0.01, mean + 0.01],
        "difference": difference,
        "difference_low": None if difference is None else difference - 0.04,
        "difference_high": None if difference is None else difference + 0.04,
        "p_value": None if difference is None else 0.2,
        "p_adjusted": None if difference is None else 0.4,
        "verdict": verdict,
        "tokens": 12_000,
        "seconds": 31.0,
    } | given


ROWS = [
    row("loss=grpo", 0.5, None, "baseline"),
    row("loss=dr_grpo", 0.52, 0.02, "not distinguishable"),
    row("loss=grpo", 0.3, None, "baseline", benchmark="hard"),
    row("loss=dr_grpo", 0.4, 0.1, "better", benchmark="hard"),
    row("loss=grpo", 0.1, None, "baseline", mode="budget_16"),
]


@pytest.mark.parametrize("times", [1, 2])
def test_comparison_logged_is_note_table_and_metrics_of_its_run(uri: str, tmp_path: Path, story: Any, store: Any, times: int) -> None:
    tracker = Tracker(uri, "small", tmp_path)
    run = story.start_recipe(tracker, run="small-3", kind="ablation", of_run="small-1", variant="loss=grpo,dr_grpo")
    for _ in range(times):
        tracker.log_comparison(run, ROWS, "cold_start, against loss=grpo")
    lines = store.note(run).splitlines()
    assert lines[0] == "| variant | easy thinking | hard thinking | tokens | seconds |"
    baseline = "| loss=grpo | 0.500 (0.450 to 0.550) | 0.300 (0.250 to 0.350) | 12,000 | 31 |"
    other = "| loss=dr_grpo | 0.520 (0.470 to 0.570), +0.020 not distinguishable | 0.400 (0.350 to 0.450), +0.100 better | 12,000 | 31 |"
    assert lines[2:4] == [baseline, other]
    assert "ablation of small-1" in store.note(run)
    assert store.note(run).count("Compared: cold_start, against loss=grpo") == 1
    table = json.loads(store.artifact(run, "comparison.json"))
    assert table["columns"][:3] == ["variant", "scores", "seeds"]
    shown = dict(zip(table["columns"], table["data"][1], strict=True))
    assert shown["scores"] == "easy_thinking 0.520 (not distinguishable), hard_thinking 0.400 (better)"
    assert (shown["hard_thinking_difference"], shown["hard_thinking_p_adjusted"], shown["seeds"]) == (0.1, 0.4, "1, 2")
    assert json.loads(store.tags(run)["mlflow.loggedArtifacts"]) == [{"path": "comparison.json", "type": "table"}]
    assert store.history(run, "comparison/hard_thinking") == [(0, 0.3), (1, 0.4)]
    assert store.history(run, "difference/hard_thinking") == [(1, 0.1)]
    assert "mlflow.sharedViewState.recipes" in store.client.get_experiment(store.experiment).tags


def test_comparison_while_mlflow_is_away_arrives_by_sync(uri: str, away: str, tmp_path: Path, story: Any, store: Any) -> None:
    tracker = Tracker(away, "small", tmp_path)
    tracker.log_comparison(story.start_recipe(tracker, kind="ablation"), ROWS, "cold_start")
    assert Tracker.sync(uri, tmp_path).left == 0
    (run,) = store.runs().values()
    assert run.data.metrics["comparison/easy_thinking"] == 0.52


def said(variant: str, *, right: int) -> VariantSamples:
    rows = [
        {
            "question": f"What is {n} + {n}?",
            "answer": str(2 * n),
            "completion": f"{variant} says {2 * n}",
            "correct": n < right if n else None,
        }
        for n in range(4)
    ]
    return VariantSamples(variant, f"fingerprint of {variant}", rows)


@pytest.mark.slow
def test_samples_logged_are_scored_reused_and_leave_the_caller_as_it_was(
    uri: str, tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    mine = f"sqlite:///{tmp_path}/mine.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mine)
    monkeypatch.setenv("HF_TOKEN", "hf_plantedTokenOfThisTest")
    before = dict(os.environ)
    tracker = Tracker(uri, "small", tmp_path)
    runs = tracker.log_samples([said("first", right=2), said("second", right=3)])
    assert (dict(os.environ), mlflow.active_run(), mlflow.get_tracking_uri()) == (before, None, mine)
    assert capfd.readouterr() == ("", "")
    found = [store.client.get_run(run) for run in runs]
    assert [run.info.run_name for run in found] == ["first", "second"]
    assert [round(run.data.metrics["correct/mean"], 3) for run in found] == [0.333, 0.667]
    assert {run.info.status for run in found} == {"FINISHED"}
    experiment = store.client.get_experiment_by_name("small.samples")
    assert {run.info.experiment_id for run in found} == {experiment.experiment_id}
    assert experiment.tags["mlflow.experimentKind"] == "genai_development"
    assert len(store.client.search_traces(locations=[experiment.experiment_id])) == 8
    assert tracker.log_samples([said("first", right=2), said("second", right=3)]) == runs
    assert tracker.compare_samples_url(*runs) == ""  # a store without a server has no pages
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if b"hf_plantedTokenOfThisTest" in path.read_bytes()] == []


def test_samples_while_mlflow_is_away_are_none(away: str, tmp_path: Path) -> None:
    tracker = Tracker(away, "small", tmp_path)
    assert tracker.log_samples([said("first", right=2)]) == []
    assert tracker.compare_samples_url("a", "b") == ""
