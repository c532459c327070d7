"""What the flows call. Every call that writes is performed now, or kept on disk and sent later: tracking never fails a stage."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from flows.owner import process_identity
from flows.tracking import audits, compared, registry, runs
from flows.tracking.connection import Connection
from flows.tracking.entries import now_ms
from flows.tracking.forwarder import FORWARDED, Forwarder, forward
from flows.tracking.links import compare_samples_url, links, write_views
from flows.tracking.outbox import Call, new_run
from flows.tracking.samples import VariantSamples, log_samples
from stages.artifacts import METRICS, CheckpointRef, Handles, StageResult

if TYPE_CHECKING:
    from flows.scores.ablation import AblationTable

Status = Literal["FINISHED", "FAILED", "KILLED"]
Kind = Literal["recipe", "rerun", "ablation"]

_PERFORM: dict[str, Callable[[Connection, Call], str]] = {
    "start_recipe": runs.start_recipe,
    "start_stage": runs.start_stage,
    "finish_stage": runs.finish_stage,
    "reuse_stage": runs.reuse_stage,
    "finish_recipe": runs.finish_recipe,
    "log_comparison": compared.log_comparison,
    "log_audit": audits.log_audit,
    "release": registry.release,
    "close_dead_runs": runs.close_dead_runs,
}


class Tracker:
    """Writes one recipe's runs. Its methods neither raise nor wait long when MLflow is away; run ids may then be provisional."""

    def __init__(self, uri: str, recipe: str, home: Path) -> None:
        """uri: tracking server or store. recipe: name, also of the experiment. home: project home; artifacts lie under it."""
        self._connection = Connection(uri, home)
        self._recipe = recipe

    def start_recipe(
        self,
        *,
        variant: str,
        overrides: dict[str, str],
        recipe_yaml: str,
        config_hash: str,
        prefect_url: str | None,
        commit: str | None = None,
        run: str = "",
        kind: Kind = "recipe",
        of_run: str | None = None,
        drift: Mapping[str, str] | None = None,
    ) -> str:
        """Open the run of a recipe, or of a rerun or an ablation of one of its stages. Returns its id.

        run: short id, such as `tiny-3`. of_run: short id of the run that the upstream artifacts are from.
        drift: stage that was reused in spite of a change, to what changed.
        Raises ServerError when another home on this machine writes this recipe's experiment.
        """
        self._claim()
        return self._do(
            "start_recipe",
            starts_run=True,
            variant=variant,
            overrides=overrides,
            recipe_yaml=recipe_yaml,
            config_hash=config_hash,
            prefect_url=prefect_url,
            commit=commit,
            run=run,
            kind=kind,
            of_run=of_run,
            drift=dict(drift or {}),
            owner=process_identity(),
        )

    def start_stage(
        self,
        *,
        node: str,
        stage: str,
        index: int,
        recipe_run: str,
        variant: str,
        fingerprint: str,
        config: dict[str, Any],
        inputs: Handles,
        seed: int,
        prefect_url: str | None,
        label: str | None = None,
    ) -> str:
        """Open the run of a stage, or of an evaluation (`stage="evaluation"`): nested in the run that made its `model` input.

        index: place of the node in the recipe, from 0. label: name of the run and of its checkpoint, for instance
        `reasoning_rl:loss=dr_grpo seed=1`; made of node and variant when left out. Returns the run id.
        """
        return self._do(
            "start_stage",
            starts_run=True,
            node=node,
            stage=stage,
            index=index,
            recipe_run=recipe_run,
            variant=variant,
            fingerprint=fingerprint,
            config=config,
            inputs={name: ref.model_dump(mode="json") for name, ref in inputs.items()},
            seed=seed,
            prefect_url=prefect_url,
            label=label,
            owner=process_identity(),
        )

    def follow(self, run_id: str, metrics_file: Path) -> Forwarder:
        """Forward the stage's `metrics.jsonl` while it grows. Close the result before `finish_stage`."""
        return Forwarder(self._connection, run_id, metrics_file)

    def finish_stage(
        self, run_id: str, *, recipe_run: str, node: str, result: StageResult | None, status: Status, log: Path | None
    ) -> None:
        """Record a stage's outputs, final metrics and log, and close its run; the status is set last.

        An evaluation's scores also go to the checkpoint they belong to and to the run that made it.
        log: the stage folder's log.txt; the rest of the folder's metrics.jsonl is sent from beside it.
        """
        self._do(
            "finish_stage",
            run_id=run_id,
            recipe_run=recipe_run,
            node=node,
            status=status,
            log=None if log is None else str(log),
            result=None if result is None else result.model_dump(mode="json"),
        )

    def reuse_stage(self, *, node: str, index: int, recipe_run: str, run_id: str) -> None:
        """Show a stage that was finished earlier as a part of this recipe run too."""
        self._do("reuse_stage", node=node, index=index, recipe_run=recipe_run, run_id=run_id)

    def finish_recipe(
        self, run_id: str, *, table: AblationTable | None, figure: Path | None, table_json: Path | None, status: Status
    ) -> None:
        """Record the ablation table (metrics at step = row, artifact, figure, note with links), close the run, write the views."""
        rows = [] if table is None else [{**row._asdict(), "cells": [cell._asdict() for cell in row.cells]} for row in table.rows]
        self._do(
            "finish_recipe",
            run_id=run_id,
            rows=rows,
            figure=None if figure is None else str(figure),
            table_json=None if table_json is None else str(table_json),
            status=status,
        )

    def find_stage(self, fingerprint: str) -> str | None:
        """The newest finished run with this fingerprint, or None (also when MLflow cannot say)."""

        def search() -> str | None:
            found = self._connection.client.search_runs(
                [self._connection.experiment(self._recipe)],
                f"tags.fingerprint = '{fingerprint}' AND attributes.status = 'FINISHED'",
                order_by=["attributes.end_time DESC"],
                max_results=1,
            )
            return str(found[0].info.run_id) if found else None

        return self._connection.ask(search, None)

    def log_comparison(self, recipe_run: str, rows: Sequence[Mapping[str, Any]], title: str) -> None:
        """Record a comparison of variants (`rows` of `Comparison.to_json`) on the run of an ablation or rerun, and write the views.

        It becomes the run's note, the artifact `comparison.json`, and metrics whose step is the variant's place.
        """
        self._do("log_comparison", recipe_run=recipe_run, rows=[dict(row) for row in rows], title=title)

    def log_audit(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Record an audit of the recipe's rewards (rows of `flows.audit.rows_of`) as a run of its own. Returns its id.

        Raises ServerError when another home on this machine writes this recipe's experiment.
        """
        self._claim()
        return self._do("log_audit", starts_run=True, rows=[dict(row) for row in rows])

    def release(self, recipe_run: str, models: Mapping[str, CheckpointRef]) -> None:
        """Give checkpoints of a finished recipe run a version in the registry, each with its alias; what has a version keeps it."""
        self._do("release", recipe_run=recipe_run, models={alias: ref.model_dump(mode="json") for alias, ref in models.items()})

    def aliased(self) -> frozenset[str]:
        """Digests of all checkpoints with an alias in any registered model. Raises ServerError when MLflow cannot say."""
        return self._connection.must(lambda: registry.aliased(self._connection), "which checkpoints have an alias")

    def forget(self, digests: Iterable[str]) -> int:
        """Delete the checkpoints with these digests from MLflow and from its store under the home; never one with an alias.

        Runs and metrics stay. Returns the bytes freed: of files that a stage folder still links to, none.
        Raises ServerError when MLflow cannot say which have an alias, or stops to answer; what was deleted stays so.
        """
        return self._connection.must(lambda: registry.forget(self._connection, digests), "deleting checkpoints")

    def log_samples(self, variants: Sequence[VariantSamples]) -> list[str]:
        """Log what variants said to the same prompts, once for each evaluation. Returns their run ids; none when MLflow is away."""
        return self._connection.ask(lambda: log_samples(self._connection, self._recipe, variants), [])

    def compare_samples_url(self, first: str, second: str) -> str:
        """Address of the page that shows two runs of `log_samples` side by side; empty without a server that answers."""
        if not self._connection.uri.startswith("http"):
            return ""
        return self._connection.ask(lambda: compare_samples_url(self._connection, self._recipe, first, second), "")

    def reap(self) -> None:
        """Close runs that still claim to run although their process on this machine is gone: once MLflow has taken what was kept."""
        self._do("close_dead_runs")

    def write_views(self) -> None:
        """Write the saved views that `links` point to, for the stages and scores that the experiment has now."""
        self._connection.ask(lambda: write_views(self._connection, self._recipe), None)

    def links(self, recipe_run: str) -> dict[str, str]:
        """Label to address of the pages to look at; empty when MLflow has no pages (a store without a server) or is away."""
        if not self._connection.uri.startswith("http"):
            return {}
        return self._connection.ask(lambda: links(self._connection, self._recipe, recipe_run), {})

    @classmethod
    def sync(cls, uri: str, home: Path) -> Sync:
        """Send what MLflow could not take earlier: kept calls in their order, then the rest of every metrics file. Then close dead runs."""
        connection = Connection(uri, home)
        sent, left = _send_kept(connection), 0
        for marker in sorted(connection.home.glob(f"stages/*/*/{FORWARDED}")):
            before = marker.read_text()
            left += not forward(connection, json.loads(before)["run"], marker.with_name(METRICS))
            sent += marker.read_text() != before
        left += len(connection.outbox)
        connection.ask(lambda: runs.close_dead(connection, connection.own_experiments()), None)
        return Sync(sent, left)

    def _claim(self) -> None:
        self._connection.ask(lambda: self._connection.claim_experiment(self._recipe), None)

    def _do(self, name: str, *, starts_run: bool = False, **arguments: Any) -> str:
        if arguments.get("run_id") == "":
            return ""
        connection = self._connection
        call = Call(self._recipe, name, arguments, now_ms(), new_run() if starts_run else None)
        if not connection.is_away():
            _send_kept(connection)
            if not len(connection.outbox) and (run := _perform(connection, call)) is not None:
                return run
        return connection.outbox.add(call)


class Sync(NamedTuple):
    """What `Tracker.sync` did: calls and metric files sent, and how many are still waiting."""

    sent: int
    left: int


def _send_kept(connection: Connection) -> int:
    """Send the kept calls, oldest first, until MLflow is away again. Returns how many went."""
    return connection.outbox.send(lambda call: _perform(connection, call)) if len(connection.outbox) else 0


def _perform(connection: Connection, call: Call) -> str | None:
    """Perform a call. Returns the run id (empty when the call starts no run, or was refused), or None when MLflow is away."""
    known = {key: connection.outbox.real(call.arguments[key]) or "" for key in ("run_id", "recipe_run") if key in call.arguments}
    ready = call._replace(arguments=call.arguments | known)
    return connection.attempt(lambda: _PERFORM[call.name](connection, ready))
