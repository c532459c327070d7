"""Policy optimisation on the model's own rollouts (GRPO family), shared by reasoning RL and RLHF.

TRL's GRPO trainer computes advantages, loss and step; rollouts come from our engine, with the
weights of the step handed over live. One fresh batch of rollouts per optimizer step, so the ratio is
1 and clipping only guards. All rollouts are kept: prompt, completion, reward parts, verdict, lengths,
step. At the first step the engine's log-probabilities are compared with the trainer's.

A step's problems are chosen when it begins (stages/curriculum.py): the trainer's data set holds slot
numbers only. What a live curriculum knows comes from the kept rollouts of the steps before, so a resumed
run knows what the straight run knew. Every order but the plain one adds to each rollout its slot, the
problem's weight and success rate at that moment, and why it was chosen.

A rollout that could not be graded is masked: it has no reward, is no part of its group's mean and spread, and none
of its tokens enter loss or KL. TRL masks a rollout only when every part of its reward is missing: with one part left it
would count as one that earned that part. The mean over rollouts of `loss: grpo` still divides by all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.artifacts import CheckpointRef, DatasetRef, StageOutput
from stages.chat import parse_reply
from stages.config import PolicyGradientConfig, SamplerConfig
from stages.curriculum import Curriculum, Draw
from stages.errors import ConfigError, DataError, RewardError, RolloutError
from stages.problems import seed_of
from stages.records import Recorder
from stages.rewards.grading import Verdict
from stages.rewards.scoring import Prompt, Rollout, Scorer, Scores
from stages.rewards.tasks import Grader, empty_reply, gold_reply, grade_tasks, second_opinion_of
from stages.rollouts.engine import Completion, Request, RolloutEngine
from stages.tables import write_rows
from stages.training import common_arguments, export_checkpoint, load_model, load_tokenizer, train

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_LOGPROB_GAP_NATS = 0.02
"""Largest gap between engine and trainer on one token, in float32 on CPU (measured: below 1e-5)."""


SUCCESS = "accuracy"
"""The reward part that says whether a rollout solved its problem (1.0)."""


def train_policy(
    model_ref: CheckpointRef,
    prompts: Sequence[Prompt],
    score: Scorer,
    weights: dict[str, float],
    config: PolicyGradientConfig,
    stage_dir: Path,
    seed: int,
    *,
    name: str,
    card: str,
) -> StageOutput:
    """Train on `prompts` with the weighted sum of the scorer's parts; returns model and rollouts.

    Raises ConfigError when there are fewer prompts than a step needs, RolloutError when engine and
    trainer disagree about the log-probabilities of the first batch, RewardError when more rollouts of a step than
    `config.max_not_graded_share` could not be graded.
    """
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    if len(prompts) < config.prompts_per_step:
        raise ConfigError(
            f"{name}: {len(prompts)} prompts, but a step takes prompts_per_step = {config.prompts_per_step}; "
            "lower it or widen the pool (the pass-rate band may be too narrow)"
        )
    batch = config.prompts_per_step * config.group_size
    micro_batch = min(batch, config.micro_batch)
    if (different := len({prompt.problem_id for prompt in prompts})) < len(prompts):
        raise DataError(
            f"{name}: {len(prompts) - different} of {len(prompts)} prompts have the problem_id of another; success is counted by it; "
            "deduplicate the problems"
        )
    curriculum = Curriculum(config.curriculum, [prompt.topic for prompt in prompts], config.steps, config.prompts_per_step, seed)
    course = _Course(curriculum, prompts, rollouts_dir := stage_dir / "data" / "rollouts")
    tokenizer = load_tokenizer(model_ref)
    recorder = Recorder(stage_dir)
    sampler = SamplerConfig(temperature=config.temperature, max_new_tokens=config.max_new_tokens)
    rollouts_dir.mkdir(parents=True, exist_ok=True)

    with RolloutEngine(model_ref.path, config.engine) as engine:

        def rollout(slots: list[str], trainer: Any) -> dict[str, list[Any]]:
            step = trainer.state.global_step
            draws = [choice for choice in course.choose(step) for _ in range(config.group_size)]
            asked = [prompts[choice.problem] for choice in draws]
            policy = trainer.accelerator.unwrap_model(trainer.model)
            engine.load_live(policy, f"step-{step}")
            prompt_ids = tokenizer([prompt.text for prompt in asked], add_special_tokens=False)["input_ids"]
            drawn = engine.generate(
                [Request(i, ids, seed_of(seed, "rollout", step, i)) for i, ids in enumerate(prompt_ids)], sampler, logprobs=True
            )
            if step == 0:
                gap = logprob_gap(policy, prompt_ids[:16], drawn[:16], config.temperature)
                recorder.metrics(0, {"rollout/logprob_gap_max": gap})
                if gap > MAX_LOGPROB_GAP_NATS and not torch.cuda.is_available():
                    raise RolloutError(
                        f"{name}: engine and trainer differ by {gap:.3g} nats on a token of the first batch; the rule is at most "
                        f"{MAX_LOGPROB_GAP_NATS}; the engine does not serve the trainer's weights"
                    )
            texts = [tokenizer.decode(completion.token_ids, skip_special_tokens=True) for completion in drawn]
            seen = [
                Rollout(prompt, parse_reply(text), len(completion.token_ids), completion.finish == "stop", text, step)
                for prompt, text, completion in zip(asked, texts, drawn, strict=True)
            ]
            scores = score(seen)
            _keep(rollouts_dir, step, seen, drawn, scores, weights, tokenizer, [] if curriculum.is_plain else draws, config.group_size)
            told = _rollout_metrics(seen, scores, weights, config.group_size) | course.metrics(draws)
            recorder.metrics(step + 1, told | _disagreement(seen, scores, config.second_opinion_share, seed_of(seed, "second", step)))
            _require_graded(seen, scores, config.max_not_graded_share, f"{name}: step {step + 1}")
            return {
                "prompt_ids": prompt_ids,
                "completion_ids": [completion.token_ids for completion in drawn],
                "logprobs": [completion.logprobs for completion in drawn],
                **trainer_columns(scores, [completion.token_ids for completion in drawn]),
            }

        arguments = GRPOConfig(
            **common_arguments(stage_dir, seed)
            | {
                "learning_rate": config.learning_rate,
                "lr_scheduler_type": "constant_with_warmup",
                "warmup_steps": min(config.warmup_steps, config.steps - 1),  # its first step has a learning rate of 0
                "max_steps": config.steps,
                "per_device_train_batch_size": micro_batch,
                "gradient_accumulation_steps": batch // micro_batch,
                "num_generations": config.group_size,
                "max_completion_length": config.max_new_tokens,
                "temperature": config.temperature,
                "loss_type": config.loss,
                "epsilon": config.clip_low,
                "epsilon_high": config.clip_high,
                "scale_rewards": config.advantage,
                "beta": config.kl_weight,
                "use_bias_correction_kl": False,
                "reward_weights": [weights[part] for part in weights],
                "save_steps": config.save_every,
                "weight_decay": 0.0,
                "max_grad_norm": 1.0,
                "shuffle_dataset": False,  # its rows are slots; what fills them is chosen at the step
            }
        )
        trainer = GRPOTrainer(
            model=load_model(model_ref),
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": str(slot)} for slot in range(config.steps * config.prompts_per_step)]),
            reward_funcs=[_column(part) for part in weights],
            processing_class=tokenizer,
            rollout_func=rollout,
        )
        metrics = train(trainer, stage_dir)
    checkpoint = export_checkpoint(trainer.model, tokenizer, stage_dir, name=name, card=card)
    return StageOutput(outputs={"model": checkpoint, "rollouts": _merge(rollouts_dir, stage_dir)}, metrics=metrics)


def require_gradable(prompts: Sequence[Prompt], grader: Grader = grade_tasks) -> None:
    """Raise RewardError unless every gold answer earns full marks and an empty one earns none.

    So a rollout that is not graded later is the grader's or the reply's doing, not the data's. A gold answer that is no
    answer (a JSON schema, the tests of a program) is only held against the empty one.
    """
    tasks = [prompt.task for prompt in prompts]
    empty = [empty_reply(task) for task in tasks]
    golds = [gold_reply(task) or nothing for task, nothing in zip(tasks, empty, strict=True)]
    for prompt, found, without in zip(prompts, grader(golds, tasks), grader(empty, tasks), strict=True):
        problem, gold = prompt.problem_id, prompt.gold
        wanted, fault = (Verdict.RIGHT, "is not graded right") if prompt.task.boxed else (Verdict.WRONG, "cannot be used")
        if found.verdict is not wanted:
            raise RewardError(
                f"problem {problem}: its own gold answer {gold[:200]!r} {fault} ({found.reason}); "
                "RL on it would punish right answers; mend the answer or drop the row"
            )
        if without.verdict is Verdict.RIGHT:
            raise RewardError(f"problem {problem}: an empty answer is graded right; mend its gold answer {gold[:200]!r}")


def trainer_columns(scores: Scores, completion_ids: Sequence[Sequence[int]]) -> dict[str, list[Any]]:
    """What TRL's trainer gets of a step's scores: a column a part, and a token mask when a rollout was not graded."""
    graded = scores.graded()
    columns: dict[str, list[Any]] = {
        part: [value if counts else None for value, counts in zip(values, graded, strict=True)] for part, values in scores.parts.items()
    }
    if not all(graded):
        columns["env_mask"] = [[int(counts)] * len(ids) for counts, ids in zip(graded, completion_ids, strict=True)]
    return columns


def _require_graded(seen: Sequence[Rollout], scores: Scores, max_share: float, where: str) -> None:
    failed = [index for index, counts in enumerate(scores.graded()) if not counts]
    if len(failed) > max_share * len(seen):
        first = failed[0]
        raise RewardError(
            f"{where}: {len(failed)} of {len(seen)} rollouts could not be graded (first: problem {seen[first].prompt.problem_id}, "
            f"{scores.grades[first].reason}); the rule is at most {max_share:.0%}; see `reason` in the kept rollouts, "
            "mend the grader or raise max_not_graded_share"
        )


class _Course:
    """A curriculum under way: standings from the kept rollouts of every step before the one to come."""

    def __init__(self, curriculum: Curriculum, prompts: Sequence[Prompt], rollouts_dir: Path) -> None:
        self.curriculum, self.rollouts_dir = curriculum, rollouts_dir
        self.places = {prompt.problem_id: index for index, prompt in enumerate(prompts)}
        self.standings = curriculum.start([prompt.pass_rate for prompt in prompts])
        self.steps = 0
        """Steps whose rollouts the standings know."""

    def choose(self, step: int) -> list[Draw]:
        """The problems of a step. Raises RolloutError when the rollouts of an earlier step are not there."""
        if self.curriculum.config.live:
            for earlier in range(self.steps, step):
                self.standings = self.curriculum.observe(self.standings, self._results(earlier))
            self.steps = step
        return self.curriculum.choose(self.standings, step)

    def metrics(self, draws: Sequence[Draw]) -> dict[str, float]:
        """What the curriculum knew at this step, and what it chose; nothing for the plain order."""
        if self.curriculum.is_plain:
            return {}
        return {
            "curriculum/pool_rate": sum(standing.rate for standing in self.standings) / len(self.standings),
            "curriculum/chosen_rate": sum(drawn.rate for drawn in draws) / len(draws),
            "curriculum/filled_share": sum(drawn.weight == 0 for drawn in draws) / len(draws),
            "curriculum/retired": float(sum(standing.retired for standing in self.standings)),
        }

    def _results(self, step: int) -> dict[int, tuple[int, int]]:
        """Right and graded rollouts of a step by problem; one without a graded rollout is left out."""
        import pyarrow.parquet as parquet

        path = _step_file(self.rollouts_dir, step)
        if not path.exists():
            raise RolloutError(f"{path} is gone; a live curriculum needs the rollouts of every step before; run the stage with --force")
        counts: dict[int, tuple[int, int]] = {}
        for row in parquet.read_table(path, columns=["problem_id", f"reward_{SUCCESS}"]).to_pylist():
            if row[f"reward_{SUCCESS}"] is None:
                continue
            right, tries = counts.get(index := self.places[row["problem_id"]], (0, 0))
            counts[index] = right + (row[f"reward_{SUCCESS}"] == 1.0), tries + 1
        return counts


def logprob_gap(policy: PreTrainedModel, prompt_ids: Sequence[list[int]], completions: Sequence[Completion], temperature: float) -> float:
    """Largest |log-probability| difference (nats) between trainer and engine over sampled tokens."""
    import torch

    worst = 0.0
    was_training = policy.training
    policy.eval()
    with torch.no_grad():
        for prompt, completion in zip(prompt_ids, completions, strict=True):
            ids = torch.tensor([prompt + completion.token_ids], device=policy.device)
            logits = policy(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
            own = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
            worst = max(worst, float((own - torch.tensor(completion.logprobs)).abs().max()))
    policy.train(was_training)
    return worst


def _column(part: str) -> Callable[..., list[float]]:
    """A TRL reward function that hands on a part already scored at rollout."""

    def reward(**columns: Any) -> list[float]:
        values: list[float] = columns[part]
        return values

    reward.__name__ = part
    return reward


def _rollout_metrics(seen: Sequence[Rollout], scores: Scores, weights: dict[str, float], group_size: int) -> dict[str, float]:
    """Means over the graded rollouts; lengths over all. A group with fewer than two graded rollouts is a dead one."""
    totals, graded = scores.totals(weights), scores.graded()
    groups = [[value for value in totals[i : i + group_size] if value is not None] for i in range(0, len(totals), group_size)]
    metrics = {
        "rollout/not_graded_share": 1 - sum(graded) / len(seen),
        "rollout/tokens_mean": sum(item.tokens for item in seen) / len(seen),
        "rollout/stopped_share": sum(item.stopped for item in seen) / len(seen),
        "rollout/dead_group_share": sum(len(group) < 2 or max(group) == min(group) for group in groups) / len(groups),
    }
    if any(graded):
        counted = [value for group in groups for value in group]
        metrics["rollout/reward"] = sum(counted) / len(counted)
        for part, values in scores.parts.items():
            metrics[f"rollout/{part}"] = sum(value for value, counts in zip(values, graded, strict=True) if counts) / len(counted)
    return metrics


def _disagreement(seen: Sequence[Rollout], scores: Scores, share: float, seed: int) -> dict[str, float]:
    """How often a second grader says otherwise, on a sample of the answers in mathematics; nothing when there is none to compare."""
    found = second_opinion_of([item.reply for item in seen], [item.prompt.task for item in seen], scores.grades, share, seed)
    return {} if found.rate is None else {"rollout/disagreement": found.rate}


def _keep(
    folder: Path,
    step: int,
    seen: Sequence[Rollout],
    drawn: Sequence[Completion],
    scores: Scores,
    weights: dict[str, float],
    tokenizer: PreTrainedTokenizerBase,
    draws: Sequence[Draw],
    group_size: int,
) -> None:
    """One Parquet file a step; a step that is run again after a resume overwrites its own.

    With `draws` (one a rollout), a row also says why its problem was chosen. A rollout that was not graded has neither
    a reward nor an accuracy.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    totals, graded = scores.totals(weights), scores.graded()
    rows = [
        {
            "step": step,
            "position": i,
            "problem_id": item.prompt.problem_id,
            "thinking": item.prompt.thinking,
            "prompt": item.prompt.text,
            "completion": tokenizer.decode(completion.token_ids),
            "gold": item.prompt.gold,
            "reward": totals[i],
            **{f"reward_{part}": values[i] if graded[i] or part != SUCCESS else None for part, values in scores.parts.items()},
            "verdict": str(scores.grades[i].verdict),
            "reason": scores.grades[i].reason,
            "tokens": item.tokens,
            "stopped": item.stopped,
            "logprob": sum(completion.logprobs),
            "version": completion.version,
        }
        for i, (item, completion) in enumerate(zip(seen, drawn, strict=True))
    ]
    for i, choice in enumerate(draws):
        rows[i] |= {"slot": i // group_size, "weight": choice.weight, "success_rate": choice.rate, "why": choice.why}
    parquet.write_table(pa.Table.from_pylist(rows), _step_file(folder, step), compression="zstd")


def _step_file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.parquet"


def _merge(folder: Path, stage_dir: Path) -> DatasetRef:
    import pyarrow.parquet as parquet

    rows = [row for path in sorted(folder.glob("step_*.parquet")) for row in parquet.read_table(path).to_pylist()]
    return write_rows(rows, stage_dir, "rollouts", empty_rule="no step ran; raise steps")
