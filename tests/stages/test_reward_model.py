"""Reward model: pairs by the annotator, noise as stated, a judge that has learnt them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import CheckpointRef, DatasetRef, digest_of_folder
from stages.config import EngineConfig, RewardModel
from stages.errors import DataError
from stages.reward_model import run
from stages.rewards.rewards import preference_score
from stages.rewards.scoring import score_texts
from stages.tables import read_rows
from stages.training import load_model, load_tokenizer

pytestmark = pytest.mark.slow
NewStage = Callable[[str], Path]
Problems = Callable[[Sequence[dict[str, Any]]], DatasetRef]
ROWS = [{"problem_id": f"p{index}", "question": f"{index}+{7 - index}", "answer": "7"} for index in range(40)]


def test_reward_model_orders_the_pairs_as_the_annotator_and_learns_the_order(
    pupil: CheckpointRef, new_stage: NewStage, problems: Problems, small_engine: EngineConfig
) -> None:
    config = RewardModel.model_validate(
        {
            "attempts": 6,
            "label_noise": 0.25,
            "learning_rate": 3e-3,
            "epochs": 8,
            "batch_size": 8,
            "sampler": {"max_new_tokens": 48},
            "engine": small_engine.model_dump(),
        }
    )
    stage_dir = new_stage("reward_model")
    output = run(config, {"model": pupil, "problems": problems(ROWS)}, stage_dir, 0)
    pairs = read_rows(output.outputs["pairs"])
    assert len(pairs) >= 30
    for pair in pairs:
        chosen, rejected = (pair[side].removesuffix("<|im_end|>") for side in ("chosen", "rejected"))
        assert pair["chosen"].endswith("<|im_end|>")
        assert pair["prompt"].endswith("<think>\n\n</think>\n\n")
        assert pair["swapped"] == (preference_score(chosen) < preference_score(rejected))
    assert 0 < sum(pair["swapped"] for pair in pairs) < len(pairs) / 2
    assert output.metrics["reward_model/pairs"] == len(pairs)
    assert output.metrics["reward_model/held_out_pairs"] == len(pairs) // 10
    assert output.metrics["reward_model/held_out_accuracy"] >= 0.66

    judge = output.outputs["reward_model"]
    assert isinstance(judge, CheckpointRef)
    assert judge.digest == digest_of_folder(stage_dir / "checkpoint")
    opening = pairs[0]["prompt"]
    terse, friendly = score_texts(
        load_model(judge, kind="scalar"),
        load_tokenizer(judge),
        [f"{opening}\\boxed{{7}}<|im_end|>", f"{opening}The answer is \\boxed{{7}}. I hope this helps!<|im_end|>"],
    )
    assert friendly > terse


def test_reward_model_no_difference_between_responses_is_a_data_error(
    random_model: CheckpointRef, new_stage: NewStage, problems: Problems, small_engine: EngineConfig
) -> None:
    config = RewardModel.model_validate(
        {
            "prompts": 2,
            "attempts": 2,
            "learning_rate": 1e-3,
            "sampler": {"max_new_tokens": 1, "temperature": 0.01},
            "engine": small_engine.model_dump(),
        }
    )
    with pytest.raises(DataError, match=r"reward_model\.pairs would be empty: the annotator found no difference between any 2 responses"):
        run(config, {"model": random_model, "problems": problems(ROWS)}, new_stage("reward_model"), 0)
