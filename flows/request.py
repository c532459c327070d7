"""What a user asks for, the same from the command line, a form or Python; and what that comes to: nodes, a plan, an earlier run.

Light: imports neither prefect, mlflow nor torch.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field

from flows.history import LATEST, Record, find_run, results_of_run
from flows.models import fault_of
from flows.plan import Step, Wish, make_plan
from flows.recipe import Recipe, load_again, load_recipe
from stages.artifacts import StageResult
from stages.errors import ArtifactError, ConfigError

_PLAIN = re.compile(r"[\w./-]+")


class Request(BaseModel):
    """What to run. Without `only` and `start_from`: the whole recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str = Field("tiny", description="Name of a recipe that comes with posttrain, or path of a .yaml file.")
    overrides: tuple[str, ...] = Field((), description="Settings to change, each `stage.key=value`.")
    only: str | None = Field(None, description="Only this stage, and the evaluation of its model.")
    start_from: str | None = Field(None, description="This stage and every stage that reads it, directly or not.")
    of_run: str | None = Field(None, description="Take settings, and the stages that are not run, from this earlier run.")
    force: bool = Field(False, description="Run what was asked for even if it is finished; the earlier result is set aside.")
    accept_drift: tuple[str, ...] = Field((), description="Stages whose last result is reused although their key has changed.")


@dataclass(frozen=True)
class Job:
    """A checked request. `steps` are the plan; `recipe` has the nodes that are run and those that they read."""

    request: Request
    recipe: Recipe
    whole: Recipe
    wish: Wish
    steps: tuple[Step, ...]
    of: Record | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every node of the recipe is a part of the job."""
        return len(self.recipe.nodes) == len(self.whole.nodes) and not self.wish.given

    @property
    def stage(self) -> str | None:
        """The stage that was asked for by name."""
        return self.request.only or self.request.start_from

    @property
    def to_run(self) -> tuple[Step, ...]:
        """The steps that are not reused."""
        return tuple(step for step in self.steps if step.action != "reuse")


def prepare(request: Request, home: Path, *, upto: str | None = None) -> Job:
    """Check a request and plan it. `upto` ends the stages of `start_from` at the evaluation of that stage.

    Raises ConfigError for names that do not exist, ArtifactError when the stages before were not made.
    """
    if request.only and request.start_from:
        raise ConfigError(f"only {request.only} and from {request.start_from}: the rule is one of the two; leave one out")
    whole, of = _recipe(request, home)
    for name in request.accept_drift:
        whole.node(name)
    wanted = _wanted(whole, request, upto)
    nodes = set().union(*(_with_sources(whole, name) for name in wanted))
    if of and request.start_from and not upto:  # the table of such a run has every row of the earlier one
        nodes |= of.nodes.keys() & {node.name for node in whole.nodes}
    recipe = replace(whole, nodes=tuple(node for node in whole.nodes if node.name in nodes))
    again = wanted if request.force and not request.start_from else {request.start_from} if request.force else set()
    had = results_of_run(home, of) if of else {}
    wish = Wish(
        given=_given(of, nodes - wanted, had, home) if of else {},
        again=frozenset(filter(None, again)),
        accept_drift=frozenset(request.accept_drift),
        of_run=of.id if of else None,
        compared_with={name: {"fingerprint": result.fingerprint, "key": result.key} for name, result in had.items()},
    )
    steps = make_plan(recipe, home, wish)
    missing = [step for step in steps if step.node.name not in wanted and step.action != "reuse"]
    if missing:
        what = ", ".join(f"{step.node.name} ({step.why})" for step in missing)
        command = f"posttrain stage {missing[0].node.name} --recipe {shlex.quote(request.recipe)}{set_options(request.overrides)}"
        raise ArtifactError(
            f"{request.only or request.start_from} needs what has not been made with these settings: {what}. "
            f"Make it with: {command}; or take it from an earlier run with --of"
        )
    return Job(request, recipe, whole, wish, steps, of)


def set_options(overrides: Sequence[str]) -> str:
    """Overrides as a shell takes them, a blank before each."""
    return "".join(f" --set {shlex.quote(item)}" for item in overrides)


def as_yaml(path: Path) -> str:
    """A path, absolute, as a value of YAML: of a recipe or an override."""
    text = str(path.absolute())
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _recipe(request: Request, home: Path) -> tuple[Recipe, Record | None]:
    """The recipe of a request, and the earlier run that it comes from when one is named; `latest` is that of the request's recipe."""
    if not request.of_run:
        return load_recipe(request.recipe, request.overrides), None
    of = find_run(home, request.of_run, load_recipe(request.recipe).name if request.of_run == LATEST else None)
    return load_again(of.text, of.overrides, request.overrides), of


def _wanted(recipe: Recipe, request: Request, upto: str | None) -> set[str]:
    """The nodes that may run."""
    if request.only:
        return {recipe.node(request.only).name} | ({name} if (name := recipe.evaluation_of(request.only)) else set())
    if request.start_from:
        found = set(recipe.after(request.start_from))
        return found & _with_sources(recipe, recipe.evaluation_of(upto) or upto) if upto else found
    return {node.name for node in recipe.nodes}


def _with_sources(recipe: Recipe, name: str) -> set[str]:
    return {node.name for node in recipe.upto(name).nodes}


def _given(of: Record, names: Set[str], had: Mapping[str, StageResult], home: Path) -> dict[str, StageResult]:
    """Of the results that an earlier run `had`, those of these nodes. Raises ArtifactError for one that is missing or not whole."""
    for name in sorted(names):
        result = had.get(name)
        faults = [f"its {fault}" for ref in (result.outputs.values() if result else ()) if (fault := fault_of(ref, home))]
        if result is None or faults:
            why = faults[0] if faults else "its folder is gone" if name in of.nodes else f"{of.id} ({of.status}) did not come to it"
            raise ArtifactError(
                f"{name} cannot be taken from {of.id}: {why}; take another run, or run the recipe: posttrain run {of.recipe}"
            )
    return {name: had[name] for name in sorted(names)}


# ---- ablations ------------------------------------------------------------------------------


class Variant(NamedTuple):
    """One variant of an ablation, trained with one seed."""

    name: str
    """What is varied, for instance `loss=dr_grpo`."""
    seed: int
    overrides: tuple[str, ...]


def variants(stage: str, vary: Sequence[str], seeds: int, recipe_seed: int) -> tuple[Variant, ...]:
    """Every combination of the varied settings, each with every seed; the first combination is the baseline.

    `vary` holds `key=a,b`, keys within the stage; a value that holds commas goes into brackets, as in YAML.
    Raises ConfigError when a key is given twice, has one value in all, or is not of that form.
    """
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds}: must be at least 1")
    axes: dict[str, list[str]] = {}
    for item in vary:
        key, _, text = item.partition("=")
        try:
            values = yaml.safe_load(f"[{text}]")
        except yaml.YAMLError as error:
            raise ConfigError(f"--vary {item}: the values are not YAML ({error}); quote them") from error
        if not key.strip() or not values:
            raise ConfigError(f"--vary {item}: must be key=value,value, for instance --vary loss=dapo,dr_grpo")
        if key.strip() in axes:
            raise ConfigError(f"--vary {item}: {key.strip()} is varied twice; list all its values once")
        axes[key.strip()] = list(dict.fromkeys(yaml_text(value) for value in values))
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    if len(combinations) < 2:
        raise ConfigError(f"--vary {' '.join(vary) or '(nothing)'}: gives {len(combinations)} variant; a comparison needs two")
    found = []
    for settings in combinations:
        name = ", ".join(f"{key}={value}" for key, value in settings.items())
        for seed in range(seeds):
            own = [f"{stage}.{key}={value}" for key, value in settings.items()]
            own += [f"{stage}.seed={recipe_seed + seed}"] if seed else []
            found.append(Variant(name, recipe_seed + seed, tuple(own)))
    return tuple(found)


class Sweep(NamedTuple):
    """A checked ablation: what is varied, one job a variant and seed, and the stage whose evaluation is compared."""

    stage: str
    compared_at: str
    variants: tuple[Variant, ...]
    jobs: tuple[Job, ...]


def prepare_sweep(asked: Request, home: Path, stage: str, vary: Sequence[str], seeds: int, compare_at: str | None) -> Sweep:
    """Check an ablation and plan every variant. Raises ConfigError and ArtifactError as `prepare` does; runs nothing."""
    recipe, _ = _recipe(asked, home)
    scored = [name for name in recipe.after(stage) if recipe.evaluation_of(name)]
    if not scored or (compare_at and compare_at not in scored):
        raise ConfigError(
            f"ablation of {stage}: {f'{compare_at} is not evaluated after it' if scored else 'no stage after it is evaluated'}; "
            f"compare at one of {', '.join(scored) or 'the stages that make a model'}"
        )
    compared_at = compare_at or scored[0]
    found = variants(stage, vary, seeds, recipe.seed)
    jobs = []
    for variant in found:
        request = asked.model_copy(update={"start_from": stage, "overrides": (*asked.overrides, *variant.overrides)})
        jobs.append(prepare(request, home, upto=compared_at))
    return Sweep(stage, compared_at, found, tuple(jobs))


def yaml_text(value: Any) -> str:
    """A YAML value on one line, as `--set` takes it."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
