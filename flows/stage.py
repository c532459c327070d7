"""One stage, conducted: decide, reuse or launch, record in MLflow, show in Prefect and on the terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import httpx
from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.utilities.urls import url_for

from flows.launch import launch
from flows.plan import Outputs, Step, check_code, decide, read_state, remember, take
from flows.recipe import Node, Recipe
from flows.terminal import Screen, Update
from flows.tracking import Forwarder, Status, Tracker
from stages.artifacts import LOG, METRICS, StageResult

_TELL_EVERY_S = 5.0
_LINES_AT_ONCE = 20


@dataclass
class RecipeRun:
    """One run of a recipe, of all of it or of some `nodes`: where it is recorded, and what has finished so far."""

    recipe: Recipe
    nodes: tuple[Node, ...]
    home: Path
    tracker: Tracker
    tracking_run: str
    screen: Screen
    only: str | None = None
    results: dict[str, StageResult] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Close the tracking run as failed or killed when the block does not end well."""
        try:
            yield
        except BaseException as error:
            status: Status = "FAILED" if isinstance(error, Exception) else "KILLED"
            self.tracker.finish_recipe(self.tracking_run, table=None, figure=None, table_json=None, status=status)
            raise


def run_stage(run: RecipeRun, node: Node, handles: Mapping[str, Outputs]) -> Outputs:
    """Bring one node to its result and return its artifacts.

    `handles` holds the outputs of every model and node that it reads. A finished stage is reused
    without a flow of its own. Raises StageError; the stages that finished are kept.
    """
    inputs = {name: take(handles, source) for name, source in node.inputs.items()}
    index = [other.name for other in run.recipe.nodes].index(node.name)
    step = decide(node, inputs, run.home, read_state(run.home, run.recipe.name).get("nodes", {}).get(node.name))
    if step.result is None:
        # Prefect joins a heartbeat thread that sleeps for a second at the end of every flow; a stage needs none
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
            stage_flow = flow(name=node.stage, flow_run_name=node.name, validate_parameters=False)(_conduct(run, step, inputs, index))
            shown = {name: f"{ref.name} {ref.digest[:12]}" for name, ref in inputs.items()}
            result = cast(StageResult, stage_flow(settings=node.config.model_dump(mode="json"), inputs=shown))
        run.ran.add(node.name)
    else:
        result = step.result
        run.screen.reused(node.name)
        if (recorded := run.tracker.find_stage(result.fingerprint)) is not None:
            run.tracker.reuse_stage(node=node.name, index=index, recipe_run=run.tracking_run, run_id=recorded)
        remember(run.home, run.recipe.name, step)
    run.results[node.name] = result
    return result.outputs


def _conduct(run: RecipeRun, step: Step, inputs: Outputs, index: int) -> Any:
    """The body of a stage's flow; its parameters are there to be seen on the run's page."""
    node, folder = step.node, step.folder
    assert folder is not None
    assert step.fingerprint is not None

    def body(settings: dict[str, Any], inputs: dict[str, str]) -> StageResult:
        logger = get_run_logger()
        logger.info("%s: %s", step.action, step.why)
        check_code(step)
        with run.screen.stage(node.name) as update:
            result = _recorded_launch(run, step, given, index, _Live(node.name, update))
        remember(run.home, run.recipe.name, step)
        logger.info("finished in %.1f s, %.1f s of them in trainer and engine", result.seconds, result.busy_seconds)
        create_markdown_artifact(_report(node, step, result), key=f"result-{node.name.replace('_', '-')}")
        return result

    given = inputs
    return body


def _recorded_launch(run: RecipeRun, step: Step, inputs: Outputs, index: int, live: _Live) -> StageResult:
    node, folder = step.node, step.folder
    assert folder is not None
    assert step.fingerprint is not None
    config = node.config.model_dump(mode="json")
    content = {
        "stage": node.stage,
        "node": node.name,
        "fingerprint": step.fingerprint,
        "key": step.key,
        "config": config,
        "inputs": {name: ref.model_dump(mode="json") for name, ref in inputs.items()},
        "seed": node.seed,
    }
    record = run.tracker.start_stage(
        node=node.name,
        stage=node.stage,
        index=index,
        recipe_run=run.tracking_run,
        variant=run.recipe.variant,
        fingerprint=step.fingerprint,
        config=config,
        inputs=inputs,
        seed=node.seed,
        prefect_url=url_for("flow-run", flow_run.id),
    )
    forwarders: list[Forwarder] = []
    result: StageResult | None = None
    status: Status = "KILLED"
    try:
        result = launch(
            folder,
            content,
            on_start=lambda: forwarders.append(run.tracker.follow(record, folder / METRICS)),
            on_record=live.record,
            on_lines=live.lines,
            setting=node.key,
        )
        status = "FINISHED"
        return result
    except Exception:
        status = "FAILED"
        raise
    finally:
        for forwarder in forwarders:
            forwarder.close(timeout_s=15.0)
        live.tell_lines()
        log = folder / LOG if (folder / LOG).exists() else None
        run.tracker.finish_stage(record, recipe_run=run.tracking_run, node=node.name, result=result, status=status, log=log)


class _Live:
    """Shows a running stage's records and output, on the terminal at once and in Prefect every few seconds."""

    def __init__(self, node: str, update: Update) -> None:
        self.node, self.update, self.logger = node, update, get_run_logger()
        self.metrics: dict[str, float] = {}
        self.artifact: UUID | None = None
        self.away = False
        self.told_progress = self.told_lines = 0.0
        self.waiting: list[str] = []

    def record(self, record: dict[str, Any]) -> None:
        """A record of `metrics.jsonl`."""
        self.metrics.update(record.get("metrics", {}))
        if "progress" not in record:
            return
        done, total, what = record["progress"]
        self.update(done, total, what, self.metrics)
        now = time.monotonic()
        if now - self.told_progress < _TELL_EVERY_S:
            return
        self.told_progress, share = now, 100 * done / max(total, 1)
        if self.away:
            return
        try:
            if self.artifact is None:
                key, text = f"progress-{self.node.replace('_', '-')}", f"{self.node}, in {what}s"
                self.artifact = cast(UUID, create_progress_artifact(share, key=key, description=text))
            else:
                update_progress_artifact(self.artifact, share)
        except (httpx.HTTPError, PrefectException) as error:  # a server that is gone must not end the stage
            self.away = True
            self.logger.warning("no more progress is shown here: %s", error)

    def lines(self, lines: list[str]) -> None:
        """Lines of `log.txt`; a flood is thinned out here, never there."""
        self.waiting += lines
        if time.monotonic() - self.told_lines >= _TELL_EVERY_S:
            self.tell_lines()

    def tell_lines(self) -> None:
        """Hand the waiting lines to Prefect, the last ones when there are many."""
        self.told_lines, lines, self.waiting = time.monotonic(), self.waiting, []
        if len(lines) > _LINES_AT_ONCE:
            self.logger.info("(%d lines more in log.txt)", len(lines) - _LINES_AT_ONCE)
        for line in lines[-_LINES_AT_ONCE:]:
            self.logger.info("%s", line)


def _report(node: Node, step: Step, result: StageResult) -> str:
    """A finished stage on one page: why it ran, what it cost, its metrics."""
    metrics = "\n".join(f"| {name} | {value:.4g} |" for name, value in result.metrics.items())
    return (
        f"**{node.name}** ({node.stage}): {step.why}\n\n"
        f"{result.seconds:.1f} s, {result.busy_seconds:.1f} s of them in trainer and engine, {result.tokens:,} tokens, "
        f"{result.peak_memory_mib:.0f} MiB\n\nFolder: `{step.folder}`\n\n| metric | value |\n|---|---|\n{metrics}\n"
    )
