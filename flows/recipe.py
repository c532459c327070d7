"""A recipe: one YAML file and `--set` overrides, checked and made into an ordered list of nodes.

A node is a stage with its settings and inputs; evaluation nodes are inserted here, after every base
model and after every node that writes a `model`. What is wrong is a ConfigError that names key,
value, rule and the nearest valid name; all faults of a file are shown together.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from flows.scores.claims import Claim
from stages.config import SECRET, STAGES, StageConfig
from stages.errors import ConfigError
from stages.problems import seed_of

RECIPES = Path(__file__).parent / "recipes"
_KEYS = ("name", "description", "seed", "models", "evaluation", "stages", "claims", "release")
_SORTS = {str: "text", int: "whole number", dict: "mapping", list: "list"}
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Source:
    """Where an input comes from: an entry of `models` (then `output` is None) or an output of a node."""

    node: str
    output: str | None = None

    def __str__(self) -> str:
        return f"{self.node}.{self.output}" if self.output else self.node


@dataclass(frozen=True)
class Node:
    """One stage of a recipe. `stage` names the kind (its file in `stages/`), `name` the node, `key` its settings for `--set`."""

    name: str
    stage: str
    config: StageConfig
    inputs: Mapping[str, Source]
    seed: int
    key: str


@dataclass(frozen=True)
class Recipe:
    """A checked recipe. `nodes` are in running order; a node reads only from `models` and earlier nodes."""

    name: str
    description: str
    seed: int
    models: Mapping[str, str]
    nodes: tuple[Node, ...]
    overrides: Mapping[str, str]
    claims: tuple[Claim, ...]
    release: Mapping[str, str]
    """Alias in the model registry, to the node whose `model` gets it when the whole recipe has run."""
    text: str
    """The recipe as resolved: YAML with the overrides in place."""

    @property
    def variant(self) -> str:
        """Name of the overrides, for people: `default` without any."""
        return ", ".join(f"{key}={value}" for key, value in sorted(self.overrides.items())) or "default"

    @property
    def config_hash(self) -> str:
        """SHA-256 of everything that decides the results but code and file contents."""
        nodes = [
            [node.name, node.stage, node.config.identity(), {name: str(source) for name, source in node.inputs.items()}, node.seed]
            for node in self.nodes
        ]
        content = [dict(self.models), nodes]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def node(self, name: str) -> Node:
        """The node of that name. Raises ConfigError with the nearest name."""
        found = next((node for node in self.nodes if node.name == name), None)
        if found is None:
            raise ConfigError(f"recipe {self.name} has no stage {name!r}; {_nearest(name, [node.name for node in self.nodes])}")
        return found

    def upto(self, name: str) -> Recipe:
        """The recipe of one node and the nodes it needs, directly or not."""
        wanted = {self.node(name).name}
        for node in reversed(self.nodes):
            if node.name in wanted:
                wanted |= {source.node for source in node.inputs.values()}
        return replace(self, nodes=tuple(node for node in self.nodes if node.name in wanted))

    def after(self, name: str) -> tuple[str, ...]:
        """A node and all that read it, directly or not, in running order. Raises ConfigError with the nearest name."""
        found = {self.node(name).name}
        for node in self.nodes:
            if found & {source.node for source in node.inputs.values()}:
                found.add(node.name)
        return tuple(node.name for node in self.nodes if node.name in found)

    def evaluation_of(self, name: str) -> str | None:
        """The evaluation of a node's model; None when it is not scored."""
        scores = (node.name for node in self.nodes if node.stage == "evaluation" and node.inputs["model"].node == name)
        return next(scores, None)

    def stage_before(self, name: str) -> str | None:
        """The node or `models` entry that a node's `model` input comes from; None for a base model."""
        source = next((node.inputs.get("model") for node in self.nodes if node.name == name), None)
        return source.node if source else None


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load_recipe(recipe: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe by name or path and apply `key=value` overrides. Raises ConfigError."""
    path = _find(recipe)
    return _checked(_read(path), path.name, {}, overrides)


def load_again(text: str, earlier: Mapping[str, str], overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from the `text` of a `Recipe`, whose overrides were `earlier`, with more overrides. Raises ConfigError."""
    return _checked(_parse(text), "the recipe of that run", earlier, overrides)


def _checked(raw: dict[str, Any], where: str, earlier: Mapping[str, str], overrides: Sequence[str]) -> Recipe:
    _check_keys(raw, where)
    settings = {**earlier, **dict(_apply(raw, override) for override in overrides)}
    _check_keys(raw, where)
    faults: list[str] = []
    models: dict[str, str] = raw.get("models") or {}
    nodes: list[Node] = []
    for name, content in raw["stages"].items():
        nodes += _node(str(name), dict(content or {}), raw["seed"], models, nodes, faults)
    if raw.get("evaluation") is not None:
        nodes = _with_evaluations(nodes, dict(raw["evaluation"]), raw["seed"], models, faults)
    scored = [node.inputs["model"].node for node in nodes if node.stage == "evaluation"]
    claims = tuple(filter(None, (_claim(index, content, scored, faults) for index, content in enumerate(raw.get("claims") or []))))
    release = _release(raw.get("release"), nodes, faults)
    if faults:
        raise ConfigError("\n".join(f"{where}: {fault}" for fault in dict.fromkeys(faults)))
    text = yaml.safe_dump(raw, sort_keys=False, allow_unicode=True)
    return Recipe(raw["name"], raw.get("description") or "", raw["seed"], models, tuple(nodes), settings, claims, release, text)


# ---- reading --------------------------------------------------------------------------------


def _find(recipe: str) -> Path:
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ConfigError(f"recipe {recipe}: there is no such file; give a path that exists or one of {', '.join(recipe_names())}")
        return path
    if recipe not in recipe_names():
        raise ConfigError(f"there is no recipe {recipe!r}; {_nearest(recipe, recipe_names())} (your own: give its path, ending in .yaml)")
    return RECIPES / f"{recipe}.yaml"


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key that is given twice is an error, not the last one's victory."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.YAMLError(f"line {node.start_mark.line + 1}: the key {twice!r} is given twice; keep one")
        return super().construct_mapping(node, deep)


def _parse(text: str) -> Any:
    """The value of a YAML text. An alias stands for a copy: what is set in one place stays as it was in the others."""

    def copied(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: copied(inner) for key, inner in value.items()}
        return [copied(inner) for inner in value] if isinstance(value, list) else value

    try:
        return copied(yaml.load(text, _Loader))  # noqa: S506 - a SafeLoader
    except RecursionError as error:
        raise yaml.YAMLError("an alias lies inside its own anchor; write the value out") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = _parse(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"recipe {path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"recipe {path} must be a mapping with the keys {', '.join(_KEYS)}")
    return raw


def _check_keys(raw: dict[str, Any], where: str) -> None:
    for key in raw:
        if key not in _KEYS:
            raise ConfigError(f"{where}: {key}: a recipe has no such key; {_nearest(str(key), _KEYS)}")
    raw.setdefault("seed", 0)
    kinds = {
        "name": str,
        "description": str,
        "seed": int,
        "models": dict,
        "evaluation": dict,
        "stages": dict,
        "claims": list,
        "release": dict,
    }
    for key, kind in kinds.items():
        value = raw.get(key)
        if (value is not None or key in ("name", "seed", "stages")) and (not isinstance(value, kind) or isinstance(value, bool)):
            raise ConfigError(f"{where}: {key} = {value!r}: must be a {_SORTS[kind]}")
    if not _NAME.fullmatch(raw["name"]):
        raise ConfigError(f"{where}: name = {raw['name']!r}: must be lower-case letters, digits and _")
    for name, value in (raw.get("models") or {}).items():
        if not _NAME.fullmatch(str(name)) or not isinstance(value, str):
            raise ConfigError(f"{where}: models.{name} = {value!r}: must be a folder, or a hub name such as org/name@revision")
    for name, value in raw["stages"].items():
        if value is not None and not (isinstance(value, dict) and isinstance(value.get("from") or {}, dict)):
            raise ConfigError(f"{where}: stages.{name}: must be a mapping of settings, with `from` a mapping of inputs")


def _apply(raw: dict[str, Any], override: str) -> tuple[str, str]:
    """Put `key=value` into the raw recipe; the setting's own rules are checked later."""
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator or not key:
        raise ConfigError(f"--set {override}: must be key=value, for instance --set cold_start.learning_rate=1e-3")
    try:
        value = _parse(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override}: the value is not YAML ({error}); quote it") from error
    stages = raw.get("stages") or {}
    first, *rest = key.split(".")
    if first == "seed" and not rest:
        raw["seed"] = value
        return key, text
    if first in ("evaluation", "models"):
        target, path = raw.get(first), rest
        if target is None or not rest or (first == "models" and rest[0] not in target):
            known = [f"{first}.{name}" for name in target or {}] or list(stages)
            raise ConfigError(f"--set {override}: matches nothing; {_nearest(key, known)}")
    elif first in stages:
        stages[first] = dict(stages[first] or {})
        target, path = stages[first], rest
    else:
        raise ConfigError(f"--set {override}: matches nothing; {_nearest(first, [*stages, 'evaluation', 'models', 'seed'])}")
    if not path:
        raise ConfigError(f"--set {override}: names a stage, not a setting; for instance --set {first}.max_minutes=10")
    for part in path[:-1]:
        inner = target[int(part)] if isinstance(target, list) and part.isdigit() and int(part) < len(target) else None
        if isinstance(target, dict):
            inner = target.setdefault(part, {})
        if not isinstance(inner, dict | list):
            raise ConfigError(f"--set {override}: {part} holds {inner!r}, so nothing lies below it")
        target = inner
    last = path[-1]
    if isinstance(target, dict):
        target[last] = value
    elif last.isdigit() and int(last) < len(target):
        target[int(last)] = value
    else:
        raise ConfigError(f"--set {override}: {last} is not a position in a list of {len(target)}")
    return key, text


# ---- settings -------------------------------------------------------------------------------


def _settings(name: str, kind: type[StageConfig], content: dict[str, Any], faults: list[str]) -> StageConfig:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        faults.extend(_explain(name, kind, dict(fault)) for fault in error.errors())
        return kind.model_construct()


def _claim(index: int, content: Any, scored: Sequence[str], faults: list[str]) -> Claim | None:
    try:
        claim = Claim.model_validate(content)
    except ValidationError as error:
        faults.extend(_explain(f"claims[{index}]", Claim, dict(fault)) for fault in error.errors())
        return None
    for name in filter(None, (claim.stage, claim.than)):
        if name not in scored:
            faults.append(f"claims[{index}] = {name!r}: must name a model that the recipe evaluates; {_nearest(name, list(scored))}")
    return claim


def _release(wanted: Mapping[str, Any] | None, nodes: Sequence[Node], faults: list[str]) -> dict[str, str]:
    """Alias to node; without a declaration the last model is `final`."""
    made = [node.name for node in nodes if "model" in node.config.writes]
    if wanted is None:
        return {"final": made[-1]} if made else {}
    for alias, name in wanted.items():
        if not _NAME.fullmatch(str(alias)) or alias == "latest" or re.fullmatch(r"v\d+", str(alias)):
            faults.append(f"release.{alias}: an alias is lower-case letters, digits and _, not `latest` and not like `v1`; rename it")
        if name not in made:
            faults.append(f"release.{alias} = {name!r}: must name a stage that makes a model; {_nearest(str(name), made)}")
    return {str(alias): str(name) for alias, name in wanted.items()}


def _explain(name: str, kind: type[BaseModel], fault: dict[str, Any]) -> str:
    """One fault of pydantic's as key, value, rule and remedy."""
    models: list[type[BaseModel]] = [kind]
    shown, known = [name], list(kind.model_fields)
    for part in fault["loc"]:
        known = sorted({field for model in models for field in model.model_fields})
        owner = next((model for model in models if part in model.model_fields), None)
        tagged = [model for model in models if any(part == field.default for field in model.model_fields.values())]
        if owner is None and tagged and isinstance(part, str):
            models = tagged  # pydantic's name for a branch of a union; not part of the key
            continue
        shown.append(str(part))
        if owner is not None:
            models = list(_models_in(owner.model_fields[part].annotation))
    key = ".".join(shown)
    if fault["type"] == "extra_forbidden":
        value = f" = {fault['input']!r}" if isinstance(fault["input"], int | float) else ""  # a text may be a key in the wrong place
        return f"{key}{value}: there is no such setting; {_nearest(shown[-1], known)}"
    if fault["type"] == "missing":
        return f"{key}: this setting is needed; add it to the recipe, or --set {key}=..."
    rule = str(fault["msg"]).removeprefix("Value error, ").replace("Input should", "must")
    value = " = (not shown)" if fault["type"] == SECRET else "" if isinstance(fault["input"], dict) else f" = {fault['input']!r}"
    return f"{key}{value}: {rule}"


def _models_in(annotation: Any) -> Iterable[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _nearest(name: str, known: Iterable[str]) -> str:
    known = [str(item) for item in known]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


# ---- wiring ---------------------------------------------------------------------------------


def _inputs(
    name: str, kind: type[StageConfig], wired: dict[str, Any], models: dict[str, str], nodes: list[Node], faults: list[str]
) -> dict[str, Source]:
    for given in wired:
        if given not in kind.reads:
            known = _nearest(str(given), kind.reads) if kind.reads else "it reads none"
            faults.append(f"{name}.from.{given}: the stage reads no such input; {known}")
    inputs: dict[str, Source] = {}
    for wanted, sort in kind.reads.items():
        if wired.get(wanted) is None:
            if wanted not in kind.optional_reads:
                where = "an earlier stage or an entry of `models`" if sort == "model" else "an earlier stage's output"
                faults.append(f"{name}.from.{wanted}: this input (a {sort}) is needed; name {where}")
            continue
        key = f"{name}.from.{wanted} = {wired[wanted]!r}"
        if (source := _source(key, wanted, sort, wired[wanted], models, nodes, faults)) is not None:
            inputs[wanted] = source
    return inputs


def _source(key: str, wanted: str, sort: str, value: Any, models: dict[str, str], nodes: list[Node], faults: list[str]) -> Source | None:
    """What `value` names: a model, `node.output`, or a node's output of the same name or only one of the sort."""
    first, _, output = str(value).partition(".")
    node = next((node for node in nodes if node.name == first), None)
    if first in models and not output:
        if sort == "model":
            return Source(first)
        faults.append(f"{key}: {first} is a model, the input takes a {sort}")
    elif node is None:
        known = _nearest(first, [*models, *(node.name for node in nodes)])
        faults.append(f"{key}: no earlier stage and no entry of `models` has this name; {known}")
    else:
        writes = node.config.writes
        fitting = [found for found, kind in writes.items() if kind == sort]
        chosen = output or (wanted if wanted in fitting else fitting[0] if len(fitting) == 1 else "")
        if chosen in fitting:
            return Source(first, chosen)
        options = [f"{first}.{found}" for found in fitting]
        remedy = _nearest(f"{first}.{chosen}", options) if options else f"{first} writes none; name another stage"
        faults.append(f"{key}: must be one {sort} that {first} writes; {remedy}")
    return None


def _node(name: str, content: dict[str, Any], seed: int, models: dict[str, str], earlier: list[Node], faults: list[str]) -> list[Node]:
    """The node, or nothing when not even its kind is known."""
    kind, wired, own_seed = content.pop("stage", name), content.pop("from", None) or {}, content.pop("seed", seed)
    if not _NAME.fullmatch(name) or name in models:
        faults.append(f"stages.{name}: a stage's name is lower-case letters, digits and _, and none of `models`; rename it")
        return []
    if not isinstance(kind, str) or kind not in STAGES:
        faults.append(f"{name}.stage = {kind!r}: there is no such stage; {_nearest(str(kind), STAGES)}")
        return []
    if not isinstance(own_seed, int) or isinstance(own_seed, bool):
        faults.append(f"{name}.seed = {own_seed!r}: must be a whole number; leave it out to use the recipe's")
        own_seed = seed
    inputs = _inputs(name, STAGES[kind], wired, models, earlier, faults)
    config = _settings(name, STAGES[kind], content, faults)  # a faulty node stays, so that later ones can name it
    return [Node(name, kind, config, inputs, seed_of(own_seed, name), key=name)]


def _with_evaluations(declared: list[Node], evaluation: dict[str, Any], seed: int, models: dict[str, str], faults: list[str]) -> list[Node]:
    """Insert an evaluation before the first user of a base model and after every node that writes `model`."""
    value = evaluation.pop("benchmarks", None)
    benchmarks = _source(f"evaluation.benchmarks = {value!r}", "benchmarks", "dataset", value, models, declared, faults)
    config = _settings("evaluation", STAGES["evaluation"], evaluation, faults)
    if benchmarks is None:
        return declared
    sequence: list[Node | Source] = []
    for node in declared:
        used = node.inputs.get("model")
        sequence += [used] if used and used.output is None else []
        sequence += [node]
        sequence += [Source(node.name, "model")] if "model" in node.config.writes else []
    ready = 1 + next(at for at, item in enumerate(sequence) if isinstance(item, Node) and item.name == benchmarks.node)
    before = sequence[:ready]  # models that are there before the benchmarks wait for them
    sequence = sorted(before, key=lambda item: isinstance(item, Source)) + sequence[ready:]
    nodes: list[Node] = []
    for item in sequence:
        if isinstance(item, Source):
            inputs = {"model": item, "benchmarks": benchmarks}
            name = f"evaluation_{item.node}"
            item = Node(name, "evaluation", config, inputs, seed_of(seed, "evaluation"), key="evaluation")
            if any(node.name == item.name for node in nodes):
                continue
        elif any(node.name == item.name for node in nodes):
            faults.append(f"stages.{item.name}: an evaluation of this name is inserted already; rename it")
        nodes.append(item)
    return nodes
