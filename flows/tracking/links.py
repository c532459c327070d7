"""The pages of one recipe: its saved views, written for the stages and scores that it has, and their addresses."""

from __future__ import annotations

from collections.abc import Sequence

from mlflow.entities import Run

from flows.tracking import views
from flows.tracking.connection import SAMPLES, Connection
from flows.tracking.scores import is_score


def write_views(connection: Connection, recipe: str) -> str:
    """Write the saved views for the stages and scores that the experiment has now. Returns an empty text."""
    experiment = connection.experiment(recipe)
    runs = connection.client.search_runs([experiment], "tags.kind = 'stage'", max_results=200, order_by=["attributes.start_time DESC"])
    nodes, logged, scores = _stages(runs)
    for view in views.recipe_views(scores, nodes, logged):
        connection.client.set_experiment_tag(experiment, *views.encode(view))
    return ""


def links(connection: Connection, recipe: str, recipe_run: str) -> dict[str, str]:
    """Label to address of the pages of a recipe run on a server."""
    experiment, run = connection.experiment(recipe), connection.outbox.real(recipe_run)
    server, mode = f"{connection.shown}/#", "workflowType=machine_learning"
    page = f"{server}/experiments/{experiment}"
    runs = connection.client.search_runs([experiment], "tags.kind = 'stage'", max_results=200, order_by=["attributes.start_time DESC"])
    nodes, _, _ = _stages(runs)
    tags = connection.client.get_run(run).data.tags if run else {}
    charts = f"{page}/runs?{mode}&compareRunsMode=CHART&viewStateShareKey="
    return {
        **({"recipe run": f"{page}/runs/{run}?{mode}"} if run else {}),
        **({"comparison": f"{page}/runs/{run}?{mode}"} if "comparison" in tags else {}),
        "score by stage": f"{charts}recipes",
        "all stages": f"{page}/runs?{mode}&compareRunsMode=TABLE&viewStateShareKey=stages",
        "models": f"{page}/models?{mode}",
        **({"registry": f"{server}/models/{recipe}?{mode}"} if "registry" in tags else {}),
        **{f"variants of {node}": f"{charts}variants-{node}" for node, kind in nodes.items() if kind != "given"},
    }


def compare_samples_url(connection: Connection, recipe: str, first: str, second: str) -> str:
    """Address of the page that shows the samples of two runs of `log_samples` side by side, prompt by prompt."""
    experiment = connection.experiment(f"{recipe}{SAMPLES}")
    return f"{connection.shown}/#/experiments/{experiment}/evaluation-runs?selectedRunUuid={first}&compareToRunUuid={second}"


def _stages(runs: Sequence[Run]) -> tuple[dict[str, str], dict[str, set[str]], list[str]]:
    """From stage runs, newest first: node to stage kind in recipe order; node to its metric names; all scores."""
    place: dict[str, tuple[str, str]] = {}
    logged: dict[str, set[str]] = {}
    for run in runs:
        tags = run.data.tags
        place.setdefault(tags["node"], (tags["stage"], tags["stage_kind"]))
        logged.setdefault(tags["node"], set()).update(run.data.metrics)
    nodes = {node: kind for node, (_, kind) in sorted(place.items(), key=lambda item: item[1])}
    found = sorted({name.removeprefix("eval/") for names in logged.values() for name in names if is_score(name)}, key=_score_order)
    return nodes, logged, found


def _score_order(score: str) -> str:
    return score.replace("non_thinking", "z")
