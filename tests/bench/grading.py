"""How many answers a second are graded: the pool against one process, math-verify against ours, on the same inputs.

Draws answers as models write them (half right in another form, half wrong) and grades them in rounds; in each round every way
is timed after the other, so that what else the machine does meets all alike: math-verify in this process, math-verify in
the pool, ours in this process, ours in the pool. Prints answers per second, and the median over the rounds of the ratio to
math-verify in this process, and where verdicts differ. It fails when the pool is worth less than 0.9 of its cores, or when
two verdicts differ.

    python tests/bench/grading.py [--answers 3000] [--rounds 10] [--workers N]
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from stages.rewards.equivalence import equivalent, math_pool
from stages.rewards.grading import Grade, Verdict
from stages.rewards.pool import Job, Pool
from stages.rewards.second_opinion import math_verify_grade

SHARE = 0.9
"""Of the cores that the pool must be worth."""
GRADERS: dict[str, Callable[[str, str], Grade]] = {"math-verify": math_verify_grade, "ours": equivalent}
WAYS = [(name, where) for name in GRADERS for where in ("one process", "pool")]


def draw(count: int) -> list[tuple[str, str]]:
    """Pairs of answer and gold answer."""
    rng = random.Random(0)
    return [_pair(rng, rng.choice(_KINDS), right=rng.random() < 0.5) for _ in range(count)]


def _pair(rng: random.Random, kind: Callable[[int, int, int], tuple[str, str]], *, right: bool) -> tuple[str, str]:
    a, b, c = rng.randint(2, 60), rng.randint(2, 60), rng.randint(2, 9)
    answer, gold = kind(a, b, c)
    return (answer if right else kind(a + rng.randint(1, 9), b, c)[0]), gold


def _integer(a: int, b: int, c: int) -> tuple[str, str]:
    return str(a * b), str(a * b)


def _fraction(a: int, b: int, c: int) -> tuple[str, str]:
    value = Fraction(a, 61)
    return rf"\frac{{{value.numerator * c}}}{{{value.denominator * c}}}", rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _root(a: int, b: int, c: int) -> tuple[str, str]:
    return rf"\sqrt{{{a * a * 7}}}", rf"{a}\sqrt{{7}}"


def _square(a: int, b: int, c: int) -> tuple[str, str]:
    return f"x^2+{2 * a}x+{a * a}", f"(x+{a})^2"


def _quotient(a: int, b: int, c: int) -> tuple[str, str]:
    return rf"\frac{{x+{a}}}{{{c}}}", rf"\frac{{x}}{{{c}}}+\frac{{{a}}}{{{c}}}"


def _pair_of_numbers(a: int, b: int, c: int) -> tuple[str, str]:
    return rf"\left({a}, {b}\right)", f"({a},{b})"


def _power(a: int, b: int, c: int) -> tuple[str, str]:
    return f"{a}^{{3}}", str(a**3)


def _multiple_of_pi(a: int, b: int, c: int) -> tuple[str, str]:
    return rf"\frac{{{2 * a}\pi}}{{14}}", rf"\frac{{{a}\pi}}{{7}}"


_KINDS = (_integer, _integer, _fraction, _root, _square, _quotient, _pair_of_numbers, _power, _multiple_of_pi)


def main() -> None:
    """Print the table; exit 1 when a limit is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, default=3_000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes of the pool")
    asked = parser.parse_args()
    pairs = draw(asked.answers)
    verdicts: dict[tuple[str, str], list[Grade]] = {way: [] for way in WAYS}
    seconds: dict[tuple[str, str], list[float]] = {way: [] for way in WAYS}
    size = max(1, len(pairs) // asked.rounds)
    busy, own, start_s = _busy_s(), sum(os.times()[:4]), time.perf_counter()
    with math_pool(asked.workers, seconds=20) as pool:
        for way in WAYS:  # imports and first calls
            grade(way, pairs[: 25 * asked.workers], pool)
        for start in range(0, len(pairs), size):
            for way in WAYS:
                began = time.perf_counter()
                verdicts[way] += grade(way, pairs[start : start + size], pool)
                seconds[way].append(time.perf_counter() - began)
    others = ((_busy_s() - busy) - (sum(os.times()[:4]) - own)) / (time.perf_counter() - start_s)
    worth = {way: statistics.median(serial / own for serial, own in zip(seconds[WAYS[0]], seconds[way], strict=True)) for way in WAYS}
    print(f"{len(pairs):,} answers in {len(seconds[WAYS[0]])} rounds, {asked.workers} workers, {len(os.sched_getaffinity(0))} cores")
    print(f"other programs used {max(0.0, others):.2f} cores meanwhile; the ratios are good for an idle machine only")
    print(f"{'grader':<14}{'where':<14}{'answers/s':>12}{'x serial math-verify':>22}{'x of that a worker':>20}")
    for way in WAYS:
        each = f"{worth[way] / asked.workers:.2f}" if way[1] == "pool" else ""
        print(f"{way[0]:<14}{way[1]:<14}{len(pairs) / sum(seconds[way]):>12,.0f}{worth[way]:>22.2f}{each:>20}")
    for name in GRADERS:
        assert [found.verdict for found in verdicts[name, "pool"]] == [found.verdict for found in verdicts[name, "one process"]]
    both = list(zip(pairs, verdicts["ours", "pool"], verdicts["math-verify", "one process"], strict=True))
    graded = [item for item in both if Verdict.NOT_GRADED not in (item[1].verdict, item[2].verdict)]
    differing = [item for item in graded if item[1].verdict is not item[2].verdict]
    print(f"both graded {len(graded):,} of {len(pairs):,}; verdicts differ on {len(differing)}")
    for pair, one, other in differing[:20]:
        print(f"  {pair}: ours {one.verdict}, math-verify {other.verdict}")
    least = min(worth[name, "pool"] for name in GRADERS)
    if least < SHARE * asked.workers or differing:
        sys.exit(f"missed: the pool must be worth {SHARE} x {asked.workers} serial math-verify, is {least:.2f}; no verdict may differ")


def _busy_s() -> float:
    """CPU seconds of all programs since the machine started, idle and waiting apart."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def grade(way: tuple[str, str], pairs: list[tuple[str, str]], pool: Pool) -> list[Grade]:
    """Grade the pairs one way."""
    grader = GRADERS[way[0]]
    if way[1] == "pool":
        return pool.grade([Job(grader, pair) for pair in pairs])
    return [grader(*pair) for pair in pairs]


if __name__ == "__main__":
    main()
