"""Variants of one stage, compared on the same benchmark problems: variant x benchmark x mode against a baseline.

The problem is the unit, as in the ablation table. A problem's score is the share of its graded samples
that are right, averaged over the seeds that a variant was trained with; problems that are graded in
every one of these seeds count. A variant and the baseline are paired by problem, the differences are
tested by flipping their signs, and the p-values of the whole table are adjusted together by Holm's
method, so that the chance of one false verdict in it is at most 0.05.

The test speaks about these trained models on problems like these. Training seeds are fixed in it, not
sampled: whether the next training would agree is what the means of the seeds show.

Light: scipy and pyarrow are imported where they are used, so a stored comparison prints at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from flows.scores.ablation import (
    MODE_LABELS,
    MODES,
    RESAMPLES,
    SIGNIFICANCE,
    difference_interval,
    empty_table,
    p_value_text,
    read_samples,
    score_interval,
    score_order,
    score_text,
    sign_flip_p_value,
    tally_samples,
)
from stages.errors import DataError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Verdict = Literal["baseline", "better", "worse", "not distinguishable", "not compared"]
_Score = tuple[str, str]
"""Benchmark and mode."""


class Measured(NamedTuple):
    """One evaluation of one variant that was trained with one seed."""

    variant: str
    """For instance `loss=dr_grpo`. The variant given first is the baseline."""
    seed: int
    samples: Path
    """The `samples.parquet` of the evaluation."""
    tokens: int
    """Tokens of the stage that made the model."""
    seconds: float
    """Wall time of the stage that made the model."""


class Line(NamedTuple):
    """One variant on one benchmark in one mode."""

    variant: str
    seeds: tuple[int, ...]
    """The seeds that were evaluated on this benchmark in this mode, in the order given."""
    benchmark: str
    mode: str
    """`thinking`, `non_thinking` or `budget_<tokens>`."""
    n_problems: int
    """Problems with a graded sample in every seed."""
    n_samples: int
    """Graded samples of these problems, all seeds together."""
    mean: float
    """pass@1, problems weighing equally; also the mean of `seed_means`."""
    low: float
    high: float
    """95 % interval of `mean`."""
    seed_means: tuple[float, ...]
    """pass@1 of each seed on the same problems."""
    difference: float | None
    """Mean change against the baseline on the problems both have; None where there is no test."""
    difference_low: float | None
    difference_high: float | None
    """95 % interval of `difference`, of this line alone: not widened for the number of lines."""
    p_value: float | None
    """Two-sided sign-flip permutation test of `difference`."""
    p_adjusted: float | None
    """`p_value` after Holm's adjustment for all tests of the comparison."""
    verdict: Verdict
    """`better` or `worse` when `p_adjusted` < 0.05; `not compared` when the baseline was not evaluated here."""
    tokens: int
    """Tokens of a training run of the variant, mean over its seeds."""
    seconds: float
    """Wall time of a training run of the variant, mean over its seeds."""


class Comparison(NamedTuple):
    """Variants of one stage; rows by benchmark and mode, then in the order the variants were given."""

    stage: str
    baseline: str
    rows: tuple[Line, ...]

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain JSON values."""
        rows = [line._asdict() | {"seeds": list(line.seeds), "seed_means": list(line.seed_means)} for line in self.rows]
        return {"stage": self.stage, "baseline": self.baseline, "rows": rows}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Comparison:
        """The comparison that `to_json` was called on.

        Raises DataError when the content is not such a comparison.
        """
        try:
            rows = [Line(**{**row, "seeds": tuple(row["seeds"]), "seed_means": tuple(row["seed_means"])}) for row in content["rows"]]
            return cls(content["stage"], content["baseline"], tuple(rows))
        except (KeyError, TypeError) as error:
            raise DataError(f"not a comparison of this version ({error}); delete the stored comparison and compare again") from error

    def render(self, console: Console) -> None:
        """Print one table a benchmark, one of thinking budgets when there are any, and what the p-values stand for."""
        for benchmark in dict.fromkeys(line.benchmark for line in self.rows):
            lines = [line for line in self.rows if line.benchmark == benchmark]
            if scored := [line for line in lines if line.mode in MODES]:
                console.print(_score_table(self.stage, scored))
            if budgets := [line for line in lines if line.mode not in MODES]:
                console.print(_budget_table(self.stage, budgets))
        tests = sum(line.p_value is not None for line in self.rows)
        several = any(len(line.seeds) > 1 for line in self.rows)
        console.print(
            f"p-values are Holm-adjusted over {tests} comparison{'s' if tests > 1 else ''}; baseline: {self.baseline}\n"
            "The tests speak about these trained models; "
            + ("the means of the seeds show whether the next training would agree." if several else "more seeds would show the spread."),
            markup=False,
            highlight=False,
        )


class _Scores(NamedTuple):
    """One variant on one benchmark in one mode."""

    seeds: tuple[int, ...]
    seed_means: tuple[float, ...]
    problems: Mapping[str, float]
    """Score of each problem, averaged over the seeds."""
    n_samples: int


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted so that rejecting those below a level keeps the chance of any false rejection at that level.

    Holm (1979), Scandinavian Journal of Statistics 6:65. It holds however the tests depend on one another.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def compare(stage: str, measured: Sequence[Measured]) -> Comparison:
    """Compare the variants of a stage with the one given first.

    Variants may have different numbers of seeds. Raises DataError when there are fewer than two
    variants, when one is given twice with the same seed, when a variant shares no graded problem with
    the baseline, or a seed none with the other seeds of its variant, and when samples cannot be read.
    """
    by_variant: dict[str, list[Measured]] = {}
    for one in measured:
        by_variant.setdefault(one.variant, []).append(one)
    if len(by_variant) < 2:
        raise DataError(f"{stage}: {len(by_variant)} variant to compare ({', '.join(by_variant) or 'none'}); give at least two")
    (twice, count), *_ = Counter((one.variant, one.seed) for one in measured).most_common(1)
    if count > 1:
        raise DataError(f"{stage}: {twice[0]} is given {count} times with seed {twice[1]}; give each variant once a seed")
    scores = {variant: _scores(runs) for variant, runs in by_variant.items()}
    baseline = next(iter(scores))
    differences = _differences(scores, baseline)
    # enough flips for the smallest p-value to stay well below 0.05 when the largest table is adjusted
    resamples = max(RESAMPLES, 200 * len(differences) - 1)
    p_values = {line: sign_flip_p_value(changes, resamples=resamples) for line, changes in differences.items()}
    adjusted = dict(zip(p_values, holm(list(p_values.values())), strict=True))

    def line_of(variant: str, score: _Score) -> Line:
        runs, scored, changes = by_variant[variant], scores[variant][score], differences.get((variant, score))
        means = list(scored.problems.values())
        low, high = score_interval(means, scored.n_samples)
        difference = math.fsum(changes) / len(changes) if changes else None
        ends = difference_interval(changes) if changes else (None, None)
        p_adjusted = adjusted.get((variant, score))
        verdict: Verdict = "baseline" if variant == baseline else "not compared"
        if difference is not None and p_adjusted is not None:
            verdict = "not distinguishable" if p_adjusted >= SIGNIFICANCE else "better" if difference > 0 else "worse"
        return Line(
            variant=variant,
            seeds=scored.seeds,
            benchmark=score[0],
            mode=score[1],
            n_problems=len(means),
            n_samples=scored.n_samples,
            mean=math.fsum(means) / len(means),
            low=low,
            high=high,
            seed_means=scored.seed_means,
            difference=difference,
            difference_low=ends[0],
            difference_high=ends[1],
            p_value=p_values.get((variant, score)),
            p_adjusted=p_adjusted,
            verdict=verdict,
            tokens=round(sum(run.tokens for run in runs) / len(runs)),
            seconds=math.fsum(run.seconds for run in runs) / len(runs),
        )

    found = sorted(dict.fromkeys(score for of_variant in scores.values() for score in of_variant), key=score_order)
    rows = tuple(line_of(variant, score) for score in found for variant in scores if score in scores[variant])
    return Comparison(stage, baseline, rows)


def _scores(runs: Sequence[Measured]) -> dict[_Score, _Scores]:
    """The scores of one variant, by benchmark and mode."""
    tallies = {run.seed: tally_samples(f"{run.variant}, seed {run.seed}", read_samples(run.samples)) for run in runs}
    scores: dict[_Score, _Scores] = {}
    for score in dict.fromkeys(score for of_seed in tallies.values() for score in of_seed):
        graded = {
            seed: {problem: tally for problem, tally in of_seed[score].items() if tally.graded}
            for seed, of_seed in tallies.items()
            if score in of_seed
        }
        problems = sorted(set.intersection(*(set(of_seed) for of_seed in graded.values())))
        if not problems:
            raise DataError(
                f"{runs[0].variant}: no problem of {' '.join(score)} is graded in each of the seeds {sorted(graded)}; "
                "evaluate all seeds on the same problems"
            )
        scores[score] = _Scores(
            seeds=tuple(graded),
            seed_means=tuple(math.fsum(of_seed[problem].mean for problem in problems) / len(problems) for of_seed in graded.values()),
            problems={problem: math.fsum(of_seed[problem].mean for of_seed in graded.values()) / len(graded) for problem in problems},
            n_samples=sum(of_seed[problem].graded for of_seed in graded.values() for problem in problems),
        )
    return scores


def _differences(scores: Mapping[str, Mapping[_Score, _Scores]], baseline: str) -> dict[tuple[str, _Score], list[float]]:
    """Per-problem differences to the baseline, by variant, benchmark and mode; a variant without any is an error."""
    differences: dict[tuple[str, _Score], list[float]] = {}
    for variant in list(scores)[1:]:
        shared = [score for score in scores[variant] if score in scores[baseline]]
        if not shared:
            raise DataError(f"{variant} and {baseline} share no benchmark in one mode; evaluate both alike")
        for score in shared:
            before, after = scores[baseline][score].problems, scores[variant][score].problems
            differences[variant, score] = [after[problem] - before[problem] for problem in sorted(before.keys() & after.keys())]
            if not differences[variant, score]:
                raise DataError(f"{variant} and {baseline} share no graded problem in {' '.join(score)}; evaluate both alike")
    return differences


# ---- print ----------------------------------------------------------------------------------


def _score_table(stage: str, lines: Sequence[Line]) -> Table:
    """One benchmark, both modes; a row has a variant with its cost, its score with the seeds' means, its change with the verdict."""
    modes = list(dict.fromkeys(line.mode for line in lines))
    table = empty_table(f"{lines[0].benchmark}: pass@1 and 95 % interval of variants of {stage}{_sizes(lines)}")
    table.add_column("variant", overflow="fold")
    for mode in modes:
        table.add_column(MODE_LABELS[mode], min_width=len("0.00 [0.00, 0.00]"))
        table.add_column("change from baseline", no_wrap=True)
    for of_variant in _by_variant(lines):
        one = next(iter(of_variant.values()))
        cost = f"[dim]{one.tokens:,} tokens, {one.seconds:.0f} s[/dim]"
        found = [of_variant.get(mode) for mode in modes]
        table.add_row(f"{_name(one)}\n{cost}", *(text for line in found for text in (_with_seeds(line), _with_interval(line))))
    return table


def _budget_table(stage: str, lines: Sequence[Line]) -> Table:
    budgets = list(dict.fromkeys(line.mode for line in lines))
    table = empty_table(f"{lines[0].benchmark}: pass@1 of variants of {stage} by thinking budget, in tokens{_sizes(lines)}")
    table.add_column("variant", overflow="fold")
    for budget in budgets:
        table.add_column(budget.removeprefix("budget_"))
    for of_variant in _by_variant(lines):
        table.add_row(_name(next(iter(of_variant.values()))), *(_with_verdict(of_variant.get(budget)) for budget in budgets))
    return table


def _by_variant(lines: Sequence[Line]) -> list[dict[str, Line]]:
    """The lines of each variant, by mode."""
    variants: dict[str, dict[str, Line]] = {}
    for line in lines:
        variants.setdefault(line.variant, {})[line.mode] = line
    return list(variants.values())


def _sizes(lines: Sequence[Line]) -> str:
    problems = max(line.n_problems for line in lines)
    samples = max(line.n_samples / line.n_problems / len(line.seeds) for line in lines)
    each = "for each seed" if any(len(line.seeds) > 1 for line in lines) else "each"
    return f" ({problems} problems, {samples:.0f} samples {each})"


def _name(line: Line) -> str:
    return line.variant.replace("[", "\\[")


def _with_seeds(line: Line | None) -> str:
    if line is None:
        return ""
    seeds = " ".join(f"{mean:.2f}" for mean in line.seed_means)
    return score_text(line.mean, line.low, line.high) + (f"\n[dim]seeds {seeds}[/dim]" if len(line.seeds) > 1 else "")


def _with_interval(line: Line | None) -> str:
    if line is None:
        return ""
    change = "" if line.difference is None else f"{line.difference:+z.2f} \\[{line.difference_low:+z.2f}, {line.difference_high:+z.2f}]\n"
    return change + _verdict(line)


def _with_verdict(line: Line | None) -> str:
    if line is None:
        return ""
    change = "" if line.difference is None else f"{line.difference:+z.2f} "
    return f"{score_text(line.mean, line.low, line.high)}\n{change}{_verdict(line)}"


def _verdict(line: Line) -> str:
    if line.p_adjusted is None or line.p_adjusted >= SIGNIFICANCE:
        return f"[dim]{line.verdict}[/dim]"
    colour = "green" if line.verdict == "better" else "red"
    return f"[{colour}]{line.verdict} ({p_value_text(line.p_adjusted)})[/{colour}]"
