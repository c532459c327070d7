"""Servers: what is configured is respected, what is not is started, shared, watched and stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from flows import serving
from flows.serving import Server, servers
from stages.errors import ServerError


def nothing(text: str) -> None:
    """Takes the place of the terminal."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Healthy(BaseHTTPRequestHandler):
    """A server that is well, whatever one asks."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def healthy() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Healthy)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def nothing_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in serving.VARIABLE.values():
        monkeypatch.delenv(variable, raising=False)


def test_serving_imported_leaves_prefect_and_mlflow_unimported() -> None:
    code = "import flows.serving, sys; print(sorted({'prefect', 'mlflow', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_servers_both_configured_are_used_and_not_owned(healthy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"{healthy}/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", healthy)
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    with servers(tmp_path, nothing) as running:
        assert (running.prefect_url, running.prefect_api, running.mlflow_url) == (healthy, f"{healthy}/api", healthy)
        assert not running.owned
        assert running.check() is None
        assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "2"
        assert "127.0.0.1" in os.environ["NO_PROXY"].split(",")
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ
    assert not (tmp_path / "servers.json").exists()


@pytest.mark.parametrize("variable", ["PREFECT_API_URL", "MLFLOW_TRACKING_URI"])
def test_servers_configured_address_is_silent_names_the_variable(
    variable: str, healthy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"{healthy}/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", healthy)
    address = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv(variable, address)
    with pytest.raises(ServerError, match=f"does not answer at {address} \\(set by {variable}\\).*unset"), servers(tmp_path, nothing):
        pass


def test_servers_prefect_address_is_no_address_names_the_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "localhost:4200")
    with pytest.raises(ServerError, match="PREFECT_API_URL=localhost:4200 is no address; the rule is http://"), servers(tmp_path, nothing):
        pass


def test_check_configured_server_goes_away_says_so(healthy: str) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    both = serving.Servers(healthy, healthy, gone, owned=False, members=(Server("prefect", healthy), Server("mlflow", gone)))
    trouble = both.check()
    assert both.check("prefect") is None
    assert trouble is not None
    assert both.check("mlflow") == trouble
    assert f"MLflow does not answer at {gone}" in trouble


def test_check_own_server_died_shows_log_port_and_remedy(tmp_path: Path) -> None:
    log = tmp_path / "mlflow.log"
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-c", "print('disk is full'); raise SystemExit(3)"], stdout=file)
    process.wait()
    trouble = Server("mlflow", "http://127.0.0.1:5300", process, log).trouble()
    assert trouble is not None
    for part in ("MLflow (port 5300) ended with status 3", "disk is full", "run the same command again"):
        assert part in trouble


def test_ports_of_the_last_time_are_used_again_unless_taken_or_claimed(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        taken, free = int(busy.getsockname()[1]), free_port()
        (tmp_path / "servers.json").write_text(json.dumps({"ports": {"prefect": taken, "mlflow": free}}))
        with ExitStack() as claims:
            ports = serving._ports(tmp_path, ["prefect", "mlflow"], claims)
            with ExitStack() as others:
                assert serving._ports(tmp_path, ["mlflow"], others)["mlflow"] != free
    assert ports["mlflow"] == free
    assert ports["prefect"] >= serving.FIRST_PORT["prefect"]
    assert ports["prefect"] != taken


def test_stopping_on_signals_sigterm_acts_like_ctrl_c_and_is_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), serving.stopping_on_signals():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


SCRIPT = """
import sys
from pathlib import Path
from flows.serving import servers
with servers(Path(sys.argv[1])) as running:
    print("ready", running.owned, flush=True)
    sys.stdin.readline()
print("left", flush=True)
"""


class Other:
    """Another posttrain process with the same home."""

    def __init__(self, home: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def until(self, word: str) -> str:
        assert self.process.stdout is not None
        seen = []
        for line in self.process.stdout:
            seen.append(line)
            if word in line:
                return line
        raise AssertionError("".join(seen))

    def leave(self) -> str:
        """End the block of the other process; returns the rest of what it says."""
        rest, _ = self.process.communicate("\n", timeout=60)
        return rest

    def killed(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


def status(url: str, headers: dict[str, str] | None = None, data: bytes | None = None) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=data, headers=headers or {}), timeout=10) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_configured")
def test_own_servers_shared_hardened_watched_and_stopped(tmp_path: Path) -> None:
    (tmp_path / "servers.json").write_text(json.dumps({"ports": {"prefect": free_port(), "mlflow": free_port()}}))
    said: list[str] = []
    with servers(tmp_path, said.append) as running:
        assert running.owned
        assert running.check() is None
        state = json.loads((tmp_path / "servers.json").read_text())
        assert state["running"] == {"prefect": running.prefect_api, "mlflow": running.mlflow_url}
        # a foreign page can neither start flows nor read runs
        flow = json.dumps({"name": "evil"}).encode()
        assert status(f"{running.prefect_api}/flows/", {"Content-Type": "application/json"}, flow) == 403
        assert status(f"{running.mlflow_url}/api/2.0/mlflow/experiments/search?max_results=1", {"Host": "evil.example"}) == 403
        assert status(running.prefect_url) == 200
        assert status(running.mlflow_url) == 200
        # a flow run whose process is gone
        from prefect import Flow
        from prefect.client.orchestration import get_client
        from prefect.states import Running

        with get_client(sync_client=True) as client:
            run = client.create_flow_run(Flow(free_port, name="lost"), state=Running())
        # another process uses these servers, and this one sees when one dies
        other = Other(tmp_path)
        other.until("ready False")
        assert "left" in other.leave()
        assert other.process.returncode == 0
        mlflow = next(server for server in running.members if server.kind == "mlflow")
        assert mlflow.process is not None
        os.killpg(mlflow.process.pid, signal.SIGKILL)
        mlflow.process.wait(20)
        trouble = running.check()
        assert trouble is not None
        assert "MLflow (port" in trouble
        assert "was ended by SIGKILL" in trouble
    assert all(server.process is not None and server.process.poll() is not None for server in running.members)

    # an owner that is killed leaves nothing behind, and the next one closes its runs and keeps its ports
    owner = Other(tmp_path)
    assert f"closed a run that had died: {run.name}" in owner.until("closed")
    owner.until("ready True")
    owner.killed()
    with servers(tmp_path, said.append) as again:
        assert (again.prefect_api, again.mlflow_url) == (running.prefect_api, running.mlflow_url)
    mark = f"{serving._MARK}={tmp_path}".encode()
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and mark in serving._environ(int(pid))]
