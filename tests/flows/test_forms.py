"""The forms on the Prefect page, as their schemas: what they show, what they send, what they refuse. `test_browser.py` fills them in."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ParameterTypeError
from prefect.flows import Flow, load_flow_from_entrypoint
from prefect.utilities.schema_tools import validate

from flows.deployments import deployments
from flows.forms import settings_form
from flows.recipe import recipe_names
from flows.request import Request
from stages.config import STAGES

RULES = ("type", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
ONE_VALUE = ("integer", "number", "string", "boolean")
NAMES = ["recipe", "recipe ablation", *(f"stage {kind}" for kind in STAGES), "review of traces"]
FORMS = {deployment.name: deployment for deployment in deployments()}


def schema(name: str) -> dict[str, Any]:
    """The parameters of a deployment, as Prefect's page and server get them."""
    return FORMS[name]._parameter_openapi_schema.model_dump(mode="json", exclude_none=True)


def fields(name: str) -> dict[str, dict[str, Any]]:
    """Every field of a form, those of its settings too, by name."""
    found = schema(name)
    groups = [found["properties"], *(group["properties"] for group in found["definitions"].values())]
    return {field: rules for group in groups for field, rules in group.items()}


def faults(name: str, given: dict[str, Any]) -> list[str]:
    """What the server says about a filled form before a run exists."""
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in validate(given, schema(name))]


def flow_of(deployment: RunnerDeployment) -> Flow[..., Any]:
    assert deployment.entrypoint is not None
    return load_flow_from_entrypoint(deployment.entrypoint)


def run_name(name: str, given: dict[str, Any]) -> str:
    """What a run started from that form is called at first."""
    form = flow_of(FORMS[name])
    assert callable(form.flow_run_name)
    context: dict[str, Any] = {"flow": form, "flow_run": FlowRun(flow_id=uuid4()), "parameters": form.validate_parameters(given)}
    with FlowRunContext.model_construct(**context):
        return form.flow_run_name()


def test_deployments_listed_are_the_recipe_the_ablation_every_stage_and_the_review() -> None:
    assert list(FORMS) == NAMES
    for name, deployment in FORMS.items():
        assert deployment.description, name


@pytest.mark.parametrize("name", NAMES)
def test_entrypoint_of_a_deployment_loaded_by_module_is_its_flow(name: str) -> None:
    deployment = FORMS[name]
    assert deployment.entrypoint is not None
    assert "/" not in deployment.entrypoint  # a module path: the folder that `up` was started in does not matter
    assert ":" not in deployment.entrypoint
    assert flow_of(deployment).name == deployment.flow_name


@pytest.mark.parametrize("name", NAMES)
def test_schema_of_a_form_shown_has_descriptions_and_no_shape_that_renders_badly(name: str) -> None:
    text = json.dumps(schema(name))
    for badly in ("oneOf", "anyOf", "allOf", 'additionalProperties": true', "prefixItems"):
        assert badly not in text
    for field, rules in fields(name).items():
        assert rules.get("description", "").endswith("."), field
        assert rules.get("title") == field  # the name that `--set` takes
    assert schema(name).get("required", []) == []


@pytest.mark.parametrize("name", NAMES)
def test_form_sent_as_it_opens_is_accepted_and_changes_nothing(name: str) -> None:
    shown = {field: rules["default"] for field, rules in schema(name)["properties"].items()}
    if name == "stage evaluation":  # of many evaluations one has to be named
        assert faults(name, shown) == ["name: '' does not match '^[a-z0-9_]+$'"]
        shown["name"] = "evaluation_base"
    assert faults(name, shown) == []
    flow_of(FORMS[name]).validate_parameters(shown)
    assert shown["recipe"] in recipe_names()
    assert {field: value for field, value in shown.items() if value} == {
        "recipe": "tiny",
        **({"stage": "reasoning_rl", "vary": ["loss=dapo,dr_grpo"], "seeds": 1} if name == "recipe ablation" else {}),
        **({"of_run": "latest"} if name.startswith("stage") else {}),
        **({"name": "evaluation_base"} if name == "stage evaluation" else {}),
        **({"node": "cold_start", "wait": "pause", "timeout_hours": 24.0} if name == "review of traces" else {}),
    }


@pytest.mark.parametrize("kind", STAGES)
def test_settings_of_a_stage_left_empty_send_nothing(kind: str) -> None:
    for group in schema(f"stage {kind}")["definitions"].values():
        assert [field for field, rules in group["properties"].items() if "default" in rules] == []
    form = settings_form(kind)
    assert form.model_validate({}).model_dump(exclude_none=True) == {}
    shown = schema(f"stage {kind}")["definitions"][f"{STAGES[kind].__name__}Settings"]["properties"]
    emptied = dict.fromkeys(field for field, rules in shown.items() if "enum" not in rules)  # filled in and cleared again
    assert faults(f"stage {kind}", {"settings": emptied}) == []
    assert form.model_validate(emptied).model_dump(exclude_none=True) == {}


@pytest.mark.parametrize("kind", STAGES)
def test_settings_of_a_stage_shown_have_its_bounds_and_choices(kind: str) -> None:
    config = STAGES[kind].model_json_schema()["properties"]
    plain = {field: rules for field, rules in config.items() if rules.get("type") in ONE_VALUE}
    shown = schema(f"stage {kind}")["definitions"][f"{STAGES[kind].__name__}Settings"]
    assert set(shown["properties"]) == set(plain)
    assert shown["additionalProperties"] is False
    for field, rules in plain.items():
        expected = {rule: rules[rule] for rule in RULES if rule in rules}
        if rules["type"] == "boolean":
            expected = {"enum": [True, False]}  # a choice can be left empty, the switch of a boolean cannot
        assert {rule: shown["properties"][field][rule] for rule in RULES if rule in shown["properties"][field]} == expected, field
        assert shown["properties"][field]["description"] == rules["description"]
    placed = [bool(config[field].get("placement")) for field in shown["properties"]]
    assert placed == sorted(placed)  # what decides the result comes first


def test_recipe_form_filled_in_can_say_all_that_a_request_can() -> None:
    assert set(schema("recipe")["properties"]) == {*Request.model_fields, "dry_run"}


@pytest.mark.parametrize(
    ("name", "given", "fault"),
    [
        ("recipe", {"recipe": "my recipe"}, "recipe: 'my recipe' does not match"),
        ("recipe", {"recipe": ""}, "recipe: '' does not match"),
        ("recipe", {"overrides": ["reasoning_rl.steps"]}, "overrides.0: 'reasoning_rl.steps' does not match"),
        ("recipe", {"only": "Reasoning RL"}, "only: 'Reasoning RL' does not match"),
        ("recipe", {"accept_drift": [""]}, "accept_drift.0: '' does not match"),
        ("recipe", {"force": "perhaps"}, "force: 'perhaps' is not of type 'boolean'"),
        ("recipe ablation", {"stage": ""}, "stage: '' does not match"),
        ("recipe ablation", {"vary": []}, "vary: [] should be non-empty"),
        ("recipe ablation", {"vary": ["loss"]}, "vary.0: 'loss' does not match"),
        ("recipe ablation", {"seeds": 0}, "seeds: 0 is less than the minimum of 1"),
        ("stage reasoning_rl", {"settings": {"steps": 0}}, "settings.steps: 0 is less than the minimum of 1"),
        ("stage reasoning_rl", {"settings": {"steps": 1.5}}, "settings.steps: 1.5 is not valid"),
        ("stage reasoning_rl", {"settings": {"learning_rate": 0}}, "settings.learning_rate: 0 is less than or equal to the minimum"),
        ("stage reasoning_rl", {"settings": {"loss": "ppo"}}, "settings.loss: 'ppo' is not one of"),
        ("stage reasoning_rl", {"settings": {"stepz": 3}}, "settings: Additional properties are not allowed ('stepz' was unexpected)"),
        ("stage fusion", {"settings": {"thinking_share": 1.5}}, "settings.thinking_share: 1.5 is greater than the maximum of 1"),
    ],
)  # fmt: skip
def test_form_with_a_wrong_value_sent_is_refused_with_the_field_and_the_rule(name: str, given: dict[str, Any], fault: str) -> None:
    assert [said for said in faults(name, given) if said.startswith(fault)], faults(name, given)
    with pytest.raises(ParameterTypeError):  # also when it comes past the page
        flow_of(FORMS[name]).validate_parameters(given)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("recipe", {"recipe": "/my files/own-recipe.yaml", "overrides": ["reasoning_rl.engine.max_sequences=64"]}),
        ("recipe", {"recipe": "own.yml", "start_from": "pass_rates", "of_run": "own-3", "accept_drift": ["curation"]}),
        ("recipe ablation", {"vary": ["loss=dapo,dr_grpo", "group_size=8,16"], "seeds": 3, "compare_at": "rlhf"}),
        ("stage reasoning_rl", {"settings": {"steps": 5, "loss": "dr_grpo", "kl_weight": 0}, "downstream": True}),
        ("stage base_pretraining", {"settings": {"bf16": False}}),
    ],
)
def test_form_with_right_values_sent_is_accepted(name: str, given: dict[str, Any]) -> None:
    assert faults(name, given) == []
    flow_of(FORMS[name]).validate_parameters(given)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("recipe", {}, "tiny: default"),
        ("recipe", {"recipe": "/home/me/own.yaml", "overrides": ["seed=1"]}, "own: seed=1"),
        ("recipe", {"only": "fusion"}, "tiny: only fusion"),
        ("recipe", {"start_from": "fusion", "of_run": "tiny-3"}, "tiny: from fusion, of tiny-3"),
        ("recipe", {"dry_run": True}, "plan of tiny: default"),
        ("recipe ablation", {}, "tiny: reasoning_rl loss=dapo,dr_grpo"),
        ("recipe ablation", {"vary": ["loss=dapo,grpo", "steps=5,9"], "seeds": 3}, "tiny: reasoning_rl loss=dapo,grpo; steps=5,9, 3 seeds"),
        ("stage fusion", {}, "tiny: fusion again, of latest"),
        ("stage fusion", {"of_run": ""}, "tiny: fusion again"),
        ("stage reasoning_rl", {"settings": {"steps": 5, "loss": "grpo"}}, "tiny: reasoning_rl steps=5, loss=grpo, of latest"),
        ("stage distillation", {"name": "distillation_control", "overrides": ["seed=1"]}, "tiny: distillation_control seed=1, of latest"),
        ("stage base_pretraining", {"settings": {"bf16": False}, "dry_run": True}, "plan of tiny: base_pretraining bf16=False, of latest"),
    ],
)
def test_run_started_from_a_form_has_a_name_that_says_what_it_does(name: str, given: dict[str, Any], expected: str) -> None:
    assert run_name(name, given) == expected
