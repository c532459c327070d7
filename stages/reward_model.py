"""Reward model: a scalar that says which of two responses people would prefer.

What      Samples several responses a problem, lets the annotator choose the best and the worst, and
          fits a Bradley-Terry model on the pairs.
Reads     `model` (also the starting point), `problems`.
Writes    `reward_model` (a one-output classifier), `pairs`.
Papers    Bradley-Terry: -log sigma(s_w - s_l); centering (arXiv 2312.09244); DeepSeek-R1 (arXiv
          2501.12948, Methods): the helpfulness model reads the final response only, never the thinking.
Differs   The embedded default's annotator is synthetic (stages/rewards/rewards.py, `preference_score`,
          with label noise), stated openly: it stands in for people, it does not measure them.
"""

from __future__ import annotations

import random
from pathlib import Path

from stages.artifacts import CheckpointRef, Handles, StageOutput
from stages.chat import render_completion, render_prompt
from stages.config import RewardModel
from stages.records import Recorder
from stages.rewards.rewards import preference_score
from stages.rollouts.answers import Question, ask
from stages.rollouts.engine import RolloutEngine
from stages.tables import read_rows, write_rows
from stages.training import common_arguments, cosine_to_a_tenth, export_checkpoint, load_model, load_tokenizer, train


def run(config: RewardModel, inputs: Handles, stage_dir: Path, seed: int) -> StageOutput:
    """Make the pairs, train on nine tenths of them, report accuracy on the last tenth."""
    import torch
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    model = inputs["model"]
    assert isinstance(model, CheckpointRef)
    problems = read_rows(inputs["problems"], columns=("problem_id", "question", "answer"))[: config.prompts]
    tokenizer, recorder, rng = load_tokenizer(model), Recorder(stage_dir), random.Random(seed)
    with RolloutEngine(model.path, config.engine) as engine:
        answers = ask(
            engine,
            tokenizer,
            [Question.of(row) for row in problems],
            attempts=config.attempts,
            thinking=False,
            sampler=config.sampler,
            seed=seed,
            recorder=recorder,
            what="samples",
        )
    rows = []
    for index, problem in enumerate(problems):
        tried = [answer.reply.response for answer in answers[index * config.attempts : (index + 1) * config.attempts]]
        best, worst = max(tried, key=preference_score), min(tried, key=preference_score)
        if preference_score(best) == preference_score(worst):
            continue
        swapped = rng.random() < config.label_noise
        rows.append(
            {
                "problem_id": problem["problem_id"],
                "prompt": render_prompt(tokenizer, problem["question"], thinking=False),
                "chosen": render_completion(worst if swapped else best, thinking=None),
                "rejected": render_completion(best if swapped else worst, thinking=None),
                "swapped": swapped,
            }
        )
    rule = f"the annotator found no difference between any {config.attempts} responses; raise sampler.temperature or attempts"
    pairs = write_rows(rows, stage_dir, "pairs", empty_rule=rule)

    held_out = rows[: len(rows) // 10]
    torch.manual_seed(seed % 2**63)
    arguments = RewardConfig(
        **common_arguments(stage_dir, seed)
        | cosine_to_a_tenth(config.epochs * (len(rows) - len(held_out)) / config.batch_size)
        | {
            "learning_rate": config.learning_rate,
            "num_train_epochs": config.epochs,
            "per_device_train_batch_size": config.batch_size,
            "center_rewards_coefficient": config.centering,
            "max_length": None,
            "save_steps": 25,
        }
    )
    trainer = RewardTrainer(
        model=load_model(model, kind="scalar"),
        args=arguments,
        train_dataset=Dataset.from_list([{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in rows[len(held_out) :]]),
        processing_class=tokenizer,
    )
    metrics = train(trainer, stage_dir)
    reward_model = export_checkpoint(
        trainer.model,
        tokenizer,
        stage_dir,
        name="reward_model.reward_model",
        card=f"# Reward model\n\nBradley-Terry model on {len(rows)} pairs of `{model.name}`'s responses, ordered by posttrain's synthetic "
        f"annotator with {config.label_noise:.0%} label noise (stage `reward_model`). It reads the final response only.\n",
    )
    judged = {"reward_model/pairs": float(len(rows)), "reward_model/held_out_pairs": float(len(held_out))}
    if held_out:
        judged["reward_model/held_out_accuracy"] = _accuracy(trainer.model, tokenizer, held_out)
    recorder.metrics(trainer.state.global_step, judged)
    return StageOutput(outputs={"reward_model": reward_model, "pairs": pairs}, metrics=metrics | judged)


def _accuracy(model: object, tokenizer: object, rows: list[dict[str, object]]) -> float:
    """Share of pairs, labels without noise, whose better response scores higher."""
    from stages.rewards.scoring import score_texts

    chosen = score_texts(model, tokenizer, [f"{row['prompt']}{row['chosen']}" for row in rows])
    rejected = score_texts(model, tokenizer, [f"{row['prompt']}{row['rejected']}" for row in rows])
    return sum((a > b) != bool(row["swapped"]) for a, b, row in zip(chosen, rejected, rows, strict=True)) / len(rows)
