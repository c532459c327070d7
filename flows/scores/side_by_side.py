"""Two variants read prompt by prompt: a fixed sample of each one's answers, written to MLflow for its page of evaluation runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.artifacts import CONFIG
from stages.errors import DataError

if TYPE_CHECKING:
    from flows.scores.comparison import Measured
    from flows.terminal import Screen
    from flows.tracking import Tracker

SAMPLES = 48
"""Problems a page shows, the same ones for every variant."""
_COLUMNS = ("benchmark", "mode", "problem_id", "sample", "correct", "completion")


def show_samples(home: Path, recipe: str, found: Sequence[Measured], screen: Screen) -> str:
    """Write samples of all variants to MLflow, starting the servers for it; returns the page of the last one beside the first."""
    from flows.servers.serving import servers

    with servers(home, say=screen.say) as running:
        from flows.tracking import Tracker

        return log_all(Tracker(running.mlflow_url, recipe, home), found)


def log_all(tracker: Tracker, found: Sequence[Measured]) -> str:
    """Write samples of every variant, its first seed's, once.

    Returns the page of the last one beside the first; empty when MLflow is away.
    """
    from flows.tracking import VariantSamples

    first = list({item.variant: item for item in reversed(found)}.values())[::-1]
    runs = tracker.log_samples([VariantSamples(item.variant, item.samples.parents[1].name, samples_of(item.samples)) for item in first])
    return tracker.compare_samples_url(runs[0], runs[-1]) if runs else ""


def samples_of(samples: Path) -> list[dict[str, Any]]:
    """Question, gold answer, completion and verdict of the first sample of the first problems, in thinking mode, in a fixed order.

    `samples` is the `samples.parquet` of an evaluation, whose folder says which benchmarks it read. Raises DataError when they are gone.
    """
    from pyarrow import parquet

    folder = samples.parents[1]
    benchmarks = Path(json.loads((folder / CONFIG).read_text())["inputs"]["benchmarks"]["path"])
    if not benchmarks.exists():
        raise DataError(f"{benchmarks} is gone, which holds the questions of {samples}; run the recipe's curation again")
    asked = parquet.ParquetFile(benchmarks).read(columns=["benchmark", "problem_id", "question", "answer"]).to_pylist()
    given = {
        (row["benchmark"], row["problem_id"]): row
        for row in parquet.ParquetFile(samples).read(columns=list(_COLUMNS)).to_pylist()
        if row["mode"] == "thinking" and row["sample"] == 0
    }
    both = [(row, given[key]) for row in asked if (key := (row["benchmark"], row["problem_id"])) in given]
    stride = max(1, len(both) // SAMPLES)  # from all benchmarks
    return [
        {"question": row["question"], "answer": row["answer"], "completion": answer["completion"], "correct": answer["correct"]}
        for row, answer in both[::stride][:SAMPLES]
    ]
