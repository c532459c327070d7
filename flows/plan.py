"""What will run, and why: keys, fingerprints, reuse, resume.

A node's key holds everything that decides its result: code, settings, digests of what it reads, seed.
Its fingerprint is the key's SHA-256 and names its folder. A folder with a result is reused when its
outputs are still what their digests say; one without is resumed when a trainer left a checkpoint there.
The key of a node's last finished run is kept per recipe, so that a plan can name the part that changed.
Planning writes nothing to an empty place.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import stages
from flows.models import fault_of, find_model, models_used
from flows.recipe import Node, Recipe, Source
from stages.artifacts import CheckpointRef, DatasetRef, Ref, StageResult, digest_of_file, last_checkpoint, read_result, write_json
from stages.errors import ArtifactError, ConfigError, StageError

Action = Literal["reuse", "resume", "run"]
Outputs = Mapping[str, CheckpointRef | DatasetRef]

_STAGES = Path(stages.__file__).parent
_ROOT = _STAGES.parent
_PARSE_TRIES = 100
_NOT_CODE = frozenset({"config", "errors", "records"})


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
    replaces: bool = False
    """The folder holds a finished result, which is set aside before this node runs."""
    drift: str | None = None
    """What had changed when a result was reused in spite of it."""


@dataclass(frozen=True)
class Wish:
    """What is asked of a plan beyond settings."""

    given: Mapping[str, StageResult]
    """Results of an earlier run, taken as they are, by node."""
    again: Set[str] = frozenset()
    """Nodes that run even if they are finished."""
    accept_drift: Set[str] = frozenset()
    """Nodes whose last result is reused although their key has changed."""
    of_run: str | None = None
    """The run that `given` comes from."""
    compared_with: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What the reasons compare with, by node, as `remember` keeps it; other nodes are compared with their last finished run."""


NOTHING_ASKED = Wish({})


def home_folder() -> Path:
    """The project's home: `$POSTTRAIN_HOME`, or `.posttrain` in the working folder. Absolute; not created."""
    return Path(os.environ.get("POSTTRAIN_HOME") or ".posttrain").resolve()


def stage_folder(home: Path, stage: str, fingerprint: str) -> Path:
    """Where a stage with this fingerprint works and leaves its result."""
    return home / "stages" / stage / fingerprint[:16]


def make_plan(recipe: Recipe, home: Path, wish: Wish = NOTHING_ASKED) -> tuple[Step, ...]:
    """Decide on every node, in running order. Downloads nothing; creates nothing in an empty folder."""
    known = last_of(recipe, home, wish)
    handles: dict[str, Outputs] = {}
    missing: list[str] = []
    for name in models_used(recipe):
        model = find_model(name, recipe.models[name], home, download=False)
        if model is None:
            missing.append(name)
        else:
            handles[name] = {"model": model}
    steps: list[Step] = []
    for node in recipe.nodes:
        waits = [source.node for source in node.inputs.values() if source.node not in handles]
        if waits and node.name not in wish.given:
            key = make_key(node, {name: take(handles, source) for name, source in node.inputs.items() if source.node in handles})
            why = [f"{name} is not downloaded yet" if name in missing else f"waits for {name}, which runs" for name in dict.fromkeys(waits)]
            own = _changes(node, known[node.name]["key"], key) if node.name in known else []
            steps.append(Step(node, "run", "; ".join([*own, *why])))
            continue
        inputs = {} if node.name in wish.given else {name: take(handles, source) for name, source in node.inputs.items()}
        step = decide(node, inputs, home, known.get(node.name), wish)
        if step.result is not None:
            handles[node.name] = step.result.outputs
        steps.append(step)
    return tuple(steps)


def last_of(recipe: Recipe, home: Path, wish: Wish = NOTHING_ASKED) -> Mapping[str, Mapping[str, Any]]:
    """What a plan's reasons compare with, by node."""
    return {**read_state(home, recipe.name).get("nodes", {}), **wish.compared_with}


def results_of(steps: Iterable[Step]) -> dict[str, StageResult]:
    """The results of the steps that are finished, by node."""
    return {step.node.name: step.result for step in steps if step.result is not None}


def decide(node: Node, inputs: Outputs, home: Path, last: Mapping[str, Any] | None, wish: Wish = NOTHING_ASKED) -> Step:
    """Decide on one node whose inputs are all there. `last` is what `remember` kept of its last finished run."""
    if (given := wish.given.get(node.name)) is not None:
        folder = stage_folder(home, given.stage, given.fingerprint)
        return Step(node, "reuse", f"taken from {wish.of_run}", given.fingerprint, given.key, folder, given)
    key = make_key(node, inputs)
    fingerprint = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    folder = stage_folder(home, node.stage, fingerprint)
    result = read_result(folder)
    if result is not None:
        if node.name in wish.again:
            return Step(node, "run", "asked for again", fingerprint, key, folder, replaces=True)
        if (fault := _fault(result, home)) is not None:
            return Step(node, "run", f"its output {fault}", fingerprint, key, folder, replaces=True)
        return Step(node, "reuse", "finished", fingerprint, key, folder, result)
    changes = _changes(node, last["key"], key) if last is not None else []
    if node.name in wish.accept_drift:
        return _drifted(node, changes, home, last)
    if (checkpoint := last_checkpoint(folder)) is not None:
        return Step(node, "resume", f"stopped after {checkpoint.name}", fingerprint, key, folder)
    if last is None:
        why = "started, never finished" if folder.exists() else "never ran"
    else:
        why = "; ".join(changes) or f"its folder {folder} is gone"
    return Step(node, "run", why, fingerprint, key, folder)


def _drifted(node: Node, changes: list[str], home: Path, last: Mapping[str, Any] | None) -> Step:
    """The node's last result, reused in spite of what has changed since. Raises ArtifactError when there is none."""
    stage, fingerprint = (last["key"]["stage"], str(last["fingerprint"])) if last is not None else (node.stage, "")
    folder = stage_folder(home, stage, fingerprint)
    result = read_result(folder) if fingerprint else None
    fault = "it never finished" if result is None else _fault(result, home)
    if result is None or fault is not None:
        raise ArtifactError(f"--accept-drift {node.name}: there is no result to reuse ({fault}); leave the option out, and it runs")
    why = "; ".join(changes) or "its key changed"
    return Step(node, "reuse", f"drift accepted: {why}", fingerprint, result.key, folder, result, drift=why)


def _fault(result: StageResult, home: Path) -> str | None:
    """What is wrong with the outputs of a finished stage, None when they are what their digests say."""
    return next((fault for ref in result.outputs.values() if (fault := fault_of(ref, home)) is not None), None)


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
            fault = "is no file" if path.exists() else "does not exist"
            raise ConfigError(
                f"{node.name}: the file {path} {fault} (seen from {Path.cwd()}); put it there, or change its path in the recipe"
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
        tree = _parse(path)
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


def _parse(path: Path) -> ast.Module:
    """A file's syntax tree. CPython 3.11 can fail when another thread builds one at the same moment (gh-106905): once more, then."""
    text, name = path.read_text(), str(path)
    for _ in range(_PARSE_TRIES):
        with suppress(SystemError):
            return ast.parse(text, name)
    return ast.parse(text, name)


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
        changes.append(f"seed of {node.name} changed")
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
