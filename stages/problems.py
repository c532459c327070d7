"""Problems with checkable answers from reasoning-gym, with worked traces a tiny model can follow.

reasoning-gym writes the question, the answer and the scorer; this file adds what it lacks: the
chain of thought of a careful pupil (one fact a line, no spaces inside a fact, so that a line costs
few tokens). A trace is what cold start and base pretraining learn from.

Trap: reasoning-gym seeds item i of a data set with `seed + i`, so two data sets whose seeds are
closer than their sizes share items. `seed_of` spreads the seeds; curation still checks for overlap.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

FAMILIES = ("chain_sum", "leg_counting", "products")

RESPONSE_STYLES = (
    "\\boxed{{{answer}}}",
    "Answer: \\boxed{{{answer}}}",
    "The answer is \\boxed{{{answer}}}.",
    "The answer is \\boxed{{{answer}}}. I hope this helps!",
)
"""Ways to state a final answer, tersest first; the preference stages learn to tell them apart."""


class Problem(NamedTuple):
    """One question with its gold answer. `trace` is the worked chain of thought, without think tags."""

    question: str
    answer: str
    family: str
    trace: str
    scale: int
    """Number of terms, animals or factors: the length of the chain a solver needs."""


def seed_of(*parts: object) -> int:
    """A seed that is far from the seed of any other parts (63 bits of SHA-256)."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def exact(result: int) -> int:
    """The pupil who never slips."""
    return result


def generate(family: str, size: int, seed: int, *, slip: Callable[[int], int] = exact, **parameters: Any) -> Iterator[Problem]:
    """Yield `size` problems of a reasoning-gym family.

    `slip` is applied to the result of every line of a trace: a careless pupil's trace goes on from the
    wrong number, and `answer` is what it ends in. Without it `answer` is reasoning-gym's own.

    Raises KeyError for a family without a worked trace, and whatever reasoning-gym raises for
    parameters out of its bounds.
    """
    import reasoning_gym

    solve = _SOLVERS[family]
    for entry in reasoning_gym.create_dataset(family, size=size, seed=seed, **parameters):
        trace, result, scale = solve(entry["metadata"], slip)
        if slip is exact and str(result) != entry["answer"]:  # the trace must lead to reasoning-gym's own answer
            raise ValueError(f"{family}: worked trace ends in {result}, reasoning-gym says {entry['answer']}")
        yield Problem(entry["question"].strip(), str(result), family, trace, scale)


def _chain_sum(metadata: dict[str, Any], slip: Callable[[int], int]) -> tuple[str, int, int]:
    words = metadata["expression"].split()
    total, lines = int(words[0]), []
    for operator, word in zip(words[1::2], words[2::2], strict=True):
        before, total = total, slip(total + int(word) if operator == "+" else total - int(word))
        lines.append(f"{before}{operator}{word}={total}")
    return "\n".join(lines), total, 1 + len(lines)


def _leg_counting(metadata: dict[str, Any], slip: Callable[[int], int]) -> tuple[str, int, int]:
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    total, lines = 0, []
    for position, (animal, count) in enumerate(metadata["animals"].items()):
        legs = slip(count * ANIMALS[animal])
        before, total = total, total + legs
        lines.append(f"{animal} {count}*{ANIMALS[animal]}={legs}")
        if position:
            total = slip(total)
            lines.append(f"{before}+{legs}={total}")
    return "\n".join(lines), total, len(metadata["animals"])


def _products(metadata: dict[str, Any], slip: Callable[[int], int]) -> tuple[str, int, int]:
    factors = [int(word) for word in metadata["expression"].split(" * ")]
    total, lines = factors[0], []
    for factor in factors[1:]:
        before, tens, units = total, total - total % 10, total % 10
        if tens and factor > 9:  # two digits by two digits: split the first factor
            upper, lower = slip(tens * factor), slip(units * factor)
            total = slip(upper + lower)
            lines += [f"{tens}*{factor}={upper}", f"{units}*{factor}={lower}", f"{upper}+{lower}={total}"]
        else:
            total = slip(total * factor)
            lines.append(f"{before}*{factor}={total}")
    return "\n".join(lines), total, len(factors)


_SOLVERS = {"chain_sum": _chain_sum, "leg_counting": _leg_counting, "products": _products}
