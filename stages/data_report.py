"""The data report of a run. Of curation: what every rule left, what each source gave, what the problems are, and dropped
examples. Of the pass rates: how hard the problems are, by topic, and which of them are kept.

`data_report.json` holds the numbers, `data_report.md` the same for people, `funnel.png` the rows left after each rule and how
long the questions are; `difficulty.json`, `difficulty.md` and `difficulty.png` likewise. Beside them lie the first rows of the
tables that people review, for the pages of MLflow.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyarrow import parquet

from stages.artifacts import write_json

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.figure import Figure

EXAMPLES = 3
"""Dropped rows shown for each rule."""
ROWS = 200
"""Rows of each rule in a table that people review on a page; the whole table lies with the data."""
_SHOWN_CHARACTERS = 160
_TWINS_SHOWN = 10
_SERIES = 8
"""Families with a colour of their own in the figure; the others share one."""

ORDER = (
    "quarantined",
    "multiple choice",
    "true or false",
    "proof",
    "multi-part",
    "no checkable answer",
    "duplicate",
    "duplicate, other answer",
    "near duplicate",
    "other numbers",
    "same_question",
)
"""Rules in the order in which they meet a row; the rules of decontamination follow."""


def write_report(folder: Path, tables: Mapping[str, pa.Table], described: Mapping[str, Mapping[str, str | None]]) -> dict[str, Any]:
    """Write the report into a folder, which is made; returns the content of `data_report.json`.

    tables: the marts of curation and `quarantine`. described: by source its kind, place, revision and licence.
    """
    folder.mkdir(exist_ok=True)
    report = _content(tables, described)
    write_json(folder / "data_report.json", report)
    (folder / "data_report.md").write_text(_as_markdown(report), encoding="utf-8")
    (folder / "funnel.png").write_bytes(_figure(report["funnel"], tables["pools"]))
    for name in ("contamination", "contamination_counts", "dropped"):
        parquet.write_table(_some_of_each_rule(tables[name]), folder / f"{name}.parquet")
    return report


def _some_of_each_rule(table: pa.Table) -> pa.Table:
    """The first rows of each rule; rules that drop come first."""
    import pyarrow as pa
    from pyarrow import compute

    if "drops" in table.column_names:
        table = table.sort_by([("drops", "descending"), ("rule", "ascending")])
    rules = table["rule"].unique()
    return pa.concat_tables([table.slice(0, 0), *(table.filter(compute.equal(table["rule"], rule)).slice(0, ROWS) for rule in rules)])


def write_difficulty(folder: Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Write how hard problems are into a folder, which is made; returns the content of `difficulty.json`.

    rows: one a problem: `family`, `pass_rate` (None when nothing could be graded) and `kept`.
    """
    folder.mkdir(exist_ok=True)
    topics: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        topics.setdefault(row["family"] or "-", []).append(row)
    rates = sorted({row["pass_rate"] for row in rows if row["pass_rate"] is not None})
    report = {
        "topics": [_topic(name, topics[name]) for name in sorted(topics)],
        "histogram": [
            {
                "pass_rate": rate,
                "problems": len(here := [row for row in rows if row["pass_rate"] == rate]),
                "kept": sum(row["kept"] for row in here),
            }
            for rate in rates
        ],
    }
    write_json(folder / "difficulty.json", report)
    sections = [("Topics", report["topics"]), ("Pass rates", report["histogram"])]
    text = ["# Difficulty", "![Problems by pass rate](difficulty.png)"]
    text += [f"## {title}\n\n{_markdown_table(table, list(table[0]))}" for title, table in sections if table]
    (folder / "difficulty.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
    (folder / "difficulty.png").write_bytes(_histogram(rows))
    return report


def _topic(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rates = [row["pass_rate"] for row in rows if row["pass_rate"] is not None]
    return {
        "topic": name,
        "problems": len(rows),
        "mean_pass_rate": sum(rates) / len(rates) if rates else None,
        "never_solved": sum(rate == 0 for rate in rates),
        "always_solved": sum(rate == 1 for rate in rates),
        "not_graded": len(rows) - len(rates),
        "kept": sum(row["kept"] for row in rows),
    }


def funnel(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rules in order, with the training rows that each met and those left after it. rows: the mart `funnel`."""
    counts = {row["step"]: row["rows"] for row in rows if row["family"] == "all"}
    others = ("read", "kept", "quarantined in benchmarks")
    rules = [step for step in counts if step not in others and not step.startswith(("pool ", "benchmark "))]
    rules.sort(key=lambda rule: (ORDER.index(rule) if rule in ORDER else len(ORDER), rule))
    left = counts.get("read", 0)
    steps = [{"step": "read", "rows": left, "left": left}]
    for rule in rules:
        left -= counts[rule]
        steps.append({"step": rule, "rows": counts[rule], "left": left})
    return steps


def _content(tables: Mapping[str, pa.Table], described: Mapping[str, Mapping[str, str | None]]) -> dict[str, Any]:
    examples: dict[str, list[dict[str, Any]]] = {}
    for table, rule in (("quarantine", "reason"), ("dropped", "rule")):
        for row in tables[table].to_pylist():
            kind = "quarantined" if table == "quarantine" else row[rule]
            if len(shown := examples.setdefault(kind, [])) < EXAMPLES:
                shown.append({name: _cut(value) for name, value in row.items() if value is not None})
    twins = sorted(tables["numbered_twins"].to_pylist(), key=lambda row: (-row["problems"], row["wording"]))
    counts = {row["step"]: row["rows"] for row in tables["funnel"].to_pylist() if row["family"] == "all"}
    return {
        "funnel": funnel(tables["funnel"].to_pylist()),
        "pools": {step.removeprefix("pool "): rows for step, rows in sorted(counts.items()) if step.startswith("pool ")},
        "benchmarks": {step.removeprefix("benchmark "): rows for step, rows in sorted(counts.items()) if step.startswith("benchmark ")},
        "sources": [{**row, **described[row["source"]]} for row in tables["sources"].to_pylist()],
        "families": tables["families"].to_pylist(),
        "contamination": [row for row in tables["contamination_counts"].to_pylist() if row["source"] == "all"],
        "numbered_twins": [{name: _cut(value) for name, value in row.items()} for row in twins[:_TWINS_SHOWN]],
        "dropped_examples": dict(sorted(examples.items())),
    }


def _cut(value: Any) -> Any:
    return f"{value[:_SHOWN_CHARACTERS]}..." if isinstance(value, str) and len(value) > _SHOWN_CHARACTERS else value


# ---- for people -----------------------------------------------------------------------------


def _as_markdown(report: Mapping[str, Any]) -> str:
    sections = [
        ("Rows through the rules", report["funnel"], ("step", "rows", "left")),
        ("Sources", report["sources"], ("source", "kind", "licence", "revision", "rows", "quarantined", "dropped", "kept")),
        ("Families", report["families"], ("family", "problems", "with_trace", "question_words_p50", "question_words_p95", "answers")),
        ("Pools", [{"pool": name, "problems": rows} for name, rows in report["pools"].items()], ("pool", "problems")),
        ("Benchmarks", [{"benchmark": name, "problems": rows} for name, rows in report["benchmarks"].items()], ("benchmark", "problems")),
        ("Overlap with benchmarks", report["contamination"], ("benchmark", "rule", "drops", "problems", "benchmark_problems", "share")),
        ("Questions that differ in numbers only", report["numbered_twins"], ("wording", "problems", "answers")),
        *(
            (
                f"Dropped: {rule}",
                rows,
                tuple(
                    name
                    for name in ("source", "row_number", "reason", "evidence", "question", "other_question", "row_text")
                    if any(name in row for row in rows)
                ),
            )
            for rule, rows in report["dropped_examples"].items()
        ),
    ]
    parts = ["# Data report", "![Rows left after each rule, and length of the questions](funnel.png)"]
    for title, rows, columns in sections:
        if rows:
            parts += [f"## {title}", _markdown_table(rows, columns)]
    return "\n\n".join(parts) + "\n"


def _markdown_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(column)) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    """A value on one line, with what Markdown and HTML would take for their own kept as text."""
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    for character, written in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("`", "&#96;"), ("[", "&#91;"), ("!", "&#33;")):
        text = text.replace(character, written)
    return text


# ---- the figure -----------------------------------------------------------------------------


def _figure(steps: Sequence[Mapping[str, Any]], pools: pa.Table) -> bytes:
    figure = _blank(12, 1.8 + 0.36 * max(len(steps), 6))
    left, right = figure.subplots(1, 2)
    names = [step["step"] for step in steps]
    left.barh(names, [step["left"] for step in steps], color="#1f77b4")
    left.barh(names[1:], [step["rows"] for step in steps[1:]], left=[step["left"] for step in steps[1:]], color="#d62728")
    left.bar_label(left.containers[0], [f" {step['left']:,}" for step in steps], label_type="edge", fontsize=8)
    left.invert_yaxis()
    left.margins(x=0.12)
    left.set(title="Training rows left after each rule (red: dropped by it)", xlabel="rows")
    lengths: dict[str, list[int]] = {}
    for family, question in zip(pools["family"].to_pylist(), pools["question"].to_pylist(), strict=True):
        lengths.setdefault(family, []).append(len(question.split()))
    largest = sorted(lengths, key=lambda family: (-len(lengths[family]), family))
    series = {_plain(family): lengths[family] for family in largest[:_SERIES]}
    if rest := [length for family in largest[_SERIES:] for length in lengths[family]]:
        series[f"{len(largest) - _SERIES} others"] = rest
    if series:
        right.hist(list(series.values()), bins=30, stacked=True, label=list(series))
        right.legend(fontsize=8)
    right.set(title="Length of the questions kept", xlabel="words", ylabel="problems")
    return _drawn(figure)


def _histogram(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Problems by pass rate, kept ones apart."""
    figure = _blank(7, 3.6)
    axes = figure.subplots()
    rates = [[row["pass_rate"] for row in rows if row["pass_rate"] is not None and row["kept"] == kept] for kept in (True, False)]
    axes.hist(rates, bins=[(place - 0.5) / 8 for place in range(10)], stacked=True, label=["kept", "dropped"], color=["#1f77b4", "#d62728"])
    axes.legend(fontsize=8)
    axes.set(title="Problems by pass rate", xlabel="pass rate", ylabel="problems")
    return _drawn(figure)


def _blank(width: float, height: float) -> Figure:
    """An empty figure, in inches, which needs no screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _drawn(figure: Figure) -> bytes:
    """A figure as PNG, the same bytes every time."""
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=110, metadata={"Software": None})
    return written.getvalue()


def _plain(name: str) -> str:
    """A name that every font can draw and that matplotlib takes literally."""
    return name.encode("ascii", "backslashreplace").decode().replace("$", r"\$").lstrip("_") or "-"
