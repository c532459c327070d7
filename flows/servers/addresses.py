"""Where the servers are: free ports that are kept for the next time, what an address answers, and whether our password fits it."""

from __future__ import annotations

import base64
import json
import socket
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from flows.servers.commands import PASSWORD, USER, password
from stages.errors import ServerError

NAME = {"prefect": "Prefect", "mlflow": "MLflow"}
VARIABLE = {"prefect": "PREFECT_API_URL", "mlflow": "MLFLOW_TRACKING_URI"}
FIRST_PORT = {"prefect": 4300, "mlflow": 5300}
ANSWER_LIMIT_S = 5.0
STATE = "servers.json"
_PORTS_TRIED = 50
_SIGNED_IN = {"prefect": "/version", "mlflow": "/api/2.0/mlflow/experiments/get?experiment_id=0"}


def choose_ports(home: Path, kinds: list[str], claims: ExitStack) -> dict[str, int]:
    """A free port for each kind: the one of the last time when it is free, so that old links stay valid. Keeps the others' ports."""
    ports, _ = read_state(home)
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
        except (OSError, OverflowError):  # OverflowError: no port at all
            return False
    return True


def read_state(home: Path) -> tuple[dict[str, int], dict[str, str]]:
    """From `servers.json`: the ports of the last time, and the addresses while an owner runs. Empty when it is not readable."""
    try:
        state = json.loads((home / STATE).read_text())
        ports = {kind: int(state["ports"][kind]) for kind in NAME if kind in state["ports"]}
        return ports, {kind: str(state["running"][kind]) for kind in NAME} if "running" in state else {}
    except (OSError, ValueError, TypeError, KeyError):
        return {}, {}


def check_password(kind: str, address: str) -> None:
    """Raise ServerError when a running server of this home has another password than the environment, or only one of them has one."""
    secret, page = password(), f"{address}{_SIGNED_IN[kind]}"
    asks = status_of(page) == 401
    trouble = None
    if asks and secret is None:
        trouble = f"asks for a password; set {PASSWORD} to the one that it was started with"
    elif secret and not asks:
        trouble = (
            f"runs without a password, and {PASSWORD} is set; stop the command that started it and start it again, or unset {PASSWORD}"
        )
    elif secret and status_of(page, secret) == 401:
        trouble = f"was started with another password; set {PASSWORD} to that one, or stop the command that started it"
    if trouble:
        raise ServerError(f"{NAME[kind]} at {address} {trouble}")


def status_of(url: str, secret: str | None = None) -> int:
    """The status with which an address answers within seconds, signed in with the password when given; 0 when it does not answer."""
    try:
        loopback = urlsplit(url).hostname in {"127.0.0.1", "localhost", "::1"}
        opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if loopback else []))
        if secret:
            opener.addheaders = [("Authorization", f"Basic {base64.b64encode(f'{USER}:{secret}'.encode()).decode()}")]
        with opener.open(url, timeout=ANSWER_LIMIT_S) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError, HTTPException):
        return 0
