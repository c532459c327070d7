"""What a recipe claims about its stages, and whether several seeds of it bear that out.

A claim stands in the recipe under `claims`. It is judged on the evaluations of the recipe run with
several seeds: each seed has its own problems, data order, rollouts and samples. Problems are paired
and pooled over the seeds; `effects` shows each seed by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field, model_validator

from stages.config import Settings

if TYPE_CHECKING:
    from rich.console import Console

Mode = Literal["thinking", "non_thinking"]


class Claim(Settings):
    """One sentence about two scores, or one rate."""

    kind: Literal["better", "not_worse", "preferred", "flag_followed"] = Field(
        description="`better`: higher pass@1, p < 0.05. `not_worse`: pass@1 not below the other's 95 % interval. "
        "`preferred`: win rate over one half, p < 0.05. `flag_followed`: rate of at least `at_least`."
    )
    stage: str = Field(description="The stage the claim is about.")
    than: str | None = Field(None, description="The stage it is compared with; not used by `flag_followed`.")
    benchmark: str | None = Field(None, description="Benchmark of the scores; for `better` and `not_worse`.")
    mode: Mode = Field("thinking", description="Mode of `stage`'s score.")
    than_mode: Mode = Field("thinking", description="Mode of `than`'s score.")
    at_least: float | None = Field(None, ge=0, le=1, description="Lowest rate that bears out `flag_followed`.")

    @model_validator(mode="after")
    def _is_whole(self) -> Claim:
        if (self.kind == "flag_followed") != (self.than is None) or (self.kind == "flag_followed") != (self.at_least is not None):
            raise ValueError(
                f"a claim of kind {self.kind} needs {'at_least and no than' if self.kind == 'flag_followed' else 'than and no at_least'}"
            )
        if (self.kind in ("better", "not_worse")) != (self.benchmark is not None):
            raise ValueError(f"a claim of kind {self.kind} needs {'a' if self.benchmark is None else 'no'} benchmark")
        return self

    def __str__(self) -> str:
        if self.kind == "flag_followed":
            return f"{self.stage} follows /think and /no_think in at least {self.at_least:.0%} of answers"
        if self.kind == "preferred":
            return f"{self.stage} is preferred to {self.than}"
        verb = "beats" if self.kind == "better" else "does not fall beyond the interval of"
        return f"{self.stage} ({self.mode}) {verb} {self.than} ({self.than_mode}) on {self.benchmark}"


class Finding(NamedTuple):
    """What the seeds say of a claim."""

    claim: Claim
    holds: bool
    effects: tuple[float, ...]
    """Per seed: difference in pass@1, win rate minus one half, or rate."""
    value: float
    """The same, pooled over problems and seeds."""
    low: float
    high: float
    """95 % interval of `value`."""
    p_value: float | None
    n: int
    """Problem-seeds."""


def judge(claim: Claim, samples: Sequence[Mapping[str, Path]]) -> Finding:
    """Judge a claim on one mapping a seed, from stage to its `samples.parquet`.

    Raises DataError when two evaluations share no problem.
    """
    from flows.scores.ablation import SIGNIFICANCE, paired_differences, pooled_test, preference_differences, problem_scores, score_interval

    if claim.kind == "flag_followed":
        followed = [_flags(seed[claim.stage]) for seed in samples]
        pooled = [value for seed in followed for value in seed]
        low, high = score_interval(pooled, len(pooled))
        rate = math.fsum(pooled) / len(pooled)
        effects = tuple(math.fsum(seed) / len(seed) for seed in followed)
        return Finding(claim, rate >= (claim.at_least or 0.0), effects, rate, low, high, None, len(pooled))
    assert claim.than is not None
    if claim.kind == "preferred":
        differences = [preference_differences(seed[claim.than], seed[claim.stage]) for seed in samples]
    else:
        assert claim.benchmark is not None
        differences = [
            paired_differences(seed[claim.than], seed[claim.stage], claim.benchmark, claim.than_mode, after_mode=claim.mode)
            for seed in samples
        ]
    test = pooled_test(differences)
    if claim.kind == "not_worse":
        assert claim.benchmark is not None
        before = [score for seed in samples for score in problem_scores(seed[claim.than], claim.benchmark, claim.than_mode)]
        width = math.fsum(before) / len(before) - score_interval(before, len(before))[0]
        holds = test.difference >= -width
    else:
        holds = test.difference > 0 and test.p_value < SIGNIFICANCE
    return Finding(claim, holds, test.effects, test.difference, test.low, test.high, test.p_value, test.n_problems)


def render(findings: Sequence[Finding], console: Console) -> None:
    """Print one line a claim: whether it holds, the pooled effect with interval and p, and each seed's effect."""
    from rich.table import Table

    table = Table("claim", "holds", "pooled effect", "p", "n", "each seed", title="Claims over all seeds", title_justify="left")
    for finding in findings:
        table.add_row(
            str(finding.claim),
            "[green]yes[/green]" if finding.holds else "[bold red]NO[/bold red]",
            f"{finding.value:+.3f} [{finding.low:+.3f}, {finding.high:+.3f}]".replace("[", "\\["),
            "" if finding.p_value is None else f"{finding.p_value:.4f}",
            str(finding.n),
            "  ".join(f"{effect:+.3f}" for effect in finding.effects),
        )
    console.print(table)


def _flags(path: Path) -> list[float]:
    from flows.scores.ablation import FLAG_MODES, read_samples

    return [float(row["flag_followed"]) for row in read_samples(path).to_pylist() if row["mode"] in FLAG_MODES]
