"""Saved views and the glossary of metrics that they draw on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from flows.tracking import Tracker, views
from stages.config import STAGES


def test_views_after_a_recipe_decode_and_name_its_stages(uri: str, tmp_path: Path, story: Any, store: Any) -> None:
    story.play(Tracker(uri, "small", tmp_path))
    tags = store.client.get_experiment(store.experiment).tags
    keys = {name.removeprefix("mlflow.sharedViewState.") for name in tags if name.startswith("mlflow.sharedViewState.")}
    assert keys == {"recipes", "stages", "variants-base", "variants-cold_start"}


def test_views_of_scores_by_stage_leave_reruns_and_ablations_out() -> None:
    (recipes,) = [view for view in views.recipe_views(["easy_thinking"], {}, {}) if view.key == "recipes"]
    assert recipes.filter == "tags.kind = 'recipe'"


def test_views_of_variants_show_cost_beside_the_scores() -> None:
    found = views.recipe_views(["easy_thinking"], {"fusion": "fusion"}, {"fusion": ["eval/easy_thinking"]})
    (variants,) = [view for view in found if view.key == "variants-fusion"]
    assert variants.columns == ("metrics.`cost/seconds`", "metrics.`cost/tokens`", "metrics.`eval/easy_thinking`", "tags.`variant`")
    assert [chart["metricKey"] for chart in variants.charts[:3]] == ["eval/easy_thinking", "cost/seconds", "cost/tokens"]


def test_views_show_only_metrics_that_the_glossary_explains() -> None:
    shown = views.settings("views.yaml")
    names = [*shown["costs"], *(name for charts in shown["stages"].values() for group in charts.values() for name in group)]
    assert [name for name in names if views.meaning(name) is None] == []
    assert {row["direction"] for row in views.settings("metrics.yaml").values()} == {"higher", "lower", "none"}
    assert set(shown["stages"]) == set(STAGES) - {"evaluation"}


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("eval/arithmetic_non_thinking", "share"),
        ("length/harder_budget_16", "tokens"),
        ("rows/kept", "rows"),
        ("rows/kept/products", "rows"),
        ("train/rewards/format/std", "reward"),
        ("on_policy/loss", "nats"),
        ("pass_rates/never", "share"),
        ("reward_model/pairs", "pairs"),
        ("easy_thinking/cold_start", "share"),
        ("comparison/easy_thinking", "share"),
        ("difference/easy_thinking", "share"),
        ("correct/mean", "share"),
    ],
)
def test_meaning_of_a_logged_name_is_found_by_its_pattern(name: str, unit: str) -> None:
    row = views.meaning(name)
    assert row is not None
    assert row["unit"] == unit


def test_meaning_of_an_unknown_name_is_none() -> None:
    assert views.meaning("rollout/nonsense") is None


def test_mlflow_folder_holds_no_python() -> None:
    assert [name for name in os.listdir(views.SETTINGS) if name.endswith(".py")] == []
