"""Requests: which stages run, what comes from an earlier run, what is forced or accepted, and which variants an ablation has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.history import Finished, Record, keep, open_run
from flows.plan import Step
from flows.recipe import load_recipe
from flows.request import Job, Request, prepare, prepare_sweep, variants
from stages.artifacts import StageResult
from stages.errors import ArtifactError, ConfigError

RECIPE = """
name: small
models: {{base: {base}}}
evaluation: {{benchmarks: curation.benchmarks}}
stages:
  curation:
    sources: [{{kind: reasoning_gym, family: chain_sum, size: 10}}]
    benchmarks: {{sums: [{{kind: reasoning_gym, family: chain_sum, size: 10}}]}}
    pools: {{rl: {{share: 0.5}}, cold_start: {{share: 0.5}}}}
  cold_start: {{from: {{model: base, traces: curation.cold_start}}, examples: 10, learning_rate: 3.0e-4}}
  pass_rates: {{from: {{model: cold_start, problems: curation.rl}}}}
  reasoning_rl: {{from: {{model: cold_start, problems: pass_rates.band}}, steps: 4, learning_rate: 1.0e-4}}
"""


class Project:
    """A recipe of four stages and three evaluations, and a home in which its stages can be made to have run."""

    def __init__(self, folder: Path, finish: Callable[[Path, str, Step, str], StageResult]) -> None:
        self._finish = finish
        self.home, self.file = folder / "home", str(folder / "small.yaml")
        (folder / "base").mkdir()
        (folder / "base" / "config.json").write_text("{}")
        (folder / "base" / "model.safetensors").write_text("weights")
        (folder / "small.yaml").write_text(RECIPE.format(base=folder / "base"))

    def prepare(self, **asked: Any) -> Job:
        return prepare(Request(recipe=self.file, **asked), self.home)

    def finish(self, step: Step) -> StageResult:
        """Do as if the step had run; what it writes depends on its settings."""
        return self._finish(self.home, "small", step, str(step.fingerprint))

    def run(self, *overrides: str) -> Record:
        """Do as if the whole recipe had run."""
        recipe = load_recipe(self.file, overrides)
        record = open_run(
            self.home, "small", kind="recipe", text=recipe.text, overrides=dict(recipe.overrides), variant=recipe.variant, status="finished"
        )
        for node in recipe.nodes:
            step = next(step for step in self.prepare(overrides=overrides).steps if step.node.name == node.name)
            result = step.result or self.finish(step)
            record = keep(self.home, record, nodes={**record.nodes, node.name: Finished(stage=node.stage, fingerprint=result.fingerprint)})
        return record


@pytest.fixture
def project(tmp_path: Path, finish: Callable[[Path, str, Step, str], StageResult]) -> Project:
    return Project(tmp_path, finish)


def shown(job: Job) -> dict[str, tuple[str, str]]:
    return {step.node.name: (step.action, step.why) for step in job.steps}


def test_prepare_only_a_stage_runs_it_and_its_evaluation(project: Project) -> None:
    project.run()
    job = project.prepare(only="cold_start", overrides=("cold_start.learning_rate=0.0004",))
    assert shown(job) == {
        "curation": ("reuse", "finished"),
        "cold_start": ("run", "cold_start.learning_rate 0.0003 -> 0.0004"),
        "evaluation_cold_start": ("run", "waits for cold_start, which runs"),
    }
    assert not job.is_whole


def test_prepare_of_an_earlier_run_takes_its_artifacts_whatever_has_changed_since(project: Project) -> None:
    first = project.run()
    project.run("curation.benchmark_size=64", "cold_start.examples=20")
    of_first = project.prepare(only="reasoning_rl", of_run=first.id, overrides=("reasoning_rl.loss=dr_grpo",))
    assert shown(of_first) == {
        "curation": ("reuse", "taken from small-1"),
        "cold_start": ("reuse", "taken from small-1"),
        "pass_rates": ("reuse", "taken from small-1"),
        "reasoning_rl": ("run", "reasoning_rl.loss dapo -> dr_grpo"),
        "evaluation_reasoning_rl": ("run", "waits for reasoning_rl, which runs"),
    }
    of_second = project.prepare(only="reasoning_rl", of_run="latest", overrides=("reasoning_rl.loss=dr_grpo",))
    assert of_second.whole.variant == "cold_start.examples=20, curation.benchmark_size=64, reasoning_rl.loss=dr_grpo"
    assert shown(of_second)["reasoning_rl"] == ("run", "reasoning_rl.loss dapo -> dr_grpo")


def test_prepare_downstream_of_a_run_has_every_row_and_runs_what_follows(project: Project) -> None:
    run = project.run()
    steps = shown(project.prepare(start_from="pass_rates", of_run=run.id, overrides=("pass_rates.attempts=4",)))
    assert [name for name, (action, _) in steps.items() if action == "run"] == ["pass_rates", "reasoning_rl", "evaluation_reasoning_rl"]
    assert steps["evaluation_base"] == ("reuse", "taken from small-1")


def test_prepare_of_a_run_that_did_not_come_so_far_says_so(project: Project) -> None:
    run = project.run()
    keep(project.home, run, nodes={"curation": run.nodes["curation"]}, status="failed")
    with pytest.raises(ArtifactError, match=r"cold_start cannot be taken from small-1: small-1 \(failed\) did not come to it"):
        project.prepare(only="reasoning_rl", of_run="small-1")


@pytest.mark.parametrize(("damage", "fault"), [("gone", "is gone"), ("changed", "has changed")])
def test_prepare_of_a_run_whose_artifact_is_damaged_names_it(damage: str, fault: str, project: Project) -> None:
    project.run()
    step = next(step for step in project.prepare().steps if step.node.name == "cold_start")
    assert step.result is not None
    model = step.result.outputs["model"].path
    if damage == "gone":
        model.unlink()
    else:
        model.write_text("other")
    with pytest.raises(ArtifactError, match=f"cold_start cannot be taken from small-1: its {model} {fault}"):
        project.prepare(only="reasoning_rl", of_run="small-1")


def test_prepare_forced_stage_runs_again_and_replaces_its_result(project: Project) -> None:
    project.run()
    job = project.prepare(start_from="cold_start", force=True)
    step = next(step for step in job.steps if step.node.name == "cold_start")
    assert (step.action, step.why, step.replaces) == ("run", "asked for again", True)
    assert shown(job)["pass_rates"] == ("run", "waits for cold_start, which runs")
    assert {action for action, _ in shown(project.prepare(force=True)).values()} == {"run"}


def test_prepare_accepted_drift_reuses_the_last_result_and_says_what_changed(project: Project) -> None:
    project.run()
    job = project.prepare(overrides=("cold_start.examples=20",), accept_drift=("cold_start",))
    step = next(step for step in job.steps if step.node.name == "cold_start")
    assert (step.action, step.drift) == ("reuse", "cold_start.examples 10 -> 20")
    assert step.why == "drift accepted: cold_start.examples 10 -> 20"
    assert {name: action for name, (action, _) in shown(job).items() if action != "reuse"} == {}


def test_prepare_accepted_drift_without_a_result_is_refused(project: Project) -> None:
    with pytest.raises(ArtifactError, match="--accept-drift curation: there is no result to reuse"):
        project.prepare(accept_drift=("curation",))
    with pytest.raises(ConfigError, match="did you mean cold_start"):
        project.prepare(accept_drift=("cold_stat",))


def test_prepare_changed_output_runs_its_stage_again(project: Project) -> None:
    project.run()
    step = project.prepare().steps[0]
    assert step.result is not None
    path = step.result.outputs["rl"].path
    path.write_text("cut")
    step = project.prepare().steps[0]
    assert (step.action, step.why, step.replaces) == ("run", f"its output {path} has changed", True)


def test_prepare_only_and_from_together_are_refused(project: Project) -> None:
    with pytest.raises(ConfigError, match="only cold_start and from curation: the rule is one of the two"):
        project.prepare(only="cold_start", start_from="curation")


def test_stage_seed_of_its_own_changes_that_stage_alone(project: Project) -> None:
    project.run()
    steps = shown(project.prepare(overrides=("pass_rates.seed=1",)))
    assert steps["pass_rates"] == ("run", "seed of pass_rates changed")
    assert steps["cold_start"] == ("reuse", "finished")
    assert shown(project.prepare(overrides=("pass_rates.seed=0",)))["pass_rates"] == ("reuse", "finished")


@pytest.mark.parametrize("value", ["1.5", "x", "true"])
def test_stage_seed_that_is_no_whole_number_is_refused(value: str, project: Project) -> None:
    with pytest.raises(ConfigError, match=r"pass_rates.seed = .*: must be a whole number"):
        project.prepare(overrides=(f"pass_rates.seed={value}",))


# ---- ablations ------------------------------------------------------------------------------


def test_variants_are_all_combinations_with_every_seed_the_first_is_the_baseline() -> None:
    found = variants("reasoning_rl", ["loss=dapo,dr_grpo", "group_size=8, 16"], 2, recipe_seed=3)
    assert [variant.name for variant in found[::2]] == [
        "loss=dapo, group_size=8", "loss=dapo, group_size=16", "loss=dr_grpo, group_size=8", "loss=dr_grpo, group_size=16",
    ]  # fmt: skip
    assert found[0].overrides == ("reasoning_rl.loss=dapo", "reasoning_rl.group_size=8")
    assert found[1].overrides == ("reasoning_rl.loss=dapo", "reasoning_rl.group_size=8", "reasoning_rl.seed=4")
    assert [variant.seed for variant in found] == [3, 4] * 4


def test_variants_values_with_commas_stand_in_brackets() -> None:
    found = variants("pass_rates", ["band=[0.1, 0.9],[0.2, 0.8]"], 1, recipe_seed=0)
    assert [variant.overrides for variant in found] == [("pass_rates.band=[0.1, 0.9]",), ("pass_rates.band=[0.2, 0.8]",)]


@pytest.mark.parametrize(
    ("vary", "seeds", "text"),
    [
        ([], 1, "a comparison needs two"),
        (["loss=dapo"], 3, "gives 1 variant; a comparison needs two"),
        (["loss=dapo,dapo"], 1, "gives 1 variant"),
        (["loss"], 1, "must be key=value,value"),
        (["=a,b"], 1, "must be key=value,value"),
        (["loss=dapo,grpo", "loss=bnpo,grpo"], 1, "loss is varied twice"),
        (["loss=[dapo,grpo"], 1, "not YAML"),
        (["loss=dapo,grpo"], 0, "--seeds 0: must be at least 1"),
    ],
)
def test_variants_that_make_no_comparison_are_refused(vary: list[str], seeds: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        variants("reasoning_rl", vary, seeds, recipe_seed=0)


def test_prepare_sweep_shares_what_lies_before_and_compares_at_the_next_evaluation(project: Project) -> None:
    project.run()
    sweep = prepare_sweep(Request(recipe=project.file), project.home, "pass_rates", ["attempts=8,4"], 1, None)
    assert sweep.compared_at == "reasoning_rl"
    assert {action for action, _ in shown(sweep.jobs[0]).values()} == {"reuse"}
    assert [name for name, (action, _) in shown(sweep.jobs[1]).items() if action == "run"] == [
        "pass_rates", "reasoning_rl", "evaluation_reasoning_rl",
    ]  # fmt: skip


def test_prepare_sweep_without_an_evaluation_after_it_is_refused(project: Project) -> None:
    project.run()
    with pytest.raises(ConfigError, match="base is not evaluated after it; compare at one of reasoning_rl"):
        prepare_sweep(Request(recipe=project.file), project.home, "pass_rates", ["attempts=8,4"], 1, "base")


def test_prepare_sweep_with_a_wrong_value_names_the_variant_before_anything_runs(project: Project) -> None:
    project.run()
    with pytest.raises(ConfigError, match=r"reasoning_rl.loss = 'drgrpo'"):
        prepare_sweep(Request(recipe=project.file), project.home, "reasoning_rl", ["loss=dapo,drgrpo"], 1, None)
