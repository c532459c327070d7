"""The ablation table on a recipe run: metrics over its rows, a table artifact, and the run's note."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlflow.entities import Metric

from flows.tracking.connection import Connection
from flows.tracking.entries import link, log_batch, metric_name, note, run_page, set_note

_TABLE = "ablation.json"
_TABLES = "mlflow.loggedArtifacts"


def log_table(connection: Connection, run: str, recipe: str, rows: Sequence[Mapping[str, Any]], time_ms: int) -> None:
    """The ablation table as metrics, as a table artifact and as the run's note."""
    metrics = []
    for index, row in enumerate(rows):
        for score, cell in _scores(row).items():
            values = {f"ablation/{score}": index, f"{score}/{row['node']}": 0}
            if index == len(rows) - 1:
                values[f"final/{score}"] = 0
            metrics += [Metric(metric_name(name), round(cell["mean"], 4), time_ms, step) for name, step in values.items()]
    log_batch(connection, run, metrics)
    tags = connection.client.get_run(run).data.tags
    note_table(connection, run, _note_table(rows, tags, connection.experiment(recipe)))
    log_columns(connection, run, _TABLE, _columns(rows))


def note_table(connection: Connection, run: str, table: str) -> None:
    """Put a Markdown table first in a run's note, in place of the one that is there."""
    set_note(connection, run, [table, *(line for line in note(connection, run) if not line.startswith("|"))])


def log_columns(connection: Connection, run: str, file: str, columns: Mapping[str, Sequence[Any]]) -> None:
    """A table artifact that MLflow's pages know as such. Its comparison groups by the first column and shows the second."""
    table = {"columns": list(columns), "data": [list(row) for row in zip(*columns.values(), strict=True)]}
    connection.client.log_text(run, json.dumps(table), file)  # log_table would append a second time when it is sent again
    known = json.loads(connection.client.get_run(run).data.tags.get(_TABLES, "[]"))
    this = {"path": file, "type": "table"}
    connection.client.set_tag(run, _TABLES, json.dumps([*known, *([] if this in known else [this])]))


def _note_table(rows: Sequence[Mapping[str, Any]], tags: Mapping[str, str], experiment: str) -> str:
    names = list(dict.fromkeys(score for row in rows for score in _scores(row)))
    lines = ["| stage | " + " | ".join(name.replace("_", " ") for name in names) + " | tokens | seconds |", "|" + "---|" * (len(names) + 3)]
    for row in rows:
        run, cells = tags.get(f"stage_run.{row['node']}"), _scores(row)
        stage = link(row["node"], run_page(experiment, run)) or row["node"]
        shown = [
            f"{cells[name]['mean']:.3f} ({cells[name]['low']:.3f} to {cells[name]['high']:.3f})" if name in cells else "" for name in names
        ]
        lines.append(f"| {stage} | " + " | ".join(shown) + f" | {row['tokens']:,} | {row['seconds']:.0f} |")
    return "\n".join(lines)


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The ablation table by columns."""
    names = list(dict.fromkeys(score for row in rows for score in _scores(row)))
    columns: dict[str, list[Any]] = {
        "stage": [row["node"] for row in rows],
        "scores": [", ".join(f"{score} {cell['mean']:.3f}" for score, cell in _scores(row).items()) for row in rows],
    }
    for name in names:
        cells = [_scores(row).get(name) for row in rows]
        columns[name] = [None if cell is None else round(cell["mean"], 4) for cell in cells]
        columns[f"{name}_interval"] = ["" if cell is None else f"{cell['low']:.3f} to {cell['high']:.3f}" for cell in cells]
        columns[f"{name}_p"] = [None if cell is None else cell["p_value"] for cell in cells]
    for cost in ("tokens", "seconds"):
        columns[cost] = [row[cost] for row in rows]
    return columns


def _scores(row: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """`<benchmark>_<mode>` to cell, thinking budgets and flag checks left out."""
    return {f"{cell['benchmark']}_{cell['mode']}": cell for cell in row["cells"] if not cell["mode"].startswith(("budget_", "flag_"))}
