"""What travels between stages: handles to checkpoints and data sets, and the result of a stage.

A handle is a name, a content digest, a path and the fingerprint of the run that made it. Files stay
in the producer's folder; nothing is copied. Light ground: imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

from pydantic import BaseModel, ConfigDict, Field

from stages.errors import ArtifactError

RESULT = "result.json"
CONFIG = "config.json"
METRICS = "metrics.jsonl"
LOG = "log.txt"
REPORT = "report"
"""Folder of what a stage writes for people to read; MLflow shows it."""
TRAINER_DIR = "trainer"
"""Where trainers keep their own checkpoints while a stage runs, one folder a phase."""
_NOT_CONTENT = frozenset({"README.md", "training_args.bin"})


class Ref(BaseModel):
    """Handle to a finished artifact. Frozen; compares by value."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(description="Name for people, for instance `cold_start.model`.")
    digest: str = Field(description="SHA-256 of the content, 64 hexadecimal digits.")
    path: Path = Field(description="Absolute path of the file or folder.")
    producer: str = Field(description="Fingerprint of the stage that made it, or `given`.")


class CheckpointRef(Ref):
    """A Hugging Face folder: safetensors, config, tokenizer and chat template."""

    kind: Literal["model"] = "model"


class DatasetRef(Ref):
    """A Parquet file."""

    kind: Literal["dataset"] = "dataset"
    rows: int = Field(ge=0, description="Number of rows.")


Handles = Mapping[str, CheckpointRef | DatasetRef]


class StageOutput(NamedTuple):
    """What a stage's `run` returns: its artifacts by output name, and its final metrics."""

    outputs: dict[str, CheckpointRef | DatasetRef]
    metrics: dict[str, float]


class StageResult(BaseModel):
    """`result.json`: written last, so its existence means that the stage is complete."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stage: str
    fingerprint: str
    key: dict[str, Any] = Field(description="The parts that the fingerprint was made of.")
    outputs: dict[str, CheckpointRef | DatasetRef]
    metrics: dict[str, float]
    seconds: float = Field(description="Wall time of the stage's process, start to end.")
    busy_seconds: float = Field(description="Wall time inside trainers and the engine.")
    tokens: int = Field(description="Tokens generated and trained on.")
    peak_memory_mib: float = Field(description="Largest resident size of the process, MiB.")
    versions: dict[str, str] = Field(description="Versions of the libraries that did the work.")


def digest_of_file(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of_folder(path: Path) -> str:
    """SHA-256 over the names and contents of a folder's files; model cards do not count."""
    lines = [
        f"{file.relative_to(path).as_posix()} {digest_of_file(file)}"
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name not in _NOT_CONTENT
    ]
    if not lines:
        raise ArtifactError(f"{path} holds no files; a checkpoint folder needs config.json and *.safetensors")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def verify(ref: Ref) -> None:
    """Raise ArtifactError when the content at `ref.path` is gone or is not what the digest says."""
    if not ref.path.exists():
        raise ArtifactError(f"{ref.name}: {ref.path} is gone; rerun the stage that made it ({ref.producer[:12]})")
    found = digest_of_folder(ref.path) if ref.path.is_dir() else digest_of_file(ref.path)
    if found != ref.digest:
        given = ref.producer == "given"
        remedy = "run the same command again" if given else f"delete {ref.path.parent} and rerun the stage that made it"
        raise ArtifactError(f"{ref.name}: {ref.path} has changed (digest {found[:12]}, recorded {ref.digest[:12]}); {remedy}")


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A text file that takes the place of `path` when the block ends well: a reader sees the old one or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write JSON in place of what is at `path`."""
    with replacing(path) as file:
        json.dump(content, file, indent=2, sort_keys=True, ensure_ascii=False)


def read_result(stage_dir: Path) -> StageResult | None:
    """The result of a complete stage folder, or None when the stage has not finished there.

    Raises ArtifactError when `result.json` is there but cannot be read.
    """
    path = stage_dir / RESULT
    if not path.exists():
        return None
    try:
        return StageResult.model_validate_json(path.read_text())
    except ValueError as error:
        raise ArtifactError(f"{path} cannot be read ({error}); delete {stage_dir} and run again") from error


def last_checkpoint(stage_dir: Path) -> Path | None:
    """A complete trainer checkpoint of a stage folder, the newest of its phase, or None."""
    phases = sorted((stage_dir / TRAINER_DIR).glob("*/"))
    return next((found for phase in phases if (found := newest_checkpoint(phase)) is not None), None)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a trainer's folder."""
    complete = {
        int(path.name.removeprefix("checkpoint-")): path
        for path in folder.glob("checkpoint-*")
        if path.name.removeprefix("checkpoint-").isdigit() and _is_complete(path)
    }
    return complete[max(complete)] if complete else None


def _is_complete(checkpoint: Path) -> bool:
    """Whether `trainer_state.json`, which a trainer writes last, is there and whole."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text())
    except (OSError, ValueError):
        return False
    return True


def is_there(path: Path) -> bool:
    """Whether an artifact's file, or its folder with something in it, exists."""
    return any(path.iterdir()) if path.is_dir() else path.is_file()
