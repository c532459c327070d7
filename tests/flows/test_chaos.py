"""Twenty kills over the recipe `tiny`, at seeded random moments, and the result of a run that nobody disturbed.

Killed with SIGKILL: the stage's process (with the engine in it), the process that stages are forked from, the
command, the Prefect server, the MLflow server, and everything at once. The recipe's sizes are cut down here.
POSTTRAIN_CHAOS=full takes them as they are, POSTTRAIN_CHAOS_BASE names a home in which the same recipe has finished
undisturbed, POSTTRAIN_CHAOS_REPORT a file for the figures.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flows.plan import make_plan, results_of
from flows.recipe import Recipe, load_recipe
from stages.artifacts import StageResult

KILLS = 20
LIMIT_S = 3600.0
TARGETS = ("stage", "fork server", "command", "Prefect", "MLflow", "everything")
GOES_ON = ("Prefect", "MLflow")
"""Servers that are started again while the command goes on."""
ENDED = {"COMPLETED", "CRASHED", "FAILED", "CANCELLED", "FINISHED", "KILLED"}
"""States of runs, in Prefect or MLflow, that claim no process."""
SMALL = (
    "evaluation.samples=2",
    "evaluation.thinking_budgets=[24]",
    "evaluation.budget_problems=8",
    "evaluation.flag_problems=8",
    "curation.benchmark_size=32",
    "cold_start.examples=96",
    "pass_rates.problems=64",
    "reasoning_rl.steps=8",
    "reasoning_rl.save_every=2",
    "rejection_sampling.problems=160",
    "fusion.examples=128",
    "fusion.epochs=1",
    "reward_model.prompts=64",
    "rlhf.steps=6",
    "rlhf.save_every=2",
    "distillation.examples=128",
    "distillation.epochs=1",
    "distillation.on_policy_steps=4",
    "distillation_control.examples=128",
    "distillation_control.epochs=1",
)
OVERRIDES = () if os.environ.get("POSTTRAIN_CHAOS") == "full" else SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]


def victims(target: str, command: Any) -> list[int]:
    """The processes to kill for a target; none when it is not there at this moment."""
    alive = command.processes()
    servers = {process.pid for process in alive if "forkserver" in process.command}
    found = {
        "stage": [process.pid for process in alive if process.parent in servers],
        "fork server": [process.pid for process in alive if process.pid in servers and process.parent not in servers],
        "command": [command.process.pid],
        "Prefect": [process.pid for process in alive if "prefect" in process.command and "posttrain run" not in process.command],
        "MLflow": [process.pid for process in alive if "mlflow" in process.command and "posttrain run" not in process.command],
        "everything": [process.pid for process in alive],
    }
    return found[target]


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def recipe() -> Recipe:
    return load_recipe("tiny", OVERRIDES)


def results(home: Path) -> dict[str, StageResult]:
    """The results of a home in which the whole recipe has finished."""
    steps = make_plan(recipe(), home)
    assert {step.action for step in steps} == {"reuse"}
    return results_of(steps)


def untimed(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics but those that are times."""
    return {name: value for name, value in metrics.items() if not name.endswith("step_time")}


def points(rng: random.Random) -> Iterator[tuple[str, str, float]]:
    """Target, node, and how far into it, in the order of the recipe: every node is hit, some twice."""
    nodes = [node.name for node in recipe().nodes]
    targets = [TARGETS[i % len(TARGETS)] for i in range(KILLS)]
    rng.shuffle(targets)
    for i, target in enumerate(targets):
        yield target, nodes[i * len(nodes) // KILLS], rng.random()


@pytest.fixture
def start(posttrain: Callable[..., Any]) -> Callable[[Path], Any]:
    """Starts the recipe in a home."""
    options = [part for override in OVERRIDES for part in ("--set", override)]
    return lambda home: posttrain(home, "run", "tiny", *options)


@pytest.fixture
def undisturbed(tmp_path: Path, start: Callable[[Path], Any]) -> dict[str, StageResult]:
    home = Path(os.environ.get("POSTTRAIN_CHAOS_BASE", tmp_path / "undisturbed"))
    if not home.exists():
        command = start(home)
        assert command.end() == 0, command.said
    return results(home)


def test_recipe_killed_twenty_times_ends_as_the_undisturbed_run(
    tmp_path: Path, undisturbed: dict[str, StageResult], start: Callable[[Path], Any], posttrain: Callable[..., Any]
) -> None:
    rng, home = random.Random(20), tmp_path / "chaos"
    command, report = start(home), []
    for target, node, share in points(rng):
        while not command.wait_for(rf"(?m)^[>=] {node} "):  # an earlier kill ended the command: the user runs it again
            command = start(home)
        command.read(time.monotonic() + share * undisturbed[node].seconds)
        pids = victims(target, command) or victims("command", command)
        kill(pids)
        struck = time.monotonic()
        if target not in GOES_ON:
            status = command.end()
            assert status != 0, command.said
            if status > 0:
                assert re.search(r"\w+ was ended (by SIGKILL|with the process)", command.said), command.said  # it says what happened
            command = start(home)
            command.wait_for(r"(?m)^[>=] ")
        found = re.search(rf"(?m)^{node} +(\w+) +(.*)$", command.said)
        report.append({"target": target, "stage": node, "share": round(share, 2), "then": " ".join(found.groups()) if found else ""})
        report[-1]["back_s"] = round(time.monotonic() - struck, 1)
    assert command.end() == 0, command.said
    if path := os.environ.get("POSTTRAIN_CHAOS_REPORT"):
        Path(path).write_text(json.dumps(report, indent=1))
    assert len(report) == KILLS
    ended = results(home)
    assert list(ended) == list(undisturbed)
    for name, expected in undisturbed.items():
        same = {output: ref.digest for output, ref in expected.outputs.items()}
        assert {output: ref.digest for output, ref in ended[name].outputs.items()} == same, name
        assert untimed(ended[name].metrics) == untimed(expected.metrics), name
    sync = posttrain(home, "sync")  # what MLflow could not take, had it been killed last
    assert sync.end() == 0, sync.said
    assert command.processes() == []
    left = [(name, *states) for runs in command.states().values() for name, states in runs.items() if not ENDED.issuperset(states)]
    assert left == []
