"""Evaluation: one fixed specification for every checkpoint of a recipe.

What      n samples a problem on every benchmark, thinking and non-thinking; optional thinking budgets;
          whether `/think` and `/no_think` are followed.
Reads     `model`, `benchmarks`.
Writes    `samples`: one row a sample, from which every score, interval and paired test is computed.
Papers    DeepSeek-R1 (arXiv 2501.12948): pass@1 as mean correctness over k samples at temperature 0.6,
          top-p 0.95; Qwen3 (arXiv 2505.09388) 4.7 for the thinking budget.
Differs   Greedy decoding is not offered as a score. Samples that cannot be graded leave the denominator.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stages.artifacts import CheckpointRef, Handles, StageOutput
from stages.config import Evaluation
from stages.problems import seed_of
from stages.records import Recorder
from stages.rewards.grading import Verdict
from stages.rewards.model_judge import grader_of
from stages.rewards.rewards import format_reward, preference_score
from stages.rollouts.answers import Answer, Question, ask, require_graded
from stages.rollouts.engine import RolloutEngine
from stages.tables import read_rows, write_rows
from stages.training import load_tokenizer


def run(config: Evaluation, inputs: Handles, stage_dir: Path, seed: int) -> StageOutput:
    """Score the model; seeds depend on problem, mode and sample only, so that rows of a table are paired."""
    model = inputs["model"]
    assert isinstance(model, CheckpointRef)
    problems = read_rows(inputs["benchmarks"], columns=("benchmark", "problem_id", "question", "answer", "family"))
    benchmarks: dict[str, list[Question]] = {}
    for row in problems:
        benchmarks.setdefault(row["benchmark"], []).append(Question.of(row))
    tokenizer, recorder, grader = load_tokenizer(model), Recorder(stage_dir), grader_of(config.judge, stage_dir, seed)
    rows: list[dict[str, Any]] = []
    with RolloutEngine(model.path, config.engine) as engine:
        for benchmark, questions in benchmarks.items():
            for mode, wanted, settings in _modes(config, questions):
                answers = ask(
                    engine,
                    tokenizer,
                    wanted,
                    sampler=config.sampler,
                    seed=seed_of(seed, benchmark),
                    recorder=recorder,
                    what=f"{benchmark} {mode}",
                    grader=grader,
                    **settings,
                )
                require_graded(answers, config.max_not_graded_share)
                rows += [_row(benchmark, mode, answer, settings["thinking"]) for answer in answers]
    metrics = _summary(rows)
    recorder.metrics(0, metrics)
    return StageOutput(outputs={"samples": write_rows(rows, stage_dir, "samples", empty_rule="there are no benchmarks")}, metrics=metrics)


def _modes(config: Evaluation, questions: list[Question]) -> Iterable[tuple[str, list[Question], dict[str, Any]]]:
    yield "thinking", questions, {"thinking": True, "attempts": config.samples}
    yield "non_thinking", questions, {"thinking": False, "attempts": config.samples}
    for budget in config.thinking_budgets:
        yield (
            f"budget_{budget}",
            questions[: config.budget_problems],
            {"thinking": True, "attempts": config.samples, "budget": budget, "budget_text": config.budget_text},
        )
    flagged = questions[: config.flag_problems]
    if flagged:
        yield "flag_think", flagged, {"thinking": True, "attempts": 1, "flag": True}
        yield "flag_no_think", flagged, {"thinking": False, "attempts": 1, "flag": True}


def _row(benchmark: str, mode: str, answer: Answer, thinking: bool) -> dict[str, Any]:
    return {
        "benchmark": benchmark,
        "mode": mode,
        "problem_id": answer.question.problem_id,
        "family": answer.question.family,
        "sample": answer.sample,
        "seed": answer.seed,
        "graded": answer.grade.verdict is not Verdict.NOT_GRADED,
        "correct": answer.grade.verdict is Verdict.RIGHT,
        "reason": answer.grade.reason,
        "format_ok": bool(format_reward(answer.reply, thinking=thinking, stopped=answer.stopped, boxed=answer.question.task.boxed)),
        "flag_followed": _thought(answer.text) == thinking,
        "tokens": answer.tokens,
        "thinking_tokens": answer.thinking_tokens,
        "finish": "stop" if answer.stopped else "length",
        "preference": preference_score(answer.reply.response),
        "completion": answer.text,
    }


def _thought(text: str) -> bool:
    """Whether a completion has anything in its think block, closed or not."""
    return text.startswith("<think>") and bool(text.removeprefix("<think>").split("</think>")[0].strip())


def _summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Plain means for the live view; the table computes intervals from the rows."""
    metrics = {}
    for benchmark, mode in sorted({(row["benchmark"], row["mode"]) for row in rows}):
        part = [row for row in rows if (row["benchmark"], row["mode"]) == (benchmark, mode)]
        graded = [row["correct"] for row in part if row["graded"]]
        if mode.startswith("flag_"):
            metrics[f"eval/{benchmark}_{mode}"] = sum(row["flag_followed"] for row in part) / len(part)
        elif graded:
            metrics[f"eval/{benchmark}_{mode}"] = sum(graded) / len(graded)
        metrics[f"length/{benchmark}_{mode}"] = sum(row["tokens"] for row in part) / len(part)
    return metrics
