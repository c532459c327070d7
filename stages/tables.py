"""Parquet tables in and out of stages. Light ground: imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.artifacts import DatasetRef, Ref, digest_of_file
from stages.errors import DataError


def read_rows(ref: Ref, *, columns: Sequence[str] = ()) -> list[dict[str, Any]]:
    """All rows of a data set, in file order.

    Raises DataError when the file cannot be read, has no rows, or lacks one of `columns`.
    """
    import pyarrow.parquet as parquet
    from pyarrow import ArrowException

    try:
        table = parquet.read_table(ref.path)
    except (OSError, ArrowException) as error:
        raise DataError(f"{ref.name}: {ref.path} cannot be read as Parquet ({error}); rerun the stage that made it") from error
    missing = sorted(set(columns) - set(table.column_names))
    if missing:
        raise DataError(f"{ref.name}: {ref.path} has no column {missing[0]!r}; it has {table.column_names}; check `from` in the recipe")
    if table.num_rows == 0:
        raise DataError(f"{ref.name}: {ref.path} has no rows; the stage that reads it needs at least one; widen the rule that emptied it")
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def write_rows(rows: Sequence[dict[str, Any]], stage_dir: Path, name: str, *, empty_rule: str) -> DatasetRef:
    """Write rows to `data/<name>.parquet` and return the handle.

    Raises DataError when there are no rows; `empty_rule` says which rule left none and what to change.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    if not rows:
        raise DataError(f"{stage_dir.parent.name}.{name} would be empty: {empty_rule}")
    path = stage_dir / "data" / f"{name}.parquet"
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(list(rows)), path, compression="zstd")
    return DatasetRef(
        name=f"{stage_dir.parent.name}.{name}", digest=digest_of_file(path), path=path, producer=stage_dir.name, rows=len(rows)
    )
