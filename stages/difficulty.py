"""How hard a problem is for a model: the estimate from k attempts, the filters of the papers, and when sampling may stop.

Pure functions over counts. A rate is right answers over graded ones; what was not graded counts
nowhere. A filter is named after its source (arXiv numbers beside each rule).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from stages.config import PassRates, RateFilter


class RateRule(NamedTuple):
    """The pass rates that a filter keeps: from `low` to `high`, an open end left out."""

    low: float
    high: float
    low_open: bool = False
    high_open: bool = False

    def keeps(self, right: int, graded: int) -> bool:
        """Whether a problem with `right` of `graded` attempts stays; one without a graded attempt never does."""
        if not graded:
            return False
        rate = right / graded
        return (self.low < rate if self.low_open else self.low <= rate) and (rate < self.high if self.high_open else rate <= self.high)

    def __str__(self) -> str:
        return f"{'(' if self.low_open else '['}{self.low:g}, {self.high:g}{')' if self.high_open else ']'}"


class Evidence(NamedTuple):
    """What is known of one problem."""

    right: int
    graded: int
    guesses: tuple[bool, ...] = ()
    """Answers without thinking, in the order drawn: right or not."""
    first_right: bool = False
    """Whether the first attempt was right."""
    second_right: bool = False
    """Whether the second model's attempt was right."""


def beta_binomial(right: int, graded: int) -> tuple[float, float, float]:
    """Mean and central 95 % interval of the pass rate under a uniform prior: Beta(right + 1, wrong + 1)."""
    from scipy.stats import beta

    posterior = beta(right + 1, graded - right + 1)
    return float(posterior.mean()), float(posterior.ppf(0.025)), float(posterior.ppf(0.975))


def rate_rule(name: RateFilter, config: PassRates) -> RateRule:
    """The rule of a filter on the pass rate."""
    match name:
        case "band":
            return RateRule(*config.band)
        case "kimi_easy":  # arXiv 2501.12599, 2.1: the most trivial go, no number given, no cut at the hard end
            return RateRule(0, config.kimi_easy_rate, high_open=True)
        case "olmo3":  # arXiv 2512.13961: above 62.5 % of 8 goes
            return RateRule(0, config.olmo3_max_rate)
        case "skywork":  # Skywork-OR1: none right and all right go
            return RateRule(0, 1, low_open=True, high_open=True)
        case "qwen2_5_math":  # 2 to 5 of 8 stay
            return RateRule(2 / 8, 5 / 8)
        case "big_math":  # 20 to 80 % stay
            return RateRule(0.2, 0.8)


def rate_rules(config: PassRates) -> dict[str, RateRule]:
    """The rules of the filters that are switched on and look at the pass rate."""
    names: tuple[RateFilter, ...] = ("band", "kimi_easy", "olmo3", "skywork", "qwen2_5_math", "big_math")
    return {name: rate_rule(name, config) for name in names if name in config.filters}


def guess_tries(config: PassRates) -> int:
    """Answers without thinking that the filters need of each problem."""
    tries = {"kimi_guess": config.kimi_guess_tries, "qwen3_guess": config.qwen3_guess_tries}
    return max((tries[name] for name in config.filters if name in tries), default=0)


def dropped_by(evidence: Evidence, config: PassRates) -> dict[str, str]:
    """The filters that drop a problem, each with its reason; empty when the problem is kept.

    A problem without a graded attempt is dropped by `not_graded`, whatever is switched on.
    """
    if not evidence.graded:
        return {"not_graded": "no attempt could be graded"}
    found = {
        name: f"{evidence.right} of {evidence.graded} right, kept is {rule}"
        for name, rule in rate_rules(config).items()
        if not rule.keeps(evidence.right, evidence.graded)
    }
    # Kimi k1.5 (arXiv 2501.12599, 2.1): right within N guesses without chain of thought; Qwen3 (arXiv 2505.09388, 4.1): right without one
    for name, tries in (("kimi_guess", config.kimi_guess_tries), ("qwen3_guess", config.qwen3_guess_tries)):
        if name in config.filters and any(evidence.guesses[:tries]):
            found[name] = f"guess {evidence.guesses.index(True) + 1} without thinking is right, {tries} are allowed"
    if "s1" in config.filters and (evidence.first_right or evidence.second_right):  # arXiv 2501.19393: one try each, either solves
        who = [name for name, solved in (("the model", evidence.first_right), ("the second model", evidence.second_right)) if solved]
        found["s1"] = f"solved by {' and '.join(who)} at the first try"
    return found


def is_settled(rules: Iterable[RateRule], right: int, graded: int, left: int) -> bool:
    """Whether no outcome of the `left` attempts to come can change what any of the rules says.

    Every outcome is gone through: each attempt may come out right, wrong or not graded. Exact, no
    estimate; so a problem that stops here gets the decisions of full sampling.
    """
    outcomes = [(right + more, graded + more + wrong) for more in range(left + 1) for wrong in range(left + 1 - more)]
    return all(len({rule.keeps(*outcome) for outcome in outcomes}) == 1 for rule in rules) and (graded > 0 or left == 0)
