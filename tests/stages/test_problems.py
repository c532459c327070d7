"""Problems from reasoning-gym and the worked traces added to them."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from stages.problems import FAMILIES, RESPONSE_STYLES, generate, seed_of

SETTINGS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 6, "min_digits": 1, "max_digits": 2},
    "leg_counting": {"min_animals": 1, "max_animals": 5, "max_instances": 15},
    "products": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
}
FACT = re.compile(r"(?:[a-z ]+ )?(-?\d+)([-+*])(\d+)=(-?\d+)")


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_every_line_of_a_trace_is_a_true_fact(family: str) -> None:
    for problem in generate(family, 200, 5, **SETTINGS[family]):
        for line in problem.trace.splitlines():
            match = FACT.fullmatch(line)
            assert match, line
            left, operator, right, result = match.groups()
            expected = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[operator]
            assert int(result) == expected, line
        assert problem.trace.splitlines()[-1].endswith(f"={problem.answer}")


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_same_seed_gives_the_same_problems(family: str) -> None:
    first, again, other = (list(generate(family, 30, seed, **SETTINGS[family])) for seed in (11, 11, 12345))
    assert first == again
    assert first != other


def test_generate_chain_sum_trace_follows_the_terms_from_left_to_right() -> None:
    problem = next(item for item in generate("chain_sum", 200, 0, **SETTINGS["chain_sum"]) if item.scale == 4)
    expression = problem.question.removeprefix("State the final answer to the following arithmetic problem: ").removesuffix(" =")
    terms = expression.split()
    first, second, third = problem.trace.splitlines()
    assert first.startswith(f"{terms[0]}{terms[1]}{terms[2]}=")
    assert second.startswith(f"{first.split('=')[1]}{terms[3]}{terms[4]}=")
    assert third.startswith(f"{second.split('=')[1]}{terms[5]}{terms[6]}=")


def test_generate_scale_counts_terms_animals_and_factors() -> None:
    for problem in generate("chain_sum", 50, 1, **SETTINGS["chain_sum"]):
        assert problem.scale == 1 + len(re.findall(r" [-+] ", problem.question))
    for problem in generate("leg_counting", 50, 1, **SETTINGS["leg_counting"]):
        assert problem.scale == len(re.findall(r"\d+ [a-z]", problem.question))
    for problem in generate("products", 50, 1, **SETTINGS["products"]):
        assert problem.scale == 1 + problem.question.count(" * ")


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_with_slips_goes_on_from_the_wrong_number(family: str) -> None:
    exact = list(generate(family, 50, 2, **SETTINGS[family]))
    careless = list(generate(family, 50, 2, slip=lambda result: result + 1, **SETTINGS[family]))
    for right, wrong in zip(exact, careless, strict=True):
        assert (wrong.question, wrong.scale) == (right.question, right.scale)
        assert wrong.answer != right.answer
        assert wrong.trace.splitlines()[-1].endswith(f"={wrong.answer}")
        numbers = [line.split("=") for line in wrong.trace.splitlines()]
        if family == "chain_sum":
            assert all(later[0].startswith(earlier[1]) for earlier, later in itertools.pairwise(numbers))


def test_generate_unknown_family_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        list(generate("sudoku", 1, 0))


def test_seed_of_is_stable_and_far_apart() -> None:
    assert seed_of(0, "train", 0) == 3045923764044904352
    seeds = sorted(seed_of(0, part, index) for part in ("train", "benchmark") for index in range(500))
    assert len(set(seeds)) == 1000
    assert min(b - a for a, b in itertools.pairwise(seeds)) > 1_000_000  # reasoning-gym seeds item i with seed + i
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seed_of_parts_are_not_run_together() -> None:
    assert seed_of("ab", "c") != seed_of("a", "bc")


def test_response_styles_hold_exactly_one_boxed_answer() -> None:
    for style in RESPONSE_STYLES:
        assert re.findall(r"\\boxed\{(-?\d+)\}", style.format(answer="-12")) == ["-12"]
