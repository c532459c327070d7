"""Reading of sources: every kind, and what goes wrong in real files."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyarrow import parquet

from stages.artifacts import digest_of_file
from stages.config import Curation
from stages.errors import DataError
from stages.sources import RawRow, read_source, sources_in_order

PLAIN = [{"question": f"item {number}?", "answer": str(number)} for number in range(5)]
TEXTS = [
    "caf\u00e9",
    "cafe\u0301",
    "\u05de\u05d4 \u05d4\u05e1\u05db\u05d5\u05dd \u202e12\u202c",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 + \U0001f600 = ?",
    "zero\u200bwidth\ufeff",
    "line\nbreak\r\nand\ttab, \"quotes\" 'single' \\back",
    "\x00 nul and \x85 next line \u2028 separator",
    "",
]


def read(**source: Any) -> list[RawRow]:
    settings = {"sources": [source], "benchmarks": {"b": [{"kind": "reasoning_gym", "family": "products", "size": 2}]}, "pools": {}}
    return list(read_source(sources_in_order(Curation.model_validate(settings), 0)[0]))


def pairs(rows: list[RawRow]) -> list[tuple[str | None, str | None]]:
    return [(row.question, row.answer) for row in rows]


def bad(rows: list[RawRow]) -> dict[int, str]:
    return {row.row_number: row.unreadable for row in rows if row.unreadable is not None}


def write(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Write rows in the form that the name asks for; returns the source."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".duckdb":
        with duckdb.connect(path) as database:
            database.from_arrow(pa.Table.from_pylist(rows)).create("problems")
        return {"kind": "duckdb", "path": str(path), "table": "problems"}
    else:
        import datasets

        datasets.Dataset.from_list(rows).save_to_disk(path)
        return {"kind": "huggingface", "name": str(path)}
    return {"kind": "file", "path": str(path)}


KINDS = ("a.jsonl", "a.parquet", "a.csv", "a.duckdb", "a_dataset")


@pytest.mark.parametrize("name", KINDS)
def test_sources_every_kind_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / name, [row | {"id": f"r{index}", "work": "so"} for index, row in enumerate(PLAIN)])
    rows = read(**source, row_id="id", trace="work", family="items", id="named")
    assert pairs(rows) == [(row["question"], row["answer"]) for row in PLAIN]
    assert [row.row_number for row in rows] == [1, 2, 3, 4, 5]
    assert {(row.source, row.family, row.trace, row.row_id) for row in rows} >= {("sources[0] named", "items", "so", "r0")}


@pytest.mark.parametrize("name", KINDS)
def test_sources_any_text_comes_through_unchanged(tmp_path: Path, name: str) -> None:
    rows = read(**write(tmp_path / name, [{"question": text, "answer": text} for text in TEXTS]))
    assert bad(rows) == {}
    kept = [text or None for text in TEXTS] if name.endswith(".csv") else TEXTS  # CSV has no empty text
    assert pairs(rows) == [(text, text) for text in kept]


@pytest.mark.parametrize("name", KINDS)
def test_sources_nulls_are_missing_values_not_text(tmp_path: Path, name: str) -> None:
    rows = read(**write(tmp_path / name, [*PLAIN, {"question": None, "answer": "1"}, {"question": "q", "answer": None}]))
    assert pairs(rows)[5:] == [(None, "1"), ("q", None)]


@pytest.mark.parametrize("name", KINDS)
def test_sources_a_row_of_ten_megabytes_is_read(tmp_path: Path, name: str) -> None:
    rows = read(**write(tmp_path / name, [{"question": "word " * (2 << 20), "answer": "1"}, *PLAIN]))
    assert [len(row.question or "") for row in rows][:2] == [10 << 20, 7]


@pytest.mark.parametrize("name", KINDS)
def test_sources_a_missing_column_names_the_nearest_one(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / name, [{"questions": "a", "answer": "b"}])
    with pytest.raises(DataError, match=r"sources\[0\] .* has no column 'question'; its columns are .*did you mean 'questions'"):
        read(**source)


@pytest.mark.parametrize("name", KINDS)
def test_sources_without_rows_are_an_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    schema = pa.schema({"question": pa.string(), "answer": pa.string()})
    source = write(path, PLAIN)
    if path.suffix in (".jsonl", ".csv"):
        path.write_text("" if path.suffix == ".jsonl" else "question,answer\n")
    elif path.suffix == ".parquet":
        parquet.write_table(schema.empty_table(), path)
    elif path.suffix == ".duckdb":
        with duckdb.connect(path) as database:
            database.execute("delete from problems")
    else:
        import datasets

        source["name"] = str(tmp_path / "empty")
        datasets.Dataset.from_dict({"question": [], "answer": []}).save_to_disk(source["name"])
    with pytest.raises(DataError, match=r"has no rows; a source needs at least one|cannot be read as a data set after row 0"):
        read(**source)


def test_sources_mixed_types_in_one_column_cost_only_their_rows(tmp_path: Path) -> None:
    answers: list[Any] = ["x", 3, 2.5, True, None, ["a"], {"b": 1}, float("nan"), 10**30]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps({"question": "q", "answer": answer}) + "\n" for answer in answers))
    rows = read(kind="file", path=str(path))
    assert [row.answer for row in rows] == ["x", "3", "2.5", None, None, None, None, None, str(10**30)]
    assert bad(rows) == {
        4: "the answer is of type bool, the rule is text",
        6: "the answer is of type list, the rule is text",
        7: "the answer is of type dict, the rule is text",
    }


def test_sources_jsonl_bytes_that_are_not_utf8_cost_only_their_row(tmp_path: Path) -> None:
    good = json.dumps(PLAIN[0]).encode()
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + good + b"\r\n" + b'{"question": "caf\xe9", "answer": "1"}\n' + b"\x00\xff\n" + good)
    rows = read(kind="file", path=str(path))
    assert bad(rows) == {2: "not JSON in UTF-8: UnicodeDecodeError", 3: "not JSON in UTF-8: UnicodeDecodeError"}
    assert rows[1].row_text == '{"question": "caf\\xe9", "answer": "1"}'
    assert pairs(rows)[::3] == [("item 0?", "0")] * 2


def test_sources_csv_bad_rows_cost_only_themselves(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    lines = [
        b"\xef\xbb\xbfquestion,answer",
        b"item 0?,0",
        b"caf\xe9,1",
        b"too,many,fields",
        b"",
        b'"two\nlines, ""quoted""",2',
        b'"open" x,3',
        b"item 4?,4",
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    rows = read(kind="file", path=str(path))
    assert bad(rows) == {2: "not UTF-8", 3: "3 fields, the header has 2", 5: "not CSV: ',' expected after '\"'"}
    assert pairs([row for row in rows if row.unreadable is None]) == [("item 0?", "0"), ('two\nlines, "quoted"', "2"), ("item 4?", "4")]
    assert rows[1].row_text == "caf\\xe9,1"


def test_sources_csv_that_names_a_column_twice_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "twice.csv").write_text("question,answer,answer\na,b,c\n")
    with pytest.raises(DataError, match="names a column twice"):
        read(kind="file", path=str(tmp_path / "twice.csv"))


def test_sources_parquet_text_that_is_not_utf8_costs_only_its_row(tmp_path: Path) -> None:
    raw = pa.array([b"item 0?", b"caf\xe9", b"item 2?"])
    question = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    parquet.write_table(pa.table({"question": question, "answer": ["0", "1", "2"]}), tmp_path / "latin.parquet")
    rows = read(kind="file", path=str(tmp_path / "latin.parquet"))
    assert bad(rows) == {2: "not UTF-8"}
    assert pairs(rows)[::2] == [("item 0?", "0"), ("item 2?", "2")]


@pytest.mark.parametrize("keep", [0.3, 0.999])
def test_sources_truncated_parquet_names_the_file(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "torn.parquet"
    write(path, PLAIN * 200)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(DataError, match=r"torn.parquet cannot be read as Parquet after row 0 .*write the file again"):
        read(kind="file", path=str(path))


def test_sources_parquet_numbers_of_any_kind_become_text(tmp_path: Path) -> None:
    from decimal import Decimal

    write(tmp_path / "numbers.parquet", [{"question": "q", "answer": Decimal("12.50")}])
    assert pairs(read(kind="file", path=str(tmp_path / "numbers.parquet"))) == [("q", "12.50")]


def test_sources_file_of_another_revision_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "pinned.jsonl", PLAIN)
    assert len(read(**source, revision=digest_of_file(tmp_path / "pinned.jsonl")[:12])) == 5
    with pytest.raises(DataError, match=r"pinned.jsonl has the SHA-256 .*the rule is revision = 0000000"):
        read(**source, revision="0000000")


def test_sources_duckdb_table_that_is_missing_names_the_nearest_one(tmp_path: Path) -> None:
    source = write(tmp_path / "a.duckdb", PLAIN) | {"table": "problem"}
    with pytest.raises(DataError, match=r"has no table 'problem'; .*did you mean 'problems'"):
        read(**source)
    (tmp_path / "b.duckdb").write_bytes(b"no database" * 1000)
    with pytest.raises(DataError, match="cannot be read as a DuckDB file"):
        read(kind="duckdb", path=str(tmp_path / "b.duckdb"), table="problems")


def test_sources_duckdb_table_name_is_data_never_sql(tmp_path: Path) -> None:
    name = 'a"; drop table x; --'
    with duckdb.connect(tmp_path / "odd.duckdb") as database:
        database.execute("""create table "a""; drop table x; --" as select 'q' as question, '1' as answer""")
    assert pairs(read(kind="duckdb", path=str(tmp_path / "odd.duckdb"), table=name)) == [("q", "1")]


def test_sources_hugging_face_folder_of_data_files_and_splits(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    write(folder / "train.jsonl", PLAIN)
    write(folder / "test.jsonl", PLAIN[:2])
    assert len(read(kind="huggingface", name=str(folder))) == 5
    assert len(read(kind="huggingface", name=str(folder), split="test")) == 2
    with pytest.raises(DataError, match=r"has no split 'dev'; it has \['train', 'test'\]; mend `split`"):
        read(kind="huggingface", name=str(folder), split="dev")


def test_sources_hugging_face_code_in_a_folder_is_never_run(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    write(folder / "train.jsonl", PLAIN)
    (folder / "files.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    with pytest.raises(DataError, match="Dataset scripts are no longer supported"):
        read(kind="huggingface", name=str(folder))
    assert not Path("ran").exists()


def test_sources_hugging_face_hub_name_needs_a_revision_and_says_how_to_fetch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the rule is a pinned `revision`"):
        read(kind="huggingface", name="nobody/nothing")
    with pytest.raises(DataError, match="fetch it once: hf download nobody/nothing --repo-type dataset --revision 0123456789"):
        read(kind="huggingface", name="nobody/nothing", revision="0123456789")


def test_sources_answer_after_a_mark_is_what_follows_the_last_one(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": "3 #### so\n#### 72"}, {"question": "r", "answer": "72"}]
    found = read(**write(tmp_path / "marked.jsonl", rows), answer_after="####")
    assert found[0].answer == " 72"
    assert bad(found) == {2: "the answer holds no '####', after which the gold answer stands"}


def test_sources_first_row_comes_before_the_rest_was_read(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps(PLAIN[0]) + "\n" + "{broken\n" * 100_000)
    settings = {"sources": [{"kind": "file", "path": str(path)}], "benchmarks": {"b": [{"kind": "file", "path": str(path)}]}, "pools": {}}
    rows = read_source(sources_in_order(Curation.model_validate(settings), 0)[0])
    assert next(rows).question == "item 0?"
