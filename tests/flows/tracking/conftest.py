"""A small recipe's story for MLflow: a given base, a fine-tuning stage, its evaluation; and stores to tell it to."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from flows.scores.ablation import AblationTable, Cell, Row
from flows.tracking import Tracker
from stages.artifacts import CheckpointRef, DatasetRef, Handles, StageResult, digest_of_file, digest_of_folder

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
def uri(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store of this test's own, which is also the process's: MLflow's registry asks that one for the model of a new version.

    What MLflow keeps where a process was started goes to the test's folder too.
    """
    monkeypatch.chdir(tmp_path)
    address = f"sqlite:///{shutil.copy(empty_store, tmp_path / 'mlflow.db')}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    return address


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of an MLflow server that is not there."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


class Played(NamedTuple):
    """Run ids of the recipe, its stage and its evaluation, and the checkpoints."""

    recipe: str
    stage: str
    evaluation: str
    base: CheckpointRef
    tuned: CheckpointRef


class Story:
    """Parts of a recipe under a home, told to a tracker."""

    rates, tuned, scored = RATES, TUNED, SCORED

    def __init__(self, home: Path) -> None:
        self.home = home

    def checkpoint(self, folder: Path, content: str, *, name: str, producer: str) -> CheckpointRef:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_text(content)
        return CheckpointRef(name=name, digest=digest_of_folder(folder), path=folder, producer=producer)

    def made(self, node: str, fingerprint: str, content: str) -> CheckpointRef:
        """A checkpoint in the folder of the stage that made it."""
        folder = self.folder(node, fingerprint) / "checkpoint"
        return self.checkpoint(folder, content, name=f"{node}.model", producer=fingerprint)

    def folder(self, kind: str, fingerprint: str) -> Path:
        folder = self.home / "stages" / kind / fingerprint[:16]
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def dataset(self, file: Path, *, name: str, producer: str) -> DatasetRef:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
        return DatasetRef(name=name, digest=digest_of_file(file), path=file, producer=producer, rows=3)

    def records(self, folder: Path, *lines: dict[str, Any]) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "metrics.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return file

    def result(self, stage: str, fingerprint: str, outputs: Handles, metrics: dict[str, float]) -> StageResult:
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

    def start_recipe(self, tracker: Tracker, *, variant: str = "default", **given: Any) -> str:
        content = {"overrides": {}, "recipe_yaml": "name: small\n", "config_hash": "1", "prefect_url": None}
        return tracker.start_recipe(variant=variant, **{**content, **given})

    def start(
        self, tracker: Tracker, recipe_run: str, *, node: str, fingerprint: str, inputs: Handles, stage: str = "", **given: Any
    ) -> str:
        content = {
            "variant": "default",
            "index": 1,
            "config": {"learning_rate": 1e-3, "sampler": {"top_p": 0.9}},
            "seed": 7,
            "prefect_url": "http://prefect/run",
        }
        return tracker.start_stage(
            node=node, stage=stage or node, recipe_run=recipe_run, fingerprint=fingerprint, inputs=inputs, **{**content, **given}
        )

    def finish(self, tracker: Tracker, run: str, recipe_run: str, node: str, result: StageResult, log: Path | None = None) -> None:
        tracker.finish_stage(run, recipe_run=recipe_run, node=node, result=result, status="FINISHED", log=log)

    def play(self, tracker: Tracker, **recipe_run: Any) -> Played:
        """Curation is not part of it: the stage reads traces that nobody tracked."""
        home = self.home
        base = self.checkpoint(home / "base", "base", name="base", producer="given")
        traces = self.dataset(home / "traces.parquet", name="curation.traces", producer=RATES)
        recipe = self.start_recipe(tracker, overrides={"cold_start.learning_rate": "1e-3"}, **recipe_run)
        folder = self.folder("cold_start", TUNED)
        tuned = self.made("cold_start", TUNED, "tuned")
        run = self.start(tracker, recipe, node="cold_start", fingerprint=TUNED, inputs={"model": base, "traces": traces})
        forwarder = tracker.follow(run, folder / "metrics.jsonl")
        file = self.records(
            folder,
            {"time": 10.0, "step": 1, "metrics": {"train/loss": 2.0, "bad@name": 1.0}},
            {"time": 11.0, "progress": [1, 2, "step"]},
            {"time": 12.0, "step": 2, "metrics": {"train/loss": 1.0}},
        )
        with file.open("a") as half:
            half.write('{"time": 13.0, "step": 3, "met')
        (folder / "log.txt").write_text("it went well\n")
        forwarder.close()
        finished = self.result("cold_start", TUNED, {"model": tuned}, {"train/loss": 1.0, "train/examples": 5.0, "broken": float("inf")})
        self.finish(tracker, run, recipe, "cold_start", finished, folder / "log.txt")

        scores = {"eval/easy_non_thinking": 0.25, "eval/hard_one_thinking": 0.5, "length/easy_thinking": 12.0, "eval/easy_budget_16": 0.125}
        folder, node = self.folder("evaluation", SCORED), "evaluation_cold_start"
        inputs = {"model": tuned, "benchmarks": self.dataset(home / "benchmarks.parquet", name="curation.benchmarks", producer=RATES)}
        evaluation = self.start(tracker, recipe, node=node, stage="evaluation", fingerprint=SCORED, inputs=inputs, index=2)
        self.records(folder, {"time": 20.0, "step": 0, "metrics": scores})
        samples = self.dataset(folder / "samples.parquet", name=f"{node}.samples", producer=SCORED)
        self.finish(tracker, evaluation, recipe, node, self.result("evaluation", SCORED, {"samples": samples}, scores), folder / "log.txt")
        self.close(tracker, recipe)
        return Played(recipe, run, evaluation, base, tuned)

    def close(self, tracker: Tracker, recipe: str) -> None:
        """End a recipe with a table of two rows and a figure."""
        cell = Cell(benchmark="easy", mode="thinking", mean=0.5, low=0.4, high=0.6, n_problems=4, n_samples=8)
        common = {"format_rate": 1.0, "flag_rate": None, "preference_win_rate": None, "preference_p": None, "tokens": 10, "seconds": 1.0}
        base_row = Row(node="base", parent=None, cells=(cell._replace(mean=0.1),), **common)
        rows = (base_row, base_row._replace(node="cold_start", parent="base", cells=(cell,)))
        figure = self.home / "table.png"
        figure.write_bytes(b"png")
        tracker.finish_recipe(recipe, table=AblationTable(rows), figure=figure, table_json=None, status="FINISHED")


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


class Store:
    """What a store holds in the experiment of the story."""

    def __init__(self, uri: str) -> None:
        self.client = MlflowClient(uri)

    @property
    def experiment(self) -> str:
        found = self.client.get_experiment_by_name("small")
        assert found is not None
        return str(found.experiment_id)

    def runs(self) -> dict[str, Run]:
        """Run name to run."""
        return {run.info.run_name: self.client.get_run(run.info.run_id) for run in self.client.search_runs([self.experiment])}

    def tags(self, run: str) -> Mapping[str, str]:
        tags: dict[str, str] = self.client.get_run(run).data.tags
        return tags

    def note(self, run: str) -> str:
        return self.tags(run)["mlflow.note.content"]

    def history(self, run: str, metric: str) -> list[tuple[int, float]]:
        return sorted((point.step, point.value) for point in self.client.get_metric_history(run, metric))

    def artifact(self, run: str, path: str) -> str:
        return Path(self.client.download_artifacts(run, path)).read_text()


@pytest.fixture
def store(uri: str) -> Store:
    return Store(uri)
