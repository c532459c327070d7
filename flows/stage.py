"""One stage, conducted: decide, reuse or launch, record in MLflow, show in Prefect and on the terminal."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import httpx
from prefect import State, flow, get_run_logger
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.exceptions import CancelledRun, PrefectException
from prefect.runtime import flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.states import Cancelled
from prefect.utilities.urls import url_for

from flows.history import Finished, Record, keep
from flows.holding import hold, set_aside, set_damaged_aside
from flows.launch import launch
from flows.models import note_digests
from flows.plan import Outputs, Step, check_code, decide, last_of, remember, take
from flows.recipe import Node
from flows.request import Job
from flows.servers.reconcile import own
from flows.servers.serving import wait_for_prefect
from flows.terminal import Screen, Update, shown_metrics
from flows.tracking import Forwarder, Status, Tracker
from stages.artifacts import LOG, METRICS, StageResult
from stages.errors import StageError

_TELL_EVERY_S = 5.0
_ASK_EVERY_S = 2.0
_LINES_AT_ONCE = 20
_BAR = re.compile(r"\d+%\|| \d+/\d+ \[")


class RunCancelled(StageError):  # noqa: N818 - it is no fault
    """Somebody asked for the end: on the Prefect page, or with Ctrl-C. What finished is kept."""

    exit_code = 130


@dataclass
class RecipeRun:
    """One run of a job's nodes: where it is recorded, and what has finished so far."""

    job: Job
    home: Path
    tracker: Tracker
    tracking_run: str
    screen: Screen
    record: Record
    flow_run: UUID
    label: str | None = None
    """What is varied, when the run is a variant of an ablation."""
    results: dict[str, StageResult] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Close the record and the tracking run as failed or killed when the block does not end well."""
        try:
            yield
        except BaseException as error:
            cancelled = isinstance(error, RunCancelled) or not isinstance(error, Exception)
            keep(self.home, self.record, status="cancelled" if cancelled else "failed", finished=round(time.time(), 1))
            if self.record.part_of is None:
                status: Status = "KILLED" if cancelled else "FAILED"
                self.tracker.finish_recipe(self.tracking_run, table=None, figure=None, table_json=None, status=status)
            raise

    def finish(self, step: Step, result: StageResult) -> None:
        """Keep a node's result: in this run's record, and as the node's last one."""
        assert step.fingerprint is not None
        name = step.node.name
        self.results[name] = result
        nodes = {**self.record.nodes, name: Finished(stage=result.stage, fingerprint=step.fingerprint)}
        drift = {**self.record.drift, **({name: step.drift} if step.drift else {})}
        self.record = keep(self.home, self.record, nodes=nodes, drift=drift)
        if not step.drift and name not in self.job.wish.given:
            remember(self.home, self.job.recipe.name, step)


def run_stage(run: RecipeRun, node: Node, handles: Mapping[str, Outputs]) -> Outputs:
    """Bring one node to its result and return its artifacts.

    `handles` holds the outputs of every model and node that it reads. A finished stage is reused
    without a flow of its own; one that another process is running is waited for, then reused. Raises
    StageError, RunCancelled when the user ended it; the stages that finished are kept.
    """
    wait_for_prefect(run.screen.say)
    inputs = {} if node.name in run.job.wish.given else {name: take(handles, source) for name, source in node.inputs.items()}
    last = last_of(run.job.recipe, run.home, run.job.wish).get(node.name)
    index = [other.name for other in run.job.whole.nodes].index(node.name)
    step = decide(node, inputs, run.home, last, run.job.wish)
    if step.result is not None:
        return _reused(run, step, index)
    assert step.folder is not None
    with hold(step.folder, node.name, run.screen.say, _until_cancelled(run.flow_run)):
        step = _decide_held(run, step, inputs, last)
        if step.result is not None:
            return _reused(run, step, index)
        # Prefect joins a heartbeat thread that sleeps for a second at the end of every flow; a stage needs none
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
            name, logger = _label(run, node) or node.name, get_run_logger()
            logger.info("%s: %s, %s", name, step.action, step.why)
            stage_flow = flow(name=node.stage, flow_run_name=name, validate_parameters=False)(_conduct(run, step, inputs, index))
            shown = {key: f"{ref.name} {ref.digest[:12]}" for key, ref in inputs.items()}
            try:
                result = cast(StageResult, stage_flow(settings=node.config.model_dump(mode="json"), inputs=shown))
            except CancelledRun as error:
                raise RunCancelled(f"{node.name} was cancelled. Finished stages are kept; the same command continues from here") from error
    logger.info("%s: finished in %.1f s", name, result.seconds)
    run.ran.add(node.name)
    run.finish(step, result)
    return result.outputs


def _decide_held(run: RecipeRun, step: Step, inputs: Outputs, last: Mapping[str, Any] | None) -> Step:
    """The step once its folder is ours: another process may have finished it. What is damaged or to be replaced is set aside."""
    assert step.folder is not None
    if (damage := set_damaged_aside(step.folder)) is not None:
        run.screen.say(f"{step.node.name}: {damage}")
    now = decide(step.node, inputs, run.home, last, run.job.wish)
    if now.replaces and (aside := set_aside(step.folder)) is not None:
        run.screen.say(f"{step.node.name}: the earlier result now lies in {aside}")
    return now


def _reused(run: RecipeRun, step: Step, index: int) -> Outputs:
    """Show a finished stage as a part of this run, too."""
    assert step.result is not None
    run.screen.reused(step.node.name, step.why)
    get_run_logger().info("%s: reused, %s", _label(run, step.node) or step.node.name, step.why)
    if (recorded := run.tracker.find_stage(step.result.fingerprint)) is not None:
        run.tracker.reuse_stage(node=step.node.name, index=index, recipe_run=run.tracking_run, run_id=recorded)
    run.finish(step, step.result)
    return step.result.outputs


def _conduct(run: RecipeRun, step: Step, inputs: Outputs, index: int) -> Any:
    """The body of a stage's flow; its parameters are there to be seen on the run's page."""
    node = step.node

    def body(settings: dict[str, Any], inputs: dict[str, str]) -> StageResult | State:
        own(flow_run.id)
        logger = get_run_logger()
        logger.info("%s: %s", step.action, step.why)
        check_code(step)
        try:
            with run.screen.stage(_label(run, node) or node.name) as update:
                result = _recorded_launch(run, step, given, index, _Live(node.name, update))
        except (RunCancelled, KeyboardInterrupt) as error:
            return Cancelled(message=str(error) or "Ctrl-C")
        note_digests(run.home, *result.outputs.values())
        wait_for_prefect(run.screen.say)  # the result is safe; its flow must be able to say so
        logger.info("finished in %.1f s, %.1f s of them in trainer and engine", result.seconds, result.busy_seconds)
        key = f"result-{node.name.replace('_', '-')}"
        create_markdown_artifact(_report(node, step, result), key=key, description="What it cost and measured")
        return result

    given = inputs
    # On Retry, Prefect would hand out an earlier sub-flow of this name; what is finished is decided here, not there
    body.__qualname__ = f"{_label(run, node) or node.name} {flow_run.run_count}".replace(".", "_")
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
        variant=run.job.recipe.variant,
        fingerprint=step.fingerprint,
        config=config,
        inputs=inputs,
        seed=node.seed,
        prefect_url=url_for("flow-run", flow_run.id),
        label=_label(run, node),
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
            stop=_until_cancelled(UUID(flow_run.id), run.flow_run),
            setting=node.key,
        )
        status = "FINISHED"
        return result
    except RunCancelled:
        raise
    except Exception:
        status = "FAILED"
        raise
    finally:
        for forwarder in forwarders:
            forwarder.close(timeout_s=15.0)
        live.tell_lines()
        log = folder / LOG if (folder / LOG).exists() else None
        run.tracker.finish_stage(record, recipe_run=run.tracking_run, node=node.name, result=result, status=status, log=log)


def _label(run: RecipeRun, node: Node) -> str | None:
    """What a stage is called as a part of an ablation: the varied one by what is varied."""
    if run.label is None:
        return None
    return run.label if node.name == run.job.stage else f"{node.name} {run.label}"


class _Live:
    """Shows a running stage's records and output, on the terminal at once and in Prefect every few seconds."""

    def __init__(self, node: str, update: Update) -> None:
        self.node, self.update, self.logger = node, update, get_run_logger()
        self.metrics: dict[str, float] = {}
        self.artifact: UUID | None = None
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
        self.logger.info("%s %d of %d  %s", what, done, total, shown_metrics(self.metrics))
        with _at_once():
            if self.artifact is None:
                key, text = f"progress-{self.node.replace('_', '-')}", f"{self.node}, in {what}s"
                self.artifact = cast(UUID, create_progress_artifact(share, key=key, description=text))
            else:
                update_progress_artifact(self.artifact, share)

    def lines(self, lines: list[str]) -> None:
        """Lines of `log.txt`; a flood and the bars of libraries are thinned out here, never there."""
        self.waiting += [line for line in lines if line.strip() and not _BAR.search(line)]
        if time.monotonic() - self.told_lines >= _TELL_EVERY_S:
            self.tell_lines()

    def tell_lines(self) -> None:
        """Hand the waiting lines to Prefect, the last ones when there are many."""
        self.told_lines, lines, self.waiting = time.monotonic(), self.waiting, []
        if len(lines) > _LINES_AT_ONCE:
            self.logger.info("(%d lines more in log.txt)", len(lines) - _LINES_AT_ONCE)
        for line in lines[-_LINES_AT_ONCE:]:
            self.logger.info("%s", line)


def _until_cancelled(*flow_runs: UUID) -> Callable[[], None]:
    """A function to call again and again: it raises RunCancelled when one of these runs was cancelled on the Prefect page."""
    client, asked = get_client(sync_client=True), 0.0

    def stop() -> None:
        nonlocal asked
        if time.monotonic() - asked < _ASK_EVERY_S:
            return
        asked = time.monotonic()
        with _at_once():
            for identity in flow_runs:
                state = client.read_flow_run(identity).state
                if state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED):
                    raise RunCancelled("cancelled on the Prefect page; finished stages are kept")

    return stop


@contextmanager
def _at_once() -> Iterator[None]:
    """Calls to Prefect that are left out when it does not answer: a server that is gone neither ends nor delays a stage."""
    with suppress(httpx.HTTPError, PrefectException), temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        yield


def _report(node: Node, step: Step, result: StageResult) -> str:
    """A finished stage on one page: why it ran, what it cost, its metrics."""
    metrics = "\n".join(f"| {name} | {value:.4g} |" for name, value in result.metrics.items())
    return (
        f"**{node.name}** ({node.stage}): {step.why}\n\n"
        f"{result.seconds:.1f} s, {result.busy_seconds:.1f} s of them in trainer and engine, {result.tokens:,} tokens, "
        f"{result.peak_memory_mib:.0f} MiB\n\nFolder: `{step.folder}`\n\n| metric | value |\n|---|---|\n{metrics}\n"
    )
