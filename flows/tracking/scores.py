"""An evaluation's scores, put where they are looked for: on the checkpoint and on the run that made it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric

from flows.tracking.connection import Connection
from flows.tracking.entries import log_batch, metric_name
from stages.artifacts import StageResult

_SCORE = re.compile(r"(eval|length)/(?P<benchmark>.+?)_(?P<mode>non_thinking|thinking|flag_think|flag_no_think|budget_(?P<budget>\d+))$")


def attach_scores(connection: Connection, run: str, tags: Mapping[str, str], result: StageResult, time_ms: int) -> None:
    """Scores on the checkpoint, per benchmark, and on the run that made the checkpoint."""
    inputs = connection.client.get_run(run).inputs
    model = next((item.model_id for item in inputs.model_inputs), None)
    data = next((item.dataset for item in inputs.dataset_inputs if _context(item) == "eval"), None)
    on_model, on_parent, used = [], [], {}
    for name, value in result.metrics.items():
        match = _SCORE.match(name)
        if match is None or not math.isfinite(value):
            continue
        benchmark, mode, budget = match["benchmark"], match["mode"], match["budget"]
        dataset = _benchmark(benchmark, data)
        used[benchmark] = DatasetInput(dataset, [InputTag("mlflow.data.context", "eval")])
        what = "accuracy" if name.startswith("eval/") else "tokens"
        at = time_ms + list(used).index(benchmark)  # MLflow tells a model's metrics apart by name and time, not by data set
        on_model.append(
            Metric(
                f"{what}_{mode}",
                round(value, 4),
                at,
                0,
                model_id=model,
                dataset_name=dataset.name,
                dataset_digest=dataset.digest,
                run_id=run,
            )
        )
        key, step = (f"budget/{benchmark}", int(budget)) if budget and what == "accuracy" else (name, 0)
        on_parent.append(Metric(metric_name(key), round(value, 4), time_ms, step))
    if used:
        connection.client.log_inputs(run, datasets=list(used.values()))
        log_batch(connection, run, on_model)
    if parent := tags.get("mlflow.parentRunId"):
        log_batch(connection, parent, on_parent)


def is_score(name: str) -> bool:
    """Whether a metric is a score that charts and tables show; checks of the mode flag are not."""
    return name.startswith("eval/") and _SCORE.match(name) is not None and "_flag_" not in name


def _context(item: DatasetInput) -> str:
    return next((str(tag.value) for tag in item.tags if tag.key == "mlflow.data.context"), "")


def _benchmark(name: str, whole: Dataset | None) -> Dataset:
    """One benchmark of the benchmarks file as a data set of its own, so that MLflow can show a column for each."""
    digest = whole.digest if whole else "unknown"
    return Dataset(name=name, digest=digest[:12], source_type="local", source=whole.source if whole else "{}")
