"""Folded text, and near-duplicates against a direct computation."""

from __future__ import annotations

import random
import time
from string import ascii_lowercase

import pyarrow as pa
import pytest

from stages.near_duplicates import COMPARED, SHINGLE_WORDS, banding, find, fold


def texts(questions: list[str], signs: list[str] | None = None, answers: list[str] | None = None) -> pa.Table:
    names, empty = [str(number) for number in range(len(questions))], [""] * len(questions)
    columns = {"problem_id": names, "folded": questions, "signs": signs or empty, "answer": answers or empty}
    return pa.table({name: pa.array(column, pa.string()) for name, column in columns.items()})


def jaccard(one: str, other: str) -> float:
    """Of the sets of runs of words, padded at both ends, by the definition."""
    pad = [""] * (SHINGLE_WORDS - 1)
    sets = [
        {tuple(words[start : start + SHINGLE_WORDS]) for start in range(len(words) - SHINGLE_WORDS + 1)}
        for words in ([*pad, *text.split(" "), *pad] for text in (one, other))
    ]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def corpus(count: int, seed: int) -> list[str]:
    """Random questions, each followed by a version of it with up to three words changed."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(ascii_lowercase, k=rng.randint(1, 12))) for _ in range(2000)] + ["שלום", "été", "數學"]
    questions = []
    for _ in range(count):
        question = rng.choices(words, k=rng.randint(1, 120))
        changed = list(question)
        for _ in range(rng.randint(0, 3)):
            changed[rng.randrange(len(changed))] = rng.choice(words)
        questions += [" ".join(question), " ".join(changed)]
    return questions


@pytest.mark.parametrize("similarity", [0.7, 0.9])
def test_near_duplicates_similarities_are_exact_and_recall_is_high(similarity: float) -> None:
    questions = corpus(600, 3)
    pairs = find(texts(questions), similarity).pairs.to_pylist()
    assert all(int(row["other_problem_id"]) < int(row["problem_id"]) for row in pairs)
    for row in pairs:
        value = jaccard(questions[int(row["problem_id"])], questions[int(row["other_problem_id"])])
        assert row["similarity"] == pytest.approx(value, abs=1e-12)
        assert value >= similarity
    wanted = {str(index) for index in range(1, len(questions), 2) if jaccard(questions[index], questions[index - 1]) >= similarity}
    assert len(wanted) > 100
    assert len(wanted & {row["problem_id"] for row in pairs}) >= 0.98 * len(wanted)


def test_near_duplicates_same_input_gives_the_same_pairs_in_any_batching() -> None:
    questions = corpus(1500, 5)  # more than one batch
    first, again = find(texts(questions), 0.8).pairs, find(pa.concat_tables([texts(questions)[:7], texts(questions)[7:]]), 0.8).pairs
    assert first.equals(again)


def test_near_duplicates_with_other_signs_are_no_pair() -> None:
    question = " ".join(f"w{number}" for number in range(100))
    assert find(texts([question] * 2, ["1 +", "1 +"]), 0.9).pairs["similarity"].to_pylist() == [1.0]
    assert find(texts([question] * 2, ["1 +", "1 -"]), 0.9).pairs.num_rows == 0


def test_near_duplicates_with_another_answer_are_no_pair_but_counted() -> None:
    question = " ".join(f"w{number}" for number in range(100))
    found = find(texts([question] * 4, answers=["7", "8", "7", "9"]), 0.9)
    assert [(row["problem_id"], row["other_problem_id"]) for row in found.pairs.to_pylist()] == [("2", "0")]
    assert found.other_answer == 2


def test_near_duplicates_similarity_zero_finds_nothing() -> None:
    assert find(texts(["a b c", "a b c"]), 0) == find(texts([]), 0)


def test_near_duplicates_in_a_huge_bucket_are_still_found_in_linear_work() -> None:
    question = " ".join(f"w{number}" for number in range(100))
    found = find(texts([question] * 5000), 0.9)
    assert [row["problem_id"] for row in found.pairs.to_pylist()] == [str(number) for number in range(1, 5000)]
    assert found.compared <= COMPARED * 5000
    assert found.uncompared > 0


def test_near_duplicates_of_texts_of_twenty_megabytes_are_found() -> None:
    long = "one two three four five six " * 700_000
    assert find(texts([long + "seven", "short", long + "eight"]), 0.5).pairs["problem_id"].to_pylist() == ["2"]


def test_near_duplicates_short_empty_and_no_texts_are_fine() -> None:
    assert find(texts(["", "a", "", "a b", "a"]), 0.9).pairs.to_pydict() == {
        "problem_id": ["2", "4"],
        "other_problem_id": ["0", "1"],
        "similarity": [1.0, 1.0],
    }
    assert find(texts([]), 0.9).pairs.num_rows == 0


@pytest.mark.parametrize("similarity", [0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0])
def test_banding_brings_pairs_at_the_threshold_together(similarity: float) -> None:
    bands, width = banding(similarity)
    assert bands * width <= 64
    assert 1 - (1 - similarity**width) ** bands >= 0.99


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Café?", "cafe\u0301"),
        ("ＦＵＬＬ　ｗｉｄｔｈ １２", "full width 12"),
        ("zero\u200bwidth \u202eleft", "zerowidth left"),
        ("“Quoted”, he said.", "quoted he said"),
        ("What,  is\n x;", "what is x"),
        ("3 − 2", "3 - 2"),
        ("4 × 5", "4 * 5"),
        ("a well-known result", "a well known result"),
        ("STRASSE", "straße"),
        ("ﬁnd x", "find x"),
        ("What is x ?", "What is x"),
        ("the word 'seven' is", "the word seven is"),
        ("‘It’s 2.’", "it's 2"),
        ("``word'' and y", "word and y"),
        ("If x² − 3x = 10 then", "If x² - 3x = 10, then"),
    ],
)
def test_fold_same_question_in_other_dress_is_equal(one: str, other: str) -> None:
    assert fold(one) == fold(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2³", "23"),
        ("x₁2", "x12"),
        ("5!", "5"),
        ("1.5", "15"),
        ("-3", "3"),
        ("(a, b)", "a, b"),
        ("f'(x)", "f(x)"),
        ("x-y", "x y"),
        ("½", "12"),
        ("Find f' when x = 2", "Find f when x = 2"),
        ("(f + g)' at 2", "(f + g) at 2"),
        ("With 'f' known, what is f'?", "With 'f' known, what is f?"),
        ("2ᵏ = 8", "2k = 8"),
        ("xₙ", "xn"),
        ("3 : 4", "3 . 4"),
        ("3 : 4", "3 4"),
    ],
)
def test_fold_another_value_is_not_equal(one: str, other: str) -> None:
    assert fold(one) != fold(other)


@pytest.mark.parametrize(
    "text", ["Café “x”?", "2³ + ½", "a-b c--d well-known", "...", "'tis it's", "שלום \u202e12", "A.  B,,C ;", "x ' y' z'", "f'. 'x' . ?"]
)
def test_fold_twice_changes_nothing_more(text: str) -> None:
    assert fold(fold(text)) == fold(text)


@pytest.mark.parametrize("text", ["." * 19_990 + "x", "x" + "'" * 19_990 + "y", "x" + ". " * 10_000 + "y", "²" * 20_000])
def test_fold_long_runs_of_marks_take_linear_work(text: str) -> None:
    start = time.process_time()
    fold(text)
    assert time.process_time() - start < 1  # quadratic work takes over ten seconds
