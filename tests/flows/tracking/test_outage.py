"""Nothing is lost and nothing is there twice when MLflow does not answer: away from the start, in between, or hung."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from flows.tracking import Tracker
from flows.tracking.outbox import Outbox


def test_mlflow_away_keeps_everything_and_sync_sends_it_once(
    away: str, uri: str, tmp_path: Path, story: Any, store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "posttrain"):
        story.play(Tracker(away, "small", tmp_path))
    told = [record.message for record in caplog.records if record.name == "posttrain"]
    assert len(told) == 1
    assert away in told[0]
    assert "posttrain sync" in told[0]

    assert Tracker.sync(uri, tmp_path).left == 0
    found = store.runs()
    assert {run.info.status for run in found.values()} == {"FINISHED"}
    assert store.history(found["cold_start:default"].info.run_id, "train/loss") == [(1, 2.0), (2, 1.0)]
    assert store.history(found["small:default"].info.run_id, "ablation/easy_thinking") == [(0, 0.1), (1, 0.5)]
    assert found["evaluation_cold_start:default"].data.tags["mlflow.parentRunId"] == found["cold_start:default"].info.run_id
    assert Tracker.sync(uri, tmp_path) == (0, 0)
    assert len(store.runs()) == len(found)


def test_metrics_written_while_away_are_sent_by_sync(uri: str, away: str, tmp_path: Path, story: Any, store: Any) -> None:
    played = story.play(Tracker(uri, "small", tmp_path))
    file = story.folder("cold_start", story.tuned) / "metrics.jsonl"
    file.write_text(file.read_text().rsplit("\n", 1)[0] + '\n{"time": 14.0, "step": 3, "metrics": {"train/loss": 0.5}}\n')
    assert not Tracker(away, "small", tmp_path).follow(played.stage, file).close()
    assert Tracker.sync(uri, tmp_path) == (1, 0)
    assert store.history(played.stage, "train/loss") == [(1, 2.0), (2, 1.0), (3, 0.5)]


def test_metrics_of_a_resumed_attempt_hold_each_step_once_as_written_last(uri: str, tmp_path: Path, story: Any, store: Any) -> None:
    tracker = Tracker(uri, "small", tmp_path)
    run = story.start(tracker, story.start_recipe(tracker), node="cold_start", fingerprint=story.tuned, inputs={})
    steps = ({"time": float(step), "step": step, "metrics": {"train/loss": float(step)}} for step in (1, 2, 3))
    file = story.records(story.folder("cold_start", story.tuned), *steps)
    forwarder = tracker.follow(run, file)
    with file.open("a") as again:  # from a checkpoint of step 1, other than before
        for step in (2, 3, 4):
            again.write(json.dumps({"time": 10.0 + step, "step": step, "metrics": {"train/loss": 10.0 + step}}) + "\n")
    assert forwarder.close()
    assert store.history(run, "train/loss") == [(1, 1.0), (2, 12.0), (3, 13.0), (4, 14.0)]
    assert Tracker.sync(uri, tmp_path) == (0, 0)


def test_call_cut_short_by_a_kill_loses_no_other_call(away: str, uri: str, tmp_path: Path, story: Any, store: Any) -> None:
    story.start_recipe(Tracker(away, "small", tmp_path), variant="first")
    kept = tmp_path / "tracking" / "unsent.jsonl"
    with kept.open("a") as file:
        file.write('{"recipe": "small", "name": "start_rec')
    story.start_recipe(Tracker(away, "small", tmp_path), variant="second")
    assert len(Outbox(tmp_path)) == 2
    assert Tracker.sync(uri, tmp_path) == (2, 0)
    assert set(store.runs()) == {"small:first", "small:second"}


def test_call_sent_again_after_it_half_went_opens_no_second_run(away: str, uri: str, tmp_path: Path, story: Any, store: Any) -> None:
    tracker = Tracker(away, "small", tmp_path)
    recipe = story.start_recipe(tracker)
    tracker.finish_recipe(recipe, table=None, figure=None, table_json=None, status="FINISHED")
    kept = tmp_path / "tracking" / "unsent.jsonl"
    calls = kept.read_text()
    assert Tracker.sync(uri, tmp_path) == (2, 0)
    (run,) = store.runs().values()
    kept.write_text(calls)  # as when the process was killed before it could note that the calls went
    (tmp_path / "tracking" / "runs.json").unlink()
    store.client.create_run(store.experiment, tags={"call": run.data.tags["call"]})  # a hung server took the request twice
    assert Tracker.sync(uri, tmp_path) == (2, 0)
    (left,) = store.client.search_runs([store.experiment])
    assert left.info.status == "FINISHED"


@contextlib.contextmanager
def server(home: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """An MLflow server that answers, on the store of the home."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    settings = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "PYTHONSAFEPATH": "1"}
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--backend-store-uri", f"sqlite:///{home}/mlflow.db"],
            env={**{name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}, **settings},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while not answers(address):
            assert process.poll() is None, (home / "server.log").read_text()
            assert time.monotonic() < deadline
        yield address, process
    finally:
        for number in (signal.SIGCONT, signal.SIGKILL):
            os.killpg(process.pid, number)
        process.wait()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5):
            return True
    except OSError:
        return False


@pytest.mark.slow
def test_mlflow_hung_for_a_while_stops_nothing_and_loses_nothing(
    uri: str, tmp_path: Path, story: Any, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    with server(tmp_path) as (address, process):
        tracker = Tracker(address, "small", tmp_path)
        recipe = story.start_recipe(tracker)
        file = story.records(story.folder("fusion", "7" * 64), {"time": 1.0, "step": 1, "metrics": {"train/loss": 1.0}})
        run = story.start(tracker, recipe, node="fusion", fingerprint="7" * 64, inputs={})
        forwarder = tracker.follow(run, file)
        os.killpg(process.pid, signal.SIGSTOP)
        with file.open("a") as more:
            more.write('{"time": 2.0, "step": 2, "metrics": {"train/loss": 0.5}}\n')
        began = time.monotonic()
        forwarder.close(timeout_s=1.0)
        closing = time.monotonic() - began
        began = time.monotonic()
        played = story.play(tracker, variant="hung")
        story.finish(tracker, run, recipe, "fusion", story.result("fusion", "7" * 64, {}, {}), file.with_name("log.txt"))
        tracker.finish_recipe(recipe, table=None, figure=None, table_json=None, status="FINISHED")
        telling = time.monotonic() - began
        tracker.reap()
        assert tracker.links(recipe) == {}
        os.killpg(process.pid, signal.SIGCONT)
        assert answers(address)
        assert Tracker.sync(address, tmp_path).left == 0
    assert closing < 2.0
    assert telling < 30.0
    found = store.client.search_runs([store.experiment])
    names = sorted(str(run.info.run_name) for run in found)
    print(f"closing {closing:.1f} s, a whole recipe told to a hung server {telling:.1f} s, runs {names}")
    assert names == sorted(["small:default", "fusion:default", "small:hung", "base", "cold_start:default", "evaluation_cold_start:default"])
    assert {item.info.status for item in found} == {"FINISHED"}
    assert store.history(run, "train/loss") == [(1, 1.0), (2, 0.5)]
    real = Outbox(tmp_path).real(played.stage)
    assert MlflowClient(uri).get_run(real).data.metrics["eval/hard_one_thinking"] == 0.5
