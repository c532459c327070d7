"""What results add up to: rows of the table in recipe order with the stage before, and totals of what ran."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet

from flows.recipe import load_recipe
from flows.summary import table_of, totals
from stages.artifacts import DatasetRef, StageResult


def result(folder: Path, node: str, right: float, *, seconds: float = 1.0) -> StageResult:
    """A finished stage; for an evaluation, with samples of which the share `right` is correct."""
    samples = folder / f"{node}.parquet"
    rows = [
        {
            "benchmark": benchmark, "mode": mode, "problem_id": f"p{problem}", "sample": sample, "seed": 0, "graded": True,
            "correct": (problem * 7 + sample) % 10 < 10 * right, "reason": "", "format_ok": True, "flag_followed": True, "tokens": 20,
            "thinking_tokens": 10, "finish": "stop", "preference": 0.5, "completion": "x",
        }
        for benchmark in ("sums", "harder") for mode in ("thinking", "non_thinking") for problem in range(64) for sample in range(4)
    ]  # fmt: skip
    parquet.write_table(pa.Table.from_pylist(rows), samples)
    ref = DatasetRef(name="samples", digest="d", path=samples, producer="p", rows=len(rows))
    return StageResult(
        stage=node, fingerprint=node, key={}, outputs={"samples": ref}, metrics={}, seconds=seconds, busy_seconds=seconds / 2, tokens=10,
        peak_memory_mib=100 * seconds, versions={},
    )  # fmt: skip


def test_table_rows_are_models_in_recipe_order_with_the_stage_before_and_its_cost(tmp_path: Path) -> None:
    results = {
        "cold_start": result(tmp_path, "cold_start", 0, seconds=9),
        "evaluation_cold_start": result(tmp_path, "evaluation_cold_start", 0.6),
        "evaluation_base": result(tmp_path, "evaluation_base", 0.2),
    }
    table = table_of(load_recipe("tiny"), results)
    assert table is not None
    assert [(row.node, row.parent, row.seconds) for row in table.rows] == [("base", None, 0.0), ("cold_start", "base", 9.0)]
    assert all(cell.difference is not None and cell.difference > 0 for cell in table.rows[1].cells)


def test_table_without_evaluations_is_none(tmp_path: Path) -> None:
    assert table_of(load_recipe("tiny"), {"cold_start": result(tmp_path, "cold_start", 0)}) is None


def test_totals_are_of_the_stages_that_ran(tmp_path: Path) -> None:
    spent = totals({"a": result(tmp_path, "a", 0, seconds=4), "b": result(tmp_path, "b", 0, seconds=2)}, wall_seconds=12)
    assert (spent.busy_seconds, spent.peak_memory_mib, spent.stages_run) == (3.0, 400.0, 2)
    assert spent.busy_share == 0.25
    assert totals({}, 0.0).busy_share == 0.0
