"""How often does another grader disagree? A seeded sample of grades is given to math-verify alone.

math-verify reads LaTeX with an ANTLR grammar, builds sympy objects and compares them symbolically: it shares no code
with `equivalence`, which reads with its own grammar and compares values. Each has faults of its own, so
a small rate is normal (on the shipped pairs it is math-verify's); one that rises points at a fault, or at a policy
that found one. Grades that `equivalence` had from math-verify are left out: they would agree by construction.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from stages.rewards.equivalence import LIBRARY
from stages.rewards.grading import Grade, Verdict
from stages.rewards.pool import Job, Pool


class Graded(NamedTuple):
    """An answer as it stands in the box, its gold answer, and what the first grader said."""

    answer: str
    gold: str
    grade: Grade


class Disagreement(NamedTuple):
    """One answer that the two graders see differently."""

    graded: Graded
    second: Grade


class SecondOpinion(NamedTuple):
    """What the second grader said of a sample."""

    sampled: int
    compared: int
    """Those that the second grader could read."""
    disagreements: tuple[Disagreement, ...]

    @property
    def rate(self) -> float | None:
        """Disagreements per compared grade; None when nothing could be compared."""
        return len(self.disagreements) / self.compared if self.compared else None


def second_opinion(graded: Sequence[Graded], pool: Pool, *, share: float, seed: int) -> SecondOpinion:
    """Let math-verify grade a `share` (0 to 1, rounded up) of the decided grades, drawn by `seed`, in order."""
    decided = [item for item in graded if item.grade.verdict is not Verdict.NOT_GRADED and not item.grade.reason.startswith(LIBRARY)]
    drawn = sorted(random.Random(seed).sample(range(len(decided)), math.ceil(share * len(decided))))
    sample = [decided[index] for index in drawn]
    opinions = pool.grade([Job(math_verify_grade, (item.answer, item.gold)) for item in sample])
    pairs = [(item, second) for item, second in zip(sample, opinions, strict=True) if second.verdict is not Verdict.NOT_GRADED]
    differing = tuple(Disagreement(item, second) for item, second in pairs if item.grade.verdict is not second.verdict)
    return SecondOpinion(len(sample), len(pairs), differing)


def math_verify_grade(answer: str, gold: str) -> Grade:
    """math-verify by itself, from text to verdict. Run it in a pool: its own time limit, a Unix alarm, is off.

    A gold answer that it cannot read is not graded. One of which it reads only a part is graded by that part.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that we switch its alarm off
    marked = (text if text.startswith(("$", r"\(")) else f"${text}$" for text in (gold, answer))
    wanted, given = (parse(text, parsing_timeout=None) for text in marked)
    if not wanted:
        return Grade(Verdict.NOT_GRADED, "math-verify cannot read the gold answer")
    if not given:
        return Grade(Verdict.WRONG, "math-verify cannot read the answer")
    right = verify(wanted, given, timeout_seconds=None)
    return Grade(Verdict.RIGHT, "same") if right else Grade(Verdict.WRONG, "different")
