"""Review of a cold start's reference traces by people: export, edit, check; by file alone, or with a pause on the Prefect page.

The traces that the node would learn from are written as JSONL (`stages/trace_review.py` says what may be edited).
The edited file is a setting of the node, `review`, and so a part of its fingerprint.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.flow_runs import pause_flow_run, suspend_flow_run
from prefect.input import RunInput
from pydantic import Field

from flows.plan import home_folder, make_plan, results_of, take
from flows.recipe import load_recipe
from stages.artifacts import Ref
from stages.errors import ArtifactError, ConfigError, PosttrainError
from stages.tables import read_rows
from stages.trace_review import apply_review, write_review

_FOLDER = "reviews"
_NAME_DIGITS = 12


class TraceReview(RunInput):
    """What the form of the waiting run asks for."""

    file: str = Field(description="The edited JSONL file, on the machine that runs posttrain.")
    decision: Literal["use", "give up"] = Field("use", description="`use`: check the file and go on. `give up`: end without a review.")
    reviewer: str = Field("", description="Who reviewed; shown on the run's page.")


def export_traces(recipe: str, overrides: Sequence[str], node: str, home: Path) -> tuple[Path, int]:
    """Write the traces that a node reads for review; returns the file and how many traces it holds.

    The file is named by the data, so the same traces have one file, and one that is there is left alone:
    it may hold somebody's work. Raises ArtifactError when the stage that makes the traces has not finished.
    """
    traces = _traces(recipe, overrides, node, home)
    path = home / _FOLDER / f"{node}-{traces.digest[:_NAME_DIGITS]}.jsonl"
    return path, write_review(read_rows(traces, columns=("question", "answer", "trace")), path)


def check_review(recipe: str, overrides: Sequence[str], node: str, home: Path, path: Path) -> int:
    """How many traces an edited file keeps. Raises DataError, naming the line, when it does not fit the traces."""
    rows = read_rows(_traces(recipe, overrides, node, home), columns=("question", "answer", "trace"))
    return len(apply_review(rows, path))


def use_of(recipe: str, node: str, path: Path) -> str:
    """The command that trains on an edited file."""
    return f"posttrain run {recipe} --set {node}.review={path}"


def _traces(recipe: str, overrides: Sequence[str], node: str, home: Path) -> Ref:
    checked = load_recipe(recipe, overrides)
    source = next((each.inputs["traces"] for each in checked.nodes if each.name == node and each.stage == "cold_start"), None)
    if source is None:
        known = ", ".join(each.name for each in checked.nodes if each.stage == "cold_start") or "none"
        raise ConfigError(f"{checked.name} has no cold start called {node!r}; traces are reviewed for a cold start; it has: {known}")
    results = results_of(make_plan(checked, home))
    if source.node not in results:
        raise ArtifactError(f"{source} has not finished with these settings; run it first: posttrain stage {source.node} --recipe {recipe}")
    return take({name: result.outputs for name, result in results.items()}, source)


@flow(name="review traces", flow_run_name="review {node} of {recipe}", persist_result=False)
def review_traces(
    recipe: Annotated[str, Field(pattern=r"^([a-z][a-z0-9_]*|.+\.ya?ml)$")] = "tiny",
    node: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")] = "cold_start",
    overrides: list[str] = [],  # noqa: B006 - the default that the form shows
    wait: Literal["pause", "suspend"] = "pause",
    timeout_hours: Annotated[float, Field(gt=0, le=24 * 30)] = 24.0,
) -> str:
    """Export the traces of a cold start, wait until somebody has edited the file, and check it.

    Press Resume on this run's page when the file is ready; a file with a fault is named, and the run waits again.

    Args:
        recipe: A recipe that comes with posttrain, or the path of your own .yaml file.
        node: The cold start in that recipe.
        overrides: Settings of the recipe, each `stage.key=value`.
        wait: `pause` keeps this run's process; `suspend` ends it, and resuming starts it again (only for a run started from the page).
        timeout_hours: How long to wait.
    """
    home, logger = home_folder(), get_run_logger()
    path, count = export_traces(recipe, overrides, node, home)
    logger.info("%d traces are in %s", count, path)
    said = f"{count} traces are in `{path}`, one a line. Change `decision`, `trace`, `response` or `note`, nothing else."
    while True:
        form = TraceReview.with_initial_data(description=said, file=str(path))
        answer = _answer(form, wait, round(timeout_hours * 3600))
        if answer.decision == "give up":
            return f"given up by {answer.reviewer or 'somebody'}; {path} is kept"
        edited = Path(answer.file)
        try:
            kept = check_review(recipe, overrides, node, home, edited)
        except PosttrainError as error:
            logger.warning("%s", error)
            said = f"**Not taken:** {error}\n\nMend the file and resume again."
            continue
        command = use_of(recipe, node, edited)
        create_markdown_artifact(
            f"{kept} of {count} traces are kept{f', reviewed by {answer.reviewer}' if answer.reviewer else ''}.\n\n    {command}\n",
            key=f"review-{node.replace('_', '-')}",
        )
        return command


def _answer(form: Any, wait: str, timeout_s: int) -> TraceReview:
    """Wait for the form of this run."""
    if wait == "suspend":
        answer = suspend_flow_run(wait_for_input=form, timeout=timeout_s)
    else:
        answer = pause_flow_run(wait_for_input=form, timeout=timeout_s, poll_interval=2)
    assert isinstance(answer, TraceReview)
    return answer
