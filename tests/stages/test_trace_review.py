"""Review of traces by people: what goes out comes back as edited, and nothing else is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.errors import DataError
from stages.trace_review import apply_review, write_review

ROWS: list[dict[str, Any]] = [
    {"problem_id": f"p{index}", "question": f"{index}+1", "answer": str(index + 1), "family": "sums", "trace": f"{index}+1={index + 1}"}
    for index in range(3)
] + [{"problem_id": "p3", "question": "3+1", "answer": "4", "family": "sums", "trace": None}]


@pytest.fixture
def edited(tmp_path: Path) -> Callable[[Callable[[list[dict[str, Any]]], Any]], Path]:
    """Export, let a function change the lines, and write them back."""

    def edit(change: Callable[[list[dict[str, Any]]], Any]) -> Path:
        path = tmp_path / "review.jsonl"
        assert write_review(ROWS, path) == 3
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        change(lines)
        path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
        return path

    return edit


def test_review_left_as_exported_keeps_every_trace_as_it_was(edited: Callable[..., Path]) -> None:
    assert apply_review(ROWS, edited(lambda lines: None)) == [{**row, "response": None} for row in ROWS[:3]]


def test_review_edits_and_drops_are_applied_in_the_order_of_the_rows(edited: Callable[..., Path]) -> None:
    def change(lines: list[dict[str, Any]]) -> None:
        lines[1]["decision"] = "drop"
        lines[2] |= {"trace": "2 and 1 make 3", "response": "So \\boxed{3}.", "note": "reads better"}
        lines.reverse()

    kept = apply_review(ROWS, edited(change))
    assert [(row["problem_id"], row["trace"], row["response"]) for row in kept] == [
        ("p0", "0+1=1", None),
        ("p2", "2 and 1 make 3", "So \\boxed{3}."),
    ]


def test_review_rows_that_were_taken_out_of_the_file_are_not_used(edited: Callable[..., Path]) -> None:
    assert [row["problem_id"] for row in apply_review(ROWS, edited(lambda lines: lines.pop(0)))] == ["p1", "p2"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda lines: lines[0].update(digest="0" * 64), r"line 1: no trace here has the digest 000000000000 \(problem 'p0'\)"),
        (lambda lines: lines.append(lines[0]), "line 4: the trace of problem 'p0' stands twice"),
        (lambda lines: lines[1].update(problem_id="p0"), "line 2: problem_id was changed to 'p0'"),
        (lambda lines: lines[1].update(question="9+9"), "line 2: question was changed to '9\\+9'; only decision, trace, response and note"),
        (lambda lines: lines[2].update(answer="8"), "line 3: answer was changed to '8'"),
        (lambda lines: lines[2].update(decision="maybe"), "line 3: decision: Input should be 'keep' or 'drop'"),
        (lambda lines: lines[2].update(trace=""), "line 3: trace: String should have at least 1 character"),
        (lambda lines: lines[2].update(trace="2+1=3</think>"), "line 3: the trace of problem 'p2' holds the chat marker </think>"),
        (lambda lines: lines[0].update(response="1<|im_end|>"), r"line 1: .* holds the chat marker <\|im_end\|>; .* or drop the trace"),
        (lambda lines: lines[2].pop("digest"), "line 3: digest: Field required"),
        (lambda lines: lines[2].update(verdict="good"), "line 3: verdict: Extra inputs are not permitted"),
        (lambda lines: [line.update(decision="drop") for line in lines], "none of 3 reviewed traces is kept"),
    ],
)
def test_review_that_does_not_fit_is_a_data_error_that_names_line_and_remedy(
    edited: Callable[..., Path], change: Callable[[list[dict[str, Any]]], Any], says: str
) -> None:
    with pytest.raises(DataError, match=says):
        apply_review(ROWS, edited(change))


def test_review_of_a_trace_with_a_marker_that_is_dropped_is_taken(edited: Callable[..., Path]) -> None:
    path = edited(lambda lines: lines[0].update(trace="</think>", decision="drop"))
    assert [row["problem_id"] for row in apply_review(ROWS, path)] == ["p1", "p2"]


def test_review_file_with_separators_of_unicode_comes_back_as_it_was(tmp_path: Path) -> None:
    trace = "one\u2028two\u2029three\x85four\x0bfive\x0csix\rseven\r\neight"
    rows = [{**ROWS[0], "trace": trace}, ROWS[1]]
    path = tmp_path / "x.jsonl"
    write_review(rows, path)
    assert len(path.read_text(encoding="utf-8").splitlines()) == 2  # an editor sees a line a trace
    assert [row["trace"] for row in apply_review(rows, path)] == [trace, "1+1=2"]
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")  # unescaped
    assert [row["trace"] for row in apply_review(rows, path)] == [trace, "1+1=2"]


def test_review_file_saved_on_windows_is_read_as_any_other(edited: Callable[..., Path]) -> None:
    path = edited(lambda lines: None)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert [row["problem_id"] for row in apply_review(ROWS, path)] == ["p0", "p1", "p2"]


def test_review_of_traces_that_changed_since_the_export_is_refused(edited: Callable[..., Path]) -> None:
    path = edited(lambda lines: None)
    with pytest.raises(DataError, match="the traces changed since the export"):
        apply_review([{**ROWS[0], "trace": "another"}, *ROWS[1:]], path)


def test_review_file_that_is_no_json_or_not_there_is_a_data_error(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with pytest.raises(DataError, match="cannot be read"):
        apply_review(ROWS, path)
    path.write_text("keep\n")
    with pytest.raises(DataError, match="line 1: line: Invalid JSON"):
        apply_review(ROWS, path)


def test_review_export_leaves_a_file_that_holds_work_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("work\n")
    assert write_review(ROWS, path) == 3
    assert path.read_text() == "work\n"
    with pytest.raises(DataError, match="none of 1 problems has a trace"):
        write_review(ROWS[3:], tmp_path / "y.jsonl")
