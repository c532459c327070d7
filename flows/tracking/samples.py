"""Completions of several variants to the same prompts, so that MLflow shows two of them side by side.

MLflow's evaluation keeps its server, its active run and its experiment in globals and environment
variables of the process, and draws progress bars. So it runs in a process of its own: this file, run
as a module, reads what to log from its standard input and answers with the run ids.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any, NamedTuple

from mlflow.exceptions import MlflowException

from flows.owner import process_identity
from flows.tracking.connection import SAMPLES, Connection
from flows.tracking.entries import user_name

LIMIT_S = 600.0
_WORKERS = "4"
_NOT_HANDED_ON = frozenset({"MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_ACTIVE_MODEL_ID", "PYTHONWARNINGS"})


class VariantSamples(NamedTuple):
    """What one variant said: one completion a prompt, the same prompts in the same order for every variant."""

    variant: str
    fingerprint: str
    """Of the evaluation that the completions are from."""
    rows: Sequence[Mapping[str, Any]]
    """Each `question`, `answer`, `completion` (texts) and `correct`: true, false, or None for not graded, which no share counts."""


def log_samples(connection: Connection, recipe: str, variants: Sequence[VariantSamples]) -> list[str]:
    """A run for each variant in the experiment `<recipe>.samples`; what is there already is reused. Returns the run ids."""
    experiment = connection.experiment(f"{recipe}{SAMPLES}")
    marks = [hashlib.sha256(json.dumps([*given], sort_keys=True, default=dict).encode()).hexdigest()[:32] for given in variants]
    found = {mark: _find(connection, experiment, mark) for mark in marks}
    missing = {mark: given for mark, given in zip(marks, variants, strict=True) if found[mark] is None}
    if missing:
        asked = [{**given._asdict(), "rows": [dict(row) for row in given.rows], "mark": mark} for mark, given in missing.items()]
        made = _evaluate(connection.uri, {"experiment": experiment, "recipe": recipe, "variants": asked})
        found |= dict(zip(missing, made, strict=True))
    return [str(found[mark]) for mark in marks]


def _find(connection: Connection, experiment: str, mark: str) -> str | None:
    runs = connection.client.search_runs([experiment], f"tags.samples = '{mark}' AND attributes.status = 'FINISHED'", max_results=1)
    return str(runs[0].info.run_id) if runs else None


def _evaluate(uri: str, asked: Mapping[str, Any]) -> list[str]:
    """Log in a process of its own. Raises MlflowException with the last line that it wrote when it fails."""
    environment = {
        **{name: value for name, value in os.environ.items() if name not in _NOT_HANDED_ON},
        "MLFLOW_TRACKING_URI": uri,
        "MLFLOW_GENAI_EVAL_MAX_WORKERS": _WORKERS,
        "MLFLOW_GENAI_EVAL_PREDICT_RATE_LIMIT": "0",
        "MLFLOW_GENAI_EVAL_SKIP_TRACE_VALIDATION": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "GIT_PYTHON_REFRESH": "quiet",
        "TQDM_DISABLE": "1",
        "PYTHONSAFEPATH": "1",
    }
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", __name__],
            input=json.dumps(asked),
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MlflowException(f"the samples were not logged within {LIMIT_S:.0f} s") from error
    if done.returncode != 0:
        raise MlflowException(f"the samples were not logged: {(done.stderr.strip().splitlines() or ['no reason was given'])[-1]}")
    runs: list[str] = json.loads(done.stdout)
    return runs


def _main() -> None:
    """Read variants from standard input, log them, write the run ids to standard output."""
    import mlflow

    asked, runs = json.load(sys.stdin), []
    with redirect_stdout(sys.stderr):
        for given in asked["variants"]:
            correct = {(row["question"], row["completion"]): row["correct"] for row in given["rows"]}

            @mlflow.genai.scorer(name="correct")
            def score(inputs: dict[str, str], outputs: str, known: dict[tuple[str, str], bool | None] = correct) -> bool | None:
                return known[inputs["question"], outputs]

            tags = {
                "kind": "samples",
                "recipe": asked["recipe"],
                "variant": given["variant"],
                "evaluation": given["fingerprint"],
                "samples": given["mark"],
                "owner": process_identity(),
                "mlflow.user": user_name(),
                "mlflow.source.name": "posttrain compare",
            }
            with mlflow.start_run(experiment_id=asked["experiment"], run_name=given["variant"], tags=tags) as run:
                mlflow.genai.evaluate(
                    data=[
                        {
                            "inputs": {"question": row["question"]},
                            "outputs": row["completion"],
                            "expectations": {"expected_response": row["answer"]},
                        }
                        for row in given["rows"]
                    ],
                    scorers=[score],
                )
            runs.append(run.info.run_id)
    print(json.dumps(runs))


if __name__ == "__main__":
    _main()
