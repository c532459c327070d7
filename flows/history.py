"""The runs of a project home: what was asked, and which result every stage had. One file a run, `<home>/runs/<recipe>-<n>.json`.

A later run can start from an earlier one's artifacts: it names it by its short id (`tiny-3`), by the id
of its MLflow run or of its Prefect run, or as `latest`.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flows.owner import is_gone, process_identity
from flows.plan import stage_folder
from stages.artifacts import StageResult, read_result, write_json
from stages.errors import ArtifactError

Kind = Literal["recipe", "rerun", "ablation"]
Ending = Literal["running", "finished", "failed", "cancelled", "died"]
LATEST = "latest"
_FOLDER = "runs"


class Finished(BaseModel):
    """The result that a stage had in a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stage: str = Field(description="Kind of the stage; with the fingerprint it names the folder.")
    fingerprint: str


class Record(BaseModel):
    """One run, as its file says. Frozen: a change is a new record, kept with `keep`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(description="Short id, for instance `tiny-3`.")
    kind: Kind = Field(description="A whole recipe, some stages of an earlier run again, or an ablation.")
    recipe: str
    text: str = Field(description="The recipe as resolved: YAML with the overrides in place.")
    overrides: dict[str, str]
    variant: str = Field(description="The overrides, for people.")
    stage: str | None = Field(None, description="The stage that was run again or ablated.")
    of_run: str | None = Field(None, description="The run whose settings and artifacts it started from.")
    part_of: str | None = Field(None, description="The ablation that this run is a variant of.")
    parts: tuple[str, ...] = Field((), description="Of an ablation: its variants' runs, the baseline first.")
    compared_at: str | None = Field(None, description="Of an ablation: the stage whose evaluation is compared.")
    status: Ending = Field("running", description="`died`: it says running, and the process that conducted it is gone.")
    owner: str = Field("", description="The process that conducts it.")
    started: float = Field(description="Seconds since 1970.")
    finished: float | None = None
    nodes: dict[str, Finished] = Field(default_factory=dict, description="Stages that have a result in this run, by name.")
    drift: dict[str, str] = Field(default_factory=dict, description="Stages reused in spite of a changed key, and what had changed.")
    mlflow_run: str = ""
    prefect_run: str = ""
    links: dict[str, str] = Field(default_factory=dict)


def open_run(home: Path, recipe: str, **content: Any) -> Record:
    """Begin a run under the next free id and keep it. Two commands at once get two ids."""
    folder = home / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    number = max((_number(path, recipe) for path in folder.glob(f"{recipe}-*.json")), default=0)
    while True:
        number += 1
        path = folder / f"{recipe}-{number}.json"
        try:
            path.open("x").close()
        except FileExistsError:
            continue
        return keep(home, Record(id=path.stem, recipe=recipe, started=round(time.time(), 1), owner=process_identity(), **content))


def keep(home: Path, record: Record, **changes: Any) -> Record:
    """Keep a run with these changes; returns it as kept. Atomic."""
    record = record.model_copy(update=changes)
    write_json(home / _FOLDER / f"{record.id}.json", record.model_dump(mode="json"))
    return record


def read_runs(home: Path, recipe: str | None = None) -> list[Record]:
    """All runs, or those of one recipe, oldest first. A file that a kill left empty is passed over."""
    found = [_read(path) for path in (home / _FOLDER).glob("*.json") if path.stat().st_size and (recipe is None or _number(path, recipe))]
    return sorted(found, key=lambda record: (record.started, record.id))


def find_run(home: Path, reference: str, recipe: str | None = None) -> Record:
    """The run of that short id, MLflow run id or Prefect run id; `latest`: the newest run of the whole recipe.

    Raises ArtifactError, naming the runs that there are.
    """
    runs = read_runs(home, recipe)
    if reference == LATEST:
        found = next((run for run in reversed(runs) if run.kind == "recipe"), None)
    else:
        found = next((run for run in runs if reference in (run.id, run.mlflow_run, run.prefect_run)), None)
    if found is None:
        known = ", ".join(run.id for run in runs[-8:]) or f"none yet; make one with: posttrain run {recipe or 'tiny'}"
        raise ArtifactError(f"there is no run {reference!r}{f' of {recipe}' if recipe else ''} in {home}; the last ones: {known}")
    return found


def results_of_run(home: Path, record: Record) -> dict[str, StageResult]:
    """The results that a run's stages had, as far as their folders are still there."""
    found = {name: read_result(stage_folder(home, node.stage, node.fingerprint)) for name, node in record.nodes.items()}
    return {name: result for name, result in found.items() if result is not None}


def _number(path: Path, recipe: str) -> int:
    """The number in a run's file name, 0 when the file belongs to another recipe."""
    match = re.fullmatch(re.escape(recipe) + r"-(\d+)", path.stem)
    return int(match[1]) if match else 0


def _read(path: Path) -> Record:
    try:
        record = Record.model_validate_json(path.read_text())
    except ValidationError as error:
        raise ArtifactError(
            f"{path} cannot be read ({error.errors()[0]['msg']}); delete it: only the record of that run is lost"
        ) from error
    return record.model_copy(update={"status": "died"}) if record.status == "running" and is_gone(record.owner) else record
