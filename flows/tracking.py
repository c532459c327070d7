"""The one door to MLflow: what a recipe, its stages and their evaluations leave there, and the links to it.

One experiment a recipe. Stage runs are flat, so that a filter finds them; an evaluation is nested in
the run whose model it scores; checkpoints are LoggedModels hard-linked in place; data sets are inputs
with our own digests. A call that MLflow cannot take is kept on disk and sent later: tracking never
fails a stage.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from getpass import getuser
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelInput, LoggedModelOutput, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException, RestException
from mlflow.tracking import MlflowClient
from mlflow.utils.file_utils import local_file_uri_to_path
from pydantic import TypeAdapter

from flows import views
from flows.outbox import Call, Outbox
from stages.artifacts import METRICS, CheckpointRef, DatasetRef, Handles, StageResult, write_json

if TYPE_CHECKING:
    from flows.ablation import AblationTable

Status = Literal["FINISHED", "FAILED", "KILLED"]
T = TypeVar("T")

EVERY_S = 3.0
AWAY_S = (15.0, 120.0)
"""How long MLflow is left alone after it did not answer: at first, doubling, and at most."""
_BATCH = 900
_PARAMS = 100
_PARAM_CHARACTERS = 500
_DIGEST_CHARACTERS = 32
_LOG_BYTES = 2_000_000
_FORWARDED = "forwarded.json"
_TABLE = "ablation.json"
_SCORE = re.compile(r"(eval|length)/(?P<benchmark>.+?)_(?P<mode>non_thinking|thinking|flag_think|flag_no_think|budget_(?P<budget>\d+))$")
_INPUTS: TypeAdapter[dict[str, CheckpointRef | DatasetRef]] = TypeAdapter(dict[str, CheckpointRef | DatasetRef])

_log = logging.getLogger("posttrain")


class Sync(NamedTuple):
    """What `Tracker.sync` did: calls and metric files sent, and how many are still waiting."""

    sent: int
    left: int


class Tracker:
    """Writes one recipe's runs. Its methods neither raise nor wait long when MLflow is away; run ids may then be provisional."""

    def __init__(self, uri: str, recipe: str, home: Path) -> None:
        """uri: tracking server or store. recipe: name, also of the experiment. home: project home; artifacts lie under it."""
        self.uri = uri.rstrip("/")
        self.recipe = recipe
        self.home = home.resolve()
        self.outbox = Outbox(self.home)
        self._client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        self._away_until, self._away_s = 0.0, AWAY_S[0]
        self._told: set[str] = set()
        self._experiments: dict[str, str] = {}
        self._perform: dict[str, Callable[[Call], str]] = {
            "start_recipe": self._start_recipe,
            "start_stage": self._start_stage,
            "finish_stage": self._finish_stage,
            "reuse_stage": self._reuse_stage,
            "finish_recipe": self._finish_recipe,
        }

    # What the flows call

    def start_recipe(
        self,
        *,
        variant: str,
        overrides: dict[str, str],
        recipe_yaml: str,
        config_hash: str,
        prefect_url: str | None,
        commit: str | None = None,
    ) -> str:
        """Open the run of a recipe. Returns its id."""
        return self._do(
            "start_recipe",
            starts_run=True,
            variant=variant,
            overrides=overrides,
            recipe_yaml=recipe_yaml,
            config_hash=config_hash,
            prefect_url=prefect_url,
            commit=commit,
            owner=_owner(),
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
    ) -> str:
        """Open the run of a stage, or of an evaluation (`stage="evaluation"`): nested in the run that made its `model` input.

        index: place of the node in the recipe, from 0. Returns the run id.
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
            owner=_owner(),
        )

    def follow(self, run_id: str, metrics_file: Path) -> Forwarder:
        """Forward the stage's `metrics.jsonl` while it grows. Close the result before `finish_stage`."""
        return Forwarder(self, run_id, metrics_file)

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
            runs = self._client.search_runs(
                [self._experiment(self.recipe)],
                f"tags.fingerprint = '{fingerprint}' AND attributes.status = 'FINISHED'",
                order_by=["attributes.end_time DESC"],
                max_results=1,
            )
            return str(runs[0].info.run_id) if runs else None

        return self._ask(search, None)

    def reap(self) -> list[str]:
        """Close runs that still claim to run although their process on this machine is gone. Returns their names."""

        def close() -> list[str]:
            closed = []
            for run in self._client.search_runs([self._experiment(self.recipe)], "attributes.status = 'RUNNING'"):
                owner = run.data.tags.get("owner", "")
                if owner.startswith(f"{socket.gethostname()}:") and owner != _owner(owner):
                    last = max([metric.timestamp for metric in run.data._metric_objs] + [run.info.start_time])
                    self._client.set_terminated(run.info.run_id, "KILLED", end_time=last)
                    closed.append(str(run.info.run_name))
            return closed

        return self._ask(close, [])

    def write_views(self) -> None:
        """Write the saved views that `links` point to, for the stages and scores that the experiment has now."""
        self._ask(lambda: self._write_views(self.recipe), None)

    def links(self, recipe_run: str) -> dict[str, str]:
        """Label to address of the pages to look at; empty when MLflow has no pages (a store without a server) or is away."""
        if not self.uri.startswith("http"):
            return {}
        return self._ask(lambda: self._links(recipe_run), {})

    @classmethod
    def sync(cls, uri: str, home: Path) -> Sync:
        """Send what MLflow could not take earlier: kept calls in their order, then the rest of every metrics file."""
        tracker = cls(uri, "", home)
        sent, left = tracker.send_kept(), 0
        for marker in sorted(tracker.home.glob(f"stages/*/*/{_FORWARDED}")):
            before = marker.read_text()
            left += not tracker.forward(json.loads(before)["run"], marker.with_name(METRICS))
            sent += marker.read_text() != before
        return Sync(sent, left + len(tracker.outbox))

    # Keeping and sending

    def forward(self, run_id: str, metrics_file: Path) -> bool:
        """Send the complete lines of a metrics file that have not been sent to this run. True when none is left."""
        run = self.outbox.real(run_id)
        if not run or not metrics_file.exists():
            return not run_id or not metrics_file.exists()
        marker = metrics_file.with_name(_FORWARDED)
        state = json.loads(marker.read_text()) if marker.exists() else {}
        offset = int(state["offset"]) if self.outbox.real(str(state.get("run", "-"))) == run else 0
        for metrics, tags, end in _lines(metrics_file, offset):
            if time.monotonic() < self._away_until or self._try(partial(self._batch, run, metrics, tags)) is None:
                return False
            write_json(marker, {"run": run, "offset": end})
        return True

    def send_kept(self) -> int:
        """Send the kept calls, oldest first, until MLflow is away again. Returns how many went."""
        return self.outbox.send(self._call) if len(self.outbox) else 0

    def _do(self, name: str, *, starts_run: bool = False, **arguments: Any) -> str:
        if arguments.get("run_id") == "":
            return ""
        if time.monotonic() >= self._away_until:
            self.send_kept()
            if not len(self.outbox) and (run := self._call(Call(self.recipe, name, arguments, _now_ms(), None))) is not None:
                return run
        return self.outbox.add(self.recipe, name, arguments, starts_run=starts_run)

    def _call(self, call: Call) -> str | None:
        """Perform a call. Returns the run id (empty when the call starts no run, or was refused), or None when MLflow is away."""
        runs = {key: self.outbox.real(call.arguments[key]) or "" for key in ("run_id", "recipe_run") if key in call.arguments}
        ready = call._replace(arguments=call.arguments | runs)
        return self._try(lambda: self._perform[call.name](ready))

    def _ask(self, question: Callable[[], T], otherwise: T) -> T:
        if time.monotonic() < self._away_until:
            return otherwise
        answer = self._try(question)
        return otherwise if answer is None or answer == "" else answer

    def _try(self, action: Callable[[], T]) -> T | Literal[""] | None:
        """What the action returns; an empty text when MLflow refused; None when it is away."""
        try:
            done = action()
            self._away_s = AWAY_S[0]
            return done
        except (MlflowException, OSError) as error:
            if _is_away(error):
                self._away_until = time.monotonic() + self._away_s
                self._away_s = min(2 * self._away_s, AWAY_S[1])
                self._tell(
                    "away",
                    f"MLflow at {self.uri} does not answer ({_short(error)}). The run goes on; its records are kept "
                    f"under {self.home} and sent when it answers again, or by `posttrain sync`",
                )
                return None
            self._tell_refused(error)
            return ""

    def _tell_refused(self, error: Exception) -> None:
        text = _short(error)
        self._tell(
            text[:80],
            f"MLflow at {self.uri} did not take a record: {text}. The run goes on; the stage folders keep everything",
        )

    def _tell(self, key: str, text: str) -> None:
        if key not in self._told:
            self._told.add(key)
            _log.warning(text)

    # What is written

    def _experiment(self, recipe: str) -> str:
        if recipe not in self._experiments:
            found = self._client.get_experiment_by_name(recipe)
            if found is None:
                here = not self.uri.startswith("http") or urlsplit(self.uri).hostname in {"127.0.0.1", "localhost", "::1"}
                location = (self.home / "artifacts").as_uri() if here else None
                identity = str(self._client.create_experiment(recipe, artifact_location=location))
                self._client.set_experiment_tag(identity, "mlflow.experimentKind", "custom_model_development")
            else:
                identity = str(found.experiment_id)
                if found.lifecycle_stage != "active":
                    self._client.restore_experiment(identity)
            self._experiments[recipe] = identity
        return self._experiments[recipe]

    def _start_recipe(self, call: Call) -> str:
        given, variant = call.arguments, call.arguments["variant"]
        tags = {
            "kind": "recipe",
            "recipe": call.recipe,
            "variant": variant,
            "config_hash": given["config_hash"],
            "owner": given["owner"],
            "mlflow.runColor": self._colour(call.recipe, variant),
            "mlflow.user": _user(),
            "mlflow.source.name": f"posttrain run {call.recipe}",
            **({"prefect": given["prefect_url"]} if given["prefect_url"] else {}),
            **({"mlflow.source.git.commit": given["commit"]} if given["commit"] else {}),
        }
        run = self._create(call, f"{call.recipe}:{variant}", tags)
        self._batch(run, params=_params(given["overrides"]))
        self._client.log_text(run, given["recipe_yaml"], "recipe.yaml")
        self._client.log_dict(run, views.settings("metrics.yaml"), "metrics_explained.yaml")
        self._note(run, [f"Recipe `{call.recipe}`, variant `{variant}`.", _link("Prefect run", given["prefect_url"])])
        return run

    def _start_stage(self, call: Call) -> str:
        given = call.arguments
        experiment, inputs = self._experiment(call.recipe), _INPUTS.validate_python(given["inputs"])
        is_evaluation = given["stage"] == "evaluation"
        models = {name: self._model(call, ref) for name, ref in inputs.items() if isinstance(ref, CheckpointRef)}
        tags = {
            "kind": "eval" if is_evaluation else "stage",
            "stage": _place(given["index"], given["node"]),
            "node": given["node"],
            "stage_kind": given["stage"],
            "recipe": call.recipe,
            "recipe_run": given["recipe_run"],
            "variant": given["variant"],
            "fingerprint": given["fingerprint"],
            "owner": given["owner"],
            "mlflow.runColor": self._colour(call.recipe, given["variant"]),
            "mlflow.user": _user(),
            "mlflow.source.name": f"stages/{given['stage']}.py",
            **({"prefect": given["prefect_url"]} if given["prefect_url"] else {}),
        }
        scored = models.get("model") if is_evaluation else None
        if scored and (parent := self._client.get_logged_model(scored).source_run_id):
            tags["mlflow.parentRunId"] = parent
        run = self._create(call, f"{given['node']}:{given['variant'].replace(given['node'] + '.', '')}", tags)
        self._batch(run, params=_params({"stage": given["stage"], "seed": given["seed"], **given["config"]}))
        datasets = [_dataset_input(ref, "eval" if is_evaluation else "train") for ref in inputs.values() if isinstance(ref, DatasetRef)]
        known = [LoggedModelInput(model) for model in models.values() if model]
        if datasets or known:
            self._client.log_inputs(run, datasets=datasets, models=known)
        self._client.log_dict(run, given["config"], "config.json")
        self._note(
            run,
            [
                _link("Recipe run", f"#/experiments/{experiment}/runs/{given['recipe_run']}"),
                _link("Prefect run", given["prefect_url"]),
                *(f"- {name}: `{ref.name}` ({ref.digest[:12]}), {ref.path}" for name, ref in inputs.items()),
            ],
        )
        self._point(given["recipe_run"], given["node"], run, is_evaluation=is_evaluation)
        return run

    def _finish_stage(self, call: Call) -> str:
        given = call.arguments
        run, log = given["run_id"], Path(given["log"]) if given["log"] else None
        tags = self._client.get_run(run).data.tags
        if log is not None:
            self.forward(run, log.with_name(METRICS))
        if given["result"] is not None:
            result = StageResult.model_validate(given["result"])
            self._part(partial(self._final_metrics, run, result, call.time_ms))
            self._part(partial(self._outputs, run, tags, result, given["recipe_run"]))
            self._part(partial(self._client.log_dict, run, given["result"], "result.json"))
            if tags.get("kind") == "eval":
                self._part(partial(self._attach_scores, run, tags, result, call.time_ms))
        if log is not None and log.exists():
            text = log.read_bytes()[-_LOG_BYTES:].decode(errors="replace")
            self._part(partial(self._client.log_text, run, text, "log.txt"))
        self._client.set_terminated(run, given["status"], end_time=call.time_ms)
        return ""

    def _reuse_stage(self, call: Call) -> str:
        given = call.arguments
        tags = self._client.get_run(given["run_id"]).data.tags
        self._point(given["recipe_run"], given["node"], given["run_id"], is_evaluation=tags.get("kind") == "eval")
        if (parent := tags.get("mlflow.parentRunId")) and (scored := self._client.get_run(parent).data.tags).get("stage_kind") == "given":
            self._point(given["recipe_run"], scored["node"], parent, is_evaluation=False)
        if model := tags.get("out_model"):
            self._client.log_inputs(given["recipe_run"], models=[LoggedModelInput(model)])
        return ""

    def _finish_recipe(self, call: Call) -> str:
        given, run = call.arguments, call.arguments["run_id"]
        if given["rows"]:
            self._part(partial(self._table, run, call.recipe, given["rows"], call.time_ms))
        for file, folder in ((given["figure"], None), (given["table_json"], "table")):
            if file and Path(file).exists():
                self._part(partial(self._client.log_artifact, run, file, folder))
        self._client.set_terminated(run, given["status"], end_time=call.time_ms)
        self._part(partial(self._write_views, call.recipe))
        return ""

    def _table(self, run: str, recipe: str, rows: Sequence[Mapping[str, Any]], time_ms: int) -> None:
        """The ablation table as metrics, as a table artifact and as the run's note."""
        metrics = []
        for index, row in enumerate(rows):
            for score, cell in _scores(row).items():
                values = {f"ablation/{score}": index, f"{score}/{row['node']}": 0}
                if index == len(rows) - 1:
                    values[f"final/{score}"] = 0
                metrics += [Metric(_name(name), round(cell["mean"], 4), time_ms, step) for name, step in values.items()]
        self._batch(run, metrics)
        tags = self._client.get_run(run).data.tags
        self._note(run, [_note_table(rows, tags, self._experiment(recipe)), _link("Prefect run", tags.get("prefect"))])
        columns = _columns(rows)
        table = {"columns": list(columns), "data": [list(row) for row in zip(*columns.values(), strict=True)]}
        self._client.log_text(run, json.dumps(table), _TABLE)  # log_table would append a second time when it is sent again
        self._client.set_tag(run, "mlflow.loggedArtifacts", json.dumps([{"path": _TABLE, "type": "table"}]))

    def _part(self, action: Callable[[], object]) -> None:
        """One part of a call: what MLflow refuses is told and left out, so that the parts after it are still written."""
        try:
            action()
        except (MlflowException, OSError) as error:
            if _is_away(error):
                raise
            self._tell_refused(error)

    def _create(self, call: Call, name: str, tags: Mapping[str, str]) -> str:
        run = self._client.create_run(self._experiment(call.recipe), start_time=call.time_ms, tags=dict(tags), run_name=name)
        return str(run.info.run_id)

    def _batch(self, run: str, metrics: Sequence[Metric] = (), tags: Mapping[str, str] | None = None, params: Sequence[Param] = ()) -> str:
        pieces = max(1, math.ceil(len(metrics) / _BATCH), math.ceil(len(params) / _PARAMS))
        for i in range(pieces):
            self._client.log_batch(
                run,
                metrics=metrics[i * _BATCH : (i + 1) * _BATCH],
                params=params[i * _PARAMS : (i + 1) * _PARAMS],
                tags=[RunTag(key, value) for key, value in (tags or {}).items()],
            )
        return run

    def _note(self, run: str, paragraphs: Iterable[str]) -> None:
        self._client.set_tag(run, "mlflow.note.content", "\n\n".join(filter(None, paragraphs)))

    def _point(self, recipe_run: str, node: str, run: str, *, is_evaluation: bool) -> None:
        if recipe_run:
            self._client.set_tag(recipe_run, f"{'eval' if is_evaluation else 'stage'}_run.{node}", run)

    def _final_metrics(self, run: str, result: StageResult, time_ms: int) -> None:
        """What the live metrics did not already hold, and what the stage cost."""
        live = self._client.get_run(run).data.metrics
        values = {
            **{_name(name): value for name, value in result.metrics.items() if _name(name) not in live},
            "cost/seconds": result.seconds,
            "cost/busy_seconds": result.busy_seconds,
            "cost/tokens": float(result.tokens),
            "cost/peak_memory_mib": result.peak_memory_mib,
        }
        self._batch(run, [Metric(name, value, time_ms, 0) for name, value in values.items() if math.isfinite(value)])

    def _outputs(self, run: str, tags: Mapping[str, str], result: StageResult, recipe_run: str) -> None:
        """Checkpoints as LoggedModels, data sets as inputs of context `output`."""
        written = [_dataset_input(ref, "output") for ref in result.outputs.values() if isinstance(ref, DatasetRef)]
        if written:
            self._client.log_inputs(run, datasets=written)
        models = [self._store(run, tags, name, ref) for name, ref in result.outputs.items() if isinstance(ref, CheckpointRef)]
        if models:
            self._client.set_tag(run, "out_model", models[0])
            if recipe_run:
                self._client.log_inputs(recipe_run, models=[LoggedModelInput(model) for model in models])

    def _attach_scores(self, run: str, tags: Mapping[str, str], result: StageResult, time_ms: int) -> None:
        """Scores on the checkpoint, per benchmark, and on the run that made the checkpoint."""
        inputs = self._client.get_run(run).inputs
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
            on_parent.append(Metric(_name(key), round(value, 4), time_ms, step))
        if used:
            self._client.log_inputs(run, datasets=list(used.values()))
            self._batch(run, on_model)
        if parent := tags.get("mlflow.parentRunId"):
            self._batch(parent, on_parent)

    def _model(self, call: Call, ref: CheckpointRef) -> str | None:
        """The LoggedModel with this content. A model that was given, not made, gets a run of its own the first time."""
        experiment = self._experiment(call.recipe)
        found = self._client.search_logged_models([experiment], filter_string=f"tags.digest = '{ref.digest}'", max_results=1)
        if found:
            model, maker = str(found[0].model_id), found[0].source_run_id
        elif ref.producer != "given":
            return None
        else:
            tags = {
                "kind": "stage",
                "stage": _place(0, ref.name),
                "node": ref.name,
                "stage_kind": "given",
                "recipe": call.recipe,
                "variant": "given",
                "fingerprint": ref.digest,
                "mlflow.user": _user(),
                "mlflow.source.name": str(ref.path),
                "mlflow.note.content": f"Model that the recipe starts from: {ref.path}",
                "mlflow.runColor": "#7f7f7f",
            }
            maker = self._create(call, ref.name, tags)
            model = self._store(maker, tags, "model", ref)
            self._client.set_tag(maker, "out_model", model)
            self._client.set_terminated(maker, "FINISHED", end_time=call.time_ms)
        if ref.producer == "given" and maker:
            self._point(call.arguments["recipe_run"], ref.name, maker, is_evaluation=False)
        return model

    def _store(self, run: str, tags: Mapping[str, str], output: str, ref: CheckpointRef) -> str:
        """Make a LoggedModel of a checkpoint: hard links where the store is a folder of this machine, else a copy through the server."""
        experiment = self._client.get_run(run).info.experiment_id
        same = f"source_run_id = '{run}' AND tags.digest = '{ref.digest}' AND status = 2"  # 2 is READY; the word matches nothing
        if found := self._client.search_logged_models([experiment], filter_string=same, max_results=1):
            return str(found[0].model_id)
        label = tags["node"] if output in ("model", tags["node"]) else f"{tags['node']}-{output}"
        variant = "" if tags["stage_kind"] == "given" else f"-{tags['variant']}"
        model = self._client.create_logged_model(
            experiment,
            name=re.sub(r"[/:.%\"']", "_", label + variant),
            source_run_id=run,
            model_type="checkpoint",
            tags={
                "node": tags["node"],
                "stage": tags["stage"],
                "variant": tags["variant"],
                "recipe": tags["recipe"],
                "fingerprint": tags["fingerprint"],
                "digest": ref.digest,
                "path": str(ref.path),
            },
        )
        try:
            if model.artifact_location.startswith(("file:", "/")):
                _link_folder(ref.path, Path(local_file_uri_to_path(model.artifact_location)))
            else:
                self._client.log_model_artifacts(model.model_id, str(ref.path))
        except (MlflowException, OSError):
            self._client.finalize_logged_model(model.model_id, "FAILED")
            raise
        self._client.log_outputs(run, [LoggedModelOutput(model.model_id, 0)])
        self._client.finalize_logged_model(model.model_id, "READY")
        return str(model.model_id)

    def _colour(self, recipe: str, variant: str) -> str:
        """One colour a variant, by the order in which variants appeared."""
        runs = self._client.search_runs([self._experiment(recipe)], "tags.kind = 'recipe'", order_by=["attributes.start_time ASC"])
        known = list(dict.fromkeys([*(run.data.tags.get("variant", "") for run in runs), variant]))
        colours: list[str] = views.settings("views.yaml").get("colours", ["#1f77b4"])
        return colours[known.index(variant) % len(colours)]

    def _write_views(self, recipe: str) -> str:
        experiment = self._experiment(recipe)
        runs = self._client.search_runs([experiment], "tags.kind = 'stage'", max_results=200, order_by=["attributes.start_time DESC"])
        nodes, logged, scores = _stages(runs)
        for view in views.recipe_views(scores, nodes, logged):
            self._client.set_experiment_tag(experiment, *views.encode(view))
        return ""

    def _links(self, recipe_run: str) -> dict[str, str]:
        experiment, run = self._experiment(self.recipe), self.outbox.real(recipe_run)
        page, mode = f"{self.uri}/#/experiments/{experiment}", "workflowType=machine_learning"
        runs = self._client.search_runs([experiment], "tags.kind = 'stage'", max_results=200, order_by=["attributes.start_time DESC"])
        nodes, _, _ = _stages(runs)
        charts = f"{page}/runs?{mode}&compareRunsMode=CHART&viewStateShareKey="
        return {
            **({"recipe run": f"{page}/runs/{run}?{mode}"} if run else {}),
            "score by stage": f"{charts}recipes",
            "all stages": f"{page}/runs?{mode}&compareRunsMode=TABLE&viewStateShareKey=stages",
            "models": f"{page}/models?{mode}",
            **{f"variants of {node}": f"{charts}variants-{node}" for node, kind in nodes.items() if kind != "given"},
        }


class Forwarder:
    """Sends a stage's metrics to MLflow every few seconds, from a thread of its own."""

    def __init__(self, tracker: Tracker, run_id: str, metrics_file: Path) -> None:
        self._tracker, self._run, self._file = tracker, run_id, metrics_file
        self._closing = threading.Event()
        self._complete = False
        marker = metrics_file.with_name(_FORWARDED)
        if run_id and (not marker.exists() or json.loads(marker.read_text())["run"] != run_id):
            write_json(marker, {"run": run_id, "offset": 0})  # another attempt: the new run gets all lines
        self._thread = threading.Thread(target=self._send, name=f"forward-{metrics_file.parent.name}", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 15.0) -> bool:
        """Send the rest and stop; waits at most timeout_s. True when everything went; what did not is sent by `Tracker.sync`."""
        self._closing.set()
        self._thread.join(timeout_s)
        return self._complete

    def _send(self) -> None:
        while not self._closing.wait(EVERY_S):
            self._tracker.forward(self._run, self._file)
        self._complete = self._tracker.forward(self._run, self._file)


def _lines(file: Path, offset: int) -> Iterable[tuple[list[Metric], dict[str, str], int]]:
    """The complete lines after the offset as batches: metrics, tags, and the offset behind them."""
    metrics: list[Metric] = []
    tags: dict[str, str] = {}
    end = offset
    with file.open("rb") as lines:
        lines.seek(offset)
        while (line := lines.readline()).endswith(b"\n"):
            try:
                record = json.loads(line)
            except ValueError:
                record = {}
            at = int(record.get("time", 0) * 1000)
            metrics += [
                Metric(_name(name), value, at, record["step"]) for name, value in record.get("metrics", {}).items() if math.isfinite(value)
            ]
            if "progress" in record:
                done, total, what = record["progress"]
                tags["progress"] = f"{done} of {total} {what}"
            end = lines.tell()
            if len(metrics) >= _BATCH:
                yield metrics, tags, end
                metrics, tags = [], {}
    if end > offset:
        yield metrics, tags, end


def _is_away(error: MlflowException | OSError) -> bool:
    """Whether MLflow could not be reached; anything else it refused."""
    if isinstance(error, MlflowException):
        no_reply = not isinstance(error, RestException) and str(error).startswith("API request")
        return no_reply or error.error_code == "TEMPORARILY_UNAVAILABLE"
    return isinstance(error, ConnectionError | TimeoutError)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _owner(like: str = "") -> str:
    """`host:pid:start` of this process, or of the process that the text names; other text when that process is gone."""
    pid = like.split(":")[1] if like else str(os.getpid())
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = "gone"
    return f"{socket.gethostname()}:{pid}:{started}"


def _user() -> str:
    try:
        return getuser()
    except (KeyError, OSError):
        return "unknown"


def _now_ms() -> int:
    return int(time.time() * 1000)


def _name(metric: str) -> str:
    """A name that MLflow takes: letters, digits and `_ - . space : /`, at most 250."""
    return re.sub(r"[^\w\-. :/]", "_", metric)[:250]


def _place(index: int, node: str) -> str:
    """Value of the `stage` tag: sorts in recipe order."""
    return f"{index:02d}-{node}"


def _link(label: str, url: str | None) -> str:
    return f"[{label}]({url})" if url else ""


def _params(config: Mapping[str, Any]) -> list[Param]:
    """Scalars of a nested config under dotted names; lists as JSON."""
    flat: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and (value or not prefix):
            for key, part in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), part)
        else:
            flat[_name(prefix)] = (json.dumps(value) if isinstance(value, list | tuple | Mapping) else str(value))[:_PARAM_CHARACTERS]

    walk("", config)
    return [Param(key, value) for key, value in flat.items()]


def _dataset_input(ref: DatasetRef, context: str) -> DatasetInput:
    dataset = Dataset(
        name=ref.name,
        digest=ref.digest[:_DIGEST_CHARACTERS],
        source_type="local",
        source=json.dumps({"uri": ref.path.as_uri()}),
        profile=json.dumps({"rows": ref.rows}),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", context)])


def _context(item: DatasetInput) -> str:
    return next((str(tag.value) for tag in item.tags if tag.key == "mlflow.data.context"), "")


def _benchmark(name: str, whole: Dataset | None) -> Dataset:
    """One benchmark of the benchmarks file as a data set of its own, so that MLflow can show a column for each."""
    digest = whole.digest if whole else "unknown"
    return Dataset(name=name, digest=digest[:12], source_type="local", source=whole.source if whole else "{}")


def _link_folder(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    same_device = source.stat().st_dev == target.parent.stat().st_dev
    shutil.copytree(source, target, copy_function=os.link if same_device else shutil.copy2, dirs_exist_ok=True)
    for file in target.rglob("*"):
        if file.is_file():
            file.chmod(0o444)


def _stages(runs: Sequence[Run]) -> tuple[dict[str, str], dict[str, set[str]], list[str]]:
    """From stage runs, newest first: node to stage kind in recipe order; node to its metric names; all scores."""
    place: dict[str, tuple[str, str]] = {}
    logged: dict[str, set[str]] = {}
    for run in runs:
        tags = run.data.tags
        place.setdefault(tags["node"], (tags["stage"], tags["stage_kind"]))
        logged.setdefault(tags["node"], set()).update(run.data.metrics)
    nodes = {node: kind for node, (_, kind) in sorted(place.items(), key=lambda item: item[1])}
    found = sorted({name.removeprefix("eval/") for names in logged.values() for name in names if _is_score(name)}, key=_score_order)
    return nodes, logged, found


def _is_score(name: str) -> bool:
    return name.startswith("eval/") and _SCORE.match(name) is not None and "_flag_" not in name


def _score_order(score: str) -> str:
    return score.replace("non_thinking", "z")


def _scores(row: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """`<benchmark>_<mode>` to cell, thinking budgets and flag checks left out."""
    return {f"{cell['benchmark']}_{cell['mode']}": cell for cell in row["cells"] if not cell["mode"].startswith(("budget_", "flag_"))}


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The ablation table by columns. MLflow's comparison of tables groups by the first column and shows the second."""
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


def _note_table(rows: Sequence[Mapping[str, Any]], tags: Mapping[str, str], experiment: str) -> str:
    names = list(dict.fromkeys(score for row in rows for score in _scores(row)))
    lines = ["| stage | " + " | ".join(name.replace("_", " ") for name in names) + " | tokens | seconds |", "|" + "---|" * (len(names) + 3)]
    for row in rows:
        run, cells = tags.get(f"stage_run.{row['node']}"), _scores(row)
        stage = _link(row["node"], f"#/experiments/{experiment}/runs/{run}") if run else row["node"]
        shown = [
            f"{cells[name]['mean']:.3f} ({cells[name]['low']:.3f} to {cells[name]['high']:.3f})" if name in cells else "" for name in names
        ]
        lines.append(f"| {stage} | " + " | ".join(shown) + f" | {row['tokens']:,} | {row['seconds']:.0f} |")
    return "\n".join(lines)
