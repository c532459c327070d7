"""Claims are judged by the samples, in both directions."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from pydantic import ValidationError

from flows.scores.claims import Claim, judge


def evaluation(path: Path, share: float, *, preference: float = 1.0, flags: float = 1.0, problems: int = 60, samples: int = 4) -> Path:
    """Samples of a stage that answers right in `share` of the problems, spread evenly, and follows the flag in `flags` of them."""
    rows = []
    for mode in ("thinking", "non_thinking", "flag_think", "flag_no_think"):
        for problem in range(problems):
            right = (problem * 7919 % problems) < share * problems
            rows += [
                {
                    "benchmark": "arithmetic",
                    "mode": mode,
                    "problem_id": f"p{problem}",
                    "sample": sample,
                    "graded": True,
                    "correct": right if mode != "non_thinking" else False,
                    "format_ok": True,
                    "flag_followed": problem < flags * problems,
                    "tokens": 10,
                    "finish": "stop",
                    "preference": preference,
                }
                for sample in range(samples)
            ]
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture
def seeds(tmp_path: Path) -> list[dict[str, Path]]:
    return [
        {
            "weak": evaluation(tmp_path / f"weak{seed}.parquet", 0.3),
            "strong": evaluation(tmp_path / f"strong{seed}.parquet", 0.6, preference=2.0, flags=0.9),
            "worse": evaluation(tmp_path / f"worse{seed}.parquet", 0.1),
        }
        for seed in range(3)
    ]


def test_claim_better_with_higher_scores_holds_with_its_effect(seeds: list[dict[str, Path]]) -> None:
    finding = judge(Claim(kind="better", stage="strong", than="weak", benchmark="arithmetic"), seeds)
    assert finding.holds
    assert finding.effects == pytest.approx((0.3, 0.3, 0.3))
    assert finding.p_value is not None
    assert finding.p_value < 0.05
    assert finding.n == 180


def test_claim_better_the_wrong_way_round_does_not_hold(seeds: list[dict[str, Path]]) -> None:
    assert not judge(Claim(kind="better", stage="weak", than="strong", benchmark="arithmetic"), seeds).holds


def test_claim_better_of_equal_scores_does_not_hold(seeds: list[dict[str, Path]]) -> None:
    assert not judge(Claim(kind="better", stage="weak", than="weak", benchmark="arithmetic"), seeds).holds


def test_claim_between_modes_of_one_stage_compares_the_modes(seeds: list[dict[str, Path]]) -> None:
    finding = judge(Claim(kind="better", stage="strong", than="strong", than_mode="non_thinking", benchmark="arithmetic"), seeds)
    assert finding.holds
    assert finding.value == pytest.approx(0.6)


def test_claim_not_worse_fails_only_past_the_interval(seeds: list[dict[str, Path]]) -> None:
    assert judge(Claim(kind="not_worse", stage="strong", than="weak", benchmark="arithmetic"), seeds).holds
    assert judge(Claim(kind="not_worse", stage="weak", than="weak", benchmark="arithmetic"), seeds).holds
    assert not judge(Claim(kind="not_worse", stage="worse", than="weak", benchmark="arithmetic"), seeds).holds


def test_claim_preferred_reads_the_annotator_not_the_grades(seeds: list[dict[str, Path]]) -> None:
    finding = judge(Claim(kind="preferred", stage="strong", than="weak"), seeds)
    assert finding.holds
    assert finding.value == pytest.approx(0.5)  # win rate 1
    assert not judge(Claim(kind="preferred", stage="worse", than="weak"), seeds).holds  # ties


def test_claim_flag_followed_is_held_to_its_rate(seeds: list[dict[str, Path]]) -> None:
    assert judge(Claim(kind="flag_followed", stage="strong", at_least=0.85), seeds).holds
    finding = judge(Claim(kind="flag_followed", stage="strong", at_least=0.95), seeds)
    assert not finding.holds
    assert finding.value == pytest.approx(0.9)


def test_claim_without_its_other_side_is_refused() -> None:
    with pytest.raises(ValidationError, match="needs than"):
        Claim(kind="better", stage="strong")
    with pytest.raises(ValidationError, match="needs at_least"):
        Claim(kind="flag_followed", stage="strong", than="weak")
