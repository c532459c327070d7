"""What a command shows while it runs: the plan, a line a stage, the table. Rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flows.history import Record
from flows.plan import Step
from flows.summary import Totals

if TYPE_CHECKING:
    from flows.garbage import Item
    from flows.scores.ablation import AblationTable
    from flows.scores.comparison import Comparison

_PLAIN_WIDTH = 160
_PLAIN_EVERY_S = 30.0
_COLOURS = {"reuse": "green", "resume": "yellow", "run": "cyan"}
_SHOWN = ("rollout/reward", "reward/mean", "train/loss", "train/eval_loss")
"""Metrics worth a place on a stage's line, best first."""

Update = Callable[[int, int, str, Mapping[str, float]], None]


class Screen:
    """The terminal of a command. `stderr`: leave standard output to JSON."""

    def __init__(self, *, stderr: bool = False) -> None:
        console = Console(stderr=stderr, highlight=False)
        self.console = console if console.is_terminal else Console(stderr=stderr, highlight=False, width=_PLAIN_WIDTH, no_color=True)

    def say(self, text: str) -> None:
        """A line about the surroundings, such as a server that starts."""
        self.console.print(f"[dim]{escape(text)}[/dim]")

    def error(self, text: str) -> None:
        """One red block."""
        self.console.print(f"[bold red]{escape(text)}[/bold red]", soft_wrap=True)

    def plan(self, steps: Sequence[Step]) -> None:
        """The plan: what happens to each stage, and why."""
        table = Table("stage", "plan", "why", box=None, header_style="bold", pad_edge=False)
        for step in steps:
            colour = _COLOURS[step.action]
            table.add_row(step.node.name, f"[{colour}]{step.action}[/{colour}]", escape(step.why))
        self.console.print(table)
        self.console.print()

    def reused(self, name: str, why: str) -> None:
        """A stage that is not run again."""
        self.console.print(f"[green]=[/green] {name:<26} [dim]reused{'' if why == 'finished' else f', {escape(why)}'}[/dim]")

    @contextmanager
    def stage(self, name: str) -> Iterator[Update]:
        """A stage while it runs: call the result with done, total, unit and metrics. Ends in one line with its seconds."""
        start, last = time.monotonic(), ""
        columns = (TextColumn("> {task.description:<26}"), BarColumn(24), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
        quiet = not self.console.is_terminal
        bar = Progress(*columns, TimeElapsedColumn(), console=self.console, transient=True, disable=quiet)
        task = bar.add_task(name, total=None, text="")
        said = start
        if quiet:
            self.console.print(f"> {name:<26} started")

        def update(done: int, total: int, what: str, metrics: Mapping[str, float]) -> None:
            nonlocal last, said
            last = shown_metrics(metrics)
            bar.update(task, completed=done, total=total, text=f"{what} {last}")
            if quiet and time.monotonic() - said > _PLAIN_EVERY_S:
                said = time.monotonic()
                self.console.print(f"  {name:<26} {what} {done}/{total} {last}  {said - start:.0f} s")

        mark, colour = "x", "red"
        try:
            with bar:
                yield update
            mark, colour = "+", "green"
        finally:
            self.console.print(f"[{colour}]{mark}[/{colour}] {name:<26} {time.monotonic() - start:7.1f} s  {last}")

    def table(self, table: AblationTable | None) -> None:
        """The ablation table."""
        if table is not None:
            self.console.print()
            table.render(self.console)

    def comparison(self, comparison: Comparison | None) -> None:
        """Variants of a stage beside each other."""
        if comparison is not None:
            self.console.print()
            comparison.render(self.console)

    def runs(self, records: Sequence[Record]) -> None:
        """One line a run."""
        table = Table("run", "started", "status", "what", "variant", "of", box=None, header_style="bold", pad_edge=False)
        for record in records:
            started = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started))
            what = f"{record.kind} {record.stage or ''}".strip() + (f" (part of {record.part_of})" if record.part_of else "")
            table.add_row(record.id, started, record.status, what, escape(record.variant), record.of_run or "")
        self.console.print(table if records else "There are no runs yet; start with: posttrain run tiny")

    def garbage(self, items: Sequence[Item], freed: int | None) -> None:
        """What is kept and what goes; `freed` in bytes once it is gone."""
        table = Table("folder", "what", "MiB", "kept, because", box=None, header_style="bold", pad_edge=False)
        for item in sorted(items, key=lambda item: (item.why_kept is not None, str(item.folder))):
            where = f"{item.folder.parent.name}/{item.folder.name}"
            table.add_row(where, item.what, f"{item.bytes / 2**20:.1f}", item.why_kept or "[red]nothing needs it[/red]")
        self.console.print(table)
        loose = sum(item.bytes for item in items if item.why_kept is None)
        said = f"{loose / 2**20:.1f} MiB could be freed: posttrain gc --really" if freed is None else f"{freed / 2**20:.1f} MiB were freed"
        self.console.print(said if loose or freed else "Everything is needed; nothing to free.")

    def totals(self, totals: Totals) -> None:
        """Time, share of it inside trainers and engine, memory."""
        minutes, seconds = divmod(round(totals.wall_seconds), 60)
        stages = f"{totals.stages_run} stage{'' if totals.stages_run == 1 else 's'}"
        self.console.print(
            f"\n{stages} ran in {minutes} min {seconds:02d} s; {totals.busy_share:.0%} of it inside trainers and engine; "
            f"largest stage {totals.peak_memory_mib / 1024:.1f} GiB"
        )

    def links(self, links: Mapping[str, str]) -> None:
        """Pages to look at, one a line."""
        width = max((len(label) for label in links), default=0)
        for label, address in links.items():
            self.console.print(f"  {label:<{width}} {address}", soft_wrap=True, markup=False)


def shown_metrics(metrics: Mapping[str, float]) -> str:
    """One or two metrics as text."""
    names = [name for name in _SHOWN if name in metrics][:2] or list(metrics)[:1]
    return "  ".join(f"{name.rpartition('/')[2]} {metrics[name]:.3g}" for name in names)


_screen: ContextVar[Screen | None] = ContextVar("screen", default=None)


def screen() -> Screen:
    """The screen of this command; a plain one when a flow was started from elsewhere."""
    return _screen.get() or Screen()


@contextmanager
def showing(on: Screen) -> Iterator[None]:
    """Make `on` the command's screen for the time of the block."""
    token = _screen.set(on)
    try:
        yield
    finally:
        _screen.reset(token)
