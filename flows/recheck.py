"""Hold the pools of an earlier run against a benchmark that was added later, by the rules of that run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import yaml
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.history import Record, find_run, results_of_run
from flows.recipe import load_again
from stages.config import Curation, Decontamination, ReasoningGymSource, Source
from stages.errors import ArtifactError, ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow as pa

    from stages.decontamination import Findings

SOURCES = Path("datasets/sources.yaml")
_SOURCE: TypeAdapter[Source] = TypeAdapter(Source)
_NAME = re.compile(r"(?!\.)[\w.-]{1,100}")
_ANY_LENGTH = 2**31 - 1
_EXAMPLES_SHOWN = 3


class Rechecked(NamedTuple):
    """What a recheck found."""

    record: Record
    """The run whose pools were held against the benchmark."""
    settings: Decontamination
    findings: Findings
    """`source` is the pool; hits carry both texts."""
    file: Path | None
    """The hits as Parquet; None when there are none."""
    rows: int
    """Rows of the benchmark's source."""
    compared: int
    """Of them with a question that could be compared."""


class _Questions(NamedTuple):
    """The questions of a source, as the benchmark that curation would make of them, and how many rows gave one."""

    benchmark: pa.Table
    rows: int
    usable: int


def described(source: str, question: str) -> Source:
    """A source by its id in `datasets/sources.yaml`, or a file with this column. Raises ConfigError."""
    listed = yaml.safe_load(SOURCES.read_text()) if SOURCES.is_file() else {}
    content = listed.get(source) or {"kind": "file", "path": source, "question": question}
    try:
        return _SOURCE.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{source}: {first['msg']}; give a file, or one of {', '.join(listed)} from {SOURCES}") from error


def recheck(home: Path, name: str, source: Source, of: str) -> Rechecked:
    """Hold every pool of a run's curation against the benchmark `name` made of a source. Only its questions matter.

    Raises ConfigError for a name that is no file name, ArtifactError when the run or its pools are gone, and DataError
    for a source without one usable question, or with more rows without one than its `max_bad_share` allows.
    """
    from pyarrow import parquet

    from stages.decontamination import recheck as find_in_pools

    if not _NAME.fullmatch(name):
        raise ConfigError(f"--name {name!r}: must be 1 to 100 letters, digits, _, - and dots, the first no dot; for instance aime-2024")
    record = find_run(home, of)
    node = next((node for node in load_again(record.text, record.overrides).nodes if node.stage == "curation"), None)
    result = results_of_run(home, record).get(node.name) if node is not None else None
    if node is None or result is None:
        raise ArtifactError(f"{record.id} has no curation left in {home}; make it again: posttrain stage curation --recipe {record.recipe}")
    assert isinstance(node.config, Curation)
    pools = {pool: ref.path for pool, ref in result.outputs.items() if pool != "benchmarks"}
    settings = node.config.decontamination
    asked = _questions(name, source, node.config)
    found = find_in_pools(pools, asked.benchmark, settings, ngram=node.config.decontamination_ngram)
    if not len(found.hits):
        return Rechecked(record, settings, found, None, asked.rows, asked.usable)
    path = home / "rechecks" / f"{record.id}-{name}.parquet"
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(found.hits, path, compression="zstd")
    return Rechecked(record, settings, found, path, asked.rows, asked.usable)


def show(found: Rechecked, console: Console) -> None:
    """Print how many questions were compared, what they share with each pool, and where both texts of each hit are."""
    console.print(f"{found.compared} of {found.rows} questions compared")
    if found.file is None:
        console.print(f"No pool of {found.record.id} overlaps it, by: same_question, {', '.join(found.settings.rules)}")
        return
    table = Table("pool", "rule", "problems", "of the benchmark", box=None, header_style="bold", pad_edge=False)
    for row in found.findings.counts.to_pylist():
        if row["source"] != "all":
            rule = f"[red]{row['rule']}[/red]" if row["rule"] in ("same_question", *found.settings.drop) else row["rule"]
            table.add_row(row["source"], rule, str(row["problems"]), f"{row['benchmark_problems']} of {row['benchmark_size']}")
    console.print(table)
    console.print(
        f"Rules in red would have dropped these problems from {found.record.id}. Both texts of each hit: {escape(str(found.file))}\n"
        "To leave them out, add the benchmark to the recipe and run it again.",
        soft_wrap=True,
    )


def _questions(name: str, source: Source, config: Curation) -> _Questions:
    """The questions of a source, however long, with the identity that curation would give them."""
    import duckdb

    from stages.curation import STAGING, build, load, prepare
    from stages.sources import Place, read_source, where

    asked: Source = source
    limit = 0.0
    if not isinstance(source, ReasoningGymSource):  # the question stands in for the answer, and no other column is read
        limit = source.max_bad_share
        asked = source.model_copy(
            update={"answer": source.question, "answer_after": None, "answer_type": "text", "trace": None, "row_id": None}
        )
    with duckdb.connect(config={"threads": 1}) as database:
        prepare(database, config.model_copy(update={"max_characters": _ANY_LENGTH}), 0)
        load(database, read_source(Place(0, name, name, asked, 0)))
        build(database, "staging", STAGING)
        found = database.sql(
            "select distinct on (problem_id) benchmark, problem_id, question, family from stg_problems order by problem_id"
        )
        table = found.to_arrow_table()
        rows, bad = database.sql("select sum(row_count)::bigint, sum(bad_count)::bigint from stg_source_counts").fetchall()[0]
        first = database.table("quarantine").select("row_number", "reason").order("row_number").limit(_EXAMPLES_SHOWN).fetchall()
    if not len(table):
        raise DataError(f"{name}: no row of {where(source)} can be used; a benchmark needs at least one; look at its columns and its rows")
    if bad / rows > limit:
        examples = "".join(f"\n  row {number}: {reason}" for number, reason in first)
        raise DataError(
            f"{name}: {bad} of {rows} rows ({bad / rows:.1%}) of {where(source)} have no question that could be compared; the rule is "
            f"max_bad_share = {limit:g}; mend the rows, or list the source in {SOURCES} with a higher one. First of them:{examples}"
        )
    return _Questions(table, rows, rows - bad)
