"""Evaluation: one row a sample, paired by problem and sample, whatever the order of the problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import CheckpointRef, DatasetRef
from stages.chat import parse_reply
from stages.config import EngineConfig, Evaluation
from stages.evaluation import run
from stages.rewards.rewards import preference_score
from stages.tables import read_rows

pytestmark = pytest.mark.slow
NewStage = Callable[[str], Path]
Problems = Callable[[Sequence[dict[str, Any]]], DatasetRef]
ROWS = [
    {
        "benchmark": benchmark,
        "problem_id": f"{benchmark}{index}",
        "question": f"{index}+{7 - index}",
        "answer": "7" if index else " ",
        "family": "sums",
    }
    for benchmark in ("standard", "hard")
    for index in range(3)
]
COLUMNS = {
    "benchmark",
    "mode",
    "problem_id",
    "family",
    "sample",
    "seed",
    "graded",
    "correct",
    "reason",
    "format_ok",
    "flag_followed",
    "tokens",
    "thinking_tokens",
    "finish",
    "preference",
    "completion",
}


def test_evaluation_rows_modes_and_scores_and_their_independence_of_order(
    pupil: CheckpointRef, new_stage: NewStage, problems: Problems, small_engine: EngineConfig
) -> None:
    config = Evaluation.model_validate(
        {
            "samples": 2,
            "thinking_budgets": [1],
            "flag_problems": 2,
            "max_not_graded_share": 1,
            "sampler": {"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 40},
            "engine": small_engine.model_dump(),
        }
    )
    output = run(config, {"model": pupil, "benchmarks": problems(ROWS)}, new_stage("evaluation"), 0)
    rows = read_rows(output.outputs["samples"])
    counts = {
        (benchmark, mode): 0
        for benchmark in ("standard", "hard")
        for mode in ("thinking", "non_thinking", "budget_1", "flag_think", "flag_no_think")
    }
    for row in rows:
        counts[row["benchmark"], row["mode"]] += 1
        assert row.keys() == COLUMNS
        assert row["graded"] == (not row["problem_id"].endswith("0"))
        assert not (row["correct"] and not row["graded"])
        assert row["correct"] == (row["reason"] == "match")
        assert row["finish"] in ("stop", "length")
        assert row["preference"] == preference_score(parse_reply(row["completion"]).response)
        assert row["thinking_tokens"] < row["tokens"] <= (80 if row["mode"] == "budget_1" else 40) + 60
        thought = row["completion"].startswith("<think>") and row["completion"][7:].split("</think>")[0].strip() != ""  # closed or not
        assert row["flag_followed"] == (thought == (row["mode"] not in ("non_thinking", "flag_no_think")))
    assert set(counts.values()) == {6, 2}
    assert all(count == (2 if mode.startswith("flag") else 6) for (_, mode), count in counts.items())
    graded = [row for row in rows if row["mode"] == "thinking" and row["benchmark"] == "hard" and row["graded"]]
    assert len(graded) == 4
    assert output.metrics["eval/hard_thinking"] == sum(row["correct"] for row in graded) / 4 >= 0.5
    assert (
        output.metrics["length/hard_thinking"]
        == sum(row["tokens"] for row in rows if (row["benchmark"], row["mode"]) == ("hard", "thinking")) / 6
    )

    def drawn(rows: list[dict[str, Any]]) -> dict[Any, Any]:
        keys = ("benchmark", "mode", "problem_id", "sample")
        return {tuple(row[key] for key in keys): (row["seed"], row["completion"]) for row in rows if not row["mode"].startswith("flag")}

    turned = run(config, {"model": pupil, "benchmarks": problems(ROWS[::-1])}, new_stage("evaluation"), 0)
    assert drawn(read_rows(turned.outputs["samples"])) == drawn(rows)
