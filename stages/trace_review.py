"""People review reference traces: export as JSONL, edit, and take the edited file back, checked.

One line a trace. A reviewer changes `decision` (`keep` or `drop`), `trace`, `response` and `note`, and nothing
else. `digest` is that of the trace as exported, so a file made for other data is refused, not misread. Lines end
at a line feed only; other line separators of Unicode are written escaped, and a byte order mark is passed over.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stages.errors import DataError
from stages.response_filters import chat_marker

_SEPARATORS = {ord(separator): f"\\u{ord(separator):04x}" for separator in "\x85\u2028\u2029"}
"""Line separators that JSON may hold as they are, and their escapes."""


class ReviewedTrace(BaseModel):
    """A line of a review file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    problem_id: str = Field(description="Not to be changed.")
    digest: str = Field(description="SHA-256 of question, answer, trace and response as exported; not to be changed.")
    decision: Literal["keep", "drop"] = Field("keep", description="Whether the trace is learnt from.")
    note: str = Field("", description="Anything the reviewer wants to say.")
    question: str = Field(description="Not to be changed.")
    answer: str = Field(description="Not to be changed.")
    trace: str = Field(min_length=1, description="The chain of thought; may be edited.")
    response: str = Field(description="What follows the thinking; may be edited. Empty: written from the answer.")


def digest_of_trace(row: Mapping[str, Any]) -> str:
    """SHA-256 over a trace's question, answer, trace and response."""
    content = [str(row.get(column) or "") for column in ("question", "answer", "trace", "response")]
    return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()


def write_review(rows: Sequence[Mapping[str, Any]], path: Path) -> int:
    """Write the rows that have a trace for review; returns how many. A file that is there is left as it is: it may hold work."""
    lines = {
        digest: ReviewedTrace(
            problem_id=str(row.get("problem_id") or ""),
            digest=digest,
            question=row["question"],
            answer=row["answer"],
            trace=row["trace"],
            response=row.get("response") or "",
        ).model_dump_json()
        for row in rows
        if row["trace"] and (digest := digest_of_trace(row))
    }
    if not lines:
        raise DataError(f"none of {len(rows)} problems has a trace; there is nothing to review; set `trace` in the source")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line.translate(_SEPARATORS)}\n" for line in lines.values())
    except FileExistsError:
        pass
    return len(lines)


def apply_review(rows: Sequence[Mapping[str, Any]], path: Path) -> list[dict[str, Any]]:
    """The rows that a review file keeps, with its edits, in the order of `rows`; rows that it does not hold are left out.

    Raises DataError, naming the line, for what cannot be read, for a trace that is not among the rows
    (the data changed since the export), for one that stands twice, for a changed question, answer or id, and for
    one that is kept and holds a chat marker.
    """
    known = {digest_of_trace(row): row for row in rows if row["trace"]}
    kept: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            reviewed = ReviewedTrace.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            raise DataError(f"{where}: {'.'.join(map(str, first['loc'])) or 'line'}: {first['msg']}; mend the line") from error
        row = known.get(reviewed.digest)
        if row is None:
            raise DataError(
                f"{where}: no trace here has the digest {reviewed.digest[:12]} (problem {reviewed.problem_id!r}); the traces changed "
                "since the export, or the digest was edited; export again"
            )
        if reviewed.digest in seen:
            raise DataError(f"{where}: the trace of problem {reviewed.problem_id!r} stands twice; delete one of the lines")
        for column in ("problem_id", "question", "answer"):
            if (new := getattr(reviewed, column)) != (row.get(column) or ""):
                raise DataError(
                    f"{where}: {column} was changed to {new[:60]!r}; only decision, trace, response and note may be; put it back: "
                    f"{row.get(column)!r}"
                )
        seen.add(reviewed.digest)
        if reviewed.decision == "keep":
            if (marker := chat_marker(reviewed.trace) or chat_marker(reviewed.response)) is not None:
                raise DataError(
                    f"{where}: the trace of problem {reviewed.problem_id!r} holds the chat marker {marker}; the chat template alone "
                    "writes those; take it out of trace and response, or drop the trace"
                )
            kept[reviewed.digest] = {**row, "trace": reviewed.trace, "response": reviewed.response or None}
    if not kept:
        raise DataError(f"{path}: none of {len(seen)} reviewed traces is kept; cold start needs at least one")
    return [kept.pop(digest) for digest in known if digest in kept]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}); give the JSONL file that was exported and edited") from error
