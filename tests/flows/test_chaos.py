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
import select
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from flows.plan import make_plan, results_of
from flows.recipe import Recipe, load_recipe
from flows.servers.serving import VARIABLE
from stages.artifacts import StageResult

KILLS = 20
LIMIT_S = 3600.0
TARGETS = ("stage", "fork server", "command", "Prefect", "MLflow", "everything")
GOES_ON = ("Prefect", "MLflow")
"""Servers that are started again while the command goes on."""
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


class Process(NamedTuple):
    """A process of the home under test."""

    pid: int
    parent: int
    command: str


class Command:
    """`posttrain run tiny` in a home of its own, read line by line while it runs."""

    def __init__(self, home: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in VARIABLE.values()}
        options = [part for override in OVERRIDES for part in ("--set", override)]
        self.home, self.said = home, ""
        self.process = subprocess.Popen(
            [Path(sys.executable).with_name("posttrain"), "run", "tiny", *options],
            env=environment | {"POSTTRAIN_HOME": str(home), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.out = self.process.stdout
        self.deadline = time.monotonic() + LIMIT_S

    def read(self, until: float) -> bool:
        """Take in what it says until that time (monotonic seconds). False when it has ended."""
        while (left := min(until, self.deadline) - time.monotonic()) > 0:
            if not self.out.closed and not select.select([self.out], [], [], left)[0]:
                return True
            if self.out.closed or not (chunk := os.read(self.out.fileno(), 65536)):
                self.out.close()
                self.process.wait()
                return False
            self.said += chunk.decode(errors="replace")
        assert time.monotonic() < self.deadline, self.said
        return True

    def wait_for(self, pattern: str) -> bool:
        """Read until it says something of that form. False when it has ended before."""
        while not re.search(pattern, self.said):
            if not self.read(time.monotonic() + 0.2):
                return re.search(pattern, self.said) is not None
        return True

    def end(self) -> int:
        """Read to its end; returns its exit status."""
        while self.read(time.monotonic() + 1.0):
            pass
        return self.process.returncode


def processes(home: Path) -> list[Process]:
    """Every live process that has this home in its environment."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):
            if f"POSTTRAIN_HOME={home}".encode() not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                continue
            state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                found.append(Process(pid, int(parent), Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()))
    return found


def victims(target: str, command: Command) -> list[int]:
    """The processes to kill for a target; none when it is not there at this moment."""
    alive = processes(command.home)
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


def points(rng: random.Random) -> Iterator[tuple[str, str, float]]:
    """Target, node, and how far into it, in the order of the recipe: every node is hit, some twice."""
    nodes = [node.name for node in recipe().nodes]
    targets = [TARGETS[i % len(TARGETS)] for i in range(KILLS)]
    rng.shuffle(targets)
    for i, target in enumerate(targets):
        yield target, nodes[i * len(nodes) // KILLS], rng.random()


@pytest.fixture
def undisturbed(tmp_path: Path) -> dict[str, StageResult]:
    home = Path(os.environ.get("POSTTRAIN_CHAOS_BASE", tmp_path / "undisturbed"))
    if not home.exists():
        command = Command(home)
        assert command.end() == 0, command.said
    return results(home)


def test_recipe_killed_twenty_times_ends_as_the_undisturbed_run(tmp_path: Path, undisturbed: dict[str, StageResult]) -> None:
    rng, home = random.Random(20), tmp_path / "chaos"
    command, report = Command(home), []
    for target, node, share in points(rng):
        while not command.wait_for(rf"(?m)^[>=] {node} "):  # an earlier kill ended the command: the user runs it again
            command = Command(home)
        command.read(time.monotonic() + share * undisturbed[node].seconds)
        pids = victims(target, command) or victims("command", command)
        kill(pids)
        struck = time.monotonic()
        if target not in GOES_ON:
            status = command.end()
            assert status != 0, command.said
            if status > 0:
                assert re.search(r"SIGKILL|has died", command.said), command.said  # it says what happened
            command = Command(home)
            command.wait_for(r"(?m)^[>=] ")
        found = re.search(rf"(?m)^{node} +(\w+) +(.*)$", command.said)
        report.append({"target": target, "stage": node, "share": round(share, 2), "then": " ".join(found.groups()) if found else ""})
        report[-1]["back_s"] = round(time.monotonic() - struck, 1)
    assert command.end() == 0, command.said
    assert len(report) == KILLS
    ended = results(home)
    assert list(ended) == list(undisturbed)
    for name, expected in undisturbed.items():
        same = {output: ref.digest for output, ref in expected.outputs.items()}
        assert {output: ref.digest for output, ref in ended[name].outputs.items()} == same, name
        assert ended[name].metrics == expected.metrics, name
    assert processes(home) == []
    assert open_runs(home) == []
    if path := os.environ.get("POSTTRAIN_CHAOS_REPORT"):
        Path(path).write_text(json.dumps(report, indent=1))


def open_runs(home: Path) -> list[str]:
    """Runs that either store still shows as running."""
    with sqlite3.connect(f"file:{home}/prefect/prefect.db?mode=ro", uri=True) as prefect:
        left = [name for (name,) in prefect.execute("SELECT name FROM flow_run WHERE state_type IN ('RUNNING', 'PENDING', 'CANCELLING')")]
    with sqlite3.connect(f"file:{home}/mlflow.db?mode=ro", uri=True) as mlflow:
        return left + [name for (name,) in mlflow.execute("SELECT name FROM runs WHERE status = 'RUNNING'")]
