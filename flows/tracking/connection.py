"""MLflow as this process sees it: a client, its experiments, and whether it answers.

What MLflow cannot take is never raised. It is away (no answer: left alone for a while, calls are kept)
or it refused (told once, left out).
"""

from __future__ import annotations

import logging
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from mlflow.exceptions import MlflowException, RestException
from mlflow.store.entities import PagedList
from mlflow.tracking import MlflowClient

from flows.tracking.outbox import Outbox
from stages.errors import ServerError

T = TypeVar("T")

AWAY_S = (15.0, 120.0)
"""How long MLflow is left alone after it did not answer: at first, doubling, and at most."""
HOME_TAG = "posttrain.home"
"""Tag of an experiment: `host:folder` of the project home that writes it."""
SAMPLES = ".samples"
"""Ending of the name of the experiment that holds a recipe's samples side by side."""
_PROBE_S = 3.0
_KIND = {False: "custom_model_development", True: "genai_development"}

_log = logging.getLogger("posttrain")


class Connection:
    """One tracking server or store, and the outbox for what it could not take."""

    def __init__(self, uri: str, home: Path) -> None:
        """uri: tracking server or store. home: project home; artifacts and the outbox lie under it."""
        self.uri = uri.rstrip("/")
        self.shown = _without_password(self.uri)
        self.home = home.resolve()
        self.outbox = Outbox(self.home)
        self.client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        self._away_until, self._away_s = 0.0, AWAY_S[0]
        self._mine = f"{socket.gethostname()}:{self.home}"
        self._told: set[str] = set()
        self._experiments: dict[str, str] = {}

    def is_away(self) -> bool:
        """Whether MLflow did not answer a short while ago and is left alone, or still does not: a hung server costs seconds to find out."""
        if time.monotonic() < self._away_until:
            return True
        if self._away_until and not _answers(self.uri):
            self._leave_alone()
            return True
        self._away_until = 0.0
        return False

    def attempt(self, action: Callable[[], T]) -> T | Literal[""] | None:
        """What the action returns; an empty text when MLflow refused; None when it is away."""
        try:
            done = action()
            self._away_s = AWAY_S[0]
            return done
        except (MlflowException, OSError) as error:
            if _is_away(error):
                self._leave_alone()
                self._tell(
                    "away",
                    f"MLflow at {self.shown} does not answer ({self._short(error)}). The run goes on; its records are kept "
                    f"under {self.home} and sent when it answers again, or by `posttrain sync`",
                )
                return None
            self._tell_refused(error)
            return ""

    def ask(self, question: Callable[[], T], otherwise: T) -> T:
        """What the question returns; `otherwise` when MLflow is away or refused."""
        if self.is_away():
            return otherwise
        answer = self.attempt(question)
        return otherwise if answer is None or answer == "" else answer

    def part(self, action: Callable[[], object]) -> bool:
        """One part of a call: what MLflow refuses is told and left out, so that the parts after it are still written. True when it went."""
        try:
            action()
        except (MlflowException, OSError) as error:
            if _is_away(error):
                raise
            self._tell_refused(error)
            return False
        return True

    def must(self, question: Callable[[], T], purpose: str) -> T:
        """What the question returns. Raises ServerError when MLflow is away or refused, since `purpose` cannot go on without it."""
        try:
            return question()
        except (MlflowException, OSError) as error:
            raise ServerError(
                f"{purpose}: MLflow at {self.shown} cannot say ({self._short(error)}); nothing was changed. "
                "Start that server, or look at its log, and run the same command again"
            ) from error

    def experiment(self, name: str) -> str:
        """Id of an experiment, which is made the first time: a local store keeps artifacts under the home."""
        if name not in self._experiments:
            identity, active = self.find_experiment(name) or self._make_experiment(name)
            if not active:
                self.client.restore_experiment(identity)
            self._experiments[name] = identity
        return self._experiments[name]

    def find_experiment(self, name: str) -> tuple[str, bool] | None:
        """Id of an experiment and whether it is active (not deleted); None when there is none."""
        found = self.client.get_experiment_by_name(name)
        return None if found is None else (str(found.experiment_id), found.lifecycle_stage == "active")

    def own_experiments(self) -> list[str]:
        """Ids of the experiments that this home writes."""
        found = every(lambda token: self.client.search_experiments(page_token=token))
        return [str(experiment.experiment_id) for experiment in found if experiment.tags.get(HOME_TAG) == self._mine]

    def claim_experiment(self, name: str) -> None:
        """Mark the experiment as this home's. Raises ServerError when another home on this machine writes it."""
        identity = self.experiment(name)
        host, _, folder = self.client.get_experiment(identity).tags.get(HOME_TAG, "").partition(":")
        if host == socket.gethostname() and Path(folder) != self.home and Path(folder).exists():
            raise ServerError(
                f"recipe {name}: its records in MLflow at {self.shown} belong to the home {folder}, and this run's home is {self.home}. "
                "The rule is one home a tracking database, since each reuses, closes and frees what it finds there. "
                f"Unset MLFLOW_TRACKING_URI, so that this home gets a server of its own, or set POSTTRAIN_HOME={folder}"
            )
        if not folder or (host == socket.gethostname() and Path(folder) != self.home):
            self.client.set_experiment_tag(identity, HOME_TAG, self._mine)

    def _make_experiment(self, name: str) -> tuple[str, bool]:
        here = not self.uri.startswith("http") or urlsplit(self.uri).hostname in {"127.0.0.1", "localhost", "::1"}
        location = (self.home / "artifacts").as_uri() if here else None
        tags = {HOME_TAG: self._mine, "mlflow.experimentKind": _KIND[name.endswith(SAMPLES)]}
        try:
            return str(self.client.create_experiment(name, artifact_location=location, tags=tags)), True
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS" or (made := self.find_experiment(name)) is None:
                raise
            return made  # by another process, since it was looked for

    def _leave_alone(self) -> None:
        self._away_until = time.monotonic() + self._away_s
        self._away_s = min(2 * self._away_s, AWAY_S[1])

    def _tell_refused(self, error: Exception) -> None:
        text = self._short(error)
        self._tell(
            text[:80],
            f"MLflow at {self.shown} did not take a record: {text}. The run goes on; the stage folders keep everything",
        )

    def _short(self, error: Exception) -> str:
        return " ".join(str(error).replace(self.uri, self.shown).split())[:300]

    def _tell(self, key: str, text: str) -> None:
        if key not in self._told:
            self._told.add(key)
            _log.warning(text)


def every(page: Callable[[str | None], PagedList[T]]) -> Iterator[Any]:
    """Everything that a search finds, page after page."""
    token: str | None = None
    while True:
        found = page(token)
        yield from found
        if not (token := found.token):
            return


def _is_away(error: MlflowException | OSError) -> bool:
    """Whether MLflow could not be reached; anything else it refused."""
    if isinstance(error, MlflowException):
        no_reply = not isinstance(error, RestException) and str(error).startswith("API request")
        return no_reply or error.error_code == "TEMPORARILY_UNAVAILABLE"
    return isinstance(error, ConnectionError | TimeoutError)


def _answers(uri: str) -> bool:
    """Whether a server answers at once, if only by a refusal; a store without a server always does."""
    if not uri.startswith("http"):
        return True
    try:
        with urllib.request.urlopen(f"{_without_password(uri)}/health", timeout=_PROBE_S):  # noqa: S310 - http by the line above
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except (OSError, ValueError):
        return False


def _without_password(uri: str) -> str:
    """An address without the name and password that it may hold."""
    parts = urlsplit(uri)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl() if "@" in parts.netloc else uri
