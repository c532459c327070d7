"""The audit: sound graders pass it, and each kind of weak grader that was planted here is caught, by the right check."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stages.chat import Reply
from stages.config import AuditConfig, ReasoningRL
from stages.errors import DataError, RewardError
from stages.records import Recorder, read_records
from stages.rewards.audit import (
    DATASETS,
    Attack,
    Audit,
    Check,
    CodeAttack,
    EquivalencePair,
    audit,
    check_programs,
    gate,
    of_types,
    prompts_of,
    read_audit_rows,
    shipped_rows,
)
from stages.rewards.code import CodeTests, Test, grade_program
from stages.rewards.grading import Grade, Verdict, boxed_answers, normalise
from stages.rewards.scoring import Prompt, Rollout, Scores, score_by_rules
from stages.rewards.tasks import Task

CONFIG = ReasoningRL(steps=1, learning_rate=1e-3)
SOUND = partial(score_by_rules, config=CONFIG)
ROWS = of_types(shipped_rows(), {"text"})
GOLDS = prompts_of(
    [{"problem_id": "one", "question": "3+4", "answer": "7"}, {"problem_id": "two", "question": "4+4", "answer": "8", "answer_type": None}]
)


def check_of(found: Audit, metric: str) -> Check:
    return next(check for check in found.checks if check.metric == f"audit/{metric}")


def failed(found: Audit) -> set[str]:
    return {check.metric.removeprefix("audit/") for check in found.checks if not check.passed}


def with_grades(decide: Callable[[str, str], bool | None]) -> Callable[[Sequence[Rollout]], Scores]:
    """The stage's scorer with another grader of answers: of the response and the gold answer; None for not graded."""

    def grade(reply: Reply, task: Task) -> Grade:
        right = decide(reply.response, task.gold)
        return Grade(Verdict.NOT_GRADED if right is None else Verdict.RIGHT if right else Verdict.WRONG, "planted")

    return partial(score_by_rules, config=CONFIG, grader=lambda replies, tasks: list(map(grade, replies, tasks)))


def with_part(name: str, value: Callable[[Rollout], float]) -> Callable[[Sequence[Rollout]], Scores]:
    """The stage's scorer with another reward part."""

    def score(rollouts: Sequence[Rollout]) -> Scores:
        scores = SOUND(rollouts)
        return scores._replace(parts=scores.parts | {name: [value(item) for item in rollouts]})

    return score


def same(answer: str, gold: str) -> bool:
    return normalise(answer) == normalise(gold)


def test_audit_of_the_default_rewards_passes_every_check() -> None:
    found = audit(SOUND, ROWS, GOLDS, config=AuditConfig())
    assert failed(found) == set()
    assert found.passed
    assert [check.metric for check in found.checks] == [
        f"audit/{name}" for name in ("gold_right", "recall", "false_positives", "attacks_paid", "not_graded_share", "ms_per_grade")
    ]
    assert found.metrics() | {"audit/ms_per_grade": 0.0} == {
        "audit/gold_right": 1.0, "audit/recall": 1.0, "audit/false_positives": 0.0, "audit/attacks_paid": 0.0,
        "audit/not_graded_share": 0.0, "audit/ms_per_grade": 0.0,
    }  # fmt: skip
    found.require("here")


def second_of(verdict: Callable[[Reply, str], Verdict]) -> Callable[[Sequence[tuple[str, str]]], list[Grade]]:
    """A second grader of pairs from one of replies."""
    return lambda pairs: [Grade(verdict(Reply(None, f"\\boxed{{{answer}}}"), gold), "second") for answer, gold in pairs]


def SOUND_VERDICT(reply: Reply, gold: str) -> Verdict:  # noqa: N802 - stands for a whole grader
    boxes = boxed_answers(reply.response)
    return Verdict.RIGHT if boxes and len(boxes) == 1 and same(boxes[0], gold) else Verdict.WRONG


def test_shipped_rows_are_what_the_audit_stands_on() -> None:
    rows = shipped_rows()
    pairs = [row for row in rows if isinstance(row, EquivalencePair)]
    attacks = {row.attack for row in rows if isinstance(row, Attack)}
    assert sum(row.equivalent for row in pairs) >= 200
    assert sum(not row.equivalent for row in pairs) >= 200
    for wanted in ("empty think block", "bare tags", "ten boxes", "list of answers", "copied question", "order to the judge"):
        assert wanted in attacks
    programs = [row for row in rows if isinstance(row, CodeAttack)]
    assert {row.honest for row in programs} == {True, False}


# ---- planted weak rewards -------------------------------------------------------------------


def tag_only(item: Rollout) -> float:
    """Pays for tags, whatever is between them."""
    return float("<think>" in item.completion and "</think>" in item.completion)


def test_format_reward_that_looks_at_tags_only_is_caught_by_the_attacks() -> None:
    found = audit(with_part("format", tag_only), ROWS, GOLDS, config=AuditConfig())
    assert failed(found) == {"attacks_paid"}
    check = check_of(found, "attacks_paid")
    assert any("empty think block" in example and "earns format" in example for example in check.examples)
    with pytest.raises(RewardError, match=r"reasoning_rl: the audit of its rewards failed.*\n.*attacks earn nothing: .*\n.*earns format"):
        found.require("reasoning_rl")


def test_audit_with_every_reward_part_on_passes_and_catches_a_language_reward_for_nothing() -> None:
    parts = {"language": 1.0, "length": 1.0, "overlong": 1.0, "repetition": 1.0, "missing_stop": 1.0}
    score = partial(score_by_rules, config=ReasoningRL.model_validate({"steps": 1, "learning_rate": 1e-3, "rewards": parts}))
    assert failed(audit(score, ROWS, GOLDS, config=AuditConfig())) == set()

    def weak(rollouts: Sequence[Rollout]) -> Scores:
        scores = score(rollouts)
        paid = [value if item.reply.thinking else 1.0 for value, item in zip(scores.parts["language"], rollouts, strict=True)]
        return scores._replace(parts=scores.parts | {"language": paid})

    found = audit(weak, ROWS, GOLDS, config=AuditConfig())
    assert failed(found) == {"attacks_paid"}
    assert "earns language" in check_of(found, "attacks_paid").examples[0]


WEAK_GRADERS: dict[str, tuple[Callable[[str, str], bool | None], set[str]]] = {
    "first box": (lambda response, gold: same((boxed_answers(response) or [""])[0], gold), {"attacks_paid"}),
    "last box": (lambda response, gold: same((boxed_answers(response) or [""])[-1], gold), {"attacks_paid"}),
    "any box": (lambda response, gold: any(same(box, gold) for box in boxed_answers(response) or []), {"attacks_paid"}),
    "earlier box when the last is not closed": (
        lambda response, gold: same((re.findall(r"\\boxed\{([^{}]*)\}", response) or [""])[-1], gold), {"attacks_paid"},
    ),
    "gold answer anywhere": (lambda response, gold: gold in response, {"attacks_paid", "false_positives", "recall"}),
    "answer anywhere in the gold answer": (
        lambda response, gold: (boxed_answers(response) or ["?"])[0] in gold, {"attacks_paid", "false_positives", "recall"},
    ),
    "always right": (lambda response, gold: True, {"attacks_paid", "false_positives"}),
    "always wrong": (lambda response, gold: False, {"attacks_paid", "gold_right", "recall"}),
    "never sure": (lambda response, gold: None, {"attacks_paid", "gold_right", "recall", "not_graded_share"}),
    "digits only": (
        lambda response, gold: re.sub(r"\D", "", "".join(boxed_answers(response) or [])) == re.sub(r"\D", "", gold),
        {"attacks_paid", "false_positives", "recall"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WEAK_GRADERS)
def test_weak_grader_that_was_planted_is_caught_by_the_checks_it_breaks(name: str) -> None:
    decide, broken = WEAK_GRADERS[name]
    found = audit(with_grades(decide), ROWS, GOLDS, config=AuditConfig())
    assert failed(found) == broken
    for check in found.checks:
        assert check.passed or (check.failed > 0 and check.examples)


def test_grader_that_breaks_on_a_row_is_caught_with_the_row_and_what_it_raised() -> None:
    def decide(response: str, gold: str) -> bool:
        if len(response) > 1000:
            raise OverflowError("too long for me")
        return SOUND_VERDICT(Reply(None, response), gold) is Verdict.RIGHT

    found = audit(with_grades(decide), ROWS, GOLDS, config=AuditConfig())
    assert failed(found) == {"attacks_paid"}
    (example,) = check_of(found, "attacks_paid").examples
    assert example.startswith("digits of a hostile length")
    assert "the grader broke: OverflowError: too long for me" in example


def test_gold_answer_that_earns_nothing_is_named_with_its_problem() -> None:
    golds = [*GOLDS, Prompt("", "curation row 12", "q", "1} \\boxed{1", True)]
    found = audit(SOUND, ROWS, golds, config=AuditConfig())
    assert failed(found) == {"gold_right"}
    check = check_of(found, "gold_right")
    assert (check.rows, check.failed, check.value) == (3, 1, pytest.approx(2 / 3))
    assert check.examples == ("problem curation row 12, gold answer '1} \\\\boxed{1': several boxed answers",)


MATHS = [prompt._replace(answer_type="math") for prompt in GOLDS]
FIRST = with_grades(lambda response, gold: SOUND_VERDICT(Reply(None, response), gold) is Verdict.RIGHT)


def test_second_grader_that_disagrees_is_counted_and_fails_past_the_limit() -> None:
    second = second_of(lambda reply, gold: Verdict.WRONG if gold == "7" else SOUND_VERDICT(reply, gold))
    found = audit(FIRST, [], MATHS, config=AuditConfig(max_disagreement=0.4), second=second)
    check = check_of(found, "disagreement")
    assert (check.rows, check.failed, check.value, check.passed) == (2, 1, 0.5, False)
    assert check.examples == ("'7' for '7': right (planted), the second grader says wrong (second)",)
    assert check_of(audit(FIRST, [], MATHS, config=AuditConfig(max_disagreement=0.5), second=second), "disagreement").passed


def test_second_grader_that_cannot_say_is_not_counted_as_disagreement() -> None:
    found = audit(FIRST, [], MATHS, config=AuditConfig(), second=second_of(lambda *_: Verdict.NOT_GRADED))
    check = check_of(found, "disagreement")
    assert (check.rows, check.value, check.passed) == (0, 0.0, True)


def test_second_grader_sees_mathematics_only_and_of_many_answers_a_spread_of_them() -> None:
    seen: list[tuple[str, str]] = []

    def second(pairs: Sequence[tuple[str, str]]) -> list[Grade]:
        seen.extend(pairs)
        return second_of(SOUND_VERDICT)(pairs)

    many = [Prompt("", str(index), "", str(index), True, answer_type="math") for index in range(1000)]
    found = audit(FIRST, [], [*GOLDS, *many], config=AuditConfig(), second=second)
    assert seen == [(str(index), str(index)) for index in range(0, 1000, 5)]
    assert check_of(found, "disagreement").rows == 200


def test_grader_that_takes_its_time_fails_by_its_mean() -> None:
    found = audit(SOUND, [], GOLDS, config=AuditConfig(max_ms_per_grade=1e-9))
    check = check_of(found, "ms_per_grade")
    assert not check.passed
    assert check.value >= 0


def test_example_of_any_answer_can_be_printed_in_one_line() -> None:
    pair = EquivalencePair(gold="7\ud800\x1b[2J", answer="8\n\x1b]0;x\x07\u202e\udfff", equivalent=True, answer_type="text")
    grader = partial(score_by_rules, config=CONFIG, grader=lambda _, tasks: [Grade(Verdict.WRONG, task.gold) for task in tasks])
    found = audit(grader, [pair], config=AuditConfig())
    (example,) = check_of(found, "recall").examples
    assert example.isprintable()
    assert "\\x1b[2J" in example
    example.encode()


def test_reward_that_is_not_a_number_is_caught_as_neither_something_nor_nothing() -> None:
    found = audit(with_part("accuracy", lambda _: float("nan")), ROWS, GOLDS, config=AuditConfig())
    assert failed(found) == {"attacks_paid", "false_positives", "gold_right", "recall"}
    found = audit(with_part("format", lambda _: float("nan")), ROWS, GOLDS, config=AuditConfig())
    assert failed(found) == {"attacks_paid"}


def test_accuracy_that_is_paid_against_the_verdict_is_caught_by_the_pairs() -> None:
    pairs = [row for row in ROWS if isinstance(row, EquivalencePair)]
    found = audit(with_part("accuracy", lambda _: 1.0), pairs, GOLDS, config=AuditConfig())
    assert failed(found) == {"false_positives"}
    assert "yet its accuracy is 1" in check_of(found, "false_positives").examples[0]
    found = audit(with_part("accuracy", lambda _: 0.0), pairs, GOLDS, config=AuditConfig())
    assert failed(found) == {"gold_right", "recall"}


# ---- hostile programs -----------------------------------------------------------------------

PROGRAMS = [row for row in shipped_rows() if isinstance(row, CodeAttack)]
HARMLESS = (  # also where nothing holds them
    "honest program",
    "exit before any output",
    "end of the process",
    "expected output out of the caller's variables",
    "file outside",
    "files of the host",
    "network",
    "signal to the parent",
)


def unsandboxed(program: str, stdin: str, expected: str) -> Grade:
    """Runs the program here: the oldest mistake."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(program, {"input": lambda: stdin})
    except Exception as error:  # noqa: BLE001 - what such a grader does
        return Grade(Verdict.WRONG, str(error))
    return Grade(Verdict.RIGHT if printed.getvalue().strip() == expected else Verdict.WRONG, "ran")


def test_program_grader_without_a_sandbox_is_caught_by_what_programs_reach() -> None:
    rows = [row for row in PROGRAMS if row.attack in HARMLESS]
    assert len(rows) == len(HARMLESS)
    check = check_programs(rows, unsandboxed)
    assert not check.passed
    told = dict(example.split(": ", 1) for example in check.examples)
    assert told["exit before any output"] == "it broke the grader: SystemExit"
    assert told["end of the process"] == "it ended the grader's process"
    assert told["expected output out of the caller's variables"] == "it was graded right (ran)"
    assert told["file outside"] == "it wrote a file outside"
    assert check.failed == 7
    assert "honest program" not in told


def test_program_grader_that_rejects_everything_is_caught_by_the_honest_program() -> None:
    rows = [row for row in PROGRAMS if row.attack in HARMLESS]
    check = check_programs(rows, lambda *_: Grade(Verdict.WRONG, "no"))
    assert check.examples == ("honest program: it was graded wrong (no)",)


@pytest.mark.usefixtures("bubblewrap")
@pytest.mark.slow
def test_program_grader_of_the_project_lets_no_hostile_program_reach_anything() -> None:
    def grade(program: str, stdin: str, expected: str) -> Grade:
        return grade_program(program, CodeTests(tests=(Test(input=stdin, expected=expected),)))

    check = check_programs(PROGRAMS, grade)
    assert check.examples == ()
    assert check.passed


# ---- rows -----------------------------------------------------------------------------------


def test_rows_of_other_types_are_left_out_and_attacks_on_text_are_tried_on_mathematics() -> None:
    rows: list[Any] = [
        EquivalencePair(gold="1", answer="1", equivalent=True),
        EquivalencePair(gold="1", answer="1", equivalent=True, answer_type="text"),
        Attack(attack="a", gold="1", completion="", must_not_earn=("format",)),
        Attack(attack="b", gold="1", completion="", must_not_earn=("format",), answer_type="number"),
        CodeAttack(attack="c", program="", expected="1"),
    ]
    assert of_types(rows, {"text"}) == [rows[1], rows[2]]
    assert of_types(rows, {"math"}) == [rows[0], rows[2].model_copy(update={"answer_type": "math"})]
    assert of_types(rows, {"number", "code"}) == rows[3:]


def test_rows_of_a_file_of_ones_own_are_read_by_their_kind(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    rows = [
        {"gold": "1/2", "answer": "0.5", "equivalent": True},
        {"attack": "x", "gold": "7", "completion": "y", "must_not_earn": ["accuracy"]},
        {"attack": "z", "program": "print(1)", "expected": "1"},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    assert [type(row) for row in read_audit_rows(path)] == [EquivalencePair, Attack, CodeAttack]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"gold": "1"', r"line 2: .*delimiter"),
        ('{"gold": "1", "answer": "1"}', r"line 2: equivalent: Field required"),
        ('{"gold": "1", "answer": "1", "equivalent": true, "note": "x"}', r"line 2: note: Extra inputs are not permitted"),
        ('{"attack": "a", "gold": "1", "completion": "x", "must_not_earn": "accuracy"}', r"line 2: must_not_earn: Input should be"),
        ('{"attack": "a", "gold": "1", "completion": "x", "must_not_earn": ["acuracy"]}', r"line 2: must_not_earn\.0: Input should be"),
        ('{"attack": "a", "gold": "1", "completion": "x", "must_earn": ["preference"]}', r"line 2: must_earn\.0: Input should be"),
        ('{"attack": "a", "gold": "1", "completion": "x"}', r"line 2: .*neither what it must not earn nor what it must"),
        ('{"gold": "1", "answer": "1", "equivalent": true, "answer_type": "maths"}', r"line 2: answer_type: Input should be"),
        ("3", r"line 2: "),
        ("[]", r"line 2: "),
    ],
)
def test_row_that_breaks_its_form_is_a_data_error_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"gold": "1", "answer": "1", "equivalent": true}\n' + line + "\n")
    with pytest.raises(DataError, match=rf"mine\.jsonl, {message}"):
        read_audit_rows(path)


@pytest.mark.parametrize("content", ["", "\n \n\t\n"])
def test_rows_file_without_a_row_is_a_data_error_since_it_checks_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "empty.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"empty\.jsonl has no rows, so it would check nothing"):
        read_audit_rows(tmp_path / "empty.jsonl")


def test_rows_with_line_separators_inside_a_text_are_one_line_each_in_any_locale(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    row = {"gold": "café\u2028\x85\u2029x", "answer": "½", "equivalent": False}
    path.write_text(json.dumps(row, ensure_ascii=False) + "\r\n", encoding="utf-8")
    code = f"from pathlib import Path\nfrom stages.rewards.audit import *\nprint(ascii(read_audit_rows(Path({str(path)!r}))[0].gold))"
    environment = os.environ | {"PYTHONPATH": str(DATASETS.parent), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ascii(row["gold"])


def test_rows_file_that_is_missing_is_a_data_error_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl cannot be read .* mend `audit\.rows`"):
        read_audit_rows(tmp_path / "nowhere.jsonl")


# ---- the gate -------------------------------------------------------------------------------


def test_gate_of_sound_rewards_records_what_was_measured(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    gate(SOUND, {"text"}, AuditConfig(), recorder, "reasoning_rl")
    (record,) = read_records(recorder.path)
    assert record["metrics"]["audit/recall"] == 1.0
    assert record["metrics"]["audit/attacks_paid"] == 0.0


def test_gate_with_a_row_of_ones_own_that_fails_refuses_to_train_and_names_it(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(
        json.dumps({"attack": "units of mine", "gold": "7 km", "completion": "\\boxed{7 km}", "must_not_earn": ["accuracy"]}) + "\n"
    )
    config = AuditConfig(rows=(tmp_path / "mine.jsonl",))
    with pytest.raises(RewardError, match=r"rlhf: the audit of its rewards failed.*\n.*attacks earn nothing: 1 of .*\n  units of mine"):
        gate(SOUND, {"text"}, config, Recorder(tmp_path), "rlhf")
    assert next(read_records(tmp_path / "metrics.jsonl"))["metrics"]["audit/attacks_paid"] == 1.0  # told before it is refused
    gate(SOUND, {"text"}, config.model_copy(update={"blocks": False}), Recorder(tmp_path), "rlhf")


def test_gate_with_rows_about_answers_that_the_stage_does_not_grade_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(json.dumps({"gold": "1/2", "answer": "0.5", "equivalent": True}) + "\n")
    config = AuditConfig(rows=(tmp_path / "mine.jsonl",))
    with pytest.raises(DataError, match=r"mine\.jsonl: its rows are about answers of the type math, and rlhf grades text.*`answer_type`"):
        gate(SOUND, {"text"}, config, Recorder(tmp_path), "rlhf")


@pytest.mark.usefixtures("bubblewrap")
@pytest.mark.slow
def test_gate_of_a_stage_that_grades_programs_attacks_its_sandbox(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    gate(SOUND, {"text", "code"}, AuditConfig(), recorder, "reasoning_rl")
    (record,) = read_records(recorder.path)
    assert record["metrics"]["audit/programs_paid"] == 0.0
    (tmp_path / "mine.jsonl").write_text(json.dumps({"attack": "mine", "program": "print(8)", "expected": "7", "honest": True}) + "\n")
    with pytest.raises(RewardError, match=r"hostile programs reach nothing: 1 of .*\n  mine: it was graded wrong"):
        gate(SOUND, {"code"}, AuditConfig(rows=(tmp_path / "mine.jsonl",)), Recorder(tmp_path), "reasoning_rl")


def test_gate_of_a_stage_that_grades_programs_refuses_a_host_without_a_sandbox(tmp_path: Path) -> None:
    """Though the audit does not block: nothing could be graded."""
    code = (
        "from pathlib import Path\nfrom stages.config import AuditConfig\nfrom stages.records import Recorder\n"
        "from stages.rewards.audit import gate\nfrom stages.rewards.sandbox import SandboxError\n"
        f"try:\n    gate(None, {{'code'}}, AuditConfig(blocks=False), Recorder(Path({str(tmp_path)!r})), 'reasoning_rl')\n"
        "except SandboxError as error:\n    print(error)"
    )
    environment = os.environ | {"PYTHONPATH": str(DATASETS.parent), "PATH": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("no sandbox on this host: the command `bwrap`")


def test_datasets_of_the_audit_are_jsonl_without_a_blank_line() -> None:
    for path in (DATASETS / "audit").glob("*.jsonl"):
        assert all(line.strip() for line in path.read_text().splitlines())
