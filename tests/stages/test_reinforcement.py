"""Policy training end to end on a tiny model: every rollout is kept, rewards add up, faults are met before the first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from stages.artifacts import CheckpointRef, DatasetRef, StageOutput, digest_of_file, digest_of_folder
from stages.chat import parse_reply, render_prompt
from stages.config import RLHF, EngineConfig, ReasoningRL
from stages.errors import ConfigError, DataError, RewardError
from stages.reasoning_rl import run
from stages.records import read_records
from stages.rewards.grading import Verdict, grade
from stages.rewards.rewards import format_reward
from stages.tables import read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NewStage = Callable[[str], Path]
Kill = Callable[[Callable[[Path], Any], Path], None]
Problems = Callable[[Sequence[dict[str, Any]]], DatasetRef]
ROWS = [{"problem_id": f"p{index}", "question": f"{index}+{7 - index}", "answer": "7" if index % 2 else "8"} for index in range(4)]


@pytest.fixture
def settings(small_engine: EngineConfig) -> dict[str, Any]:
    return {
        "steps": 2,
        "prompts_per_step": 2,
        "group_size": 4,
        "learning_rate": 1e-4,
        "warmup_steps": 0,
        "temperature": 1.5,
        "max_new_tokens": 40,
        "engine": small_engine.model_dump(),
    }


def rows_of(output: StageOutput) -> list[dict[str, Any]]:
    rollouts = output.outputs["rollouts"]
    assert isinstance(rollouts, DatasetRef)
    assert rollouts.digest == digest_of_file(rollouts.path)
    rows = read_rows(rollouts)
    assert rollouts.rows == len(rows)
    return rows


@pytest.mark.slow
def test_reasoning_rl_two_steps_keep_every_rollout_with_its_rewards(
    pupil: CheckpointRef, tokenizer: PreTrainedTokenizerFast, new_stage: NewStage, problems: Problems, settings: dict[str, Any]
) -> None:
    stage_dir = new_stage("reasoning_rl")
    output = run(ReasoningRL.model_validate(settings), {"model": pupil, "problems": problems(ROWS)}, stage_dir, 0)
    rows, by_id = rows_of(output), {row["problem_id"]: row for row in ROWS}
    assert [(row["step"], row["position"]) for row in rows] == [(step, position) for step in range(2) for position in range(8)]
    for start in range(0, 16, 4):  # groups of four lie together
        assert len({row["problem_id"] for row in rows[start : start + 4]}) == 1
    for row in rows:
        problem, reply = by_id[row["problem_id"]], parse_reply(row["completion"])
        assert row["prompt"] == render_prompt(tokenizer, problem["question"], thinking=True)
        assert row["gold"] == problem["answer"]
        assert row["reward_accuracy"] == float(grade(reply, problem["answer"]).verdict is Verdict.RIGHT)
        assert row["reward_format"] == format_reward(reply, thinking=True, stopped=row["stopped"])
        assert row["reward"] == pytest.approx(row["reward_accuracy"] + 0.2 * row["reward_format"])
        assert 0 < row["tokens"] <= 40
        assert row["stopped"] == row["completion"].endswith("<|im_end|>")
        assert row["logprob"] < 0
        assert row["version"] == f"step-{row['step']}"
        assert "why" not in row  # all in turn needs no reason
    assert {row["reward"] for row in rows if row["gold"] == "8"} <= {0.0, 0.2}
    assert {0.0, 1.2} <= {row["reward"] for row in rows if row["gold"] == "7"}

    model = output.outputs["model"]
    assert model.digest == digest_of_folder(stage_dir / "checkpoint") != pupil.digest
    metrics: dict[str, list[float]] = {}
    for record in read_records(stage_dir / "metrics.jsonl"):
        for name, value in record.get("metrics", {}).items():
            metrics.setdefault(name, []).append(value)
    assert metrics["rollout/reward"] == pytest.approx([sum(row["reward"] for row in rows[start : start + 8]) / 8 for start in (0, 8)])
    assert metrics["rollout/accuracy"] == pytest.approx(
        [sum(row["reward_accuracy"] for row in rows[start : start + 8]) / 8 for start in (0, 8)]
    )
    assert max(metrics["rollout/logprob_gap_max"]) < 1e-3


@pytest.mark.slow
def test_reasoning_rl_of_one_step_learns_from_it_whatever_its_warm_up(
    pupil: CheckpointRef, new_stage: NewStage, problems: Problems, settings: dict[str, Any]
) -> None:
    config = ReasoningRL.model_validate(settings | {"steps": 1, "warmup_steps": 3})
    output = run(config, {"model": pupil, "problems": problems(ROWS)}, new_stage("reasoning_rl"), 0)
    assert len({row["reward"] for row in rows_of(output)}) > 1
    assert output.outputs["model"].digest != pupil.digest


@pytest.mark.slow
def test_reasoning_rl_killed_in_a_later_pass_and_run_again_gives_the_same_bits_and_rollouts(
    pupil: CheckpointRef, new_stage: NewStage, problems: Problems, settings: dict[str, Any], kill_at_a_checkpoint: Kill
) -> None:
    config = ReasoningRL.model_validate(settings | {"steps": 5, "save_every": 3, "learning_rate": 1e-3})
    rows = [{"problem_id": f"p{index}", "question": f"{index}+{7 - index}", "answer": "7"} for index in range(4)]  # two steps a pass
    inputs = {"model": pupil, "problems": problems(rows)}
    straight, broken = new_stage("reasoning_rl"), new_stage("reasoning_rl")
    kill_at_a_checkpoint(lambda stage_dir: run(config, inputs, stage_dir, 0), broken)
    whole, resumed = (run(config, inputs, stage_dir, 0) for stage_dir in (straight, broken))
    assert whole.outputs["model"].digest != pupil.digest
    assert rows_of(resumed) == rows_of(whole)
    assert resumed.outputs["model"].digest == whole.outputs["model"].digest


@pytest.mark.slow
def test_live_curriculum_killed_and_run_again_chooses_the_same_problems_for_the_same_reasons(
    pupil: CheckpointRef, new_stage: NewStage, problems: Problems, settings: dict[str, Any], kill_at_a_checkpoint: Kill
) -> None:
    curriculum = {"order": "prioritised", "live": True, "retire_at": 0.8, "retire_after": 8, "prior_tries": 1}
    config = ReasoningRL.model_validate(settings | {"steps": 6, "save_every": 2, "learning_rate": 1e-3, "curriculum": curriculum})
    rows = [
        {"problem_id": f"p{index}", "question": f"{index}+{7 - index}", "answer": "7" if index else "8", "family": "sums", "pass_rate": 0.5}
        for index in range(5)
    ]
    inputs = {"model": pupil, "problems": problems(rows)}
    straight, broken = new_stage("reasoning_rl"), new_stage("reasoning_rl")
    kill_at_a_checkpoint(lambda stage_dir: run(config, inputs, stage_dir, 0), broken)
    whole, resumed = (run(config, inputs, stage_dir, 0) for stage_dir in (straight, broken))
    rollouts = rows_of(whole)
    assert rows_of(resumed) == rollouts
    assert resumed.outputs["model"].digest == whole.outputs["model"].digest

    right, tries = dict.fromkeys((row["problem_id"] for row in rows), 0), dict.fromkeys((row["problem_id"] for row in rows), 0)
    for start in range(0, len(rollouts), 8):  # a step: two groups of four
        for row in rollouts[start : start + 8]:
            assert row["slot"] == row["position"] // 4
            rate = (0.5 + right[row["problem_id"]]) / (1 + tries[row["problem_id"]])
            assert row["success_rate"] == pytest.approx(rate)
            if row["why"].startswith("prioritised"):
                assert row["weight"] == pytest.approx(1 - rate)
                assert rate < 0.8 or tries[row["problem_id"]] < 8
                assert row["why"] == f"prioritised: 1 - {rate:.4g}"
            else:
                assert row["why"].startswith("fill: prioritised has ")
        for row in rollouts[start : start + 8]:
            tries[row["problem_id"]] += 1
            right[row["problem_id"]] += row["reward_accuracy"] == 1.0
    metrics = [
        record["metrics"] for record in read_records(straight / "metrics.jsonl") if "curriculum/retired" in record.get("metrics", {})
    ]
    assert len(metrics) == 6
    assert metrics[0]["curriculum/pool_rate"] == 0.5


@pytest.mark.slow
def test_rlhf_rewards_are_the_judges_score_on_the_starting_models_scale_plus_rules(
    pupil: CheckpointRef, tokenizer: PreTrainedTokenizerFast, new_stage: NewStage, problems: Problems, settings: dict[str, Any]
) -> None:
    import torch

    from stages.rlhf import run as run_rlhf
    from stages.training import export_checkpoint, load_model

    torch.manual_seed(0)
    judge = export_checkpoint(
        load_model(pupil, kind="scalar"), tokenizer, new_stage("reward_model"), name="reward_model.reward_model", card=""
    )
    config = RLHF.model_validate(settings | {"thinking_share": 0.5, "preference_weight": 0.5})
    rows = rows_of(run_rlhf(config, {"model": pupil, "reward_model": judge, "problems": problems(ROWS)}, new_stage("rlhf"), 0))
    assert len(rows) == 16
    for row in rows:
        thinking = row["problem_id"] in ("p0", "p1")
        assert row["thinking"] == thinking
        question = next(problem["question"] for problem in ROWS if problem["problem_id"] == row["problem_id"])
        forms = [render_prompt(tokenizer, question, thinking=thinking, flag=flag) for flag in (False, True)]
        assert row["prompt"] in forms
        assert row["reward"] == pytest.approx(0.5 * row["reward_preference"] + row["reward_accuracy"] + 0.2 * row["reward_format"])
        assert row["reward_format"] == format_reward(parse_reply(row["completion"]), thinking=thinking, stopped=row["stopped"])
    first = [row["reward_preference"] for row in rows[:8]]
    assert sum(first) / 8 == pytest.approx(0, abs=1e-5)
    assert sum(value**2 for value in first) / 8 == pytest.approx(1, abs=1e-4)
    same = {}
    for row in rows:  # the judge reads question and response, never the thinking
        key = (row["problem_id"], parse_reply(row["completion"]).response)
        assert same.setdefault(key, row["reward_preference"]) == pytest.approx(row["reward_preference"], abs=1e-5)


def test_reasoning_rl_fewer_prompts_than_a_step_needs_is_a_config_error(
    pupil: CheckpointRef, new_stage: NewStage, problems: Problems, settings: dict[str, Any]
) -> None:
    config = ReasoningRL.model_validate(settings | {"prompts_per_step": 5})
    with pytest.raises(
        ConfigError, match=r"reasoning_rl\.model: 4 prompts, but a step takes prompts_per_step = 5; lower it or widen the pool"
    ):
        run(config, {"model": pupil, "problems": problems(ROWS)}, new_stage("reasoning_rl"), 0)


def test_reasoning_rl_order_that_needs_pass_rates_without_them_is_a_data_error(
    pupil: CheckpointRef, new_stage: NewStage, problems: Problems, settings: dict[str, Any]
) -> None:
    config = ReasoningRL.model_validate(settings | {"curriculum": {"order": "easy_to_hard"}})
    with pytest.raises(DataError, match="4 of 4 problems have no pass_rate; the order easy_to_hard needs one"):
        run(config, {"model": pupil, "problems": problems(ROWS)}, new_stage("reasoning_rl"), 0)


def test_reasoning_rl_problem_that_stands_twice_is_a_data_error(
    pupil: CheckpointRef, new_stage: NewStage, problems: Problems, settings: dict[str, Any]
) -> None:
    with pytest.raises(DataError, match="1 of 5 prompts have the problem_id of another"):
        run(ReasoningRL.model_validate(settings), {"model": pupil, "problems": problems([*ROWS, ROWS[0]])}, new_stage("reasoning_rl"), 0)


def test_reasoning_rl_micro_batch_that_does_not_divide_a_step_is_refused_with_the_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="2 prompts x 4 rollouts = 8 a step, which micro_batch = 3 does not divide"):
        ReasoningRL.model_validate(settings | {"micro_batch": 3})


def test_reasoning_rl_bnpo_in_parts_is_refused_since_its_loss_would_depend_on_memory(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="bnpo averages over the tokens of a micro-batch"):
        ReasoningRL.model_validate(settings | {"loss": "bnpo", "micro_batch": 4})


def test_reasoning_rl_gold_that_cannot_be_graded_is_a_reward_error_before_any_rollout(
    pupil: CheckpointRef, new_stage: NewStage, problems: Problems, settings: dict[str, Any]
) -> None:
    stage_dir = new_stage("reasoning_rl")
    with pytest.raises(RewardError, match="problem p9: its own gold answer ' ' is not graded right"):
        run(
            ReasoningRL.model_validate(settings),
            {"model": pupil, "problems": problems([*ROWS, {"problem_id": "p9", "question": "q", "answer": " "}])},
            stage_dir,
            0,
        )
    assert list(stage_dir.iterdir()) == []
