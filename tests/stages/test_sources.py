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
from stages.chat import RESERVED
from stages.config import Curation, DuckDBSource
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


@pytest.mark.parametrize("strays", [(0,), (499,), (999,), (99, 899), (99, 100), (5, 6, 7, 500)])
def test_sources_csv_stray_quotes_cost_only_their_own_rows(tmp_path: Path, strays: tuple[int, ...]) -> None:
    lines = ['"' * (number in strays) + f"question {number},{number}" for number in range(1000)]
    (tmp_path / "stray.csv").write_text("\n".join(["question,answer", *lines]) + "\n")
    rows = read(kind="file", path=str(tmp_path / "stray.csv"))
    assert sorted(bad(rows)) == [number + 1 for number in strays]
    assert [row.row_text for row in rows if row.unreadable is not None] == [lines[number] for number in strays]
    good = [(f"question {number}", str(number)) for number in range(1000) if number not in strays]
    assert pairs([row for row in rows if row.unreadable is None]) == good


@pytest.mark.parametrize("end", ['for "x" here",3', '",3,extra', "for x here,3"])
def test_sources_csv_faulty_text_over_several_lines_counts_every_line_and_makes_no_row(tmp_path: Path, end: str) -> None:
    lines = ["question,answer", "item 0?,0", '"Solve:', "x, y", "a, b", end]
    (tmp_path / "faulty.csv").write_text("\n".join(lines) + "\n")
    rows = read(kind="file", path=str(tmp_path / "faulty.csv"))
    assert pairs(rows) == [("item 0?", "0"), *[(None, None)] * 4]
    assert [row.row_text for row in rows[1:]] == lines[2:]
    assert all(reason.endswith("(in a record of 4 lines)") for reason in bad(rows).values())


def test_sources_csv_records_that_legally_span_lines_are_one_row_each(tmp_path: Path) -> None:
    texts = ["a,1\nb,2\nc,3\n", "x, y\r\n\r\nz", '"\n"', "first\n\nsecond"] * 50
    source = write(tmp_path / "long.csv", [{"question": text, "answer": "1"} for text in texts])
    assert pairs(read(**source)) == [(text, "1") for text in texts]


def test_sources_csv_full_of_quotes_that_never_close_ends_in_bad_rows(tmp_path: Path) -> None:
    (tmp_path / "quotes.csv").write_text("question,answer\n" + '"x ""y"",1\n' * 3000)
    rows = read(kind="file", path=str(tmp_path / "quotes.csv"))
    assert (len(rows), len(bad(rows))) == (3000, 3000)


def test_sources_csv_empty_fields_past_the_header_are_nothing(tmp_path: Path) -> None:
    (tmp_path / "wide.csv").write_text("question,answer\na,b,\nc,d,,,\ne,f,,g\nh\n")
    rows = read(kind="file", path=str(tmp_path / "wide.csv"))
    assert pairs(rows)[:2] == [("a", "b"), ("c", "d")]
    assert bad(rows) == {3: "4 fields, the header has 2", 4: "1 fields, the header has 2"}


def test_sources_csv_header_with_an_open_quote_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "open.csv").write_text('"question,answer\na,b\n')
    with pytest.raises(DataError, match=r"the header of .*open.csv is not CSV"):
        read(kind="file", path=str(tmp_path / "open.csv"))


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


def test_sources_whole_floats_are_integers_where_integers_are_asked_for(tmp_path: Path) -> None:
    from decimal import Decimal

    source = write(
        tmp_path / "floats.parquet", [{"question": "q", "answer": value} for value in (5.0, -2.0, 2.5, 1e30, float("inf"), None)]
    )
    assert [row.answer for row in read(**source, answer_type="integer")] == ["5", "-2", "2.5", "1e+30", "inf", None]
    assert [row.answer for row in read(**source)][:2] == ["5.0", "-2.0"]
    source = write(
        tmp_path / "decimals.parquet", [{"question": "q", "answer": Decimal("12.00")}, {"question": "q", "answer": Decimal("1.25")}]
    )
    assert [row.answer for row in read(**source, answer_type="integer")] == ["12", "1.25"]


FAR = [0, 10**7, 2**31 - 1]
"""Days since 1970; the latter two are past the year 9999."""


@pytest.mark.parametrize("name", ["a.parquet", "a.duckdb", "a_dataset", "files"])
def test_sources_date_that_python_cannot_hold_costs_only_its_row_and_nothing_when_unused(tmp_path: Path, name: str) -> None:
    texts = ["item 0?", "item 1?", "item 2?"]
    table = pa.table({"question": texts, "answer": texts, "day": pa.array(FAR, pa.int32()).cast(pa.date32())})
    source: dict[str, Any] = {"kind": "huggingface", "name": str(tmp_path / name)}
    if name == "a.parquet":
        parquet.write_table(table, tmp_path / name)
        source = {"kind": "file", "path": str(tmp_path / name)}
    elif name == "a.duckdb":
        with duckdb.connect(tmp_path / name) as database:
            database.execute("create table problems as select 'item ' || number || '?' as question, question as answer, day from (values "
                             "(0, '2020-01-01'::date), (1, '290000-01-01'::date), (2, 'infinity'::date)) as rows(number, day)")  # fmt: skip
        source = {"kind": "duckdb", "path": str(tmp_path / name), "table": "problems"}
    elif name == "a_dataset":
        import datasets

        datasets.Dataset(table).save_to_disk(tmp_path / name)
    else:
        (tmp_path / name).mkdir()
        parquet.write_table(table, tmp_path / name / "train.parquet")
    assert pairs(read(**source)) == [(text, text) for text in texts]
    reasons = bad(read(**source, row_id="day"))
    assert reasons[1] == "the row id is of type date, the rule is text"
    assert reasons[2].startswith("a value out of bounds: ")
    assert reasons[3].startswith("a value out of bounds: ")


@pytest.mark.parametrize("column", ["question", "answer", "work"])
@pytest.mark.parametrize("marker", RESERVED)
def test_sources_text_with_a_marker_of_the_chat_format_is_unreadable(tmp_path: Path, column: str, marker: str) -> None:
    good = {"question": "is a < b |> c?", "answer": "<|im_|>", "work": "think>"}
    source = write(tmp_path / "a.jsonl", [good, good | {column: f"say {marker} now"}])
    what = "trace" if column == "work" else column
    assert bad(read(**source, trace="work")) == {2: f"the {what} holds {marker}, a marker of the chat format"}


def test_sources_marker_before_the_gold_answer_is_no_fault(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"question": "q", "answer": "<think>so</think>#### 7"}])
    assert pairs(read(**source, answer_after="####")) == [("q", " 7")]


def test_sources_missing_column_lists_the_nearest_twenty(tmp_path: Path) -> None:
    source = write(tmp_path / "a.parquet", [{f"c{number}": "x" for number in range(100)} | {"questions": "q"}])
    with pytest.raises(DataError, match=r"its columns are \['questions', ('c\d+', ){18}'c\d+'\] and 81 more; did you mean 'questions'"):
        read(**source)


def test_sources_path_that_is_no_file_says_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(DataError, match=r"folder.jsonl is a folder; a source must be a file; name a file in it"):
        read(kind="file", path=str(tmp_path / "folder.jsonl"))
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(DataError, match=r"link.jsonl is a link to .*gone.jsonl, which is missing; .* mend the link"):
        read(kind="duckdb", path=str(tmp_path / "link.jsonl"), table="problems")


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


def test_sources_duckdb_log_beside_the_file_is_read_and_counts_among_its_files(tmp_path: Path) -> None:
    write(tmp_path / "whole.duckdb", PLAIN)
    with duckdb.connect(tmp_path / "whole.duckdb") as database:
        database.execute("pragma disable_checkpoint_on_shutdown")
        database.execute("insert into problems values ('late', '9')")
    path = tmp_path / "whole.duckdb"
    source = DuckDBSource(path=path, table="problems")
    assert source.files() == (path, tmp_path / "whole.duckdb.wal")
    config = Curation.model_validate({"sources": [source], "benchmarks": {"b": [source]}, "pools": {}})
    assert set(config.files()) == set(source.files())
    assert pairs(read(kind="duckdb", path=str(path), table="problems"))[-1] == ("late", "9")
    (tmp_path / "whole.duckdb.wal").unlink()
    assert source.files() == (path,)


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


def test_sources_hugging_face_folder_of_one_data_set_keeps_to_its_own_split(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list(PLAIN, split="train").save_to_disk(tmp_path / "named")
    assert len(read(kind="huggingface", name=str(tmp_path / "named"))) == 5
    with pytest.raises(DataError, match=r"has no split 'test'; it has \['train'\]; mend `split`"):
        read(kind="huggingface", name=str(tmp_path / "named"), split="test")
    datasets.Dataset.from_list(PLAIN).save_to_disk(tmp_path / "unnamed")
    assert len(read(kind="huggingface", name=str(tmp_path / "unnamed"), split="test")) == 5
    datasets.DatasetDict({"test": datasets.Dataset.from_list(PLAIN[:2])}).save_to_disk(tmp_path / "both")
    assert len(read(kind="huggingface", name=str(tmp_path / "both"), split="test")) == 2


def test_sources_hugging_face_pictures_and_sounds_are_never_decoded(tmp_path: Path) -> None:
    import datasets

    media = pa.array([{"bytes": b"no picture", "path": None}] * 2, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    table = pa.table({"question": ["q", "r"], "answer": ["1", "2"], "picture": media, "sound": media})
    kinds = {"question": datasets.Value("string"), "answer": datasets.Value("string")}
    features = datasets.Features({**kinds, "picture": datasets.Image(), "sound": datasets.Audio()})
    data = datasets.Dataset(table, info=datasets.DatasetInfo(features=features))
    data.save_to_disk(tmp_path / "saved")
    (tmp_path / "files").mkdir()
    data.to_parquet(tmp_path / "files" / "train.parquet")
    for name in ("saved", "files"):
        assert pairs(read(kind="huggingface", name=str(tmp_path / name))) == [("q", "1"), ("r", "2")]
        assert len(bad(read(kind="huggingface", name=str(tmp_path / name), answer="sound"))) == 2


def test_sources_hugging_face_column_of_mixed_types_gives_its_values(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    answers: list[Any] = ["x", 3, None, ["a"]]
    write(tmp_path / "files" / "train.jsonl", [{"question": "q", "answer": answer} for answer in answers])
    rows = read(kind="huggingface", name=str(tmp_path / "files"))
    assert [row.answer for row in rows] == ["x", "3", None, None]
    assert bad(rows) == {4: "the answer is of type list, the rule is text"}


def test_sources_hugging_face_empty_file_names_the_source_and_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").touch()
    with pytest.raises(DataError, match=r"sources\[0\] files:train: .*files cannot be read .*a file of it is empty.*; mend the folder"):
        read(kind="huggingface", name=str(tmp_path / "files"))


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


@pytest.mark.parametrize("setting", ["family", "id"])
def test_sources_empty_name_is_refused_as_a_setting(setting: str) -> None:
    with pytest.raises(ValueError, match="at least 1 character"):
        read(kind="file", path="a.jsonl", **{setting: ""})
