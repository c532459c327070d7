"""Review of a cold start's reference traces by people: export, edit, check.

The traces that the node would learn from are written as JSONL (`stages/trace_review.py` says what may be edited).
The edited file is a setting of the node, `review`, and so a part of its fingerprint.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from flows.plan import make_plan, results_of, take
from flows.recipe import load_recipe
from flows.request import as_yaml, set_options
from stages.artifacts import Ref
from stages.errors import ArtifactError, ConfigError
from stages.tables import read_rows
from stages.trace_review import apply_review, write_review

_FOLDER = "reviews"
_NAME_DIGITS = 12


def export_traces(recipe: str, overrides: Sequence[str], node: str, home: Path) -> tuple[Path, int]:
    """Write the traces that a node reads for review; returns the file and how many traces it holds.

    The file is named by the data, so the same traces have one file, and one that is there is left alone:
    it may hold somebody's work. Raises ArtifactError when the stage that makes the traces has not finished.
    """
    traces = _traces(recipe, overrides, node, home)
    path = home / _FOLDER / f"{node}-{traces.digest[:_NAME_DIGITS]}.jsonl"
    return path, write_review(read_rows(traces, columns=("question", "answer", "trace")), path)


def check_review(recipe: str, overrides: Sequence[str], node: str, home: Path, path: Path) -> int:
    """How many traces an edited file keeps. Raises DataError, naming the line, when it does not fit the traces."""
    rows = read_rows(_traces(recipe, overrides, node, home), columns=("question", "answer", "trace"))
    return len(apply_review(rows, path))


def check_of(recipe: str, overrides: Sequence[str], node: str, path: Path) -> str:
    """The command that checks an edited file, for a shell."""
    return f"posttrain review {shlex.quote(recipe)} --stage {node}{set_options(overrides)} --check {shlex.quote(str(path))}"


def use_of(recipe: str, overrides: Sequence[str], node: str, path: Path) -> str:
    """The command that trains on an edited file with the same settings, for a shell."""
    others = [item for item in overrides if not item.startswith(f"{node}.review=")]
    return f"posttrain run {shlex.quote(recipe)}{set_options([*others, f'{node}.review={as_yaml(path)}'])}"


def _traces(recipe: str, overrides: Sequence[str], node: str, home: Path) -> Ref:
    checked = load_recipe(recipe, overrides)
    source = next((each.inputs["traces"] for each in checked.nodes if each.name == node and each.stage == "cold_start"), None)
    if source is None:
        known = ", ".join(each.name for each in checked.nodes if each.stage == "cold_start") or "none"
        raise ConfigError(f"{checked.name} has no cold start called {node!r}; traces are reviewed for a cold start; it has: {known}")
    results = results_of(make_plan(checked, home))
    if source.node not in results:
        command = f"posttrain stage {source.node} --recipe {shlex.quote(recipe)}{set_options(overrides)}"
        raise ArtifactError(f"{source} has not finished with these settings; run it first: {command}")
    return take({name: result.outputs for name, result in results.items()}, source)
