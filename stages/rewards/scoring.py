"""From rollouts to reward parts: every part by its name, and the grade that accuracy comes from; scores of a reward model.

A rollout that could not be graded has no reward: it is masked wherever rewards are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from stages.chat import Reply
from stages.config import PolicyGradientConfig
from stages.rewards.grading import Grade, Verdict
from stages.rewards.rewards import (
    format_reward,
    language_consistency,
    length_rewards,
    missing_stop_penalty,
    overlong_punishment,
    repetition_penalty,
)
from stages.rewards.tasks import Grader, Task, grade_tasks

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH = 64


class Prompt(NamedTuple):
    """One training prompt. `problem_id` must differ between prompts: success is counted by it."""

    text: str
    problem_id: str
    question: str
    gold: str
    thinking: bool
    topic: str = ""
    pass_rate: float | None = None
    """Success rate before this stage, when it is known."""
    answer_type: str = "text"
    grading: str = ""
    """What the answer's type needs beside the gold answer (`stages/rewards/tasks.py`)."""

    @classmethod
    def of(cls, row: Mapping[str, Any], text: str, *, thinking: bool) -> Prompt:
        """The problem of a pool's row, asked with this text."""
        return cls(
            text,
            row["problem_id"],
            row["question"],
            row["answer"],
            thinking,
            topic=row.get("family") or "",
            pass_rate=row.get("pass_rate"),
            answer_type=row.get("answer_type") or "text",
            grading=row.get("grading") or "",
        )

    @property
    def task(self) -> Task:
        """How a reply to it is graded."""
        return Task(self.gold, self.answer_type, self.grading, self.question)


class Rollout(NamedTuple):
    """What a scorer sees of one rollout."""

    prompt: Prompt
    reply: Reply
    tokens: int
    stopped: bool
    completion: str = ""
    """The whole text, stop token left out; a thinking that was cut off stands only here."""
    step: int = 0
    """The step that it was drawn for, from 0."""


class Scores(NamedTuple):
    """What rollouts earned."""

    parts: dict[str, list[float]]
    """One value a rollout; of a rollout that was not graded they do not count."""
    grades: list[Grade]

    def graded(self) -> list[bool]:
        """For every rollout whether it counts."""
        return [grade.verdict is not Verdict.NOT_GRADED for grade in self.grades]

    def totals(self, weights: dict[str, float]) -> list[float | None]:
        """The weighted sum of the parts; None for a rollout that was not graded."""
        sums = [sum(weights[part] * values[i] for part, values in self.parts.items()) for i in range(len(self.grades))]
        return [total if counts else None for total, counts in zip(sums, self.graded(), strict=True)]


Scorer = Callable[[Sequence[Rollout]], Scores]
"""What rollouts earn. Those of one problem lie together: they are a group."""


def weights_of(config: PolicyGradientConfig, **more: float) -> dict[str, float]:
    """The weight of every part that is on; `more` are those of the stage itself."""
    return more | config.rewards.weights()


def score_by_rules(rollouts: Sequence[Rollout], config: PolicyGradientConfig, grader: Grader = grade_tasks) -> Scores:
    """Accuracy (1 for a right answer), format, and the parts that `config.rewards` turns on."""
    grades = grader([item.reply for item in rollouts], [item.prompt.task for item in rollouts])
    parts = {
        "accuracy": [float(grade.verdict is Verdict.RIGHT) for grade in grades],
        "format": [
            format_reward(item.reply, thinking=item.prompt.thinking, stopped=item.stopped, boxed=item.prompt.task.boxed)
            for item in rollouts
        ],
    }
    chosen = config.rewards
    for name in chosen.weights():
        match name:
            case "language":
                parts[name] = [language_consistency(item.reply.thinking or "", item.prompt.question) for item in rollouts]
            case "length":
                parts[name] = _length(rollouts, grades, chosen.length_from_step)
            case "overlong":
                parts[name] = [overlong_punishment(item.tokens, config.max_new_tokens, chosen.overlong_cache_tokens) for item in rollouts]
            case "repetition":
                parts[name] = [repetition_penalty(item.completion, chosen.repetition_words) for item in rollouts]
            case "missing_stop":
                parts[name] = [missing_stop_penalty(stopped=item.stopped) for item in rollouts]
    return Scores(parts, grades)


def _length(rollouts: Sequence[Rollout], grades: Sequence[Grade], from_step: int) -> list[float]:
    """Kimi's length reward, group by group; 0 before `from_step`. What was not graded is not part of its group."""
    values = [0.0] * len(rollouts)
    groups: dict[str, list[int]] = {}
    for index, item in enumerate(rollouts):
        if item.step >= from_step and grades[index].verdict is not Verdict.NOT_GRADED:
            groups.setdefault(item.prompt.problem_id, []).append(index)
    for group in groups.values():
        right = [grades[index].verdict is Verdict.RIGHT for index in group]
        for index, value in zip(group, length_rewards([rollouts[index].tokens for index in group], right), strict=True):
            values[index] = value
    return values


def score_texts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[float]:
    """One score per rendered conversation (prompt and response), read at its last token."""
    import torch

    model.eval()
    scores: list[float] = []
    with torch.no_grad():
        for start in range(0, len(texts), BATCH):
            batch = tokenizer(list(texts[start : start + BATCH]), add_special_tokens=False, padding=True, return_tensors="pt")
            logits = model(input_ids=batch["input_ids"].to(model.device), attention_mask=batch["attention_mask"].to(model.device)).logits
            scores += logits[:, 0].float().cpu().tolist()
    return scores
