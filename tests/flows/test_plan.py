"""Plans: keys and fingerprints, reuse and resume, and the reason that names the part that changed."""

from __future__ import annotations

import ast
import gc
import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from flows import plan as planning
from flows.plan import Step, check_code, code_of, decide, find_model, make_plan, read_state, remember, stage_folder
from flows.recipe import Recipe, load_recipe
from stages.artifacts import StageResult, write_json
from stages.errors import ArtifactError, ConfigError, StageError

RECIPE = """
name: small
models: {{base: {base}}}
stages:
  curation:
    sources: [{{kind: file, path: {rows}}}]
    benchmarks: {{sums: [{{kind: reasoning_gym, family: chain_sum, size: 10}}]}}
    pools: {{rl: {{share: 0.5}}, cold_start: {{share: 0.5}}}}
  cold_start: {{from: {{model: base, traces: curation.cold_start}}, examples: 10, learning_rate: 3.0e-4}}
  pass_rates: {{from: {{model: cold_start, problems: curation.rl}}}}
"""


class Project:
    """A recipe with a base model and a file of rows, and a home to be."""

    def __init__(self, folder: Path, finish: Callable[[Path, str, Step, str], StageResult]) -> None:
        self._finish = finish
        self.folder, self.home = folder, folder / "home"
        base = folder / "base"
        base.mkdir()
        (base / "config.json").write_text("{}")
        (base / "model.safetensors").write_text("weights")
        (folder / "rows.jsonl").write_text("{}\n")
        (folder / "small.yaml").write_text(RECIPE.format(base=base, rows=folder / "rows.jsonl"))

    def recipe(self, *overrides: str) -> Recipe:
        return load_recipe(str(self.folder / "small.yaml"), overrides)

    def plan(self, *overrides: str) -> dict[str, Step]:
        return {step.node.name: step for step in make_plan(self.recipe(*overrides), self.home)}

    def finish(self, step: Step, content: str = "") -> StageResult:
        """Do as if the step had run; its outputs hold `content`."""
        return self._finish(self.home, "small", step, content)

    def finish_all(self, *overrides: str) -> None:
        for name in ("curation", "cold_start", "pass_rates"):
            self.finish(self.plan(*overrides)[name], content=",".join(overrides) if name == "cold_start" else "")


@pytest.fixture
def project(tmp_path: Path, finish: Callable[[Path, str, Step, str], StageResult]) -> Project:
    return Project(tmp_path, finish)


def shown(steps: dict[str, Step]) -> dict[str, tuple[str, str]]:
    return {name: (step.action, step.why) for name, step in steps.items()}


def test_plan_of_a_new_recipe_runs_all_and_leaves_no_trace(project: Project) -> None:
    assert shown(project.plan()) == {
        "curation": ("run", "never ran"),
        "cold_start": ("run", "waits for curation, which runs"),
        "pass_rates": ("run", "waits for cold_start, which runs; waits for curation, which runs"),
    }
    assert not project.home.exists()


def test_plan_after_a_run_reuses_all(project: Project) -> None:
    project.finish_all()
    assert {action for action, _ in shown(project.plan()).values()} == {"reuse"}


def test_plan_changed_setting_is_named_and_only_what_depends_on_it_runs(project: Project) -> None:
    project.finish_all()
    assert shown(project.plan("cold_start.learning_rate=0.0004")) == {
        "curation": ("reuse", "finished"),
        "cold_start": ("run", "cold_start.learning_rate 0.0003 -> 0.0004"),
        "pass_rates": ("run", "waits for cold_start, which runs"),
    }


def test_plan_changed_setting_of_a_waiting_stage_is_named_too(project: Project) -> None:
    project.finish_all()
    steps = project.plan("cold_start.learning_rate=0.0004", "pass_rates.sampler.temperature=0.5")
    assert steps["pass_rates"].why == "pass_rates.sampler.temperature 1 -> 0.5; waits for cold_start, which runs"


def test_plan_placement_setting_changes_nothing(project: Project) -> None:
    project.finish_all()
    steps = project.plan("cold_start.max_minutes=1", "pass_rates.engine.kv_cache_mib=64")
    assert {step.action for step in steps.values()} == {"reuse"}


def test_plan_both_variants_stay_reusable(project: Project) -> None:
    project.finish_all()
    project.finish_all("cold_start.learning_rate=0.0004")
    assert {step.action for step in project.plan().values()} == {"reuse"}
    assert {step.action for step in project.plan("cold_start.learning_rate=0.0004").values()} == {"reuse"}


def test_plan_upstream_that_changed_is_named(project: Project) -> None:
    project.finish_all()
    project.finish(project.plan("cold_start.learning_rate=0.0004")["cold_start"], content="other")
    step = project.plan("cold_start.learning_rate=0.0004")["pass_rates"]
    assert (step.action, step.why) == ("run", "output of cold_start changed")


def test_plan_rerun_that_reproduces_its_output_leaves_downstream_reused(project: Project) -> None:
    project.finish_all()
    project.finish(project.plan("cold_start.learning_rate=0.0004")["cold_start"])
    assert project.plan("cold_start.learning_rate=0.0004")["pass_rates"].action == "reuse"


def test_plan_changed_input_file_is_named(project: Project) -> None:
    project.finish_all()
    (project.folder / "rows.jsonl").write_text("{}\n{}\n")
    assert project.plan()["curation"].why == f"file {project.folder / 'rows.jsonl'} changed"


def test_plan_missing_input_file_is_an_error(project: Project) -> None:
    (project.folder / "rows.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"curation: the file .*rows.jsonl does not exist"):
        project.plan()


def test_plan_changed_base_model_is_named(project: Project) -> None:
    project.finish_all()
    (project.folder / "base" / "model.safetensors").write_text("other weights")
    assert project.plan()["cold_start"].why == "model base changed"


def test_plan_changed_seed_is_named(project: Project) -> None:
    project.finish_all()
    assert project.plan("seed=1")["curation"].why == "seed of curation changed"


def with_other_code(step: Step, home: Path, file: str) -> Step:
    """The step as it was when a file of its code was another one."""
    assert step.key is not None
    key = {**step.key, "code": {**step.key["code"], file: "other"}}
    return replace(step, key=key, fingerprint="0" * 64, folder=stage_folder(home, step.node.stage, "0" * 64))


def test_plan_changed_code_is_named(project: Project) -> None:
    project.finish(project.plan()["curation"])
    project.finish(with_other_code(project.plan()["cold_start"], project.home, "stages/training.py"))
    step = project.plan()["cold_start"]
    assert (step.action, step.why) == ("run", "code of cold_start changed (stages/training.py)")


def test_check_code_that_changed_while_the_recipe_ran_is_named(project: Project) -> None:
    step = project.plan()["curation"]
    check_code(step)
    changed = with_other_code(step, project.home, "datasets/contracts.yaml")
    with pytest.raises(StageError, match=r"the code of curation changed while the recipe ran \(datasets/contracts.yaml\); run the same"):
        check_code(changed)


def test_plan_changed_setting_of_an_evaluation_is_named_as_it_is_set(project: Project) -> None:
    with (project.folder / "small.yaml").open("a") as file:
        file.write("evaluation: {benchmarks: curation.benchmarks, samples: 2}\n")
    project.finish(project.plan()["curation"])
    project.finish(project.plan()["evaluation_base"])
    assert project.plan("evaluation.samples=4")["evaluation_base"].why == "evaluation.samples 2 -> 4"


def test_plan_unfinished_folder_with_a_checkpoint_is_resumed(project: Project) -> None:
    project.finish(project.plan()["curation"])
    folder = project.plan()["cold_start"].folder
    assert folder is not None
    (folder / "trainer" / "sft" / "checkpoint-12").mkdir(parents=True)
    (folder / "trainer" / "sft" / "checkpoint-12" / "trainer_state.json").write_text("{}")
    assert shown(project.plan())["cold_start"] == ("resume", "stopped after checkpoint-12")
    assert project.plan("cold_start.learning_rate=0.0004")["cold_start"].action == "run"


def test_plan_output_that_is_gone_runs_again(project: Project) -> None:
    project.finish_all()
    folder = project.plan()["curation"].folder
    assert folder is not None
    (folder / "rl").unlink()
    step = project.plan()["curation"]
    assert (step.action, step.why) == ("run", f"its output {folder / 'rl'} is gone")


def test_plan_unreadable_result_names_the_remedy(project: Project) -> None:
    project.finish_all()
    folder = project.plan()["curation"].folder
    assert folder is not None
    (folder / "result.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"(?s)cannot be read .* delete"):
        project.plan()


def test_decide_at_run_time_agrees_with_the_plan(project: Project) -> None:
    planned = project.plan()["curation"]
    assert decide(planned.node, {}, project.home, None) == planned


def test_state_keeps_other_nodes_and_last(project: Project) -> None:
    project.finish_all()
    remember(project.home, "small", last={"variant": "default"})
    project.finish(project.plan("seed=1")["curation"])
    state = read_state(project.home, "small")
    assert set(state["nodes"]) == {"curation", "cold_start", "pass_rates"}
    assert state["last"] == {"variant": "default"}


def test_code_follows_imports_and_leaves_settings_out() -> None:
    files = code_of("cold_start")
    assert {"stages/cold_start.py", "stages/supervised.py", "stages/training.py"} <= set(files)
    assert {"stages/chat/__init__.py", "stages/chat/template.jinja"} <= set(files)
    assert not {"stages/config.py", "stages/errors.py", "stages/records.py"} & set(files)
    assert any(name.startswith("datasets/sql/") for name in code_of("curation"))
    assert not any(name.startswith("datasets/sql/") for name in files)


def test_code_digest_ignores_comments_and_docstrings() -> None:
    import ast

    def digest(text: str) -> str:
        return planning._digest_of_tree(ast.parse(text))

    plain = digest("def f(x):\n    return x + 1\n")
    assert digest('"""Doc."""\ndef f(x):\n    """Doc."""\n    # why\n    return x + 1\n') == plain
    assert digest("def f(x):\n    return x + 2\n") != plain


def test_find_model_digest_is_cached_until_a_file_changes(project: Project) -> None:
    project.home.mkdir()
    base = project.folder / "base"
    first = find_model("base", str(base), project.home, download=False)
    known = json.loads((project.home / "digests.json").read_text())
    write_json(project.home / "digests.json", {name: [signature, "cached"] for name, (signature, _) in known.items()})
    again = find_model("base", str(base), project.home, download=False)
    (base / "model.safetensors").write_text("more weights")
    changed = find_model("base", str(base), project.home, download=False)
    assert first is not None
    assert again is not None
    assert changed is not None
    assert again.digest == "cached"
    assert len({first.digest, again.digest, changed.digest}) == 3


def test_find_model_missing_folder_and_bare_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        find_model("base", str(tmp_path / "nothing"), tmp_path, download=False)
    with pytest.raises(ConfigError, match=r"must hold config.json and \*.safetensors"):
        find_model("base", str(tmp_path), tmp_path, download=False)


def test_find_model_on_the_hub_is_not_fetched_by_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert find_model("base", "no-such-org/no-such-model@v1", tmp_path, download=False) is None
    with pytest.raises(ConfigError, match="no-such-org/no-such-model@v1: is not in the local cache and the hub cannot be reached"):
        find_model("base", "no-such-org/no-such-model@v1", tmp_path, download=True)


def test_code_read_while_another_thread_parses_is_the_same(project: Project) -> None:
    """CPython 3.11 fails in ast.parse when a garbage collection in it lets another thread in: a run started from its form ended so."""
    expected, done = code_of("reasoning_rl"), threading.Event()
    text = Path(planning.__file__).read_text()

    def parse() -> None:
        while not done.is_set():
            with suppress(SystemError):
                ast.parse(text)

    def let_in(phase: str, info: dict[str, int]) -> None:
        os.sched_yield()

    thread, often = threading.Thread(target=parse), gc.get_threshold()
    thread.start()
    gc.callbacks.append(let_in)
    gc.set_threshold(50)
    try:
        for _ in range(5):
            code_of.cache_clear()
            assert code_of("reasoning_rl") == expected
    finally:
        gc.set_threshold(*often)
        gc.callbacks.remove(let_in)
        done.set()
        thread.join()
