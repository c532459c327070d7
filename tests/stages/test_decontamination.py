"""Decontamination: every rule against its published text, and the fast search against the rule written plainly."""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyarrow import parquet
from pydantic import ValidationError

from stages.config import Decontamination
from stages.decontamination import PIECE_BYTES, Findings, find, parquet_batches, recheck, sentence_encoder
from stages.errors import DataError
from stages.problems import generate

TINY_BASE = Path(__file__).resolve().parents[2] / "datasets" / "tiny_base"
WORDS = [f"w{number}" for number in range(20)]
"""A benchmark question of 20 distinct words."""

PUBLISHED: dict[str, tuple[int, Callable[[str], list[str]]]] = {
    "open_r1": (8, lambda text: " ".join(text.lower().strip().split()).split()),
    "r1": (10, lambda text: text.lower().split()),
    "gpt3": (13, lambda text: text.translate(str.maketrans(string.ascii_uppercase, string.ascii_lowercase, string.punctuation)).split()),
    "tulu3": (8, lambda text: re.findall(r"\w+|[^\w\s]", text.lower())),
}
"""Number of words and words of a text, each rule as its source writes it."""


def settings(*rules: str, **other: Any) -> Decontamination:
    return Decontamination.model_validate({"drop": rules, "report": (), "wording_share": None} | other)


def table(questions: Iterable[str], *, prefix: str = "t", **columns: Any) -> pa.Table:
    texts = list(questions)
    fixed = {name: [value] * len(texts) if isinstance(value, str) else value for name, value in columns.items()}
    return pa.table({"problem_id": pa.array([f"{prefix}{index}" for index in range(len(texts))], pa.string()), "question": texts} | fixed)


def held_out(*questions: str, benchmark: str = "held_out", **columns: Any) -> pa.Table:
    return table(questions, prefix="b", benchmark=benchmark, **columns)


def searched(training: Iterable[str], benchmark: Iterable[str], *rules: str, ngram: int = 8, **other: Any) -> Findings:
    return find(table(training).to_batches, held_out(*benchmark), settings(*rules, **other), ngram=ngram)


def hit_by(found: Findings, rule: str) -> list[str]:
    return [row["problem_id"] for row in found.hits.to_pylist() if row["rule"] == rule]


def plainly(training: list[str], benchmark: list[str], rule: str, ngram: int) -> dict[str, tuple[str, int, str]]:
    """The any-run rules over Python sets: by training problem the benchmark problem, the first shared run's place and words."""
    n, words_of = PUBLISHED[rule]
    n = ngram if rule == "open_r1" else n
    holders: dict[str, list[int]] = {}
    for index, text in enumerate(benchmark):
        words = words_of(text)
        for start in range(len(words) - n + 1):
            holders.setdefault(" ".join(words[start : start + n]), []).append(index)
    hits = {}
    for index, text in enumerate(training):
        words = words_of(text)
        for start in range(len(words) - n + 1):
            run = " ".join(words[start : start + n])
            if run in holders and f"t{index}" not in hits:
                hits[f"t{index}"] = (min(f"b{holder}" for holder in holders[run]), start + 1, run)
    return hits


def coverages(training: list[str], benchmark: list[str]) -> dict[tuple[str, str], float]:
    """Tulu 3's coverage of each benchmark problem by each training problem, token by token."""
    n, words_of = PUBLISHED["tulu3"]
    found = {}
    for index, text in enumerate(training):
        words = words_of(text)
        runs = {tuple(words[start : start + n]) for start in range(len(words) - n + 1)}
        for other, test in enumerate(benchmark):
            tokens = words_of(test)
            inside = {start + step for start in range(len(tokens) - n + 1) if tuple(tokens[start : start + n]) in runs for step in range(n)}
            if inside:
                found[f"t{index}", f"b{other}"] = len(inside) / len(tokens)
    return found


def shared_words(*runs: int) -> str:
    """A training question that holds runs of the benchmark's words, set apart by words of its own."""
    taken, parts = 0, ["own0", "own1"]
    for index, length in enumerate(runs):
        parts += [*WORDS[taken : taken + length], f"gap{index}", f"hole{index}"]
        taken += length + 1 if taken + length + 1 < len(WORDS) else length
    return " ".join(parts)


@pytest.mark.parametrize(
    ("runs", "open_r1", "coverage", "r1", "gpt3"),
    [
        ((7,), False, 0.0, False, False),
        ((8,), True, 0.4, False, False),
        ((10,), True, 0.5, True, False),
        ((11,), True, 0.55, True, False),
        ((13,), True, 0.65, True, True),
        ((8, 8), True, 0.8, False, False),
        ((5, 5, 5), False, 0.0, False, False),
    ],
)
def test_golden_table_each_rule_decides_as_published(runs: tuple[int, ...], open_r1: bool, coverage: float, r1: bool, gpt3: bool) -> None:
    found = searched([shared_words(*runs)], [" ".join(WORDS)], "open_r1", "tulu3", "r1", "gpt3")
    expected = {"open_r1": open_r1, "tulu3": coverage > 0.5, "r1": r1, "gpt3": gpt3}
    assert {rule: bool(hit_by(found, rule)) for rule in expected} == expected
    every = searched([shared_words(*runs)], [" ".join(WORDS)], "tulu3", tulu3_coverage=0).hits
    assert every["score"].to_pylist() == ([pytest.approx(coverage)] if coverage else [])


def test_tulu3_two_rows_that_share_half_each_do_not_add_up() -> None:
    first, second = " ".join(["own", *WORDS[:8]]), " ".join(["mine", *WORDS[12:]])
    benchmark = [" ".join(WORDS)]
    assert hit_by(searched([first, second], benchmark, "tulu3"), "tulu3") == []
    assert hit_by(searched([first + " and then " + second], benchmark, "tulu3"), "tulu3") == ["t0"]


def test_tulu3_source_is_flagged_only_past_two_percent_of_a_benchmark() -> None:
    benchmark = [" ".join(f"q{number}w{word}" for word in range(12)) for number in range(100)]
    training = table(benchmark[:3], source=["web", "web", "book"])
    counts = find(training.to_batches, held_out(*benchmark), settings("tulu3")).counts.to_pylist()
    flags = {row["source"]: (row["benchmark_problems"], row["share"], row["flagged"]) for row in counts if row["rule"] == "tulu3"}
    assert flags == {"all": (3, 0.03, True), "web": (2, 0.02, False), "book": (1, 0.01, False)}


def test_gpt3_punctuation_and_case_do_not_hide_a_run() -> None:
    hidden = "OWN " + ", ".join(f"({word.upper()})" for word in WORDS[:13])
    found = searched([hidden], [" ".join(WORDS)], "gpt3", "r1")
    assert [(row["rule"], row["evidence"]) for row in found.hits.to_pylist()] == [("gpt3", " ".join(WORDS[:13]))]


def test_masked_number_renumbered_twin_is_found_and_the_same_question_is_not_one() -> None:
    benchmark = held_out("Tom has 3 apples, 1,250.5 pears.")
    training = pa.table(
        {
            "problem_id": ["x", "y", "b0"],
            "question": ["tom has  17 Apples, 8 pears.", "Tim has 17 apples, 8 pears.", "Tom has 3 apples, 1,250.5 pears."],
        }
    )
    hits = find(training.to_batches, benchmark, settings("masked_number")).hits.to_pylist()
    assert [(row["rule"], row["problem_id"], row["evidence"]) for row in hits] == [
        ("masked_number", "x", "tom has 0 apples, 0 pears."),
        ("same_question", "b0", None),
    ]


def test_masked_number_generated_families_are_full_of_twins() -> None:
    training = [problem.question for problem in generate("chain_sum", 200, 1, min_terms=4, max_terms=4, min_digits=2, max_digits=2)]
    benchmark = [problem.question for problem in generate("chain_sum", 20, 999_999, min_terms=4, max_terms=4, min_digits=2, max_digits=2)]
    found = searched(training, benchmark, "masked_number")
    twins = {re.sub(r"\d+", "0", text.lower()) for text in benchmark}
    expected = [f"t{index}" for index, text in enumerate(training) if re.sub(r"\d+", "0", text.lower()) in twins]
    assert len(expected) > 100
    assert sorted(hit_by(found, "masked_number")) == sorted(expected)


@pytest.mark.parametrize(
    ("training", "benchmark"),
    [
        ("What is 12 + 30", "What is 12 + 30?"),
        ("If x² − 3x = 10 then what is x?", "If x² - 3x = 10, then what is x?"),
        ("What is “x”", "what is x ?"),
    ],
)
def test_same_question_in_other_dress_is_found_by_its_folded_text(training: str, benchmark: str) -> None:
    found = searched([training, "another"], [benchmark, "third"])
    assert [(row["rule"], row["problem_id"], row["benchmark_problem_id"]) for row in found.hits.to_pylist()] == [
        ("same_question", "t0", "b0")
    ]
    assert found.counts["problems"].to_pylist()[0] == 1


def test_same_question_texts_of_marks_alone_are_not_the_same() -> None:
    assert len(searched(["...", ""], ["?!?", "", "?"]).hits) == 0


ALPHABETS = {
    "ascii": "aAbB1_.,-\x00\x07\x7f",
    "letters": "aAΣσςİıßẞKÅéÉe\u0301數字",
    "marks": "a–’“.😀\u200b\u0300$",
}
GAPS = [" ", " ", " ", "  ", "\n", "\t ", "\r\n", "\x0b", "\x1c", "\x1f", "\x85", "\xa0", "\u2003", "\u3000", "\u2028"]


def scribbled(rng: random.Random, pool: list[str], gaps: list[str], length: tuple[int, int] = (0, 40)) -> str:
    words = [rng.choice(pool) for _ in range(rng.randint(*length))]
    return rng.choice(["", *gaps]) + "".join(word + rng.choice(gaps) for word in words)


@pytest.mark.parametrize("rule", ["open_r1", "r1", "gpt3"])
@pytest.mark.parametrize("seed", range(8))
def test_fast_search_on_random_unicode_equals_the_rule_over_python_sets(rule: str, seed: int) -> None:
    rng = random.Random(seed)
    ngram = rng.choice([2, 3, 5, 8, 9])
    pool = [rng.choice("aBç1") + "".join(rng.choices(letters, k=rng.randint(0, 20))) for letters in ALPHABETS.values() for _ in range(2)]
    gaps = [" ", "\n"] if seed % 2 else GAPS
    benchmark = [scribbled(rng, pool, gaps, (20, 40)) for _ in range(6)]
    training = [scribbled(rng, pool, gaps) for _ in range(150)]
    for _ in range(60):
        gap, text = rng.choice(gaps), rng.choice(benchmark)[: rng.randint(100, 600)]
        training.append(gap.join([scribbled(rng, pool, gaps), rng.choice([text, text.upper(), text.lower()]), "x"]))
    hits = searched(training, benchmark, rule, ngram=ngram).hits.to_pylist()
    expected = plainly(training, benchmark, rule, ngram)
    found = {row["problem_id"]: (row["benchmark_problem_id"], row["start"], row["evidence"]) for row in hits if row["rule"] == rule}
    assert found == expected
    assert len(found) > 5


@pytest.mark.parametrize("seed", range(6))
def test_tulu3_coverage_on_random_unicode_equals_counting_tokens(seed: int) -> None:
    rng = random.Random(seed)
    pool = ["".join(rng.choices(letters, k=rng.randint(1, 4))) for letters in ALPHABETS.values()]
    benchmark = [scribbled(rng, pool, GAPS) for _ in range(5)]
    training = [scribbled(rng, pool, GAPS) + rng.choice(benchmark)[: rng.randint(0, 40)] for _ in range(80)]
    hits = searched(training, benchmark, "tulu3", tulu3_coverage=0.2).hits.to_pylist()
    best: dict[str, float] = {}
    for (problem, _), coverage in coverages(training, benchmark).items():
        if coverage > 0.2:
            best[problem] = max(best.get(problem, 0.0), coverage)
    assert {row["problem_id"]: row["score"] for row in hits if row["rule"] == "tulu3"} == pytest.approx(best)
    assert len(best) > 10


def test_fast_search_words_that_differ_in_the_middle_only_are_no_hit() -> None:
    words = [f"beginning{'x' * 9}ending{number:02}" for number in range(8)]
    near = [word.replace("x" * 9, "y" * 9) for word in words]
    assert hit_by(searched([" ".join(near), " ".join(words)], [" ".join(words)], "open_r1"), "open_r1") == ["t1"]


def test_fast_search_run_over_the_border_of_two_questions_is_no_hit() -> None:
    parts = [[" ".join(WORDS[:cut]), " ".join(WORDS[cut:12])] for cut in range(5, 8)]
    for first, second in parts:
        assert len(searched([first, second, "", first], [" ".join(WORDS[:12])], "open_r1").hits) == 0


def test_fast_search_pieces_and_batches_do_not_change_the_hits() -> None:
    filler = [" ".join(f"f{number}x{word}" for word in range(200)) for number in range(PIECE_BYTES // 400)]
    texts = [*filler, shared_words(8), "", *filler, "long " * PIECE_BYTES + " ".join(WORDS), shared_words(9), *filler]
    whole = table(texts)
    expected = [f"t{index}" for index, text in enumerate(texts) if "w0 w1" in text]
    for rows in (7, 1000, len(texts)):
        found = find(partial(whole.to_batches, max_chunksize=rows), held_out(" ".join(WORDS)), settings("open_r1"))
        assert sorted(hit_by(found, "open_r1")) == sorted(expected)
    assert len(expected) == 3


def test_find_streams_of_duckdb_parquet_and_arrow_give_the_same(tmp_path: Path) -> None:
    whole = table([shared_words(8), "other", shared_words(13)], family="f", source="s")
    parquet.write_table(whole, tmp_path / "pool.parquet")
    relation = duckdb.connect().from_arrow(whole)
    streams = [whole.to_batches, parquet_batches(tmp_path / "pool.parquet"), lambda: relation.to_arrow_reader(2)]
    results = [find(stream, held_out(" ".join(WORDS)), Decontamination(wording_share=None)) for stream in streams]
    assert results[0].hits.equals(results[1].hits)
    assert results[0].hits.equals(results[2].hits)
    assert len(results[0].hits) > 3


def test_find_one_row_per_rule_problem_and_benchmark_with_the_first_evidence() -> None:
    benchmarks = pa.concat_tables(
        [
            held_out(" ".join(WORDS[5:]), " ".join(WORDS[:12]), " ".join(WORDS), benchmark="one"),
            table([" ".join(WORDS[2:])], prefix="c", benchmark="two"),
        ]
    )
    found = find(table(["own " + " ".join(WORDS)]).to_batches, benchmarks, settings("open_r1"))
    assert [tuple(row.values()) for row in found.hits.to_pylist()] == [
        ("open_r1", "t0", "", "one", "b1", 2, " ".join(WORDS[:8]), None),
        ("open_r1", "t0", "", "two", "c0", 4, " ".join(WORDS[2:10]), None),
    ]
    counts = [(row["source"], row["benchmark"], row["problems"], row["benchmark_problems"]) for row in found.counts.to_pylist()]
    assert counts == [
        ("all", "one", 0, 0),
        ("all", "two", 0, 0),
        ("all", "one", 1, 3),
        ("all", "two", 1, 1),
        ("", "one", 1, 3),
        ("", "two", 1, 1),
    ]


WORDING = "please work out with great care the value of the following sum and say it:"


def family(numbers: list[str]) -> list[str]:
    return [f"{WORDING} {text} thank you" for text in numbers]


def test_wording_of_a_family_is_no_evidence_and_null_keeps_the_published_rule() -> None:
    training = table(family([f"{number} + {number + 1} + {number + 2} - {number} =" for number in range(20, 40)]), family="sums")
    benchmark = held_out(*family([f"{number} - {number + 1} + {number + 2} + {number} =" for number in range(40, 45)]), family="sums")
    rules = ("open_r1", "r1", "tulu3")
    assert len(find(training.to_batches, benchmark, settings(*rules, wording_share=0.2)).hits) == 0
    published = find(training.to_batches, benchmark, settings(*rules))
    assert {rule: len(hit_by(published, rule)) for rule in rules} == dict.fromkeys(rules, 20)


def test_wording_beside_shared_content_leaves_the_content_as_evidence() -> None:
    chains = [" ".join(f"{start + step} +" for step in range(9)) for start in range(100, 1100, 50)]
    training = table(family(chains), family="sums")
    benchmark = held_out(*family([chains[4] + " 1 =", "1 + 2 =", "2 + 3 ="]), family="sums")
    hits = find(training.to_batches, benchmark, settings("open_r1", wording_share=0.2)).hits.to_pylist()
    assert [(row["problem_id"], row["evidence"]) for row in hits] == [("t4", " ".join(chains[4].split()[:8]))]


def test_wording_is_measured_on_all_candidates_when_they_are_given() -> None:
    training = table(family([f"{number} + {number} =" for number in range(20, 40)]), family="sums")
    offered = held_out(*family([f"{number} - {number} =" for number in range(40, 45)]), family="sums")
    taken = offered.slice(0, 1)  # of one question nothing can be its family's wording
    rules = settings("open_r1", wording_share=0.2)
    assert len(find(training.to_batches, taken, rules).hits) == 20
    assert len(find(training.to_batches, taken, rules, candidates=offered).hits) == 0


def test_recheck_a_benchmark_added_later_finds_the_problems_that_pools_hold(tmp_path: Path) -> None:
    pools = {"rl": table([shared_words(8), "clean"], source="src"), "preference": table(["Own " + shared_words(13)], prefix="p")}
    for name, pool in pools.items():
        parquet.write_table(pool, tmp_path / f"{name}.parquet")
    files = {name: tmp_path / f"{name}.parquet" for name in pools}
    assert len(recheck(files, held_out("nothing in common"), settings("open_r1")).hits) == 0
    assert recheck(files, held_out("Clean."), settings("open_r1")).hits["rule"].to_pylist() == ["same_question"]
    found = recheck(files, held_out(" ".join(WORDS), benchmark="new"), settings("open_r1"))
    assert [
        (row["source"], row["problem_id"], row["benchmark"], row["question"], row["benchmark_question"]) for row in found.hits.to_pylist()
    ] == [
        ("preference", "p0", "new", "Own " + shared_words(13), " ".join(WORDS)),
        ("rl", "t0", "new", shared_words(8), " ".join(WORDS)),
    ]
    counts = {(row["source"], row["rule"]): row["problems"] for row in found.counts.to_pylist()}
    assert counts == {("all", "same_question"): 0, ("all", "open_r1"): 2, ("rl", "open_r1"): 1, ("preference", "open_r1"): 1}


def test_recheck_unreadable_pool_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "rl.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"rl\.parquet cannot be read as Parquet"):
        recheck({"rl": tmp_path / "rl.parquet"}, held_out("x"), settings("open_r1"))


def test_find_missing_column_or_null_question_is_an_error_with_a_remedy() -> None:
    with pytest.raises(DataError, match="benchmarks have no column 'benchmark'"):
        find(table(["a"]).to_batches, table(["a"]), settings("open_r1"))
    with pytest.raises(DataError, match="1 training problems have no question"):
        find(pa.table({"problem_id": ["x"], "question": pa.array([None], pa.string())}).to_batches, held_out("a"), settings("open_r1"))


def test_find_nothing_to_search_gives_zero_counts() -> None:
    empty = pa.table({"problem_id": pa.array([], pa.string()), "question": pa.array([], pa.string())})
    found = find(empty.to_batches, held_out("a b", ""), settings("open_r1", "tulu3", "masked_number"))
    assert len(found.hits) == 0
    assert {(row["rule"], row["problems"], row["benchmark_size"]) for row in found.counts.to_pylist()} == {
        (rule, 0, 2) for rule in ("same_question", "open_r1", "tulu3", "masked_number")
    }


def test_settings_embedding_without_a_model_is_refused() -> None:
    with pytest.raises(ValidationError, match="the rule embedding has no model"):
        settings("embedding")


@pytest.mark.slow
def test_embedding_mean_pooling_finds_the_same_text_and_ignores_padding() -> None:
    """The shipped base stands in for a sentence model: this shows pooling and thresholds, not that it knows meanings."""
    texts = ["What is 2 + 3?", "How many legs do 3 cows and 2 spiders have together?", "What is 2 + 3? Say it."]
    rules = settings("embedding", embedding_model=TINY_BASE, embedding_similarity=0.9999)
    encode = sentence_encoder(rules)
    together = encode(texts)
    assert (together**2).sum(axis=1) == pytest.approx([1.0] * 3, abs=1e-5)
    for text, vector in zip(texts, together, strict=True):
        assert encode([text])[0] == pytest.approx(vector, abs=1e-4)
    found = find(table(texts).to_batches, held_out(texts[1]), rules)
    assert [(row["rule"], row["problem_id"], row["benchmark_problem_id"]) for row in found.hits.to_pylist()] == [
        ("embedding", "t1", "b0"),
        ("same_question", "t1", "b0"),
    ]
    assert found.hits["score"][0].as_py() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
def test_embedding_folder_that_is_no_model_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(DataError, match=f"embedding_model {re.escape(str(folder))} cannot be loaded"):
            sentence_encoder(settings("embedding", embedding_model=folder))
