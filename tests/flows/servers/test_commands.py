"""Settings of the servers: what a password may be, that both servers ask for it, and that it is written nowhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from flows.servers.commands import client_settings, password, server_command
from flows.servers.serving import VARIABLE, servers
from stages.errors import ServerError

SECRET = "Kor:rekt-Pferd%7"


@pytest.mark.parametrize(
    "given", ["short", "elevenchars", "with a space in it", "mit-Umlaut-äöü-lang", "line\nbreak-in-it", "password1234"]
)
def test_password_against_the_rule_names_variable_and_rule_but_not_itself(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_PASSWORD", given)
    with pytest.raises(ServerError, match=r"POSTTRAIN_PASSWORD .*at least 12 printable ASCII characters") as error:
        password()
    assert given == "password1234" or given not in str(error.value)


@pytest.mark.parametrize("given", [None, ""])
def test_password_unset_or_empty_is_none_anywhere(given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTTRAIN_PASSWORD", raising=False)
    if given is not None:
        monkeypatch.setenv("POSTTRAIN_PASSWORD", given)
    assert password() is None
    settings = client_settings(tmp_path, "http://p/api", "http://m", own=("prefect", "mlflow"))
    for kind in ("prefect", "mlflow"):
        settings |= server_command(kind, tmp_path, 4300).settings
    assert [name for name in settings if "AUTH" in name or "PASSWORD" in name] == []


def test_client_settings_configured_servers_do_not_get_our_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_PASSWORD", SECRET)
    with_own = client_settings(tmp_path, "http://p/api", "http://m", own=("mlflow",))
    assert "PREFECT_API_AUTH_STRING" not in with_own
    assert (with_own["MLFLOW_TRACKING_USERNAME"], with_own["MLFLOW_TRACKING_PASSWORD"]) == ("posttrain", SECRET)
    assert SECRET not in str(client_settings(tmp_path, "http://p/api", "http://m", own=()))


def test_server_command_with_a_password_keeps_it_out_of_arguments_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_PASSWORD", SECRET)
    for kind in ("prefect", "mlflow"):
        command = server_command(kind, tmp_path, 4300)
        assert not any(SECRET in argument for argument in command.arguments)
        assert any(SECRET in value for value in command.settings.values())
    assert files_with(SECRET, tmp_path) == []


def files_with(text: str, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def arguments_with(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes()
        except OSError:
            continue
        if text.encode() in arguments:
            found.append(str(path))
    return found


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


JOIN = """
import os, sys
from pathlib import Path
from flows.servers.serving import servers
from stages.errors import ServerError
try:
    with servers(Path(sys.argv[1])) as running:
        print("joined", running.owned)
except ServerError as error:
    print(error)
"""


def joined(home: Path, secret: str) -> str:
    """What another posttrain process of this home says."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    done = subprocess.run(
        [sys.executable, "-c", JOIN, str(home)], env={**environment, "POSTTRAIN_PASSWORD": secret}, capture_output=True, text=True
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_servers_with_a_password_ask_for_it_and_take_a_new_one_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLE.values():
        monkeypatch.delenv(variable, raising=False)
    for secret in (SECRET, "another-good-one"):
        monkeypatch.setenv("POSTTRAIN_PASSWORD", secret)
        with servers(tmp_path, lambda text: None) as running:
            pages = [f"{running.prefect_api}/version", f"{running.prefect_api}/flow_runs/count", running.mlflow_url]
            pages.append(f"{running.mlflow_url}/api/2.0/mlflow/experiments/get?experiment_id=0")
            assert [status(page) for page in pages] == [401] * 4
            from mlflow import MlflowClient
            from prefect import Flow
            from prefect.client.orchestration import get_client

            with get_client(sync_client=True) as client:
                client.create_flow_run(Flow(status, name="work"))
            assert [experiment.name for experiment in MlflowClient(running.mlflow_url).search_experiments()] == ["Default"]
            if secret == SECRET:
                assert "asks for a password; set POSTTRAIN_PASSWORD" in joined(tmp_path, "")
                assert "was started with another password" in joined(tmp_path, "no-such-password")
                assert "joined False" in joined(tmp_path, SECRET)
            assert arguments_with(secret) == []
            assert secret not in json.dumps(json.loads((tmp_path / "servers.json").read_text()))
            assert files_with(secret, tmp_path) == []
        assert "MLFLOW_TRACKING_PASSWORD" not in os.environ
    assert files_with(SECRET, tmp_path) == []
