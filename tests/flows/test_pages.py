"""The links that a run prints, opened in a real browser: each page shows what it promises, without a click.

The saved views use a format of MLflow's pages that is not documented: this test is the alarm for an
upgrade. Set POSTTRAIN_SHOTS to a folder to keep the screenshots.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from flows import serving
from flows.ablation import AblationTable, Cell, Row
from stages.artifacts import CheckpointRef, DatasetRef, StageResult, digest_of_file, digest_of_folder

CHROMIUM = Path("/usr/bin/chromium")
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
]
STAGES = ("cold_start", "reasoning_rl", "distillation")
BENCHMARKS = ("arithmetic", "harder")
MODES = ("thinking", "non_thinking")
VARIANT = "reasoning_rl.learning_rate=3e-4"
PATIENCE_MS = 60_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"the pages are looked at in a browser, and {CHROMIUM} is not installed"),
]


def play(address: str, home: Path) -> dict[str, str]:
    """Three stages and two variants of the second one, with made-up scores. Returns the links of the last recipe run."""
    from flows.tracking import Tracker

    tracker, links = Tracker(address, "pages", home), {}
    problems = home / "benchmarks.parquet"
    problems.write_text("benchmarks")
    data = DatasetRef(name="curation.benchmarks", digest=digest_of_file(problems), path=problems, producer="0" * 64, rows=256)

    def model(name: str, producer: str, folder: Path) -> CheckpointRef:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_text(str(folder))
        return CheckpointRef(name=name, digest=digest_of_folder(folder), path=folder, producer=producer)

    for number, variant in enumerate(("default", VARIANT)):
        recipe = tracker.start_recipe(
            variant=variant,
            overrides={} if variant == "default" else {"reasoning_rl.learning_rate": "3e-4"},
            recipe_yaml="name: pages\n",
            config_hash=str(number),
            prefect_url="http://127.0.0.1:4300/runs",
        )
        made, rows = model("base", "given", home / "given"), []
        for index, node in enumerate(("base", *STAGES)):
            score = 0.2 + 0.15 * index + 0.05 * number * (index > 1)
            fingerprint = f"{index}{number if index > 1 else 0}".ljust(64, "0")
            folder = home / "stages" / node / fingerprint[:16]
            if node != "base" and (known := tracker.find_stage(fingerprint)):
                tracker.reuse_stage(node=node, index=index, recipe_run=recipe, run_id=known)
                made = model(f"{node}.model", fingerprint, folder / "checkpoint")
            elif node != "base":
                run = tracker.start_stage(
                    node=node,
                    stage=node,
                    index=index,
                    recipe_run=recipe,
                    variant=variant,
                    fingerprint=fingerprint,
                    config={"learning_rate": 1e-3},
                    inputs={"model": made},
                    seed=0,
                    prefect_url=None,
                )
                made = model(f"{node}.model", fingerprint, folder / "checkpoint")
                steps = [
                    {"time": 10 + step, "step": step, "metrics": {"train/loss": 1 / step, "rollout/reward": score * step / 20}}
                    for step in range(1, 21)
                ]
                (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
                finish(tracker, run, recipe, node, fingerprint, {"model": made}, {}, folder)
            scores = {
                (benchmark, mode): score - 0.1 * (benchmark == "harder") - 0.05 * (mode == "non_thinking")
                for benchmark in BENCHMARKS
                for mode in MODES
            }
            metrics = {f"eval/{benchmark}_{mode}": value for (benchmark, mode), value in scores.items()}
            metrics |= {f"eval/arithmetic_budget_{budget}": score * (1 - 8 / budget) for budget in (16, 64, 128)}
            if number == 0 or index > 1:
                run = tracker.start_stage(
                    node=f"evaluation_{node}",
                    stage="evaluation",
                    index=index,
                    recipe_run=recipe,
                    variant=variant,
                    fingerprint=f"e{fingerprint[:-1]}",
                    config={"samples": 4},
                    inputs={"model": made, "benchmarks": data},
                    seed=0,
                    prefect_url=None,
                )
                finish(tracker, run, recipe, f"evaluation_{node}", f"e{fingerprint[:-1]}", {}, metrics, folder)
            cells = tuple(
                Cell(benchmark=benchmark, mode=mode, mean=value, low=value - 0.03, high=value + 0.03, n_problems=128, n_samples=512)
                for (benchmark, mode), value in scores.items()
            )
            rows.append(Row(node, None, cells, 1.0, None, None, None, tokens=12_000 * index, seconds=30.0 * index))
        tracker.finish_recipe(recipe, table=AblationTable(tuple(rows)), figure=None, table_json=None, status="FINISHED")
        links = tracker.links(recipe)
    return links


def finish(tracker, run, recipe, node, fingerprint, outputs, metrics, folder) -> None:  # type: ignore[no-untyped-def]
    result = StageResult(
        stage=node,
        fingerprint=fingerprint,
        key={},
        outputs=outputs,
        metrics=metrics,
        seconds=30.0,
        busy_seconds=25.0,
        tokens=12_000,
        peak_memory_mib=900.0,
        versions={},
    )
    tracker.finish_stage(run, recipe_run=recipe, node=node, result=result, status="FINISHED", log=folder / "log.txt")


@pytest.fixture
def page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=QUIET)
        page = browser.new_page(viewport={"width": 1600, "height": 900})
        page.set_default_timeout(PATIENCE_MS)
        yield page
        browser.close()


def test_printed_links_opened_show_stages_scores_and_lineage(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in serving.VARIABLE.values():
        monkeypatch.delenv(variable, raising=False)
    shots = Path(os.environ.get("POSTTRAIN_SHOTS", tmp_path / "shots"))
    shots.mkdir(parents=True, exist_ok=True)
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    promised = {
        "score by stage": ["ablation/arithmetic_thinking", "ablation/harder_thinking", "pages:default"],
        "all stages": ["Group: 00-base", "Group: 01-cold_start", "Group: 02-reasoning_rl", "eval/arithmetic_thinking", "0.5"],
        "variants of reasoning_rl": ["eval/arithmetic_thinking", "reasoning_rl:default", "reasoning_rl:learning_rate=3e-4"],
        "recipe run": [f"pages:{VARIANT}", "arithmetic thinking", "0.700 (0.670 to 0.730)"],
        "models": ["reasoning_rl-default", "cold_start-default", "base"],
    }
    with serving.servers(tmp_path, lambda text: None) as running:
        links = play(running.mlflow_url, tmp_path)
        assert list(links) == [
            "recipe run",
            "score by stage",
            "all stages",
            "models",
            *(f"variants of {node}" for node in STAGES),
        ]
        for label, texts in promised.items():
            page.goto("about:blank")
            page.goto(links[label])
            for text in texts:
                expect(page.get_by_text(text).first).to_be_visible(timeout=PATIENCE_MS)
            if label in ("score by stage", "variants of reasoning_rl"):
                expect(page.locator(".js-plotly-plot").first).to_be_visible(timeout=PATIENCE_MS)
            page.screenshot(path=shots / f"{label.replace(' ', '_')}.png")
    assert [url for url in requested if url.startswith("http") and not url.startswith("http://127.0.0.1:")] == []
