"""Questions to the data of a run: read-only SQL over the Parquet files of its stages.

Every table of a stage is a view by the name of its file (`problems`, `dropped`, `pass_rates`, `rollouts`,
`samples`, ...), with the stage in its first column; files of one name are one view. Named questions are
files of `datasets/questions`: one SELECT each, its first line says what it is for and what it takes.

A query sees these files and nothing else: DuckDB may open no other file, no network and no extension, its
settings are locked, and a text that is not one query is refused before it runs. It runs in a thread, so that
Ctrl-C ends it at once. Tables and messages show control characters of the data escaped.
"""

from __future__ import annotations

import csv
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from rich.console import Console
from rich.markup import escape as escape_markup
from rich.table import Table

from flows.history import Record, find_run, read_runs
from flows.plan import stage_folder
from stages.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    import duckdb

QUESTIONS = Path(__file__).resolve().parents[1] / "datasets" / "questions"
Form = Literal["table", "json", "csv"]
_T = TypeVar("_T")
_ROWS_SHOWN = 50
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What steers a terminal: control characters except tab and line end, and those that turn the direction of text."""
_NO_FILES = {"autoinstall_known_extensions": False, "autoload_known_extensions": False, "threads": 2}


class Question(NamedTuple):
    """A named question."""

    name: str
    takes: tuple[str, ...]
    """Names of its parameters, in the order of the command line."""
    about: str
    sql: str


class Found(NamedTuple):
    """The answer to a query."""

    columns: list[str]
    rows: Iterator[tuple[Any, ...]]


def questions() -> dict[str, Question]:
    """Every named question by its name. The first line of a file reads `-- name PARAMETER: what it answers`."""
    found = {}
    for path in sorted(QUESTIONS.glob("*.sql")):
        sql = path.read_text()
        head, _, about = sql.partition("\n")[0].removeprefix("-- ").partition(": ")
        name, *takes = head.split()
        found[name] = Question(name, tuple(item.lower() for item in takes), about, sql)
    return found


def tables_of(home: Path, of: str | None = None) -> tuple[Record, dict[str, list[tuple[str, Path]]]]:
    """The run asked for, or the newest that has a result; by table name the stages that wrote it, with their files.

    Raises ArtifactError when there is no such run, or no table in it.
    """
    if of is not None:
        record = find_run(home, of)
    else:
        with_results = [record for record in read_runs(home) if record.nodes]
        if not with_results:
            raise ArtifactError(f"no run in {home} has a result yet; make one: posttrain run tiny")
        record = with_results[-1]
    tables: dict[str, list[tuple[str, Path]]] = {}
    for node, finished in record.nodes.items():
        for path in sorted((stage_folder(home, finished.stage, finished.fingerprint) / "data").glob("*.parquet")):
            tables.setdefault(path.stem, []).append((node, path))
    if not tables:
        raise ArtifactError(f"{record.id} has no table left in {home}; make its stages again: posttrain run {record.recipe}")
    return record, dict(sorted(tables.items()))


@contextmanager
def opened(tables: Mapping[str, Sequence[tuple[str, Path]]]) -> Iterator[duckdb.DuckDBPyConnection]:
    """A database in memory with one view a table, locked to their files. Raises ArtifactError, naming it, for a file that is damaged."""
    import duckdb
    import pyarrow as pa

    with duckdb.connect(config=_NO_FILES) as database:
        files = [(str(path), node) for group in tables.values() for node, path in group]
        database.from_arrow(pa.table({"filename": [file for file, _ in files], "stage": [node for _, node in files]})).create("stage_files")
        for name, group in tables.items():
            try:
                rows = database.read_parquet([str(path) for _, path in group], union_by_name=True, filename=True)
            except duckdb.Error as error:
                raise _damaged(database) or error from error
            rows.join(database.table("stage_files"), "filename").project("stage, * exclude (stage, filename)").create_view(name)
        database.execute("set allowed_paths = ?", [[file for file, _ in files]])
        database.execute("set enable_external_access = false")
        database.execute("set lock_configuration = true")
        yield database


def answer(database: duckdb.DuckDBPyConnection, text: str, values: Sequence[str] = ()) -> Found:
    """Run a named question with its values, or SQL of one query.

    Raises ConfigError for another statement, a name that is not known, too many or too few values, and SQL
    that DuckDB refuses; ArtifactError for a damaged file. Reading the rows raises the last two as well.
    """
    import duckdb

    sql, parameters = _query(text, values)
    try:
        statements = duckdb.extract_statements(sql)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise ConfigError(f"{text!r} is not one query; the rule is one SELECT (or DESCRIBE, SUMMARIZE); data is only read here")
        cursor = _interruptible(database, lambda: database.execute(statements[0], parameters))
    except duckdb.Error as error:
        raise _refusal(database, error) from error
    return Found([column[0] for column in cursor.description or ()], _rows(cursor))


def _rows(cursor: duckdb.DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
    import duckdb

    try:
        while batch := _interruptible(cursor, lambda: cursor.fetchmany(1024)):
            yield from batch
    except duckdb.Error as error:
        raise _refusal(cursor, error) from error


def _interruptible(database: duckdb.DuckDBPyConnection, work: Callable[[], _T]) -> _T:
    """Do the work in a thread; a KeyboardInterrupt here ends it there."""
    with ThreadPoolExecutor(1) as pool:
        try:
            return pool.submit(work).result()
        except KeyboardInterrupt:
            database.interrupt()
            raise


def _refusal(database: duckdb.DuckDBPyConnection, error: duckdb.Error) -> ConfigError | ArtifactError:
    """What to say of an error of DuckDB: that a file is damaged, if one is, or that the query is wrong."""
    import duckdb

    by_data = type(error) is duckdb.Error or isinstance(error, duckdb.InvalidInputException | duckdb.IOException | duckdb.InternalException)
    found = _damaged(database) if by_data else None
    return found or ConfigError(f"DuckDB refuses the query: {_visible(str(error))}. `posttrain sql --tables` lists what can be asked")


def _damaged(database: duckdb.DuckDBPyConnection) -> ArtifactError | None:
    """The first file that cannot be read to its end as Parquet, as an error that names it."""
    from pyarrow import ArrowException, parquet

    for path, stage in database.table("stage_files").fetchall():
        try:
            with parquet.ParquetFile(path) as file:
                for _ in file.iter_batches():
                    pass
        except (OSError, ArrowException) as error:
            said = _visible(" ".join(str(error).split()))
            return ArtifactError(
                f"{path} cannot be read as Parquet ({said}); a result must stay as its stage made it; "
                f"make it again: posttrain stage {stage} --force, with the --recipe of the run"
            )
    return None


def _query(text: str, values: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The SQL to run and its parameters."""
    known = questions()
    if (question := known.get(text)) is not None:
        if len(values) != len(question.takes):
            wanted = " ".join(item.upper() for item in question.takes) or "nothing"
            raise ConfigError(
                f"the question {text} takes {wanted}, {len(values)} given: posttrain sql {text} {wanted.replace('nothing', '')}".rstrip()
            )
        return question.sql, dict(zip(question.takes, values, strict=True))
    if re.fullmatch(r"\w+", text.strip()):
        near = difflib.get_close_matches(text, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise ConfigError(f'there is no question {text!r}; {hint} (or write SQL: posttrain sql "from {text}")')
    if values:
        raise ConfigError(f"SQL takes no further words, {len(values)} given; quote the whole query")
    return text, {}


# ---- showing --------------------------------------------------------------------------------


def show(found: Found, console: Console, form: Form) -> None:
    """Print an answer: a table of the first rows, or all rows as JSON or CSV on standard output."""
    if form == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(found.columns)
        writer.writerows(found.rows)
    elif form == "json":
        rows = [dict(zip(found.columns, row, strict=True)) for row in found.rows]
        sys.stdout.write(json.dumps(rows, indent=2, ensure_ascii=False, default=str) + "\n")
    else:
        _show_table(found, console)


def _show_table(found: Found, console: Console) -> None:
    table = Table(*(_escaped(column) for column in found.columns), box=None, header_style="bold", pad_edge=False)
    shown = 0
    for row in found.rows:
        if shown == _ROWS_SHOWN:
            break
        table.add_row(*("" if value is None else _escaped(str(value)) for value in row))
        shown += 1
    more = shown == _ROWS_SHOWN and next(found.rows, None) is not None
    console.print(table if shown else "no rows")
    if more:
        console.print(f"the first {shown} rows; all of them: --csv or --json")


def _escaped(text: str) -> str:
    """Text of the data for a table."""
    return escape_markup(_visible(text))


def _visible(text: str) -> str:
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def show_tables(
    database: duckdb.DuckDBPyConnection, record: Record, tables: Mapping[str, Sequence[tuple[str, Path]]], console: Console, form: Form
) -> None:
    """Print what can be asked of a run: its tables with their columns, and the named questions."""
    listed = [(name, ", ".join(node for node, _ in group), ", ".join(database.table(name).columns[1:])) for name, group in tables.items()]
    if form != "table":
        show(Found(["table", "stages", "columns"], iter(listed)), console, form)
        return
    console.print(f"Tables of {record.id}:")
    _show_table(Found(["table", "stages", "columns"], iter(listed)), console)
    console.print("\nQuestions:")
    asked = [(" ".join([item.name, *(word.upper() for word in item.takes)]), item.about) for item in questions().values()]
    _show_table(Found(["question", "answers"], iter(asked)), console)
