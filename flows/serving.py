"""The Prefect server and the MLflow server of a project home: started, watched and stopped here.

Addresses that are configured (`PREFECT_API_URL`, `MLFLOW_TRACKING_URI`) are used as they are. What is
not configured is started on loopback, with its store under the home, and stopped when the command
ends. Importing this file imports neither prefect nor mlflow, so that their settings come first.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any
from urllib.parse import urlsplit

from stages.artifacts import write_json
from stages.errors import ServerError

FIRST_PORT = {"prefect": 4300, "mlflow": 5300}
VARIABLE = {"prefect": "PREFECT_API_URL", "mlflow": "MLFLOW_TRACKING_URI"}
NAME = {"prefect": "Prefect", "mlflow": "MLflow"}
START_LIMIT_S = 240.0
STOP_LIMIT_S = 8.0
ANSWER_LIMIT_S = 5.0
_PORTS_TRIED = 50
_MARK = "POSTTRAIN_SERVERS_OF"
_STATE = "servers.json"
_NOT_HANDED_ON = frozenset({"PYTHONDONTWRITEBYTECODE", "PYTHONWARNINGS", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH"})
# Ties a server to the thread that starts it: the kernel sends SIGTERM when that is gone, however it went.
_TIED = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Server:
    """One server: `kind` is `prefect` or `mlflow`; `process` and `log` are there when this process started it."""

    kind: str
    address: str
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None

    def answers(self) -> bool:
        """Whether its health page answers within seconds; a store without a server (sqlite) always does."""
        return not self.address.startswith("http") or _answers(f"{self.address}/health")

    def trouble(self) -> str | None:
        """What is wrong with it, in words, with the end of its log when it is ours; None when it is well."""
        if self.process is None or self.log is None:
            return None if self.answers() else f"{NAME[self.kind]} does not answer at {self.address} any more; start that server again"
        status = self.process.poll()
        if status is None:
            return None
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return (
            f"{NAME[self.kind]} (port {urlsplit(self.address).port}) {how}. The end of {self.log}:\n{_tail(self.log)}\n"
            "Mend the cause and run the same command again; finished stages are kept"
        )


@dataclass(frozen=True)
class Servers:
    """The addresses of the two servers. `owned`: this process started at least one and will stop it."""

    prefect_url: str
    prefect_api: str
    mlflow_url: str
    owned: bool
    members: tuple[Server, ...] = ()

    def check(self, kind: str | None = None) -> str | None:
        """A clear text when a server (only the one of that kind, when given) has died or does not answer any more, else None."""
        return next((text for server in self.members if kind in (None, server.kind) and (text := server.trouble())), None)


@contextmanager
def servers(home: Path, say: Say = print) -> Iterator[Servers]:
    """Both servers, answering, for the time of the block, with `os.environ` set for prefect and mlflow.

    Call it from the main thread: own servers end with the thread that started them. Another process
    with the same home uses the servers of the first, which waits for it before it stops them.
    Raises ServerError when a configured address does not answer, or when a server cannot be started.
    """
    home = home.resolve()
    (home / "logs").mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        found = _configured()
        missing = [kind for kind in FIRST_PORT if kind not in found]
        alone = False
        if missing:
            users, running = _join(home, say, stack)
            if running is None:
                alone = _lock(users)
                found |= stack.enter_context(_started(home, missing, found, users, say))
            else:
                found = running | found
        stack.enter_context(_environment(_client_settings(home, found, own_prefect="prefect" in missing)))
        if "prefect" in sys.modules:  # a second run in one process: prefect still has the settings of the first
            from prefect.context import refresh_global_settings_context

            refresh_global_settings_context()
        if alone and "prefect" in missing:
            _close_dead_runs(say)
        api = found["prefect"].address
        yield Servers(
            prefect_url=os.environ.get("PREFECT_UI_URL", api.removesuffix("/api")),
            prefect_api=api,
            mlflow_url=found["mlflow"].address,
            owned=any(server.process for server in found.values()),
            members=tuple(found.values()),
        )


def up(home: Path, say: Say = print) -> None:
    """Start both servers, name their addresses, and stay until Ctrl-C, SIGTERM or SIGHUP.

    Raises ServerError when a server cannot be started or dies.
    """
    with suppress(KeyboardInterrupt), stopping_on_signals(), servers(home, say) as running:
        say(f"Prefect  {running.prefect_url}")
        say(f"MLflow   {running.mlflow_url}")
        say("Ctrl-C stops them.")
        while not (trouble := running.check()):
            time.sleep(1.0)
        raise ServerError(trouble)


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP act like Ctrl-C in the block, so that it is left in good order. A signal that is ignored stays so (nohup)."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _configured() -> dict[str, Server]:
    """The servers named by the environment; each has answered."""
    found: dict[str, Server] = {}
    for kind, variable in VARIABLE.items():
        address = os.environ.get(variable, "").strip().rstrip("/")
        if not address:
            continue
        if kind == "prefect" and not address.startswith("http"):
            raise ServerError(f"{variable}={address} is no address; the rule is http://host:port/api; correct it or unset it")
        server = Server(kind, address)
        if not server.answers():
            raise ServerError(
                f"{NAME[kind]} does not answer at {address} (set by {variable}); start that server, "
                f"or unset {variable} and posttrain starts its own"
            )
        found[kind] = server
    return found


def _join(home: Path, say: Say, stack: ExitStack) -> tuple[IO[str], dict[str, Server] | None]:
    """The lock file of those who use the servers, and the servers of another live process, or None: this process is to own them.

    Two kernel locks, freed however a process ends: `servers.lock` is held by the owner, `servers.users`
    is shared by those who use the owner's servers.
    """
    users = stack.enter_context((home / "servers.users").open("a"))
    owner = stack.enter_context((home / "servers.lock").open("a"))
    fcntl.flock(users, fcntl.LOCK_SH)
    until = time.monotonic() + START_LIMIT_S
    while not _lock(owner):
        running = {kind: Server(kind, address) for kind, address in _state(home).get("running", {}).items()}
        if running and all(server.answers() for server in running.values()):
            say("using the servers of another posttrain command")
            return users, running
        if time.monotonic() > until:
            raise ServerError(
                f"another posttrain command owns the servers of {home}, but they have not answered for {START_LIMIT_S:.0f} s; "
                "stop that command (Ctrl-C), or choose another home with POSTTRAIN_HOME"
            )
        time.sleep(0.2)
    fcntl.flock(users, fcntl.LOCK_UN)
    return users, None


def _lock(file: IO[str]) -> bool:
    """Take the file's lock for this process alone, without waiting; False when another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _started(home: Path, kinds: list[str], others: Mapping[str, Server], users: IO[str], say: Say) -> Iterator[dict[str, Server]]:
    """Start servers of these kinds side by side and wait until they answer; stop them at the end of the block."""
    _end_leftovers(home)
    started: dict[str, Server] = {}
    began = time.monotonic()
    say(f"starting {' and '.join(NAME[kind] for kind in kinds)} (the first time takes longer: the stores are made) ...")
    with ExitStack() as claims:
        ports = _ports(home, kinds, claims)
        try:
            for kind in kinds:
                started[kind] = _start(home, kind, ports[kind])
            for kind in _as_they_answer(started):
                say(f"{NAME[kind]} answers at {started[kind].address.removesuffix('/api')} after {time.monotonic() - began:.1f} s")
            running = {kind: server.address for kind, server in {**others, **started}.items()}
            write_json(home / _STATE, {"ports": ports, "running": running})
            fcntl.flock(users, fcntl.LOCK_UN)
            yield started
            if not _lock(users):
                say("another posttrain command uses these servers; they stop when it ends (Ctrl-C stops them now)")
                fcntl.flock(users, fcntl.LOCK_EX)
        finally:
            write_json(home / _STATE, {"ports": ports})
            _stop([server.process for server in started.values() if server.process])


def _as_they_answer(started: Mapping[str, Server]) -> Iterator[str]:
    """The kinds of the servers, each when its health page answers first. Raises ServerError when one dies or takes too long."""
    waiting = dict(started)
    until = time.monotonic() + START_LIMIT_S
    while waiting:
        for kind, server in list(waiting.items()):
            if trouble := server.trouble():
                raise ServerError(trouble)
            if server.answers():
                del waiting[kind]
                yield kind
        if waiting and time.monotonic() > until:
            server = next(iter(waiting.values()))
            raise ServerError(
                f"{NAME[server.kind]} has not answered at {server.address} within {START_LIMIT_S:.0f} s; see {server.log}. "
                f"When the machine is only busy, run again; otherwise start it yourself and set {VARIABLE[server.kind]}"
            )
        time.sleep(0.1)


def _start(home: Path, kind: str, port: int) -> Server:
    log = home / "logs" / f"{kind}.log"
    command, address, settings = _prefect(home, port) if kind == "prefect" else _mlflow(home, port)
    keep = {name: value for name, value in os.environ.items() if name not in _NOT_HANDED_ON}
    with log.open("wb") as file:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and arguments
            [sys.executable, "-c", _TIED, str(os.getpid()), *command],
            env={**keep, **_common_settings(), **settings, "PYTHONSAFEPATH": "1", _MARK: str(home)},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=home,
            start_new_session=True,
        )
    return Server(kind, address, process, log)


def _prefect(home: Path, port: int) -> tuple[list[str], str, dict[str, str]]:
    """Command, API address and settings of the Prefect server: loopback, no telemetry, no foreign pages, SQLite under the home."""
    api = f"http://127.0.0.1:{port}/api"
    off = ("FOREMAN", "TRIGGERS", "LATE_RUNS")
    settings = {
        **_prefect_settings(home, api),
        "PREFECT_UI_API_URL": api,
        "PREFECT_SERVER_API_HOST": "127.0.0.1",
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home}/prefect/prefect.db",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_SERVER_UI_V2_ENABLED": "false",
        "PREFECT_UI_STATIC_DIRECTORY": str(home / "prefect" / "pages"),
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://127.0.0.1:{port},http://localhost:{port}",
        **{f"PREFECT_SERVER_SERVICES_{service}_ENABLED": "false" for service in off},
    }
    return [sys.executable, "-m", "prefect", "server", "start"], api, settings


def _mlflow(home: Path, port: int) -> tuple[list[str], str, dict[str, str]]:
    """Command, address and settings of the MLflow server: loopback, one worker, no job runner, no telemetry, SQLite under the home."""
    hosts = [f"127.0.0.1:{port}", f"localhost:{port}"]
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
        "--backend-store-uri",
        f"sqlite:///{home}/mlflow.db",
        "--artifacts-destination",
        str(home / "artifacts"),
        "--allowed-hosts",
        ",".join(hosts),
        "--cors-allowed-origins",
        ",".join(f"http://{host}" for host in hosts),
    ]
    return command, f"http://127.0.0.1:{port}", {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


def _prefect_settings(home: Path, api: str) -> dict[str, str]:
    """What Prefect's server and its clients share."""
    return {
        "PREFECT_API_URL": api,
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_LOCAL_STORAGE_PATH": str(home / "prefect" / "storage"),
        "PREFECT_MEMO_STORE_PATH": str(home / "prefect" / "memo_store.toml"),
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_DEPLOYMENT_CONCURRENCY_SLOT_WAIT_SECONDS": "5",
        "PREFECT_RUNNER_POLL_FREQUENCY": "2",
    }


def _common_settings() -> dict[str, str]:
    """Telemetry off, and no proxy between this machine and itself."""
    direct = ",".join(dict.fromkeys([*filter(None, os.environ.get("NO_PROXY", "").split(",")), "127.0.0.1", "localhost"]))
    return {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "GIT_PYTHON_REFRESH": "quiet",
        "NO_PROXY": direct,
        "no_proxy": direct,
    }


def _client_settings(home: Path, found: Mapping[str, Server], *, own_prefect: bool) -> dict[str, str]:
    """What this process and its children need to talk to the servers; a dead MLflow costs seconds, not minutes."""
    return {
        **_common_settings(),
        "PREFECT_API_URL": found["prefect"].address,
        **(_prefect_settings(home, found["prefect"].address) if own_prefect else {}),
        "MLFLOW_TRACKING_URI": found["mlflow"].address,
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": os.environ.get("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2"),
        "MLFLOW_HTTP_REQUEST_TIMEOUT": os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT", "10"),
    }


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the time of the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """End the servers and what they started: politely first, by force after STOP_LIMIT_S or at a second Ctrl-C."""
    for process in processes:
        process.terminate()
    until = time.monotonic() + STOP_LIMIT_S
    try:
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _end_leftovers(home: Path) -> None:
    """End servers of this home whose owner was killed; the caller holds the owner's lock, so none is in use."""
    mark = f"{_MARK}={home}".encode()
    until = time.monotonic() + STOP_LIMIT_S
    while left := [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if mark in _environ(pid)]:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if time.monotonic() < until else signal.SIGKILL)
        time.sleep(0.2)


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _ports(home: Path, kinds: list[str], claims: ExitStack) -> dict[str, int]:
    """A free port for each kind: the one of the last time when it is free, so that old links stay valid. Keeps the others' ports."""
    ports: dict[str, int] = {kind: int(port) for kind, port in _state(home).get("ports", {}).items()}
    for kind in kinds:
        first = FIRST_PORT[kind]
        candidates = [*([ports[kind]] if kind in ports else []), *range(first, first + _PORTS_TRIED)]
        port = next((port for port in candidates if _claim(port, claims)), None)
        if port is None:
            raise ServerError(
                f"{NAME[kind]} needs a free port on 127.0.0.1, and {first} to {first + _PORTS_TRIED - 1} are taken; "
                f"stop one of the programs that hold them, or start {NAME[kind]} yourself and set {VARIABLE[kind]}"
            )
        ports[kind] = port
    return ports


def _claim(port: int, claims: ExitStack) -> bool:
    """Keep a free port from other posttrain commands until the claims end: a server takes seconds to bind its own."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0posttrain-port-{port}" if sys.platform == "linux" else "")
    except OSError:
        claim.close()
        return False
    if not _is_free(port):
        claim.close()
        return False
    claims.enter_context(claim)
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _state(home: Path) -> dict[str, Any]:
    """`servers.json`: the ports of the last time, and the addresses while an owner runs. Empty when it is not readable."""
    try:
        state: dict[str, Any] = json.loads((home / _STATE).read_text())
    except (OSError, ValueError):
        return {}
    return state


def _answers(url: str) -> bool:
    """Whether the address answers at all; a refusal for want of a password is an answer."""
    loopback = urlsplit(url).hostname in {"127.0.0.1", "localhost", "::1"}
    opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if loopback else []))
    try:
        with opener.open(url, timeout=ANSWER_LIMIT_S):
            return True
    except urllib.error.HTTPError as error:
        return error.code in {401, 403}
    except (OSError, ValueError):
        return False


def _tail(log: Path, lines: int = 12) -> str:
    return "\n".join(f"  {line}" for line in log.read_text(errors="replace").rstrip().splitlines()[-lines:])


def _close_dead_runs(say: Say) -> None:
    """Runs that the store still shows as running although no process of this home is left: Crashed, so that Retry works."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
    from prefect.client.schemas.objects import StateType
    from prefect.states import Cancelled, Crashed

    gone = "its process was gone when the server started"
    live = FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING, StateType.CANCELLING])
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=live)), limit=200):
            cancelling = run.state is not None and run.state.type == StateType.CANCELLING
            message = gone if cancelling else f"{gone}; press Retry, or run the recipe again: finished stages are kept"
            client.set_flow_run_state(run.id, (Cancelled if cancelling else Crashed)(message=message), force=True)
            say(f"closed a run that had died: {run.name}")
