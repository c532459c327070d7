"""The kinds of problems that curation drops, measured on labelled problems of our own writing."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import duckdb
import pytest

from stages.config import Curation
from stages.curation import DATASETS, build, prepare
from stages.curation import load as load_rows
from stages.sources import RawRow

LABELLED = [json.loads(line) for line in (DATASETS / "exclusions_labelled.jsonl").read_text().splitlines()]
HELD = {
    "multiple choice": (95, 90),
    "true or false": (90, 90),
    "proof": (90, 90),
    "multi-part": (95, 85),
    "no checkable answer": (95, 85),
}
"""Least precision and recall of each rule, in per cent, on these problems."""


def exclusions(problems: list[dict[str, Any]], **settings: Any) -> dict[int, tuple[str, str]]:
    """Rule and evidence by row number, from 1."""
    source = {"kind": "file", "path": "unused.jsonl"}
    config = Curation.model_validate({"sources": [source], "benchmarks": {"b": [source]}, "pools": {"rl": {"share": 1}}} | settings)
    rows = [
        RawRow(0, None, "labelled", number, row["question"], row["answer"], None, "file", 0, row["question"])._replace(
            answer_type=row.get("answer_type", "text")
        )
        for number, row in enumerate(problems, 1)
    ]
    with duckdb.connect(config={"threads": 1}) as database:
        prepare(database, config, 0)
        load_rows(database, rows)
        build(database, "staging", ("stg_rows", "stg_problems"))
        build(database, "intermediate", ("int_exclusions",))
        hits = database.execute("select row_number, rule, evidence from int_exclusions").fetchall()
    return {number: (rule, evidence) for number, rule, evidence in hits}


def test_exclusions_labelled_sample_is_large_and_has_every_kind() -> None:
    counts = Counter(row["label"] for row in LABELLED)
    assert len(LABELLED) >= 120
    assert counts.keys() == {None, *HELD}
    assert min(counts.values()) >= 15
    assert len({row["question"] for row in LABELLED}) == len(LABELLED)


def test_exclusions_labelled_sample_precision_and_recall_hold() -> None:
    found = exclusions(LABELLED)
    pairs = Counter((row["label"], found[number][0] if number in found else None) for number, row in enumerate(LABELLED, 1))
    kept = sum(count for (label, _), count in pairs.items() if label is None)
    print(f"\n{'rule':<22}{'labelled':>9}{'precision':>11}{'recall':>8}")
    figures = {}
    for rule in HELD:
        right = pairs[rule, rule]
        named = sum(count for (_, given), count in pairs.items() if given == rule)
        labelled = sum(count for (label, _), count in pairs.items() if label == rule)
        figures[rule] = (100 * right / named, 100 * right / labelled)
        print(f"{rule:<22}{labelled:>9}{figures[rule][0]:>10.1f}%{figures[rule][1]:>7.1f}%")
    print(f"checkable problems kept: {pairs[None, None]} of {kept}")
    assert {rule for rule, (precision, recall) in figures.items() if precision < HELD[rule][0] or recall < HELD[rule][1]} == set()
    assert pairs[None, None] >= 0.95 * kept


@pytest.mark.parametrize("answer", ["π", "∞", "½", "∅", "±", "<", "北京", "Москва", "αλήθεια", "²", "+", "\\emptyset"])
def test_exclusions_answer_that_is_one_letter_or_sign_of_any_script_is_checkable(answer: str) -> None:
    assert exclusions([{"question": "Which is it?", "answer": answer}]) == {}


@pytest.mark.parametrize("answer", ["", "-", "—", "…", "?", "$$", "« »", "N/A"])
def test_exclusions_answer_of_marks_alone_is_not_checkable(answer: str) -> None:
    rules = [rule for rule, _ in exclusions([{"question": "Which is it?", "answer": answer}]).values()]
    assert rules == (["no checkable answer"] if answer else [])  # an empty answer is in quarantine


@pytest.mark.parametrize(
    ("answer", "dropped"),
    [
        (" ".join(f"word{letter}" for letter in "abcdefghijklmnopqrst"), True),
        (" ".join(f"word{letter}" for letter in "abcdefghijklmnopqrs"), False),
        (" ".join(map(str, range(40))), False),
        (r"\begin{pmatrix} " + r" \\ ".join([r"\cos x & a & -\sin x & b"] * 4) + r" \end{pmatrix}", False),
    ],
)
def test_exclusions_long_answer_is_one_of_words_not_of_numbers_or_commands(answer: str, dropped: bool) -> None:
    assert bool(exclusions([{"question": "Which is it?", "answer": answer}])) is dropped


@pytest.mark.parametrize(
    ("question", "answer", "rule"),
    [
        ("Plot the points (1, 2) and (3, 4).", "see figure 3", "no checkable answer"),
        ("Draw a square and label its corners.", "Figure 3", "no checkable answer"),
        ("Compute both. a. 2 + 3. b. 3 + 4.", "5; 7", "multi-part"),
        ("Compute both.\na. 2 + 3\nb. 3 + 4", "5; 7", "multi-part"),
        ("Part 1: what is 2 + 3? Part 2: what is 3 + 4?", "5 and 7", "multi-part"),
        ("Which is prime?\nA. 4\nB. 5\nC. 6", "5", "multiple choice"),
        ("Which is prime? A. 4 B. 5 C. 6", "B", "multiple choice"),
    ],
)
def test_exclusions_rules_still_meet_what_they_are_for(question: str, answer: str, rule: str) -> None:
    assert [found for found, _ in exclusions([{"question": question, "answer": answer}]).values()] == [rule]


def test_exclusions_evidence_is_what_the_rule_found() -> None:
    problems = [
        {"question": "True or false: 2 > 1.", "answer": "True"},
        {"question": "Is 91 prime?", "answer": "No"},
        {"question": "Add 2 and 3.", "answer": "5"},
        {"question": "Let n > 0. Prove that 2n > n. Then explain why it fails for 0.", "answer": "clear"},
    ]
    assert exclusions(problems) == {
        1: ("true or false", "True or false"),
        2: ("true or false", "No"),
        4: ("proof", "0. Prove that 2n > n"),
    }


def test_exclusions_only_the_kinds_asked_for_are_dropped() -> None:
    problems = [{"question": "Is 91 prime?", "answer": "No"}, {"question": "Prove that 2 > 1.", "answer": "clear"}]
    assert exclusions(problems, exclude=["proof"]).keys() == {2}
    assert exclusions(problems, exclude=[]) == {}


def test_exclusions_answer_that_checks_by_itself_is_of_no_kind_that_is_dropped() -> None:
    answer = json.dumps({"tests": [{"input": "some words of an input", "expected": "yes it is"}] * 9})
    asked = ("Write a program that prints yes or no.", "Explain the rules. Which of the following is true or false?")
    problems = [{"question": question, "answer": answer} for question in asked]
    assert sorted(exclusions(problems)) == [1, 2]
    for answer_type in ("code", "json_schema"):
        assert exclusions([row | {"answer_type": answer_type} for row in problems]) == {}
