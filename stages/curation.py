"""Curation: from sources to disjoint, decontaminated pools of problems, and held-out benchmarks.

What      Loads every source into a DuckDB database, puts rows that cannot be used in quarantine, and
          runs the SQL in `datasets/sql` in order: normalise, drop duplicates, take the benchmarks,
          drop training problems that overlap them, deal the rest to pools.
Reads     Nothing from other stages: reasoning-gym families, JSONL and Parquet files.
Writes    `data/`: one Parquet file a pool and `benchmarks.parquet`; for review `contamination.parquet`
          (both texts of each hit), `quarantine.parquet` and `curation.duckdb` with every table.
Papers    open-r1's decontamination script (any shared 8-gram of words); GPT-3 (arXiv 2005.14165,
          appendix C) for the idea that n-grams found everywhere are no evidence.
Differs   A run of words that a fifth of a benchmark family and a fifth of a training family share is
          the family's wording and no evidence, nor is a run that overlaps it (the plain rule would
          drop every generated problem); on other text the rule is open-r1's, word for word. A
          question equal to a benchmark's is dropped whatever its length.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stages.artifacts import DatasetRef, Handles, StageOutput, digest_of_file
from stages.config import Curation, FileSource, ReasoningGymSource
from stages.errors import DataError
from stages.problems import generate, seed_of
from stages.records import Recorder

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

DATASETS = Path(__file__).resolve().parents[1] / "datasets"
STAGING = ("stg_rows", "quarantine", "stg_problems", "stg_source_counts")
INTERMEDIATE = (
    "int_benchmark_candidates",
    "int_benchmark_problems",
    "int_training_copies",
    "int_benchmark_ngrams",
    "int_shared_ngrams",
    "int_template_ngrams",
    "int_content_ngrams",
    "int_contamination",
)
MARTS = ("benchmarks", "contamination", "dropped", "pools", "funnel")
POOLS = ("cold_start", "rl", "preference", "distillation")
PROBLEM_COLUMNS = ("problem_id", "question", "answer", "family", "source", "trace", "scale")
_EXAMPLES_SHOWN = 3


class RawRow(NamedTuple):
    """A row as a source gave it. `unreadable` says why it has no question or answer, when it cannot have one."""

    pool_order: int
    benchmark: str | None
    source: str
    row_number: int
    question: str | None
    answer: str | None
    trace: str | None
    family: str
    scale: int
    row_text: str
    unreadable: str | None = None


class Place(NamedTuple):
    """Where a source stands in the recipe."""

    order: int
    benchmark: str | None
    name: str
    source: ReasoningGymSource | FileSource
    seed: int


def run(config: Curation, inputs: Handles, stage_dir: Path, seed: int) -> StageOutput:
    """Curate; metrics count the rows that each rule met.

    Raises DataError for a source that cannot be used, a benchmark or pool that would be empty, and a
    table that breaks its contract.
    """
    import duckdb

    recorder = Recorder(stage_dir)
    data = stage_dir / "data"
    data.mkdir(parents=True, exist_ok=True)
    for leftover in data.glob("curation.duckdb*"):  # of an attempt that was cut short
        leftover.unlink()
    with duckdb.connect(data / "curation.duckdb", config={"threads": 1}) as database:  # one thread: equal bytes every time
        places = sources_in_order(config, seed)
        rows: list[RawRow] = []
        for done, place in enumerate(places, 1):
            rows += read_source(place)
            recorder.progress(done, len(places), "source")
        load(database, rows, config, seed)
        build(database, "staging", STAGING)
        _refuse_bad_sources(database, places)
        build(database, "intermediate", INTERMEDIATE)
        build(database, "marts", MARTS)
        tables = {name: table_of(database, name) for name in ("quarantine", *MARTS)}
    check_contracts(tables)
    metrics = _metrics(tables["funnel"])
    recorder.metrics(0, metrics)
    _print_funnel(tables["funnel"])
    _refuse_empty(config, tables)
    for name in ("quarantine", "contamination"):
        _write(tables[name], stage_dir, name)
    outputs: dict[str, Any] = {"benchmarks": _write(tables["benchmarks"].select(["benchmark", *PROBLEM_COLUMNS]), stage_dir, "benchmarks")}
    for pool in POOLS:
        if pool in config.pools:
            outputs[pool] = _write(_pool(tables["pools"], pool).select(list(PROBLEM_COLUMNS)), stage_dir, pool)
    return StageOutput(outputs=outputs, metrics=metrics)


# ---- sources --------------------------------------------------------------------------------


def sources_in_order(config: Curation, seed: int) -> list[Place]:
    """Every source with its place and its seed: training first, then benchmarks by name."""
    training = [(None, f"sources[{index}]", source, seed_of(seed, "train", index)) for index, source in enumerate(config.sources)]
    held_out = [
        (name, f"benchmarks.{name}[{index}]", source, seed_of(seed, "benchmark", name, index))
        for name in sorted(config.benchmarks)
        for index, source in enumerate(config.benchmarks[name])
    ]
    return [
        Place(order, benchmark, f"{where} {_label(source)}", source, own_seed)
        for order, (benchmark, where, source, own_seed) in enumerate([*training, *held_out])
    ]


def _label(source: ReasoningGymSource | FileSource) -> str:
    return source.family if isinstance(source, ReasoningGymSource) else source.path.name


def read_source(place: Place) -> list[RawRow]:
    """All rows of a source, unreadable ones too.

    Raises DataError when the source as a whole cannot be read or has no rows.
    """
    if isinstance(place.source, ReasoningGymSource):
        return _generated(place, place.source)
    rows = list(_from_file(place, place.source))
    if not rows:
        raise DataError(f"{place.name}: {place.source.path} has no rows; a source needs at least one; fill the file or take the source out")
    return rows


def _generated(place: Place, source: ReasoningGymSource) -> list[RawRow]:
    parameters: dict[str, Any] = dict(source.parameters)
    try:
        problems = list(generate(source.family, source.size, place.seed, **parameters))
    except (AssertionError, TypeError, ValueError) as error:  # what reasoning-gym raises for its own settings
        raise DataError(
            f"{place.name}: reasoning-gym cannot make {source.family} with {source.parameters} ({error}); "
            "keep to the family's own settings and their bounds; mend `parameters`"
        ) from error
    order, benchmark, name = place.order, place.benchmark, place.name
    return [
        RawRow(order, benchmark, name, number, item.question, item.answer, item.trace, item.family, item.scale, item.question)
        for number, item in enumerate(problems, 1)
    ]


def _from_file(place: Place, source: FileSource) -> Iterator[RawRow]:
    path = source.path
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise DataError(f"{place.name}: {path} ends in {path.suffix!r}; the rule is one of {sorted(readers)}; convert or rename the file")
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [item.name for item in path.parent.glob("*")] if path.parent.is_dir() else [], n=1)
        hint = f"did you mean {path.parent / near[0]}?" if near else "mend `path` (it starts at the folder posttrain was started in)"
        raise DataError(f"{place.name}: {path} is missing; a source must be a file; {hint}")
    wanted = [column for column in (source.question, source.answer, source.trace) if column is not None]
    rows = list(readers[path.suffix](place, path))
    columns = {column for _, _, row in rows if isinstance(row, dict) for column in row}
    for column in wanted if columns else []:
        if column not in columns:
            near = difflib.get_close_matches(column, sorted(columns), n=1)
            hint = f"did you mean {near[0]!r}?" if near else "name one of them in the recipe"
            raise DataError(f"{place.name}: {path} has no column {column!r}; its columns are {sorted(columns)}; {hint}")
    for number, text, row in rows:
        blank = RawRow(place.order, place.benchmark, place.name, number, None, None, None, source.family, 0, text)
        if not isinstance(row, dict):
            yield blank._replace(unreadable=row)
            continue
        question: Any = row.get(source.question)
        answer: Any = row.get(source.answer)
        trace: Any = row.get(source.trace) if source.trace is not None else None
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            answer = str(answer)
        wrong = [
            f"the {what} is of type {type(value).__name__}, the rule is text"
            for what, value in (("question", question), ("answer", answer), ("trace", trace))
            if value is not None and not isinstance(value, str)
        ]
        yield blank._replace(unreadable=wrong[0]) if wrong else blank._replace(question=question, answer=answer, trace=trace)


def _jsonl_rows(place: Place, path: Path) -> Iterator[tuple[int, str, dict[str, Any] | str]]:
    """Line number, text and object of every line that is not blank; instead of the object the reason why there is none."""
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):  # splitlines would split at characters JSON may hold
        if not line.strip():
            continue
        text = line.decode("utf-8", errors="backslashreplace").rstrip("\r")
        try:
            row = json.loads(line)
            json.dumps(row, ensure_ascii=False).encode()  # a lone surrogate is JSON, but no database can hold it
        except (ValueError, RecursionError) as error:
            yield number, text, f"not JSON in UTF-8: {type(error).__name__}"
            continue
        yield number, text, row if isinstance(row, dict) else f"a JSON {type(row).__name__}, the rule is an object"


def _parquet_rows(place: Place, path: Path) -> Iterator[tuple[int, str, dict[str, Any] | str]]:
    from pyarrow import ArrowException, parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError, ArrowException) as error:
        raise DataError(f"{place.name}: {path} cannot be read as Parquet ({error}); write the file again") from error
    for number, row in enumerate(rows, 1):
        yield number, json.dumps(row, ensure_ascii=False, default=str), row


# ---- the database ---------------------------------------------------------------------------


def load(database: duckdb.DuckDBPyConnection, rows: list[RawRow], config: Curation, seed: int) -> None:
    """Create `raw_rows`, `settings` and `pool_shares`: all that the SQL reads. Nothing is pasted into SQL."""
    import pyarrow as pa

    text, whole = pa.string(), pa.int64()
    types = dict(zip(RawRow._fields, (whole, text, text, whole, text, text, text, text, whole, text, text), strict=True))
    columns: Mapping[str, tuple[Any, ...]] = dict(zip(RawRow._fields, zip(*rows, strict=True), strict=True))
    raw_rows = pa.table({name: pa.array(columns[name], type=types[name]) for name in types})
    settings = pa.table({"seed": [str(seed)], "ngram_words": [config.decontamination_ngram], "benchmark_size": [config.benchmark_size]})
    shares, low = [], 0.0
    for pool in POOLS:
        if pool in config.pools:
            high = low + config.pools[pool].share
            shares.append({"pool": pool, "low": low, "high": high, "with_trace": config.pools[pool].with_trace})
            low = high
    schema = pa.schema({"pool": text, "low": pa.float64(), "high": pa.float64(), "with_trace": pa.bool_()})
    for name, table in {"raw_rows": raw_rows, "settings": settings, "pool_shares": pa.Table.from_pylist(shares, schema=schema)}.items():
        database.from_arrow(table).create(name)


def build(database: duckdb.DuckDBPyConnection, layer: str, models: tuple[str, ...]) -> None:
    """Create one table per file of `datasets/sql/<layer>`, in the order given.

    Raises DataError when a file is missing.
    """
    for model in models:
        path = DATASETS / "sql" / layer / f"{model}.sql"
        if not path.is_file():
            raise DataError(f"curation: {path} is missing; the rule is one file a table; restore it, or install with `pip install -e`")
        database.execute(f"create table {model} as {path.read_text()}")


def table_of(database: duckdb.DuckDBPyConnection, name: str) -> pa.Table:
    """A whole table, in an order that depends on its rows only."""
    relation = database.table(name)
    return relation.order(", ".join(f'"{column}"' for column in relation.columns)).to_arrow_table()


def check_contracts(tables: Mapping[str, pa.Table]) -> None:
    """Hold tables against `datasets/contracts.yaml`.

    Raises DataError naming table, column, rule and how many rows break it.
    """
    import yaml

    contracts: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load((DATASETS / "contracts.yaml").read_text())
    for name, columns in contracts.items():
        table = tables[name]
        if table.column_names != list(columns):
            raise DataError(f"table {name} has the columns {table.column_names}; its contract says {list(columns)}; mend one of them")
        for column, rules in columns.items():
            for rule, broken in _broken(table[column], rules):
                file = f"datasets/sql/marts/{name}.sql"
                raise DataError(f"table {name}, column {column}: {broken} rows break the contract `{rule}`; mend {file}")


def _broken(column: pa.ChunkedArray, rules: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The rules that a column breaks, with the number of rows that break each."""
    from pyarrow import compute

    filled = column.drop_null()
    found = {
        "type": len(column) if str(column.type) != rules["type"] else 0,
        "not_null": column.null_count if rules.get("not_null") else 0,
        "unique": len(filled) - len(filled.unique()) if rules.get("unique") else 0,
    }
    if "min_length" in rules:
        found["min_length"] = compute.sum(compute.less(compute.utf8_length(filled), rules["min_length"])).as_py() or 0
    if "accepted_values" in rules:
        found["accepted_values"] = sum(value not in rules["accepted_values"] for value in filled.to_pylist())
    if "range" in rules:
        low, high = rules["range"]
        found["range"] = sum(not low <= value <= high for value in filled.to_pylist())
    yield from ((f"{rule}: {rules[rule]}", count) for rule, count in found.items() if count)


# ---- what stops the stage -------------------------------------------------------------------


def _refuse_bad_sources(database: duckdb.DuckDBPyConnection, places: list[Place]) -> None:
    limits = {place.name: (place.source.max_bad_share, place.source.path) for place in places if isinstance(place.source, FileSource)}
    counts = table_of(database, "stg_source_counts").to_pylist()
    for count in counts:
        name = count["source"]
        limit, path = limits.get(name, (0.0, None))
        if count["bad_share"] > limit:
            bad = [row for row in table_of(database, "quarantine").to_pylist() if row["source"] == name][:_EXAMPLES_SHOWN]
            examples = "".join(f"\n  row {row['row_number']}: {row['reason']}: {row['row_text'][:80]!r}" for row in bad)
            raise DataError(
                f"{name}: {count['bad_count']} of {count['row_count']} rows ({count['bad_share']:.1%}) of {path} cannot be used; "
                f"the rule is max_bad_share = {limit:g}; mend the rows or raise max_bad_share. First of them:{examples}"
            )


def _refuse_empty(config: Curation, tables: Mapping[str, pa.Table]) -> None:
    counts = {row["step"]: row["rows"] for row in tables["funnel"].to_pylist() if row["family"] == "all"}
    story = ", ".join(f"{step} {count}" for step, count in sorted(counts.items()))
    for name in config.benchmarks:
        if f"benchmark {name}" not in counts:
            raise DataError(
                f"benchmarks.{name} has no problem left; the rule is at least one that no benchmark before it (by name) holds; "
                f"raise `size`, or change its sources ({story})"
            )
    for pool, wish in config.pools.items():
        if f"pool {pool}" not in counts:
            raise DataError(
                f"pool {pool} is empty (share {wish.share:g}, with_trace {wish.with_trace}); the rule is at least one problem; "
                f"add problems to `sources`, raise the share, or lower what the benchmarks take ({story})"
            )


# ---- results --------------------------------------------------------------------------------


def _pool(pools: pa.Table, pool: str) -> pa.Table:
    from pyarrow import compute

    return pools.filter(compute.equal(pools["pool"], pool)).sort_by("position")


def _write(table: pa.Table, stage_dir: Path, name: str) -> DatasetRef:
    from pyarrow import parquet

    path = stage_dir / "data" / f"{name}.parquet"
    parquet.write_table(table, path, compression="zstd")
    return DatasetRef(name=f"curation.{name}", digest=digest_of_file(path), path=path, producer=stage_dir.name, rows=table.num_rows)


def _metrics(funnel: pa.Table) -> dict[str, float]:
    """`rows/<step>` over all families, and `rows/<step>/<family>`."""
    metrics = {}
    for row in funnel.to_pylist():
        step = row["step"].replace(",", "").replace(" ", "_")
        metrics[f"rows/{step}" if row["family"] == "all" else f"rows/{step}/{row['family']}"] = float(row["rows"])
    return dict(sorted(metrics.items()))


def _print_funnel(funnel: pa.Table) -> None:
    for row in funnel.to_pylist():
        if row["family"] == "all":
            print(f"{row['step']:<32}{row['rows']:>8}", flush=True)
