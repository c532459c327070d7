"""Variants of a stage, compared: on the run of the ablation or rerun, as its note, a table artifact and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mlflow.entities import Metric

from flows.tracking.connection import Connection
from flows.tracking.entries import add_to_note, log_batch, metric_name
from flows.tracking.links import write_views
from flows.tracking.outbox import Call
from flows.tracking.table import log_columns, note_table

COMPARISON = "comparison.json"


def log_comparison(connection: Connection, call: Call) -> str:
    """Record a comparison on a recipe run and write the views. Metrics have the variant's place as their step. Returns an empty text."""
    given, run = call.arguments, call.arguments["recipe_run"]
    variants = _by_variant(given["rows"])
    metrics, at = [], connection.client.get_run(run).info.start_time  # the same time again, so that a repeated call adds no points
    for step, cells in enumerate(variants.values()):
        for score, cell in cells.items():
            metrics.append(Metric(metric_name(f"comparison/{score}"), round(cell["mean"], 4), at, step))
            if cell["difference"] is not None:
                metrics.append(Metric(metric_name(f"difference/{score}"), round(cell["difference"], 4), at, step))
    log_batch(connection, run, metrics, {"comparison": given["title"]})
    note_table(connection, run, _note(variants))
    add_to_note(connection, run, "Compared:", given["title"])
    log_columns(connection, run, COMPARISON, _columns(variants))
    connection.part(partial(write_views, connection, call.recipe))
    return ""


def _by_variant(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Variant to `<benchmark>_<mode>` to row; thinking budgets and flag checks left out."""
    variants: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if not row["mode"].startswith(("budget_", "flag_")):
            variants.setdefault(row["variant"], {})[f"{row['benchmark']}_{row['mode']}"] = row
    return variants


def _scores(variants: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(score for cells in variants.values() for score in cells))


def _note(variants: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    scores = _scores(variants)
    lines = [
        "| variant | " + " | ".join(score.replace("_", " ") for score in scores) + " | tokens | seconds |",
        "|" + "---|" * (len(scores) + 3),
    ]
    for variant, cells in variants.items():
        first = next(iter(cells.values()))
        shown = " | ".join(_text(cells[score]) if score in cells else "" for score in scores)
        lines.append(f"| {_cell(variant)} | {shown} | {first['tokens']:,} | {first['seconds']:.0f} |")
    return "\n".join(lines)


def _text(cell: Mapping[str, Any]) -> str:
    """A score with its interval, and what the test against the baseline says."""
    score = f"{cell['mean']:.3f} ({cell['low']:.3f} to {cell['high']:.3f})"
    change = "" if cell["difference"] is None else f"{cell['difference']:+.3f} "
    return score if cell["verdict"] == "baseline" else f"{score}, {change}{cell['verdict']}"


def _cell(text: str) -> str:
    """Text that does not end a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def _columns(variants: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, list[Any]]:
    """The comparison by columns."""
    first = [next(iter(cells.values())) for cells in variants.values()]
    columns: dict[str, list[Any]] = {
        "variant": list(variants),
        "scores": [
            ", ".join(f"{score} {cell['mean']:.3f} ({cell['verdict']})" for score, cell in cells.items()) for cells in variants.values()
        ],
        "seeds": [", ".join(map(str, row["seeds"])) for row in first],
    }
    for score in _scores(variants):
        cells = [found.get(score) for found in variants.values()]
        columns[score] = [cell and round(cell["mean"], 4) for cell in cells]
        columns[f"{score}_interval"] = [cell and f"{cell['low']:.3f} to {cell['high']:.3f}" for cell in cells]
        columns[f"{score}_seeds"] = [cell and ", ".join(f"{mean:.3f}" for mean in cell["seed_means"]) for cell in cells]
        for name in ("difference", "difference_low", "difference_high", "p_value", "p_adjusted", "verdict", "n_problems", "n_samples"):
            columns[f"{score}_{name}"] = [cell and cell[name] for cell in cells]
    for cost in ("tokens", "seconds"):
        columns[cost] = [row[cost] for row in first]
    return columns
