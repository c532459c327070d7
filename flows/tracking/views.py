"""The pages of MLflow that open with one click: saved views, written as experiment tags.

The format of a saved view belongs to MLflow's pages (3.17) and is not documented, so it is made in
this file only and looked at by `tests/flows/test_pages.py`. What the views show is in `mlflow/views.yaml`.
"""

from __future__ import annotations

import base64
import json
import re
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

SETTINGS = Path(__file__).resolve().parents[2] / "mlflow"
_SECTION = "posttrain"
_PADDING_PIXELS = 32
_CHARACTER_PIXELS = 6
_FIRST_COLUMNS = {"1": 60, "attributes.`Run Name`": 230, "runDateAndNestInfo": 140, "duration": 80}
_MAX_CHARACTERS = 20_000


class View(NamedTuple):
    """One saved view: which runs (`filter`), which columns of the table, which charts."""

    key: str
    name: str
    filter: str
    columns: tuple[str, ...] = ()
    charts: tuple[dict[str, Any], ...] = ()
    group_by_tag: str | None = None
    section: str = "Charts"


def settings(name: str) -> Any:
    """The content of a YAML file in `mlflow/`; empty when the package was installed without that folder."""
    path = SETTINGS / name
    return yaml.safe_load(path.read_text()) if path.exists() else {}


def meaning(metric: str) -> dict[str, str] | None:
    """Unit, direction and definition of a logged metric (`mlflow/metrics.yaml`); None when it has no entry."""
    for name, row in settings("metrics.yaml").items():
        pattern = "".join(f"[^/]+?{re.escape(rest)}" for rest in re.split(r"<\w+>", name)).removeprefix("[^/]+?")
        if re.fullmatch(pattern, metric):
            found: dict[str, str] = row
            return found
    return None


def line(metric: str) -> dict[str, Any]:
    """A chart of the metric over its steps, one line a run."""
    return {
        **_chart("LINE", metric),
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        "selectedYAxisMetricKey": metric,
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "xAxisKey": "step",
        "xAxisScaleType": "linear",
        "scaleType": "linear",
        "lineSmoothness": 0,
        "ignoreOutliers": False,
        "selectedXAxisMetricKey": "",
        "displayPoints": True,
        "range": {"xMin": None, "xMax": None, "yMin": None, "yMax": None},
        "useGlobalLineSmoothing": False,
        "useGlobalXaxisKey": False,
    }


def bar(metric: str) -> dict[str, Any]:
    """A chart of the metric's last value, one bar a run."""
    return {**_chart("BAR", metric), "metricKey": metric}


def tag(name: str) -> str:
    """The column of a tag."""
    return f"tags.`{name}`"


def metric(name: str) -> str:
    """The column of a metric."""
    return f"metrics.`{name}`"


def encode(view: View) -> tuple[str, str]:
    """Name and value of the experiment tag that holds the view."""
    grouped = {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": view.group_by_tag}]}
    widths = {**_FIRST_COLUMNS, **{column: _PADDING_PIXELS + _CHARACTER_PIXELS * len(column.split("`")[1]) for column in view.columns}}
    state = {
        "searchFilter": view.filter,
        "orderByKey": tag(view.group_by_tag) if view.group_by_tag else "attributes.start_time",
        "orderByAsc": view.group_by_tag is not None,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": list(view.columns),
        "columnOrder": list(widths),
        "columnWidths": widths,
        "runsHiddenMode": "FIRST_20_RUNS",
        "viewMaximized": False,
        "runListHidden": False,
        "useGroupedValuesInCharts": False,
        "hideEmptyCharts": True,
        "isAccordionReordered": True,
        "groupBy": grouped if view.group_by_tag else None,
        "groupsExpanded": {},
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
        "chartsSearchFilter": "",
        "compareRunCharts": list(view.charts),
        "compareRunSections": [
            {
                "uuid": _SECTION,
                "name": view.section,
                "display": True,
                "isReordered": True,
                "deleted": False,
                "isGenerated": False,
                "columns": 2,
                "cardHeight": 320,
            },
        ],
    }
    now = int(time.time() * 1000)
    packed = "deflate;" + base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
    value = json.dumps({"name": view.name, "createdAt": now, "updatedAt": now, "state": packed})
    if len(value) > _MAX_CHARACTERS:
        raise ValueError(f"view {view.name} takes {len(value)} characters; the rule is at most {_MAX_CHARACTERS}; give it fewer charts")
    return f"mlflow.sharedViewState.{view.key}", value


def recipe_views(scores: Sequence[str], nodes: Mapping[str, str], logged: Mapping[str, Iterable[str]]) -> list[View]:
    """The views of one recipe.

    scores: names such as `arithmetic_thinking`. nodes: node to stage kind, in recipe order.
    logged: node to the metric names that its runs have.
    """
    wanted = settings("views.yaml")
    spent = wanted.get("costs", [])
    costs = [metric(name) for name in spent]
    shown = [f"eval/{score}" for score in scores]
    views = [
        View(
            "recipes",
            "Recipes: score by stage",
            "tags.kind = 'recipe'",
            section="Score by stage (x = table row)",
            columns=(*(metric(f"final/{score}") for score in scores), tag("variant")),
            charts=tuple(line(f"ablation/{score}") for score in scores),
        ),
        View(
            "stages",
            "All stages",
            "tags.kind = 'stage'",
            group_by_tag="stage",
            section="Scores of the stages",
            columns=(*map(metric, shown), *costs, tag("variant")),
            charts=tuple(bar(name) for name in shown),
        ),
    ]
    for node, kind in nodes.items():
        has = set(logged.get(node, ()))
        charts = wanted.get("stages", {}).get(kind, {})
        lines, bars = ([name for name in charts.get(shape, []) if name in has] for shape in ("lines", "bars"))
        scored = [name for name in shown if name in has]
        budgets = sorted(name for name in has if name.startswith("budget/"))
        views.append(
            View(
                f"variants-{node}",
                f"Variants of {node}",
                f"tags.kind = 'stage' AND tags.node = '{node}'",
                section=f"Variants of {node}",
                columns=(*costs, *map(metric, scored), tag("variant")),
                charts=(*map(bar, scored), *map(bar, spent), *map(line, lines), *map(bar, bars), *map(line, budgets)),
            )
        )
    return views


def _chart(kind: str, metric: str) -> dict[str, Any]:
    return {
        "uuid": f"{kind.lower()}-{metric}",
        "type": kind,
        "runsCountToCompare": 20,
        "metricSectionId": _SECTION,
        "deleted": False,
        "isGenerated": False,
    }
