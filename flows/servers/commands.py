"""Commands and settings of our two servers, and of the clients that talk to them.

Both servers listen on loopback only, keep their store under the home, send no telemetry and take
nothing from foreign web pages. With `POSTTRAIN_PASSWORD` both ask for it; it travels in environment
variables only, never in arguments or files.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from stages.errors import ServerError

USER = "posttrain"
PASSWORD = "POSTTRAIN_PASSWORD"
_PASSWORD_CHARACTERS = 12
_REFUSED_BY_MLFLOW = "password1234"


class Command(NamedTuple):
    """How a server is started: its arguments and what it needs in its environment."""

    arguments: list[str]
    settings: dict[str, str]


def password() -> str | None:
    """The password of our own servers, from the environment; None without one. Raises ServerError when MLflow would not take it."""
    given = os.environ.get(PASSWORD)
    if not given:
        return None
    if len(given) < _PASSWORD_CHARACTERS or not given.isascii() or not given.isprintable() or " " in given or given == _REFUSED_BY_MLFLOW:
        raise ServerError(
            f"{PASSWORD} ({len(given)} characters) cannot be used; the rule, from MLflow and HTTP, is at least {_PASSWORD_CHARACTERS} "
            f"printable ASCII characters without spaces, and not {_REFUSED_BY_MLFLOW}; set another one, or unset it to have no password"
        )
    return given


def server_address(kind: str, port: int) -> str:
    """The address that clients of a server of that kind (`prefect` or `mlflow`) use."""
    return f"http://127.0.0.1:{port}" + ("/api" if kind == "prefect" else "")


def server_command(kind: str, home: Path, port: int) -> Command:
    """The command that starts a server of that kind. Raises ServerError when the password cannot be used."""
    command = _prefect(home, port) if kind == "prefect" else _mlflow(home, port)
    return command._replace(settings={**_common_settings(), **command.settings})


def client_settings(home: Path, prefect: str, mlflow: str, own: tuple[str, ...]) -> dict[str, str]:
    """What this process and its children need to talk to the servers; a dead MLflow costs seconds, not minutes.

    `prefect` and `mlflow` are their addresses, `own` the kinds that are this home's own: only those get our password.
    """
    secret = password() if own else None
    settings = {
        **_common_settings(),
        "PREFECT_API_URL": prefect,
        "MLFLOW_TRACKING_URI": mlflow,
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": os.environ.get("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2"),
        "MLFLOW_HTTP_REQUEST_TIMEOUT": os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT", "10"),
    }
    if "prefect" in own:
        settings |= _prefect_settings(home, prefect, secret)
    if "mlflow" in own and secret:
        settings |= {"MLFLOW_TRACKING_USERNAME": USER, "MLFLOW_TRACKING_PASSWORD": secret}
    return settings


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


def _prefect(home: Path, port: int) -> Command:
    """Scheduling, cancellation and events are on for the runs that its pages start. What marks work pools and late runs,
    and automations, have nothing to do here and would only write: off."""
    api = server_address("prefect", port)
    secret = password()
    off = ("FOREMAN", "TRIGGERS", "LATE_RUNS")
    settings = {
        **_prefect_settings(home, api, secret),
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
        **({"PREFECT_SERVER_API_AUTH_STRING": f"{USER}:{secret}"} if secret else {}),
    }
    return Command([sys.executable, "-m", "flows.servers.prefect_app"], settings)


def _mlflow(home: Path, port: int) -> Command:
    """One worker and no job runner: a tenth of the processes that MLflow starts by default."""
    hosts = [f"127.0.0.1:{port}", f"localhost:{port}"]
    secret = password()
    arguments = [
        *(sys.executable, "-m", "mlflow", "server"),
        *("--host", "127.0.0.1"),
        *("--port", str(port)),
        *("--workers", "1"),
        *("--backend-store-uri", f"sqlite:///{home}/mlflow.db"),
        *("--artifacts-destination", str(home / "artifacts")),
        *("--allowed-hosts", ",".join(hosts)),
        *("--cors-allowed-origins", ",".join(f"http://{host}" for host in hosts)),
        *(("--app-name", "basic-auth") if secret else ()),
    ]
    settings = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **(_mlflow_password(home, secret) if secret else {})}
    return Command(arguments, settings)


def _mlflow_password(home: Path, secret: str) -> dict[str, str]:
    """Settings of MLflow's sign-in. Its user store holds our one user; it is made anew, so that it knows the password of today."""
    folder = home / "mlflow-users"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    database = str(folder / "users.db").replace("%", "%%")
    (folder / "config.ini").write_text(
        f"[mlflow]\ndefault_permission = NO_PERMISSIONS\ndatabase_uri = sqlite:///{database}\n"
        "auth_cache_ttl_seconds = 60\n"  # hashing the password for every request would cost more than most requests
    )
    return {
        "MLFLOW_AUTH_CONFIG_PATH": str(folder / "config.ini"),
        "MLFLOW_AUTH_ADMIN_USERNAME": USER,
        "MLFLOW_AUTH_ADMIN_PASSWORD": secret,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(32),
    }


def _prefect_settings(home: Path, api: str, secret: str | None) -> dict[str, str]:
    """What Prefect's server and its clients share."""
    return {
        "PREFECT_API_URL": api,
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_LOCAL_STORAGE_PATH": str(home / "prefect" / "storage"),
        "PREFECT_MEMO_STORE_PATH": str(home / "prefect" / "memo_store.toml"),
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_DEPLOYMENT_CONCURRENCY_SLOT_WAIT_SECONDS": "5",
        "PREFECT_RUNNER_POLL_FREQUENCY": "2",
        **({"PREFECT_API_AUTH_STRING": f"{USER}:{secret}"} if secret else {}),
    }


def sign_in() -> Mapping[str, str]:
    """How to sign in to each server's pages, in words; empty without a password."""
    if password() is None:
        return {}
    return {"prefect": f"sign in with {USER}:<your {PASSWORD}>", "mlflow": f"sign in as {USER} with your {PASSWORD}"}
