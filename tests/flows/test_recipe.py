"""Recipes: every one loads; wiring, inserted evaluations, overrides, and errors that name key, value, rule and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.recipe import RECIPES, Recipe, load_recipe, recipe_names
from stages.config import ColdStart, PassRates
from stages.errors import ConfigError

SMALL = """
name: small
seed: 7
models: {base: org/base@main, fresh: org/fresh}
evaluation: {benchmarks: curation.benchmarks, samples: 2}
stages:
  curation:
    sources: [{kind: reasoning_gym, family: chain_sum, size: 10}]
    benchmarks: {sums: [{kind: reasoning_gym, family: chain_sum, size: 10}]}
    pools: {rl: {share: 0.5}, cold_start: {share: 0.5}}
  cold_start: {from: {model: base, traces: curation.cold_start}, examples: 10, learning_rate: 1.0e-3}
  second_rates: {stage: pass_rates, from: {model: cold_start, problems: curation.rl}}
  distillation: {from: {model: fresh, teacher: cold_start, problems: curation.rl}, examples: 10, learning_rate: 1.0e-3}
"""


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return str(path)


def test_every_recipe_in_the_tree_loads() -> None:
    files = sorted(path.stem for path in RECIPES.rglob("*.y*ml"))
    loaded = [load_recipe(name).name for name in recipe_names()]
    assert loaded == files
    assert len(loaded) >= 1


def test_recipe_inserts_one_evaluation_per_model(small: str) -> None:
    assert [node.name for node in load_recipe(small).nodes] == [
        "curation", "evaluation_base", "cold_start", "evaluation_cold_start", "second_rates",
        "evaluation_fresh", "distillation", "evaluation_distillation",
    ]  # fmt: skip


def test_recipe_models_made_before_the_benchmarks_are_scored_after_them(tmp_path: Path) -> None:
    path = tmp_path / "late.yaml"
    path.write_text(
        """
name: late
evaluation: {benchmarks: curation, samples: 2}
stages:
  base_pretraining:
  curation:
    sources: [{kind: reasoning_gym, family: chain_sum, size: 10}]
    benchmarks: {sums: [{kind: reasoning_gym, family: chain_sum, size: 10}]}
    pools: {}
"""
    )
    assert [node.name for node in load_recipe(str(path)).nodes] == ["base_pretraining", "curation", "evaluation_base_pretraining"]


def test_recipe_bare_source_is_the_output_of_the_inputs_name_or_the_only_one(small: str) -> None:
    recipe = load_recipe(small)
    assert str(recipe.node("second_rates").inputs["model"]) == "cold_start.model"
    assert str(recipe.node("cold_start").inputs["model"]) == "base"
    assert recipe.stage_before("distillation") == "fresh"
    assert recipe.stage_before("base") is None


def test_recipe_upto_keeps_a_node_and_what_it_needs(small: str) -> None:
    recipe = load_recipe(small)
    assert [node.name for node in recipe.upto("second_rates").nodes] == ["curation", "cold_start", "second_rates"]


def test_recipe_evaluations_share_one_seed_and_other_nodes_have_their_own(small: str) -> None:
    nodes = load_recipe(small).nodes
    assert len({node.seed for node in nodes if node.stage == "evaluation"}) == 1
    assert len({node.seed for node in nodes}) == len([node for node in nodes if node.stage != "evaluation"]) + 1


def change(path: str, *overrides: str) -> Recipe:
    return load_recipe(path, overrides)


def test_override_values_are_yaml_and_reach_nested_settings(small: str) -> None:
    recipe = change(small, "cold_start.learning_rate=5e-4", "second_rates.sampler.temperature=0.7", "curation.sources.0.size=20", "seed=3")
    cold_start, rates = recipe.node("cold_start").config, recipe.node("second_rates").config
    assert isinstance(cold_start, ColdStart)
    assert isinstance(rates, PassRates)
    assert cold_start.learning_rate == 5e-4
    assert rates.sampler.temperature == 0.7
    assert recipe.seed == 3
    assert "size: 20" in recipe.text
    assert recipe.config_hash != change(small).config_hash


def test_override_of_a_model_and_of_the_evaluation_apply(small: str) -> None:
    recipe = change(small, "models.base=org/other", "evaluation.samples=8")
    assert recipe.models["base"] == "org/other"
    assert recipe.node("evaluation_base").config.identity()["samples"] == 8


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("cold_strat.examples=3", "--set cold_strat.examples=3: matches nothing; did you mean cold_start?"),
        ("cold_start.exampels=3", "cold_start.exampels = 3: there is no such setting; did you mean examples?"),
        ("cold_start.learning_rate=-1", "cold_start.learning_rate = -1: must be greater than 0"),
        ("second_rates.sampler.temprature=1", "second_rates.sampler.temprature = 1: there is no such setting; did you mean temperature?"),
        ("evaluation.judge={address: http://a, model: m, key: sk-1}", "evaluation.judge.key: there is no such setting; known: address"),
        ("curation.sources.0.sise=5", "curation.sources.0.sise = 5: there is no such setting; did you mean size?"),
        ("curation.sources.3.size=5", "curation.sources.3"),
        ("curation.pools.rl.share=0.9", "curation: pool shares add up to 1.4; the rule is at most 1"),
        ("cold_start.from.model=bass", "no earlier stage and no entry of `models` has this name; did you mean base?"),
        ("cold_start.from.modle=base", "cold_start.from.modle: the stage reads no such input; did you mean model?"),
        ("cold_start.from.model=null", "cold_start.from.model: this input (a model) is needed"),
        ("cold_start.from.traces=curation", "cold_start.from.traces = 'curation': must be one dataset that curation writes"),
        ("cold_start.from.traces=base", "cold_start.from.traces = 'base': base is a model, the input takes a dataset"),
        ("cold_start.stage=warm_start", "cold_start.stage = 'warm_start': there is no such stage; did you mean cold_start?"),
        ("evaluation.samples=1", "evaluation.samples = 1: must be greater than or equal to 2"),
        ("evaluation.benchmarks=curation.benchmark", "did you mean curation.benchmarks?"),
        ("models.bas=x", "--set models.bas=x: matches nothing; did you mean models.base?"),
        ("seed=high", "seed = 'high': must be a whole number"),
        ("seed=", "seed = None: must be a whole number"),
        ("cold_start.stage=[1]", "cold_start.stage = [1]: there is no such stage"),
        ("cold_start.examples=&a [*a]", "the value is not YAML (an alias lies inside its own anchor; write the value out)"),
        ("cold_start=3", "names a stage, not a setting"),
        ("cold_start.examples", "must be key=value"),
    ],
)  # fmt: skip
def test_override_that_breaks_a_rule_names_key_value_rule_and_nearest(small: str, override: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        change(small, override)
    assert said in str(error.value)


def test_recipe_faults_are_shown_together(small: str) -> None:
    with pytest.raises(ConfigError) as error:
        change(small, "cold_start.examples=0", "second_rates.attempts=1")
    assert "cold_start.examples" in str(error.value)
    assert "second_rates.attempts" in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: x\nstages: {}\nstage: {}", "stage: a recipe has no such key; did you mean stages?"),
        ("name: x\nname: y\nstages: {}", "the key 'name' is given twice"),
        ("name: x y\nstages: {}", "name = 'x y': must be lower-case letters, digits and _"),
        ("stages: {}", "name = None: must be a text"),
        ("name: x\nstages: {curation: 3}", "stages.curation: must be a mapping"),
        ("name: [", "cannot be read"),
        ("name: x\nstages: {curation: &a {b: *a}}", "an alias lies inside its own anchor"),
        ("just text", "must be a mapping"),
    ],
)
def test_recipe_file_that_breaks_a_rule_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_recipe(str(tmp_path / "bad.yaml"))
    assert said in str(error.value)


@pytest.mark.parametrize("stages", ["[a]", "{curation: 3}", "text"])
def test_override_of_a_recipe_that_breaks_a_rule_is_refused(tmp_path: Path, stages: str) -> None:
    (tmp_path / "bad.yaml").write_text(f"name: x\nstages: {stages}\n")
    with pytest.raises(ConfigError, match=r"stages.*must be a mapping"):
        change(str(tmp_path / "bad.yaml"), "curation.benchmark_size=4")


def test_override_of_a_stage_leaves_another_that_shares_an_alias(small: str) -> None:
    Path(small).write_text(
        SMALL.replace("pass_rates, from", "pass_rates, sampler: &sampler {temperature: 0.7}, from")
        + "  third_rates: {stage: pass_rates, sampler: *sampler, from: {model: cold_start, problems: curation.rl}}\n"
    )
    recipe = change(small, "third_rates.sampler.temperature=0.5")
    second, third = recipe.node("second_rates").config, recipe.node("third_rates").config
    assert isinstance(second, PassRates)
    assert isinstance(third, PassRates)
    assert (second.sampler.temperature, third.sampler.temperature) == (0.7, 0.5)


def test_recipe_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean tiny"):
        load_recipe("tinny")


@pytest.mark.parametrize(
    "address", ["http://user:sk-very@127.0.0.1:9/v1", "http://127.0.0.1:9/v1?api-key=sk-very", "http://127.0.0.1:9/#sk-very"]
)
def test_address_that_holds_a_key_is_a_config_error_that_does_not_show_it(address: str) -> None:
    with pytest.raises(ConfigError, match=r"judge\.address .*key_variable") as caught:
        load_recipe("tiny", [f"reasoning_rl.judge={{address: '{address}', model: m}}"])
    assert "very" not in str(caught.value)
