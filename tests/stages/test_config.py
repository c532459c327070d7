"""Settings: what is refused, and what of them decides a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from stages.config import STAGES, Curation, Evaluation, PassRates, ReasoningRL, RewardModel, SamplerConfig

SUMS = {"kind": "reasoning_gym", "family": "chain_sum", "size": 10}
CURATION: dict[str, Any] = {"sources": [SUMS], "benchmarks": {"standard": [SUMS]}, "pools": {"rl": {"share": 0.5}}}
RL: dict[str, Any] = {"steps": 3, "learning_rate": 1e-3}


@pytest.mark.parametrize(
    ("stage", "settings", "message"),
    [
        ("pass_rates", {"atempts": 8}, "atempts\n  Extra inputs"),
        ("pass_rates", {"sampler": {"temprature": 1}}, "temprature\n  Extra inputs"),
        ("pass_rates", {"attempts": 1}, "greater than or equal to 2"),
        ("pass_rates", {"band": [0.9, 0.1]}, r"band \(0.9, 0.1\) is empty; the rule is low <= high"),
        ("pass_rates", {"band": [0.1, 1.1]}, "less than or equal to 1"),
        ("pass_rates", {"sampler": {"temperature": 0}}, "greater than 0"),
        ("evaluation", {"samples": 1}, "greater than or equal to 2"),
        ("evaluation", {"thinking_budgets": [0]}, "greater than or equal to 1"),
        ("reasoning_rl", {"learning_rate": 1e-3}, "steps\n  Field required"),
        ("reasoning_rl", RL | {"loss": "ppo"}, "'grpo', 'dr_grpo', 'dapo' or 'bnpo'"),
        ("reasoning_rl", RL | {"group_size": 1}, "greater than or equal to 2"),
        ("reward_model", {"learning_rate": 0}, "greater than 0"),
        ("curation", CURATION | {"pools": {"rl": {"share": 0.7}, "cold_start": {"share": 0.7}}}, "pool shares add up to 1.4"),
        ("curation", CURATION | {"sources": []}, "at least 1 item"),
        ("curation", CURATION | {"sources": [{"kind": "web"}]}, "'reasoning_gym', 'file'"),
    ],
)
def test_settings_that_break_a_rule_are_refused_with_the_rule(stage: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        STAGES[stage].model_validate(settings)


def test_settings_cannot_be_changed_after_loading() -> None:
    config = PassRates()
    with pytest.raises(ValidationError, match="frozen"):
        config.attempts = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "config",
    [
        PassRates(band=(0.2, 0.8)),
        Evaluation(thinking_budgets=(4, 8)),
        ReasoningRL.model_validate(RL),
        Curation.model_validate(CURATION),
        RewardModel(learning_rate=1e-3),
    ],
)
def test_settings_dumped_to_json_load_again_equal(config: Any) -> None:
    assert type(config).model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("placed", [{"max_minutes": 7}, {"micro_batch": 8}, {"save_every": 1}])
def test_identity_placement_does_not_count(placed: dict[str, Any]) -> None:
    assert ReasoningRL.model_validate(RL | placed).identity() == ReasoningRL.model_validate(RL).identity()


@pytest.mark.parametrize("placed", [{"max_sequences": 4}, {"kv_cache_mib": 512}, {"gpu_memory_share": 0.9}])
def test_identity_placement_of_the_engine_does_not_count(placed: dict[str, Any]) -> None:
    assert PassRates.model_validate({"engine": placed}).identity() == PassRates().identity()


@pytest.mark.parametrize("decisive", [{"learning_rate": 2e-3}, {"loss": "grpo"}, {"clip_high": 0.2}, {"engine": {"max_model_tokens": 99}}])
def test_identity_what_decides_the_result_counts(decisive: dict[str, Any]) -> None:
    assert ReasoningRL.model_validate(RL | decisive).identity() != ReasoningRL.model_validate(RL).identity()


def test_identity_sampler_counts() -> None:
    assert PassRates(sampler=SamplerConfig(temperature=0.5)).identity() != PassRates().identity()


def test_files_are_the_files_of_sources_and_benchmarks() -> None:
    config = Curation.model_validate(
        CURATION | {"sources": [SUMS, {"kind": "file", "path": "a.jsonl"}], "benchmarks": {"own": [{"kind": "file", "path": "b.parquet"}]}}
    )
    assert config.files() == (Path("a.jsonl"), Path("b.parquet"))
    assert PassRates().files() == ()
