"""The SQL of curation, row by row."""

from __future__ import annotations

import tempfile
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import duckdb
import pytest
import yaml

from stages.config import Curation
from stages.curation import CONTAMINATION, DATASETS, DUPLICATES, MARTS, PROBLEMS, STAGING, build, build_problems, load, prepare
from stages.records import Recorder
from stages.sources import RawRow

WORDS = [f"w{number}" for number in range(20)]
"""A benchmark question of 20 distinct words."""


def row(question: str | None, answer: str | None = "1", *, number: int = 1, benchmark: str | None = None, **other: Any) -> RawRow:
    place: dict[str, Any] = {"pool_order": 0, "source": "train"} if benchmark is None else {"pool_order": 1, "source": benchmark}
    fields = place | {"trace": None, "family": "file", "scale": 0} | other
    return RawRow(benchmark=benchmark, row_number=number, question=question, answer=answer, row_text=str(question), **fields)


def built(
    rows: list[RawRow],
    *,
    ngram: int = 8,
    benchmark_size: int = 100,
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    **pools: Any,
) -> duckdb.DuckDBPyConnection:
    """A database with every table built from `rows`; by default all problems go to the pool `rl`."""
    source = {"kind": "file", "path": "unused.jsonl"}
    config = Curation.model_validate(
        {
            "sources": [source],
            "benchmarks": {"held_out": [source]},
            "benchmark_size": benchmark_size,
            "decontamination_ngram": ngram,
            "pools": pools or {"rl": {"share": 1}},
        }
        | (settings or {})
    )
    database = duckdb.connect(config={"threads": 1})
    prepare(database, config, seed)
    load(database, rows)
    build(database, "staging", STAGING)
    with tempfile.TemporaryDirectory() as folder:
        build_problems(database, config, Recorder(Path(folder)))
    build(database, "marts", MARTS)
    return database


LAYERS = (("staging", STAGING), ("intermediate", (*DUPLICATES, *PROBLEMS, *CONTAMINATION)), ("marts", MARTS))


def test_sql_files_in_the_tree_are_those_the_stage_runs() -> None:
    tree = {(path.parent.name, path.stem) for path in (DATASETS / "sql").rglob("*.sql")}
    assert tree == {(layer, model) for layer, models in LAYERS for model in models}


@pytest.mark.parametrize(("layer", "model"), [(layer, model) for layer, models in LAYERS for model in models])
def test_sql_file_is_one_select_with_header_and_final(layer: str, model: str) -> None:
    text = (DATASETS / "sql" / layer / f"{model}.sql").read_text()
    statements = duckdb.extract_statements(text)
    assert [statement.type for statement in statements] == [duckdb.StatementType.SELECT]
    assert text.startswith(f"-- {model}: ")
    assert "\n-- Grain: " in text
    assert text.rstrip().endswith("select * from final")


def test_contracts_cover_every_mart_and_every_column() -> None:
    contracts = yaml.safe_load((DATASETS / "contracts.yaml").read_text())
    database = built([row("a b c"), row("d e f", benchmark="held_out")])
    assert {name: list(columns) for name, columns in contracts.items()} == {name: database.table(name).columns for name in MARTS}


def test_datasets_folder_holds_no_python() -> None:
    assert list(DATASETS.rglob("*.py")) == []


def test_normalisation_case_and_white_space_give_one_problem_id() -> None:
    questions = ["What is\u00a0 2 +\t2?", "  what IS 2 +\n2? ", "what is 2 + 3?"]
    database = built([*(row(question, number=number) for number, question in enumerate(questions)), row("x", benchmark="held_out")])
    problems = database.execute("select normalised, problem_id from stg_problems where benchmark is null order by row_number").fetchall()
    assert [normalised for normalised, _ in problems] == ["what is 2 + 2?", "what is 2 + 2?", "what is 2 + 3?"]
    assert problems[0][1] == problems[1][1] == "692a9daa52e42c50"
    assert problems[2][1] != problems[0][1]


def test_quarantine_takes_bad_rows_with_their_reason() -> None:
    rows = [
        row("good"),
        row(None, number=2),
        row(" \u2003 ", number=3),
        row("q", None, number=4),
        row("q", " ", number=5),
        row(None, None, number=6)._replace(unreadable="not JSON"),
        row("x", benchmark="held_out"),
    ]
    database = built(rows)
    assert database.execute("select row_number, reason from quarantine order by row_number").fetchall() == [
        (2, "the question is missing"),
        (3, "the question is empty"),
        (4, "the answer is missing"),
        (5, "the answer is empty"),
        (6, "not JSON"),
    ]
    counts = database.execute("select row_count, bad_count, bad_share from stg_source_counts where source = 'train'").fetchall()
    assert counts == [(6, 5, 5 / 6)]


def test_staging_empty_row_id_is_no_row_id() -> None:
    rows = [row(f"q {number}", number=number, row_id=" " if number % 2 else "") for number in range(1, 5)]
    database = built([*rows, row("named", number=5, row_id=" a "), row("x", benchmark="held_out")])
    assert len(database.table("quarantine")) == 0
    assert database.execute("select row_number, row_id from pools order by row_number").fetchall() == [
        (1, None),
        (2, None),
        (3, None),
        (4, None),
        (5, "a"),
    ]


def test_duplicates_first_row_of_first_source_is_kept() -> None:
    rows = [
        row("Q one", "late", number=1, pool_order=1, source="second"),
        row("q  one", "7", number=4),
        row("q one", "7", number=5),
        row("other", number=6),
        row("x", benchmark="held_out", pool_order=2),
    ]
    database = built(rows)
    assert database.execute("select question, answer from pools order by question").fetchall() == [("other", "1"), ("q  one", "7")]
    assert database.execute("select source, row_number, rule from dropped order by source, row_number").fetchall() == [
        ("second", 1, "duplicate, other answer"),
        ("train", 5, "duplicate"),
    ]


def test_duplicates_trace_is_that_of_the_first_copy_with_one_and_the_same_answer() -> None:
    copies = [("7", None), ("8", "wrong"), ("7", "right"), ("7", "later")]
    rows = [row("q", answer, trace=trace, number=number) for number, (answer, trace) in enumerate(copies, 1)]
    database = built([*rows, row("own", trace="own", number=5), row("x", benchmark="held_out")])
    assert database.execute("select row_number, answer, trace from pools order by row_number").fetchall() == [
        (1, "7", "right"),
        (5, "1", "own"),
    ]


def shared_words(*runs: int) -> str:
    """A training question that holds runs of the benchmark's words, set apart by words of its own."""
    taken, parts = 0, ["own0", "own1"]
    for index, length in enumerate(runs):
        parts += [*WORDS[taken : taken + length], f"gap{index}", f"hole{index}"]
        taken += length + 1 if taken + length + 1 < len(WORDS) else length
    return " ".join(parts)


@pytest.mark.parametrize(
    ("runs", "any_8gram", "any_10gram", "any_13gram"),
    [
        ((7,), False, False, False),
        ((8,), True, False, False),
        ((10,), True, True, False),
        ((11,), True, True, False),
        ((13,), True, True, True),
        ((8, 8), True, False, False),
        ((5, 5, 5), False, False, False),
    ],
)
def test_decontamination_golden_rows_follow_the_any_ngram_rule(
    runs: tuple[int, ...], any_8gram: bool, any_10gram: bool, any_13gram: bool
) -> None:
    for ngram, expected in ((8, any_8gram), (10, any_10gram), (13, any_13gram)):
        database = built([row(shared_words(*runs)), row(" ".join(WORDS), benchmark="held_out")], ngram=ngram)
        assert (len(database.table("int_contamination")) == 1) is expected
        assert (len(database.table("pools")) == 0) is expected


@pytest.mark.parametrize("question", [" ".join([*WORDS[12:], "own"]), " ".join(["own", *WORDS[12:]]), " ".join(WORDS[:8])])
def test_decontamination_first_and_last_words_count(question: str) -> None:
    database = built([row(question), row(" ".join(WORDS), benchmark="held_out")])
    assert len(database.table("int_contamination")) == 1


def test_decontamination_evidence_names_both_texts_and_the_first_shared_words() -> None:
    database = built([row("Own " + " ".join(WORDS[3:14]).upper()), row(" ".join(WORDS), benchmark="held_out")])
    assert database.execute("select rule, evidence, question, benchmark, benchmark_question from contamination where drops").fetchall() == [
        ("open_r1", " ".join(WORDS[3:11]), "Own " + " ".join(WORDS[3:14]).upper(), "held_out", " ".join(WORDS)),
    ]
    assert database.execute("select rule, evidence, other_question from dropped").fetchall() == [
        ("open_r1", " ".join(WORDS[3:11]), " ".join(WORDS))
    ]


def test_decontamination_same_short_question_is_dropped_whatever_its_length() -> None:
    database = built([row("2 + 2 ="), row("2 + 3 =", number=2), row("2  +  2 =", benchmark="held_out")])
    assert database.execute("select question, rule, evidence from contamination where drops").fetchall() == [
        ("2 + 2 =", "same_question", None)
    ]
    assert database.execute("select question from pools").fetchall() == [("2 + 3 =",)]


def test_decontamination_of_generated_benchmarks_counts_only_the_problems_that_were_taken() -> None:
    generator = {"kind": "reasoning_gym", "family": "chain_sum", "size": 4}
    settings = {"benchmarks": {"held_out": [generator]}}
    made = {"benchmark": "held_out", "source": "benchmarks.held_out[0] chain_sum"}
    others = [row(f"other question {number}", number=number + 2, **made) for number in range(3)]
    rows = [row(" ".join(WORDS)), row(" ".join(WORDS) + " too", **made), *others]
    found = set()
    for seed in range(8):
        database = built(rows, benchmark_size=2, seed=seed, settings=settings)
        taken = any(question.startswith(WORDS[0]) for (question,) in database.execute("select question from benchmarks").fetchall())
        assert len(database.table("int_contamination")) == int(taken)
        found.add(taken)
    assert found == {True, False}


def test_decontamination_of_benchmarks_from_data_counts_problems_that_were_not_taken_too() -> None:
    asked = [f"question number {number} of eight" for number in range(8)]
    rows = [
        *(row(question, number=number) for number, question in enumerate([*asked, "my own"], 1)),
        *(row(question, benchmark="held_out", number=number) for number, question in enumerate(asked, 1)),
    ]
    database = built(rows, benchmark_size=2)
    assert len(database.table("benchmarks")) == 2
    assert database.execute("select question from pools").fetchall() == [("my own",)]
    assert database.execute("select distinct rule, question = other_question from dropped").fetchall() == [("same_question", True)]
    assert database.execute("select count(*) from contamination where drops and question = benchmark_question").fetchall() == [(8,)]
    counts = database.execute("select * exclude (drops, flagged) from contamination_counts where rule = 'same_question' and source = 'all'")
    assert counts.fetchall() == [("same_question", "all", "held_out", 8, 8, 8, 1.0)]


def test_decontamination_copies_of_a_benchmark_question_in_other_dress_leave_together() -> None:
    rows = [row("What is 12 + 30", "42"), row("What is 12 + 30?", "42", number=2), row("other", number=3)]
    database = built([*rows, row("What is 12 + 30?", "42", benchmark="held_out")])
    assert database.execute("select question from pools").fetchall() == [("other",)]
    assert database.execute("select row_number, rule from dropped order by row_number").fetchall() == [
        (1, "same_question"),
        (2, "duplicate"),
    ]


WORDING = "please work out with great care the value of the following sum and say it:"


def worded(numbers: list[str], **other: Any) -> list[RawRow]:
    return [row(f"{WORDING} {text} thank you", number=index + 1, family="sums", **other) for index, text in enumerate(numbers)]


def test_decontamination_wording_of_a_family_is_no_evidence() -> None:
    training = [f"{number} + {number + 1} + {number + 2} - {number} =" for number in range(20, 40)]
    held_out = [f"{number} - {number + 1} + {number + 2} + {number} =" for number in range(40, 45)]
    database = built([*worded(training), *worded(held_out, benchmark="held_out")])
    assert len(database.table("int_contamination")) == 0
    assert len(database.table("pools")) == 20


def test_decontamination_content_next_to_wording_still_counts() -> None:
    chains = [" ".join(f"{start + step} +" for step in range(9)) for start in range(100, 1100, 50)]
    database = built([*worded(chains), *worded([chains[4] + " 1 =", "1 + 2 =", "2 + 3 ="], benchmark="held_out")])
    question = f"{WORDING} {chains[4]} thank you"
    assert database.execute("select question, evidence from contamination where drops").fetchall() == [
        (question, " ".join(chains[4].split()[:8]))
    ]


def test_decontamination_wording_must_be_common_in_training_too() -> None:
    passage = [row(f"{' '.join(WORDS)} question {number}", benchmark="held_out", number=number) for number in range(5)]
    training = [row(f"plain question {number}", number=number + 2) for number in range(50)]
    database = built([row(f"{' '.join(WORDS)} my own"), *training, *passage])
    assert database.execute("select rule, evidence from contamination where drops").fetchall() == [("open_r1", " ".join(WORDS[:8]))]


def test_benchmarks_share_no_question_and_take_families_in_turn() -> None:
    rows = [row(f"apple {number}", benchmark="easy", family="fruit", number=number) for number in range(20)]
    rows += [row(f"oak {number}", benchmark="easy", family="tree", number=number + 20) for number in range(3)]
    rows += [row(f"apple {number}", benchmark="hard", family="fruit", number=number) for number in range(19, 24)]
    rows += [row("training question")]
    database = built(rows, benchmark_size=10)
    assert database.execute("select benchmark, family, count(*) from benchmarks group by all order by all").fetchall() == [
        ("easy", "fruit", 7),
        ("easy", "tree", 3),
        ("hard", "fruit", 4),
    ]
    first_six = database.execute("select family from benchmarks where benchmark = 'easy' and position <= 6").fetchall()
    assert sorted(first_six) == [("fruit",)] * 3 + [("tree",)] * 3
    assert database.execute("select benchmark from int_benchmark_candidates where question = 'apple 19'").fetchall() == [("easy",)]


def test_pools_each_family_is_dealt_in_exact_disjoint_shares() -> None:
    rows = [row(f"a {number}", family="a", number=number) for number in range(100)]
    rows += [row(f"b {number}", family="b", number=number + 100) for number in range(40)]
    rows += [row("x", benchmark="held_out")]
    database = built(rows, cold_start={"share": 0.25}, rl={"share": 0.5}, distillation={"share": 0.1})
    assert database.execute("select pool, family, count(*) from pools group by all order by all").fetchall() == [
        ("cold_start", "a", 25),
        ("cold_start", "b", 10),
        ("distillation", "a", 10),
        ("distillation", "b", 4),
        ("rl", "a", 50),
        ("rl", "b", 20),
        (None, "a", 15),
        (None, "b", 6),
    ]
    assert database.execute("select count(distinct problem_id), count(*) from pools").fetchall() == [(140, 140)]


def test_pools_another_seed_deals_other_problems() -> None:
    rows = [*(row(f"a {number}", number=number) for number in range(100)), row("x", benchmark="held_out")]
    dealt = [
        set(built(rows, seed=seed, rl={"share": 0.5}).execute("select question from pools where pool = 'rl'").fetchall())
        for seed in (0, 0, 1)
    ]
    assert dealt[0] == dealt[1]
    assert 10 < len(dealt[0] & dealt[2]) < 40


def test_pools_with_trace_takes_only_problems_that_have_one() -> None:
    rows = [row(f"a {number}", number=number, trace="work" if number % 2 else None) for number in range(40)]
    database = built([*rows, row("x", benchmark="held_out")], cold_start={"share": 0.5, "with_trace": True}, rl={"share": 0.5})
    traces = database.execute("select pool, count(*), count(trace) from pools group by pool order by pool").fetchall()
    held = {pool: (count, with_trace) for pool, count, with_trace in traces}
    assert held["cold_start"][0] == held["cold_start"][1] > 0
    assert held["rl"][0] == 20
    assert held["cold_start"][0] + held[None][0] == 20


def test_funnel_accounts_for_every_training_row() -> None:
    rows = [
        row("kept", number=1),
        row("kept", number=2),
        row("same", number=3),
        row(None, number=4),
        row(" ".join(WORDS[:9]), number=5),
        row("same", benchmark="held_out"),
        row(" ".join(WORDS), benchmark="held_out", number=2),
        row(None, benchmark="held_out", number=3),
    ]
    funnel = dict(built(rows).execute("select step, rows from funnel where family = 'all'").fetchall())
    assert funnel == {
        "read": 5,
        "quarantined": 1,
        "duplicate": 1,
        "same_question": 1,
        "open_r1": 1,
        "kept": 1,
        "pool rl": 1,
        "benchmark held_out": 2,
        "quarantined in benchmarks": 1,
    }


LONG = " ".join(f"{first}{second}" for first in "abcdef" for second in ascii_lowercase)
"""156 distinct words without a digit: long enough for one other word to leave a similarity over 0.9."""


def test_duplicates_that_differ_in_unicode_case_and_punctuation_are_one_problem() -> None:
    questions = ["Caf\u00e9: what is \u201cx\u201d, if x = 2?", "cafe\u0301 what is x if\u200b x = \uff12", "caf\u00e9 what is x if x = 3"]
    database = built([*(row(question, number=number) for number, question in enumerate(questions, 1)), row("y", benchmark="held_out")])
    assert database.execute("select row_number from pools order by row_number").fetchall() == [(1,), (3,)]
    found = database.execute("select row_number, rule, evidence, other_question from dropped").fetchall()
    assert found == [(2, "duplicate", "caf\u00e9 what is x if x = 2", questions[0])]


@pytest.mark.parametrize(
    ("one", "other"), [("What is 2\u00b3?", "What is 23?"), ("What is 5!", "What is 5?"), ("4 - 2", "4 + 2"), ("1.5 m", "15 m")]
)
def test_duplicates_another_value_is_another_problem(one: str, other: str) -> None:
    assert len(built([row(one), row(other, number=2), row("y", benchmark="held_out")]).table("pools")) == 2


def test_duplicates_answers_that_disagree_are_both_in_the_evidence() -> None:
    database = built([row("a b", "7"), row("A b.", "8", number=2), row("y", benchmark="held_out")])
    assert database.execute("select rule, evidence from dropped").fetchall() == [("duplicate, other answer", "8, before: 7")]


def test_near_duplicate_is_dropped_with_the_earlier_problem_as_evidence() -> None:
    later = LONG.replace(" cd ", " other ")
    database = built([row(LONG), row(later, number=2), row("y", benchmark="held_out")])
    rule, evidence, text = database.execute("select rule, evidence, other_question from dropped").fetchall()[0]
    assert (rule, text) == ("near duplicate", LONG)
    assert evidence.startswith("Jaccard similarity 0.9")
    assert database.execute("select question from pools").fetchall() == [(LONG,)]


@pytest.mark.parametrize(("one", "other"), [("largest", "smallest"), ("even", "odd"), ("even", "not even")])
def test_near_duplicate_with_another_answer_is_another_problem(one: str, other: str) -> None:
    questions = [LONG.replace(" cd ", f" {word} ") for word in (one, other)]
    kept = built([row(questions[0], "7"), row(questions[1], "8", number=2), row("y", benchmark="held_out")])
    assert len(kept.table("pools")) == 2
    dropped = built([row(questions[0], "7"), row(questions[1], "7", number=2), row("y", benchmark="held_out")])
    assert len(dropped.table("pools")) == 1


def test_near_duplicate_with_other_numbers_is_kept_and_reported_as_twin() -> None:
    rows = [row(f"{LONG} makes {number} apples", str(number), number=number) for number in (1, 2, 3)]
    database = built([*rows, row("y", benchmark="held_out")])
    assert len(database.table("pools")) == 3
    wording, problems, answers, first = database.execute(
        "select wording, problems, answers, first_question from numbered_twins"
    ).fetchall()[0]
    assert (problems, answers, first) == (3, 3, f"{LONG} makes 1 apples")
    assert wording.endswith("makes # apples")


def test_numbered_twins_past_the_limit_are_dropped_with_their_wording() -> None:
    rows = [row(f"{number} apples", number=number) for number in (1, 2, 3)]
    database = built([*rows, row("no number", number=4), row("y", benchmark="held_out")], settings={"twins_kept": 2})
    assert database.execute("select row_number from pools order by row_number").fetchall() == [(1,), (2,), (4,)]
    dropped = database.execute("select row_number, rule, evidence, other_question from dropped").fetchall()
    assert dropped == [(3, "other numbers", "number 3 of the wording: # apples", "1 apples")]


def test_exclusion_comes_before_duplicates_so_that_a_good_copy_survives() -> None:
    database = built([row("what is it", "N/A"), row("what is it", "7", number=2), row("y", benchmark="held_out")])
    assert database.execute("select answer from pools").fetchall() == [("7",)]
    assert database.execute("select row_number, rule, evidence from dropped").fetchall() == [(1, "no checkable answer", "N/A")]


def test_quarantine_takes_duplicate_ids_long_rows_and_answers_of_another_type() -> None:
    rows = [
        row("one", number=1, row_id="a"),
        row("two", number=2, row_id="a"),
        row("three", number=3, row_id="b"),
        row("long " * 20, number=4),
        row("four", "twelve", number=5, answer_type="number"),
        row("five", "1.5", number=6, answer_type="number"),
        row("six", "1.5", number=7, answer_type="integer"),
        row("seven", "-15", number=8, answer_type="integer"),
        row("eight", "nan", number=9, answer_type="number"),
        row("y", benchmark="held_out"),
    ]
    database = built(rows, settings={"max_characters": 50})
    assert database.execute("select row_number, row_id, reason from quarantine order by row_number").fetchall() == [
        (2, "a", "the row id a is that of row 1"),
        (4, None, "question or answer is longer than 50 characters"),
        (5, None, "the answer is no number"),
        (7, None, "the answer is no integer"),
        (9, None, "the answer is no number"),
    ]
    assert database.execute("select row_number, row_id from pools where row_id is not null order by row_number").fetchall() == [
        (1, "a"),
        (3, "b"),
    ]


def test_sources_mart_accounts_for_every_row_of_every_source() -> None:
    rows = [
        row("kept"),
        row("kept", number=2),
        row(None, number=3),
        row("y", benchmark="held_out"),
        row(None, benchmark="held_out", number=2),
    ]
    database = built(rows)
    assert database.execute("select source, benchmark, rows, quarantined, dropped, kept from sources order by source").fetchall() == [
        ("held_out", "held_out", 2, 1, 0, 1),
        ("train", None, 3, 1, 1, 1),
    ]
