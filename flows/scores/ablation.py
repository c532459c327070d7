"""The ablation table: stage x benchmark x mode, each score with its error and a paired test against the stage before.

A score is pass@1: the mean over problems of the share of right samples, so the problem is the unit
(Miller 2024, arXiv 2411.00640: samples of one problem are a cluster). Samples that could not be
graded leave the denominator and are counted. Two stages are compared on the same problems: the
per-problem differences are tested by flipping their signs, and p >= 0.05 prints as `not
distinguishable`. P-values are per cell and not adjusted for the number of cells.

Light: scipy, matplotlib and pyarrow are imported where they are used, so a stored table prints at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stages.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.axes import Axes
    from rich.console import Console
    from rich.table import Table

LEVEL = 0.95
SIGNIFICANCE = 0.05
RESAMPLES = 9_999
"""Sign flips drawn for a p-value; the smallest p-value is then 0.0002. At most 13 differences are flipped exhaustively."""
MODES = ("thinking", "non_thinking")
FLAG_MODES = ("flag_think", "flag_no_think")
_COLUMNS = (
    "benchmark",
    "mode",
    "problem_id",
    "sample",
    "graded",
    "correct",
    "format_ok",
    "flag_followed",
    "tokens",
    "finish",
    "preference",
)
_COLOURS = {"thinking": "#0072B2", "non_thinking": "#D55E00"}
MODE_LABELS = {"thinking": "thinking", "non_thinking": "non-thinking"}


class Cell(NamedTuple):
    """One stage on one benchmark in one mode."""

    benchmark: str
    mode: str
    """`thinking`, `non_thinking` or `budget_<tokens>`."""
    mean: float
    """pass@1 over graded samples, problems weighing equally."""
    low: float
    high: float
    """95 % interval of `mean`."""
    n_problems: int
    """Problems with a graded sample."""
    n_samples: int
    """Graded samples."""
    difference: float | None = None
    """Mean change against the stage before on the problems both have; None without a stage before."""
    p_value: float | None = None
    """Two-sided sign-flip permutation test of `difference`."""
    tokens_mean: float = 0.0
    """Tokens of a completion, all samples."""
    standard_error: float = 0.0
    """Over problems: standard deviation of their means / sqrt(n_problems)."""
    difference_low: float | None = None
    difference_high: float | None = None
    """95 % interval of `difference`."""
    not_graded: int = 0
    """Samples left out because they could not be graded."""
    solved: float = 0.0
    """pass@n: share of problems with at least one right sample."""


class Row(NamedTuple):
    """One stage. Rates are over the thinking and non-thinking samples of all benchmarks."""

    node: str
    parent: str | None
    """The stage before: the node whose model this one started from."""
    cells: tuple[Cell, ...]
    format_rate: float
    """Share of replies in the mode asked for, with one boxed answer."""
    flag_rate: float | None
    """Share of replies that follow `/think` or `/no_think`; None when not asked."""
    preference_win_rate: float | None
    """Share of samples the synthetic annotator prefers to the stage before's on the same problem; ties count half."""
    preference_p: float | None
    """Two-sided sign-flip test of the win rate against one half, problems as clusters."""
    tokens: int
    """Tokens the stage generated and trained on."""
    seconds: float
    """Wall time of the stage."""
    stop_rate: float = 1.0
    """Share of completions that end by the stop token and not at the length limit."""


class AblationTable(NamedTuple):
    """The table of a recipe run; rows in order of running."""

    rows: tuple[Row, ...]

    def to_json(self) -> list[dict[str, Any]]:
        """Rows as plain JSON values, cells nested."""
        return [row._asdict() | {"cells": [cell._asdict() for cell in row.cells]} for row in self.rows]

    @classmethod
    def from_json(cls, content: Iterable[Mapping[str, Any]]) -> AblationTable:
        """The table that `to_json` was called on.

        Raises DataError when the content is not such a table.
        """
        try:
            return cls(tuple(Row(**{**row, "cells": tuple(Cell(**cell) for cell in row["cells"])}) for row in content))
        except (KeyError, TypeError) as error:
            raise DataError(f"not an ablation table of this version ({error}); delete the stored table and run the recipe again") from error

    def render(self, console: Console) -> None:
        """Print one table a benchmark, one of thinking budgets when there are any, and one of rates and costs."""
        scores = _by_score(self.rows)
        for benchmark in dict.fromkeys(benchmark for benchmark, _ in scores):
            console.print(_score_table(self.rows, benchmark, [mode for name, mode in scores if name == benchmark and mode in MODES]))
            budgets = [mode for name, mode in scores if name == benchmark and mode.startswith("budget_")]
            if budgets:
                console.print(_budget_table(self.rows, benchmark, budgets))
        console.print(_rate_table(self.rows))


class PooledTest(NamedTuple):
    """A paired comparison over several seeds of a recipe."""

    effects: tuple[float, ...]
    """Mean difference of each seed."""
    difference: float
    """Mean over all problem-seeds."""
    low: float
    high: float
    """95 % interval of `difference`."""
    p_value: float
    n_problems: int
    """Problem-seeds."""


# ---- statistics -----------------------------------------------------------------------------


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased chance that k of n samples, c of them right, hold a right one (arXiv 2107.03374): 1 - C(n-c, k) / C(n, k).

    Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k of n={n}, c={c}, k={k}: the rule is 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def standard_error(means: Sequence[float]) -> float:
    """Of the mean over problems, each problem's mean being one observation; 0 for a single problem."""
    if len(means) < 2:
        return 0.0
    centre = math.fsum(means) / len(means)
    return math.sqrt(math.fsum((mean - centre) ** 2 for mean in means) / (len(means) - 1) / len(means))


def score_interval(means: Sequence[float], n_samples: int) -> tuple[float, float]:
    """95 % interval of the mean over problems of per-problem means in [0, 1].

    Wilson's interval on the effective number of samples, that is the number of independent ones that
    would give the clustered standard error (Korn and Graubard 1998), with Student's t for the number of
    problems. The plain mean +- 2 standard errors has width 0 when every answer is wrong, and leaves [0, 1] near
    its ends; the bootstrap has the first fault too. The effective number is kept between the number of
    problems - 1 (samples of a problem all alike) and of samples (independent); when the error is 0
    with all answers right, or all wrong, nothing is known about the clusters and it is the number of problems.
    """
    from scipy.stats import t

    problems, mean, error = len(means), math.fsum(means) / len(means), standard_error(means)
    if 0 < mean < 1:
        effective = min(mean * (1 - mean) / error**2 if error else math.inf, n_samples)
        effective = max(effective, problems - 1, 1)
    else:
        effective = problems
    quantile = float(t.ppf((1 + LEVEL) / 2, problems - 1)) if problems > 1 else 12.706  # one problem: t with one degree of freedom
    shrink = 1 + quantile**2 / effective
    centre = (mean + quantile**2 / (2 * effective)) / shrink
    half = quantile / shrink * math.sqrt(mean * (1 - mean) / effective + quantile**2 / (4 * effective**2))
    return min(mean, max(0.0, centre - half)), max(mean, min(1.0, centre + half))  # rounding must not leave the mean outside


def difference_interval(differences: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of paired per-problem differences in [-1, 1].

    Agresti and Min (2005): half a pair is added to each cell of the paired table, that is one
    difference of +1, -1 (half each) and one of 0, so that equal scores on all problems do not give width 0.
    """
    quantile = 1.959964
    n = len(differences) + 2
    mean = math.fsum(differences) / n
    variance = (math.fsum(difference**2 for difference in differences) + 1) / n - mean**2
    half = quantile * math.sqrt(variance / n)
    return max(-1.0, mean - half), min(1.0, mean + half)


def sign_flip_p_value(differences: Sequence[float], *, resamples: int = RESAMPLES) -> float:
    """Two-sided p-value of "the paired differences have mean 0", by flipping their signs.

    The same differences give the same p-value (the flips are drawn from a fixed seed). Differences of
    0 do not change under a flip and are left out.
    """
    import numpy as np
    from scipy.stats import permutation_test

    moved = np.array([difference for difference in differences if difference != 0.0])
    if len(moved) < 2:
        return 1.0  # nothing moved, or one problem, whose two signs are equally extreme
    test = permutation_test(
        (moved,),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples,
        batch=1_000,
        alternative="two-sided",
        rng=np.random.default_rng(0),
    )
    return min(1.0, float(test.pvalue))


def pooled_test(per_seed: Sequence[Sequence[float]]) -> PooledTest:
    """Compare two stages over several seeds of a recipe; one list of paired per-problem differences a seed.

    The differences of all seeds are flipped together, so the p-value speaks about these trained models
    on problems like these; whether the next seed would agree is what `effects` shows.

    Raises ValueError when a seed has no differences.
    """
    if not per_seed or not all(per_seed):
        sizes = [len(seed) for seed in per_seed]
        raise ValueError(f"pooled test of {sizes} differences a seed: the rule is at least one; evaluate every seed")
    pooled = [difference for seed in per_seed for difference in seed]
    low, high = difference_interval(pooled)
    return PooledTest(
        effects=tuple(math.fsum(seed) / len(seed) for seed in per_seed),
        difference=math.fsum(pooled) / len(pooled),
        low=low,
        high=high,
        p_value=sign_flip_p_value(pooled),
        n_problems=len(pooled),
    )


# ---- from samples to the table --------------------------------------------------------------


class Tally(NamedTuple):
    """The samples of one problem."""

    samples: int
    graded: int
    right: int
    tokens: int

    @property
    def mean(self) -> float:
        """Share of the graded samples that are right; there must be one."""
        return self.right / self.graded


Tallies = dict[tuple[str, str], dict[str, Tally]]
"""Benchmark and mode, to problem, to its samples."""


def ablation_table(rows: Sequence[tuple[str, str | None, Path, float, int]]) -> AblationTable:
    """Make the table from each row's node, stage before (or None), `samples.parquet`, seconds and tokens.

    Raises DataError when a file cannot be read, has no samples, or has a benchmark and mode with
    nothing graded.
    """
    tables = {node: read_samples(path) for node, _, path, _, _ in rows}
    tallies = {node: tally_samples(node, table) for node, table in tables.items()}
    return AblationTable(
        tuple(
            _row(node, parent if parent in tables else None, tables, tallies, seconds, tokens)._replace(parent=parent)
            for node, parent, _, seconds, tokens in rows
        )
    )


def read_samples(path: Path) -> pa.Table:
    """The columns of a `samples.parquet` that scores are made of.

    Raises DataError when the file cannot be read or is empty.
    """
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.ParquetFile(path).read(columns=list(_COLUMNS))
    except (OSError, ValueError, ArrowException) as error:
        raise DataError(f"{path} cannot be read as evaluation samples ({error}); delete its stage folder and run again") from error
    missing = [column for column in _COLUMNS if column not in table.column_names]
    if missing or not table.num_rows:
        fault = f"has no column {missing[0]!r}" if missing else "has no samples"
        raise DataError(f"{path} {fault}; the rule is one row a sample; delete its stage folder and run again")
    return table


def paired_differences(before: Path, after: Path, benchmark: str, mode: str, *, after_mode: str | None = None) -> list[float]:
    """Per-problem change of pass@1 between two `samples.parquet`, on the problems graded in both; for `pooled_test`.

    `after_mode` is the mode of `after` when it is not `mode`.

    Raises DataError when they share no problem in that benchmark and mode.
    """
    first = tally_samples(str(before), read_samples(before)).get((benchmark, mode), {})
    second = tally_samples(str(after), read_samples(after)).get((benchmark, after_mode or mode), {})
    differences = _differences(first, second)
    if not differences:
        raise DataError(f"{before} and {after} share no graded problem in {benchmark} {mode}; compare evaluations of one recipe and seed")
    return differences


def problem_scores(path: Path, benchmark: str, mode: str) -> list[float]:
    """Per-problem pass@1 of a `samples.parquet`, over the problems with a graded sample."""
    return [tally.mean for tally in tally_samples(str(path), read_samples(path)).get((benchmark, mode), {}).values() if tally.graded]


def preference_differences(before: Path, after: Path) -> list[float]:
    """Per-problem win rate of `after` over `before`, minus one half; for `pooled_test`.

    Raises DataError when they share no sample with a preference.
    """
    differences = [rate - 0.5 for rate in _win_rates(read_samples(before), read_samples(after))]
    if not differences:
        raise DataError(f"{before} and {after} share no sample with a preference; compare evaluations of one recipe and seed")
    return differences


def _row(node: str, parent: str | None, tables: Mapping[str, pa.Table], tallies: Mapping[str, Tallies], seconds: float, tokens: int) -> Row:
    before: Tallies = tallies[parent] if parent else {}
    cells = tuple(_cell(score, tallies[node][score], before.get(score, {})) for score in sorted(tallies[node], key=score_order))
    rates = _win_rates(tables[parent], tables[node]) if parent else []
    return Row(
        node=node,
        parent=parent,
        cells=cells,
        format_rate=_rate(tables[node], MODES, lambda row: row["format_ok"]) or 0.0,
        flag_rate=_rate(tables[node], FLAG_MODES, lambda row: row["flag_followed"]),
        preference_win_rate=math.fsum(rates) / len(rates) if rates else None,
        preference_p=sign_flip_p_value([rate - 0.5 for rate in rates]) if rates else None,
        tokens=tokens,
        seconds=seconds,
        stop_rate=_rate(tables[node], MODES, lambda row: row["finish"] == "stop") or 0.0,
    )


def _cell(score: tuple[str, str], problems: Mapping[str, Tally], before: Mapping[str, Tally]) -> Cell:
    graded = [tally for tally in problems.values() if tally.graded]
    means = [tally.mean for tally in graded]
    n_samples = sum(tally.graded for tally in graded)
    all_samples = sum(tally.samples for tally in problems.values())
    low, high = score_interval(means, n_samples)
    differences = _differences(before, problems)
    ends: tuple[float | None, float | None] = difference_interval(differences) if differences else (None, None)
    return Cell(
        benchmark=score[0],
        mode=score[1],
        mean=math.fsum(means) / len(means),
        low=low,
        high=high,
        n_problems=len(graded),
        n_samples=n_samples,
        difference=math.fsum(differences) / len(differences) if differences else None,
        p_value=sign_flip_p_value(differences) if differences else None,
        tokens_mean=sum(tally.tokens for tally in problems.values()) / all_samples,
        standard_error=standard_error(means),
        difference_low=ends[0],
        difference_high=ends[1],
        not_graded=all_samples - n_samples,
        solved=sum(pass_at_k(tally.graded, tally.right, tally.graded) for tally in graded) / len(graded),
    )


def tally_samples(name: str, table: pa.Table) -> Tallies:
    """Count samples by benchmark, mode and problem; flag modes are left to the flag rate.

    `name` says whose samples they are, in the DataError of a benchmark and mode with nothing graded.
    """
    from pyarrow import compute

    graded = compute.fill_null(table["graded"], False)
    counted = table.append_column("n_graded", compute.cast(graded, "int64")).append_column(
        "n_right", compute.cast(compute.and_(graded, compute.fill_null(table["correct"], False)), "int64")
    )
    groups = counted.group_by(["benchmark", "mode", "problem_id"], use_threads=False).aggregate(
        [("n_graded", "sum"), ("n_graded", "count"), ("n_right", "sum"), ("tokens", "sum")]
    )
    tallies: Tallies = {}
    for group in groups.sort_by([("benchmark", "ascending"), ("mode", "ascending"), ("problem_id", "ascending")]).to_pylist():
        if group["mode"] not in FLAG_MODES:
            tally = Tally(group["n_graded_count"], group["n_graded_sum"], group["n_right_sum"], group["tokens_sum"])
            tallies.setdefault((group["benchmark"], group["mode"]), {})[group["problem_id"]] = tally
    for (benchmark, mode), problems in tallies.items():
        if not any(tally.graded for tally in problems.values()):
            raise DataError(
                f"{name}: none of the {sum(tally.samples for tally in problems.values())} samples of {benchmark} {mode} could be graded; "
                "a score needs at least one; look at the column `reason` of its samples"
            )
    return tallies


def _differences(before: Mapping[str, Tally], after: Mapping[str, Tally]) -> list[float]:
    shared = [(before[problem], tally) for problem, tally in after.items() if problem in before]
    return [second.mean - first.mean for first, second in shared if first.graded and second.graded]


def _win_rates(before: pa.Table, after: pa.Table) -> list[float]:
    """Per benchmark and problem: share of samples whose preference beats that of the same sample before, ties half."""
    scores: dict[tuple[str, str, str, int], float] = {}
    for row in before.to_pylist():
        if row["mode"] in MODES and row["preference"] is not None:
            scores[row["benchmark"], row["mode"], row["problem_id"], row["sample"]] = row["preference"]
    wins: dict[tuple[str, str], list[float]] = {}
    for row in after.to_pylist():
        old = scores.get((row["benchmark"], row["mode"], row["problem_id"], row["sample"]))
        new = row["preference"]
        if old is not None and new is not None:
            wins.setdefault((row["benchmark"], row["problem_id"]), []).append(0.5 if new == old else float(new > old))
    return [math.fsum(problem) / len(problem) for _, problem in sorted(wins.items())]


def _rate(table: pa.Table, modes: Sequence[str], holds: Callable[[Mapping[str, Any]], bool]) -> float | None:
    found = [bool(holds(row)) for row in table.to_pylist() if row["mode"] in modes]
    return sum(found) / len(found) if found else None


def score_order(score: tuple[str, str]) -> tuple[str, int, int]:
    """Where a benchmark and mode stands in a table: thinking, non-thinking, then the budgets from small to large."""
    benchmark, mode = score
    budget = mode.removeprefix("budget_")
    return benchmark, MODES.index(mode) if mode in MODES else len(MODES), int(budget) if budget.isdigit() else 0


# ---- print ----------------------------------------------------------------------------------


def _by_score(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, Cell]]:
    """Benchmark and mode, to node, to cell; in order of first appearance."""
    scores: dict[tuple[str, str], dict[str, Cell]] = {}
    for row in rows:
        for cell in row.cells:
            scores.setdefault((cell.benchmark, cell.mode), {})[row.node] = cell
    return scores


def _score_table(rows: Sequence[Row], benchmark: str, modes: Sequence[str]) -> Table:
    scores = _by_score(rows)
    table = empty_table(f"{benchmark}: pass@1 and 95 % interval{_sizes(scores, benchmark, modes)}")
    table.add_column("stage", no_wrap=True)
    for mode in modes:
        table.add_column(MODE_LABELS[mode], no_wrap=True)
        table.add_column("change from the stage before", no_wrap=True)
    for row in rows:
        cells = [scores[benchmark, mode].get(row.node) for mode in modes]
        table.add_row(row.node, *(text for cell in cells for text in (_score(cell), _change(cell))))
    return table


def _budget_table(rows: Sequence[Row], benchmark: str, budgets: Sequence[str]) -> Table:
    scores = _by_score(rows)
    table = empty_table(f"{benchmark}: pass@1 by thinking budget, in tokens{_sizes(scores, benchmark, budgets)}")
    table.add_column("stage", no_wrap=True)
    for budget in budgets:
        table.add_column(budget.removeprefix("budget_"), no_wrap=True)
    for row in rows:
        table.add_row(row.node, *(_score(scores[benchmark, budget].get(row.node)) for budget in budgets))
    return table


def _rate_table(rows: Sequence[Row]) -> Table:
    lengths = {mode: {row.node: _mean([cell.tokens_mean for cell in row.cells if cell.mode == mode]) for row in rows} for mode in MODES}
    table = empty_table("rates and costs")
    table.add_column("stage", no_wrap=True)
    table.add_column("before", no_wrap=True)
    for name in ("format", "flag", "stops", "preferred", "tokens\nthink", "tokens\ndirect", "not\ngraded", "stage\ntokens", "seconds"):
        narrowest = len("distinguishable") if name == "preferred" else None
        table.add_column(name, justify="right", no_wrap=narrowest is None, min_width=narrowest)
    for row in rows:
        table.add_row(
            row.node,
            row.parent or "",
            _percent(row.format_rate),
            _percent(row.flag_rate),
            _percent(row.stop_rate),
            _preferred(row),
            *(f"{length:.0f}" if (length := lengths[mode][row.node]) is not None else "" for mode in MODES),
            str(sum(cell.not_graded for cell in row.cells)),
            f"{row.tokens:,}",
            f"{row.seconds:.0f}",
        )
    return table


def empty_table(title: str) -> Table:
    """A table for the terminal, in the one style of all of ours."""
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1))


def _sizes(scores: Mapping[tuple[str, str], Mapping[str, Cell]], benchmark: str, modes: Sequence[str]) -> str:
    cells = [cell for mode in modes for cell in scores[benchmark, mode].values()]
    problems, samples = max(cell.n_problems for cell in cells), max(cell.n_samples / cell.n_problems for cell in cells)
    return f" ({problems} problems, {samples:.0f} samples each)"


def _score(cell: Cell | None) -> str:
    return "" if cell is None else score_text(cell.mean, cell.low, cell.high)


def _change(cell: Cell | None) -> str:
    if cell is None or cell.difference is None or cell.p_value is None:
        return ""
    if cell.p_value >= SIGNIFICANCE:
        return f"[dim]{cell.difference:+.2f} not distinguishable[/dim]"
    colour = "green" if cell.difference > 0 else "red"
    return f"[{colour}]{cell.difference:+.2f} ({p_value_text(cell.p_value)})[/{colour}]"


def _preferred(row: Row) -> str:
    if row.preference_win_rate is None or row.preference_p is None:
        return ""
    test = p_value_text(row.preference_p) if row.preference_p < SIGNIFICANCE else "not distinguishable"
    return f"{row.preference_win_rate:.0%} {test}"


def score_text(mean: float, low: float, high: float) -> str:
    """A score with its interval, in rich's markup."""
    return f"{mean:.2f} \\[{low:.2f}, {high:.2f}]"


def p_value_text(value: float) -> str:
    """A p-value as tables print it."""
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def _percent(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.0%}"


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


# ---- draw -----------------------------------------------------------------------------------


def draw(table: AblationTable, path_png: Path) -> None:
    """Write the figure: one panel a benchmark, pass@1 with 95 % intervals over stages, both modes.

    A line joins a stage with the stage before it. A filled point differs from the stage before (p < 0.05).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    scores = _by_score(table.rows)
    benchmarks = list(dict.fromkeys(benchmark for benchmark, mode in scores if mode in MODES))
    width = max(4.2, 0.85 * len(table.rows) + 1.2)
    figure = Figure(figsize=(width * max(1, len(benchmarks)), 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, max(1, len(benchmarks)), sharey=True, squeeze=False)[0]
    for axes, benchmark in zip(panels, benchmarks, strict=False):
        _draw_panel(axes, table.rows, benchmark, scores)
    panels[0].set_ylabel("pass@1")
    figure.legend(handles=_legend(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path_png)


def _draw_panel(axes: Axes, rows: Sequence[Row], benchmark: str, scores: Mapping[tuple[str, str], Mapping[str, Cell]]) -> None:
    place = {row.node: index for index, row in enumerate(rows)}
    modes = [mode for mode in MODES if (benchmark, mode) in scores]
    for offset, mode in zip((-0.09, 0.09), modes, strict=False):
        cells, colour = scores[benchmark, mode], _COLOURS[mode]
        for row in rows:
            if row.node not in cells:
                continue
            cell, x = cells[row.node], place[row.node] + offset
            if row.parent in cells and row.parent is not None:
                straight = place[row.node] - place[row.parent] == 1
                axes.plot(
                    [place[row.parent] + offset, x],
                    [cells[row.parent].mean, cell.mean],
                    color=colour,
                    zorder=2,
                    linewidth=1.6 if straight else 0.9,
                    linestyle="-" if straight else (0, (2, 3)),
                    alpha=0.8 if straight else 0.5,
                )
            axes.errorbar(
                x,
                cell.mean,
                yerr=[[max(0.0, cell.mean - cell.low)], [max(0.0, cell.high - cell.mean)]],
                color=colour,
                capsize=3,
                linewidth=1.2,
                zorder=3,
            )
            differs = cell.p_value is not None and cell.p_value < SIGNIFICANCE
            axes.plot(x, cell.mean, "o", color=colour, markersize=6, markerfacecolor=colour if differs else "white", zorder=4)
            other = [scores[benchmark, name][row.node].mean for name in modes if name != mode and row.node in scores[benchmark, name]]
            above = not other or cell.mean > other[0] or (cell.mean == other[0] and mode == MODES[0])
            axes.annotate(
                f"{cell.mean:.2f}",
                (x, cell.high if above else cell.low),
                (0, 3 if above else -3),
                textcoords="offset points",
                ha="center",
                va="bottom" if above else "top",
                fontsize=7,
                color=colour,
            )
    sizes = _sizes(scores, benchmark, modes)
    axes.set_title(f"{benchmark.replace('_', ' ')}{sizes}", fontsize=9, loc="left")
    axes.set_xticks(range(len(rows)), [row.node.replace("_", " ") for row in rows], rotation=30, ha="right", fontsize=8)
    axes.set_xlim(-0.5, len(rows) - 0.5)
    axes.set_ylim(-0.08, 1.08)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D

    modes = [Line2D([], [], color=_COLOURS[mode], marker="o", label=MODE_LABELS[mode]) for mode in MODES]
    grey: dict[str, Any] = {"color": "#555555", "linestyle": "none", "marker": "o"}
    return [
        *modes,
        Line2D([], [], **grey, label="differs from the stage before (p < 0.05)"),
        Line2D([], [], **grey, markerfacecolor="white", label="not distinguishable, or first"),
    ]
