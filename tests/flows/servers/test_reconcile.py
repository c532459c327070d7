"""Reconcile: runs whose process is gone are closed, all others keep their state. Against a real Prefect server, with real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from flows.servers import serving

pytestmark = pytest.mark.slow

OWNER = """
import sys
from flows.servers.reconcile import own
for flow_run in sys.argv[1:]:
    own(flow_run)
print("owned", flush=True)
sys.stdin.readline()
"""

NESTED = """
import sys
from prefect import flow
from prefect.runtime import flow_run
from flows.servers.reconcile import own

@flow(flow_run_name="inner")
def inner():
    own(flow_run.id)
    print("nested", flush=True)
    sys.stdin.readline()

@flow(flow_run_name="outer")
def outer():
    own(flow_run.id)
    inner()

outer()
"""


@pytest.fixture(scope="module", autouse=True)
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Servers]:
    """A Prefect server of its own; MLflow is not needed."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PREFECT_API_URL", raising=False)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home}/mlflow.db")
        with serving.servers(home, lambda text: None) as running:
            yield running


def create(name: str, state: str = "Running") -> UUID:
    from prefect import Flow, states
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return client.create_flow_run(Flow(create, name="work"), name=name, state=getattr(states, state)()).id


def put(run: UUID, state: str) -> None:
    from prefect import states
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run, getattr(states, state)(), force=True)


def state_of(run: UUID) -> tuple[str, str]:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        state = client.read_flow_run(run).state
        assert state is not None
        return state.type.value, state.message or ""


class Process:
    """A Python process that says one line when it is where it should be, and ends when told."""

    def __init__(self, code: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def until(self, word: str) -> None:
        assert self.process.stdout is not None
        seen = []
        for line in self.process.stdout:
            seen.append(line)
            if word in line:
                return
        raise AssertionError("".join(seen))

    def killed(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


def closed(*, alone: bool) -> list[str]:
    """What a look at the runs says."""
    from flows.servers.reconcile import close_dead_runs

    said: list[str] = []
    close_dead_runs(said.append, alone)
    return said


def test_close_dead_runs_owner_killed_closes_only_its_unfinished_runs() -> None:
    dead, cancelling, finished, again = create("dead"), create("cancelling"), create("finished"), create("again")
    owner = Process(OWNER, str(dead), str(cancelling), str(finished), str(again))
    owner.until("owned")
    put(cancelling, "Cancelling")
    put(finished, "Completed")
    put(again, "Pending")
    put(again, "Running")  # a retry, whose process has not said who it is
    living, foreign = create("living"), create("foreign")
    other = Process(OWNER, str(living))
    other.until("owned")
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        client.update_flow_run_labels(
            foreign, {"posttrain.owner": "elsewhere:1:1", "posttrain.attempt": client.read_flow_run(foreign).run_count}
        )
    assert closed(alone=False) == []
    owner.killed()
    assert sorted(closed(alone=False)) == [f"closed a run that had died: {name}" for name in ("cancelling", "dead")]
    kind, message = state_of(dead)
    assert kind == "CRASHED"
    assert "press Retry" in message
    assert state_of(cancelling)[0] == "CANCELLED"
    assert state_of(finished)[0] == "COMPLETED"
    assert [state_of(run)[0] for run in (again, living, foreign)] == ["RUNNING"] * 3
    assert closed(alone=True) == ["closed a run that had died: again"]
    assert [state_of(run)[0] for run in (living, foreign)] == ["RUNNING"] * 2
    other.killed()
    assert closed(alone=False) == ["closed a run that had died: living"]
    put(foreign, "Cancelled")


def test_close_dead_runs_without_owner_only_when_alone() -> None:
    running, pending, suspended, waiting = (
        create("running"),
        create("pending", "Pending"),
        create("suspended"),
        create("waiting", "Scheduled"),
    )
    from prefect import states
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        client.set_flow_run_state(suspended, states.Suspended(timeout_seconds=3600), force=True)
    assert closed(alone=False) == []
    assert sorted(closed(alone=True)) == [f"closed a run that had died: {name}" for name in ("pending", "running")]
    assert [state_of(run)[0] for run in (running, pending, suspended, waiting)] == ["CRASHED", "CRASHED", "PAUSED", "SCHEDULED"]


def test_close_dead_runs_flow_killed_closes_its_sub_flow_too() -> None:
    conductor = Process(NESTED)
    conductor.until("nested")
    conductor.killed()
    assert sorted(closed(alone=False)) == [f"closed a run that had died: {name}" for name in ("inner", "outer")]
    assert closed(alone=True) == []


def test_mark_cancelled_interrupted_runs_become_cancelled_and_completed_ones_stay() -> None:
    from flows.servers.reconcile import mark_cancelled

    runs = {state: create(state, state) for state in ("Running", "Crashed", "Failed", "Completed")}
    mark_cancelled([*runs.values(), "00000000-0000-4000-8000-000000000000"], "Ctrl-C")
    assert {state: state_of(run) for state, run in runs.items() if state != "Completed"} == dict.fromkeys(
        ("Running", "Crashed", "Failed"), ("CANCELLED", "Ctrl-C")
    )
    assert state_of(runs["Completed"])[0] == "COMPLETED"


def test_close_dead_runs_prefect_away_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_server: serving.Servers) -> None:
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_CLIENT_MAX_RETRIES: 0}):
        [text] = closed(alone=True)
    assert "Prefect could not be asked" in text
