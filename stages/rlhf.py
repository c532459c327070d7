"""RLHF: general RL against the reward model, with the rules kept on.

What      GRPO; reward = reward model's score of the final response (standardised on the starting model)
          + accuracy + format + the parts that `rewards` turns on, over prompts in both modes. The rules among them are
          audited before the first step; what cannot be graded is masked.
Reads     `model`, `reward_model`, `problems`.
Writes    `model`, `rollouts`.
Papers    DeepSeek-R1 (arXiv 2501.12948) 2.3.4: rule rewards and model rewards together, preference
          rewards only for a short last phase, because they are hacked; Qwen3 (arXiv 2505.09388) 4.4.
Differs   One phase; the reward model scores the response without its thinking, as R1's helpfulness model.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from stages.artifacts import CheckpointRef, Handles, StageOutput, write_json
from stages.chat import render_completion, render_prompt
from stages.config import RLHF
from stages.records import Recorder
from stages.reinforcement import require_gradable, train_policy
from stages.rewards.audit import gate
from stages.rewards.model_judge import grader_of
from stages.rewards.scoring import Prompt, Rollout, Scores, score_by_rules, score_texts, weights_of
from stages.tables import read_rows
from stages.training import load_model, load_tokenizer


def run(config: RLHF, inputs: Handles, stage_dir: Path, seed: int) -> StageOutput:
    """Train the policy; the first `thinking_share` of the problems are asked in thinking mode, every second one by flag."""
    model, judge_ref = inputs["model"], inputs["reward_model"]
    assert isinstance(model, CheckpointRef)
    assert isinstance(judge_ref, CheckpointRef)
    tokenizer, judge_tokenizer = load_tokenizer(model), load_tokenizer(judge_ref)
    judge = load_model(judge_ref, kind="scalar")
    rows = read_rows(inputs["problems"], columns=("problem_id", "question", "answer"))
    thinking = round(len(rows) * config.thinking_share)
    prompts = [
        Prompt.of(row, render_prompt(tokenizer, row["question"], thinking=index < thinking, flag=index % 2 == 0), thinking=index < thinking)
        for index, row in enumerate(rows)
    ]
    grader = grader_of(config.judge, stage_dir, seed)
    require_gradable(prompts, grader)
    gate(
        partial(score_by_rules, config=config, grader=grader),
        {prompt.answer_type for prompt in prompts},
        config.audit,
        Recorder(stage_dir),
        "rlhf",
    )
    scale_file = stage_dir / "data" / "preference_scale.json"

    def score(rollouts: Sequence[Rollout]) -> Scores:
        raw = score_texts(
            judge,
            judge_tokenizer,
            [
                render_prompt(judge_tokenizer, item.prompt.question, thinking=False) + render_completion(item.reply.response, thinking=None)
                for item in rollouts
            ],
        )
        if not scale_file.exists():  # the first batch is the starting model's; a resumed run keeps its scale
            write_json(scale_file, {"mean": statistics.fmean(raw), "std": statistics.pstdev(raw) or 1.0})
        scale = json.loads(scale_file.read_text())
        rules = score_by_rules(rollouts, config, grader)
        return Scores({"preference": [(value - scale["mean"]) / scale["std"] for value in raw], **rules.parts}, rules.grades)

    return train_policy(
        model,
        prompts,
        score,
        weights_of(config, preference=config.preference_weight, accuracy=config.accuracy_weight, format=config.format_weight),
        config,
        stage_dir,
        seed,
        name="rlhf.model",
        card=f"# RLHF\n\n`{model.name}` after {config.steps} steps of GRPO against `{judge_ref.name}` and rules "
        "(posttrain, stage `rlhf`).\n",
    )
