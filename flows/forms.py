"""Each stage as a flow of its own with a typed form: run one stage of an earlier run again, with other settings.

The form's fields are the stage's own settings (`stages/config.py`), with their bounds and descriptions; one
that is left empty stays as it is in that run. Nested settings go into `overrides`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_origin

from prefect import Flow, State, flow
from prefect.runtime import flow_run
from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo
from pydantic.json_schema import SkipJsonSchema

from flows.post_training import NoStageName, Outcome, Overrides, RecipeName, RunName, StageName, conduct, name_asked_for
from flows.request import Request, yaml_text
from stages.config import STAGES, StageConfig

_TEXT = """Run {kind} again, and the evaluation of its model; everything before it comes from an earlier run.

    The result stands beside that run's as a variant. What `{kind}` does: see `stages/{kind}.py`.

    Args:
        recipe: A recipe that comes with posttrain, or the path of your own .yaml file.
        of_run: The run to start from: `tiny-3`, `latest` for the newest of the whole recipe, or an MLflow or Prefect run id.
        name: {name}
        settings: Only what is filled in is changed.
        overrides: More settings to change, each `stage.key=value`: nested ones, a seed, for instance `{example}`.
        downstream: Also run every stage that reads it, directly or not.
        force: Run it even if it is finished; the earlier result is set aside, not lost.
        dry_run: Only plan: what would be reused, resumed and run, and why.
    """


def settings_form(kind: str) -> type[BaseModel]:
    """The plain settings of a stage as a model in which everything may be left out."""
    fields: dict[str, Any] = {name: _optional(name, field) for name, field in sorted(_plain(STAGES[kind]), key=_is_placement)}
    return create_model(f"{STAGES[kind].__name__}Settings", __config__=ConfigDict(extra="forbid"), **fields)


def _plain(config: type[StageConfig]) -> Iterator[tuple[str, FieldInfo]]:
    """The fields that hold one value: numbers, texts, choices."""
    for name, field in config.model_fields.items():
        if field.annotation in (int, float, str, bool) or get_origin(field.annotation) is Literal:
            yield name, field


def _is_placement(item: tuple[str, FieldInfo]) -> bool:
    """Whether a field says how a stage runs, not what it makes: those come last."""
    extra = item[1].json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("placement"))


def _optional(name: str, field: FieldInfo) -> tuple[Any, Any]:
    """The same field, empty at first."""
    kind: Any = Literal[True, False] if field.annotation is bool else field.annotation
    inner = Annotated[(kind, *field.metadata)] if field.metadata else kind
    return inner | SkipJsonSchema[None], Field(  # type: ignore[misc]
        None, title=name, description=field.description, json_schema_extra=_empty_at_first
    )


def _empty_at_first(schema: dict[str, Any]) -> None:
    """Without a default the form sends only what is filled in; without its type a truth value is a choice, which can be left empty."""
    schema.pop("default", None)
    if schema.get("type") == "boolean":
        del schema["type"]


def _run_name() -> str:
    given = flow_run.parameters
    changed = [f"{key}={value}" for key, value in dict(given["settings"]).items() if value is not None]
    changed += given["overrides"]
    return name_asked_for(f"{given['name'] or flow_run.flow_name} {', '.join(changed) or 'again'}")


def stage_flow(kind: str) -> Flow[..., Any]:
    """The flow that runs one stage of an earlier run again, with a form of that stage's settings."""
    form, is_evaluation = settings_form(kind), kind == "evaluation"

    def body(
        recipe: RecipeName = "tiny",
        of_run: RunName = "latest",
        name: NoStageName = "",
        settings: form = {},  # type: ignore[valid-type]  # noqa: B006
        overrides: Overrides = [],  # noqa: B006 - the default that the form shows
        downstream: bool = False,
        force: bool = False,
        dry_run: bool = False,
    ) -> Outcome | State | None:
        node = name or kind
        place = kind if is_evaluation and node.startswith("evaluation_") else node  # one specification for all evaluations
        changed = form.model_validate(settings).model_dump(mode="json", exclude_none=True)
        asked = Request(
            recipe=recipe,
            overrides=(*(f"{place}.{key}={yaml_text(value)}" for key, value in changed.items()), *overrides),
            only=None if downstream else node,
            start_from=node if downstream else None,
            of_run=of_run or None,
            force=force,
        )
        return conduct(asked, dry_run=dry_run)

    body.__name__ = body.__qualname__ = kind
    which = "Which one, for instance `evaluation_reasoning_rl`." if is_evaluation else f"Its name in the recipe, when that is not `{kind}`."
    example = "evaluation.sampler.temperature=0.6" if is_evaluation else f"{kind}.seed=1"
    body.__doc__ = _TEXT.format(kind=kind, name=which, example=example)
    body.__annotations__ = inspect.get_annotations(body, eval_str=True, locals={"form": form})
    if is_evaluation:  # of which a recipe has many
        body.__annotations__["name"] = StageName
    return flow(name=kind, flow_run_name=_run_name, persist_result=False)(body)


base_pretraining = stage_flow("base_pretraining")
curation = stage_flow("curation")
pass_rates = stage_flow("pass_rates")
cold_start = stage_flow("cold_start")
reasoning_rl = stage_flow("reasoning_rl")
rejection_sampling = stage_flow("rejection_sampling")
fusion = stage_flow("fusion")
reward_model = stage_flow("reward_model")
rlhf = stage_flow("rlhf")
distillation = stage_flow("distillation")
evaluation = stage_flow("evaluation")
