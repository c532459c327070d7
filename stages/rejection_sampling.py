"""Rejection sampling: verified traces in the model's own words.

What      Several samples a problem; right, finished, well-formed ones are kept, the shortest first.
Reads     `model`, `problems`.
Writes    `traces` (question, answer with its type, trace, response).
Papers    DeepSeek-R1 (arXiv 2501.12948) 2.3.3; Qwen3 (arXiv 2505.09388) 4.3: thinking data for fusion
          come from the RL model itself; RFT (arXiv 2308.01825).
Differs   Shortest-first in place of RFT's edit-distance choice; R1's language and readability filters are
          off unless `filters` names them (stages/response_filters.py).
"""

from __future__ import annotations

from pathlib import Path

from stages.artifacts import CheckpointRef, Handles, StageOutput
from stages.config import RejectionSampling
from stages.records import Recorder
from stages.response_filters import MARKERS, Trace, faults_of
from stages.rewards.grading import Verdict
from stages.rewards.model_judge import grader_of
from stages.rewards.rewards import format_reward
from stages.rollouts.answers import Answer, Question, ask, require_graded
from stages.rollouts.engine import RolloutEngine
from stages.tables import read_rows, write_rows
from stages.training import load_tokenizer


def run(config: RejectionSampling, inputs: Handles, stage_dir: Path, seed: int) -> StageOutput:
    """Sample the first `config.problems` problems and keep what is verified."""
    model = inputs["model"]
    assert isinstance(model, CheckpointRef)
    problems = read_rows(inputs["problems"], columns=("problem_id", "question", "answer"))[: config.problems]
    tokenizer, recorder, grader = load_tokenizer(model), Recorder(stage_dir), grader_of(config.judge, stage_dir, seed)
    with RolloutEngine(model.path, config.engine) as engine:
        answers = ask(
            engine,
            tokenizer,
            [Question.of(row) for row in problems],
            attempts=config.attempts,
            thinking=True,
            sampler=config.sampler,
            seed=seed,
            recorder=recorder,
            what="samples",
            grader=grader,
        )
    require_graded(answers, config.max_not_graded_share)
    rows = []
    dropped: dict[str, int] = dict.fromkeys((MARKERS, *config.filters), 0)
    for index in range(len(problems)):
        tried = answers[index * config.attempts : (index + 1) * config.attempts]
        kept: dict[str | None, Answer] = {}
        for answer in sorted(tried, key=lambda answer: answer.tokens):
            if answer.grade.verdict is Verdict.RIGHT and _well_formed(answer):
                faults = faults_of(_trace(answer), config.filters, config.limits)
                for name in faults:
                    dropped[name] += 1
                if not faults:
                    kept.setdefault(answer.reply.thinking, answer)
        rows += [
            {
                **answer.question.row(),
                "trace": answer.reply.thinking,
                "response": answer.reply.response,
                "tokens": answer.tokens,
            }
            for answer in list(kept.values())[: config.keep_per_problem]
        ]
    metrics = {
        "rejection/kept": float(len(rows)),
        "rejection/solved_share": len({row["problem_id"] for row in rows}) / len(problems),
        "rejection/tokens_mean": sum(row["tokens"] for row in rows) / max(1, len(rows)),
        **{f"rejection/dropped/{name}": float(count) for name, count in dropped.items()},
    }
    recorder.metrics(0, metrics)
    filtered = f" (filters dropped {sum(dropped.values())})" if any(dropped.values()) else ""
    rule = f"none of {len(answers)} samples was right, finished and well-formed{filtered}; check the model's evaluation before this stage"
    return StageOutput(outputs={"traces": write_rows(rows, stage_dir, "traces", empty_rule=rule)}, metrics=metrics)


def _well_formed(answer: Answer) -> bool:
    return bool(format_reward(answer.reply, thinking=True, stopped=answer.stopped, boxed=answer.question.task.boxed))


def _trace(answer: Answer) -> Trace:
    return Trace(answer.question.question, answer.reply.thinking or "", answer.reply.response)
