"""Curation: from sources to disjoint, decontaminated pools of problems, and held-out benchmarks.

What      Loads every source into a DuckDB database, puts rows that cannot be used in quarantine, and runs
          the SQL in `datasets/sql` in order: normalise, drop kinds of problems that cannot be graded, drop
          duplicates and near-duplicates, take the benchmarks, drop training problems that overlap them or what
          their data offers beyond, deal the rest to pools. Every dropped row keeps its rule, the evidence and the
          other problem.
Reads     Nothing from other stages: reasoning-gym families, files, DuckDB tables, Hugging Face data sets.
Writes    `data/`: one Parquet file a pool and `benchmarks.parquet`; for review `problems`, `dropped`, `quarantine`,
          `contamination` (both texts of each hit), `contamination_counts`, `numbered_twins`, `sources`,
          `families` and `funnel`, and `curation.duckdb` with every table. `report/`: the data report.
Papers    Kimi k1.5 (arXiv 2501.12599, 2.1) and Qwen3 (arXiv 2505.09388, 4.1) for the kinds of problems that are
          dropped; MinHash as in Lee et al. (arXiv 2107.06499); decontamination: `stages/decontamination.py`.
Differs   Near-duplicates must share all numbers and signs, since problems of one kind differ in nothing
          else, and the answer; questions that differ in numbers only are listed, and dropped on request alone. Kinds are
          found by rules where the papers ask a model; what the rules miss is measured on labelled problems.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.artifacts import REPORT, DatasetRef, Handles, StageOutput, digest_of_file
from stages.config import Curation, ReasoningGymSource
from stages.data_report import write_report
from stages.decontamination import find as find_overlap
from stages.errors import DataError
from stages.near_duplicates import find as find_near_duplicates
from stages.near_duplicates import fold
from stages.records import Recorder
from stages.sources import Place, RawRow, read_source, sources_in_order, where

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

DATASETS = Path(__file__).resolve().parents[1] / "datasets"
STAGING = ("stg_rows", "quarantine", "stg_problems", "stg_source_counts")
DUPLICATES = ("int_exclusions", "int_training_copies")
PROBLEMS = ("int_repeats", "int_training_problems", "int_benchmark_candidates", "int_benchmark_problems", "int_held_out_problems")
CONTAMINATION = ("int_contamination",)
MARTS = (
    "benchmarks",
    "contamination",
    "contamination_counts",
    "dropped",
    "numbered_twins",
    "pools",
    "funnel",
    "sources",
    "families",
)
POOLS = ("cold_start", "rl", "preference", "distillation")
PROBLEM_COLUMNS = ("problem_id", "question", "answer", "answer_type", "grading", "family", "source", "trace", "scale")
FOR_REVIEW = {
    "quarantine": "quarantine",
    "contamination": "contamination",
    "contamination_counts": "contamination_counts",
    "dropped": "dropped",
    "numbered_twins": "numbered_twins",
    "pools": "problems",
    "funnel": "funnel",
    "sources": "sources",
    "families": "families",
}
"""Tables that are written beside the artifacts, by the name of their file."""
_EXAMPLES_SHOWN = 3
_BATCH_ROWS = 16384
_BATCH_CHARACTERS = 1 << 26


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
        prepare(database, config, seed)
        for done, place in enumerate(places, 1):
            load(database, read_source(place))
            recorder.progress(done, len(places), "source")
        build(database, "staging", STAGING)
        _refuse_bad_sources(database, places)
        counts = build_problems(database, config, recorder)
        build(database, "marts", MARTS)
        tables = {name: table_of(database, name) for name in ("quarantine", *MARTS)}
    check_contracts({name: tables[name] for name in MARTS})
    metrics = _metrics(tables) | counts
    recorder.metrics(0, metrics)
    _print_funnel(tables["funnel"])
    write_report(stage_dir / REPORT, tables, {place.name: _described(place) for place in places})
    _refuse_empty(config, tables)
    for table, name in FOR_REVIEW.items():
        _write(tables[table], stage_dir, name)
    outputs: dict[str, Any] = {"benchmarks": _write(tables["benchmarks"].select(["benchmark", *PROBLEM_COLUMNS]), stage_dir, "benchmarks")}
    for pool in POOLS:
        if pool in config.pools:
            outputs[pool] = _write(_pool(tables["pools"], pool).select(list(PROBLEM_COLUMNS)), stage_dir, pool)
    return StageOutput(outputs=outputs, metrics=metrics)


# ---- the database ---------------------------------------------------------------------------


def prepare(database: duckdb.DuckDBPyConnection, config: Curation, seed: int) -> None:
    """Create the relations that the SQL reads (`raw_rows`, still empty, and the settings) and the function `fold`."""
    import pyarrow as pa

    text = pa.string()
    settings = {
        "seed": str(seed),
        "benchmark_size": config.benchmark_size,
        "max_characters": config.max_characters,
        "twins_kept": config.twins_kept,
    }
    shares, low = [], 0.0
    for pool in POOLS:
        if pool in config.pools:
            high = low + config.pools[pool].share
            shares.append({"pool": pool, "low": low, "high": high, "with_trace": config.pools[pool].with_trace})
            low = high
    share = pa.schema({"pool": text, "low": pa.float64(), "high": pa.float64(), "with_trace": pa.bool_()})
    kind = pa.schema({"rule": text, "place": pa.int64()})
    overlap = pa.schema({"rule": text, "place": pa.int64(), "drops": pa.bool_()})
    rules = [("same_question", True), *((rule, rule in config.decontamination.drop) for rule in config.decontamination.rules)]
    generated = [place.name for place in sources_in_order(config, seed) if isinstance(place.source, ReasoningGymSource)]
    relations = {
        "raw_rows": _raw_table([]),
        "generated_sources": pa.table({"source": pa.array(generated, text)}),
        "settings": pa.Table.from_pylist([settings]),
        "pool_shares": pa.Table.from_pylist(shares, schema=share),
        "excluded_kinds": pa.Table.from_pylist([{"rule": rule, "place": place} for place, rule in enumerate(config.exclude)], schema=kind),
        "decontamination_rules": pa.Table.from_pylist(
            [{"rule": rule, "place": place, "drops": drops} for place, (rule, drops) in enumerate(rules)], schema=overlap
        ),
    }
    for name, table in relations.items():
        database.from_arrow(table).create(name)
    database.create_function("fold", fold, ["VARCHAR"], "VARCHAR")


def load(database: duckdb.DuckDBPyConnection, rows: Iterable[RawRow]) -> None:
    """Append rows to `raw_rows`, a batch at a time. Nothing is pasted into SQL."""
    batch: list[RawRow] = []
    characters = 0
    for row in rows:
        batch.append(row)
        characters += len(row.row_text)
        if len(batch) == _BATCH_ROWS or characters > _BATCH_CHARACTERS:
            database.from_arrow(_raw_table(batch)).insert_into("raw_rows")
            batch, characters = [], 0
    if batch:
        database.from_arrow(_raw_table(batch)).insert_into("raw_rows")


def _raw_table(rows: list[RawRow]) -> pa.Table:
    import pyarrow as pa

    columns: Mapping[str, tuple[Any, ...]] = dict(zip(RawRow._fields, zip(*rows, strict=True), strict=True)) if rows else {}
    whole = ("pool_order", "row_number", "scale")
    types = {name: pa.int64() if name in whole else pa.large_string() for name in RawRow._fields}
    return pa.table({name: pa.array(columns.get(name, ()), type=kind) for name, kind in types.items()})


def build_problems(database: duckdb.DuckDBPyConnection, config: Curation, recorder: Recorder) -> dict[str, float]:
    """The intermediate layer: SQL, and between its parts the two searches that SQL is no tool for. Returns their metrics."""
    build(database, "intermediate", DUPLICATES)
    near = find_near_duplicates(
        database.sql(
            "select problem_id, folded, signs, answer from int_training_copies where copy = 1 order by pool_order, row_number"
        ).to_arrow_table(),
        config.near_duplicate_similarity,
        lambda done, total: recorder.progress(done, total, "question"),
    )
    database.from_arrow(near.pairs).create("near_duplicates")
    build(database, "intermediate", PROBLEMS)
    training = database.table("int_training_problems").select("problem_id", "question", "family", "source")
    found = find_overlap(
        lambda: training.to_arrow_reader(_BATCH_ROWS),
        table_of(database, "int_held_out_problems"),
        config.decontamination,
        ngram=config.decontamination_ngram,
        candidates=table_of(database, "int_benchmark_candidates"),
    )
    database.from_arrow(found.hits).create("contamination_hits")
    database.from_arrow(found.counts).create("contamination_totals")
    build(database, "intermediate", CONTAMINATION)
    counts = {"other_answer": near.other_answer, "compared": near.compared, "uncompared": near.uncompared}
    return {f"near_duplicates/{name}": float(count) for name, count in counts.items()}


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
    sources = {place.name: place.source for place in places}
    counts = table_of(database, "stg_source_counts").to_pylist()
    for count in counts:
        name = count["source"]
        source = sources[name]
        limit = 0.0 if isinstance(source, ReasoningGymSource) else source.max_bad_share
        if count["bad_share"] > limit:
            bad = [row for row in table_of(database, "quarantine").to_pylist() if row["source"] == name][:_EXAMPLES_SHOWN]
            examples = "".join(f"\n  row {row['row_number']}: {row['reason']}: {row['row_text'][:80]!r}" for row in bad)
            raise DataError(
                f"{name}: {count['bad_count']} of {count['row_count']} rows ({count['bad_share']:.1%}) of {where(source)} cannot be used; "
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


def _described(place: Place) -> dict[str, str | None]:
    """What the report says about where a source comes from."""
    revision = None if isinstance(place.source, ReasoningGymSource) else place.source.revision
    return {"kind": place.source.kind, "where": where(place.source), "revision": revision, "licence": place.source.licence}


def _metrics(tables: Mapping[str, pa.Table]) -> dict[str, float]:
    """`rows/<step>` over all families, `rows/<step>/<family>`, `contamination/<benchmark>/<rule>`, twins."""
    counts = [row for row in tables["contamination_counts"].to_pylist() if row["source"] == "all"]
    metrics = {f"contamination/{row['benchmark']}/{row['rule']}": float(row["share"]) for row in counts}
    metrics["numbered_twins/wordings"] = float(tables["numbered_twins"].num_rows)
    metrics["numbered_twins/problems"] = float(sum(tables["numbered_twins"]["problems"].to_pylist()))
    for row in tables["funnel"].to_pylist():
        step = row["step"].replace(",", "").replace(" ", "_")
        metrics[f"rows/{step}" if row["family"] == "all" else f"rows/{step}/{row['family']}"] = float(row["rows"])
    return dict(sorted(metrics.items()))


def _print_funnel(funnel: pa.Table) -> None:
    for row in funnel.to_pylist():
        if row["family"] == "all":
            print(f"{row['step']:<32}{row['rows']:>8}", flush=True)
