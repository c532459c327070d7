"""The links that a run prints, opened in a real browser: each page shows what it promises, and lineage can be clicked through.

The saved views use a format of MLflow's pages that is not documented: this test is the alarm for an
upgrade. Set POSTTRAIN_SHOTS to a folder to keep the screenshots.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from playwright.sync_api import Browser, Page, expect

from flows.scores.ablation import AblationTable, Cell, Row
from flows.servers import serving
from stages.artifacts import CheckpointRef, DatasetRef, Handles, StageResult, digest_of_file, digest_of_folder

STAGES = ("cold_start", "reasoning_rl", "distillation")
BENCHMARKS = ("arithmetic", "harder")
MODES = ("thinking", "non_thinking")
VARIANT = "reasoning_rl.learning_rate=3e-4"
LOSSES = ("dapo", "dr_grpo")
CURATED = "c" * 64
PATIENCE_MS = 60_000

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("chromium")]


class Shown(NamedTuple):
    """What there is to look at: links of a recipe run and of an ablation, and the page of samples side by side."""

    recipe: dict[str, str]
    ablation: dict[str, str]
    samples: str


class Teller:
    """Tells a made-up recipe to MLflow."""

    def __init__(self, address: str, home: Path) -> None:
        from flows.tracking import Tracker

        self.home, self.tracker = home, Tracker(address, "pages", home)
        self.traces, self.benchmarks = self.dataset("traces"), self.dataset("benchmarks")
        self.base = self.model("base", "given", home / "given")

    def dataset(self, name: str) -> DatasetRef:
        path = self.home / f"{name}.parquet"
        path.write_text(name)
        return DatasetRef(name=f"curation.{name}", digest=digest_of_file(path), path=path, producer=CURATED, rows=256)

    def model(self, name: str, producer: str, folder: Path) -> CheckpointRef:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_text(str(folder))
        return CheckpointRef(name=name, digest=digest_of_folder(folder), path=folder, producer=producer)

    def curate(self, recipe: str) -> None:
        if known := self.tracker.find_stage(CURATED):
            self.tracker.reuse_stage(node="curation", index=0, recipe_run=recipe, run_id=known)
        else:
            outputs = {"traces": self.traces, "benchmarks": self.benchmarks}
            self.run(recipe, "curation", CURATED, {}, outputs, {"rows/read": 300.0, "rows/kept": 256.0})

    def train(self, recipe: str, node: str, fingerprint: str, made: CheckpointRef, score: float, **given: Any) -> CheckpointRef:
        """A stage that makes a model, and its evaluation."""
        folder = self.home / "stages" / node / fingerprint[:16]
        steps = [
            {"time": 10 + step, "step": step, "metrics": {"train/loss": 1 / step, "rollout/reward": score * step / 20}}
            for step in range(1, 21)
        ]
        trained = self.model(f"{node}.model", fingerprint, folder / "checkpoint")
        (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        self.run(recipe, node, fingerprint, {"model": made, "traces": self.traces}, {"model": trained}, {}, **given)
        self.evaluate(recipe, node, f"e{fingerprint[:-1]}", trained, score, variant=given.get("variant", "default"))
        return trained

    def evaluate(self, recipe: str, node: str, fingerprint: str, model: CheckpointRef, score: float, *, variant: str) -> None:
        metrics = {f"eval/{benchmark}_{mode}": value for (benchmark, mode), value in scores(score).items()}
        metrics |= {f"eval/arithmetic_budget_{budget}": score * (1 - 8 / budget) for budget in (16, 64, 128)}
        inputs = {"model": model, "benchmarks": self.benchmarks}
        self.run(recipe, f"evaluation_{node}", fingerprint, inputs, {}, metrics, stage="evaluation", variant=variant)

    def run(
        self, recipe: str, node: str, fingerprint: str, inputs: Handles, outputs: Handles, metrics: dict[str, float], **given: Any
    ) -> None:
        index = ("curation", "base", *STAGES).index(node.removeprefix("evaluation_"))
        content = {"stage": node, "variant": "default", "config": {"learning_rate": 1e-3}, "seed": 0, "prefect_url": None}
        content |= {"index": index, "inputs": inputs, **given}
        run = self.tracker.start_stage(node=node, recipe_run=recipe, fingerprint=fingerprint, **content)
        result = StageResult(
            stage=content["stage"],
            fingerprint=fingerprint,
            key={},
            outputs=dict(outputs),
            metrics=metrics,
            seconds=30.0,
            busy_seconds=25.0,
            tokens=12_000,
            peak_memory_mib=900.0,
            versions={},
        )
        log = self.home / "stages" / node / fingerprint[:16] / "log.txt"
        self.tracker.finish_stage(run, recipe_run=recipe, node=node, result=result, status="FINISHED", log=log)


def scores(score: float) -> dict[tuple[str, str], float]:
    return {
        (benchmark, mode): score - 0.1 * (benchmark == "harder") - 0.05 * (mode == "non_thinking")
        for benchmark in BENCHMARKS
        for mode in MODES
    }


def play(teller: Teller) -> dict[str, str]:
    """Three stages and two variants of the second one; the second recipe run is released. Returns its links."""
    links: dict[str, str] = {}
    for number, variant in enumerate(("default", VARIANT)):
        recipe = teller.tracker.start_recipe(
            variant=variant,
            overrides={} if variant == "default" else {"reasoning_rl.learning_rate": "3e-4"},
            recipe_yaml="name: pages\n",
            config_hash=str(number),
            prefect_url="http://127.0.0.1:4300/runs",
            run=f"pages-{number + 1}",
            drift={"curation": "the code of curation.py changed"} if number else None,
        )
        teller.curate(recipe)
        made, rows = teller.base, []
        for index, node in enumerate(("base", *STAGES)):
            score = 0.2 + 0.15 * index + 0.05 * number * (index > 1)
            fingerprint = f"{index}{number if index > 1 else 0}".ljust(64, "0")
            if node == "base":
                if number == 0:
                    teller.evaluate(recipe, node, f"e{fingerprint[:-1]}", made, score, variant=variant)
            elif known := teller.tracker.find_stage(fingerprint):
                teller.tracker.reuse_stage(node=node, index=index, recipe_run=recipe, run_id=known)
                made = teller.model(f"{node}.model", fingerprint, teller.home / "stages" / node / fingerprint[:16] / "checkpoint")
            else:
                made = teller.train(recipe, node, fingerprint, made, score, variant=variant)
            cells = tuple(
                Cell(benchmark=benchmark, mode=mode, mean=value, low=value - 0.03, high=value + 0.03, n_problems=128, n_samples=512)
                for (benchmark, mode), value in scores(score).items()
            )
            rows.append(Row(node, None, cells, 1.0, None, None, None, tokens=12_000 * index, seconds=30.0 * index))
        teller.tracker.finish_recipe(recipe, table=AblationTable(tuple(rows)), figure=None, table_json=None, status="FINISHED")
        teller.tracker.release(recipe, {"final": made, "start": teller.base})
        links = teller.tracker.links(recipe)
    return links


def ablate(teller: Teller) -> dict[str, str]:
    """Two losses and two seeds of reasoning_rl from one upstream, compared. Returns the links of the ablation."""
    upstream = teller.model(
        "cold_start.model", "10".ljust(64, "0"), teller.home / "stages" / "cold_start" / "10".ljust(16, "0") / "checkpoint"
    )
    recipe = teller.tracker.start_recipe(
        variant="loss=dapo,dr_grpo",
        overrides={},
        recipe_yaml="name: pages\n",
        config_hash="3",
        prefect_url=None,
        run="pages-3",
        kind="ablation",
        of_run="pages-1",
    )
    rows = []
    for number, loss in enumerate(LOSSES):
        for seed in (1, 2):
            variant, label = f"reasoning_rl.loss={loss}", f"reasoning_rl:loss={loss} seed={seed}"
            score = 0.5 + 0.1 * number + 0.01 * seed
            teller.train(recipe, "reasoning_rl", f"a{number}{seed}".ljust(64, "0"), upstream, score, variant=variant, label=label)
        for (benchmark, mode), mean in scores(0.515 + 0.1 * number).items():
            better = bool(number and benchmark == "arithmetic")
            rows.append(
                {
                    "variant": f"loss={loss}",
                    "seeds": [1, 2],
                    "benchmark": benchmark,
                    "mode": mode,
                    "n_problems": 128,
                    "n_samples": 1024,
                    "mean": mean,
                    "low": mean - 0.03,
                    "high": mean + 0.03,
                    "seed_means": [mean - 0.005, mean + 0.005],
                    "difference": 0.1 if number else None,
                    "difference_low": 0.05 if number else None,
                    "difference_high": 0.15 if number else None,
                    "p_value": 0.01 if number else None,
                    "p_adjusted": (0.02 if better else 0.2) if number else None,
                    "verdict": ("better" if better else "not distinguishable") if number else "baseline",
                    "tokens": 12_000,
                    "seconds": 30.0,
                }
            )
    teller.tracker.log_comparison(recipe, rows, "reasoning_rl, against loss=dapo")
    teller.tracker.finish_recipe(recipe, table=None, figure=None, table_json=None, status="FINISHED")
    return teller.tracker.links(recipe)


def talk(teller: Teller) -> str:
    """What two variants said to the same prompts. Returns the address that shows them side by side."""
    from flows.tracking import VariantSamples

    def said(variant: str, wrong: int) -> VariantSamples:
        rows = [
            {
                "question": f"What is {n} + {2 * n}?",
                "answer": str(3 * n),
                "completion": f"<think>{n} + {2 * n} is {3 * n}</think> \\boxed{{{3 * n + (n % wrong == 0)}}}",
                "correct": n % wrong != 0,
            }
            for n in range(1, 13)
        ]
        return VariantSamples(variant, f"evaluation of {variant}", rows)

    first, second = teller.tracker.log_samples([said("loss=dapo", 3), said("loss=dr_grpo", 4)])
    return teller.tracker.compare_samples_url(first, second)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    home = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as environment:
        for variable in serving.VARIABLE.values():
            environment.delenv(variable, raising=False)
        with serving.servers(home, lambda text: None) as running:
            teller = Teller(running.mlflow_url, home)
            yield Shown(play(teller), ablate(teller), talk(teller))


@pytest.fixture
def page(chromium: Callable[[], AbstractContextManager[Browser]]) -> Iterator[Page]:
    """A page of a fresh browser. At the end: it asked no other machine for anything."""
    requested: list[str] = []
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1600, "height": 900})
        page.context.set_default_timeout(PATIENCE_MS)
        page.context.on("request", lambda request: requested.append(request.url))
        yield page
    assert [url for url in requested if url.startswith("http") and not url.startswith("http://127.0.0.1:")] == []


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("POSTTRAIN_SHOTS", tmp_path / "shots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def open_page(page: Page, address: str, texts: list[str]) -> None:
    """Open an address afresh and see every text on it."""
    page.goto("about:blank")
    page.goto(address)
    for text in texts:
        expect(page.get_by_text(text).first).to_be_visible(timeout=PATIENCE_MS)


def test_printed_links_opened_show_stages_scores_and_registry(page: Page, shown: Shown, shots: Path) -> None:
    promised = {
        "score by stage": ["ablation/arithmetic_thinking", "ablation/harder_thinking", "pages-1:default"],
        "all stages": ["Group: 00-base", "Group: 00-curation", "Group: 02-cold_start", "eval/arithmetic_thinking", "0.5"],
        "recipe run": [f"pages-2:{VARIANT}", "arithmetic thinking", "0.700 (0.670 to 0.730)"],
        "models": ["reasoning_rl-default", "cold_start-default", "base"],
        "registry": ["Checkpoints that runs of recipe", "Version 3", "@ final"],
    }
    assert list(shown.recipe) == [
        "recipe run",
        "score by stage",
        "all stages",
        "models",
        "registry",
        *(f"variants of {node}" for node in ("curation", *STAGES)),
    ]
    for label, texts in promised.items():
        open_page(page, shown.recipe[label], texts)
        if label == "score by stage":
            expect(page.locator(".js-plotly-plot").first).to_be_visible()
            expect(page.get_by_text("pages-3 ablation")).to_have_count(0)
        page.screenshot(path=shots / f"{label.replace(' ', '_')}.png")


def test_variants_of_a_stage_opened_show_reruns_and_ablations_in_their_colours(page: Page, shown: Shown, shots: Path) -> None:
    names = ["reasoning_rl:default", "reasoning_rl:learning_rate=3e-4"]
    names += [f"reasoning_rl:loss={loss} seed={seed}" for loss in LOSSES for seed in (1, 2)]
    open_page(page, shown.recipe["variants of reasoning_rl"], ["eval/arithmetic_thinking", *names])
    expect(page.locator(".js-plotly-plot").first).to_be_visible()
    page.screenshot(path=shots / "variants_of_reasoning_rl.png")
    open_page(
        page,
        shown.recipe["variants of reasoning_rl"].replace("compareRunsMode=CHART", "compareRunsMode=TABLE"),
        [*names, "cost/seconds", "cost/tokens"],
    )
    page.screenshot(path=shots / "variants_of_reasoning_rl_table.png")


def test_comparison_of_an_ablation_opened_shows_the_table_and_its_verdicts(page: Page, shown: Shown, shots: Path) -> None:
    texts = ["Finished", "0.615 (0.585 to 0.645), +0.100 better", "+0.100 not distinguishable"]
    open_page(page, shown.ablation["comparison"], texts)
    expect(
        page.get_by_role("columnheader", name="harder non thinking").or_(page.locator("th", has_text="harder non thinking")).first
    ).to_be_visible()
    page.screenshot(path=shots / "comparison.png")


def test_samples_of_two_variants_opened_stand_side_by_side(page: Page, shown: Shown, shots: Path) -> None:
    open_page(page, shown.samples, ["loss=dapo", "loss=dr_grpo", "What is 12 + 24?", "12 of 12"])
    page.screenshot(path=shots / "samples.png")
    page.get_by_text("What is 9 + 18?").first.click()
    for said in ("boxed{28}", "boxed{27}"):
        expect(page.get_by_text(said).first).to_be_visible()
    page.screenshot(path=shots / "samples_of_one_prompt.png")


def follow(page: Page, link: str, arrives_at: str, shot: Path) -> Page:
    """Click a link, the lowest one of that name, and see where it leads. A link of a note opens a page of its own."""
    anchor = page.get_by_role("link", name=link, exact=True).last
    expect(anchor).to_be_visible(timeout=PATIENCE_MS)
    more = page.get_by_text("Show more")
    if more.count():
        more.last.click()
    if anchor.get_attribute("target") == "_blank":
        with page.expect_popup() as opened:
            anchor.click()
        page = opened.value
    else:
        anchor.click()
    expect(page.get_by_text("About this").first).to_be_visible(timeout=PATIENCE_MS)
    expect(page.get_by_text(arrives_at, exact=True).first).to_be_visible(timeout=PATIENCE_MS)
    page.screenshot(path=shot)
    return page


def test_lineage_clicked_leads_from_a_checkpoint_to_its_data_and_to_its_evaluation(page: Page, shown: Shown, shots: Path) -> None:
    open_page(page, shown.recipe["models"], ["cold_start-default"])
    checkpoint = follow(page, "cold_start-default", "cold_start-default", shots / "lineage_1_checkpoint.png")
    made_by = follow(checkpoint, "cold_start:default", "cold_start:default", shots / "lineage_2_its_run.png")
    data = follow(made_by, "curation.traces", "curation:default", shots / "lineage_3_its_data.png")
    expect(data.get_by_text("Read by").first).to_be_visible(timeout=PATIENCE_MS)
    follow(made_by, "reasoning_rl:default", "reasoning_rl:default", shots / "lineage_4_what_read_it.png")
    evaluation = follow(made_by, "evaluation_cold_start:default", "evaluation_cold_start:default", shots / "lineage_5_its_evaluation.png")
    back = follow(evaluation, "cold_start.model", "cold_start:default", shots / "lineage_6_back_to_its_run.png")
    follow(back, "cold_start.model", "cold_start-default", shots / "lineage_7_its_checkpoint.png")
