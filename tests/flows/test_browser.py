"""`posttrain up` as a user meets it, in a real browser: forms are filled in, runs are watched, cancelled and compared, links are followed.

One `up` serves the whole file, with a recipe of four small stages. Set POSTTRAIN_SHOTS to a folder to keep the screenshots.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from mlflow.tracking import MlflowClient
from playwright.sync_api import Browser, Locator, Page, expect
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling

from flows.servers.addresses import VARIABLE

BASE = Path(__file__).resolve().parents[2] / "datasets" / "tiny_base"
RECIPE = f"""
name: small
models: {{base: {BASE}}}
evaluation: {{benchmarks: curation.benchmarks, samples: 2, flag_problems: 0}}
stages:
  curation:
    sources:
      - {{kind: reasoning_gym, family: chain_sum, size: 400, parameters: {{min_terms: 4, max_terms: 5, min_digits: 1, max_digits: 2}}}}
      - {{kind: reasoning_gym, family: leg_counting, size: 300, parameters: {{min_animals: 2, max_animals: 3, max_instances: 9}}}}
    benchmarks:
      arithmetic:
        - {{kind: reasoning_gym, family: leg_counting, size: 60, parameters: {{min_animals: 2, max_animals: 3, max_instances: 9}}}}
    benchmark_size: 32
    pools: {{cold_start: {{share: 0.5, with_trace: true}}, rl: {{share: 0.5}}}}
  cold_start: {{from: {{model: base, traces: curation.cold_start}}, examples: 96, learning_rate: 1.0e-3}}
  pass_rates: {{from: {{model: cold_start, problems: curation.rl}}, problems: 48}}
  reasoning_rl:
    from: {{model: cold_start, problems: pass_rates.band}}
    steps: 4
    prompts_per_step: 4
    group_size: 4
    save_every: 2
    learning_rate: 1.0e-4
"""
STAGES = ("curation", "evaluation_base", "cold_start", "evaluation_cold_start", "pass_rates", "reasoning_rl", "evaluation_reasoning_rl")
PATIENCE_MS = 60_000
RUN_LIMIT_MS = 300_000
CANCEL_LIMIT_S = 20.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("chromium"),
]


class Up:
    """`posttrain up` with a home of its own, and what its two servers and its records say."""

    def __init__(self, folder: Path) -> None:
        self.home, self.recipe = folder / "home", folder / "small.yaml"
        self.recipe.write_text(RECIPE)
        environment = {name: value for name, value in os.environ.items() if name not in VARIABLE.values()}
        self.environment = environment | {"POSTTRAIN_HOME": str(self.home), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [self.command, "up"], env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            said.append(line)
            if "Ctrl-C stops them" in line:
                break
        addresses = dict(re.findall(r"(?m)^(Prefect|MLflow) +(http\S+)", "".join(said)))
        assert set(addresses) == {"Prefect", "MLflow"}, "".join(said)
        self.prefect, self.mlflow = addresses["Prefect"], addresses["MLflow"]
        self.own = self.processes()
        """The processes of `up` itself: it, the worker and the servers."""

    command = Path(sys.executable).with_name("posttrain")

    def processes(self) -> set[int]:
        """Every live process that has this home in its environment."""
        found = set()
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with suppress(OSError):
                if f"POSTTRAIN_HOME={self.home}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                    found |= {pid} if state != "Z" else set()
        return found

    def flow_run(self, identity: str) -> FlowRun:
        with temporary_settings({PREFECT_API_URL: f"{self.prefect}/api"}), get_client(sync_client=True) as client:
            return client.read_flow_run(UUID(identity))

    def flow_runs(self, **where: Any) -> list[FlowRun]:
        with temporary_settings({PREFECT_API_URL: f"{self.prefect}/api"}), get_client(sync_client=True) as client:
            return client.read_flow_runs(flow_run_filter=FlowRunFilter(**where))

    def sub_flows(self, identity: str) -> dict[str, FlowRun]:
        """Name to run of the stages that a flow run has started."""
        found = self.flow_runs(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[UUID(identity)]))
        return {run.name: run for run in found}

    def start(self, deployment: str, **parameters: Any) -> UUID:
        """Start a run as its form does. Returns its id."""
        with temporary_settings({PREFECT_API_URL: f"{self.prefect}/api"}), get_client(sync_client=True) as client:
            known = client.read_deployment_by_name(deployment)
            return client.create_flow_run_from_deployment(known.id, parameters=parameters).id

    def cancel(self, identity: UUID) -> None:
        """What the Cancel button of a sub-flow's page does."""
        with temporary_settings({PREFECT_API_URL: f"{self.prefect}/api"}), get_client(sync_client=True) as client:
            client.set_flow_run_state(identity, Cancelling())

    def records(self) -> dict[str, dict[str, Any]]:
        """The records of `posttrain runs`, by Prefect run."""
        said = subprocess.run([self.command, "runs", "--json"], env=self.environment, capture_output=True, text=True, check=True)
        return {record["prefect_run"] or record["id"]: record for record in json.loads(said.stdout)}

    def tracked(self, prefect_run: str) -> dict[str, str]:
        """Name to status of the MLflow runs that link to this Prefect run or to one of its sub-flows."""
        client = MlflowClient(self.mlflow)
        experiment = client.get_experiment_by_name("small")
        assert experiment is not None
        runs = [prefect_run, *(str(run.id) for run in self.sub_flows(prefect_run).values())]
        return {
            str(run.info.run_name): run.info.status
            for run in client.search_runs([experiment.experiment_id])
            if run.data.tags.get("prefect", "").rpartition("/")[2] in runs
        }


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    started = Up(tmp_path_factory.mktemp("browser"))
    yield started
    started.process.send_signal(signal.SIGINT)
    said, _ = started.process.communicate(timeout=120)
    assert started.process.returncode in (0, 130), said
    assert started.processes() == set()


@pytest.fixture(scope="module")
def browser(chromium: Callable[[], AbstractContextManager[Browser]]) -> Iterator[Browser]:
    """A browser. At the end: none of its pages asked another machine for anything."""
    requested: list[str] = []
    expect.set_options(timeout=PATIENCE_MS)
    with chromium() as browser:
        context = browser.new_context(viewport={"width": 1600, "height": 1000})
        context.set_default_timeout(PATIENCE_MS)
        context.on("request", lambda request: requested.append(request.url))
        yield browser
    assert requested
    assert [url for url in requested if url.startswith("http") and not url.startswith("http://127.0.0.1:")] == []


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.contexts[0].new_page()
    yield page
    for opened in browser.contexts[0].pages:
        opened.close()


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ["POSTTRAIN_SHOTS"]) if "POSTTRAIN_SHOTS" in os.environ else tmp_path_factory.mktemp("shots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# ---- what a user does -----------------------------------------------------------------------


def open_form(page: Page, up: Up, deployment: str) -> None:
    page.goto(f"{up.prefect}/deployments")
    page.get_by_placeholder("Search deployments").fill(deployment)
    link = page.get_by_role("link", name=deployment, exact=True)
    page.goto(f"{up.prefect}{link.get_attribute('href')}")  # the list is drawn anew while it is searched: a click may be lost
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()
    expect(field(page, "dry_run")).to_be_visible()


def field(page: Page, name: str) -> Locator:
    """The innermost part of the form that has this label."""
    return page.locator(".schema-form-property").filter(has=page.get_by_text(re.compile(rf"^{name}( \(Optional\))?$"))).last


def fill(page: Page, name: str, value: str) -> None:
    field(page, name).locator("textarea, input").fill(value)


def choose(page: Page, name: str, value: str) -> None:
    field(page, name).locator("button.p-select-button__control").press("ArrowDown")  # opens the list
    page.locator(".p-select-option").get_by_text(value, exact=True).click()


def add(page: Page, name: str, value: str) -> None:
    field(page, name).get_by_role("button", name="Add item").click()
    field(page, name).locator("textarea").last.fill(value)


def switch_on(page: Page, name: str) -> None:
    field(page, name).locator("input").dispatch_event("click")


def submit(page: Page) -> str:
    """Start the run and go to its page. Returns its id."""
    page.get_by_role("button", name="Submit").click()
    page.get_by_role("button", name="View run").last.dispatch_event("click")  # its toast moves, and may lie under another
    page.wait_for_url("**/runs/flow-run/*")
    return page.url.rpartition("/")[2]


def wait_for_state(page: Page, state: str, limit_ms: float = RUN_LIMIT_MS) -> None:
    badge = page.locator(".page-heading-flow-run .state-badge")
    expect(badge).to_have_text(re.compile("Completed|Failed|Crashed|Cancelled" if state == "Completed" else state), timeout=limit_ms)
    expect(badge).to_have_text(state)


def open_tab(page: Page, name: str) -> None:
    page.locator(".p-tab").get_by_text(name, exact=True).click()


def stage_link(page: Page, name: str) -> Locator:
    """The link to a stage's run, on the tab of sub-flows."""
    return page.locator("a[href*='/runs/flow-run/']").get_by_text(name, exact=True)


def open_artifact(page: Page, key: str) -> None:
    open_tab(page, "Artifacts")
    page.get_by_role("link").get_by_text(key, exact=True).or_(page.locator(".artifact-card").get_by_text(key, exact=True)).last.click()
    page.wait_for_url("**/artifacts/artifact/*")


def follow(page: Page, link: str) -> Page:
    """Click a link that opens a page of its own."""
    with page.expect_popup() as opened:
        page.get_by_role("link", name=link, exact=True).last.click()
    return opened.value


def shoot(page: Page, path: Path) -> None:
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    page.screenshot(path=path)


def until(true: Callable[[], bool], limit_s: float, what: str) -> float:
    """Wait until it is true. Returns how long that took, in seconds."""
    began, pause = time.monotonic(), threading.Event()
    while not true():
        assert time.monotonic() - began < limit_s, what
        pause.wait(0.2)
    return time.monotonic() - began


# ---- the runs that the tests look at --------------------------------------------------------


@pytest.fixture(scope="module")
def whole(up: Up, browser: Browser, shots: Path) -> str:
    """The whole recipe, started from its form; its Prefect run."""
    page = browser.contexts[0].new_page()
    open_form(page, up, "recipe")
    fill(page, "recipe", str(up.recipe))
    shoot(page, shots / "01_recipe_form.png")
    run = submit(page)
    open_tab(page, "Subflow Runs")
    expect(stage_link(page, "cold_start")).to_be_visible(timeout=RUN_LIMIT_MS)
    shoot(page, shots / "02_recipe_running.png")
    wait_for_state(page, "Completed")
    page.close()
    return run


@pytest.fixture(scope="module")
def again(up: Up, browser: Browser, shots: Path, whole: str) -> str:
    """`reasoning_rl` of the whole run again with another loss, started from its form; its Prefect run."""
    page = browser.contexts[0].new_page()
    open_form(page, up, "stage reasoning_rl")
    fill(page, "recipe", str(up.recipe))
    choose(page, "loss", "dr_grpo")
    shoot(page, shots / "10_stage_form.png")
    run = submit(page)
    wait_for_state(page, "Completed")
    page.close()
    return run


def test_recipe_started_from_its_form_shows_plan_stages_scores_and_links(up: Up, page: Page, shots: Path, whole: str) -> None:
    page.goto(f"{up.prefect}/runs/flow-run/{whole}")
    expect(page.locator(".page-heading-flow-run")).to_contain_text("small-1: default")
    for said in ("curation: run, never ran", "reasoning_rl: finished in"):
        expect(page.get_by_text(said).first).to_be_visible()
    shoot(page, shots / "03_recipe_finished.png")
    assert [(run.name, run.state_name) for run in by_start(up.sub_flows(whole))] == [(name, "Completed") for name in STAGES]

    open_artifact(page, "plan")
    for text in (*STAGES, "never ran", "waits for curation, which runs"):
        expect(page.get_by_text(text, exact=True).first).to_be_visible()
    shoot(page, shots / "04_plan.png")

    page.goto(f"{up.prefect}/runs/flow-run/{whole}")
    open_artifact(page, "ablation")
    for text in ("base", "cold_start", "reasoning_rl", "arithmetic thinking", "arithmetic non_thinking"):
        expect(page.get_by_text(text, exact=True).first).to_be_visible()
    shoot(page, shots / "05_scores.png")

    page.goto(f"{up.prefect}/runs/flow-run/{whole}")
    open_artifact(page, "links")
    expect(page.get_by_role("link", name="registry")).to_be_visible()
    shoot(page, shots / "06_links.png")
    mlflow = follow(page, "score by stage")
    expect(mlflow.get_by_text("ablation/arithmetic_thinking").first).to_be_visible()
    shoot(mlflow, shots / "07_mlflow_score_by_stage.png")
    assert set(up.tracked(whole).values()) == {"FINISHED"}
    assert up.records()[whole]["status"] == "finished"


def by_start(runs: dict[str, FlowRun]) -> list[FlowRun]:
    return sorted(runs.values(), key=lambda run: str(run.start_time))


def test_stage_run_again_from_its_form_stands_beside_the_first_in_mlflow_and_links_back(
    up: Up, page: Page, shots: Path, again: str
) -> None:
    page.goto(f"{up.prefect}/runs/flow-run/{again}")
    expect(page.locator(".page-heading-flow-run")).to_contain_text("small-2: reasoning_rl loss=dr_grpo, of small-1")
    shoot(page, shots / "11_stage_finished.png")
    assert [run.name for run in by_start(up.sub_flows(again))] == ["reasoning_rl", "evaluation_reasoning_rl"]
    assert up.records()[again]["of_run"] == "small-1"

    open_artifact(page, "plan")
    for text in ("taken from small-1", "reasoning_rl.loss dapo -> dr_grpo"):
        expect(page.get_by_text(text, exact=True).first).to_be_visible()
    page.goto(f"{up.prefect}/runs/flow-run/{again}")
    open_artifact(page, "comparison")
    for text in ("small-1 default", "baseline", "not distinguishable"):
        expect(page.get_by_text(text, exact=True).first).to_be_visible()
    shoot(page, shots / "12_stage_comparison.png")

    page.goto(f"{up.prefect}/runs/flow-run/{again}")
    open_artifact(page, "links")
    shoot(page, shots / "13_stage_links.png")
    mlflow = follow(page, "variants of reasoning_rl")
    for text in ("reasoning_rl:default", "reasoning_rl:loss=dr_grpo", "eval/arithmetic_thinking"):
        expect(mlflow.get_by_text(text).first).to_be_visible()
    expect(mlflow.locator(".js-plotly-plot").first).to_be_visible()
    shoot(mlflow, shots / "14_mlflow_variants.png")
    mlflow.get_by_role("link", name="reasoning_rl:loss=dr_grpo").first.click()
    expect(mlflow.get_by_text("About this run")).to_be_visible()
    shoot(mlflow, shots / "15_mlflow_run.png")
    back = follow(mlflow, "Prefect run")
    expect(back.locator(".page-heading-flow-run")).to_contain_text("reasoning_rl")
    assert back.url.endswith(str(up.sub_flows(again)["reasoning_rl"].id))
    open_artifact(back, "result-reasoning-rl")
    expect(back.get_by_text("of them in trainer and engine").first).to_be_visible()
    shoot(back, shots / "16_stage_result.png")


def test_running_stage_cancelled_on_the_page_is_gone_within_seconds_everywhere(up: Up, page: Page, shots: Path, again: str) -> None:
    open_form(page, up, "stage reasoning_rl")
    fill(page, "recipe", str(up.recipe))
    fill(page, "steps", "400")
    run = submit(page)
    open_tab(page, "Subflow Runs")
    stage_link(page, "reasoning_rl").click(timeout=RUN_LIMIT_MS)
    expect(page.locator(".page-heading-flow-run .state-badge")).to_have_text("Running")
    open_tab(page, "Artifacts")
    expect(page.get_by_text("progress-reasoning-rl").first).to_be_visible(timeout=RUN_LIMIT_MS)
    shoot(page, shots / "20_stage_running_progress.png")
    open_tab(page, "Logs")
    for said in (r"^run: .*reasoning_rl\.steps 4 -> 400", r"^step \d+ of 400  reward"):
        expect(page.get_by_text(re.compile(said)).first).to_be_visible()
    shoot(page, shots / "21_stage_running_logs.png")
    assert up.processes() > up.own

    page.goto(f"{up.prefect}/runs/flow-run/{run}")
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("button", name="Confirm").click()
    until(lambda: up.processes() == up.own, CANCEL_LIMIT_S, "its processes are still there")
    wait_for_state(page, "Cancelled", PATIENCE_MS)
    shoot(page, shots / "22_cancelled.png")
    assert_cancelled(up, run)


def test_running_sub_flow_cancelled_ends_the_whole_run_as_cancelled(up: Up, again: str) -> None:
    run = str(up.start("reasoning_rl/stage reasoning_rl", recipe=str(up.recipe), settings={"steps": 300}))
    until(lambda: "reasoning_rl" in up.sub_flows(run), RUN_LIMIT_MS / 1000, "the stage has not begun")
    up.cancel(up.sub_flows(run)["reasoning_rl"].id)
    until(lambda: up.flow_run(run).state_name == "Cancelled", CANCEL_LIMIT_S, "the run is not cancelled")
    until(lambda: up.processes() == up.own, CANCEL_LIMIT_S, "its processes are still there")
    assert_cancelled(up, run)


def assert_cancelled(up: Up, run: str) -> None:
    """Prefect's run and its stage, MLflow's runs, and the record all say so."""
    assert up.flow_run(run).state_name == "Cancelled"
    assert {name: stage.state_name for name, stage in up.sub_flows(run).items()} == {"reasoning_rl": "Cancelled"}
    tracked = up.tracked(run)
    assert len(tracked) == 2
    assert set(tracked.values()) == {"KILLED"}
    assert up.records()[run]["status"] == "cancelled"


@pytest.mark.parametrize(
    ("deployment", "wrong", "value", "said"),
    [
        ("recipe", "recipe", "my recipe", "Validation failed for field 'recipe'. Failure reason: 'my recipe' does not match"),
        (
            "stage reasoning_rl",
            "steps",
            "0",
            "Validation failed for field 'settings.steps'. Failure reason: 0 is less than the minimum of 1",
        ),
    ],
)
def test_form_with_a_wrong_value_submitted_is_refused_and_nothing_runs(
    up: Up, page: Page, shots: Path, deployment: str, wrong: str, value: str, said: str
) -> None:
    before = len(up.flow_runs())
    open_form(page, up, deployment)
    fill(page, wrong, value)
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_text(said).first).to_be_visible()
    shoot(page, shots / f"30_refused_{wrong}.png")
    assert len(up.flow_runs()) == before


def test_run_with_a_wrong_setting_fails_at_once_and_names_the_nearest(up: Up, page: Page, shots: Path) -> None:
    open_form(page, up, "recipe")
    fill(page, "recipe", str(up.recipe))
    add(page, "overrides", "reasoning_rl.learning_rat=1e-3")
    submit(page)
    wait_for_state(page, "Failed")
    expect(page.get_by_text("reasoning_rl.learning_rat: there is no such setting; did you mean learning_rate?").first).to_be_visible()
    shoot(page, shots / "31_wrong_setting.png")


def test_dry_run_from_the_form_shows_the_plan_and_runs_nothing(up: Up, page: Page, shots: Path, whole: str) -> None:
    known = up.records()
    open_form(page, up, "recipe")
    fill(page, "recipe", str(up.recipe))
    add(page, "overrides", "reasoning_rl.learning_rate=2e-4")
    switch_on(page, "dry_run")
    run = submit(page)
    wait_for_state(page, "Completed")
    expect(page.locator(".page-heading-flow-run")).to_contain_text("plan of small: reasoning_rl.learning_rate=2e-4")
    open_artifact(page, "plan")
    expect(page.get_by_text("reasoning_rl.learning_rate 0.0001 -> 0.0002").first).to_be_visible()
    shoot(page, shots / "32_dry_run.png")
    assert up.sub_flows(run) == {}
    assert up.records() == known


def test_ablation_of_finished_variants_reuses_them_and_compares_them_on_both_pages(up: Up, page: Page, shots: Path, again: str) -> None:
    open_form(page, up, "recipe ablation")
    fill(page, "recipe", str(up.recipe))
    shoot(page, shots / "40_ablation_form.png")
    run = submit(page)
    wait_for_state(page, "Completed")
    expect(page.locator(".page-heading-flow-run")).to_contain_text("reasoning_rl loss=dapo,dr_grpo")
    shoot(page, shots / "41_ablation_finished.png")
    assert up.sub_flows(run) == {}
    open_artifact(page, "comparison")
    for text in ("loss=dapo", "loss=dr_grpo", "baseline", "not distinguishable"):
        expect(page.get_by_text(text, exact=True).first).to_be_visible()
    shoot(page, shots / "42_ablation_comparison.png")
    page.goto(f"{up.prefect}/runs/flow-run/{run}")
    open_artifact(page, "links")
    mlflow = follow(page, "comparison")
    for text in ("loss=dapo", "loss=dr_grpo", "not distinguishable"):
        expect(mlflow.get_by_text(text).first).to_be_visible()
    shoot(mlflow, shots / "43_mlflow_comparison.png")
