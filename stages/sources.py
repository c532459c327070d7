"""Reads the sources of curation row by row: reasoning-gym, JSONL, Parquet, CSV, DuckDB, Hugging Face data sets.

A row that cannot be read is a row with a reason (`unreadable`), never the end of its source. Only what
concerns a whole source (a missing file, a missing column, a torn Parquet) is an error. Memory stays
flat: no reader holds more than a batch of rows.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from stages.artifacts import digest_of_file
from stages.config import Curation, DuckDBSource, FileSource, HuggingFaceSource, ReasoningGymSource
from stages.errors import DataError
from stages.problems import generate, seed_of

_BATCH_ROWS = 4096
_FIELD_CHARACTERS = 2**31 - 1
"""Of a CSV field; the csv module's own limit of 131,072 would end the source at one long row."""

Rows = FileSource | DuckDBSource | HuggingFaceSource
"""A source that holds rows."""
AnySource = ReasoningGymSource | Rows

Line = tuple[int, str, "dict[str, Any] | str"]
"""Row number from 1, the row as text, and the row; in place of the row the reason why it cannot be read."""


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
    row_id: str | None = None
    answer_type: str = "text"
    grading: str | None = None


class Place(NamedTuple):
    """Where a source stands in the recipe."""

    order: int
    benchmark: str | None
    name: str
    source: AnySource
    seed: int


def sources_in_order(config: Curation, seed: int) -> list[Place]:
    """Every source with its place and its seed: training first, then benchmarks by name."""
    training = [(None, f"sources[{index}]", source, seed_of(seed, "train", index)) for index, source in enumerate(config.sources)]
    held_out = [
        (name, f"benchmarks.{name}[{index}]", source, seed_of(seed, "benchmark", name, index))
        for name in sorted(config.benchmarks)
        for index, source in enumerate(config.benchmarks[name])
    ]
    return [
        Place(order, benchmark, f"{where} {source.id or _label(source)}", source, own_seed)
        for order, (benchmark, where, source, own_seed) in enumerate([*training, *held_out])
    ]


def where(source: AnySource) -> str:
    """Where the rows of a source lie, for people: a path, a path with its table, a name on the hub, or a family."""
    match source:
        case ReasoningGymSource():
            return f"reasoning-gym {source.family}"
        case DuckDBSource():
            return f"{source.path}, table {source.table}"
        case HuggingFaceSource():
            return f"{source.name}, split {source.split}"
    return str(source.path)


def _label(source: AnySource) -> str:
    match source:
        case ReasoningGymSource():
            return source.family
        case DuckDBSource():
            return f"{source.path.name}:{source.table}"
        case HuggingFaceSource():
            return f"{Path(source.name).name}:{source.split}"
    return source.path.name


def read_source(place: Place) -> Iterator[RawRow]:
    """All rows of a source, unreadable ones too.

    Raises DataError when the source as a whole cannot be read, has no rows, or lacks a column.
    """
    source = place.source
    if isinstance(source, ReasoningGymSource):
        yield from _generated(place, source)
        return
    wanted = [column for column in (source.question, source.answer, source.trace, source.row_id, source.grading) if column is not None]
    columns: set[str] = set()
    has_rows = False
    for number, text, row in _lines(place, source):
        has_rows = True
        if isinstance(row, dict):
            columns |= row.keys()
        yield _raw_row(place, source, number, text, row)
    if not has_rows:
        raise DataError(f"{place.name}: {where(source)} has no rows; a source needs at least one; fill the file or take the source out")
    for column in wanted if columns else []:
        _require_column(place, source, column, columns)


def _lines(place: Place, source: Rows) -> Iterator[Line]:
    if isinstance(source, HuggingFaceSource):
        return _hugging_face_rows(place, source)
    _require_file(place, source.path)
    if source.revision is not None and not (digest := digest_of_file(source.path)).startswith(source.revision.lower()):
        raise DataError(
            f"{place.name}: {source.path} has the SHA-256 {digest[:16]}..., the rule is revision = {source.revision}; "
            "get the pinned file, or pin this one"
        )
    if isinstance(source, DuckDBSource):
        return _duckdb_rows(place, source)
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows, ".csv": _csv_rows}
    if source.path.suffix not in readers:
        raise DataError(
            f"{place.name}: {source.path} ends in {source.path.suffix!r}; the rule is one of {sorted(readers)}; convert or rename the file"
        )
    return readers[source.path.suffix](place, source.path)


def _require_file(place: Place, path: Path) -> None:
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [item.name for item in path.parent.glob("*")] if path.parent.is_dir() else [], n=1)
        hint = f"did you mean {path.parent / near[0]}?" if near else "mend `path` (it starts at the folder posttrain was started in)"
        raise DataError(f"{place.name}: {path} is missing; a source must be a file; {hint}")


def _require_column(place: Place, source: Rows, column: str, columns: set[str]) -> None:
    if column not in columns:
        near = difflib.get_close_matches(column, sorted(columns), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "name one of them in the recipe"
        raise DataError(f"{place.name}: {where(source)} has no column {column!r}; its columns are {sorted(columns)}; {hint}")


def _raw_row(place: Place, source: Rows, number: int, text: str, row: dict[str, Any] | str) -> RawRow:
    blank = RawRow(place.order, place.benchmark, place.name, number, None, None, None, source.family, 0, text)
    if isinstance(row, str):
        return blank._replace(unreadable=row)
    question, answer = row.get(source.question), _number_as_text(row.get(source.answer))
    trace = row.get(source.trace) if source.trace is not None else None
    row_id = _number_as_text(row.get(source.row_id)) if source.row_id is not None else None
    grading = row.get(source.grading) if source.grading is not None else None
    if isinstance(grading, dict):
        grading = json.dumps(grading, ensure_ascii=False, default=str)
    texts = (("question", question), ("answer", answer), ("trace", trace), ("row id", row_id), ("grading", grading))
    for what, value in texts:
        if value is not None and not isinstance(value, str):
            return blank._replace(unreadable=f"the {what} is of type {type(value).__name__}, the rule is text")
    if answer is not None and source.answer_after is not None:
        _, mark, answer = answer.rpartition(source.answer_after)
        if not mark:
            return blank._replace(unreadable=f"the answer holds no {source.answer_after!r}, after which the gold answer stands")
    return blank._replace(question=question, answer=answer, trace=trace, row_id=row_id, answer_type=source.answer_type, grading=grading)


def _number_as_text(value: Any) -> Any:
    """A number as text, NaN as a missing value; everything else as it is."""
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return None if value != value else str(value)
    return value


def _generated(place: Place, source: ReasoningGymSource) -> Iterator[RawRow]:
    parameters: dict[str, Any] = dict(source.parameters)
    try:
        for number, item in enumerate(generate(source.family, source.size, place.seed, **parameters), 1):
            yield RawRow(
                place.order,
                place.benchmark,
                place.name,
                number,
                item.question,
                item.answer,
                item.trace,
                item.family,
                item.scale,
                item.question,
            )
    except (AssertionError, TypeError, ValueError) as error:  # what reasoning-gym raises for its own settings
        raise DataError(
            f"{place.name}: reasoning-gym cannot make {source.family} with {source.parameters} ({error}); "
            "keep to the family's own settings and their bounds; mend `parameters`"
        ) from error


# ---- files ----------------------------------------------------------------------------------


def _jsonl_rows(place: Place, path: Path) -> Iterator[Line]:
    """One line a row; blank lines are passed over, and numbers are those of the file."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):  # bytes: text would split at characters that JSON may hold
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not line.strip():
                continue
            text = line.decode("utf-8", errors="backslashreplace").rstrip("\r\n")
            try:
                row = json.loads(line)
                json.dumps(row, ensure_ascii=False).encode()  # a lone surrogate is JSON, but no database can hold it
            except (ValueError, RecursionError) as error:
                yield number, text, f"not JSON in UTF-8: {type(error).__name__}"
                continue
            yield number, text, row if isinstance(row, dict) else f"a JSON {type(row).__name__}, the rule is an object"


def _csv_rows(place: Place, path: Path) -> Iterator[Line]:
    """Comma-separated, quoted as in RFC 4180, the first row names the columns; row 1 is the first after it.

    Bytes that are not UTF-8 spoil their own row only.
    """
    csv.field_size_limit(_FIELD_CHARACTERS)
    with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        rows = csv.reader(file, strict=True)
        header = [name.removeprefix("\ufeff").strip() for name in next(rows, [])]
        if len(set(header)) < len(header):
            raise DataError(f"{place.name}: {path} names a column twice ({header}); the rule is once; rename one")
        number = 0
        while True:
            try:
                fields = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                number += 1
                yield number, f"line {rows.line_num}", f"not CSV: {error}"
                continue
            if fields:
                number += 1
                yield number, *_csv_row(header, fields)


def _csv_row(header: Sequence[str], fields: Sequence[str]) -> tuple[str, dict[str, Any] | str]:
    written = io.StringIO()
    csv.writer(written, lineterminator="").writerow(fields)
    text = written.getvalue()
    try:
        text.encode()
    except UnicodeEncodeError:  # escaped bytes
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"), "not UTF-8"
    if len(fields) != len(header):
        return text, f"{len(fields)} fields, the header has {len(header)}"
    return text, {name: value or None for name, value in zip(header, fields, strict=True)}


def _parquet_rows(place: Place, path: Path) -> Iterator[Line]:
    from pyarrow import ArrowException, parquet

    number = 0
    try:
        with parquet.ParquetFile(path, pre_buffer=False) as file:  # else the whole file would be held
            for batch in file.iter_batches(_BATCH_ROWS):
                for row in _rows_of_batch(batch):
                    number += 1
                    yield number, _as_text(row), row
    except (OSError, ValueError, ArrowException) as error:
        raise DataError(f"{place.name}: {path} cannot be read as Parquet after row {number} ({error}); write the file again") from error


def _rows_of_batch(batch: Any) -> Iterator[dict[str, Any] | str]:
    """Rows of an Arrow batch; a row with text that is not UTF-8 is the reason in its place."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError:
                yield "not UTF-8"


def _as_text(row: dict[str, Any] | str) -> str:
    return row if isinstance(row, str) else json.dumps(row, ensure_ascii=False, default=str)


# ---- databases and data sets ----------------------------------------------------------------


def _duckdb_rows(place: Place, source: DuckDBSource) -> Iterator[Line]:
    import duckdb

    try:
        with duckdb.connect(source.path, read_only=True, config={"threads": 1}) as database:
            tables = [name for (name,) in database.execute("select table_name from information_schema.tables").fetchall()]
            if source.table not in tables:
                near = difflib.get_close_matches(source.table, tables, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "mend `table`"
                raise DataError(f"{place.name}: {source.path} has no table {source.table!r}; its tables are {sorted(tables)}; {hint}")
            number = 0
            for batch in database.table(_quoted(source.table)).to_arrow_reader(_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, _as_text(row), row
    except duckdb.Error as error:
        raise DataError(
            f"{place.name}: {source.path} cannot be read as a DuckDB file ({error}); close the program that writes it, or make it again"
        ) from error


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _hugging_face_rows(place: Place, source: HuggingFaceSource) -> Iterator[Line]:
    """Rows of a split, streamed: nothing is copied to a cache that could grow old."""
    import datasets
    from datasets.exceptions import DatasetGenerationError

    folder = _hugging_face_folder(place, source)
    number = 0
    try:
        if (folder / "dataset_dict.json").is_file():
            splits = datasets.load_from_disk(str(folder))
            _require_split(place, source, list(splits))
            rows = splits[source.split]
        elif (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file():
            rows = datasets.load_from_disk(str(folder))
        else:
            streams = datasets.load_dataset(str(folder.resolve()), source.configuration, streaming=True)
            _require_split(place, source, list(streams))
            rows = streams[source.split]
        for row in rows:
            number += 1
            yield number, _as_text(row), row
    except (OSError, ValueError, TypeError, IndexError, RuntimeError, DatasetGenerationError) as error:  # what that library raises
        raise DataError(
            f"{place.name}: {source.name} cannot be read as a data set after row {number} ({error}); "
            "mend the folder, or name its files as sources of kind `file`"
        ) from error


def _require_split(place: Place, source: HuggingFaceSource, splits: list[str]) -> None:
    if source.split not in splits:
        raise DataError(f"{place.name}: {source.name} has no split {source.split!r}; it has {splits}; mend `split`")


def _hugging_face_folder(place: Place, source: HuggingFaceSource) -> Path:
    """The local folder, or the pinned snapshot of a hub data set, from the cache when the hub is out of reach."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if Path(source.name).is_dir():
        return Path(source.name)
    try:
        return Path(snapshot_download(source.name, repo_type="dataset", revision=source.revision))
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise DataError(
            f"{place.name}: the data set {source.name} at {source.revision} is neither a folder nor in the cache ({type(error).__name__}); "
            f"stages work offline; fetch it once: hf download {source.name} --repo-type dataset --revision {source.revision}"
        ) from error
