"""House rules that no linter knows: what may stand where, and what every file must say."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from stages import config as settings
from stages.config import STAGES

ROOT = Path(__file__).parents[1]
HEADS = ("What", "Reads", "Writes", "Papers", "Differs")
HEAVY = ("torch", "transformers", "trl", "vllm", "accelerate", "datasets", "mlflow", "prefect")
LIGHT = (
    "stages.config",
    "stages.artifacts",
    "stages.records",
    "stages.errors",
    "stages.tables",
    "stages.problems",
    "stages.chat",
    "stages.rewards.grading",
    "stages.rewards.rewards",
    "flows.recipe",
    "flows.plan",
    "flows.history",
    "flows.request",
    "flows.garbage",
    "flows.conduct",
    "flows.scores.comparison",
)
CONFIGS = [
    kind
    for _, kind in inspect.getmembers(settings, inspect.isclass)
    if issubclass(kind, BaseModel) and kind.__module__ == settings.__name__
]


# put together here, so that this file passes its own test
def tracked() -> list[Path]:
    """Files that belong to the project: in Git, or new and not ignored."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return [path for name in names if (path := ROOT / name).is_file()]


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_house_folders_datasets_and_mlflow_hold_no_python() -> None:
    assert (ROOT / "datasets").is_dir()
    assert (ROOT / "mlflow").is_dir()
    assert python_files("datasets", "mlflow") == []  # one __init__.py there would hide the library of that name


def test_house_tests_are_no_package() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.parametrize("stage", STAGES)
def test_house_stage_file_opens_with_the_five_heads(stage: str) -> None:
    lines = (ast.get_docstring(ast.parse((ROOT / "stages" / f"{stage}.py").read_text())) or "").splitlines()
    heads = [line.split()[0] for line in lines if line and not line[0].isspace() and line.split()[0] in HEADS]
    assert heads == list(HEADS)


@pytest.mark.parametrize("stage", [name for name in STAGES if name not in ("base_pretraining", "curation")])
def test_house_stage_file_docstring_names_every_input_and_output(stage: str) -> None:
    text = ast.get_docstring(ast.parse((ROOT / "stages" / f"{stage}.py").read_text())) or ""
    assert [name for name in (*STAGES[stage].reads, *STAGES[stage].writes) if f"`{name}`" not in text] == []


@pytest.mark.parametrize("path", python_files("stages", "flows"), ids=lambda path: str(path.relative_to(ROOT)))
def test_house_module_opens_with_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("module", LIGHT)
def test_house_light_ground_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert found == []


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_house_settings_are_closed_frozen_and_described(kind: type[BaseModel]) -> None:
    assert kind.model_config.get("extra") == "forbid"
    assert kind.model_config.get("frozen") is True
    assert kind.__doc__
    fields = {name: field for name, field in kind.model_fields.items() if name != "kind"}  # the tag of a union describes itself
    assert [name for name, field in fields.items() if not (field.description or "").strip()] == []


def test_house_every_stage_has_settings_and_a_file_of_its_name() -> None:
    for name, kind in STAGES.items():
        assert issubclass(kind, settings.StageConfig)
        assert kind.writes
        assert kind.optional_reads <= kind.reads.keys()
        functions = [
            node.name for node in ast.parse((ROOT / "stages" / f"{name}.py").read_text()).body if isinstance(node, ast.FunctionDef)
        ]
        assert "run" in functions


def test_house_no_file_is_named_for_nothing_in_particular() -> None:
    bad = {"utils", "util", "common", "helpers", "helper", "misc", "shared", "lib"}
    assert [path for path in tracked() if bad & {part.lower() for part in (*path.relative_to(ROOT).parts[:-1], path.stem)}] == []


@pytest.mark.parametrize("path", python_files("tests"), ids=lambda path: str(path.relative_to(ROOT)))
def test_house_tests_are_plain_functions_that_check_something_and_never_sleep(path: Path) -> None:
    tree = ast.parse(path.read_text())
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not calls & {"time.sleep", "sleep"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            assert not node.name.startswith("Test")
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            assert node.name.count("_") >= 3, f"{node.name}: say subject, scenario and what is expected"
            text = ast.unparse(node)
            assert "assert" in text or "pytest.raises" in text or "expect" in text or "verify(" in text, f"{node.name} checks nothing"


@pytest.mark.parametrize("path", python_files("tests"), ids=lambda path: str(path.relative_to(ROOT)))
def test_house_tests_replace_nothing_of_ours(path: Path) -> None:
    tree = ast.parse(path.read_text())
    names: dict[str, str] = {}  # what an import calls a module here, to the module's own name
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("monkeypatch.setattr", "patch", "patch.object")) and node.args:
            written = ast.unparse(node.args[0]).strip("'\"")
            first, dot, rest = written.partition(".")
            target = names.get(first, first) + dot + rest
            assert not target.startswith(("stages.", "flows.")), f"line {node.lineno} replaces {target}"


def test_readme_map_names_every_file_of_the_two_rooms() -> None:
    text = (ROOT / "README.md").read_text().partition("## File map")[2]
    files = [*ROOT.glob("flows/*"), *ROOT.glob("stages/*"), *ROOT.glob("flows/recipes/*.yaml")]
    expected = {path.name if path.suffix == ".py" else path.stem for path in files if path.suffix in (".py", ".yaml") or path.is_dir()}
    missing = sorted(name for name in expected - {"__init__.py", "__pycache__"} if name not in text)
    assert not missing
