"""`up`: servers and the worker together, one for a home, repaired while it runs, and nothing left when it is stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest

from flows.servers.processes import marked
from flows.servers.serving import VARIABLE

pytestmark = pytest.mark.slow

UP = """
import signal
import sys
from pathlib import Path
from flows.servers.serving import up
from stages.errors import ServerError
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell inherits it as ignored
try:
    up(Path(sys.argv[1]), lambda text: print(text, flush=True), sys.argv[2:] or None)
except ServerError as error:
    print(error, flush=True)
"""

# Serves one deployment, whose run starts a process of its own in a session of its own, and waits.
WORKER = """
import os, signal, subprocess, sys, time
from pathlib import Path
from prefect import flow, serve
from prefect.runtime import flow_run
from flows.servers.reconcile import own

@flow(name="hold")
def hold(label: str):
    own(flow_run.id)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path(os.environ["POSTTRAIN_HOME"], f"{label}.pid").write_text(str(child.pid))
    try:
        while True:
            time.sleep(0.1)
    finally:
        child.kill()

if __name__ == "__main__":
    deployment = hold.to_deployment("local")
    Path(os.environ["POSTTRAIN_READY_FILE"]).touch()
    serve(deployment)
"""


class Up:
    """`up` in a process of its own, and what it says."""

    def __init__(self, home: Path, *worker: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in VARIABLE.values()}
        self.process = subprocess.Popen(
            [sys.executable, "-c", UP, str(home), *worker], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.seen: list[str] = []

    def until(self, word: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.seen.append(line)
            if word in line:
                return line
        raise AssertionError("".join(self.seen))

    def stop(self, number: signal.Signals) -> str:
        self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=60)
        return rest


def until(true: Callable[[], bool], limit_s: float = 90.0) -> None:
    """Wait until it is true."""
    pause = threading.Event()
    for _ in range(int(limit_s / 0.1)):
        if true():
            return
        pause.wait(0.1)
    raise AssertionError("it has not come true")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    home = tmp_path / "home"
    home.mkdir()
    (home / "servers.json").write_text(json.dumps({"ports": {"prefect": free_port(), "mlflow": free_port()}}))
    (home / "worker.py").write_text(WORKER)
    yield home
    assert marked(f"POSTTRAIN_SERVERS_OF={home}") == []
    assert marked(f"POSTTRAIN_WORKER_OF={home}") == []


def submit(label: str) -> UUID:
    """Start a run as the form on the Prefect page does."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("hold/local")
        return client.create_flow_run_from_deployment(deployment.id, parameters={"label": label}).id


def state_of(run: UUID) -> tuple[str, str]:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        state = client.read_flow_run(run).state
        assert state is not None
        return state.type.value, state.message or ""


def is_gone(home: Path, label: str) -> bool:
    return not Path(f"/proc/{(home / f'{label}.pid').read_text()}").exists()


def test_up_serves_repairs_cancels_and_leaves_nothing(home: Path) -> None:
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings
    from prefect.states import Cancelling

    up = Up(home, sys.executable, str(home / "worker.py"))
    prefect = up.until("Prefect  http").split()[1]
    assert "MLflow   http" in up.until("MLflow   http")
    up.until("Ctrl-C stops them")
    with temporary_settings({PREFECT_API_URL: f"{prefect}/api"}):
        # a second one says that there is one
        second = Up(home)
        said, _ = second.process.communicate(timeout=60)
        assert f"posttrain up runs already for this home (process {up.process.pid}): Prefect {prefect}, MLflow http" in said
        assert second.process.returncode == 0

        # a run from the form goes on while Prefect is away, and is cancelled from the page
        cancelled = submit("cancelled")
        until(lambda: (home / "cancelled.pid").exists())
        for server in marked(f"POSTTRAIN_SERVERS_OF={home}"):
            os.kill(server, signal.SIGKILL)
        up.until("started again after")
        up.until("started again after")
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(cancelled, Cancelling())
        until(lambda: state_of(cancelled)[0] == "CANCELLED")
        until(lambda: is_gone(home, "cancelled"))

        # a worker that dies comes back, and the run that it executed is closed
        crashed = submit("crashed")
        until(lambda: (home / "crashed.pid").exists())
        [worker] = [int(pid.parent.name) for pid in Path("/proc").glob("[0-9]*/cmdline") if is_worker(pid, home)]
        os.kill(worker, signal.SIGKILL)
        up.until("The worker was ended by SIGKILL; started again after")
        assert any("closed a run that had died" in text for text in up.seen)
        assert state_of(crashed)[0] == "CRASHED"
        assert is_gone(home, "crashed")

        # stopped: the run that goes on is cancelled, and all processes end
        stopped = submit("stopped")
        until(lambda: (home / "stopped.pid").exists())
    up.stop(signal.SIGTERM)
    assert up.process.returncode == 0
    assert is_gone(home, "stopped")
    assert state_in_store(home, stopped) == ("CANCELLED", "posttrain up was stopped")
    assert not (home / "up.ready").exists()


def is_worker(arguments: Path, home: Path) -> bool:
    try:
        return arguments.read_bytes().split(b"\0")[1:2] == [str(home / "worker.py").encode()]
    except OSError:
        return False


def state_in_store(home: Path, run: UUID) -> tuple[str, str]:
    """From Prefect's database, when its server has been stopped."""
    import sqlite3

    with sqlite3.connect(home / "prefect" / "prefect.db") as store:
        found = store.execute(
            "SELECT s.type, s.message FROM flow_run r JOIN flow_run_state s ON s.id = r.state_id WHERE r.id = ?", [str(run)]
        ).fetchone()
    store.close()
    return str(found[0]), str(found[1])


def test_up_killed_the_next_one_starts_and_closes_what_was_left(home: Path) -> None:
    first = Up(home, sys.executable, str(home / "worker.py"))
    prefect = first.until("Prefect  http").split()[1]
    first.until("Ctrl-C stops them")
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: f"{prefect}/api"}):
        run = submit("left")
    until(lambda: (home / "left.pid").exists())
    first.process.kill()
    for server in marked(f"POSTTRAIN_SERVERS_OF={home}"):
        os.kill(server, signal.SIGKILL)
    first.process.communicate(timeout=60)
    second = Up(home, sys.executable, str(home / "worker.py"))
    assert "closed a run that had died" in second.until("closed a run")
    assert second.until("Prefect  http").split()[1] == prefect
    second.until("Ctrl-C stops them")
    assert is_gone(home, "left")
    second.stop(signal.SIGINT)
    assert second.process.returncode == 0
    assert state_in_store(home, run)[0] in {"CRASHED", "CANCELLED"}


def test_up_worker_cannot_start_shows_its_log_and_stops_all(home: Path) -> None:
    up = Up(home, sys.executable, "-c", "raise SystemExit('no such deployment')")
    said, _ = up.process.communicate(timeout=120)
    assert re.search(r"The worker ended with status 1\. The end of .*worker\.log:\n  no such deployment", said)
