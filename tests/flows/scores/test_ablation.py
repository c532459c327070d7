"""The ablation table: estimates, intervals and tests against values worked out by hand or by simulation."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import Table, parquet
from rich.console import Console

from flows.scores.ablation import (
    AblationTable,
    Cell,
    Row,
    ablation_table,
    difference_interval,
    draw,
    paired_differences,
    pass_at_k,
    pooled_test,
    preference_differences,
    score_interval,
    sign_flip_p_value,
    standard_error,
)
from stages.errors import DataError


def sample(problem: int, number: int, correct: bool, **other: Any) -> dict[str, Any]:
    return {
        "benchmark": "sums",
        "mode": "thinking",
        "problem_id": f"p{problem:03}",
        "sample": number,
        "seed": 0,
        "graded": True,
        "correct": correct,
        "reason": "",
        "format_ok": True,
        "flag_followed": True,
        "tokens": 10,
        "thinking_tokens": 5,
        "finish": "stop",
        "preference": 0.0,
        "completion": "",
    } | other


def samples_of(right: Sequence[int], n: int = 4, **other: Any) -> list[dict[str, Any]]:
    """n samples a problem, of which the first `right[problem]` are right."""
    return [sample(problem, number, number < count, **other) for problem, count in enumerate(right) for number in range(n)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    parquet.write_table(Table.from_pylist(rows), path)
    return path


# ---- statistics


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (10, 3, 1, 0.3),
        (10, 3, 3, 0.708333),
        (10, 3, 5, 0.916667),
        (10, 3, 8, 1.0),
        (10, 0, 5, 0.0),
        (4, 1, 2, 0.5),
        (16, 4, 8, 0.961538),
        (64, 5, 16, 0.775421),
        (200, 20, 10, 0.660226),
        (200, 1, 100, 0.5),
    ],
)
def test_pass_at_k_golden_numbers(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_pass_at_k_out_of_bounds_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="the rule is 0 <= c <= n"):
        pass_at_k(n, c, k)


def test_standard_error_clusters_by_problem() -> None:
    assert standard_error([1.0, 0.0, 0.5, 0.5]) == pytest.approx(math.sqrt((0.25 + 0.25) / 3 / 4))
    assert standard_error([0.25] * 9) == 0.0
    assert standard_error([1.0]) == 0.0


def test_score_interval_independent_binary_problems_is_wilson() -> None:
    low, high = score_interval([1.0] * 400 + [0.0] * 600, 1000)
    assert (low, high) == pytest.approx((0.37007, 0.43070), abs=2e-4)  # Wilson for 400 of 1000


def test_score_interval_at_the_ends_has_width_and_stays_inside() -> None:
    low, high = score_interval([0.0] * 100, 400)
    assert low == 0.0
    assert high == pytest.approx(1.984217**2 / (100 + 1.984217**2), abs=1e-5)  # Wilson with Student's t, 99 degrees of freedom
    assert score_interval([1.0] * 100, 400) == pytest.approx((1 - high, 1.0))


def test_score_interval_equal_shares_use_every_sample() -> None:
    low, high = score_interval([0.5] * 50, 200)  # samples behave as independent: 100 of 200
    assert (low, high) == pytest.approx((0.5 - 0.0702, 0.5 + 0.0702), abs=1e-3)


@pytest.mark.parametrize("n_problems", [1, 2, 3])
def test_score_interval_few_problems_stays_wide(n_problems: int) -> None:
    for means in ([0.0] * n_problems, [1.0] * n_problems, [0.5] * n_problems):
        low, high = score_interval(means, 4 * n_problems)
        assert 0 <= low <= means[0] <= high <= 1
        assert high - low > 0.4


@pytest.mark.parametrize(
    ("a", "b", "problems"), [(0.05, 4.95, 128), (0.3, 2.7, 128), (1, 1, 64), (20, 20, 64), (2.7, 0.3, 128), (9.9, 0.1, 128)]
)
def test_score_interval_covers_the_truth_as_often_as_it_says(a: float, b: float, problems: int) -> None:
    rng, hits, trials = np.random.default_rng(7), 0, 1500
    for _ in range(trials):
        means = rng.binomial(4, rng.beta(a, b, problems)) / 4
        low, high = score_interval(means.tolist(), 4 * problems)
        hits += low <= a / (a + b) <= high
    assert 0.93 <= hits / trials <= 0.995


def test_difference_interval_paired_proportions_example() -> None:
    # 1,600 pairs, 150 lost and 86 gained (Agresti and Min 2005): Wald gives -0.059 to -0.021
    low, high = difference_interval([-1.0] * 150 + [1.0] * 86 + [0.0] * 1364)
    assert (low, high) == pytest.approx((-0.0587, -0.0212), abs=2e-4)


def test_difference_interval_no_change_has_width_and_mirrors() -> None:
    low, high = difference_interval([0.0] * 128)
    assert low == pytest.approx(-high)
    assert high == pytest.approx(1.959964 / 130, rel=1e-6)
    assert difference_interval([1.0, 1.0, 0.0]) == pytest.approx(tuple(-end for end in reversed(difference_interval([-1.0, -1.0, 0.0]))))


@pytest.mark.parametrize(("before", "after"), [(0.02, 0.02), (0.5, 0.5), (0.3, 0.5), (0.9, 0.98)])
def test_difference_interval_covers_the_truth_as_often_as_it_says(before: float, after: float) -> None:
    rng, hits, trials = np.random.default_rng(3), 0, 1500

    def solved(ease: Any, share: float) -> Any:
        return 1 / (1 + np.exp(-ease - math.log(share / (1 - share))))

    many = rng.normal(0, 1, 1_000_000)
    truth = float(np.mean(solved(many, after) - solved(many, before)))
    for _ in range(trials):
        ease = rng.normal(0, 1, 128)
        low, high = difference_interval(((rng.binomial(4, solved(ease, after)) - rng.binomial(4, solved(ease, before))) / 4).tolist())
        hits += low <= truth <= high
    assert 0.93 <= hits / trials <= 0.995


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([1.0] * 5, 2 / 32),
        ([1.0] * 8, 2 / 256),
        ([-0.25] * 8 + [0.0] * 50, 2 / 256),  # zeros do not change under a flip
        ([1.0, 1.0, 1.0, -1.0], 10 / 16),
        ([0.0] * 20, 1.0),
        ([], 1.0),
        ([0.5], 1.0),
        ([1.0, 2.0, 4.0], 2 / 8),
        ([1.0, 2.0, -4.0], 2 * 4 / 8),
    ],
)
def test_sign_flip_p_value_is_exact_on_few_differences(differences: list[float], expected: float) -> None:
    assert sign_flip_p_value(differences) == pytest.approx(expected)


def test_sign_flip_p_value_many_differences_is_repeatable_and_near_the_t_test() -> None:
    from scipy.stats import ttest_1samp

    differences = np.random.default_rng(5).normal(0.08, 0.4, 128)
    p_value = sign_flip_p_value(differences.tolist())
    assert p_value == sign_flip_p_value(differences.tolist())
    assert p_value == pytest.approx(float(ttest_1samp(differences, 0).pvalue), abs=0.01)
    assert sign_flip_p_value([0.5] * 100) == pytest.approx(2 / 10_000)


def test_sign_flip_p_value_without_effect_is_below_five_percent_one_time_in_twenty() -> None:
    rng = np.random.default_rng(11)
    p_values = [
        sign_flip_p_value(((rng.binomial(4, ease) - rng.binomial(4, ease)) / 4).tolist(), resamples=399)
        for ease in (rng.beta(1, 1, 40) for _ in range(400))
    ]
    assert 0.02 <= np.mean(np.array(p_values) < 0.05) <= 0.08


def test_pooled_test_flips_all_problem_seeds_together() -> None:
    pooled = pooled_test([[1.0, 0.0, 1.0], [0.0, 1.0], [1.0, 1.0, -1.0]])
    assert pooled.effects == pytest.approx((2 / 3, 0.5, 1 / 3))
    assert pooled.difference == pytest.approx(4 / 8)
    assert pooled.n_problems == 8
    assert pooled.p_value == pytest.approx(sign_flip_p_value([1, 1, 1, 1, 1, -1]))
    assert pooled.p_value == pytest.approx(2 * 7 / 64)
    assert (pooled.low, pooled.high) == difference_interval([1, 0, 1, 0, 1, 1, 1, -1])


@pytest.mark.parametrize("per_seed", [[], [[0.5], []]])
def test_pooled_test_without_differences_is_refused(per_seed: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        pooled_test(per_seed)


# ---- the table


def test_table_cell_clusters_samples_by_problem(tmp_path: Path) -> None:
    rows = ablation_table([("base", None, write(tmp_path / "base.parquet", samples_of([4, 0, 2, 2])), 12.5, 345)]).rows
    (cell,) = rows[0].cells
    assert (rows[0].node, rows[0].parent, rows[0].seconds, rows[0].tokens) == ("base", None, 12.5, 345)
    assert (cell.benchmark, cell.mode, cell.mean, cell.n_problems, cell.n_samples) == ("sums", "thinking", 0.5, 4, 16)
    assert cell.standard_error == pytest.approx(math.sqrt((0.25 + 0.25) / 3 / 4))
    assert (cell.low, cell.high) == score_interval([1.0, 0.0, 0.5, 0.5], 16)
    assert (cell.difference, cell.p_value, cell.difference_low, cell.difference_high) == (None, None, None, None)
    assert cell.solved == 0.75
    assert cell.tokens_mean == 10


def test_table_samples_not_graded_leave_the_denominator_and_are_counted(tmp_path: Path) -> None:
    lost = [sample(0, 0, True), *(sample(0, number, True, graded=False) for number in (1, 2, 3))]  # `correct` means nothing ungraded
    gone = [sample(1, number, True, graded=False) for number in range(4)]
    path = write(tmp_path / "s.parquet", [*lost, *gone, *(sample(2, number, number == 0) for number in range(4))])
    before = write(tmp_path / "before.parquet", samples_of([0, 4, 0]))
    table = ablation_table([("before", None, before, 1.0, 1), ("base", "before", path, 1.0, 1), ("after", "base", before, 1.0, 1)])
    (cell,), (later,) = table.rows[1].cells, table.rows[2].cells
    assert (cell.difference, later.difference) == ((1 + 0.25) / 2, -(1 + 0.25) / 2)  # problem 1 is graded on one side only
    assert cell.mean == pytest.approx((1 + 0.25) / 2)
    assert (cell.n_problems, cell.n_samples, cell.not_graded) == (2, 5, 7)


def test_table_pairs_problems_with_the_stage_before(tmp_path: Path) -> None:
    before = write(tmp_path / "before.parquet", samples_of([0, 1, 2, 0, 0, 0, 0, 0, 3]))
    after = write(tmp_path / "after.parquet", list(reversed(samples_of([4, 2, 3, 1, 1, 1, 1, 1]))))  # other order, one problem fewer
    table = ablation_table([("base", None, before, 1, 1), ("cold_start", "base", after, 2, 2), ("late", "absent", after, 2, 2)])
    (cell,) = table.rows[1].cells
    differences = [1.0] + [0.25] * 7
    assert cell.difference == pytest.approx(np.mean(differences))
    assert cell.p_value == pytest.approx(2 / 256)
    assert (cell.difference_low, cell.difference_high) == pytest.approx(difference_interval(differences))
    assert sorted(paired_differences(before, after, "sums", "thinking")) == pytest.approx(sorted(differences))
    assert table.rows[2].parent == "absent"
    assert table.rows[2].cells[0].difference is None


def test_table_rates_come_from_their_own_modes(tmp_path: Path) -> None:
    rows = [
        *samples_of([2, 2], format_ok=True, tokens=30, finish="length"),
        *samples_of([0, 0], mode="non_thinking", format_ok=False, tokens=6),
        *samples_of([4, 4], n=2, mode="flag_think", flag_followed=True, format_ok=False, finish="length"),
        *samples_of([4, 4], n=2, mode="flag_no_think", flag_followed=False, format_ok=False),
        *samples_of([1, 1], mode="budget_64"),
        *samples_of([1, 1], mode="budget_8"),
    ]
    row = ablation_table([("base", None, write(tmp_path / "s.parquet", rows), 1, 1)]).rows[0]
    assert [cell.mode for cell in row.cells] == ["thinking", "non_thinking", "budget_8", "budget_64"]
    assert [cell.tokens_mean for cell in row.cells[:2]] == [30, 6]
    assert (row.format_rate, row.flag_rate, row.stop_rate) == (0.5, 0.5, 0.5)


def test_table_without_flag_modes_has_no_flag_rate(tmp_path: Path) -> None:
    assert ablation_table([("base", None, write(tmp_path / "s.parquet", samples_of([1, 2])), 1, 1)]).rows[0].flag_rate is None


def test_table_preference_win_rate_counts_ties_half_and_clusters_by_problem(tmp_path: Path) -> None:
    before = [sample(problem, number, True, preference=0.5) for problem in range(6) for number in range(2)]
    after = [sample(problem, number, True, preference=[0.9, 0.5][number]) for problem in range(6) for number in range(2)]
    paths = [write(tmp_path / "before.parquet", before), write(tmp_path / "after.parquet", [*after, sample(9, 0, True, preference=0.0)])]
    row = ablation_table([("fusion", None, paths[0], 1, 1), ("rlhf", "fusion", paths[1], 1, 1)]).rows[1]
    assert row.preference_win_rate == pytest.approx(0.75)  # one win and one tie on each of six problems; p009 is not shared
    assert row.preference_p == pytest.approx(2 / 64)
    assert preference_differences(*paths) == [0.25] * 6


def test_table_first_row_has_no_preference(tmp_path: Path) -> None:
    row = ablation_table([("base", None, write(tmp_path / "s.parquet", samples_of([1])), 1, 1)]).rows[0]
    assert (row.preference_win_rate, row.preference_p) == (None, None)


def test_table_nothing_graded_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "s.parquet", samples_of([1, 2], graded=False))
    with pytest.raises(DataError, match="base: none of the 8 samples of sums thinking could be graded"):
        ablation_table([("base", None, path, 1, 1)])


def test_table_samples_file_torn_or_missing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "torn.parquet").write_text("not Parquet")
    for name in ("torn.parquet", "missing.parquet"):
        with pytest.raises(DataError, match=f"{name} cannot be read as evaluation samples"):
            ablation_table([("base", None, tmp_path / name, 1, 1)])
    write(tmp_path / "other.parquet", [{"text": "a"}])
    with pytest.raises(DataError, match="no column 'benchmark'"):
        ablation_table([("base", None, tmp_path / "other.parquet", 1, 1)])


def test_paired_differences_without_shared_problems_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "s.parquet", samples_of([1]))
    with pytest.raises(DataError, match="share no graded problem in sums non_thinking"):
        paired_differences(path, path, "sums", "non_thinking")


# ---- stored, printed, drawn


def cell(mean: float, mode: str = "thinking", **other: Any) -> Cell:
    fields: dict[str, Any] = {"benchmark": "sums", "low": mean - 0.05, "high": mean + 0.05, "n_problems": 128, "n_samples": 512} | other
    return Cell(mode=mode, mean=mean, **fields)


def example() -> AblationTable:
    rates: dict[str, Any] = {"format_rate": 0.98, "flag_rate": None, "preference_win_rate": None, "preference_p": None}
    rates |= {"tokens": 1_234_567, "seconds": 61.4}
    return AblationTable(
        (
            Row(node="base", parent=None, cells=(cell(0.2), cell(0.1, "non_thinking"), cell(0.15, "budget_32")), **rates),
            Row(
                node="cold_start",
                parent="base",
                cells=(cell(0.53, difference=0.33, p_value=0.0002), cell(0.11, "non_thinking", difference=0.01, p_value=0.4)),
                **rates,
            ),
            Row(
                node="rlhf",
                parent="cold_start",
                cells=(cell(0.4, difference=-0.13, p_value=0.031), cell(0.8, benchmark="legs")),
                **rates | {"preference_win_rate": 0.71, "preference_p": 0.0004, "flag_rate": 0.965},
            ),
            Row(
                node="distillation",
                parent="cold_start",
                cells=(cell(0.5, difference=-0.03, p_value=0.3),),
                **rates | {"preference_win_rate": 0.5, "preference_p": 0.9},
            ),
        )
    )


def printed(table: AblationTable, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    table.render(console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_table_survives_json() -> None:
    assert AblationTable.from_json(json.loads(json.dumps(example().to_json(), allow_nan=False))) == example()


@pytest.mark.parametrize("content", [[{"node": "base"}], [example().to_json()[0] | {"surprise": 1}]])
def test_table_from_json_of_another_shape_is_an_error(content: list[dict[str, Any]]) -> None:
    with pytest.raises(DataError, match="not an ablation table"):
        AblationTable.from_json(content)


def test_render_shows_scores_changes_and_what_is_not_distinguishable() -> None:
    lines = printed(example()).splitlines()
    assert any(line.startswith("sums: pass@1") and "128 problems, 4 samples each" in line for line in lines)
    text = "\n".join(" ".join(line.split()) for line in lines)
    assert "base 0.20 [0.15, 0.25] 0.10 [0.05, 0.15]" in text
    assert "cold_start 0.53 [0.48, 0.58] +0.33 (p < 0.001) 0.11 [0.06, 0.16] +0.01 not distinguishable" in text
    assert "rlhf 0.40 [0.35, 0.45] -0.13 (p = 0.031)" in text
    assert "rlhf cold_start 98% 96% 100% 71% p < 0.001" in text
    assert "1,234,567" in text


@pytest.mark.parametrize("width", [120, 140])
def test_render_fits_the_terminal_without_cutting(width: int) -> None:
    text = printed(example(), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    assert " distinguishable" in text


def test_draw_writes_a_figure_with_a_panel_a_benchmark(tmp_path: Path) -> None:
    draw(example(), tmp_path / "figure.png")
    content = (tmp_path / "figure.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert int.from_bytes(content[16:20], "big") > int.from_bytes(content[20:24], "big") > 500


def test_stored_table_prints_without_heavy_imports() -> None:
    code = (
        "import sys; from flows.scores.ablation import AblationTable; from rich.console import Console; "
        f"AblationTable.from_json({example().to_json()!r}).render(Console()); "
        "heavy = ('scipy', 'matplotlib', 'pyarrow', 'numpy', 'torch', 'prefect', 'mlflow', 'duckdb'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    assert output.stdout.strip().splitlines()[-1] == "[]"
