"""Parquet in and out of stages, and the errors a recipe's author meets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from stages.artifacts import DatasetRef, digest_of_file
from stages.errors import DataError
from stages.tables import read_rows, write_rows

ROWS = [{"problem_id": "b", "n": 2, "trace": None}, {"problem_id": "a", "n": 1, "trace": "x"}]


def test_write_rows_then_read_rows_gives_the_rows_in_order(new_stage: Callable[[str], Path]) -> None:
    stage_dir = new_stage("rejection_sampling")
    ref = write_rows(ROWS, stage_dir, "traces", empty_rule="none was right")
    assert read_rows(ref, columns=("problem_id", "n")) == ROWS
    assert (ref.name, ref.rows, ref.producer) == ("rejection_sampling.traces", 2, stage_dir.name)
    assert ref.path == stage_dir / "data" / "traces.parquet"
    assert ref.digest == digest_of_file(ref.path)


def test_write_rows_same_rows_give_the_same_digest(new_stage: Callable[[str], Path]) -> None:
    first, second = (write_rows(ROWS, new_stage("fusion"), "traces", empty_rule="") for _ in range(2))
    assert first.digest == second.digest


def test_write_rows_without_rows_is_a_data_error_with_the_rule(new_stage: Callable[[str], Path]) -> None:
    stage_dir = new_stage("pass_rates")
    with pytest.raises(DataError, match=r"pass_rates\.band would be empty: no pass rate lies in the band; widen `band`"):
        write_rows([], stage_dir, "band", empty_rule="no pass rate lies in the band; widen `band`")
    assert not (stage_dir / "data").exists()


def test_read_rows_missing_column_names_it_and_those_there(problems: Callable[[Sequence[dict[str, Any]]], DatasetRef]) -> None:
    with pytest.raises(DataError, match=r"curation\.rl: .* has no column 'answer'; it has \['problem_id', 'n', 'trace'\]"):
        read_rows(problems(ROWS), columns=("problem_id", "answer"))


def test_read_rows_empty_table_is_a_data_error(tmp_path: Path) -> None:
    import pyarrow as pa

    path = tmp_path / "empty.parquet"
    parquet.write_table(pa.table({"question": pa.array([], pa.string())}), path)
    with pytest.raises(DataError, match="has no rows"):
        read_rows(DatasetRef(name="x.y", digest="", path=path, producer="given", rows=0))


@pytest.mark.parametrize("content", [None, b"", b"not a table"])
def test_read_rows_file_that_is_no_parquet_is_a_data_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "broken.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.y: .* cannot be read as Parquet"):
        read_rows(DatasetRef(name="x.y", digest="", path=path, producer="given", rows=0))
