"""The door to MLflow, against a real SQLite store: layout, links in place, and nothing lost while MLflow is away."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from flows.ablation import AblationTable, Cell, Row
from flows.tracking import Tracker, views
from flows.tracking.entries import params
from stages.artifacts import CheckpointRef, DatasetRef, Handles, StageResult, digest_of_file, digest_of_folder
from stages.config import STAGES

RATES = "ab" * 32
TUNED = "cd" * 32
SCORED = "ef" * 32


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty store: made once, since building its tables takes seconds."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def uri(empty_store: Path, tmp_path: Path) -> str:
    return f"sqlite:///{shutil.copy(empty_store, tmp_path / 'mlflow.db')}"


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of an MLflow server that is not there."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def checkpoint(folder: Path, content: str, *, name: str, producer: str) -> CheckpointRef:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text(content)
    return CheckpointRef(name=name, digest=digest_of_folder(folder), path=folder, producer=producer)


def dataset(file: Path, *, name: str, producer: str) -> DatasetRef:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(name)
    return DatasetRef(name=name, digest=digest_of_file(file), path=file, producer=producer, rows=3)


def records(folder: Path, *lines: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def result(stage: str, fingerprint: str, outputs: Handles, metrics: dict[str, float]) -> StageResult:
    return StageResult(
        stage=stage,
        fingerprint=fingerprint,
        key={},
        outputs=dict(outputs),
        metrics=metrics,
        seconds=4.0,
        busy_seconds=3.0,
        tokens=100,
        peak_memory_mib=50.0,
        versions={},
    )


def start(tracker: Tracker, recipe_run: str, *, node: str, stage: str, fingerprint: str, inputs: Handles, index: int = 1) -> str:
    return tracker.start_stage(
        node=node,
        stage=stage,
        index=index,
        recipe_run=recipe_run,
        variant="default",
        fingerprint=fingerprint,
        config={"learning_rate": 1e-3, "sampler": {"top_p": 0.9}},
        inputs=inputs,
        seed=7,
        prefect_url="http://prefect/run",
    )


def play(tracker: Tracker, home: Path) -> tuple[str, str, str]:
    """A small recipe: a given base, a fine-tuning stage, its evaluation. Returns the three run ids."""
    base = checkpoint(home / "base", "base", name="base", producer="given")
    traces = dataset(home / "traces.parquet", name="curation.traces", producer=RATES)
    recipe = tracker.start_recipe(
        variant="default", overrides={"cold_start.learning_rate": "1e-3"}, recipe_yaml="name: small\n", config_hash="1", prefect_url=None
    )
    folder = home / "stages" / "cold_start" / TUNED[:16]
    folder.mkdir(parents=True)
    tuned = checkpoint(folder / "checkpoint", "tuned", name="cold_start.model", producer=TUNED)
    run = start(tracker, recipe, node="cold_start", stage="cold_start", fingerprint=TUNED, inputs={"model": base, "traces": traces})
    forwarder = tracker.follow(run, folder / "metrics.jsonl")
    file = records(
        folder,
        {"time": 10.0, "step": 1, "metrics": {"train/loss": 2.0, "bad@name": 1.0}},
        {"time": 11.0, "progress": [1, 2, "step"]},
        {"time": 12.0, "step": 2, "metrics": {"train/loss": 1.0}},
    )
    with file.open("a") as half:
        half.write('{"time": 13.0, "step": 3, "met')
    (folder / "log.txt").write_text("it went well\n")
    forwarder.close()
    finished = result("cold_start", TUNED, {"model": tuned}, {"train/loss": 1.0, "train/examples": 5.0, "broken": float("inf")})
    tracker.finish_stage(run, recipe_run=recipe, node="cold_start", result=finished, status="FINISHED", log=folder / "log.txt")

    scores = {"eval/easy_non_thinking": 0.25, "eval/hard_one_thinking": 0.5, "length/easy_thinking": 12.0, "eval/easy_budget_16": 0.125}
    folder = home / "stages" / "evaluation" / SCORED[:16]
    inputs = {"model": tuned, "benchmarks": dataset(home / "benchmarks.parquet", name="curation.benchmarks", producer=RATES)}
    evaluation = start(tracker, recipe, node="evaluation_cold_start", stage="evaluation", fingerprint=SCORED, inputs=inputs, index=2)
    records(folder, {"time": 20.0, "step": 0, "metrics": scores})
    samples = dataset(folder / "samples.parquet", name="evaluation_cold_start.samples", producer=SCORED)
    tracker.finish_stage(
        evaluation,
        recipe_run=recipe,
        node="evaluation_cold_start",
        result=result("evaluation", SCORED, {"samples": samples}, scores),
        status="FINISHED",
        log=folder / "log.txt",
    )
    cell = Cell(benchmark="easy", mode="thinking", mean=0.5, low=0.4, high=0.6, n_problems=4, n_samples=8)
    common = {"format_rate": 1.0, "flag_rate": None, "preference_win_rate": None, "preference_p": None, "tokens": 10, "seconds": 1.0}
    base_row = Row(node="base", parent=None, cells=(cell._replace(mean=0.1),), **common)
    rows = (base_row, base_row._replace(node="cold_start", parent="base", cells=(cell,)))
    figure = home / "table.png"
    figure.write_bytes(b"png")
    tracker.finish_recipe(recipe, table=AblationTable(rows), figure=figure, table_json=None, status="FINISHED")
    return recipe, run, evaluation


def runs(uri: str) -> dict[str, Run]:
    """Run name to run, in the experiment of `play`."""
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("small")
    assert experiment is not None
    return {run.info.run_name: client.get_run(run.info.run_id) for run in client.search_runs([experiment.experiment_id])}


def history(uri: str, run: Run, metric: str) -> list[tuple[int, float]]:
    return sorted((point.step, point.value) for point in MlflowClient(uri).get_metric_history(run.info.run_id, metric))


def client_path(uri: str, run: Run) -> str:
    return MlflowClient(uri).download_artifacts(run.info.run_id, "ablation.json")


def test_recipe_tracked_leaves_the_layout_of_runs(uri: str, tmp_path: Path) -> None:
    play(Tracker(uri, "small", tmp_path), tmp_path)
    found = runs(uri)
    assert set(found) == {"small:default", "base", "cold_start:default", "evaluation_cold_start:default"}
    assert {run.info.status for run in found.values()} == {"FINISHED"}
    recipe, stage, evaluation = found["small:default"], found["cold_start:default"], found["evaluation_cold_start:default"]

    assert "mlflow.parentRunId" not in stage.data.tags  # nested runs would be hidden from filters
    assert stage.data.tags | {"kind": "stage", "stage": "01-cold_start", "node": "cold_start", "progress": "1 of 2 step"} == stage.data.tags
    assert stage.data.params == {"stage": "cold_start", "seed": "7", "learning_rate": "0.001", "sampler.top_p": "0.9"}
    assert history(uri, stage, "train/loss") == [(1, 2.0), (2, 1.0)]
    assert stage.data.metrics["bad_name"] == 1.0
    assert stage.data.metrics["train/examples"] == 5.0
    assert "broken" not in stage.data.metrics
    assert stage.data.metrics["cost/seconds"] == 4.0
    digest = next(item.dataset.digest for item in stage.inputs.dataset_inputs if item.dataset.name == "curation.traces")
    assert len(digest) == 32

    assert evaluation.data.tags["mlflow.parentRunId"] == stage.info.run_id
    assert stage.data.metrics["eval/easy_non_thinking"] == 0.25
    assert stage.data.metrics["eval/hard_one_thinking"] == 0.5
    assert history(uri, stage, "budget/easy") == [(16, 0.125)]

    assert history(uri, recipe, "ablation/easy_thinking") == [(0, 0.1), (1, 0.5)]
    assert recipe.data.metrics["easy_thinking/base"] == 0.1
    assert recipe.data.metrics["final/easy_thinking"] == 0.5
    assert recipe.data.tags["stage_run.cold_start"] == stage.info.run_id
    assert recipe.data.tags["stage_run.base"] == found["base"].info.run_id
    assert f"[cold_start](#/experiments/{recipe.info.experiment_id}/runs/{stage.info.run_id})" in recipe.data.tags["mlflow.note.content"]
    table = json.loads(Path(client_path(uri, recipe)).read_text())
    assert table["columns"][:2] == ["stage", "scores"]  # MLflow's comparison groups by the first column and shows the second
    assert table["data"][1][:3] == ["cold_start", "easy_thinking 0.500", 0.5]
    names = {item.path for item in MlflowClient(uri).list_artifacts(recipe.info.run_id)}
    assert {"recipe.yaml", "ablation.json", "table.png", "metrics_explained.yaml"} <= names


def test_checkpoint_tracked_is_linked_in_place_with_lineage(uri: str, tmp_path: Path) -> None:
    play(Tracker(uri, "small", tmp_path), tmp_path)
    client, stage = MlflowClient(uri), runs(uri)["cold_start:default"]
    models = {model.name: model for model in client.search_logged_models([stage.info.experiment_id])}
    assert set(models) == {"base", "cold_start-default"}
    made, base = models["cold_start-default"], models["base"]
    stored = Path(made.artifact_location.removeprefix("file://")) / "model.safetensors"
    assert stored.samefile(tmp_path / "stages" / "cold_start" / TUNED[:16] / "checkpoint" / "model.safetensors")
    assert not stored.stat().st_mode & 0o222
    assert str(made.status) == "READY"
    assert [item.model_id for item in stage.inputs.model_inputs] == [base.model_id]
    assert [item.model_id for item in stage.outputs.model_outputs] == [made.model_id]
    scores = {(metric.key, metric.dataset_name): metric.value for metric in made.metrics or []}
    assert scores[("accuracy_thinking", "hard_one")] == 0.5
    assert scores[("accuracy_non_thinking", "easy")] == 0.25


def test_views_after_a_recipe_decode_and_name_its_stages(uri: str, tmp_path: Path) -> None:
    play(Tracker(uri, "small", tmp_path), tmp_path)
    experiment = MlflowClient(uri).get_experiment_by_name("small")
    assert experiment is not None
    keys = {name.removeprefix("mlflow.sharedViewState.") for name in experiment.tags if name.startswith("mlflow.sharedViewState.")}
    assert keys == {"recipes", "stages", "variants-base", "variants-cold_start"}


def test_stage_finished_is_found_by_fingerprint_and_reused(uri: str, tmp_path: Path) -> None:
    tracker = Tracker(uri, "small", tmp_path)
    _, run, _ = play(tracker, tmp_path)
    assert tracker.find_stage(TUNED) == run
    assert tracker.find_stage("0" * 64) is None
    second = tracker.start_recipe(variant="second", overrides={}, recipe_yaml="", config_hash="2", prefect_url=None)
    tracker.reuse_stage(node="cold_start", index=1, recipe_run=second, run_id=run)
    tags = MlflowClient(uri).get_run(second).data.tags
    assert tags["stage_run.cold_start"] == run
    assert tags["mlflow.runColor"] != runs(uri)["small:default"].data.tags["mlflow.runColor"]


def test_mlflow_away_keeps_everything_and_sync_sends_it_once(away: str, uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "posttrain"):
        play(Tracker(away, "small", tmp_path), tmp_path)
    told = [record.message for record in caplog.records if record.name == "posttrain"]
    assert len(told) == 1
    assert away in told[0]
    assert "posttrain sync" in told[0]

    assert Tracker.sync(uri, tmp_path).left == 0
    found = runs(uri)
    assert {run.info.status for run in found.values()} == {"FINISHED"}
    assert history(uri, found["cold_start:default"], "train/loss") == [(1, 2.0), (2, 1.0)]
    assert history(uri, found["small:default"], "ablation/easy_thinking") == [(0, 0.1), (1, 0.5)]
    assert found["evaluation_cold_start:default"].data.tags["mlflow.parentRunId"] == found["cold_start:default"].info.run_id
    assert Tracker.sync(uri, tmp_path) == (0, 0)
    assert len(runs(uri)) == len(found)


def test_metrics_written_while_away_are_sent_by_sync(uri: str, away: str, tmp_path: Path) -> None:
    tracker = Tracker(uri, "small", tmp_path)
    _, run, _ = play(tracker, tmp_path)
    file = tmp_path / "stages" / "cold_start" / TUNED[:16] / "metrics.jsonl"
    file.write_text(file.read_text().rsplit("\n", 1)[0] + '\n{"time": 14.0, "step": 3, "metrics": {"train/loss": 0.5}}\n')
    assert not Tracker(away, "small", tmp_path).follow(run, file).close()
    assert Tracker.sync(uri, tmp_path) == (1, 0)
    assert history(uri, runs(uri)["cold_start:default"], "train/loss") == [(1, 2.0), (2, 1.0), (3, 0.5)]


def test_metrics_of_a_resumed_attempt_hold_each_step_once_as_written_last(uri: str, tmp_path: Path) -> None:
    tracker = Tracker(uri, "small", tmp_path)
    recipe = tracker.start_recipe(variant="v", overrides={}, recipe_yaml="", config_hash="1", prefect_url=None)
    run = start(tracker, recipe, node="cold_start", stage="cold_start", fingerprint=TUNED, inputs={})
    folder = tmp_path / "stages" / "cold_start" / TUNED[:16]
    file = records(folder, *({"time": float(step), "step": step, "metrics": {"train/loss": float(step)}} for step in (1, 2, 3)))
    forwarder = tracker.follow(run, file)
    with file.open("a") as again:  # from a checkpoint of step 1, other than before
        for step in (2, 3, 4):
            again.write(json.dumps({"time": 10.0 + step, "step": step, "metrics": {"train/loss": 10.0 + step}}) + "\n")
    assert forwarder.close()
    assert history(uri, runs(uri)["cold_start:default"], "train/loss") == [(1, 1.0), (2, 12.0), (3, 13.0), (4, 14.0)]
    assert Tracker.sync(uri, tmp_path) == (0, 0)


def test_model_given_is_copied_through_links_and_left_as_it_was(uri: str, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    given = checkpoint(blobs, "base", name="base", producer="given")
    snapshot = tmp_path / "snapshot"  # as the hub's cache: relative links to blobs
    snapshot.mkdir()
    for file in blobs.iterdir():
        file.chmod(0o644)
        (snapshot / file.name).symlink_to(Path("..") / "blobs" / file.name)
    tracker = Tracker(uri, "small", tmp_path)
    recipe = tracker.start_recipe(variant="v", overrides={}, recipe_yaml="", config_hash="1", prefect_url=None)
    start(
        tracker,
        recipe,
        node="evaluation_base",
        stage="evaluation",
        fingerprint=SCORED,
        inputs={"model": given.model_copy(update={"path": snapshot})},
    )
    (model,) = MlflowClient(uri).search_logged_models([runs(uri)["base"].info.experiment_id])
    stored = Path(model.artifact_location.removeprefix("file://")) / "model.safetensors"
    assert str(model.status) == "READY"
    assert stored.read_text() == "base"
    assert not stored.is_symlink()
    assert {(file.stat().st_mode & 0o777, file.stat().st_nlink) for file in blobs.iterdir()} == {(0o644, 1)}


def test_model_given_that_cannot_be_stored_leaves_its_stage_tracked(uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = checkpoint(tmp_path / "base", "base", name="base", producer="given")
    (tmp_path / "base" / "notes.txt").symlink_to("gone")
    tracker = Tracker(uri, "small", tmp_path)
    recipe = tracker.start_recipe(variant="v", overrides={}, recipe_yaml="", config_hash="1", prefect_url=None)
    with caplog.at_level(logging.WARNING, "posttrain"):
        run = start(tracker, recipe, node="evaluation_base", stage="evaluation", fingerprint=SCORED, inputs={"model": given})
    assert "did not take a record" in caplog.text
    stage, client = MlflowClient(uri).get_run(run), MlflowClient(uri)
    (model,) = client.search_logged_models([stage.info.experiment_id])
    assert (str(model.status), stage.inputs.model_inputs[0].model_id) == ("FAILED", model.model_id)
    assert stage.data.tags["mlflow.parentRunId"] == runs(uri)["base"].info.run_id


def test_reap_closes_runs_of_dead_processes_only(uri: str, tmp_path: Path) -> None:
    tracker = Tracker(uri, "small", tmp_path)
    alive = tracker.start_recipe(variant="alive", overrides={}, recipe_yaml="", config_hash="1", prefect_url=None)
    dead = tracker.start_recipe(variant="dead", overrides={}, recipe_yaml="", config_hash="1", prefect_url=None)
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    client = MlflowClient(uri)
    client.set_tag(dead, "owner", f"{socket.gethostname()}:{process.pid}:1")
    assert tracker.reap() == ["small:dead"]
    assert client.get_run(dead).info.status == "KILLED"
    assert client.get_run(alive).info.status == "RUNNING"


def test_record_refused_is_told_and_the_rest_is_written(uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Tracker(uri, "small", tmp_path)
    recipe = tracker.start_recipe(variant="v", overrides={}, recipe_yaml="", config_hash="1", prefect_url=None)
    run = start(tracker, recipe, node="cold_start", stage="cold_start", fingerprint=TUNED, inputs={})
    gone = CheckpointRef(name="cold_start.model", digest="0" * 64, path=tmp_path / "gone", producer=TUNED)
    with caplog.at_level(logging.WARNING, "posttrain"):
        tracker.finish_stage(
            run,
            recipe_run=recipe,
            node="cold_start",
            status="FINISHED",
            log=None,
            result=result("cold_start", TUNED, {"model": gone}, {"m": 1.0}),
        )
    stage = MlflowClient(uri).get_run(run)
    assert stage.info.status == "FINISHED"
    assert stage.data.metrics["m"] == 1.0
    assert "did not take a record" in caplog.text
    assert tracker.links(recipe) == {}  # a store without a server has no pages


def test_params_nested_config_becomes_dotted_scalars() -> None:
    found = {param.key: param.value for param in params({"a": {"b": 1, "c": [1, 2]}, "d": {}, "long": "x" * 900})}
    assert found == {"a.b": "1", "a.c": "[1, 2]", "d": "{}", "long": "x" * 500}
    assert params({}) == []


def test_views_show_only_metrics_that_the_glossary_explains() -> None:
    shown = views.settings("views.yaml")
    names = [*shown["costs"], *(name for charts in shown["stages"].values() for group in charts.values() for name in group)]
    assert [name for name in names if views.meaning(name) is None] == []
    assert {row["direction"] for row in views.settings("metrics.yaml").values()} == {"higher", "lower", "none"}
    assert set(shown["stages"]) == set(STAGES) - {"evaluation"}


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("eval/arithmetic_non_thinking", "share"),
        ("length/harder_budget_16", "tokens"),
        ("rows/kept", "rows"),
        ("rows/kept/products", "rows"),
        ("train/rewards/format/std", "reward"),
        ("on_policy/loss", "nats"),
        ("pass_rates/never", "share"),
        ("reward_model/pairs", "pairs"),
        ("easy_thinking/cold_start", "share"),
    ],
)
def test_meaning_of_a_logged_name_is_found_by_its_pattern(name: str, unit: str) -> None:
    row = views.meaning(name)
    assert row is not None
    assert row["unit"] == unit


def test_meaning_of_an_unknown_name_is_none() -> None:
    assert views.meaning("rollout/nonsense") is None


def test_mlflow_folder_holds_no_python() -> None:
    assert [name for name in os.listdir(views.SETTINGS) if name.endswith(".py")] == []
