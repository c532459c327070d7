"""What results add up to: rows of the table in recipe order with the stage before, totals of what ran, runs lined up, what gc must keep."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from flows.history import Finished, Record, keep, open_run
from flows.plan import stage_folder
from flows.recipe import load_recipe
from flows.scores.comparison import compare
from flows.summary import lined_up, needed, table_of, totals
from stages.artifacts import DatasetRef, StageResult, write_json
from stages.errors import ArtifactError


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


def run(home: Path, scores: dict[str, float], *overrides: str, **about: str | None) -> Record:
    """A finished run of `tiny` in which these models were scored."""
    recipe = load_recipe("tiny", overrides)
    record = open_run(
        home, "tiny", **{"kind": "recipe", "variant": recipe.variant, **about}, text=recipe.text, overrides=dict(recipe.overrides)
    )
    nodes = {}
    for node, right in scores.items():
        for name, stage in ((node, recipe.node(node).stage), (f"evaluation_{node}", "evaluation")):
            fingerprint = f"{record.id}-{name}".ljust(64, "0")
            folder = stage_folder(home, stage, fingerprint)
            folder.mkdir(parents=True, exist_ok=True)
            found = result(folder, name, right).model_copy(update={"stage": stage, "fingerprint": fingerprint})
            write_json(folder / "result.json", found.model_dump(mode="json"))
            nodes[name] = Finished(stage=stage, fingerprint=fingerprint)
    return keep(home, record, nodes=nodes, status="finished")


def test_lined_up_runs_are_compared_at_the_last_stage_that_all_have_scored(tmp_path: Path) -> None:
    first = run(tmp_path, {"cold_start": 0.3, "reasoning_rl": 0.4, "fusion": 0.4})
    second = run(tmp_path, {"cold_start": 0.3, "reasoning_rl": 0.8}, "reasoning_rl.loss=dr_grpo")
    stage, found = lined_up(tmp_path, [first, second], None)
    assert stage == "reasoning_rl"
    assert [item.variant for item in found] == ["tiny-1 default", "tiny-2 reasoning_rl.loss=dr_grpo"]
    verdicts = [row.verdict for row in compare(stage, found).rows if (row.benchmark, row.mode) == ("sums", "thinking")]
    assert verdicts == ["baseline", "better"]
    assert lined_up(tmp_path, [first, second], "cold_start")[0] == "cold_start"
    with pytest.raises(ArtifactError, match="tiny-1, tiny-2: not all have evaluated fusion"):
        lined_up(tmp_path, [first, second], "fusion")


def test_lined_up_ablation_stands_for_its_variants_with_their_seeds(tmp_path: Path) -> None:
    parts = [
        run(
            tmp_path, {"reasoning_rl": 0.5}, f"reasoning_rl.loss={loss}", f"reasoning_rl.seed={seed}",
            kind="rerun", stage="reasoning_rl", part_of="tiny-9", variant=f"loss={loss} seed={seed}",
        )
        for loss in ("dapo", "dr_grpo") for seed in (0, 1)
    ]  # fmt: skip
    recipe = load_recipe("tiny")
    whole = open_run(
        tmp_path, "tiny", kind="ablation", variant="loss=dapo,dr_grpo", text=recipe.text, overrides={}, stage="reasoning_rl",
        compared_at="reasoning_rl", parts=tuple(part.id for part in parts),
    )  # fmt: skip
    stage, found = lined_up(tmp_path, [whole], None)
    assert stage == "reasoning_rl"
    assert [(item.variant, item.seed) for item in found] == [("loss=dapo", 0), ("loss=dapo", 1), ("loss=dr_grpo", 0), ("loss=dr_grpo", 1)]


def test_needed_is_what_the_newest_runs_have_and_what_runs(tmp_path: Path) -> None:
    runs = [run(tmp_path, {"cold_start": 0.1}) for _ in range(3)]
    running = keep(tmp_path, runs[0], status="running")
    kept = {fingerprint.split("-evaluation")[0].split("-cold")[0] for fingerprint in needed(tmp_path, keep=1)}
    assert kept == {running.id, runs[2].id}
