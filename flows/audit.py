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

from flows.recipe import Node, Recipe
from stages.config import Curation, JudgeConfig, PolicyGradientConfig, ReasoningRL
from stages.errors import ConfigError
from stages.rewards.audit import Audit, CodeAttack, audit, check_programs, grade_attack, of_types, prompts_of, read_audit_rows, shipped_rows
from stages.rewards.model_judge import grader_of, key_of
from stages.rewards.sandbox import SandboxError, require_sandbox
from stages.rewards.scoring import score_by_rules
from stages.rewards.tasks import ANSWER_TYPES, second_grades

if TYPE_CHECKING:
    from rich.console import Console

GOLDS_PER_SOURCE = 1000
"""Gold answers that are looked at of each source of problems, the first ones."""
_SHIPPED, _PROGRAMS = "shipped graders", "programs"
_TYPES = frozenset(ANSWER_TYPES)


class StageAudit(NamedTuple):
    """What was found of one stage's rewards."""

    stage: str
    audit: Audit


def require_host(nodes: Sequence[Node]) -> None:
    """Return when this host has what the graders of these stages need: the keys of its judges, and a sandbox where answers are programs.

    Raises ConfigError naming the stage and the variable, and SandboxError naming the source. Where answers are programs it runs one
    in the sandbox, some 0.1 s; else it costs nothing.
    """
    for node in nodes:
        judge = getattr(node.config, "judge", None)
        if isinstance(judge, JudgeConfig):
            try:
                key_of(judge)
            except ConfigError as error:
                raise ConfigError(f"{node.key}.{error}") from error
    if source := _source_of_programs(nodes):
        try:
            require_sandbox()
        except SandboxError as error:
            raise SandboxError(f"answers of {source} are programs, which cannot be graded here; {error}") from error


def audit_recipe(recipe: Recipe | None, home: Path, say: Callable[[str], None]) -> list[StageAudit]:
    """Audit the rewards of every stage that trains on them; without one, the shipped graders as they are by default.

    The sandbox for programs is audited once. A host that cannot run it is told so, and has no such check; for a recipe whose
    answers are programs that is a SandboxError. Raises DataError for rows or sources that cannot be read, ConfigError for a
    judge without its key.
    """
    if recipe is not None:
        require_host(recipe.nodes)
    nodes = recipe.nodes if recipe is not None else ()
    configs = {node.name: node.config for node in nodes if isinstance(node.config, PolicyGradientConfig)}
    configs = configs or {_SHIPPED: ReasoningRL(steps=1, learning_rate=1.0)}
    problems, shipped, found, programs = gold_answers(recipe), shipped_rows(), [], dict[CodeAttack, None]()
    for name, config in configs.items():
        rows = [*shipped, *(row for path in config.audit.rows for row in read_audit_rows(path))]
        programs |= {row: None for row in rows if isinstance(row, CodeAttack)}
        grader = grader_of(config.judge, home / "audit", recipe.seed if recipe is not None else 0)
        score = partial(score_by_rules, config=config, grader=grader)
        wanted, golds = of_types(rows, _TYPES), prompts_of(problems)
        say(f"{name}: {len(golds):,} gold answers and {len(wanted):,} rows ...")
        found.append(StageAudit(name, audit(score, wanted, golds, config=config.audit, second=second_grades)))
    try:
        require_sandbox()
    except SandboxError as error:
        say(f"programs are not audited: {error}")
        return found
    say(f"{_PROGRAMS}: {len(programs)} in the sandbox ...")
    return [*found, StageAudit(_PROGRAMS, Audit((check_programs([*programs], grade_attack),)))]


def _source_of_programs(nodes: Sequence[Node]) -> str | None:
    """The first source of problems whose answers are programs."""
    from stages.sources import sources_in_order

    places = (place for node in nodes if isinstance(node.config, Curation) for place in sources_in_order(node.config, node.seed))
    return next((place.name for place in places if getattr(place.source, "answer_type", None) == "code"), None)


def gold_answers(recipe: Recipe | None) -> list[dict[str, Any]]:
    """The first problems of every source that the recipe curates, benchmarks too, with answer type. Unreadable rows are left out."""
    nodes = recipe.nodes if recipe is not None else ()
    return [row for node in nodes if isinstance(node.config, Curation) for row in _problems(node.config, node.seed)]


def _problems(config: Curation, seed: int) -> Iterator[dict[str, Any]]:
    from stages.sources import read_source, sources_in_order

    for place in sources_in_order(config, seed):
        for row in itertools.islice(read_source(place), GOLDS_PER_SOURCE):
            if row.unreadable is None and row.question and row.answer and row.answer.strip():
                yield row._asdict() | {"problem_id": f"{place.name} row {row.row_number}", "answer": row.answer.strip()}


def rows_of(audits: Sequence[StageAudit]) -> list[dict[str, Any]]:
    """One plain row a check, for JSON and MLflow."""
    return [{"stage": stage, **check._asdict(), "examples": list(check.examples)} for stage, found in audits for check in found.checks]


def render(audits: Sequence[StageAudit], console: Console) -> None:
    """Print one line a check, then examples: all that are kept of a check that failed, one of what a passed one lets through."""
    from rich.table import Table

    table = Table("stage", "check", "rows", "failed", "measured", "rule", "", box=None, header_style="bold", pad_edge=False)
    for stage, found in audits:
        for check in found.checks:
            mark = "[green]passed[/green]" if check.passed else "[bold red]FAILED[/bold red]"
            table.add_row(stage, check.name, str(check.rows), str(check.failed), f"{check.value:.4g}", check.rule, mark)
    console.print(table)
    checks = [(stage, check) for stage, found in audits for check in found.checks]
    for stage, check in checks:
        if check.passed and check.examples:
            console.print(
                f"\n[dim]{escape(stage)}: {check.name}: {check.failed} of {check.rows} did not, which its rule allows; for instance[/dim]"
            )
            console.print(f"  [dim]{escape(check.examples[0])}[/dim]", soft_wrap=True)
    for stage, check in checks:
        if not check.passed:
            shown = f", the first {len(check.examples)}" if check.failed > len(check.examples) else ""
            console.print(f"\n[bold red]{escape(stage)}: {check.name}: {check.failed} of {check.rows} failed{shown}[/bold red]")
            for example in check.examples:
                console.print(f"  {escape(example)}", soft_wrap=True)
    failed = sum(not check.passed for _, check in checks)
    console.print(f"\n{failed} of {len(checks)} checks failed" if failed else f"\nall {len(checks)} checks passed")
