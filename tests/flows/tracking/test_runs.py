"""What a recipe leaves in MLflow, against a real SQLite store: the layout of runs, checkpoints linked in place, kinds and labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from flows.tracking import Tracker
from flows.tracking.entries import params
from stages.artifacts import CheckpointRef


def test_recipe_tracked_leaves_the_layout_of_runs(uri: str, tmp_path: Path, story: Any, store: Any) -> None:
    story.play(Tracker(uri, "small", tmp_path))
    found = store.runs()
    assert set(found) == {"small:default", "base", "cold_start:default", "evaluation_cold_start:default"}
    assert {run.info.status for run in found.values()} == {"FINISHED"}
    recipe, stage, evaluation = found["small:default"], found["cold_start:default"], found["evaluation_cold_start:default"]

    assert "mlflow.parentRunId" not in stage.data.tags  # nested runs would be hidden from filters
    assert stage.data.tags | {"kind": "stage", "stage": "01-cold_start", "node": "cold_start", "progress": "1 of 2 step"} == stage.data.tags
    assert stage.data.params == {"stage": "cold_start", "seed": "7", "learning_rate": "0.001", "sampler.top_p": "0.9"}
    assert store.history(stage.info.run_id, "train/loss") == [(1, 2.0), (2, 1.0)]
    assert stage.data.metrics["bad_name"] == 1.0
    assert stage.data.metrics["train/examples"] == 5.0
    assert "broken" not in stage.data.metrics
    assert stage.data.metrics["cost/seconds"] == 4.0
    digest = next(item.dataset.digest for item in stage.inputs.dataset_inputs if item.dataset.name == "curation.traces")
    assert len(digest) == 32

    assert evaluation.data.tags["mlflow.parentRunId"] == stage.info.run_id
    assert stage.data.metrics["eval/easy_non_thinking"] == 0.25
    assert stage.data.metrics["eval/hard_one_thinking"] == 0.5
    assert store.history(stage.info.run_id, "budget/easy") == [(16, 0.125)]

    assert store.history(recipe.info.run_id, "ablation/easy_thinking") == [(0, 0.1), (1, 0.5)]
    assert recipe.data.metrics["easy_thinking/base"] == 0.1
    assert recipe.data.metrics["final/easy_thinking"] == 0.5
    assert recipe.data.tags["stage_run.cold_start"] == stage.info.run_id
    assert recipe.data.tags["stage_run.base"] == found["base"].info.run_id
    assert f"[cold_start](#/experiments/{store.experiment}/runs/{stage.info.run_id}?" in store.note(recipe.info.run_id)
    table = json.loads(store.artifact(recipe.info.run_id, "ablation.json"))
    assert table["columns"][:2] == ["stage", "scores"]  # MLflow's comparison groups by the first column and shows the second
    assert table["data"][1][:3] == ["cold_start", "easy_thinking 0.500", 0.5]
    names = {item.path for item in store.client.list_artifacts(recipe.info.run_id)}
    assert {"recipe.yaml", "ablation.json", "table.png", "metrics_explained.yaml"} <= names


def test_report_of_a_stage_is_logged_and_its_parquet_files_are_tables(uri: str, tmp_path: Path, story: Any, store: Any) -> None:
    tracker, folder = Tracker(uri, "small", tmp_path), story.folder("cold_start", story.tuned)
    (folder / "report").mkdir()
    (folder / "report" / "funnel.png").write_bytes(b"png")
    parquet.write_table(pa.table({"question": ["1 + 1"], "other": ["1+1"]}), folder / "report" / "overlap.parquet")
    parquet.write_table(pa.table({"question": pa.array([], pa.string())}), folder / "report" / "nothing.parquet")
    recipe = story.start_recipe(tracker)
    run = story.start(tracker, recipe, node="cold_start", fingerprint=story.tuned, inputs={})
    for _ in range(2):  # a call may be sent again
        story.finish(tracker, run, recipe, "cold_start", story.result("cold_start", story.tuned, {}, {}), folder / "log.txt")
    assert {item.path for item in store.client.list_artifacts(run, "report")} == {"report/funnel.png", "report/overlap.json"}
    assert json.loads(store.artifact(run, "report/overlap.json")) == {"columns": ["question", "other"], "data": [["1 + 1", "1+1"]]}
    assert json.loads(store.tags(run)["mlflow.loggedArtifacts"]) == [{"path": "report/overlap.json", "type": "table"}]


def test_checkpoint_tracked_is_linked_in_place_with_lineage(uri: str, tmp_path: Path, story: Any, store: Any) -> None:
    played = story.play(Tracker(uri, "small", tmp_path))
    stage = store.runs()["cold_start:default"]
    models = {model.name: model for model in store.client.search_logged_models([store.experiment])}
    assert set(models) == {"base", "cold_start-default"}
    made, base = models["cold_start-default"], models["base"]
    stored = Path(made.artifact_location.removeprefix("file://")) / "model.safetensors"
    assert stored.samefile(played.tuned.path / "model.safetensors")
    assert not stored.stat().st_mode & 0o222
    assert str(made.status) == "READY"
    assert [item.model_id for item in stage.inputs.model_inputs] == [base.model_id]
    assert [item.model_id for item in stage.outputs.model_outputs] == [made.model_id]
    scores = {(metric.key, metric.dataset_name): metric.value for metric in made.metrics or []}
    assert scores[("accuracy_thinking", "hard_one")] == 0.5
    assert scores[("accuracy_non_thinking", "easy")] == 0.25


def test_stage_finished_is_found_by_fingerprint_and_reused(uri: str, tmp_path: Path, story: Any, store: Any) -> None:
    tracker = Tracker(uri, "small", tmp_path)
    played = story.play(tracker)
    assert tracker.find_stage(story.tuned) == played.stage
    assert tracker.find_stage("0" * 64) is None
    second = story.start_recipe(tracker, variant="second")
    tracker.reuse_stage(node="cold_start", index=1, recipe_run=second, run_id=played.stage)
    assert store.tags(second)["stage_run.cold_start"] == played.stage


def test_recipe_run_with_an_id_says_what_it_is_and_what_it_is_of(uri: str, tmp_path: Path, story: Any, store: Any) -> None:
    tracker = Tracker(uri, "small", tmp_path)
    plain = story.start_recipe(tracker, run="small-1")
    rerun = story.start_recipe(tracker, run="small-2", kind="rerun", of_run="small-1", variant="cold_start.epochs=2")
    ablation = story.start_recipe(tracker, run="small-3", kind="ablation", of_run="small-1", variant="loss=a,b")
    found = store.runs()
    assert set(found) == {"small-1:default", "small-2 rerun of small-1:cold_start.epochs=2", "small-3 ablation of small-1:loss=a,b"}
    kinds = {run: (store.tags(run)["kind"], store.tags(run)["run"], store.tags(run).get("of_run")) for run in (plain, rerun, ablation)}
    assert kinds == {
        plain: ("recipe", "small-1", None),
        rerun: ("rerun", "small-2", "small-1"),
        ablation: ("ablation", "small-3", "small-1"),
    }
    assert "rerun of small-1" in store.note(rerun)


def test_drift_accepted_is_marked_and_stays_in_the_note(uri: str, tmp_path: Path, story: Any, store: Any) -> None:
    tracker = Tracker(uri, "small", tmp_path)
    played = story.play(tracker, drift={"curation": "code of curation.py changed"})
    assert store.tags(played.recipe)["drift.curation"] == "code of curation.py changed"
    note = store.note(played.recipe)
    assert note.startswith("| stage |")
    assert "`curation` was reused in spite of a change: code of curation.py changed." in note


def test_variants_of_a_stage_have_labels_and_colours_of_their_own(uri: str, tmp_path: Path, story: Any, store: Any) -> None:
    tracker = Tracker(uri, "small", tmp_path)
    ablation = story.start_recipe(tracker, run="small-3", kind="ablation", variant="loss=a,b")
    for loss in ("a", "b"):
        for seed in (1, 2):
            fingerprint = f"{loss}{seed}".ljust(64, "0")
            label = f"cold_start:loss={loss} seed={seed}"
            run = story.start(
                tracker, ablation, node="cold_start", fingerprint=fingerprint, inputs={}, variant=f"cold_start.loss={loss}", label=label
            )
            made = story.made("cold_start", fingerprint, fingerprint)
            story.finish(tracker, run, ablation, "cold_start", story.result("cold_start", fingerprint, {"model": made}, {}))
    runs = {name: run for name, run in store.runs().items() if run.data.tags["kind"] == "stage"}
    assert sorted(runs) == [f"cold_start:loss={loss} seed={seed}" for loss in "ab" for seed in (1, 2)]
    colours = {name: run.data.tags["mlflow.runColor"] for name, run in runs.items()}
    assert colours["cold_start:loss=a seed=1"] == colours["cold_start:loss=a seed=2"]
    assert colours["cold_start:loss=a seed=1"] != colours["cold_start:loss=b seed=1"]
    names = {model.name for model in store.client.search_logged_models([store.experiment])}
    assert names == {f"cold_start_loss={loss} seed={seed}" for loss in "ab" for seed in (1, 2)}


def test_model_given_is_copied_through_links_and_left_as_it_was(uri: str, tmp_path: Path, story: Any, store: Any) -> None:
    blobs = tmp_path / "blobs"
    given = story.checkpoint(blobs, "base", name="base", producer="given")
    snapshot = tmp_path / "snapshot"  # as the hub's cache: relative links to blobs
    snapshot.mkdir()
    for file in blobs.iterdir():
        file.chmod(0o644)
        (snapshot / file.name).symlink_to(Path("..") / "blobs" / file.name)
    tracker = Tracker(uri, "small", tmp_path)
    recipe, inputs = story.start_recipe(tracker), {"model": given.model_copy(update={"path": snapshot})}
    story.start(tracker, recipe, node="evaluation_base", stage="evaluation", fingerprint=story.scored, inputs=inputs)
    (model,) = store.client.search_logged_models([store.experiment])
    stored = Path(model.artifact_location.removeprefix("file://")) / "model.safetensors"
    assert str(model.status) == "READY"
    assert stored.read_text() == "base"
    assert not stored.is_symlink()
    assert {(file.stat().st_mode & 0o777, file.stat().st_nlink) for file in blobs.iterdir()} == {(0o644, 1)}


def test_model_given_that_cannot_be_stored_leaves_its_stage_tracked(
    uri: str, tmp_path: Path, story: Any, store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    given = story.checkpoint(tmp_path / "base", "base", name="base", producer="given")
    (tmp_path / "base" / "notes.txt").symlink_to("gone")
    tracker = Tracker(uri, "small", tmp_path)
    recipe = story.start_recipe(tracker)
    run = story.start(tracker, recipe, node="evaluation_base", stage="evaluation", fingerprint=story.scored, inputs={"model": given})
    assert "did not take a record" in caplog.text
    (model,) = store.client.search_logged_models([store.experiment])
    assert (str(model.status), store.client.get_run(run).inputs.model_inputs[0].model_id) == ("FAILED", model.model_id)
    assert store.tags(run)["mlflow.parentRunId"] == store.runs()["base"].info.run_id


def test_record_refused_is_told_and_the_rest_is_written(
    uri: str, tmp_path: Path, story: Any, store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker(uri, "small", tmp_path)
    recipe = story.start_recipe(tracker)
    run = story.start(tracker, recipe, node="cold_start", fingerprint=story.tuned, inputs={})
    gone = CheckpointRef(name="cold_start.model", digest="0" * 64, path=tmp_path / "gone", producer=story.tuned)
    story.finish(tracker, run, recipe, "cold_start", story.result("cold_start", story.tuned, {"model": gone}, {"m": 1.0}))
    stage = store.client.get_run(run)
    assert stage.info.status == "FINISHED"
    assert stage.data.metrics["m"] == 1.0
    assert "did not take a record" in caplog.text
    assert tracker.links(recipe) == {}  # a store without a server has no pages


def test_secret_of_the_environment_is_nowhere_in_the_store(
    uri: str, tmp_path: Path, story: Any, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {"HF_TOKEN": "hf_plantedTokenOfThisTest", "POSTTRAIN_PASSWORD": "planted-password-of-this-test"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    tracker = Tracker(uri, "small", tmp_path)
    played = story.play(tracker)
    log = story.folder("cold_start", story.tuned) / "log.txt"
    log.write_text(f"401 for https://hub with {secrets['HF_TOKEN']}; signed in with {secrets['POSTTRAIN_PASSWORD']}\n")
    story.finish(tracker, played.stage, played.recipe, "cold_start", story.result("cold_start", story.tuned, {}, {}), log)
    assert store.artifact(played.stage, "log.txt") == "401 for https://hub with ***; signed in with ***\n"
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path != log]
    assert {"mlflow.db", "log.txt", "recipe.yaml", "result.json"} <= {path.name for path in files}
    assert [path for path in files for value in secrets.values() if value.encode() in path.read_bytes()] == []


def test_params_nested_config_becomes_dotted_scalars() -> None:
    found = {param.key: param.value for param in params({"a": {"b": 1, "c": [1, 2]}, "d": {}, "long": "x" * 900})}
    assert found == {"a.b": "1", "a.c": "[1, 2]", "d": "{}", "long": "x" * 500}
    assert params({}) == []
