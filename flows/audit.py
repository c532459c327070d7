"""The audit of a recipe's rewards (`posttrain audit`): each stage's own graders, held against the recipe's gold answers and the suites.

What is looked at, and how, is in `stages/rewards/audit.py`; the stages themselves run a part of it before they train.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.markup import escape

from flows.recipe import Recipe
from stages.config import Curation, PolicyGradientConfig, ReasoningRL
from stages.rewards.audit import Audit, CodeAttack, audit, check_programs, of_types, prompts_of, read_audit_rows, shipped_rows
from stages.rewards.code import CodeTests, Test, grade_program
from stages.rewards.grading import Grade
from stages.rewards.model_judge import grader_of
from stages.rewards.sandbox import DEFAULT_LIMITS, SandboxError, require_sandbox
from stages.rewards.scoring import score_by_rules
from stages.rewards.tasks import ANSWER_TYPES, second_grades

if TYPE_CHECKING:
    from rich.console import Console

GOLDS_PER_SOURCE = 1000
"""Gold answers that are looked at of each source of problems, the first ones."""
_SHIPPED, _PROGRAMS = "shipped graders", "programs"
_TYPES = frozenset(ANSWER_TYPES)
_LIMITS = DEFAULT_LIMITS._replace(cpu_s=2, wall_s=4.0)


class StageAudit(NamedTuple):
    """What was found of one stage's rewards."""

    stage: str
    audit: Audit


def audit_recipe(recipe: Recipe | None, home: Path, say: Callable[[str], None]) -> list[StageAudit]:
    """Audit the rewards of every stage that trains on them; without one, the shipped graders as they are by default.

    The sandbox for programs is audited once. A host that cannot run it is told so, and has no such check.
    Raises DataError for rows or sources that cannot be read, ConfigError for a judge without its key.
    """
    nodes = recipe.nodes if recipe is not None else ()
    configs = {node.name: node.config for node in nodes if isinstance(node.config, PolicyGradientConfig)}
    configs = configs or {_SHIPPED: ReasoningRL(steps=1, learning_rate=1.0)}
    problems, found, programs = gold_answers(recipe), [], dict[CodeAttack, None]()
    for name, config in configs.items():
        rows = [*shipped_rows(), *(row for path in config.audit.rows for row in read_audit_rows(path))]
        programs |= {row: None for row in rows if isinstance(row, CodeAttack)}
        grader = grader_of(config.judge, home / "audit", recipe.seed if recipe is not None else 0)
        score = partial(score_by_rules, config=config, grader=grader)
        golds = prompts_of(problems)
        found.append(StageAudit(name, audit(score, of_types(rows, _TYPES), golds, config=config.audit, second=second_grades)))
    try:
        require_sandbox()
    except SandboxError as error:
        say(f"programs are not audited: {error}")
        return found
    return [*found, StageAudit(_PROGRAMS, Audit((check_programs([*programs], _grade_program),)))]


def gold_answers(recipe: Recipe | None) -> list[dict[str, Any]]:
    """The first problems of every source that the recipe curates, benchmarks too: id, question, answer. Unreadable rows are left out."""
    nodes = recipe.nodes if recipe is not None else ()
    return [row for node in nodes if isinstance(node.config, Curation) for row in _problems(node.config, node.seed)]


def _problems(config: Curation, seed: int) -> Iterator[dict[str, Any]]:
    from stages.sources import read_source, sources_in_order

    for place in sources_in_order(config, seed):
        for row in itertools.islice(read_source(place), GOLDS_PER_SOURCE):
            if row.unreadable is None and row.question and row.answer and row.answer.strip():
                yield row._asdict() | {"problem_id": f"{place.name} row {row.row_number}", "answer": row.answer.strip()}


def _grade_program(program: str, stdin: str, expected: str) -> Grade:
    return grade_program(program, CodeTests(tests=(Test(input=stdin, expected=expected),)), _LIMITS)


def rows_of(audits: Sequence[StageAudit]) -> list[dict[str, Any]]:
    """One plain row a check, for JSON and MLflow."""
    return [{"stage": stage, **check._asdict(), "examples": list(check.examples)} for stage, found in audits for check in found.checks]


def render(audits: Sequence[StageAudit], console: Console) -> None:
    """Print one line a check, then the examples of those that failed."""
    from rich.table import Table

    table = Table("stage", "check", "rows", "failed", "measured", "rule", "", box=None, header_style="bold", pad_edge=False)
    for stage, found in audits:
        for check in found.checks:
            mark = "[green]passed[/green]" if check.passed else "[bold red]FAILED[/bold red]"
            table.add_row(stage, check.name, str(check.rows), str(check.failed), f"{check.value:.4g}", check.rule, mark)
    console.print(table)
    for stage, found in audits:
        for check in found.checks:
            if not check.passed:
                console.print(f"\n[bold red]{escape(stage)}: {check.name}[/bold red]")
                for example in check.examples:
                    console.print(f"  {escape(example)}", soft_wrap=True)
