"""Losses and advantages against numbers worked out apart from any trainer, through the trainers that the stages build.

The policy stage builds its own GRPO trainer here, with its own arguments; the test takes it over where training would
begin. Only edges are replaced: the engine that is never asked, and the log-probabilities that a model would give.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from stages.artifacts import CheckpointRef
from stages.config import EngineConfig, ReasoningRL
from stages.reinforcement import Prompt, train_policy

if TYPE_CHECKING:
    from pathlib import Path

    import torch

OLD = [[-1.0, -0.5], [-0.7, -1.2, -0.3], [-0.9, -0.4, -1.1, -0.6], [-0.8]]
NEW = [[-0.8, -0.5], [-0.9, -1.0, -0.3], [-0.6, -0.5, -1.5, -0.6], [-1.2]]
REF = [[-1.1, -0.6], [-0.7, -1.3, -0.2], [-0.9, -0.6, -1.0, -0.7], [-0.7]]
Z_SCORES = [1.0, -1.0, -1.0, 1.0]  # of rewards 1, 0, 0, 1, with the population's standard deviation
CENTRED = [0.5, -0.5, -0.5, 0.5]

GRPO_GRADIENT = [[0, -0.125], [0.068228, 0.101784, 0.083333], [0.084366, 0.056552, 0, 0.0625], [-0.167580]]
GRPO_KL_GRADIENT = [[0.001296, -0.124524], [0.067490, 0.102648, 0.082983], [0.085014, 0.056790, -0.001622, 0.062738], [-0.174067]]
DAPO_GRADIENT = [[-0.122140, -0.1], [0.081873, 0.122140, 0.1], [0.134986, 0.090484, 0, 0.1], [-0.067032]]
DR_GRPO_GRADIENT = [[0, -0.015625], [0.012793, 0.019084, 0.015625], [0.021092, 0.014138, 0, 0.015625], [-0.010474]]

BuildTrainer = Callable[..., Any]


class TrainingWouldBeginError(Exception):
    """Raised in place of training: the trainer is built, and now the test's."""


@pytest.fixture(scope="module")
def grpo_trainer(random_model: CheckpointRef, tmp_path_factory: pytest.TempPathFactory) -> BuildTrainer:
    """Build the trainer that the policy stages build, for groups of four rollouts; one for each combination of settings."""
    import trl
    import vllm

    built: dict[str, Any] = {}

    def build(groups: int = 1, **settings: Any) -> Any:
        config = ReasoningRL.model_validate(
            {"steps": 1, "learning_rate": 1e-3, "prompts_per_step": groups, "group_size": 4, "max_new_tokens": 8} | settings
        )
        key = config.model_dump_json()
        if key not in built:

            class Kept(trl.GRPOTrainer):  # type: ignore[misc]
                def train(self, **_: Any) -> None:
                    built[key] = self
                    raise TrainingWouldBeginError

            prompts = [Prompt(f"question {index}", str(index), "", "7", True) for index in range(groups)]
            weights = {"accuracy": config.accuracy_weight, "format": config.format_weight}
            stage_dir = tmp_path_factory.mktemp("reasoning_rl")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(trl, "GRPOTrainer", Kept)
                patch.setattr(vllm, "LLM", lambda **_: None)
                with pytest.raises(TrainingWouldBeginError):
                    train_policy(random_model, prompts, lambda _: {}, weights, config, stage_dir, 0, name="reasoning_rl.model", card="")
        trainer = built[key]
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        return trainer

    return build


def padded(rows: list[list[float]]) -> torch.Tensor:
    """Ragged rows as float32 [4, 4], zeros behind."""
    import torch

    return torch.tensor([row + [0.0] * (4 - len(row)) for row in rows])


def loss_of(trainer: Any, new: torch.Tensor, advantages: list[float], old: list[list[float]] = OLD) -> torch.Tensor:
    """The trainer's loss when the model's log-probabilities are `new`, float32 [4, 4]."""
    import torch

    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (new, torch.zeros_like(new), None)
    mask = padded([[1.0] * len(row) for row in NEW]).long()
    loss: torch.Tensor = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": torch.ones(4, 2, dtype=torch.long),
            "prompt_mask": torch.ones(4, 2, dtype=torch.long),
            "completion_ids": mask,
            "completion_mask": mask,
            "advantages": torch.tensor(advantages),
            "num_items_in_batch": mask.sum(),
            "old_per_token_logps": padded(old),
            "ref_per_token_logps": padded(REF),
        },
    )
    return loss


@pytest.mark.parametrize(
    ("settings", "advantages", "expected", "gradient"),
    [
        ({"loss": "grpo", "clip_high": 0.2}, Z_SCORES, 0.064183, GRPO_GRADIENT),
        ({"loss": "grpo", "clip_high": 0.2, "kl_weight": 0.04}, Z_SCORES, 0.066621, GRPO_KL_GRADIENT),
        ({"loss": "grpo", "clip_high": 0.2, "kl_weight": 0.001}, Z_SCORES, 0.064244, None),
        ({"loss": "dapo"}, Z_SCORES, 0.420311, DAPO_GRADIENT),
        ({"loss": "dapo", "clip_high": 0.2}, Z_SCORES, 0.422451, None),
        ({"loss": "bnpo"}, Z_SCORES, 0.420311, DAPO_GRADIENT),
        ({"loss": "bnpo", "clip_high": 0.2}, Z_SCORES, 0.422451, None),
        ({"loss": "dr_grpo", "clip_high": 0.2, "advantage": "none"}, CENTRED, 0.066008, DR_GRPO_GRADIENT),
    ],
)
def test_policy_loss_of_the_worked_batch_is_the_worked_number(
    grpo_trainer: BuildTrainer, settings: dict[str, Any], advantages: list[float], expected: float, gradient: list[list[float]] | None
) -> None:
    new = padded(NEW).requires_grad_()
    loss = loss_of(grpo_trainer(**settings), new, advantages)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    loss.backward()
    if gradient is not None:
        assert new.grad.tolist() == [pytest.approx(row, abs=1e-6) for row in padded(gradient).tolist()]


@pytest.mark.parametrize(
    ("settings", "advantages", "expected"),
    [
        ({"loss": "grpo"}, Z_SCORES, 0.0),
        ({"loss": "dapo"}, Z_SCORES, 0.4),
        ({"loss": "dr_grpo", "advantage": "none"}, CENTRED, 0.0625),
    ],
)
def test_policy_loss_on_policy_is_the_worked_number(
    grpo_trainer: BuildTrainer, settings: dict[str, Any], advantages: list[float], expected: float
) -> None:
    assert loss_of(grpo_trainer(**settings), padded(NEW), advantages, old=NEW).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("advantage", "rewards", "expected"),
    [
        ("group", [1, 0, 1, 0], [0.865875, -0.865875, 0.865875, -0.865875]),
        ("group", [1, 0, 0, 0], [1.499700, -0.499900, -0.499900, -0.499900]),
        ("group", [1, 1, 1, 0], [0.499900, 0.499900, 0.499900, -1.499700]),
        ("group", [1, 1, 1, 1], [0, 0, 0, 0]),
        ("group", [1, -1, -1, -1], [1.499850, -0.499950, -0.499950, -0.499950]),
        ("group", [0.9, 0.1, 0.5, 0.5], [1.224370, -1.224370, 0, 0]),
        ("none", [1, 0, 1, 0], [0.5, -0.5, 0.5, -0.5]),
        ("none", [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ("none", [1, -1, -1, -1], [1.5, -0.5, -0.5, -0.5]),
        ("none", [0.9, 0.1, 0.5, 0.5], [0.4, -0.4, 0, 0]),
        # the group's mean, over the standard deviation of all eight rewards: 0.534522 (+ TRL's 1e-4)
        ("batch", [1, 0, 0, 0, 1, 1, 1, 0], [1.402860, -0.467620, -0.467620, -0.467620, 0.467620, 0.467620, 0.467620, -1.402860]),
        ("group", [1, 0, 0, 0, 1, 1, 1, 0], [1.499700, -0.499900, -0.499900, -0.499900, 0.499900, 0.499900, 0.499900, -1.499700]),
    ],
)
def test_advantages_of_worked_groups_are_the_worked_numbers(
    grpo_trainer: BuildTrainer, advantage: str, rewards: list[float], expected: list[float]
) -> None:
    trainer = grpo_trainer(groups=len(rewards) // 4, advantage=advantage)
    assert advantages_of(trainer, accuracy=rewards, format_ok=[0.0] * len(rewards)) == pytest.approx(expected, abs=1e-6)


def test_advantages_reward_parts_are_weighted_before_they_are_compared(grpo_trainer: BuildTrainer) -> None:
    trainer = grpo_trainer(advantage="none", accuracy_weight=2.0, format_weight=0.5)
    assert advantages_of(trainer, accuracy=[1, 0, 0, 0], format_ok=[1, 1, 0, 0]) == pytest.approx([1.75, -0.25, -0.75, -0.75], abs=1e-6)


def advantages_of(trainer: Any, accuracy: list[float], format_ok: list[float]) -> list[float]:
    """What the trainer makes of rollouts with these reward parts."""
    count = len(accuracy)
    trainer.rollout_func = lambda texts, _: {
        "prompt_ids": [[5, 6]] * count,
        "completion_ids": [[7, 8]] * count,
        "logprobs": [[-1.0, -1.0]] * count,
        "accuracy": [float(value) for value in accuracy],
        "format": [float(value) for value in format_ok],
    }
    found = trainer._generate_and_score_completions([{"prompt": f"question {index // 4}"} for index in range(count)])
    advantages: list[float] = found["advantages"].tolist()
    return advantages


@pytest.mark.slow
def test_reward_model_loss_of_two_scores_is_bradley_terry_with_centering(
    pupil: CheckpointRef, new_stage: Callable[[str], Path], problems: Any, small_engine: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import trl

    from stages.config import RewardModel, SamplerConfig
    from stages.reward_model import run

    losses: list[float] = []

    class Kept(trl.RewardTrainer):  # type: ignore[misc]
        def train(self, **_: Any) -> None:
            scores = SimpleNamespace(logits=torch.tensor([[1.3], [0.4]]))
            for weight in (self.args.center_rewards_coefficient, None):
                self.args.center_rewards_coefficient = weight
                losses.append(self.compute_loss(lambda **_: scores, {"attention_mask": torch.ones(2, 3)}).item())
            raise TrainingWouldBeginError

    monkeypatch.setattr(trl, "RewardTrainer", Kept)
    config = RewardModel(
        prompts=2, attempts=8, learning_rate=1e-3, centering=0.01, sampler=SamplerConfig(max_new_tokens=48), engine=small_engine
    )
    rows = [{"problem_id": str(index), "question": f"{index}+{7 - index}", "answer": "7"} for index in range(2)]
    with pytest.raises(TrainingWouldBeginError):
        run(config, {"model": pupil, "problems": problems(rows)}, new_stage("reward_model"), 0)
    assert losses == pytest.approx([0.370054, 0.341154], abs=1e-6)
