"""Reasoning RL: GRPO on verifiable rewards, from the pass-rate band.

What      On-policy GRPO; reward = weighted sum of accuracy (rule check) and format.
Reads     `model`, `problems` (with pass rates: `pass_rates.band`).
Writes    `model`, `rollouts` (every rollout of every step).
Papers    DeepSeekMath (arXiv 2402.03300) for GRPO; DeepSeek-R1 (arXiv 2501.12948) 2.2.2 for the rewards;
          DAPO (arXiv 2503.14476) for clip-higher and token-level loss; Kimi k1.5 (arXiv 2501.12599) 2.3.4
          for the orders other than the plain one (stages/curriculum.py).
Differs   Rewards are 0/1, not DAPO's -1/+1; no dynamic sampling: the band does that work beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stages.artifacts import CheckpointRef, Handles, StageOutput
from stages.chat import render_prompt
from stages.config import ReasoningRL
from stages.reinforcement import Prompt, Rollout, require_gradable, train_policy
from stages.rewards.grading import Verdict, grade
from stages.rewards.rewards import format_reward
from stages.tables import read_rows
from stages.training import load_tokenizer


def run(config: ReasoningRL, inputs: Handles, stage_dir: Path, seed: int) -> StageOutput:
    """Train the policy in thinking mode on the band's problems."""
    model = inputs["model"]
    assert isinstance(model, CheckpointRef)
    tokenizer = load_tokenizer(model)
    prompts = [
        Prompt(
            render_prompt(tokenizer, row["question"], thinking=True),
            row["problem_id"],
            row["question"],
            row["answer"],
            True,
            topic=row.get("family", ""),
            pass_rate=row.get("pass_rate"),
        )
        for row in read_rows(inputs["problems"], columns=("problem_id", "question", "answer"))
    ]
    require_gradable(prompts)
    return train_policy(
        model,
        prompts,
        score,
        {"accuracy": config.accuracy_weight, "format": config.format_weight},
        config,
        stage_dir,
        seed,
        name="reasoning_rl.model",
        card=f"# Reasoning RL\n\n`{model.name}` after {config.steps} steps of GRPO on {len(prompts)} problems "
        "(posttrain, stage `reasoning_rl`).\n",
    )


def score(rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
    """Accuracy (1 for a right final answer) and format, per rollout."""
    return {
        "accuracy": [float(grade(item.reply, item.prompt.gold).verdict is Verdict.RIGHT) for item in rollouts],
        "format": [format_reward(item.reply, thinking=item.prompt.thinking, stopped=item.stopped) for item in rollouts],
    }
