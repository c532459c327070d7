"""Variants of a stage, compared: estimates by hand, the family-wise error by simulation, the table as it prints."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import Table, parquet
from rich.console import Console

from flows.scores.ablation import difference_interval, score_interval, sign_flip_p_value
from flows.scores.comparison import Comparison, Line, Measured, compare, holm
from stages.errors import DataError

FIXED: dict[str, Any] = {"format_ok": True, "flag_followed": True, "tokens": 10, "finish": "stop", "preference": 0.0}


def sample(problem: int, number: int, correct: bool, **other: Any) -> dict[str, Any]:
    here = {"benchmark": "sums", "mode": "thinking", "problem_id": f"p{problem:03}", "sample": number, "graded": True, "correct": correct}
    return here | FIXED | other


def samples_of(right: Sequence[int], n: int = 4, **other: Any) -> list[dict[str, Any]]:
    """n samples a problem, of which the first `right[problem]` are right."""
    return [sample(problem, number, number < count, **other) for problem, count in enumerate(right) for number in range(n)]


def measured(folder: Path, variant: str, seed: int, rows: list[dict[str, Any]], tokens: int = 1000, seconds: float = 10.0) -> Measured:
    path = folder / f"{variant}-{seed}.parquet"
    parquet.write_table(Table.from_pylist(rows), path)
    return Measured(variant, seed, path, tokens, seconds)


def printed(comparison: Comparison, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    comparison.render(console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


# ---- the adjustment


@pytest.mark.parametrize(
    ("p_values", "expected"),
    [
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.04], [0.04]),
        ([0.02, 0.02, 0.02], [0.06, 0.06, 0.06]),
        ([0.9, 0.8], [1.0, 1.0]),
        ([], []),
    ],
)
def test_holm_worked_examples_give_the_values_by_hand(p_values: list[float], expected: list[float]) -> None:
    assert holm(p_values) == pytest.approx(expected)


# ---- estimates


def test_compare_one_seed_each_pairs_problems_and_says_better_or_worse(tmp_path: Path) -> None:
    comparison = compare(
        "reasoning_rl",
        [
            measured(tmp_path, "loss=grpo", 0, samples_of([1] * 10)),
            measured(tmp_path, "loss=dr_grpo", 0, samples_of([3] * 10)),
            measured(tmp_path, "loss=dapo", 0, samples_of([0] * 9 + [1])),
            measured(tmp_path, "loss=cispo", 0, samples_of([1] * 8 + [2, 0])),
            measured(tmp_path, "loss=rloo", 0, samples_of([2] * 6 + [1] * 4)),
        ],
    )
    baseline, better, worse, same, unclear = comparison.rows
    assert (comparison.stage, comparison.baseline) == ("reasoning_rl", "loss=grpo")
    assert [line.verdict for line in comparison.rows] == ["baseline", "better", "worse", "not distinguishable", "not distinguishable"]
    assert (baseline.difference, baseline.p_value, baseline.p_adjusted, baseline.difference_low) == (None, None, None, None)
    assert (better.mean, better.n_problems, better.n_samples) == (0.75, 10, 40)
    assert (better.low, better.high) == score_interval([0.75] * 10, 40)
    assert (better.difference, better.p_value) == (0.5, pytest.approx(2 / 1024))
    assert (better.difference_low, better.difference_high) == difference_interval([0.5] * 10)
    assert worse.p_value == pytest.approx(2 / 512)  # one problem did not move
    assert (same.difference, same.p_value) == (0.0, 1.0)
    assert unclear.p_value == pytest.approx(2 / 64)  # below 0.05 only before the adjustment
    adjusted = [line.p_adjusted for line in (better, worse, unclear, same)]
    assert adjusted == pytest.approx([4 * 2 / 1024, 3 * 2 / 512, 2 * 2 / 64, 1.0])


def test_compare_pairs_by_problem_and_not_by_order(tmp_path: Path) -> None:
    ease = [0, 1, 2, 3, 0, 1, 2, 3]
    harder = list(reversed(samples_of([count + 1 for count in ease])))  # the same problems, last first
    extra = samples_of([0] * 12 + [4] * 3)[12 * 4 :]  # problems that the baseline has not
    comparison = compare("rl", [measured(tmp_path, "a", 0, samples_of(ease)), measured(tmp_path, "b", 0, harder + extra)])
    line = comparison.rows[1]
    assert line.difference == pytest.approx(0.25)
    assert line.p_value == pytest.approx(2 / 256)
    assert line.n_problems == 11
    assert line.mean == pytest.approx((sum(ease) / 4 + 8 * 0.25 + 3) / 11)  # of all of its own problems


def test_compare_averages_seeds_before_it_pairs(tmp_path: Path) -> None:
    comparison = compare(
        "rl",
        [
            measured(tmp_path, "a", 0, samples_of([2] * 8), tokens=100, seconds=1.0),
            measured(tmp_path, "b", 3, samples_of([4] * 4 + [0] * 4), tokens=200, seconds=2.0),
            measured(tmp_path, "b", 1, samples_of([1] * 8), tokens=301, seconds=5.0),
        ],
    )
    before, line = comparison.rows
    means = [(1 + 0.25) / 2] * 4 + [0.25 / 2] * 4
    differences = [mean - 0.5 for mean in means]
    assert (before.seeds, before.tokens, before.seconds) == ((0,), 100, 1.0)
    assert (line.seeds, line.seed_means, line.mean) == ((3, 1), (0.5, 0.25), pytest.approx(0.375))
    assert (line.tokens, line.seconds) == (250, 3.5)  # of a training run
    assert (line.n_problems, line.n_samples) == (8, 64)
    assert (line.low, line.high) == score_interval(means, 64)
    assert line.p_value == pytest.approx(sign_flip_p_value(differences))
    assert (line.difference, line.difference_low, line.difference_high) == pytest.approx((-0.125, *difference_interval(differences)))


def test_compare_samples_not_graded_leave_and_their_problem_when_a_seed_has_none(tmp_path: Path) -> None:
    partly = [sample(0, 0, True), *(sample(0, number, True, graded=False) for number in (1, 2, 3))]  # `correct` means nothing ungraded
    lost = [sample(1, number, True, graded=False) for number in range(4)]
    comparison = compare(
        "rl",
        [
            measured(tmp_path, "a", 0, samples_of([2, 2, 2])),
            measured(tmp_path, "b", 0, [*partly, *lost, *samples_of([0, 0, 4])[8:]]),
            measured(tmp_path, "b", 1, samples_of([0, 4, 4])),
        ],
    )
    line = comparison.rows[1]
    assert line.seed_means == (1.0, 0.5)  # on problems 0 and 2
    assert (line.mean, line.n_problems, line.n_samples) == (0.75, 2, 1 + 4 + 4 + 4)
    assert line.difference == pytest.approx(((0.5 + 1.0) / 2) - 0.5)


def test_compare_orders_benchmarks_modes_and_budgets_and_leaves_flags_out(tmp_path: Path) -> None:
    def rows(right: int) -> list[dict[str, Any]]:
        modes = ("non_thinking", "flag_think", "budget_64", "budget_8", "flag_no_think", "thinking")
        return [row for benchmark in ("sums", "legs") for mode in modes for row in samples_of([right] * 7, mode=mode, benchmark=benchmark)]

    comparison = compare("rl", [measured(tmp_path, "b", 0, rows(1)), measured(tmp_path, "a", 0, rows(2))])
    modes = ["thinking", "non_thinking", "budget_8", "budget_64"]
    expected = [(benchmark, mode, variant) for benchmark in ("legs", "sums") for mode in modes for variant in ("b", "a")]
    assert [(line.benchmark, line.mode, line.variant) for line in comparison.rows] == expected
    assert [line.p_adjusted for line in comparison.rows[1::2]] == pytest.approx([8 * 2 / 128] * 8)  # one table, one family


def test_compare_where_the_baseline_was_not_evaluated_is_not_compared(tmp_path: Path) -> None:
    more = samples_of([1] * 8) + samples_of([1] * 8, benchmark="legs")
    comparison = compare("rl", [measured(tmp_path, "a", 0, samples_of([1] * 8)), measured(tmp_path, "b", 0, more)])
    assert [(line.benchmark, line.variant, line.verdict) for line in comparison.rows] == [
        ("legs", "b", "not compared"),
        ("sums", "a", "baseline"),
        ("sums", "b", "not distinguishable"),
    ]
    assert comparison.rows[0].difference is None
    assert "adjusted over 1 comparison;" in printed(comparison)


# ---- what the verdicts are worth


def drawn(rng: np.random.Generator, ease: Any, n: int = 4) -> list[int]:
    return [int(count) for count in rng.binomial(n, np.clip(ease, 0, 1))]


def table_of(folder: Path, rng: np.random.Generator, shifts: Sequence[float], n_seeds: int, n_problems: int = 24) -> Comparison:
    """Variants in both modes on the same problems; `shifts` are the true changes of the variants after the baseline."""
    ease = {mode: rng.beta(1, 1, n_problems) for mode in ("thinking", "non_thinking")}
    return compare(
        "rl",
        [
            measured(folder, f"v{place}", seed, [row for mode in ease for row in samples_of(drawn(rng, ease[mode] + shift), mode=mode)])
            for place, shift in enumerate((0.0, *shifts))
            for seed in range(n_seeds)
        ],
    )


def wrong(lines: Iterable[Line]) -> bool:
    return any(line.verdict in ("better", "worse") for line in lines)


@pytest.mark.slow
def test_compare_without_effect_gives_a_false_verdict_in_one_table_of_twenty(tmp_path: Path) -> None:
    from scipy.stats import binom

    rng, tables = np.random.default_rng(17), 400
    comparisons = [table_of(tmp_path, rng, (0.0, 0.0, 0.0), n_seeds=1 + trial % 2) for trial in range(tables)]
    assert all(sum(line.p_value is not None for line in comparison.rows) == 6 for comparison in comparisons)
    family = sum(wrong(comparison.rows) for comparison in comparisons)
    assert 2 <= family <= binom.ppf(0.999, tables, 0.05)
    single = sum(any(line.p_value is not None and line.p_value < 0.05 for line in comparison.rows) for comparison in comparisons)
    assert single > binom.ppf(0.999, tables, 0.05)  # what the adjustment is for


def test_compare_with_an_effect_finds_it_and_only_it(tmp_path: Path) -> None:
    rng, tables = np.random.default_rng(23), 12
    for _ in range(tables):
        comparison = table_of(tmp_path, rng, (0.0, 0.25, -0.25), n_seeds=2, n_problems=64)
        verdicts = {line.variant: line.verdict for line in comparison.rows if line.mode == "thinking"}
        assert verdicts["v2"] == "better"
        assert verdicts["v3"] == "worse"


@pytest.mark.slow
def test_compare_many_tests_leave_room_for_a_verdict(tmp_path: Path) -> None:
    rows = [row for benchmark in range(130) for row in samples_of([1] * 15, benchmark=f"b{benchmark:03}")]
    better = [row | {"correct": True} for row in rows]
    comparison = compare("rl", [measured(tmp_path, "a", 0, rows), measured(tmp_path, "b", 0, better), measured(tmp_path, "c", 0, rows)])
    assert sum(line.p_value is not None for line in comparison.rows) == 260
    assert {line.verdict for line in comparison.rows if line.variant == "b"} == {"better"}
    assert {line.verdict for line in comparison.rows if line.variant == "c"} == {"not distinguishable"}


# ---- what is refused


def test_compare_fewer_than_two_variants_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"0 variant to compare \(none\); give at least two"):
        compare("rl", [])
    with pytest.raises(DataError, match=r"1 variant to compare \(a\); give at least two"):
        compare("rl", [measured(tmp_path, "a", seed, samples_of([1])) for seed in (0, 1)])


def test_compare_variant_twice_with_one_seed_is_refused(tmp_path: Path) -> None:
    one, other = measured(tmp_path, "a", 0, samples_of([1])), measured(tmp_path, "b", 7, samples_of([1]))
    with pytest.raises(DataError, match="b is given 2 times with seed 7"):
        compare("rl", [one, other, other])


def test_compare_variants_without_a_shared_problem_are_refused(tmp_path: Path) -> None:
    one = measured(tmp_path, "a", 0, samples_of([1, 2]))
    with pytest.raises(DataError, match="b and a share no graded problem in sums thinking"):
        compare("rl", [one, measured(tmp_path, "b", 0, [sample(5, 0, True)])])
    with pytest.raises(DataError, match="c and a share no benchmark in one mode"):
        compare("rl", [one, measured(tmp_path, "c", 0, samples_of([1, 2], mode="non_thinking"))])


def test_compare_seeds_without_a_shared_problem_are_refused(tmp_path: Path) -> None:
    runs = [measured(tmp_path, "b", 0, samples_of([1])), measured(tmp_path, "b", 4, [sample(5, 0, True)])]
    with pytest.raises(DataError, match=r"b: no problem of sums thinking is graded in each of the seeds \[0, 4\]"):
        compare("rl", [measured(tmp_path, "a", 0, samples_of([1])), *runs])


def test_compare_nothing_graded_names_variant_and_seed(tmp_path: Path) -> None:
    runs = [measured(tmp_path, "a", 0, samples_of([1])), measured(tmp_path, "b", 3, samples_of([1], graded=False))]
    with pytest.raises(DataError, match="b, seed 3: none of the 4 samples of sums thinking could be graded"):
        compare("rl", runs)


# ---- stored and printed


def line(variant: str, mode: str = "thinking", **other: Any) -> Line:
    fields: dict[str, Any] = {"seeds": (0, 1, 2), "benchmark": "sums", "n_problems": 128, "n_samples": 1536, "mean": 0.41, "low": 0.35}
    fields |= {"high": 0.47, "seed_means": (0.4, 0.42, 0.41), "difference": None, "difference_low": None, "difference_high": None}
    fields |= {"p_value": None, "p_adjusted": None, "verdict": "baseline", "tokens": 1_234_567, "seconds": 312.4}
    return Line(**{**fields, "variant": variant, "mode": mode, **other})


def verdict_of(verdict: str, difference: float, p_adjusted: float) -> dict[str, Any]:
    ends = {"difference_low": difference - 0.04, "difference_high": difference + 0.04}
    return {"verdict": verdict, "difference": difference, "p_value": p_adjusted / 4, "p_adjusted": p_adjusted, **ends}


def example(**other: Any) -> Comparison:
    lines = [
        line("loss=grpo", **other),
        line("loss=dapo, mix=[a,b]", **verdict_of("better", 0.12, 0.0004), **other),
        line("loss=cispo, learning_rate=3e-06", **verdict_of("worse", -0.08, 0.012), **other),
        line("loss=grpo", "non_thinking", **other),
        line("loss=dapo, mix=[a,b]", "non_thinking", **verdict_of("not distinguishable", -0.001, 0.7), **other),
        line("loss=grpo", "budget_32", **other),
        line("loss=dapo, mix=[a,b]", "budget_32", **verdict_of("not distinguishable", 0.02, 1.0), **other),
        line("loss=dapo, mix=[a,b]", benchmark="legs", verdict="not compared", **other),
    ]
    return Comparison("reasoning_rl", "loss=grpo", tuple(lines))


def test_comparison_survives_json_and_holds_numbers(tmp_path: Path) -> None:
    comparison = compare("rl", [measured(tmp_path, name, seed, samples_of([1, 3])) for name in "ab" for seed in (0, 1)])
    assert Comparison.from_json(json.loads(json.dumps(comparison.to_json(), allow_nan=False))) == comparison
    assert Comparison.from_json(json.loads(json.dumps(example().to_json()))) == example()
    assert all(math.isfinite(one.mean) for one in comparison.rows)


@pytest.mark.parametrize("content", [{}, {"stage": "rl", "baseline": "a", "rows": [{"variant": "a"}]}, {"stage": "rl", "rows": 3}])
def test_comparison_from_json_of_another_shape_is_an_error(content: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="not a comparison of this version"):
        Comparison.from_json(content)


def test_render_shows_scores_changes_verdicts_seeds_and_costs() -> None:
    text = printed(example())
    assert "sums: pass@1 and 95 % interval of variants of reasoning_rl (128 problems, 4 samples for each seed)" in text
    flat = [re.sub(r"\s+", " ", row).strip() for row in text.splitlines()]
    assert "loss=grpo 0.41 [0.35, 0.47] baseline 0.41 [0.35, 0.47] baseline" in flat
    assert "1,234,567 tokens, 312 s seeds 0.40 0.42 0.41 seeds 0.40 0.42 0.41" in flat
    assert "loss=dapo, mix=[a,b] 0.41 [0.35, 0.47] +0.12 [+0.08, +0.16] 0.41 [0.35, 0.47] +0.00 [-0.04, +0.04]" in flat
    assert "1,234,567 tokens, 312 s seeds 0.40 0.42 0.41 better (p < 0.001) seeds 0.40 0.42 0.41 not distinguishable" in flat
    assert "1,234,567 tokens, 312 s seeds 0.40 0.42 0.41 worse (p = 0.012)" in flat
    assert "+0.02 not distinguishable" in flat  # of the budgets
    assert "1,234,567 tokens, 312 s seeds 0.40 0.42 0.41" in flat
    assert any("not compared" in row for row in flat)
    assert "p-values are Holm-adjusted over 4 comparisons; baseline: loss=grpo" in flat
    assert "the means of the seeds show whether the next training would agree" in text


def test_render_one_seed_leaves_the_means_of_seeds_out() -> None:
    text = printed(example(seeds=(0,), seed_means=(0.41,), n_samples=512))
    assert "(128 problems, 4 samples each)" in text
    assert "seeds 0" not in text
    assert "more seeds would show the spread" in text


@pytest.mark.parametrize("width", [120, 160])
def test_render_fits_the_terminal_without_cutting(width: int) -> None:
    text = printed(example(), width)
    assert max(len(row) for row in text.splitlines()) <= width
    assert "…" not in text
    assert "0.41 [0.35, 0.47]" in text


def test_stored_comparison_prints_without_heavy_imports() -> None:
    code = (
        "import sys; from flows.scores.comparison import Comparison; from rich.console import Console; "
        f"Comparison.from_json({example().to_json()!r}).render(Console()); "
        "heavy = ('scipy', 'matplotlib', 'pyarrow', 'numpy', 'torch', 'prefect', 'mlflow', 'duckdb'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    assert output.stdout.strip().splitlines()[-1] == "[]"
