"""The Prefect server and the MLflow server of a project home: started, watched, started again and stopped here.

Addresses that are configured (`PREFECT_API_URL`, `MLFLOW_TRACKING_URI`) are used as they are. What is
not configured is started on loopback, with its store under the home, and stopped when the command
ends. Importing this file imports neither prefect nor mlflow, so that their settings come first.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from flows.owner import process_identity
from flows.servers.addresses import NAME, STATE, VARIABLE, check_password, choose_ports, read_state, status_of
from flows.servers.commands import PASSWORD, client_settings, password, server_address, server_command, sign_in
from flows.servers.processes import START_LIMIT_S, Kept, Say, end, end_marked, marked, refusal
from stages.artifacts import write_json
from stages.errors import ServerError

OUTAGE_LIMIT_S = 300.0
"""How long an outage of a server may last before what needs it fails."""
READY_FILE = "POSTTRAIN_READY_FILE"
"""Variable that names the file which the worker makes when runs can be started."""
_TICK_S = 0.2
_SERVER_MARK = "POSTTRAIN_SERVERS_OF"
_WORKER_MARK = "POSTTRAIN_WORKER_OF"
_UP = "up.lock"
_NOT_HANDED_ON = frozenset(
    {"PYTHONDONTWRITEBYTECODE", "PYTHONWARNINGS", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH", PASSWORD, _WORKER_MARK}
)


@dataclass(frozen=True)
class Server:
    """One server: `kind` is `prefect` or `mlflow`; `kept` is its process when this process started it."""

    kind: str
    address: str
    kept: Kept | None = None

    def answers(self) -> bool:
        """Whether its health page answers within seconds; a store without a server (sqlite) always does."""
        return not self.address.startswith("http") or status_of(f"{self.address}/health") in {200, 401, 403}

    def trouble(self) -> str | None:
        """What is wrong with it, in words, with the end of its log when it is ours; None when it is well or is being started again."""
        if self.kept:
            return self.kept.failure or None
        return None if self.answers() else f"{NAME[self.kind]} does not answer at {self.address} any more; start that server again"

    def wait(self, limit_s: float, say: Say) -> bool:
        """Wait until it answers, and say once when that takes time. False after `limit_s` seconds, or when ours is not started again."""
        until, said = time.monotonic() + limit_s, False
        while not self.answers():
            if time.monotonic() > until or (self.kept and self.kept.failure):
                return False
            if not said:
                say(f"waiting for {NAME[self.kind]} at {self.address}, for {limit_s:.0f} s at most")
                said = True
            time.sleep(_TICK_S)
        return True


@dataclass(frozen=True)
class Servers:
    """The addresses of the two servers. `owned`: this process started at least one and will stop it."""

    prefect_url: str
    prefect_api: str
    mlflow_url: str
    owned: bool
    members: tuple[Server, ...] = ()

    def check(self, kind: str | None = None) -> str | None:
        """A clear text when a server (only the one of that kind, when given) has died for good or does not answer any more, else None."""
        return next((text for server in self.members if kind in (None, server.kind) and (text := server.trouble())), None)

    def wait_for(self, kind: str, limit_s: float = OUTAGE_LIMIT_S, say: Say = print) -> bool:
        """Wait until the server of that kind answers, as `Server.wait` does."""
        return next(server for server in self.members if server.kind == kind).wait(limit_s, say)


def wait_for_prefect(say: Say = print, limit_s: float = OUTAGE_LIMIT_S) -> bool:
    """Wait until the Prefect server that the environment names answers, as `Server.wait` does; for flows in any process."""
    return Server("prefect", os.environ[VARIABLE["prefect"]]).wait(limit_s, say)


@contextmanager
def servers(home: Path, say: Say = print) -> Iterator[Servers]:
    """Both servers, answering, for the time of the block, with `os.environ` set for prefect and mlflow.

    Own servers that die are started again, at the same addresses and with the same stores. Another
    process with the same home uses the servers of the first, which waits for it before it stops them.
    Raises ServerError when a configured address does not answer, when a server cannot be started, when
    the home cannot be used, or when the password is not that of the running servers.
    """
    home = home.resolve()
    with ExitStack() as stack:
        found = _configured()
        missing = [kind for kind in NAME if kind not in found]
        alone = False
        if missing:
            password()
            with _usable(home):
                (home / "logs").mkdir(parents=True, exist_ok=True)
                users, running = _join(home, say, stack)
                if running is None:
                    alone = "prefect" in missing and _lock(users)
                    found |= stack.enter_context(_started(home, missing, found, users, say))
                else:
                    for kind in missing:
                        check_password(kind, running[kind].address)
                    found = running | found
        settings = client_settings(home, found["prefect"].address, found["mlflow"].address, own=tuple(missing))
        stack.enter_context(_environment(settings))
        if "prefect" in sys.modules:  # a second run in one process: prefect still has the settings of the first
            from prefect.context import refresh_global_settings_context

            refresh_global_settings_context()
        from flows.servers.reconcile import close_dead_runs

        close_dead_runs(say, alone)
        if alone:  # from here on others may join, and start runs
            fcntl.flock(users, fcntl.LOCK_UN)
        api = found["prefect"].address
        yield Servers(
            prefect_url=os.environ.get("PREFECT_UI_URL", api.removesuffix("/api")),
            prefect_api=api,
            mlflow_url=found["mlflow"].address,
            owned=any(server.kept for server in found.values()),
            members=tuple(found[kind] for kind in NAME),
        )


def up(home: Path, say: Say = print, worker: Sequence[str] | None = None) -> None:
    """Start both servers and the worker, name the addresses, and stay until Ctrl-C, SIGTERM or SIGHUP.

    `worker` is the command of the process that serves the deployments; it creates the file named by
    `POSTTRAIN_READY_FILE` when it is ready, and is started again when it dies. When a home has an `up`
    already, it is named and nothing is started. At the end the worker and the runs that it executes
    are ended first; those runs are marked as cancelled.
    Raises ServerError when a server or the worker cannot be started or dies too often.
    """
    home = home.resolve()
    with suppress(KeyboardInterrupt), stopping_on_signals(), ExitStack() as stack:
        with _usable(home):
            (home / "logs").mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((home / _UP).open("a+"))
            if not _lock(lock):
                say(_other_up(lock))
                return
            _note(lock, {"pid": os.getpid()})
        end_marked(f"{_WORKER_MARK}={home}")
        running = stack.enter_context(servers(home, say))
        kept = stack.enter_context(_serving(home, worker, running, say)) if worker else None
        addresses = {"prefect": running.prefect_url, "mlflow": running.mlflow_url}
        _note(lock, {"pid": os.getpid(), **addresses})
        for kind, address in addresses.items():
            say(f"{NAME[kind]:8} {address}" + (f"  ({how})" if (how := sign_in().get(kind)) else ""))
        say("Ctrl-C stops them.")
        while not (trouble := _trouble(running, kept, say)):
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


@contextmanager
def _serving(home: Path, worker: Sequence[str], running: Servers, say: Say) -> Iterator[Kept]:
    """The worker, ready, for the time of the block; then ended with all that it started, and its runs cancelled."""
    from flows.servers.reconcile import away_is_said, close_dead_runs, mark_cancelled, runs_of

    mark, ready = f"{_WORKER_MARK}={home}", home / "up.ready"
    prefect = running.members[0]
    ours_alone = prefect.kept is not None  # no other worker takes runs from it

    def start() -> tuple[Sequence[str], Mapping[str, str]]:
        if kept.process:  # it has died: what it left behind goes first
            end_marked(mark)
            if prefect.wait(OUTAGE_LIMIT_S, say):
                close_dead_runs(say, alone=False, unserved=ours_alone)
        ready.unlink(missing_ok=True)
        return worker, {**_handed_on(), "POSTTRAIN_HOME": str(home), READY_FILE: str(ready), _WORKER_MARK: str(home)}

    kept = Kept("The worker", start, ready.exists, home / "logs" / "worker.log", Path.cwd(), say)
    try:
        while not kept.is_ready:
            kept.look()
            if trouble := kept.failure or running.check():
                raise ServerError(trouble)
            time.sleep(_TICK_S)
        yield kept
    finally:
        interrupted = []
        try:
            with away_is_said(say):
                if prefect.answers():
                    interrupted = runs_of({process_identity(f":{pid}:") for pid in marked(mark)}, unowned=ours_alone)
        finally:  # also when a second Ctrl-C cuts this short
            end_marked(mark)
            end([kept.process] if kept.process else [])
            ready.unlink(missing_ok=True)
        with away_is_said(say):
            mark_cancelled(interrupted, "posttrain up was stopped")


def _trouble(running: Servers, worker: Kept | None, say: Say) -> str | None:
    """What ends `up`: a server or the worker that has died for good. Servers of another command get time to come back."""
    if worker:
        worker.look()
        if worker.failure:
            return worker.failure
    trouble = running.check()
    if trouble and not running.owned and all(running.wait_for(kind, OUTAGE_LIMIT_S, say) for kind in NAME):
        return None
    return trouble


def _other_up(lock: IO[str]) -> str:
    """What is known of the `up` that holds the lock, in words."""
    lock.seek(0)
    try:
        known = json.loads(lock.read())
    except ValueError:
        known = {}
    pages = ", ".join(f"{NAME[kind]} {known[kind]}" for kind in NAME if kind in known) or "its servers are starting"
    return f"posttrain up runs already for this home (process {known.get('pid', 'unknown')}): {pages}"


def _note(lock: IO[str], content: Mapping[str, Any]) -> None:
    lock.truncate(0)
    lock.write(json.dumps(content))
    lock.flush()


@contextmanager
def _usable(home: Path) -> Iterator[None]:
    """What the home refuses in the block is an error that a user can mend."""
    try:
        yield
    except OSError as error:
        raise ServerError(f"the home {home} cannot be used: {refusal(home, error)}") from error


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
        running = {kind: Server(kind, address) for kind, address in read_state(home)[1].items()}
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
    """Start servers of these kinds side by side, wait until they answer, keep them running; stop them at the end of the block."""
    _end_leftovers(home)
    began = time.monotonic()
    say(f"starting {' and '.join(NAME[kind] for kind in kinds)} (the first time takes longer: the stores are made) ...")
    with ExitStack() as claims:
        ports = choose_ports(home, kinds, claims)
        kept = {kind: _keep(home, kind, ports[kind], say) for kind in kinds}
        started = {kind: Server(kind, server_address(kind, ports[kind]), process) for kind, process in kept.items()}
        stop = threading.Event()
        # servers end with the thread that started them: this one starts them all, and lives until they are stopped
        keeper = threading.Thread(target=_look_after, args=(list(kept.values()), stop), name="keep-servers", daemon=True)
        keeper.start()
        try:
            for kind in _as_they_answer(kept):
                say(f"{NAME[kind]} answers at {started[kind].address.removesuffix('/api')} after {time.monotonic() - began:.1f} s")
            running = {kind: server.address for kind, server in {**others, **started}.items()}
            write_json(home / STATE, {"ports": ports, "running": running})
            yield started
            if not _lock(users):
                say("another posttrain command uses these servers; they stop when it ends (Ctrl-C stops them now)")
                fcntl.flock(users, fcntl.LOCK_EX)
        finally:
            stop.set()
            try:
                keeper.join()
            finally:
                end([process.process for process in kept.values() if process.process])
            with suppress(OSError):  # without it, the next start finds that no owner holds the lock
                write_json(home / STATE, {"ports": ports})


def _keep(home: Path, kind: str, port: int, say: Say) -> Kept:
    def start() -> tuple[Sequence[str], Mapping[str, str]]:
        command = server_command(kind, home, port)
        return command.arguments, {**_handed_on(), **command.settings, _SERVER_MARK: str(home)}

    return Kept(NAME[kind], start, Server(kind, server_address(kind, port)).answers, home / "logs" / f"{kind}.log", home, say)


def _look_after(kept: list[Kept], stop: threading.Event) -> None:
    while not stop.wait(_TICK_S):
        for process in kept:
            process.look()


def _as_they_answer(kept: Mapping[str, Kept]) -> Iterator[str]:
    """The kinds of the servers, each when its health page answers first. Raises ServerError when one dies or takes too long."""
    waiting = dict(kept)
    while waiting:
        for kind, process in list(waiting.items()):
            if process.failure:
                raise ServerError(process.failure)
            if process.is_ready:
                del waiting[kind]
                yield kind
        time.sleep(_TICK_S / 2)


def _handed_on() -> dict[str, str]:
    """The environment without what is not for servers and workers; the password reaches them in their own variables."""
    return {name: value for name, value in os.environ.items() if name not in _NOT_HANDED_ON}


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


def _end_leftovers(home: Path) -> None:
    """End servers of this home whose owner was killed (the caller holds the owner's lock), and a worker whose `up` was."""
    end_marked(f"{_SERVER_MARK}={home}")
    with (home / _UP).open("a+") as up_lock:
        if _lock(up_lock):
            end_marked(f"{_WORKER_MARK}={home}")
