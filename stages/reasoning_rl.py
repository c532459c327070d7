"""Reasoning RL: GRPO on verifiable rewards, from the pass-rate band.

What      On-policy GRPO; reward = weighted sum of accuracy (rule check, or a model that judges), format, and the parts that
          `rewards` turns on. The rewards are audited before the first step; what cannot be graded is masked.
Reads     `model`, `problems` (with pass rates: `pass_rates.band`).
Writes    `model`, `rollouts` (every rollout of every step).
Papers    DeepSeekMath (arXiv 2402.03300) for GRPO; DeepSeek-R1 (arXiv 2501.12948) 2.2.2 and 2.3.2 for
          the rewards; DAPO (arXiv 2503.14476) for clip-higher, token-level loss and the overlong punishment; Kimi k1.5
          (arXiv 2501.12599) 2.3.3 for the length reward, 2.3.4 for the orders other than the plain one (stages/curriculum.py).
Differs   Rewards are 0/1, not DAPO's -1/+1; no dynamic sampling: the band does that work beforehand. All parts but accuracy
          and format are off by default.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from stages.artifacts import CheckpointRef, Handles, StageOutput
from stages.chat import render_prompt
from stages.config import ReasoningRL
from stages.records import Recorder
from stages.reinforcement import require_gradable, train_policy
from stages.rewards.audit import gate
from stages.rewards.model_judge import grader_of
from stages.rewards.scoring import Prompt, score_by_rules, weights_of
from stages.tables import read_rows
from stages.training import load_tokenizer


def run(config: ReasoningRL, inputs: Handles, stage_dir: Path, seed: int) -> StageOutput:
    """Train the policy in thinking mode on the band's problems."""
    model = inputs["model"]
    assert isinstance(model, CheckpointRef)
    tokenizer = load_tokenizer(model)
    prompts = [
        Prompt.of(row, render_prompt(tokenizer, row["question"], thinking=True), thinking=True)
        for row in read_rows(inputs["problems"], columns=("problem_id", "question", "answer"))
    ]
    grader = grader_of(config.judge, stage_dir, seed)
    score = partial(score_by_rules, config=config, grader=grader)
    require_gradable(prompts, grader)
    gate(score, {prompt.answer_type for prompt in prompts}, config.audit, Recorder(stage_dir), "reasoning_rl")
    return train_policy(
        model,
        prompts,
        score,
        weights_of(config, accuracy=config.accuracy_weight, format=config.format_weight),
        config,
        stage_dir,
        seed,
        name="reasoning_rl.model",
        card=f"# Reasoning RL\n\n`{model.name}` after {config.steps} steps of GRPO on {len(prompts)} problems "
        "(posttrain, stage `reasoning_rl`).\n",
    )
