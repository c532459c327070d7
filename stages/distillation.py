"""Distillation: a student learns from the teacher's verified answers, then from its token probabilities.

What      Phase 1, off-policy: SFT on the teacher's samples in both modes. Phase 2, on-policy: the student
          samples, the teacher scores every token, reverse KL is minimised.
Reads     `model` (the student), `problems`, `teacher` (leave it out for the control that the effect of
          distillation is measured against: the same student and problems, gold answers only, no traces).
Writes    `model`, `traces` (what phase 1 was trained on).
Papers    DeepSeek-R1 (arXiv 2501.12948) 2.4; Qwen3 (arXiv 2505.09388) 4.5; GKD (arXiv 2306.13649) with
          lambda = 1 and beta = 1 (reverse KL).
Differs   Qwen3 does not state the KL direction; ours is reverse. Student and teacher share a tokenizer.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from stages.artifacts import CheckpointRef, Handles, StageOutput
from stages.chat import render_prompt
from stages.config import Distillation
from stages.errors import ArtifactError
from stages.problems import RESPONSE_STYLES
from stages.records import Recorder
from stages.rewards.grading import Verdict
from stages.rewards.model_judge import grader_of
from stages.rewards.tasks import Grader
from stages.rollouts.answers import Question, ask, require_graded
from stages.rollouts.engine import RolloutEngine
from stages.supervised import Example, direct_example, fine_tune, thinking_example
from stages.tables import read_rows, write_rows
from stages.training import common_arguments, export_checkpoint, load_model, load_tokenizer, train


def run(config: Distillation, inputs: Handles, stage_dir: Path, seed: int) -> StageOutput:
    """Train the student on at most `config.examples` examples, then on-policy when asked."""
    student, teacher = inputs["model"], inputs.get("teacher")
    assert isinstance(student, CheckpointRef)
    problems = read_rows(inputs["problems"], columns=("problem_id", "question", "answer"))
    tokenizer = load_tokenizer(student)
    if isinstance(teacher, CheckpointRef):
        require_same_tokens(student, teacher)
        rows = _teacher_traces(config, teacher, problems, grader_of(config.judge, stage_dir, seed), stage_dir, seed)
        empty_rule = "the teacher solved no problem; check its evaluation"
    else:
        rng = random.Random(seed)
        questions = [question for row in problems if (question := Question.of(row)).task.boxed]
        rows = [_row(question, None, rng.choice(RESPONSE_STYLES).format(answer=question.gold)) for question in questions]
        empty_rule = "without a teacher the gold answers are learnt, and a schema or the tests of a program is no answer; name a teacher"
    rows = rows[: config.examples]
    traces = write_rows(rows, stage_dir, "traces", empty_rule=empty_rule)
    examples = [_example(tokenizer, row, flag=index % 3 > 0) for index, row in enumerate(rows)]
    origin = f"`{teacher.name}`'s verified answers" if teacher else "gold answers, no teacher"
    card = f"# Distilled student\n\n`{student.name}` fine-tuned on {len(rows)} examples: {origin} (posttrain, stage `distillation`).\n"
    checkpoint, metrics = fine_tune(student, examples, config, stage_dir, seed, name="distillation.model", card=card)
    if config.on_policy_steps and isinstance(teacher, CheckpointRef):
        checkpoint, more = _on_policy(config, checkpoint, teacher, problems, stage_dir, seed, card)
        metrics |= more
    return StageOutput(outputs={"model": checkpoint, "traces": traces}, metrics=metrics)


def require_same_tokens(student: CheckpointRef, teacher: CheckpointRef) -> None:
    """Raise ArtifactError when the two tokenizers encode a probe differently; sizes alone prove nothing."""
    probe = "<|im_start|>user\n12 + 7 = \\boxed{19}. /no_think<|im_end|>\n<think>\n\n</think>"
    ours, theirs = (load_tokenizer(ref)(probe, add_special_tokens=False)["input_ids"] for ref in (student, teacher))
    if ours != theirs:
        raise ArtifactError(
            f"student {student.name} and teacher {teacher.name} encode the same text into {len(ours)} and {len(theirs)} different tokens; "
            "distillation needs one tokenizer; use a student of the teacher's family"
        )


def _teacher_traces(
    config: Distillation, teacher: CheckpointRef, problems: list[dict[str, Any]], grader: Grader, stage_dir: Path, seed: int
) -> list[dict[str, Any]]:
    """The teacher's first right thinking answer to each problem; every third problem is asked without thinking.

    Answers without thinking are kept right or wrong: they teach the mode, and the teacher's own level in it.
    """
    recorder, tokenizer = Recorder(stage_dir), load_tokenizer(teacher)
    questions = [Question.of(row) for row in problems[: config.examples]]
    groups = [(True, [q for i, q in enumerate(questions) if i % 3]), (False, [q for i, q in enumerate(questions) if i % 3 == 0])]
    found: dict[str, dict[str, Any]] = {}
    with RolloutEngine(teacher.path, config.engine) as engine:
        for thinking, part in groups:
            answers = ask(
                engine,
                tokenizer,
                part,
                attempts=config.attempts,
                thinking=thinking,
                sampler=config.sampler,
                seed=seed,
                recorder=recorder,
                what="teacher samples",
                grader=grader,
            )
            require_graded(answers, config.max_not_graded_share)
            for answer in answers:
                in_mode = answer.stopped and bool(answer.reply.thinking) == thinking
                if in_mode and (answer.grade.verdict is Verdict.RIGHT or not thinking):
                    found.setdefault(answer.question.problem_id, _row(answer.question, answer.reply.thinking, answer.reply.response))
    return [found[question.problem_id] for question in questions if question.problem_id in found]


def _row(question: Question, thinking: str | None, response: str) -> dict[str, Any]:
    return {**question.row(), "trace": thinking, "response": response}


def _example(tokenizer: Any, row: dict[str, Any], *, flag: bool) -> Example:
    if row["trace"]:
        return thinking_example(tokenizer, row["question"], row["trace"], row["response"], flag=flag)
    return direct_example(tokenizer, row["question"], row["response"], flag=flag)


def _on_policy(
    config: Distillation,
    student: CheckpointRef,
    teacher: CheckpointRef,
    problems: list[dict[str, Any]],
    stage_dir: Path,
    seed: int,
    card: str,
) -> tuple[CheckpointRef, dict[str, float]]:
    """Reverse KL to the teacher on the student's own samples (TRL's DistillationTrainer, beta = 1)."""
    from datasets import Dataset
    from trl import DistillationConfig, DistillationTrainer

    tokenizer = load_tokenizer(student)
    arguments = DistillationConfig(
        **common_arguments(stage_dir, seed, phase="on_policy")
        | {
            "learning_rate": config.on_policy_learning_rate,
            "lr_scheduler_type": "constant",
            "max_steps": config.on_policy_steps,
            "per_device_train_batch_size": config.on_policy_batch,
            "max_completion_length": config.sampler.max_new_tokens,
            "temperature": 1.0,
            "beta": 1.0,
            "save_steps": 25,
        }
    )
    trainer = DistillationTrainer(
        model=load_model(student),
        teacher_model=load_model(teacher),
        args=arguments,
        train_dataset=Dataset.from_list(
            [
                {"prompt": render_prompt(tokenizer, row["question"], thinking=index % 3 > 0, flag=index % 2 == 0)}
                for index, row in enumerate(problems)
            ]
        ),
        processing_class=tokenizer,
    )
    metrics = train(trainer, stage_dir, prefix="on_policy")
    return export_checkpoint(trainer.model, tokenizer, stage_dir, name="distillation.model", card=card, phase="on_policy"), metrics
