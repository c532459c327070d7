"""What will run, and why: keys, fingerprints, reuse, resume.

A node's key holds everything that decides its result: code, settings, digests of what it reads, seed.
Its fingerprint is the key's SHA-256 and names its folder. A folder with a result is reused; one
without is resumed when a trainer left a checkpoint there. The key of a node's last finished run is
kept per recipe, so that a plan can name the part that changed. Planning writes nothing to an empty place.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import stages
from flows.recipe import Node, Recipe, Source
from stages.artifacts import (
    CheckpointRef,
    DatasetRef,
    Ref,
    StageResult,
    digest_of_file,
    digest_of_folder,
    is_there,
    last_checkpoint,
    read_result,
    write_json,
)
from stages.errors import ArtifactError, ConfigError, StageError

Action = Literal["reuse", "resume", "run"]
Outputs = Mapping[str, CheckpointRef | DatasetRef]

_STAGES = Path(stages.__file__).parent
_ROOT = _STAGES.parent
_NOT_CODE = frozenset({"config", "errors", "records"})
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.\-/]+))?")
_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class Step:
    """What happens to one node. `fingerprint`, `key` and `folder` are None while an upstream node has yet to run."""

    node: Node
    action: Action
    why: str
    fingerprint: str | None = None
    key: dict[str, Any] | None = None
    folder: Path | None = None
    result: StageResult | None = None


def home_folder() -> Path:
    """The project's home: `$POSTTRAIN_HOME`, or `.posttrain` in the working folder. Absolute; not created."""
    return Path(os.environ.get("POSTTRAIN_HOME") or ".posttrain").resolve()


def stage_folder(home: Path, stage: str, fingerprint: str) -> Path:
    """Where a stage with this fingerprint works and leaves its result."""
    return home / "stages" / stage / fingerprint[:16]


def make_plan(recipe: Recipe, home: Path) -> tuple[Step, ...]:
    """Decide on every node, in running order. Downloads nothing; creates nothing in an empty folder."""
    known = read_state(home, recipe.name).get("nodes", {})
    handles: dict[str, Outputs] = {}
    missing: list[str] = []
    for name in _models_used(recipe):
        model = find_model(name, recipe.models[name], home, download=False)
        if model is None:
            missing.append(name)
        else:
            handles[name] = {"model": model}
    steps: list[Step] = []
    for node in recipe.nodes:
        waits = [source.node for source in node.inputs.values() if source.node not in handles]
        if waits:
            key = make_key(node, {name: take(handles, source) for name, source in node.inputs.items() if source.node in handles})
            why = [f"{name} is not downloaded yet" if name in missing else f"waits for {name}, which runs" for name in dict.fromkeys(waits)]
            own = _changes(node, known[node.name]["key"], key) if node.name in known else []
            steps.append(Step(node, "run", "; ".join([*own, *why])))
            continue
        step = decide(node, {name: take(handles, source) for name, source in node.inputs.items()}, home, known.get(node.name))
        if step.result is not None:
            handles[node.name] = step.result.outputs
        steps.append(step)
    return tuple(steps)


def results_of(steps: Iterable[Step]) -> dict[str, StageResult]:
    """The results of the steps that are finished, by node."""
    return {step.node.name: step.result for step in steps if step.result is not None}


def decide(node: Node, inputs: Outputs, home: Path, last: Mapping[str, Any] | None) -> Step:
    """Decide on one node whose inputs are all there. `last` is what `remember` kept of its last finished run."""
    key = make_key(node, inputs)
    fingerprint = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    folder = stage_folder(home, node.stage, fingerprint)
    result = read_result(folder)
    if result is not None:
        gone = [output.path for output in result.outputs.values() if not is_there(output.path)]
        if not gone:
            return Step(node, "reuse", "finished", fingerprint, key, folder, result)
        return Step(node, "run", f"its output {gone[0]} is gone", fingerprint, key, folder)
    if (checkpoint := last_checkpoint(folder)) is not None:
        return Step(node, "resume", f"stopped after {checkpoint.name}", fingerprint, key, folder)
    if last is None:
        why = "started, never finished" if folder.exists() else "never ran"
    else:
        why = "; ".join(_changes(node, last["key"], key)) or f"its folder {folder} is gone"
    return Step(node, "run", why, fingerprint, key, folder)


def take(handles: Mapping[str, Outputs], source: Source) -> CheckpointRef | DatasetRef:
    """The artifact that a source names. Raises ArtifactError when its node did not write it."""
    outputs = handles[source.node]
    name = source.output or "model"
    if name not in outputs:
        raise ArtifactError(
            f"{source.node} wrote {sorted(outputs)} but not {name!r}; change the settings of {source.node}, or read another output"
        )
    return outputs[name]


# ---- keys -----------------------------------------------------------------------------------


def make_key(node: Node, inputs: Mapping[str, Ref]) -> dict[str, Any]:
    """Everything that decides the node's result, as plain JSON values."""
    files = {}
    for path in node.config.files():
        if not path.is_file():
            raise ConfigError(
                f"{node.name}: the file {path} does not exist (seen from {Path.cwd()}); put it there, or change its path in the recipe"
            )
        files[str(path)] = digest_of_file(path)
    return {
        "stage": node.stage,
        "code": code_of(node.stage),
        "config": node.config.identity(),
        "files": files,
        "inputs": {name: ref.digest for name, ref in sorted(inputs.items())},
        "seed": node.seed,
    }


@functools.cache
def code_of(stage: str) -> dict[str, str]:
    """Digest of every file that a stage's result depends on, by path from the project's root.

    Python files are compared by their syntax tree without docstrings: comments and layout change nothing.
    It is the code as this command found it first, which is what its stages run: see `check_code`.
    """
    return _code_now(stage)


def check_code(step: Step) -> None:
    """Raise StageError when the code of a stage is no longer what its key says.

    Stages run the Python code that was there when the command began; SQL is read when they need it.
    """
    assert step.key is not None
    planned: Mapping[str, str] = step.key["code"]
    try:
        now = _code_now(step.node.stage)
        files = sorted(name for name in planned.keys() | now.keys() if planned.get(name) != now.get(name))
    except (OSError, SyntaxError) as error:  # a file that is being saved
        files = [str(error.filename)]
    if files:
        raise StageError(f"the code of {step.node.name} changed while the recipe ran ({', '.join(files)}); run the same command again")


def _code_now(stage: str) -> dict[str, str]:
    files: dict[str, str] = {}
    waiting = [f"stages.{stage}"]
    while waiting:
        module = waiting.pop()
        path = _file_of(module)
        if path is None or module.removeprefix("stages.") in _NOT_CODE:
            continue
        name = path.relative_to(_ROOT).as_posix()
        if name in files:
            continue
        tree = ast.parse(path.read_text(), str(path))
        files[name] = _digest_of_tree(tree)
        waiting += _imports(tree)
        if path.name == "__init__.py" and path.parent != _STAGES:  # data beside a package, such as a template
            for data in sorted(path.parent.glob("*.*")):
                if data.suffix not in (".py", ".pyc") and data.is_file():
                    files[data.relative_to(_ROOT).as_posix()] = digest_of_file(data)
    if stage == "curation":
        for path in (*sorted((_ROOT / "datasets" / "sql").rglob("*.sql")), _ROOT / "datasets" / "contracts.yaml"):
            files[path.relative_to(_ROOT).as_posix()] = digest_of_file(path)
    return dict(sorted(files.items()))


def _file_of(module: str) -> Path | None:
    parts = module.split(".")[1:]
    package, file = _STAGES.joinpath(*parts, "__init__.py"), _STAGES.joinpath(*parts).with_suffix(".py")
    return file if parts and file.is_file() else package if parts and package.is_file() else None


def _imports(tree: ast.Module) -> Iterator[str]:
    for item in ast.walk(tree):
        names: list[str] = []
        if isinstance(item, ast.Import):
            names = [alias.name for alias in item.names]
        elif isinstance(item, ast.ImportFrom) and item.module and not item.level:
            names = [item.module, *(f"{item.module}.{alias.name}" for alias in item.names)]
        for name in names:
            parts = name.split(".")
            if parts[0] == "stages":  # importing a.b.c runs a.b, too
                yield from (".".join(parts[: depth + 1]) for depth in range(1, len(parts)))


def _digest_of_tree(tree: ast.Module) -> str:
    for item in ast.walk(tree):
        if isinstance(item, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(item, clean=False):
            item.body = item.body[1:]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


# ---- why ------------------------------------------------------------------------------------


def _changes(node: Node, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The parts of a key that differ, in words. Inputs that are not known yet are not compared."""
    if old["stage"] != new["stage"]:
        return [f"{node.name} was the stage {old['stage']}, now {new['stage']}"]
    before, after = dict(_flat(old["config"])), dict(_flat(new["config"]))
    changes = [
        f"{node.key}.{name} {_shown(before.get(name))} -> {_shown(after.get(name))}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]
    files = sorted(name for name in old["code"].keys() | new["code"].keys() if old["code"].get(name) != new["code"].get(name))
    if files:
        changes.append(f"code of {node.name} changed ({', '.join(files[:3])}{', ...' if len(files) > 3 else ''})")
    changes += [f"file {name} changed" for name in sorted(new["files"]) if old["files"].get(name) != new["files"][name]]
    for name, source in node.inputs.items():
        if name not in old["inputs"]:
            changes.append(f"reads {source} as {name}, which it did not")
        elif name in new["inputs"] and old["inputs"][name] != new["inputs"][name]:
            changes.append(f"output of {source.node} changed" if source.output else f"model {source.node} changed")
    changes += [f"no longer reads a {name}" for name in old["inputs"] if name not in node.inputs]
    if old["seed"] != new["seed"]:
        changes.append("seed of the recipe changed")
    return list(dict.fromkeys(changes))


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None or not value:
        yield prefix, value
        return
    for name, inner in items:
        yield from _flat(inner, f"{prefix}.{name}" if prefix else str(name))


def _shown(value: Any) -> str:
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


# ---- what is remembered ---------------------------------------------------------------------


def _state_file(home: Path, recipe: str) -> Path:
    return home / "recipes" / f"{recipe}.json"


def read_state(home: Path, recipe: str) -> dict[str, Any]:
    """What is remembered of a recipe: `nodes` (the last finished key of each) and `last` (links and totals)."""
    path = _state_file(home, recipe)
    if not path.exists():
        return {}
    try:
        state: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ArtifactError(f"{path} cannot be read ({error}); delete it: only the reasons in plans and the last links are lost") from error
    return state


def remember(home: Path, recipe: str, *steps: Step, last: Mapping[str, Any] | None = None) -> None:
    """Keep the keys of finished nodes and, when given, links and totals of the last run. Atomic."""
    state = read_state(home, recipe)
    nodes = state.setdefault("nodes", {})
    for step in steps:
        nodes[step.node.name] = {"fingerprint": step.fingerprint, "key": step.key}
    if last is not None:
        state["last"] = dict(last)
    path = _state_file(home, recipe)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, state)


# ---- models that are given ------------------------------------------------------------------


def _models_used(recipe: Recipe) -> list[str]:
    return list(dict.fromkeys(source.node for node in recipe.nodes for source in node.inputs.values() if source.output is None))


def find_model(name: str, value: str, home: Path, *, download: bool) -> CheckpointRef | None:
    """The checkpoint of a `models` entry: a folder here or beside the package, or a hub name.

    Without `download`, None for a hub model that is not in the local cache. Raises ConfigError when
    there is no such folder and no such model, or the hub cannot be reached.
    """
    folder = next((path for path in (Path(value).expanduser(), _ROOT / value) if path.is_dir()), None)
    if folder is None:
        hub = _HUB_NAME.fullmatch(value)
        first = Path(value).parts[0] if value else ""
        if hub is None or value.startswith((".", "/", "~")) or Path(first).is_dir() or (_ROOT / first).is_dir():
            raise ConfigError(
                f"models.{name} = {value!r}: there is no such folder (seen from {Path.cwd()}); "
                "give a folder that exists, or a hub name such as org/name@revision"
            )
        folder = _from_hub(name, hub["name"], hub["revision"], download=download)
        if folder is None:
            return None
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ConfigError(f"models.{name} = {value!r}: {folder} must hold config.json and *.safetensors; export the model there")
    folder = folder.resolve()
    return CheckpointRef(name=name, digest=_digest(folder, home), path=folder, producer="given")


def _from_hub(name: str, model: str, revision: str | None, *, download: bool) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    where = f"models.{name} = {model}{f'@{revision}' if revision else ''}"
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=_HUB_FILES, local_files_only=not download))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        if not download:
            return None
        raise ConfigError(
            f"{where}: is not in the local cache and the hub cannot be reached; go online once, or give a local folder"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{where}: cannot be downloaded ({reason}); check name and revision, or give a local folder") from error


def _digest(folder: Path, home: Path) -> str:
    """The folder's digest, looked up by its files' names, sizes and times, so that planning does not read gigabytes."""
    listing = [(file.relative_to(folder).as_posix(), file.stat()) for file in sorted(folder.rglob("*")) if file.is_file()]
    signature = hashlib.sha256(repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in listing]).encode()).hexdigest()
    cache = home / "digests.json"
    try:
        known: dict[str, list[str]] = json.loads(cache.read_text())
    except (OSError, ValueError):
        known = {}
    if known.get(str(folder), [""])[0] == signature:
        return known[str(folder)][1]
    digest = digest_of_folder(folder)
    if home.is_dir():
        write_json(cache, {**known, str(folder): [signature, digest]})
    return digest
