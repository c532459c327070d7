"""Servers: what is configured is respected, what is not is started, shared, watched and stopped."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from flows.servers import serving
from flows.servers.processes import marked
from flows.servers.serving import Server, servers
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
def healthy(serve: Callable[[type[BaseHTTPRequestHandler]], AbstractContextManager[str]]) -> Iterator[str]:
    with serve(Healthy) as address:
        yield address


@pytest.fixture
def nothing_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in serving.VARIABLE.values():
        monkeypatch.delenv(variable, raising=False)


def test_serving_imported_leaves_prefect_and_mlflow_unimported() -> None:
    code = "import flows.servers.serving, sys; print(sorted({'prefect', 'mlflow', 'torch'} & set(sys.modules)))"
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


def test_stopping_on_signals_sigterm_acts_like_ctrl_c_and_is_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), serving.stopping_on_signals():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_wait_for_server_does_not_come_back_says_so_once_and_gives_up(healthy: str) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    both = serving.Servers(healthy, healthy, gone, owned=False, members=(Server("prefect", healthy), Server("mlflow", gone)))
    said: list[str] = []
    assert both.wait_for("prefect", 5.0, said.append)
    assert said == []
    assert not both.wait_for("mlflow", 0.7, said.append)
    assert said == [f"waiting for MLflow at {gone}, for 1 s at most"]


def test_wait_for_prefect_comes_back_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    address = ("127.0.0.1", free_port())
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{address[1]}/api")
    started: list[HTTPServer] = []

    def start(text: str) -> None:
        started.append(HTTPServer(address, Healthy))
        threading.Thread(target=started[0].serve_forever).start()

    assert serving.wait_for_prefect(start, 20.0)
    started[0].shutdown()
    started[0].server_close()


def enter(home: Path) -> None:
    with servers(home, nothing):
        pass


@pytest.mark.usefixtures("nothing_configured")
@pytest.mark.parametrize("start", [serving.up, enter])
@pytest.mark.parametrize("taken", ["", "logs", "servers.users/x", "servers.lock/x"])
def test_servers_home_cannot_be_used_names_path_cause_and_variable(start: Callable[[Path], None], taken: str, tmp_path: Path) -> None:
    path = tmp_path / "home" / taken
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("a file is in its place")
    home = tmp_path / "home"
    with pytest.raises(ServerError, match=f"the home {home} cannot be used: {home}.*POSTTRAIN_HOME"):
        start(home)


@pytest.mark.usefixtures("nothing_configured")
def test_servers_password_too_short_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_PASSWORD", "short")
    with pytest.raises(ServerError, match="at least 12"), servers(tmp_path / "home", nothing):
        pass
    assert not (tmp_path / "home").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_configured")
def test_servers_disk_full_shows_how_much_is_left(small_disk: Path) -> None:
    with (small_disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(2**12))
    with pytest.raises(ServerError, match=r"only 0.\d MiB left|No space left on device"), servers(small_disk / "home", nothing):
        pass


SCRIPT = """
import sys
from pathlib import Path
from flows.servers.serving import servers
with servers(Path(sys.argv[1])) as running:
    print("ready", running.owned, flush=True)
    sys.stdin.readline()
print("left", flush=True)
"""


class Other:
    """Another posttrain process with the same home."""

    def __init__(self, home: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in serving.VARIABLE.values()}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(home)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
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


def status(url: str, headers: dict[str, str] | None = None, data: bytes | None = None, method: str | None = None) -> int:
    request = urllib.request.Request(url, data=data, headers=headers or {}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, serving.Servers, list[str]]]:
    """The home of a pair of own servers, the servers, and what is said."""
    home, said = tmp_path_factory.mktemp("home"), list[str]()
    (home / "servers.json").write_text(json.dumps({"ports": {"prefect": free_port(), "mlflow": free_port()}}))
    with pytest.MonkeyPatch.context() as patch:
        for variable in (*serving.VARIABLE.values(), "POSTTRAIN_PASSWORD"):
            patch.delenv(variable, raising=False)
        with servers(home, said.append) as running:
            assert running.owned
            yield home, running, said


Own = tuple[Path, serving.Servers, list[str]]


@pytest.mark.slow
def test_own_prefect_foreign_page_can_neither_read_nor_start(own: Own) -> None:
    _, running, _ = own
    json_type, foreign = {"Content-Type": "application/json"}, {"Origin": "http://evil.example"}
    flow, flows = json.dumps({"name": "evil"}).encode(), f"{running.prefect_api}/flows/"
    assert status(f"{running.prefect_api}/version") == 200
    assert status(f"{running.prefect_api}/version", {"Host": "evil.example"}) == 400
    assert status(f"{running.prefect_api}/version", {"Host": f"evil.example:{running.prefect_url.rpartition(':')[2]}"}) == 400
    assert status(f"{running.prefect_api}/version", foreign) == 403
    assert status(f"{running.prefect_api}/version", {"Origin": "null"}) == 403
    assert status(f"{running.prefect_api}/version", {"Origin": running.prefect_url}) == 200
    assert status(flows, {**foreign, "Access-Control-Request-Method": "POST"}, method="OPTIONS") == 403
    assert status(flows, json_type, flow) == 403  # no CSRF token
    stream = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    assert raw_status(running.prefect_url, "/api/events/out", stream) == 101
    assert raw_status(running.prefect_url, "/api/events/out", {**stream, **foreign}) == 403


def raw_status(address: str, path: str, headers: dict[str, str]) -> int:
    """The status of a request with the headers as they are given; urllib would close the connection."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=10)
    connection.request("GET", path, headers=headers)
    code = connection.getresponse().status
    connection.close()
    return code


@pytest.mark.slow
def test_own_prefect_pages_are_served_and_cannot_be_framed(own: Own) -> None:
    _, running, _ = own
    for page in ("/", "/dashboard", "/deployments"):
        with urllib.request.urlopen(f"{running.prefect_url}{page}", timeout=10) as reply:
            assert reply.headers["Content-Type"].startswith("text/html")
            assert reply.headers["X-Frame-Options"] == "SAMEORIGIN"
            assert b"<script" in reply.read()


@pytest.mark.slow
def test_own_mlflow_foreign_page_can_neither_read_nor_start(own: Own) -> None:
    _, running, _ = own
    experiments = f"{running.mlflow_url}/api/2.0/mlflow/experiments"
    assert status(running.mlflow_url) == 200
    assert status(f"{experiments}/search?max_results=1", {"Host": "evil.example"}) == 403
    evil = {"Content-Type": "application/json", "Origin": "http://evil.example"}
    assert status(f"{experiments}/create", evil, json.dumps({"name": "evil"}).encode()) == 403


@pytest.mark.slow
def test_own_servers_shared_with_another_process(own: Own) -> None:
    home, running, _ = own
    state = json.loads((home / "servers.json").read_text())
    assert state["running"] == {"prefect": running.prefect_api, "mlflow": running.mlflow_url}
    other = Other(home)
    other.until("ready False")
    assert "left" in other.leave()
    assert other.process.returncode == 0


UP = """
import sys; from pathlib import Path; from flows.servers.serving import up
up(Path(sys.argv[1]), lambda text: print(text, flush=True))
"""


@pytest.mark.slow
def test_up_servers_of_another_command_are_joined(own: Own) -> None:
    home, running, _ = own
    environment = {name: value for name, value in os.environ.items() if name not in serving.VARIABLE.values()}
    with subprocess.Popen([sys.executable, "-c", UP, str(home)], env=environment, stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        said = [next(up.stdout) for _ in range(4)]
        up.send_signal(signal.SIGTERM)
    assert up.returncode == 0
    assert said == [
        "using the servers of another posttrain command\n",
        f"Prefect  {running.prefect_url}\n",
        f"MLflow   {running.mlflow_url}\n",
        "Ctrl-C stops them.\n",
    ]


@pytest.mark.slow
def test_own_servers_killed_are_started_again_with_their_stores(own: Own) -> None:
    from mlflow import MlflowClient
    from prefect import Flow
    from prefect.client.orchestration import get_client

    _, running, said = own
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(Flow(free_port, name="kept"))
    experiment = MlflowClient(running.mlflow_url).create_experiment("kept")
    for server in running.members:
        assert server.kept is not None
        assert server.kept.process is not None
        server.kept.process.kill()  # not its group: MLflow's worker still holds the port
        server.kept.process.wait(20)
    assert running.check() is None  # it is being mended
    waiting: list[str] = []
    for kind in ("prefect", "mlflow"):
        assert running.wait_for(kind, 120.0, waiting.append)
    assert [text.partition(" at ")[0] for text in waiting][:1] == ["waiting for Prefect"]
    until(lambda: len([text for text in said if "started again after" in text]) == 2)
    for name in ("Prefect", "MLflow"):
        assert any(text.startswith(f"{name} was ended by SIGKILL; started again after ") for text in said)
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(run.id).name == run.name
    assert MlflowClient(running.mlflow_url).get_experiment(experiment).name == "kept"


def until(true: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Wait until it is true."""
    pause = threading.Event()
    for _ in range(int(limit_s / 0.1)):
        if true():
            return
        pause.wait(0.1)
    raise AssertionError("it has not come true")


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_configured")
def test_servers_owner_killed_nothing_is_left_and_the_next_one_repairs(tmp_path: Path) -> None:
    from prefect import Flow
    from prefect.client.orchestration import get_client
    from prefect.states import Running

    (tmp_path / "servers.json").write_text(json.dumps({"ports": {"prefect": free_port(), "mlflow": free_port()}}))
    owner = Other(tmp_path)
    owner.until("ready True")
    with servers(tmp_path, nothing) as joined:
        assert not joined.owned
        with get_client(sync_client=True) as client:
            run = client.create_flow_run(Flow(free_port, name="lost"), state=Running())
    owner.killed()
    assert "running" in json.loads((tmp_path / "servers.json").read_text())
    said: list[str] = []
    with servers(tmp_path, said.append) as again:
        assert again.owned
        assert (again.prefect_api, again.mlflow_url) == (joined.prefect_api, joined.mlflow_url)
        assert f"closed a run that had died: {run.name}" in said
        processes = [server.kept.process for server in again.members if server.kept]
    assert all(process is not None and process.poll() is not None for process in processes)
    assert marked(f"POSTTRAIN_SERVERS_OF={tmp_path}") == []
    assert "running" not in json.loads((tmp_path / "servers.json").read_text())
