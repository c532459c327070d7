"""Curation as a stage: sources in, Parquet out, and the errors a user can meet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet

from stages.artifacts import StageOutput, digest_of_file
from stages.config import Curation
from stages.curation import DATASETS, MARTS, check_contracts, run
from stages.data_report import ROWS
from stages.errors import DataError
from stages.records import read_records

FAMILIES = ("chain_sum", "leg_counting", "products")


def generated(family: str, size: int, **parameters: int) -> dict[str, Any]:
    return {"kind": "reasoning_gym", "family": family, "size": size, "parameters": parameters}


SUMS = generated("chain_sum", 200, min_terms=3, max_terms=5, min_digits=1, max_digits=2)
LEGS = generated("leg_counting", 100, min_animals=2, max_animals=4, max_instances=9)
PRODUCTS = generated("products", 100, min_terms=2, max_terms=3, min_digits=1, max_digits=2)
HELD_OUT = {
    "standard": [SUMS | {"size": 40}, LEGS | {"size": 40}, PRODUCTS | {"size": 40}],
    "hard": [generated("chain_sum", 40, min_terms=6, max_terms=8)],
}
POOLS = {"cold_start": {"share": 0.4, "with_trace": True}, "rl": {"share": 0.4}, "preference": {"share": 0.2}}


def curate(folder: Path, seed: int = 0, **settings: Any) -> StageOutput:
    stage_dir = folder / "curation" / "0123456789abcdef"
    stage_dir.mkdir(parents=True, exist_ok=True)
    defaults = {"sources": [SUMS, LEGS, PRODUCTS], "benchmarks": HELD_OUT, "benchmark_size": 24, "pools": POOLS}
    return run(Curation.model_validate(defaults | settings), {}, stage_dir, seed)


def rows_of(output: StageOutput, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = parquet.read_table(output.outputs[name].path).to_pylist()
    return rows


def write_jsonl(path: Path, rows: list[Any]) -> dict[str, Any]:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return {"kind": "file", "path": str(path)}


def questions(start: int, count: int) -> list[dict[str, Any]]:
    return [{"question": f"item {number}?", "answer": str(number)} for number in range(start, start + count)]


def test_curation_generated_sources_give_disjoint_pools_and_benchmarks(tmp_path: Path) -> None:
    output = curate(tmp_path)
    assert list(output.outputs) == ["benchmarks", "cold_start", "rl", "preference"]
    assert sorted(path.name for path in (tmp_path / "curation/0123456789abcdef/data").glob("*.parquet")) == [
        "benchmarks.parquet",
        "cold_start.parquet",
        "contamination.parquet",
        "contamination_counts.parquet",
        "dropped.parquet",
        "families.parquet",
        "funnel.parquet",
        "numbered_twins.parquet",
        "preference.parquet",
        "problems.parquet",
        "quarantine.parquet",
        "rl.parquet",
        "sources.parquet",
    ]
    ids = {name: [row["problem_id"] for row in rows_of(output, name)] for name in output.outputs}
    every = [problem for pool in ids.values() for problem in pool]
    assert len(every) == len(set(every))
    for name, handle in output.outputs.items():
        assert handle.kind == "dataset"
        assert (handle.name, handle.rows, handle.digest) == (f"curation.{name}", len(ids[name]), digest_of_file(handle.path))
        assert handle.producer == "0123456789abcdef"
    schema = parquet.read_schema(output.outputs["rl"].path)
    assert schema.names == ["problem_id", "question", "answer", "answer_type", "grading", "family", "source", "trace", "scale"]
    assert parquet.read_schema(output.outputs["benchmarks"].path).names == ["benchmark", *schema.names]
    benchmarks = rows_of(output, "benchmarks")
    assert [sum(row["benchmark"] == name for row in benchmarks) for name in ("hard", "standard")] == [24, 24]
    standard = [row["family"] for row in benchmarks if row["benchmark"] == "standard"]
    assert {family: standard.count(family) for family in FAMILIES} == dict.fromkeys(FAMILIES, 8)
    assert all(row["trace"] for row in rows_of(output, "cold_start"))
    assert {row["family"] for row in rows_of(output, "rl")[:24]} == set(FAMILIES)  # mixed, not family after family


def test_curation_keeps_most_of_every_generated_family(tmp_path: Path) -> None:
    metrics = curate(tmp_path).metrics
    for family in FAMILIES:
        duplicates = metrics.get(f"rows/duplicate/{family}", 0)
        assert metrics[f"rows/kept/{family}"] >= 0.9 * (metrics[f"rows/read/{family}"] - duplicates)


def test_curation_twice_gives_equal_bytes_and_another_seed_others(tmp_path: Path) -> None:
    first, again, other = (curate(tmp_path / name, seed) for name, seed in (("a", 3), ("b", 3), ("c", 4)))
    digests = [{name: handle.digest for name, handle in output.outputs.items()} for output in (first, again, other)]
    assert digests[0] == digests[1]
    assert first.metrics == again.metrics
    assert all(digests[0][name] != digests[2][name] for name in digests[0])


def test_curation_over_a_folder_cut_short_starts_afresh(tmp_path: Path) -> None:
    data = tmp_path / "curation/0123456789abcdef/data"
    data.mkdir(parents=True)
    (data / "curation.duckdb").write_bytes(b"half a database")
    assert curate(tmp_path).outputs["rl"].digest == curate(tmp_path / "clean").outputs["rl"].digest


def test_curation_metrics_account_for_every_row_and_are_recorded(tmp_path: Path) -> None:
    output = curate(tmp_path)
    metrics = output.metrics
    rules = ("quarantined", "duplicate", "duplicate_other_answer", "same_question", "open_r1", "near_duplicate")
    lost = sum(metrics.get(f"rows/{rule}", 0) for rule in rules)
    assert metrics["rows/read"] == 400
    assert metrics["rows/read"] == lost + metrics["rows/kept"]
    assert metrics["rows/kept"] == sum(len(rows_of(output, pool)) for pool in POOLS)
    records = list(read_records(tmp_path / "curation/0123456789abcdef/metrics.jsonl"))
    assert [record["metrics"] for record in records if "metrics" in record] == [metrics]
    assert [7, 7, "source"] in [record["progress"] for record in records if "progress" in record]


def test_curation_database_holds_every_table_for_reading(tmp_path: Path) -> None:
    curate(tmp_path)
    with duckdb.connect(str(tmp_path / "curation/0123456789abcdef/data/curation.duckdb"), read_only=True) as database:
        assert database.execute("select rows from funnel where step = 'read' and family = 'all'").fetchall() == [(400,)]


def test_curation_file_sources_bad_rows_are_quarantined_with_line_numbers(tmp_path: Path) -> None:
    lines = [
        *questions(0, 36),
        "",
        "{broken",
        '["list"]',
        {"question": "no answer"},
        {"question": 7, "answer": "7"},
        {"question": "numeric?", "answer": 12},
        {"question": "lone?", "answer": "\ud800"},
    ]
    source = write_jsonl(tmp_path / "problems.jsonl", lines) | {"max_bad_share": 0.2, "family": "items"}
    held_out = write_jsonl(tmp_path / "held_out.jsonl", questions(30, 10))
    output = curate(tmp_path, sources=[source], benchmarks={"test": [held_out]}, pools={"rl": {"share": 1}})
    quarantine = parquet.read_table(tmp_path / "curation/0123456789abcdef/data/quarantine.parquet").to_pylist()
    assert [(row["row_number"], row["reason"]) for row in sorted(quarantine, key=lambda row: row["row_number"])] == [
        (38, "not JSON in UTF-8: JSONDecodeError"),
        (39, "a JSON list, the rule is an object"),
        (40, "the answer is missing"),
        (41, "the question is of type int, the rule is text"),
        (43, "not JSON in UTF-8: UnicodeEncodeError"),
    ]
    assert quarantine[0]["source"] == "sources[0] problems.jsonl"
    rows = rows_of(output, "rl")
    assert sorted(row["question"] for row in rows) == sorted([f"item {number}?" for number in range(30)] + ["numeric?"])
    assert {row["family"] for row in rows} == {"items"}
    assert [(row["answer"], row["trace"], row["scale"]) for row in rows if row["question"] == "numeric?"] == [("12", None, 0)]


def test_curation_parquet_and_jsonl_with_equal_rows_give_equal_problems(tmp_path: Path) -> None:
    rows = [{"prompt": f"item {number}?", "gold": str(number), "work": f"so {number}"} for number in range(20)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "problems.parquet")
    write_jsonl(tmp_path / "problems.jsonl", rows)
    held_out = write_jsonl(tmp_path / "held_out.jsonl", questions(100, 4))
    found = []
    for suffix in ("parquet", "jsonl"):
        source = {"kind": "file", "path": str(tmp_path / f"problems.{suffix}"), "question": "prompt", "answer": "gold", "trace": "work"}
        pools = {"cold_start": {"share": 1, "with_trace": True}}
        output = curate(tmp_path / suffix, sources=[source], benchmarks={"test": [held_out]}, pools=pools)
        found.append([{name: value for name, value in row.items() if name != "source"} for row in rows_of(output, "cold_start")])
    assert found[0] == found[1]
    assert sorted((row["question"], row["answer"], row["trace"]) for row in found[0]) == sorted(tuple(row.values()) for row in rows)


def test_curation_too_many_bad_rows_names_file_share_rule_and_examples(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "bad.jsonl", [*questions(0, 8), "{broken", "{also broken"])
    message = r"(?s)sources\[0\] bad.jsonl: 2 of 10 rows \(20.0%\) of .*bad.jsonl.*max_bad_share = 0.05.*raise max_bad_share"
    with pytest.raises(DataError, match=message + r".*row 9: not JSON.*\{broken"):
        curate(tmp_path, sources=[source])


def test_curation_bad_share_at_its_limit_is_accepted(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "bad.jsonl", [*questions(0, 8), "{broken", "{also broken"]) | {"max_bad_share": 0.2}
    assert len(rows_of(curate(tmp_path, sources=[source], pools={"rl": {"share": 1}}), "rl")) == 8


@pytest.mark.parametrize(
    ("name", "content", "settings", "message"),
    [
        ("problem.jsonl", None, {}, r"sources\[0\] problem.jsonl: .*problem.jsonl is missing; .*mean .*problems.jsonl"),
        ("problems.txt", "question,answer\n", {}, r"ends in '.txt'; the rule is one of .csv, .jsonl, .parquet;"),
        ("empty.jsonl", "\n\n", {}, r"empty.jsonl has no rows; a source needs at least one"),
        ("column.jsonl", '{"questions": "a", "answer": "b"}\n', {}, r"no column 'question'; .*'answer'.*did you mean 'questions'"),
        ("trace.jsonl", '{"question": "a", "answer": "b"}\n', {"trace": "solution"}, r"no column 'solution'"),
        ("torn.parquet", "PAR1 and nothing more", {}, r"torn.parquet cannot be read as Parquet"),
    ],
)
def test_curation_source_that_cannot_be_used_says_what_and_how_to_mend(
    tmp_path: Path, name: str, content: str | None, settings: dict[str, str], message: str
) -> None:
    (tmp_path / "problems.jsonl").write_text("{}\n")
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        curate(tmp_path, sources=[{"kind": "file", "path": str(tmp_path / name)} | settings])


@pytest.mark.parametrize("parameters", [{"max_termz": 3}, {"min_terms": 9, "max_terms": 2}])
def test_curation_parameters_reasoning_gym_refuses_name_the_source(tmp_path: Path, parameters: dict[str, int]) -> None:
    with pytest.raises(DataError, match=r"benchmarks.standard\[0\] chain_sum: reasoning-gym cannot make chain_sum.*mend `parameters`"):
        curate(tmp_path, benchmarks={"standard": [SUMS | {"parameters": parameters}]})


def test_curation_pool_without_problems_is_an_error_with_the_counts(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "plain.jsonl", questions(0, 20))
    with pytest.raises(DataError, match=r"pool cold_start is empty \(share 1, with_trace True\).*kept 20.*pool none 20"):
        curate(tmp_path, sources=[source], pools={"cold_start": {"share": 1, "with_trace": True}})


def test_curation_benchmark_that_another_holds_already_is_an_error(tmp_path: Path) -> None:
    held_out = write_jsonl(tmp_path / "held_out.jsonl", questions(0, 10))
    with pytest.raises(DataError, match=r"benchmarks.second has no problem left"):
        curate(tmp_path, benchmarks={"first": [held_out], "second": [held_out]})


def test_curation_questions_are_data_never_sql(tmp_path: Path) -> None:
    nasty = "'); drop table raw_rows; -- $1 {x}"
    source = write_jsonl(tmp_path / "it's.jsonl", [{"question": nasty, "answer": "it's 7"}, *questions(0, 5)])
    output = curate(tmp_path, sources=[source], pools={"rl": {"share": 1}}, benchmarks={"it's; --": [SUMS]})
    assert nasty in [row["question"] for row in rows_of(output, "rl")]


def test_contracts_broken_rows_are_named_with_their_rule(tmp_path: Path) -> None:
    curate(tmp_path)
    with duckdb.connect(str(tmp_path / "curation/0123456789abcdef/data/curation.duckdb"), read_only=True) as database:
        tables = {name: database.table(name).to_arrow_table() for name in MARTS}
    check_contracts(tables)
    pools = tables["pools"]
    ids = pools["problem_id"].to_pylist()
    breaks: list[tuple[str, Any, str]] = [
        ("problem_id", [*ids[:-1], ids[0]], r"table pools, column problem_id: 1 rows break the contract `unique"),
        ("answer", [None, *pools["answer"].to_pylist()[1:]], r"column answer: 1 rows break the contract `not_null"),
        ("question", ["", "", *pools["question"].to_pylist()[2:]], r"column question: 2 rows break the contract `min_length: 1`"),
        ("pool", ["other", *pools["pool"].to_pylist()[1:]], r"column pool: 1 rows break the contract `accepted_values"),
        ("scale", [-1, *pools["scale"].to_pylist()[1:]], r"column scale: 1 rows break the contract `range"),
    ]
    for column, values, message in breaks:
        index = pools.column_names.index(column)
        broken = pools.set_column(index, column, pa.array(values, type=pools.schema.field(column).type))
        with pytest.raises(DataError, match=message):
            check_contracts(tables | {"pools": broken})
    with pytest.raises(DataError, match="its contract says"):
        check_contracts(tables | {"pools": pools.drop_columns(["trace"])})


def test_curation_report_agrees_with_the_metrics_and_shows_what_was_dropped(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "items.jsonl", [*questions(0, 40), {"question": "Is 7 | 49 prime?", "answer": "No"}, "{broken"])
    metrics = curate(tmp_path, sources=[source | {"id": "items", "licence": "CC0"}, LEGS], pools={"rl": {"share": 0.5}}).metrics
    folder = tmp_path / "curation/0123456789abcdef/report"
    report = json.loads((folder / "data_report.json").read_text())
    steps = {step["step"]: step for step in report["funnel"]}
    assert steps["read"]["left"] == metrics["rows/read"] == 142
    assert report["funnel"][-1]["left"] == metrics["rows/kept"] == sum(report["pools"].values())
    assert steps["true or false"]["rows"] == metrics["rows/true_or_false"] == 1
    assert [example["evidence"] for example in report["dropped_examples"]["true or false"]] == ["No"]
    sources = {row["source"]: row for row in report["sources"]}
    assert sources["sources[0] items"]["licence"] == "CC0"
    assert (sources["sources[0] items"]["rows"], sources["sources[0] items"]["quarantined"]) == (42, 1)
    assert {row["family"]: row["problems"] for row in report["families"]}["file"] == 40
    text = (folder / "data_report.md").read_text()
    assert "Is 7 &#124; 49 prime?" in text  # a cell stays a cell
    assert (folder / "funnel.png").read_bytes().startswith(b"\x89PNG")


def test_curation_report_tables_hold_some_rows_of_each_rule_and_first_those_that_drop(tmp_path: Path) -> None:
    asked = [{"question": f"what is {number} plus {number + 1}", "answer": "7"} for number in range(ROWS + 50)]
    held_out = write_jsonl(tmp_path / "held_out.jsonl", asked[3:4])
    source = write_jsonl(tmp_path / "items.jsonl", asked)
    curate(tmp_path, sources=[source], benchmarks={"held_out": [held_out]}, pools={"rl": {"share": 1}})
    rows = parquet.read_table(tmp_path / "curation/0123456789abcdef/report/contamination.parquet").to_pylist()
    assert [(row["rule"], row["question"]) for row in rows[:1]] == [("same_question", "what is 3 plus 4")]
    assert [row["rule"] for row in rows[1:]] == ["masked_number"] * ROWS


def test_curation_near_duplicates_off_and_answers_that_differ_are_counted(tmp_path: Path) -> None:
    words = " ".join(f"w{chr(97 + number // 26)}{chr(97 + number % 26)}" for number in range(120))
    asked = [
        {"question": f"{words} {word} {words[::-1]}", "answer": answer} for word, answer in (("one", "1"), ("two", "2"), ("three", "1"))
    ]
    source = write_jsonl(tmp_path / "items.jsonl", asked)
    settings: dict[str, Any] = {"sources": [source], "pools": {"rl": {"share": 1}}}
    on = curate(tmp_path / "on", **settings).metrics
    assert (on["rows/near_duplicate"], on["near_duplicates/other_answer"], on["rows/kept"]) == (1, 1, 2)
    off = curate(tmp_path / "off", **settings, near_duplicate_similarity=0).metrics
    assert (off["near_duplicates/compared"], off["near_duplicates/other_answer"], off["rows/kept"]) == (0, 0, 3)


@pytest.mark.parametrize("similarity", [0.1, 0.49])
def test_curation_similarity_that_minhash_cannot_find_is_refused(similarity: float) -> None:
    settings = {"sources": [SUMS], "benchmarks": HELD_OUT, "pools": POOLS, "near_duplicate_similarity": similarity}
    with pytest.raises(ValueError, match=rf"near_duplicate_similarity is {similarity:g}; the rule is 0.5 to 1, or 0 for off"):
        Curation.model_validate(settings)


def test_curation_report_takes_any_text_for_text(tmp_path: Path) -> None:
    nasty = [{"question": f"$x_{{{number}}} < </td> | `\u202e\u05d0 [a](b) \U0001f600", "answer": "7"} for number in range(8)]
    source = write_jsonl(tmp_path / "nasty.jsonl", nasty) | {"family": "_$f \u05d0^"}
    curate(tmp_path, sources=[source], pools={"rl": {"share": 1}})
    assert "</td>" not in (tmp_path / "curation/0123456789abcdef/report/data_report.md").read_text()


def test_curation_source_named_in_the_list_is_as_if_it_stood_in_the_recipe(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "items.jsonl", questions(0, 20))
    listed = tmp_path / "sources.yaml"
    listed.write_text(f"items:\n  {{kind: file, path: {tmp_path / 'items.jsonl'}, licence: CC0}}\n")
    inline = {"kind": "file", "path": str(tmp_path / "items.jsonl"), "licence": "CC0", "id": "items"}
    settings = {"benchmarks": {"held_out": [SUMS]}, "pools": {"rl": {"share": 1}}}
    named = Curation.model_validate(settings | {"sources": ["items"], "sources_file": str(listed)})
    assert named.sources == Curation.model_validate(settings | {"sources": [inline]}).sources
    assert named.files() == (tmp_path / "items.jsonl",)
    with pytest.raises(ValueError, match=r"describes no source 'item'; the rule is one of \['items'\]"):
        Curation.model_validate(settings | {"sources": ["item"], "sources_file": str(listed)})


def test_curation_example_list_of_sources_is_valid() -> None:
    names = list(yaml.safe_load((DATASETS / "sources.yaml").read_text()))
    settings = {"benchmarks": {"held_out": [SUMS]}, "pools": {"rl": {"share": 1}}, "sources_file": str(DATASETS / "sources.yaml")}
    assert [source.id for source in Curation.model_validate(settings | {"sources": names}).sources] == names
