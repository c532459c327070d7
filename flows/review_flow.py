"""The review of traces as a flow: it waits on its page in Prefect until somebody has edited the file, and checks it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.flow_runs import pause_flow_run, suspend_flow_run
from prefect.input import RunInput
from pydantic import Field

from flows.plan import home_folder
from flows.review import check_review, export_traces, use_of
from stages.errors import PosttrainError


class TraceReview(RunInput):
    """What the form of the waiting run asks for."""

    file: str = Field(description="The edited JSONL file, on the machine that runs posttrain.")
    decision: Literal["use", "give up"] = Field("use", description="`use`: check the file and go on. `give up`: end without a review.")
    reviewer: str = Field("", description="Who reviewed; shown on the run's page.")


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
        command = use_of(recipe, overrides, node, edited)
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
