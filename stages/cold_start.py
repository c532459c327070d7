"""Cold start: light supervised fine-tuning on long chains of thought, before any RL.

What      SFT of the base model on worked traces in thinking mode, after the response filters and, when
          there is one, a review by people.
Reads     `model`, `traces` (problems with a worked trace, and a response where they have one);
          `validation` (questions) for the filter of that name.
Writes    `model`, `selection` (one row a trace: used or not, and which filter drops it why).
Papers    DeepSeek-R1 (arXiv 2501.12948) 2.3.1; Qwen3 (arXiv 2505.09388) 4.1: six response filters, and as
          few samples and steps as possible, so that RL keeps room (stages/response_filters.py).
Differs   The embedded default's traces are worked out by code (stages/problems.py), not sampled from
          a larger model and curated; give a JSONL or Parquet source with a trace column for your own.
          No model rewrites traces; people may (stages/trace_review.py, `review`).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from stages.artifacts import CheckpointRef, Handles, StageOutput
from stages.chat import Reply
from stages.config import ColdStart
from stages.errors import DataError
from stages.problems import RESPONSE_STYLES
from stages.records import Recorder
from stages.response_filters import MARKERS, Trace, faults_of, likeness_runs
from stages.rewards.grading import Grade
from stages.rewards.model_judge import grader_of
from stages.rewards.tasks import Grader, Task
from stages.supervised import fine_tune, thinking_example
from stages.tables import read_rows, write_rows
from stages.trace_review import apply_review, digest_of_trace
from stages.training import load_tokenizer

RESPONSE = "response"
"""Name of the rule, which no setting turns off, that a trace must lead to a response."""


def run(config: ColdStart, inputs: Handles, stage_dir: Path, seed: int) -> StageOutput:
    """Fine-tune on the first `config.examples` traces that pass; a final answer that has no response of its own gets all styles."""
    model = inputs["model"]
    assert isinstance(model, CheckpointRef)
    rows, selection = _select(config, inputs, grader_of(config.judge, stage_dir, seed))
    counts = {
        f"cold_start/dropped/{name}": float(sum(name in row["dropped_by"].split(", ") for row in selection))
        for name in (RESPONSE, MARKERS, *config.filters)
    }
    counted = {"cold_start/traces": float(len(selection)), "cold_start/passed": float(sum(row["passed"] for row in selection)), **counts}
    Recorder(stage_dir).metrics(0, counted)
    if not rows:
        reasons = ", ".join(f"{name.rpartition('/')[2]} {count:.0f}" for name, count in counts.items() if count)
        raise DataError(
            f"{inputs['traces'].name}: no trace of {len(selection)} passes the filters (dropped by {reasons}); "
            "mend the traces, take a filter out of `filters`, or raise its limit"
        )
    tokenizer, rng = load_tokenizer(model), random.Random(seed)
    examples = [
        thinking_example(
            tokenizer, row["question"], row["trace"], row.get("response") or rng.choice(RESPONSE_STYLES).format(answer=row["answer"])
        )
        for row in rows
    ]
    checkpoint, metrics = fine_tune(
        model,
        examples,
        config,
        stage_dir,
        seed,
        name="cold_start.model",
        card=f"# Cold start\n\n`{model.name}` fine-tuned on {len(examples)} worked traces (posttrain, stage `cold_start`).\n",
    )
    table = write_rows(selection, stage_dir, "selection", empty_rule="no problem has a trace")
    return StageOutput(outputs={"model": checkpoint, "selection": table}, metrics=metrics | counted)


def _select(config: ColdStart, inputs: Handles, grader: Grader) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows to learn from, and one row a trace that says what became of it."""
    if ("validation" in config.filters) != ("validation" in inputs):
        raise DataError("the filter `validation` and the input `validation` belong together; give both or neither")
    problems = read_rows(inputs["traces"], columns=("question", "answer", "trace"))
    worked = [row for row in problems if row["trace"]]
    if not worked:
        raise DataError(
            f"{inputs['traces'].name}: none of {len(problems)} problems has a trace; cold start needs worked traces; "
            "set `trace` in the source or `with_trace: true` in the pool"
        )
    if config.review is not None:
        worked = apply_review(worked, config.review)
    questions = [row["question"] for row in read_rows(inputs["validation"], columns=("question",))] if "validation" in inputs else []
    validation = likeness_runs(questions)
    used: list[dict[str, Any]] = []
    selection: list[dict[str, Any]] = []
    responses = [_response(row) for row in worked]
    grades: list[Grade | None] = [None] * len(worked)
    if "answer" in config.filters:
        replies = [Reply(row["trace"], response or "") for row, response in zip(worked, responses, strict=True)]
        grades = [*grader(replies, [Task.of(row) for row in worked])]
    for row, response, grade in zip(worked, responses, grades, strict=True):
        if response is None:
            faults = {RESPONSE: f"it has none, and its gold answer ({row['answer_type']}) is what answers are held against"}
        else:
            faults = faults_of(Trace(row["question"], row["trace"], response, grade), config.filters, config.limits, validation)
        is_used = not faults and len(used) < config.examples
        if is_used:
            used.append(row)
        selection.append(
            {
                "problem_id": row.get("problem_id") or "",
                "digest": digest_of_trace(row),
                "question": row["question"],
                "passed": not faults,
                "used": is_used,
                "dropped_by": ", ".join(faults),
                "reason": "; ".join(f"{name}: {reason}" for name, reason in faults.items()),
            }
        )
    return used, selection


def _response(row: dict[str, Any]) -> str | None:
    """The row's own response, else its gold answer; None where that is no answer but what answers are held against."""
    return row.get("response") or (RESPONSE_STYLES[0].format(answer=row["answer"]) if Task.of(row).boxed else None)
