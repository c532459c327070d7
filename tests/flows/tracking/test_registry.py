"""Released checkpoints: versions and aliases, and freeing what none of them protects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.tracking import Tracker
from stages.errors import ServerError


def versions(store: Any) -> dict[str, str]:
    """Alias to the digest of the version that it points to."""
    model = store.client.get_registered_model("small")
    return {alias: store.client.get_model_version("small", version).tags["digest"] for alias, version in model.aliases.items()}


def test_release_gives_each_checkpoint_a_version_with_its_origin(uri: str, tmp_path: Path, story: Any, store: Any) -> None:
    tracker = Tracker(uri, "small", tmp_path)
    played = story.play(tracker, run="small-1")
    tracker.release(played.recipe, {"final": played.tuned, "start": played.base})
    tracker.release(played.recipe, {"final": played.tuned, "start": played.base})  # sent a second time
    assert versions(store) == {"final": played.tuned.digest, "start": played.base.digest}
    found = store.client.search_model_versions("name = 'small'")
    assert len(found) == 2
    (version,) = [item for item in found if item.tags["digest"] == played.tuned.digest]
    origin = {"recipe_run": played.recipe, "run": "small-1", "variant": "default", "node": "cold_start"}
    assert version.tags == origin | {"digest": played.tuned.digest}
    (model,) = store.client.search_logged_models([store.experiment], filter_string="tags.node = 'cold_start'")
    assert (version.source, version.run_id) == (f"models:/{model.model_id}", played.stage)
    assert store.client.get_registered_model("small").description
    assert store.note(played.recipe).count("[final: cold_start.model](#/models/small/versions/") == 1
    assert store.note(played.recipe).startswith("| stage |")


def test_release_of_another_run_moves_the_alias(uri: str, tmp_path: Path, story: Any, store: Any) -> None:
    tracker = Tracker(uri, "small", tmp_path)
    played = story.play(tracker)
    tracker.release(played.recipe, {"final": played.base})
    tracker.release(played.recipe, {"final": played.tuned})
    assert versions(store) == {"final": played.tuned.digest}
    assert tracker.aliased() == {played.tuned.digest}


def test_release_of_an_unknown_checkpoint_is_told_and_the_others_are_released(
    uri: str, tmp_path: Path, story: Any, store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker(uri, "small", tmp_path)
    played = story.play(tracker)
    unknown = story.made("fusion", "9" * 64, "never tracked")
    tracker.release(played.recipe, {"student": unknown, "final": played.tuned})
    assert versions(store) == {"final": played.tuned.digest}
    assert "is not among the checkpoints" in caplog.text


def test_release_while_mlflow_is_away_protects_at_once_and_arrives_by_sync(
    uri: str, away: str, tmp_path: Path, story: Any, store: Any
) -> None:
    tracker = Tracker(away, "small", tmp_path)
    played = story.play(tracker)
    tracker.release(played.recipe, {"final": played.tuned})
    assert Tracker(uri, "small", tmp_path).aliased() == {played.tuned.digest}
    assert Tracker.sync(uri, tmp_path).left == 0
    assert versions(store) == {"final": played.tuned.digest}


def test_aliased_includes_a_version_that_was_made_by_hand(uri: str, tmp_path: Path, story: Any, store: Any) -> None:
    tracker = Tracker(uri, "small", tmp_path)
    played = story.play(tracker)
    assert tracker.aliased() == frozenset()
    (model,) = store.client.search_logged_models([store.experiment], filter_string="tags.node = 'cold_start'")
    store.client.create_registered_model("mine")
    version = store.client.create_model_version("mine", source=f"models:/{model.model_id}")
    assert tracker.aliased() == frozenset()
    store.client.set_registered_model_alias("mine", "champion", version.version)
    assert tracker.aliased() == {played.tuned.digest}


def test_aliased_and_forget_refuse_when_mlflow_cannot_say(away: str, tmp_path: Path) -> None:
    tracker = Tracker(away, "small", tmp_path)
    with pytest.raises(ServerError, match="cannot say"):
        tracker.aliased()
    with pytest.raises(ServerError, match="cannot say"):
        tracker.forget(["0" * 64])


def test_forget_deletes_files_and_model_and_leaves_the_metrics(uri: str, tmp_path: Path, story: Any, store: Any) -> None:
    tracker = Tracker(uri, "small", tmp_path)
    played = story.play(tracker)
    tracker.release(played.recipe, {"final": played.tuned})
    tracker.release(played.recipe, {"final": played.base})  # the version of `tuned` has no alias any more
    (model,) = store.client.search_logged_models([store.experiment], filter_string="tags.node = 'cold_start'")
    stored = Path(model.artifact_location.removeprefix("file://"))
    for file in played.tuned.path.iterdir():
        file.unlink()  # as when the stage's folder was deleted first: only the store holds the content
    size = sum(file.stat().st_size for file in stored.iterdir())
    assert tracker.forget([played.tuned.digest, played.tuned.digest]) == size > 0
    assert not stored.exists()
    assert store.client.search_logged_models([store.experiment], filter_string="tags.node = 'cold_start'") == []
    assert [item.tags["digest"] for item in store.client.search_model_versions("name = 'small'")] == [played.base.digest]
    assert store.history(played.stage, "train/loss") == [(1, 2.0), (2, 1.0)]
    assert tracker.find_stage(story.tuned) == played.stage
    assert tracker.forget([played.tuned.digest]) == 0


def test_forget_counts_no_bytes_that_a_stage_folder_still_holds(uri: str, tmp_path: Path, story: Any) -> None:
    tracker = Tracker(uri, "small", tmp_path)
    played = story.play(tracker)
    assert tracker.forget([played.tuned.digest]) == 0
    assert (played.tuned.path / "model.safetensors").read_text() == "tuned"


def test_forget_never_touches_an_alias_or_what_lies_outside_the_store(uri: str, tmp_path: Path, story: Any, store: Any) -> None:
    tracker = Tracker(uri, "small", tmp_path)
    played = story.play(tracker)
    tracker.release(played.recipe, {"final": played.tuned})
    assert tracker.forget([played.tuned.digest]) == 0
    (model,) = store.client.search_logged_models([store.experiment], filter_string="tags.node = 'cold_start'")
    assert (Path(model.artifact_location.removeprefix("file://")) / "model.safetensors").read_text() == "tuned"

    outside = tmp_path / "elsewhere"
    experiment = store.client.create_experiment("foreign", artifact_location=outside.as_uri())
    host_and_home = store.client.get_experiment(store.experiment).tags["posttrain.home"]
    store.client.set_experiment_tag(experiment, "posttrain.home", host_and_home)
    foreign = store.client.create_logged_model(experiment, name="foreign", tags={"digest": "5" * 64})
    kept = Path(foreign.artifact_location.removeprefix("file://"))
    kept.mkdir(parents=True)
    (kept / "weights").write_text("mine")
    assert tracker.forget(["5" * 64]) == 0
    assert (kept / "weights").read_text() == "mine"


def test_forget_leaves_the_checkpoints_of_another_home_alone(uri: str, tmp_path: Path, story: Any, store: Any) -> None:
    played = story.play(Tracker(uri, "small", tmp_path))
    other = Tracker(uri, "other", tmp_path / "other")
    assert other.forget([played.tuned.digest]) == 0
    assert len(store.client.search_logged_models([store.experiment], filter_string="tags.node = 'cold_start'")) == 1
