"""How runs end and go on: Ctrl-C, servers that are away for a while in mid-training, a home without room, two homes on one store."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

RECIPE = """
name: small
stages:
  base_pretraining:
    {vocabulary: 300, hidden_size: 32, layers: 1, heads: 2, kv_heads: 1, steps: STEPS, blocks_per_step: 2, block_tokens: 32,
     learning_rate: 1.0e-3, bf16: false}
"""
CURATIONS = """
  second:
    stage: curation
    sources: [{kind: reasoning_gym, family: chain_sum, size: 60, parameters: {min_terms: 4, max_terms: 5}}]
    benchmarks: {sums: [{kind: reasoning_gym, family: chain_sum, size: 20, parameters: {min_terms: 4, max_terms: 5}}]}
    benchmark_size: 8
    pools: {cold_start: {share: 0.25, with_trace: true}, rl: {share: 0.25}, preference: {share: 0.25}, distillation: {share: 0.25}}
"""
TRAINING = r"(?m)^> base_pretraining +started"

pytestmark = pytest.mark.slow


def recipe(folder: Path, steps: int) -> str:
    path = folder / "small.yaml"
    path.write_text(RECIPE.replace("STEPS", str(steps)))
    return str(path)


def wait_for_file(command: Any, pattern: str) -> None:
    """Until a file of that form is there."""
    while not list(command.home.glob(pattern)):
        assert command.read(time.monotonic() + 0.1), command.said


def records(home: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in (home / "runs").glob("*.json")}


def test_run_interrupted_is_cancelled_on_both_sides_and_resumes(tmp_path: Path, posttrain: Callable[..., Any]) -> None:
    home, small = tmp_path / "home", recipe(tmp_path, 20_000)
    command = posttrain(home, "run", small)
    assert command.wait_for(TRAINING), command.said
    wait_for_file(command, "stages/*/*/trainer/train/checkpoint-*/trainer_state.json")
    stage = [process for process in command.processes() if "forkserver" in process.command]
    assert len(stage) == 2, stage
    command.process.send_signal(signal.SIGINT)
    pressed = time.monotonic()
    while {process.pid for process in command.processes()} & {process.pid for process in stage if process.parent in {s.pid for s in stage}}:
        assert time.monotonic() - pressed < 15, "the stage outlives Ctrl-C"
        command.read(time.monotonic() + 0.1)
    assert command.end() == 130, command.said
    assert "Finished stages are kept; the same command continues from here" in command.said
    assert command.processes() == []
    assert command.states() == {
        "prefect": {"small-1: default": ["CANCELLED"], "base_pretraining": ["CANCELLED"]},
        "mlflow": {"small-1:default": ["KILLED"], "base_pretraining:default": ["KILLED"]},
    }
    assert records(home)["small-1"]["status"] == "cancelled"
    plan = posttrain(home, "plan", small)
    assert plan.end() == 0
    assert "resume" in plan.said
    assert "stopped after checkpoint-" in plan.said


def test_run_with_both_servers_away_in_mid_training_goes_on_and_all_arrives(tmp_path: Path, posttrain: Callable[..., Any]) -> None:
    servers, home = tmp_path / "servers", tmp_path / "home"
    up = posttrain(servers, "up")
    assert up.wait_for("Ctrl-C"), up.said
    running = json.loads((servers / "servers.json").read_text())["running"]
    addresses = {"PREFECT_API_URL": running["prefect"], "MLFLOW_TRACKING_URI": running["mlflow"]}
    command = posttrain(home, "run", recipe(tmp_path, 9_000), **addresses)
    assert command.wait_for(TRAINING), command.said
    wait_for_file(command, "stages/*/*/trainer/train/checkpoint-*/trainer_state.json")
    up.process.send_signal(signal.SIGTERM)  # both servers are gone now, for as long as they take to come back
    up.end()
    metrics = next(home.glob("stages/*/*/metrics.jsonl"))
    before = metrics.stat().st_size
    away = time.monotonic()
    while metrics.stat().st_size == before:
        assert command.read(time.monotonic() + 0.1), command.said
        assert time.monotonic() - away < 60, "training stands still without its servers"
    up = posttrain(servers, "up")
    assert up.wait_for("Ctrl-C"), up.said
    assert command.end() == 0, command.said
    sync = posttrain(home, "sync", **addresses)
    assert sync.end() == 0
    assert " 0 left" in sync.said
    states = up.states()
    assert states["prefect"] == {"small-1: default": ["COMPLETED"], "base_pretraining": ["COMPLETED"]}
    assert states["mlflow"] == {"small-1:default": ["FINISHED"], "base_pretraining:default": ["FINISHED"]}
    logged = {(record["step"], name) for record in map(json.loads, metrics.read_text().splitlines()) for name in record.get("metrics", {})}
    assert stored(servers) >= logged


def test_run_retried_on_the_page_continues_and_mixes_no_stages(tmp_path: Path, posttrain: Callable[..., Any]) -> None:
    home, small = tmp_path / "home", recipe(tmp_path, 6_000)
    with Path(small).open("a") as file:
        file.write(CURATIONS)
    up = posttrain(home, "up")
    assert up.wait_for("Ctrl-C"), up.said
    api = json.loads((home / "servers.json").read_text())["running"]["prefect"]
    asked = prefect(api, f"run_deployment('post-training/recipe', parameters={{'recipe': {small!r}}}, timeout=0).id")
    wait_for_file(up, "stages/*/*/trainer/train/checkpoint-*/trainer_state.json")
    servers = [process.pid for process in up.processes() if "forkserver" in process.command]
    for process in up.processes():
        if process.parent in servers:
            os.kill(process.pid, signal.SIGKILL)
    wait_for_state(up, api, asked, "FAILED")
    log = home / "logs" / "worker.log"
    while "Process exited with status code" not in log.read_text():  # until then Prefect takes the exit for a crash of the retry
        up.read(time.monotonic() + 0.2)
    up.read(time.monotonic() + 2.0)
    prefect(api, f"get_client(sync_client=True).set_flow_run_state({asked!r}, AwaitingRetry(), force=True).status")
    wait_for_state(up, api, asked, "COMPLETED")
    assert up.states()["prefect"] == {
        "small-2: default": ["COMPLETED"], "base_pretraining": ["FAILED", "COMPLETED"], "second": ["COMPLETED"],
    }  # fmt: skip
    assert {name: (record["status"], len(record["nodes"])) for name, record in records(home).items()} == {
        "small-1": ("failed", 0), "small-2": ("finished", 2),
    }  # fmt: skip


def prefect(api: str, expression: str) -> str:
    """The value of an expression in a process of its own that talks to the server."""
    code = (
        "from prefect.deployments import run_deployment; from prefect.client.orchestration import get_client\n"
        f"from prefect.states import AwaitingRetry; print({expression})"
    )
    environment = os.environ | {"PREFECT_API_URL": api, "PREFECT_LOGGING_LEVEL": "CRITICAL"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait_for_state(up: Any, api: str, run: str, wanted: str) -> None:
    deadline = time.monotonic() + 180
    while (state := prefect(api, f"get_client(sync_client=True).read_flow_run({run!r}).state.type.value")) != wanted:
        assert time.monotonic() < deadline, f"{state} after three minutes, not {wanted}: {up.said}"
        up.read(time.monotonic() + 1.0)


def stored(home: Path) -> set[tuple[int, str]]:
    """Step and name of every metric in MLflow's store."""
    with sqlite3.connect(f"file:{home}/mlflow.db?mode=ro", uri=True) as mlflow:
        return set(mlflow.execute("SELECT step, key FROM metrics"))


def test_run_in_a_home_that_cannot_be_written_names_it_and_the_remedy(tmp_path: Path, posttrain: Callable[..., Any]) -> None:
    (tmp_path / "file").write_text("not a folder")
    command = posttrain(tmp_path / "file", "run", recipe(tmp_path, 10))
    assert command.end() == 1, command.said
    assert "Traceback" not in command.said
    assert str(tmp_path / "file") in command.said.replace("\n", "")
    assert "POSTTRAIN_HOME" in command.said


def test_run_on_a_full_disk_says_so_and_goes_on_when_there_is_room(tmp_path: Path, posttrain: Callable[..., Any]) -> None:
    disk, small = tmp_path / "disk", recipe(tmp_path, 600)
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be made here: {mounted.stderr.strip()}")
    try:
        command = posttrain(disk / "home", "run", small)
        assert command.wait_for(TRAINING), command.said
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(2**16))
        assert command.end() == 1, command.said
        assert "No space left" in command.said or "is full" in command.said
        filler.unlink()
        again = posttrain(disk / "home", "run", small)
        assert again.end() == 0, again.said
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_run_of_a_second_home_on_one_store_is_refused_before_anything_runs(tmp_path: Path, posttrain: Callable[..., Any]) -> None:
    first, second, small = tmp_path / "first", tmp_path / "second", recipe(tmp_path, 20)
    store = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/shared.db"}
    done = posttrain(first, "run", small, **store)
    assert done.end() == 0, done.said
    refused = posttrain(second, "run", small, **store)
    assert refused.end() == 1, refused.said
    said = " ".join(refused.said.split())
    assert "Traceback" not in said
    assert str(first) in said.replace(" ", "")
    assert not list(second.glob("stages/*/*"))
    assert os.path.exists(next(first.glob("stages/*/*/checkpoint")))


def test_same_stage_asked_for_twice_at_once_runs_once(tmp_path: Path, posttrain: Callable[..., Any]) -> None:
    home, small = tmp_path / "home", recipe(tmp_path, 3_000)
    first = posttrain(home, "run", small)
    assert first.wait_for(TRAINING), first.said
    second = posttrain(home, "run", small)
    assert second.end() == 0, second.said
    assert first.end() == 0, first.said
    assert "base_pretraining is being run by process" in second.said
    assert "= base_pretraining" in second.said
    assert sorted(state for states in first.states()["prefect"].values() for state in states) == ["COMPLETED"] * 3


def test_forced_stage_keeps_the_earlier_result_and_gc_frees_what_nothing_needs(tmp_path: Path, posttrain: Callable[..., Any]) -> None:
    home, small = tmp_path / "home", recipe(tmp_path, 20)
    for options in ([], ["--force"], ["--set", "base_pretraining.steps=21"]):
        done = posttrain(home, "run", small, *options)
        assert done.end() == 0, done.said
    folders = sorted(path.name for path in (home / "stages" / "base_pretraining").iterdir() if path.is_dir())
    aside = [name for name in folders if ".before-" in name]
    assert len(aside) == 1
    assert len(folders) == 3
    said = posttrain(home, "gc", "--keep", "1")
    assert said.end() == 0, said.said
    assert "posttrain gc --really" in said.said
    assert sorted(path.name for path in (home / "stages" / "base_pretraining").iterdir() if path.is_dir()) == folders
    done = posttrain(home, "gc", "--keep", "1", "--really")
    assert done.end() == 0, done.said
    left = {path.name: path for path in (home / "stages" / "base_pretraining").iterdir() if path.is_dir()}
    newest = records(home)["small-3"]["nodes"]["base_pretraining"]["fingerprint"][:16]
    assert {name: (path / "checkpoint").exists() for name, path in left.items()} == {newest: True, aside[0].partition(".")[0]: False}
    assert all((path / "result.json").exists() for path in left.values())
    plan = posttrain(home, "plan", small)
    assert plan.end() == 0
    assert "checkpoint is gone" in " ".join(plan.said.split())
