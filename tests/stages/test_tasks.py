"""Graders by type of answer: what counts as right, what as wrong, and what is never the model's fault."""

from __future__ import annotations

import json
import time
from fractions import Fraction
from typing import Any

import pytest

from stages.chat import Reply
from stages.rewards.grading import Verdict
from stages.rewards.tasks import Task, grade_task, grade_tasks, json_schema, multiple_choice, number, read_number, reasoning_gym_score

COLOURS = ["red", "green", "light blue", "3"]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"const": 2}},
    "required": ["x", "y"],
    "additionalProperties": False,
}


def verdict(answer: str, gold: str, answer_type: str, **grading: Any) -> Verdict:
    response = answer if answer_type in ("json_schema", "code") else f"\\boxed{{{answer}}}"
    return grade_task(Reply("some thinking", response), Task(gold, answer_type, json.dumps(grading) if grading else "")).verdict


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [("Abc", "Abc", "right"), (" Abc ", "Abc", "right"), ("abc", "Abc", "wrong"), ("007", "7", "wrong"), ("x", " ", "not_graded")],
)
def test_exact_answer_is_right_for_the_same_characters_only(answer: str, gold: str, expected: str) -> None:
    assert verdict(answer, gold, "exact") == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("-7", -7),
        ("\u22127", -7),
        ("+07.50", Fraction(15, 2)),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("1e3", 1000),
        ("1.5 \\times 10^{-2}", Fraction(3, 200)),
        ("2 \\cdot 10^3", 2000),
        ("3/4", Fraction(3, 4)),
        ("-\\frac{3}{4}", Fraction(-3, 4)),
        ("\\dfrac{6}{8}", Fraction(3, 4)),
        ("\uff11\uff12", 12),
        ("", None),
        ("seven", None),
        ("nan", None),
        ("inf", None),
        ("12,34", None),
        ("1 9", None),
        ("7 apples", None),
        ("1/0", None),
        ("--7", None),
        ("1e999999999", None),
        ("9" * 5000, None),
        ("1/" + "9" * 5000, None),
        ("\\frac{" + "9" * 5000 + "}{7}", None),
        ("7e", None),
    ],
)
def test_read_number_of_a_text_is_its_exact_value_or_nothing(text: str, value: Fraction | None) -> None:
    assert read_number(text) == value


@pytest.mark.parametrize(
    ("answer", "gold", "tolerance", "expected"),
    [
        ("0.1", "1/10", {}, "right"),  # exactly: no float is between them
        ("0.333", "1/3", {}, "wrong"),
        ("0.333", "1/3", {"relative": 0.01}, "right"),
        ("102", "100", {"relative": 0.02}, "right"),
        ("102.1", "100", {"relative": 0.02}, "wrong"),
        ("-100", "100", {"relative": 0.02}, "wrong"),
        ("0.0005", "0", {"relative": 0.5}, "wrong"),
        ("0.0005", "0", {"absolute": 0.001}, "right"),
        ("129", "100", {"relative": 0.29}, "right"),  # the tolerance is the decimal that is written, not the float next to it
        ("129.0000000001", "100", {"relative": 0.29}, "wrong"),
        ("1.3", "1", {"absolute": 0.3}, "right"),
        ("none", "100", {}, "wrong"),
        ("100", "about 100", {}, "not_graded"),
        ("100", "100", {"relative": -1}, "not_graded"),
        ("100", "100", {"relative": "1 %"}, "not_graded"),
        ("100", "100", {"relative": float("nan")}, "not_graded"),
        ("100", "100", {"absolute": True}, "not_graded"),
    ],
)
def test_number_within_its_tolerance_is_right(answer: str, gold: str, tolerance: dict[str, Any], expected: str) -> None:
    assert number(answer, gold, **tolerance).verdict == expected


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("C", "C", "right"),
        ("(C)", "C", "right"),
        ("c.", "C", "right"),
        ("\\text{C}", "C", "right"),
        ("C) light blue", "C", "right"),
        ("light  Blue", "C", "right"),
        ("C", "light blue", "right"),
        ("D", "3", "right"),  # the text of a choice
        ("B", "C", "wrong"),
        ("C) green", "C", "wrong"),  # the letter says one thing, the text another
        ("B) light blue", "C", "wrong"),
        ("A, B, C, D", "C", "wrong"),
        ("ABCD", "C", "wrong"),
        ("A or C", "C", "wrong"),
        ("E", "C", "wrong"),
        ("blue", "C", "wrong"),
        ("", "C", "wrong"),
        ("C", "E", "not_graded"),
        ("C", "", "not_graded"),
    ],
)
def test_multiple_choice_answer_is_right_by_letter_or_text_that_belong_together(answer: str, gold: str, expected: str) -> None:
    assert multiple_choice(answer, gold, COLOURS).verdict == expected


def test_multiple_choice_with_two_equal_choices_is_not_graded() -> None:
    assert multiple_choice("A", "A", ["red", "Red"]).verdict is Verdict.NOT_GRADED


@pytest.mark.parametrize("choices", [[1, 2], {"A": "red"}, "red", None, ["red", None]])
def test_multiple_choice_with_choices_that_are_no_texts_is_not_graded(choices: Any) -> None:
    assert verdict("A", "A", "multiple_choice", choices=choices) is Verdict.NOT_GRADED


def test_multiple_choice_without_texts_compares_letters_only() -> None:
    assert [multiple_choice(answer, "B", []).verdict for answer in ("B", "b)", "A", "B red")] == ["right", "right", "wrong", "wrong"]


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ('{"x": 1, "y": 2}', "right"),
        ('\n{"y": 2,\n "x": -3}\n', "right"),
        ('```json\n{"x": 1, "y": 2}\n```', "right"),
        ('```\n{"x": 1, "y": 2}\n```\n', "right"),
        ('{"x": 1}', "wrong"),
        ('{"x": 1, "y": 3}', "wrong"),
        ('{"x": 1.5, "y": 2}', "wrong"),
        ('{"x": 1, "y": 2, "z": 0}', "wrong"),
        ('{"x": 1, "y": 3, "y": 2}', "wrong"),
        ('{"x": NaN, "y": 2}', "wrong"),
        ('The point is {"x": 1, "y": 2}', "wrong"),
        ('{"x": 1, "y": 2} {"x": 1, "y": 2}', "wrong"),
        ("", "wrong"),
        ("[" * 3000, "wrong"),
        ("[" * 500 + "]" * 500, "wrong"),
        ('"' + "x" * 30_000 + '"', "wrong"),
        ('{"x": ' + "9" * 400 + ', "y": 2}', "wrong"),
        ("\n" * 15_000 + "x", "wrong"),
        ("```\n" + "\n" * 15_000 + "x", "wrong"),
        ("```\n" + "\n```" * 3_000, "wrong"),
    ],
)
def test_json_answer_is_right_when_it_is_one_value_that_the_schema_accepts(response: str, expected: str) -> None:
    assert json_schema(response, json.dumps(POINT)).verdict == expected


@pytest.mark.parametrize(
    "schema",
    [
        "",
        "no JSON",
        '{"type": "point"}',
        "{}",
        "true",
        '{"title": "a point"}',
        '{"properties": {"x": {"const": 1}}, "required": ["x"]}',  # of objects only: null is no object
        '{"$ref": "http://127.0.0.1:9/schema.json"}',
        '{"$ref": "#"}',
        '{"$ref": "#/nowhere"}',
    ],
)
def test_json_schema_that_cannot_be_used_is_not_graded_whatever_the_answer(schema: str) -> None:
    assert json_schema('{"x": 1, "y": 2}', schema).verdict is Verdict.NOT_GRADED


@pytest.mark.parametrize("response", ["1e999", "-1e999", "9" * 400])
@pytest.mark.parametrize(
    "schema", ['{"type": "number"}', '{"type": "number", "multipleOf": 0.1}', '{"type": "number", "exclusiveMinimum": 1}']
)
def test_json_answer_with_a_number_that_no_double_holds_is_wrong(response: str, schema: str) -> None:
    assert json_schema(response, schema).verdict is Verdict.WRONG


def test_json_schema_pattern_that_backtracks_for_ever_ends_as_not_graded_in_the_pool() -> None:
    schema = json.dumps({"type": "string", "pattern": "^(a+)+$"})
    start = time.monotonic()
    (found,) = grade_tasks([Reply(None, json.dumps("a" * 40 + "!"))], [Task(schema, "json_schema")])
    assert found.verdict is Verdict.NOT_GRADED
    assert "timed out" in found.reason
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("1000", "right"), ("+01,000.00", "right"), ("1001", "wrong"), ("The answer is 1000", "wrong"), ("10000", "wrong"), ("", "wrong")],
)
def test_reasoning_gym_answer_is_right_for_full_marks_of_its_own_scorer_only(answer: str, expected: str) -> None:
    assert verdict(answer, "1000", "reasoning_gym", family="chain_sum", question="999 + 1 =") == expected


@pytest.mark.parametrize(
    ("family", "gold", "metadata", "right", "wrong"),
    [
        ("complex_arithmetic", "-5.0 + 20.0i", {"result": [-5.0, 20.0]}, ["-5 + 20i"], ["nan", "nanj", "1+nanj", "inf", "Infinity"]),
        ("gsm_symbolic", "279", {}, ["279", "279.0", "279 apples"], ["-279", "279, 98", "279 or 98", "278", "nan"]),
        ("coin_flip", "0.00005", {}, ["0.00005", "1/20000"], ["0", "-0.00005", "1e999999999", "nan"]),
        ("prime_factorization", "2 × 3", {}, ["2 × 3"], ["two times three", "2 × 5", ""]),
        ("knights_knaves", "Al is a knight, and Bo is a knave.", {}, ["Bo is a knave, and Al is a knight."], ["Al is a knave.", "nan"]),
    ],
)
def test_reasoning_gym_answer_that_only_the_scorer_takes_for_right_is_wrong(
    family: str, gold: str, metadata: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    entry = {"family": family, "question": "", "metadata": metadata}
    assert {answer: reasoning_gym_score(answer, gold, entry).verdict for answer in right} == dict.fromkeys(right, Verdict.RIGHT)
    assert {answer: reasoning_gym_score(answer, gold, entry).verdict for answer in wrong} == dict.fromkeys(wrong, Verdict.WRONG)


@pytest.mark.parametrize("gold", ["True", "False"])
@pytest.mark.parametrize("answer", ["True", "False", "", "x"])
def test_reasoning_gym_scorer_that_pays_any_answer_grades_none(answer: str, gold: str) -> None:
    found = reasoning_gym_score(answer, gold, {"family": "game_of_life_halting", "metadata": {}})
    assert found.verdict is Verdict.NOT_GRADED
    assert found.reason.endswith("gives full marks to 'no answer'")


def test_reasoning_gym_entry_gives_the_scorer_what_it_looks_at() -> None:
    from reasoning_gym import create_dataset

    for family in ("chain_sum", "leg_counting", "products", "sudoku", "word_ladder", "jugs", "caesar_cipher"):
        entry = create_dataset(family, size=1, seed=3)[0]
        kept = json.loads(json.dumps({"family": family, "question": entry["question"], "metadata": entry["metadata"]}))
        assert reasoning_gym_score(entry["answer"], entry["answer"], kept).verdict is Verdict.RIGHT, family
        assert reasoning_gym_score("no such answer", entry["answer"], kept).verdict is Verdict.WRONG, family


@pytest.mark.parametrize("family", ["binary_matrix", "n_queens", "spiral_matrix", "string_insertion", "countdown", "simple_integration"])
def test_reasoning_gym_scorer_that_runs_the_answer_as_code_is_refused(family: str, tmp_path: Any) -> None:
    attack = f"open({str(tmp_path / 'owned')!r}, 'w').write('x')"
    found = reasoning_gym_score(attack, "[[0]]", {"family": family, "metadata": {}})
    assert found.verdict is Verdict.NOT_GRADED
    assert "runs the answer as code" in found.reason
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("no_such_family", "no family 'no_such_family'"),
        ("composite", "has no scorer by itself"),
        ("graph_color", "the scorer of graph_color gives the gold answer 0"),
        ("jugs", "the scorer of jugs"),
    ],
)
def test_reasoning_gym_entry_that_cannot_be_scored_is_not_graded(family: str, reason: str) -> None:
    found = reasoning_gym_score("x", "7", {"family": family, "metadata": None})
    assert found.verdict is Verdict.NOT_GRADED
    assert reason in found.reason


@pytest.mark.parametrize("grading", ["no JSON", "[]", "3", "[" * 100_000], ids=lambda text: text[:8])
def test_task_with_grading_that_is_no_object_is_not_graded(grading: str) -> None:
    assert grade_task(Reply(None, "\\boxed{7}"), Task("7", "number", grading)).verdict is Verdict.NOT_GRADED


def test_task_of_an_unknown_type_is_not_graded_and_names_the_known_ones() -> None:
    found = grade_task(Reply(None, "\\boxed{7}"), Task("7", "poem"))
    assert found.verdict is Verdict.NOT_GRADED
    assert "'poem'; known are text, math, exact" in found.reason


@pytest.mark.parametrize("answer_type", ["exact", "number", "multiple_choice", "reasoning_gym", "math"])
@pytest.mark.parametrize("response", ["", "7", "\\boxed{7} \\boxed{7}", "\\boxed{7", "\\boxed{6} and \\boxed{7"])
def test_task_answer_outside_the_one_closed_box_is_wrong(answer_type: str, response: str) -> None:
    assert grade_task(Reply("\\boxed{7}", response), Task("7", answer_type)).verdict is Verdict.WRONG


@pytest.mark.parametrize("answer_type", ["text", "exact", "number", "multiple_choice", "math", "json_schema"])
@pytest.mark.parametrize(
    "answer",
    [
        "0" * 100_000 + "x",
        "0" * 19_000 + "x",
        "9" * 19_000,
        "1" * 19_000 + "e",
        "1/" + "9" * 19_000,
        "1,111" * 3_000,
        "\\text{" * 3_000 + "}" * 3_000,
        "\n" * 19_000,
        " " * 19_000 + "x",
        "-" * 19_000,
    ],
    ids=lambda text: f"{text[:6]!r}",
)
def test_task_with_a_hostile_answer_is_graded_at_once(answer: str, answer_type: str) -> None:
    gold = '{"type": "integer"}' if answer_type == "json_schema" else "B" if answer_type == "multiple_choice" else "7"
    response = answer if answer_type == "json_schema" else f"\\boxed{{{answer}}}"
    start = time.process_time()
    found = grade_task(Reply(None, response), Task(gold, answer_type, json.dumps({"choices": ["6", "7"]})))
    assert time.process_time() - start < 1
    assert found.verdict is Verdict.WRONG


@pytest.mark.parametrize(
    "answer", ["\\left\\{\\begin{array}{l}x=3\\\\y=-1\\end{array}\\right.", "\\{x=3, y=-1\\}", "x=3,\\ y=-1"], ids=["array", "set", "list"]
)
def test_task_answer_with_braces_that_are_signs_is_read_to_the_end_of_its_box(answer: str) -> None:
    assert grade_task(Reply(None, f"\\boxed{{{answer}}}"), Task(answer, "text")).verdict is Verdict.RIGHT
    assert grade_task(Reply(None, f"\\boxed{{{answer}}}"), Task("x=3, y=-1", "math")).verdict == ("wrong" if "\\{x" in answer else "right")
    assert grade_task(Reply(None, f"\\boxed{{{answer}\\}}"), Task(answer, "text")).reason == "box is not closed"


def test_tasks_of_several_types_graded_together_come_back_in_their_order() -> None:
    asked = [
        ("\\boxed{7}", Task("7")),
        ("\\boxed{0.5}", Task("\\frac{1}{2}", "math")),
        ('{"x": 1, "y": 2}', Task(json.dumps(POINT), "json_schema")),
        ("\\boxed{8}", Task("7")),
        ("\\boxed{0.3}", Task("\\frac{1}{3}", "math")),
        ("\\boxed{9^{9^{9^{9}}}}", Task("7", "math")),
        ("{}", Task(json.dumps(POINT), "json_schema")),
        ("\\boxed{0.5}", Task("1/2", "number")),
    ]
    found = grade_tasks([Reply(None, response) for response, _ in asked], [task for _, task in asked])
    assert [grade.verdict for grade in found][:5] == ["right", "right", "right", "wrong", "wrong"]
    assert found[5].verdict is not Verdict.RIGHT
    assert [grade.verdict for grade in found][6:] == ["wrong", "right"]


@pytest.mark.slow
@pytest.mark.usefixtures("bubblewrap")
def test_tasks_that_are_programs_run_in_sandboxes_and_are_graded_by_their_output() -> None:
    tests = json.dumps({"tests": [{"input": "3 4", "expected": "7"}, {"input": "1 1", "expected": "2"}]})
    programs = ["a, b = map(int, input().split())\nprint(a + b)", "print(7)", "raise SystemExit(0)"]
    found = grade_tasks([Reply(None, f"```python\n{program}\n```") for program in programs], [Task(tests, "code")] * 3)
    assert [grade.verdict for grade in found] == ["right", "wrong", "wrong"]
