"""Addresses: ports are kept, what is taken is not used, and a password that does not fit is named."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from flows.servers.addresses import FIRST_PORT, check_password, choose_ports, status_of
from stages.errors import ServerError

SECRET = "correct-horse"


class Asking(BaseHTTPRequestHandler):
    """A server that asks for a password at `/closed`, and for none elsewhere."""

    def do_GET(self) -> None:
        right = "Basic " + base64.b64encode(f"posttrain:{SECRET}".encode()).decode()
        self.send_response(200 if "closed" not in self.path or self.headers["Authorization"] == right else 401)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def address(serve: Callable[[type[BaseHTTPRequestHandler]], AbstractContextManager[str]]) -> Iterator[str]:
    with serve(Asking) as address:
        yield address


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_ports_of_the_last_time_are_used_again_unless_taken_or_claimed(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        taken, free = int(busy.getsockname()[1]), free_port()
        (tmp_path / "servers.json").write_text(json.dumps({"ports": {"prefect": taken, "mlflow": free}}))
        with ExitStack() as claims:
            ports = choose_ports(tmp_path, ["prefect", "mlflow"], claims)
            with ExitStack() as others:
                assert choose_ports(tmp_path, ["mlflow"], others)["mlflow"] != free
    assert ports["mlflow"] == free
    assert ports["prefect"] >= FIRST_PORT["prefect"]
    assert ports["prefect"] != taken


@pytest.mark.parametrize("text", ["{", "[]", '{"ports": []}', '{"ports": {"prefect": "x"}}', '{"ports": {"prefect": 99999999}}'])
def test_ports_state_file_damaged_or_absurd_is_like_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "servers.json").write_text(text)
    with ExitStack() as claims:
        assert choose_ports(tmp_path, ["prefect"], claims)["prefect"] in range(1024, 65536)


def test_status_nothing_there_is_zero_and_a_refusal_is_its_code(address: str) -> None:
    assert status_of(f"http://127.0.0.1:{free_port()}/health") == 0
    assert status_of("http://[") == 0
    assert (status_of(f"{address}/open"), status_of(f"{address}/closed"), status_of(f"{address}/closed", SECRET)) == (200, 401, 200)


def test_check_password_of_a_running_server_right_or_none_on_both_sides_passes(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTTRAIN_PASSWORD", raising=False)
    assert check_password("prefect", f"{address}/open") is None
    monkeypatch.setenv("POSTTRAIN_PASSWORD", SECRET)
    assert check_password("prefect", f"{address}/closed") is None


@pytest.mark.parametrize(
    ("page", "secret", "remedy"),
    [
        ("closed", "", "asks for a password; set POSTTRAIN_PASSWORD"),
        ("closed", "another-horse", "was started with another password"),
        ("open", SECRET, "runs without a password"),
    ],
)
def test_check_password_of_a_running_server_differs_names_the_remedy(
    page: str, secret: str, remedy: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTTRAIN_PASSWORD", secret)
    with pytest.raises(ServerError, match=remedy) as error:
        check_password("mlflow", f"{address}/{page}")
    assert secret not in str(error.value) or not secret
