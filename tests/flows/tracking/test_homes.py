"""Two project homes on one tracking database, and runs whose process is gone."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.tracking import Tracker
from stages.errors import ServerError


def test_home_of_another_project_on_this_machine_is_refused_before_anything_starts(
    uri: str, tmp_path: Path, story: Any, store: Any
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    story.start_recipe(Tracker(uri, "small", first))
    with pytest.raises(ServerError) as refused:
        story.start_recipe(Tracker(uri, "small", second))
    for part in (str(first), str(second), "MLFLOW_TRACKING_URI", f"POSTTRAIN_HOME={first}"):
        assert part in str(refused.value)
    assert list(store.runs()) == ["small:default"]
    story.start_recipe(Tracker(uri, "small", first), variant="again")
    assert len(store.runs()) == 2


@pytest.mark.parametrize("written_by", ["", "another-machine:/srv/posttrain", f"{socket.gethostname()}:/no/such/folder"])
def test_home_that_is_unknown_gone_or_elsewhere_is_no_hindrance(uri: str, tmp_path: Path, story: Any, store: Any, written_by: str) -> None:
    experiment = store.client.create_experiment("small")
    if written_by:
        store.client.set_experiment_tag(experiment, "posttrain.home", written_by)
    story.start_recipe(Tracker(uri, "small", tmp_path))
    assert list(store.runs()) == ["small:default"]
    mine = f"{socket.gethostname()}:{tmp_path.resolve()}"
    expected = written_by if written_by.startswith("another") else mine
    assert store.client.get_experiment(experiment).tags["posttrain.home"] == expected


def test_home_that_was_moved_takes_its_experiment_along(uri: str, tmp_path: Path, story: Any, store: Any) -> None:
    story.start_recipe(Tracker(uri, "small", tmp_path / "old"))
    shutil.move(tmp_path / "old", tmp_path / "new")
    story.start_recipe(Tracker(uri, "small", tmp_path / "new"), variant="second")
    assert len(store.runs()) == 2


def gone() -> str:
    """The owner mark of a process of this machine that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return f"{socket.gethostname()}:{process.pid}:1"


def test_reap_closes_runs_of_dead_processes_only(uri: str, tmp_path: Path, story: Any, store: Any) -> None:
    tracker, owner = Tracker(uri, "small", tmp_path), gone()
    alive = story.start_recipe(tracker, variant="alive")
    dead = story.start_recipe(tracker, run="small-2", kind="ablation", variant="dead")
    evaluation = story.start(tracker, dead, node="evaluation_base", stage="evaluation", fingerprint=story.scored, inputs={})
    elsewhere = story.start_recipe(tracker, variant="elsewhere")
    samples = store.client.create_run(
        store.client.create_experiment("small.samples"), tags={"kind": "samples"}, run_name="samples"
    ).info.run_id
    for run in (dead, evaluation, samples):
        store.client.set_tag(run, "owner", owner)
    store.client.set_tag(elsewhere, "owner", "another-machine:1:1")
    tracker.reap()
    assert {store.client.get_run(run).info.status for run in (dead, evaluation, samples)} == {"KILLED"}
    assert {store.client.get_run(run).info.status for run in (alive, elsewhere)} == {"RUNNING"}


@pytest.mark.parametrize("door", ["sync", "the next run"])
def test_run_that_mlflow_opens_after_its_process_has_died_is_closed(
    uri: str, away: str, tmp_path: Path, story: Any, store: Any, monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("flows.tracking.tracker.process_identity", gone)
        tracker = Tracker(away, "small", tmp_path)
        story.start(tracker, story.start_recipe(tracker), node="cold_start", fingerprint=story.tuned, inputs={})
    if door == "sync":
        assert Tracker.sync(uri, tmp_path) == (2, 0)
    else:
        Tracker(uri, "small", tmp_path).reap()
    assert {run.info.status for run in store.runs().values()} == {"KILLED"}
    assert len(store.runs()) == 2


def test_reap_without_an_experiment_makes_none(uri: str, tmp_path: Path, store: Any) -> None:
    Tracker(uri, "small", tmp_path).reap()
    assert store.client.get_experiment_by_name("small") is None


@pytest.mark.slow
def test_reap_of_more_runs_than_a_page_holds_closes_all(uri: str, tmp_path: Path, store: Any) -> None:
    experiment, owner = store.client.create_experiment("small"), gone()
    for _ in range(1_010):
        store.client.create_run(experiment, tags={"owner": owner})
    Tracker(uri, "small", tmp_path).reap()
    assert len(store.client.search_runs([experiment], "attributes.status = 'RUNNING'")) == 0
