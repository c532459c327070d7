"""Tests for code problems (`posttrain tests`): a file of problems with known solutions in, a source of curation out.

The rules are in `stages/rewards/code_tests.py`. What became of a problem is kept in the home as soon as it is known, under the digest
of what decides it: a second run of the command does what is not there, and after a change of a row or a setting only what that
concerns. Both files are written at the end, whole, in the order of the problems.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError
from rich.markup import escape
from rich.table import Table

from flows.request import as_yaml
from stages.artifacts import replacing, write_json
from stages.config import Curation
from stages.errors import ConfigError, DataError
from stages.rewards.code_tests import SOLUTIONS, Made, Problem, Rules, digest_of, make_tests
from stages.rewards.pool import usable_cores
from stages.rewards.sandbox import SandboxError, require_sandbox
from stages.sources import jsonl_rows

if TYPE_CHECKING:
    from rich.console import Console

    from flows.terminal import Screen

_FOLDER = "code_tests"
_NOT_CARRIED = {*Problem.model_fields, "answer"} - {"question"}
_LOOK_EVERY_S = 1.0
_ROWS_SHOWN = 5
_LONGEST = Curation.model_fields["max_characters"].default


class Report(NamedTuple):
    """What a run of the command left."""

    out: Path
    dropped_to: Path
    rows: int
    kept: int
    dropped: Mapping[str, int]
    """Problems by the rule that dropped them."""
    examples: Mapping[str, str]
    """Of each rule the first row that it dropped, with the reason."""
    tests: tuple[int, ...]
    """Tests of each kept problem."""
    fewer_solutions: int
    """Problems with fewer known solutions than Kimi k1.5 takes."""
    longest: int
    """Characters of the longest question or answer that is kept."""
    reused: int
    """Problems that an earlier run had finished."""
    undone: tuple[int, ...]
    """Rows whose problems the sandbox failed on; the next run does them."""
    failure: str
    """Of the sandbox, the first one."""


class _Row(NamedTuple):
    """A row of the file: as it stands there, as a problem or why it is none, and the digest of what decides its tests."""

    number: int
    content: dict[str, Any] | str
    problem: Problem | str
    digest: str


def write_tests(path: Path, out: Path | None, rules: Rules, home: Path, screen: Screen) -> Report:
    """Make tests for every problem of a JSONL file and write those that are kept, and those that are dropped with the reason.

    Raises ConfigError for an output that cannot be meant, DataError for a file that cannot be read, that has no problem in it, or
    that cannot be written, and SandboxError, before anything runs, on a host without a sandbox. A sandbox that fails on one
    problem leaves that one undone.
    """
    out, dropped_to = _outputs(path, out)
    finished = home / _FOLDER
    waiting, bad, reused = set[str](), list[str](), 0
    for row in _rows(path, rules):
        if isinstance(row.problem, str):
            bad.append(f"row {row.number}: {row.problem}")
        elif _made(finished, row.digest) is None:
            waiting.add(row.digest)
        else:
            reused += 1
    if not waiting and not reused:
        reason = f"none of its {len(bad)} rows is a problem; the first, {bad[0]}" if bad else "it has no rows"
        raise DataError(f"{path}: {reason}; a row is a JSON object with `question`, `solutions`, and `generator` or `inputs`")
    failure = ""
    if waiting:
        require_sandbox()
        finished.mkdir(parents=True, exist_ok=True)
        failure = _make_all(_waiting(path, rules, waiting), len(waiting), rules, finished, screen)
    try:
        return _write(path, rules, finished, out, dropped_to)._replace(reused=reused, failure=failure)
    except OSError as error:
        raise DataError(
            f"{out} cannot be written: {error.strerror}; free some space, or choose another --out. Finished problems are kept; "
            "the same command continues from here"
        ) from error


def require_kept(report: Report) -> None:
    """Return when every problem is done and one is kept. Raises SandboxError for what is undone, else DataError."""
    if report.undone:
        rows = ", ".join(map(str, report.undone[:_ROWS_SHOWN])) + (", ..." if len(report.undone) > _ROWS_SHOWN else "")
        raise SandboxError(
            f"{len(report.undone)} of {report.rows} problems are not done (rows {rows}): {report.failure}. The others are finished; the "
            "same command does these, on fewer cores with `taskset -c 0` before it"
        )
    if not report.kept:
        raise DataError(
            f"none of {report.rows} problems is kept, the rules are 7 of 10 solutions that agree, 9 of 10 that pass, and --min-tests; "
            f"{next(iter(report.examples.values()))}; mend the programs, or lower --min-tests"
        )


def _outputs(path: Path, out: Path | None) -> tuple[Path, Path]:
    """Where kept and dropped problems go."""
    if not path.is_file():
        what = "a folder" if path.is_dir() else "no file" if path.exists() else "missing"
        raise DataError(f"{path} is {what}; PROBLEMS is a JSONL file with one problem a row; name one")
    out = out if out is not None else path.with_suffix(".tests.jsonl")
    if out.suffix != ".jsonl":
        raise ConfigError(f"--out {out}: must end in .jsonl, by which curation knows what is in it; for instance {out}.jsonl")
    dropped_to = out.with_suffix(".dropped.jsonl")
    if path.resolve() in (out.resolve(), dropped_to.resolve()):
        raise ConfigError(f"--out {out}: this command would write over its own input {path}; choose another --out")
    if out.is_dir() or (out.exists() and not dropped_to.exists()):
        raise ConfigError(
            f"--out {out} is there already and was not written by this command, which leaves {dropped_to.name} beside it; "
            "choose another --out, or move it away"
        )
    return out, dropped_to


def _rows(path: Path, rules: Rules) -> Iterator[_Row]:
    try:
        for number, text, row in jsonl_rows(path):
            if isinstance(row, str):
                yield _Row(number, text, row, "")
                continue
            try:
                problem = Problem.model_validate(row)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                where = ".".join(map(str, first["loc"][:2]))
                yield _Row(number, row, f"{where}: {first['msg']}" if where else first["msg"].removeprefix("Value error, "), "")
                continue
            yield _Row(number, row, problem, digest_of(problem, rules))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; give a JSONL file that you may read") from error


def _made(finished: Path, digest: str) -> Made | None:
    """What became of a problem, when that is known."""
    try:
        return Made.model_validate_json((finished / f"{digest}.json").read_text())
    except (FileNotFoundError, ValueError):
        return None


def _waiting(path: Path, rules: Rules, digests: set[str]) -> Iterator[tuple[str, Problem]]:
    """The problems of these digests, each once."""
    left = set(digests)
    for row in _rows(path, rules):
        if row.digest in left and isinstance(row.problem, Problem):
            left.remove(row.digest)
            yield row.digest, row.problem


def _make_all(waiting: Iterator[tuple[str, Problem]], total: int, rules: Rules, finished: Path, screen: Screen) -> str:
    """Make the tests of the problems that wait, as many at once as there are cores; returns the first failure of the sandbox.

    All programs share one queue and run one a core, so that a problem in its last runs leaves no core idle.
    """
    cores, failure, done = usable_cores(), "", 0
    threads, problems = ThreadPoolExecutor(cores), ThreadPoolExecutor(cores)
    running: dict[Future[Made], str] = {}
    try:
        with screen.stage("tests") as update:
            while True:
                for digest, problem in itertools.islice(waiting, cores - len(running)):
                    running[problems.submit(make_tests, problem, rules, threads)] = digest
                if not running:
                    return failure
                update(done, total, "problems", {})
                for future in wait(running, _LOOK_EVERY_S, FIRST_COMPLETED).done:
                    digest = running.pop(future)
                    try:
                        write_json(finished / f"{digest}.json", future.result().model_dump())
                    except SandboxError as error:
                        failure = failure or str(error)
                    done += 1
    finally:
        threads.shutdown(cancel_futures=True)
        problems.shutdown(cancel_futures=True)


def _write(path: Path, rules: Rules, finished: Path, out: Path, dropped_to: Path) -> Report:
    """Both files, in the order of the rows. Of a problem only what decides its tests is looked up; the rest is the row's."""
    rows = fewer = longest = 0
    tests: list[int] = []
    undone: list[int] = []
    dropped: Counter[str] = Counter()
    examples: dict[str, str] = {}
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as good, replacing(dropped_to) as bad:
        for row in _rows(path, rules):
            rows += 1
            if isinstance(row.problem, str):
                made: Made | None = Made(rule="bad row", reason=row.problem)
            else:
                made = _made(finished, row.digest)
                fewer += len(row.problem.solutions) < SOLUTIONS
            if made is None:
                undone.append(row.number)
            elif made.answer:
                assert isinstance(row.content, dict)
                carried = {name: value for name, value in row.content.items() if name not in _NOT_CARRIED}
                good.write(json.dumps(carried | {"answer": made.answer}, ensure_ascii=False) + "\n")
                tests.append(made.tests)
                longest = max(longest, len(made.answer), len(row.content["question"]))
            else:
                known = {"row": row.number, **made.model_dump(exclude={"answer"}), "problem": row.content}
                bad.write(json.dumps(known, ensure_ascii=False) + "\n")
                dropped[made.rule] += 1
                examples.setdefault(made.rule, f"row {row.number}: {made.reason}")
    return Report(
        out, dropped_to, rows, len(tests), dict(dropped.most_common()), examples, tuple(tests), fewer, longest, 0, tuple(undone), ""
    )


def show(report: Report, console: Console) -> None:
    """Print what was kept, what was dropped by which rule, and how to train on it."""
    if report.reused:
        console.print(f"{report.reused} of {report.rows} problems were finished before")
    each = f", {min(report.tests)} to {max(report.tests)} tests each, {_mean(report):.1f} on average" if report.tests else ""
    console.print(f"{report.kept} of {report.rows} problems kept{each}: {escape(str(report.out))}", soft_wrap=True)
    if report.dropped:
        console.print(f"{sum(report.dropped.values())} dropped: {escape(str(report.dropped_to))}", soft_wrap=True)
        table = Table("rule", "problems", "for instance", box=None, header_style="bold", pad_edge=False)
        for rule, count in report.dropped.items():
            table.add_row(rule, str(count), escape(report.examples[rule]))
        console.print(table)
    if report.fewer_solutions:
        console.print(
            f"Problems with fewer than {SOLUTIONS} known solutions: {report.fewer_solutions}; there 7 of 10 that agree and 9 of 10 that "
            "pass are shares of fewer",
            soft_wrap=True,
        )
    if report.kept:
        console.print("\nTo train on them, make the file a source of the recipe's curation:\n", soft_wrap=True)
        console.print(source_of(report), soft_wrap=True, markup=False)


def source_of(report: Report) -> str:
    """The lines of a recipe, as YAML, that make the file a source of its curation, with room for the longest answer."""
    lines = f"stages:\n  curation:\n    sources:\n      - {{kind: file, path: {as_yaml(report.out)}, answer_type: code}}"
    return lines if report.longest <= _LONGEST else f"{lines}\n    max_characters: {report.longest}"


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain values; of the tests the fewest of a problem, and the mean."""
    tests = {"fewest": min(report.tests), "mean": _mean(report)} if report.tests else None
    return report._asdict() | {"out": str(report.out), "dropped_to": str(report.dropped_to), "tests": tests, "recipe": source_of(report)}


def _mean(report: Report) -> float:
    return sum(report.tests) / len(report.tests)
