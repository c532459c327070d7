"""MLflow as this process sees it: a client, its experiments, and whether it answers.

What MLflow cannot take is never raised. It is away (no answer: left alone for a while, calls are kept)
or it refused (told once, left out).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import urlsplit

from mlflow.exceptions import MlflowException, RestException
from mlflow.tracking import MlflowClient

from flows.tracking.outbox import Outbox

T = TypeVar("T")

AWAY_S = (15.0, 120.0)
"""How long MLflow is left alone after it did not answer: at first, doubling, and at most."""

_log = logging.getLogger("posttrain")


class Connection:
    """One tracking server or store, and the outbox for what it could not take."""

    def __init__(self, uri: str, home: Path) -> None:
        """uri: tracking server or store. home: project home; artifacts and the outbox lie under it."""
        self.uri = uri.rstrip("/")
        self.home = home.resolve()
        self.outbox = Outbox(self.home)
        self.client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        self._away_until, self._away_s = 0.0, AWAY_S[0]
        self._told: set[str] = set()
        self._experiments: dict[str, str] = {}

    def is_away(self) -> bool:
        """Whether MLflow did not answer a short while ago and is left alone."""
        return time.monotonic() < self._away_until

    def attempt(self, action: Callable[[], T]) -> T | Literal[""] | None:
        """What the action returns; an empty text when MLflow refused; None when it is away."""
        try:
            done = action()
            self._away_s = AWAY_S[0]
            return done
        except (MlflowException, OSError) as error:
            if _is_away(error):
                self._away_until = time.monotonic() + self._away_s
                self._away_s = min(2 * self._away_s, AWAY_S[1])
                self._tell(
                    "away",
                    f"MLflow at {self.uri} does not answer ({_short(error)}). The run goes on; its records are kept "
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

    def experiment(self, recipe: str) -> str:
        """Id of a recipe's experiment, which is made the first time: a local store keeps artifacts under the home."""
        if recipe not in self._experiments:
            found = self.client.get_experiment_by_name(recipe)
            if found is None:
                here = not self.uri.startswith("http") or urlsplit(self.uri).hostname in {"127.0.0.1", "localhost", "::1"}
                location = (self.home / "artifacts").as_uri() if here else None
                identity = str(self.client.create_experiment(recipe, artifact_location=location))
                self.client.set_experiment_tag(identity, "mlflow.experimentKind", "custom_model_development")
            else:
                identity = str(found.experiment_id)
                if found.lifecycle_stage != "active":
                    self.client.restore_experiment(identity)
            self._experiments[recipe] = identity
        return self._experiments[recipe]

    def _tell_refused(self, error: Exception) -> None:
        text = _short(error)
        self._tell(
            text[:80],
            f"MLflow at {self.uri} did not take a record: {text}. The run goes on; the stage folders keep everything",
        )

    def _tell(self, key: str, text: str) -> None:
        if key not in self._told:
            self._told.add(key)
            _log.warning(text)


def _is_away(error: MlflowException | OSError) -> bool:
    """Whether MLflow could not be reached; anything else it refused."""
    if isinstance(error, MlflowException):
        no_reply = not isinstance(error, RestException) and str(error).startswith("API request")
        return no_reply or error.error_code == "TEMPORARILY_UNAVAILABLE"
    return isinstance(error, ConnectionError | TimeoutError)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
