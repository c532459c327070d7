"""An audit of a recipe's rewards, as a run of its own: metrics, a table artifact and the run's note."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mlflow.entities import Metric

from flows.tracking.connection import Connection
from flows.tracking.entries import close_run, create_run, log_batch, metric_name, user_name
from flows.tracking.outbox import Call
from flows.tracking.table import log_columns, note_table

AUDIT = "audit.json"


def log_audit(connection: Connection, call: Call) -> str:
    """Open a run for an audit, fill it and close it: FAILED when a check failed. Returns its id.

    A row is one check of one stage; its examples are the first rows that failed.
    """
    rows: Sequence[Mapping[str, Any]] = call.arguments["rows"]
    passed = all(row["passed"] for row in rows)
    tags = {
        "kind": "audit",
        "recipe": call.recipe,
        "passed": str(passed).lower(),
        "mlflow.user": user_name(),
        "mlflow.source.name": f"posttrain audit {call.recipe}",
    }
    run = create_run(connection, call, f"audit of {call.recipe}", tags)
    metrics = [
        Metric(metric_name(f"{row['metric']}/{row['stage']}"), row["value"], call.time_ms, 0) for row in rows if math.isfinite(row["value"])
    ]
    log_batch(connection, run, metrics)
    log_columns(connection, run, AUDIT, {name: [_text(row[name]) for row in rows] for name in rows[0]} if rows else {})
    note_table(connection, run, _note(rows))
    close_run(connection, run, "FINISHED" if passed else "FAILED", call.time_ms)
    return run


def _text(value: Any) -> Any:
    return "\n".join(value) if isinstance(value, list) else value


def _note(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| stage | check | rows | failed | measured | rule | |", "|" + "---|" * 7]
    for row in rows:
        mark = "passed" if row["passed"] else "**FAILED**"
        lines.append(f"| {row['stage']} | {row['name']} | {row['rows']} | {row['failed']} | {row['value']:.4g} | {row['rule']} | {mark} |")
    return "\n".join(lines)
