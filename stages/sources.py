"""Reads the sources of curation row by row: reasoning-gym, JSONL, Parquet, CSV, DuckDB, Hugging Face data sets.

A row that cannot be read is a row with a reason (`unreadable`), never the end of its source. Only what
concerns a whole source (a missing file, a missing column, a torn Parquet) is an error. Memory stays
flat: no reader holds more than a batch of rows. Of tables only the columns that a source names are read,
and no image or sound is decoded. A text that holds a marker of the chat format is unreadable: in a prompt
it would turn into real special tokens.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from stages.artifacts import digest_of_file
from stages.chat import RESERVED
from stages.config import Curation, DuckDBSource, FileSource, HuggingFaceSource, ReasoningGymSource
from stages.errors import DataError
from stages.problems import generate, seed_of

_BATCH_ROWS = 4096
_FIELD_CHARACTERS = 2**31 - 1
"""Of a CSV field; the csv module's own limit of 131,072 would end the source at one long row."""
_RECORD_CHARACTERS = 1 << 24
"""Of a CSV record over several lines; a quote that is never closed must not hold the rest of the file in memory."""
_CHARACTERS_READ_AGAIN = 1 << 30
"""Of the lines of faulty CSV records, in all; bounds the time that a file full of stray quotes takes."""
_SHARE_OF_ROWS = 0.9
"""Of the lines of a faulty CSV record from which they are rows that a stray quote swallowed, and no text of one row."""
_COLUMNS_SHOWN = 20
_EXACT_FLOATS = 2.0**53
"""Whole numbers below it are exact as floats."""

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
    columns: set[str] = set()
    has_rows = False
    for number, text, row in _lines(place, source):
        has_rows = True
        if isinstance(row, dict):
            columns |= row.keys()
        yield _raw_row(place, source, number, text, row)
    if not has_rows:
        raise DataError(f"{place.name}: {where(source)} has no rows; a source needs at least one; fill the file or take the source out")
    if columns:
        _require_columns(place, source, columns)


def _wanted(source: Rows) -> list[str]:
    """The columns that a source names, each once."""
    named = (source.question, source.answer, source.trace, source.row_id, source.grading)
    return list(dict.fromkeys(column for column in named if column is not None))


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
    if source.path.suffix == ".parquet":
        return _parquet_rows(place, source)
    if source.path.suffix == ".jsonl":
        return jsonl_rows(source.path)
    if source.path.suffix == ".csv":
        return _csv_rows(place, source.path)
    raise DataError(
        f"{place.name}: {source.path} ends in {source.path.suffix!r}; the rule is one of .csv, .jsonl, .parquet; convert or rename the file"
    )


def _require_file(place: Place, path: Path) -> None:
    if path.is_file():
        return
    if path.is_dir():
        fault, hint = "a folder", "name a file in it, or read a data set's folder by `kind: huggingface`"
    elif path.is_symlink():
        fault, hint = f"a link to {path.readlink()}, which is missing", "mend the link, or name the file itself"
    elif path.exists():
        fault, hint = "neither a file nor a folder", "write the rows to a file"
    else:
        near = difflib.get_close_matches(path.name, [item.name for item in path.parent.glob("*")] if path.parent.is_dir() else [], n=1)
        fault = "missing"
        hint = f"did you mean {path.parent / near[0]}?" if near else "mend `path` (it starts at the folder posttrain was started in)"
    raise DataError(f"{place.name}: {path} is {fault}; a source must be a file; {hint}")


def _require_columns(place: Place, source: Rows, columns: Iterable[str]) -> None:
    there = set(columns)
    for column in _wanted(source):
        if column not in there:
            nearest = sorted(there, key=lambda name: (-difflib.SequenceMatcher(None, column, name).ratio(), name))
            near = difflib.get_close_matches(column, nearest, n=1)
            more = f" and {len(nearest) - _COLUMNS_SHOWN} more" if len(nearest) > _COLUMNS_SHOWN else ""
            hint = f"did you mean {near[0]!r}?" if near else "name one of them in the recipe"
            raise DataError(
                f"{place.name}: {where(source)} has no column {column!r}; its columns are {nearest[:_COLUMNS_SHOWN]}{more}; {hint}"
            )


def _raw_row(place: Place, source: Rows, number: int, text: str, row: dict[str, Any] | str) -> RawRow:
    blank = RawRow(place.order, place.benchmark, place.name, number, None, None, None, source.family, 0, text)
    if isinstance(row, str):
        return blank._replace(unreadable=row)
    question = row.get(source.question)
    answer = row.get(source.answer)
    answer = _number_as_text(_whole(answer) if source.answer_type == "integer" else answer)
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
    for what, value in (("question", question), ("answer", answer), ("trace", trace)):
        if found := next((marker for marker in RESERVED if marker in (value or "")), None):
            return blank._replace(unreadable=f"the {what} holds {found}, a marker of the chat format")
    return blank._replace(question=question, answer=answer, trace=trace, row_id=row_id, answer_type=source.answer_type, grading=grading)


def _whole(value: Any) -> Any:
    """A whole number that came as a float (5.0 of a column with gaps) or a decimal as an integer; everything else as it is."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_FLOATS:
        return int(value)
    if isinstance(value, Decimal) and value.is_finite() and value == value.to_integral_value():
        return int(value)
    return value


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


def jsonl_rows(path: Path) -> Iterator[Line]:
    """The rows of a JSONL file, one a line; blank lines are passed over, and numbers are those of the file."""
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


class _Lines:
    """The lines of a file, for a CSV reader; those of the record at hand can be given back, to be read again."""

    def __init__(self, file: TextIO) -> None:
        self.record: list[str] = []
        self._file = file
        self._given_back: deque[str] = deque()
        self._characters = 0
        self._may_read_again = _CHARACTERS_READ_AGAIN

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        if self._characters > _RECORD_CHARACTERS and len(self.record) > 1:
            raise csv.Error(f"a record over several lines is longer than {_RECORD_CHARACTERS} characters")
        line = self._given_back.popleft() if self._given_back else self._file.readline()
        if not line:
            raise StopIteration
        self.record.append(line)
        self._characters += len(line)
        return line

    def begin(self) -> None:
        """Forget the lines of the record before."""
        self.record, self._characters = [], 0

    def give_back(self) -> None:
        """Keep the first line of the record only; the others come again. Does nothing past `_CHARACTERS_READ_AGAIN`."""
        if self._may_read_again > 0:
            self._may_read_again -= self._characters
            self._given_back.extendleft(reversed(self.record[1:]))
            self.record = self.record[:1]


def _csv_rows(place: Place, path: Path) -> Iterator[Line]:
    """Comma-separated, quoted as in RFC 4180, the first row names the columns; row 1 is the first after it.

    Bytes that are not UTF-8 spoil their own row only. Empty fields past the header are nothing. Every line of a
    faulty record is a bad row, but when the lines look like rows that a stray quote swallowed, those after the
    first are read again, each on its own.
    """
    csv.field_size_limit(_FIELD_CHARACTERS)
    with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        lines = _Lines(file)
        header = _csv_header(place, path, lines)
        number = 0
        while True:
            lines.begin()
            try:
                fields = next(csv.reader(lines, strict=True))
            except StopIteration:
                return
            except csv.Error as error:
                fault = f"not CSV: {error}"
            else:
                if not fields:
                    continue
                if len(fields) == len(header) or (len(fields) > len(header) and not any(fields[len(header) :])):
                    number += 1
                    yield number, *_csv_row(header, fields)
                    continue
                fault = f"{len(fields)} fields, the header has {len(header)}"
            if len(lines.record) > 1:
                fault = f"{fault} (in a record of {len(lines.record)} lines)"
                if _swallowed_rows(lines.record, len(header)):
                    lines.give_back()
            for line in lines.record:
                number += 1
                yield number, _escaped(line.rstrip("\r\n")), fault


def _csv_header(place: Place, path: Path, lines: _Lines) -> list[str]:
    try:
        header = [name.removeprefix("\ufeff").strip() for name in next(csv.reader(lines, strict=True), [])]
    except csv.Error as error:
        raise DataError(f"{place.name}: the header of {path} is not CSV ({error}); the rule is RFC 4180; mend its first line") from error
    if len(set(header)) < len(header):
        raise DataError(f"{place.name}: {path} names a column twice ({header}); the rule is once; rename one")
    return header


def _swallowed_rows(record: Sequence[str], width: int) -> bool:
    """Whether the lines of a faulty record are rows: quotes taken as text, its lines have as many fields as the header.

    The last line may be the one where the fault came to light; the first one must be a row.
    """
    widths = [len(next(csv.reader([line.rstrip("\r\n")], quoting=csv.QUOTE_NONE), [])) for line in record[:-1]]
    filled = [found for found in widths if found]
    return widths[0] == width and filled.count(width) >= _SHARE_OF_ROWS * len(filled)


def _csv_row(header: Sequence[str], fields: Sequence[str]) -> tuple[str, dict[str, Any] | str]:
    written = io.StringIO()
    csv.writer(written, lineterminator="").writerow(fields)
    text = written.getvalue()
    escaped = _escaped(text)
    if escaped != text:
        return escaped, "not UTF-8"
    return text, {name: value or None for name, value in zip(header, fields, strict=False)}


def _escaped(text: str) -> str:
    """Bytes that are not UTF-8 as \\x and two digits."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _parquet_rows(place: Place, source: FileSource) -> Iterator[Line]:
    from pyarrow import ArrowException, parquet

    number = 0
    try:
        with parquet.ParquetFile(source.path, pre_buffer=False) as file:  # else the whole file would be held
            _require_columns(place, source, file.schema_arrow.names)
            for batch in file.iter_batches(_BATCH_ROWS, columns=_wanted(source)):
                for row in _rows_of_batch(batch):
                    number += 1
                    yield number, _as_text(row), row
    except (OSError, ValueError, ArrowException) as error:
        raise DataError(
            f"{place.name}: {source.path} cannot be read as Parquet after row {number} ({error}); write the file again"
        ) from error


def _rows_of_batch(batch: Any) -> Iterator[dict[str, Any] | str]:
    """Rows of an Arrow batch or table; a row that Python cannot hold is the reason in its place."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):
        for index in range(batch.num_rows):
            yield _row_or_reason(batch.slice(index, 1))


def _row_or_reason(batch: Any) -> dict[str, Any] | str:
    try:
        row: dict[str, Any] = batch.to_pylist()[0]
    except UnicodeDecodeError:
        return "not UTF-8"
    except (ValueError, OverflowError) as error:  # dates past the year 9999, and infinite ones
        return f"a value out of bounds: {error}"
    return row


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
            rows = database.table(_quoted(source.table))
            _require_columns(place, source, rows.columns)
            number = 0
            for batch in rows.select(*map(duckdb.ColumnExpression, _wanted(source))).to_arrow_reader(_BATCH_ROWS):
                for row in _rows_of_batch(batch):
                    number += 1
                    yield number, _as_text(row), row
    except duckdb.Error as error:
        raise DataError(
            f"{place.name}: {source.path} cannot be read as a DuckDB file ({error}); close the program that writes it, or make it again"
        ) from error


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _hugging_face_rows(place: Place, source: HuggingFaceSource) -> Iterator[Line]:
    """Rows of a split, streamed: nothing is copied to a cache that could grow old, and nothing but JSON is decoded."""
    from datasets import Json
    from datasets.exceptions import DatasetsError
    from pyarrow import ArrowException

    folder = _hugging_face_folder(place, source)
    number = 0
    try:
        rows = _hugging_face_split(place, source, folder)
        features = rows.features or {}
        if features:
            _require_columns(place, source, features)
            rows = rows.select_columns(_wanted(source))
        encoded = [name for name in _wanted(source) if isinstance(features.get(name), Json)]
        for table in rows.with_format("arrow").iter(_BATCH_ROWS):
            _require_columns(place, source, table.column_names)
            for row in _rows_of_batch(table.select(_wanted(source))):
                if isinstance(row, dict):
                    row |= {name: json.loads(row[name]) for name in encoded if row[name] is not None}
                number += 1
                yield number, _as_text(row), row
    except (  # what that library raises: StopIteration for an empty file, ImportError for a file that needs another package
        ArithmeticError,
        ArrowException,
        AttributeError,
        DatasetsError,
        ImportError,
        LookupError,
        OSError,
        RuntimeError,
        StopIteration,
        TypeError,
        ValueError,
    ) as error:
        fault = "a file of it is empty" if isinstance(error, StopIteration) else str(error)
        raise DataError(
            f"{place.name}: {source.name} cannot be read as a data set after row {number} ({fault}); "
            "mend the folder, or name its files as sources of kind `file`"
        ) from error


def _hugging_face_split(place: Place, source: HuggingFaceSource, folder: Path) -> Any:
    """The split as that library's own object. A folder of one data set is its own split, or any when it names none."""
    import datasets

    if (folder / "dataset_dict.json").is_file():
        splits = datasets.load_from_disk(str(folder))
    elif (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file():
        rows = datasets.load_from_disk(str(folder))
        splits = {source.split if rows.split is None else str(rows.split): rows}
    else:
        splits = datasets.load_dataset(str(folder.resolve()), source.configuration, streaming=True)
    _require_split(place, source, list(splits))
    return splits[source.split]


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
