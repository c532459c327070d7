"""Which problems a step of RL takes: orders over success rates, and how rollouts change those rates.

Pure: standings go in, draws come out. A step's draws depend on standings, step and seed alone, so a run
that is resumed with the same standings goes on with the same problems.

Papers    Kimi k1.5 (arXiv 2501.12599) 2.3.4: easy to hard; in proportion to 1 - success rate; uniform warm-up,
          then only hard problems. s1 (arXiv 2501.19393): a topic first, then a problem of it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stages.config import CurriculumConfig
from stages.errors import DataError
from stages.problems import seed_of

UNKNOWN_RATE = 0.5
"""Starting rate of a problem that was never tried: the mean of a uniform prior."""


class Standing(NamedTuple):
    """What is known of one problem."""

    start: float
    """Success rate at the start (`pass_rates`)."""
    rate: float
    """Success rate now."""
    right: int = 0
    """Right rollouts so far."""
    tries: int = 0
    """Rollouts so far."""
    retired: bool = False


class Draw(NamedTuple):
    """One problem of a step."""

    problem: int
    """Its place in the pool."""
    weight: float
    """What its chance was in proportion to; 1 where the order leaves no chance."""
    rate: float
    """Its success rate at that moment; 0.5 when nothing is known."""
    why: str


class Curriculum(NamedTuple):
    """The pool and the rules, fixed for a run."""

    config: CurriculumConfig
    topics: Sequence[str]
    """One a problem."""
    steps: int
    per_step: int
    seed: int

    @property
    def is_plain(self) -> bool:
        """All problems in turn, whatever their rates."""
        return self.config.order == "uniform" and self._takes_turns

    @property
    def _takes_turns(self) -> bool:
        return not self.config.balance_topics and self.config.retire_at is None

    def start(self, rates: Sequence[float | None]) -> tuple[Standing, ...]:
        """Standings before the first step.

        Raises DataError when an order needs a rate that is not there and that rollouts will not give.
        """
        missing = sum(rate is None for rate in rates)
        if missing and not self.config.live and self.config.order != "uniform":
            raise DataError(
                f"{missing} of {len(rates)} problems have no pass_rate; the order {self.config.order} needs one; "
                "read `pass_rates.band`, or set curriculum.live: true to learn the rates from the rollouts"
            )
        known = [UNKNOWN_RATE if rate is None else rate for rate in rates]
        return tuple(Standing(rate, rate) for rate in known)

    def observe(self, standings: Sequence[Standing], results: Mapping[int, tuple[int, int]]) -> tuple[Standing, ...]:
        """Standings after a step; `results` holds right and all rollouts by problem."""
        if not self.config.live:
            return tuple(standings)
        return tuple(self._after(standing, *results[index]) if index in results else standing for index, standing in enumerate(standings))

    def choose(self, standings: Sequence[Standing], step: int) -> list[Draw]:
        """The `per_step` problems of a step. `step` counts from 0.

        All different, but for one case: where problems are taken in turn and a pass ends within a step, the
        next pass may begin with one that the step holds already.
        """
        if self._is_uniform(step) and self._takes_turns:
            return self._in_turn(standings, step)
        if self.config.order == "easy_to_hard":
            return self._by_rank(standings, step)
        weights = [0.0 if standing.retired else self.weight(standing, step) for standing in standings]
        if self.config.balance_topics:
            totals: dict[str, float] = {}
            for topic, weight in zip(self.topics, weights, strict=True):
                totals[topic] = totals.get(topic, 0.0) + weight
            weights = [weight / (totals[topic] or 1.0) for topic, weight in zip(self.topics, weights, strict=True)]
        generator = random.Random(seed_of(self.seed, "curriculum", step))
        drawn = draw(weights, self.per_step, generator)
        draws = [Draw(index, weights[index], standings[index].rate, self._why(standings[index], step)) for index in drawn]
        return draws + self._fill(standings, drawn, self.per_step - len(drawn), generator)

    def weight(self, standing: Standing, step: int) -> float:
        """What a problem's chance at a step is in proportion to, before topics are balanced."""
        config = self.config
        if config.order == "prioritised":
            return 1.0 - standing.rate
        if config.order == "band":
            return float(config.band[0] <= standing.rate <= config.band[1])
        if config.order == "warmup_then_hard" and not self._is_uniform(step):
            return float(standing.rate < config.hard_below)
        return 1.0

    def _is_uniform(self, step: int) -> bool:
        return self.config.order == "uniform" or (self.config.order == "warmup_then_hard" and step < self.config.uniform_steps)

    def _why(self, standing: Standing, step: int) -> str:
        config, name = self.config, self.config.order
        if self._is_uniform(step):
            text = "uniform" if name == "uniform" else f"{name}: uniform until step {config.uniform_steps}"
        elif name == "prioritised":
            text = f"prioritised: 1 - {standing.rate:.4g}"
        elif name == "band":
            text = f"band: {standing.rate:.4g} in [{config.band[0]:g}, {config.band[1]:g}]"
        else:
            text = f"{name}: {standing.rate:.4g} below {config.hard_below:g}"
        return f"{text}, topics balanced" if config.balance_topics else text

    def _after(self, standing: Standing, right: int, tries: int) -> Standing:
        config = self.config
        all_right, all_tries = standing.right + right, standing.tries + tries
        if config.update == "counts":
            rate = (config.prior_tries * standing.start + all_right) / (config.prior_tries + all_tries)
        else:
            rate = standing.rate + config.update_rate * (right / tries - standing.rate)
        mastered = config.retire_at is not None and rate >= config.retire_at and all_tries >= config.retire_after
        return Standing(standing.start, rate, all_right, all_tries, standing.retired or mastered)

    def _in_turn(self, standings: Sequence[Standing], step: int) -> list[Draw]:
        """Pass after pass over all problems, each pass in an order of its own."""
        first, size = step * self.per_step, len(standings)
        orders: dict[int, list[int]] = {}
        draws = []
        for slot in range(first, first + self.per_step):
            number, place = divmod(slot, size)
            if number not in orders:
                orders[number] = random.Random(seed_of(self.seed, "order", number)).sample(range(size), size)
            index = orders[number][place]
            draws.append(Draw(index, 1.0, standings[index].rate, f"{self.config.order}: pass {number + 1}, all in turn"))
        return draws

    def _by_rank(self, standings: Sequence[Standing], step: int) -> list[Draw]:
        """A window over the problems from the highest rate to the lowest, which moves to the end in the last step."""
        generator = random.Random(seed_of(self.seed, "ties"))
        ties = [generator.random() for _ in standings]
        active = [index for index, standing in enumerate(standings) if not standing.retired]
        ranked = sorted(active, key=lambda index: (-standings[index].rate, ties[index]))
        start = round(step / max(1, self.steps - 1) * max(0, len(ranked) - self.per_step))
        chosen = ranked[start : start + self.per_step]
        draws = [
            Draw(index, 1.0, standings[index].rate, f"easy_to_hard: rank {start + place + 1} of {len(ranked)}")
            for place, index in enumerate(chosen)
        ]
        return draws + self._fill(standings, chosen, self.per_step - len(chosen), generator)

    def _fill(self, standings: Sequence[Standing], taken: Sequence[int], missing: int, generator: random.Random) -> list[Draw]:
        """Others for the places that an order cannot fill: active ones first, then mastered ones, each by chance."""
        draws: list[Draw] = []
        for retired in (False, True):
            others = [index for index, standing in enumerate(standings) if standing.retired == retired and index not in taken]
            count = min(missing - len(draws), len(others))
            why = f"fill: {self.config.order} has {len(taken)} for {self.per_step} places{', so mastered ones return' if retired else ''}"
            draws += [Draw(index, 0.0, standings[index].rate, why) for index in generator.sample(others, count)]
        return draws


def draw(weights: Sequence[float], count: int, generator: random.Random) -> list[int]:
    """`count` different indices, each with a chance of exactly count * weight / sum of weights; fewer when fewer have a weight.

    Systematic sampling over a shuffled order: one random start, equal strides. An index whose chance
    would pass 1 is taken for certain, and the rest share the places that are left.
    """
    open_ = [index for index, weight in enumerate(weights) if weight > 0]
    if len(open_) <= count:
        return open_
    certain: list[int] = []
    while True:
        stride = math.fsum(weights[index] for index in open_) / (count - len(certain))
        above = [index for index in open_ if weights[index] >= stride]
        if not above:
            break
        certain += above
        open_ = [index for index in open_ if weights[index] < stride]
        if len(certain) == count:
            return certain
    generator.shuffle(open_)
    drawn: list[int] = []
    total, mark = 0.0, generator.random() * stride
    for index in open_:
        total += weights[index]
        if total > mark and len(drawn) < count - len(certain):
            drawn.append(index)
            mark += stride
    if len(drawn) < count - len(certain):  # rounding left the last mark a hair above the total
        drawn.append(next(index for index in reversed(open_) if index not in drawn))
    return certain + drawn
