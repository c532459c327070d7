"""`posttrain sql`: questions to the data of a run, and that nothing else can be read or changed."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyarrow import parquet

from flows.history import Finished, keep, open_run
from flows.plan import stage_folder
from flows.questions import QUESTIONS, answer, opened, questions, tables_of
from stages.config import Curation
from stages.curation import run
from stages.errors import ArtifactError, ConfigError

ROOT = Path(__file__).parents[2]
QUESTION = "what is the sum of one apple and two apples"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with one curation of five rows, and rollouts of two stages."""
    home = tmp_path_factory.mktemp("home")
    training = [(QUESTION, "3"), (QUESTION.upper() + "?", "3"), ("Prove that 1 = 1.", "clear"), ("another thing", "4"), (None, "5")]
    for name, rows in (("training", training), ("held_out", [("Another  thing", "4")])):
        (home / f"{name}.jsonl").write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    source = {"kind": "file", "path": str(home / "training.jsonl"), "max_bad_share": 1.0}
    config = Curation.model_validate(
        {"sources": [source], "benchmarks": {"test": [source | {"path": str(home / "held_out.jsonl")}]}, "pools": {"rl": {"share": 1}}}
    )
    nodes = {}
    for node, stage in (("curation", "curation"), ("rl_one", "reasoning_rl"), ("rl_two", "reasoning_rl")):
        nodes[node] = Finished(stage=stage, fingerprint=f"{node}{'0' * 64}")
        folder = stage_folder(home, stage, nodes[node].fingerprint)
        (folder / "data").mkdir(parents=True)
        if stage == "curation":
            run(config, {}, folder, 0)
        else:
            rollouts = [{"step": step, "problem_id": "a" * 16, "reward": 0.5} for step in (1, 1, 2)]
            extra = {"why": "easy"} if node == "rl_two" else {}
            parquet.write_table(pa.Table.from_pylist([row | extra for row in rollouts]), folder / "data" / "rollouts.parquet")
    keep(home, open_run(home, "tiny", kind="recipe", text="", overrides={}, variant="default"), nodes=nodes, status="finished")
    return home


def ask(home: Path, text: str, *values: str) -> list[dict[str, Any]]:
    _, tables = tables_of(home)
    with opened(tables) as database:
        found = answer(database, text, values)
        return [dict(zip(found.columns, row, strict=True)) for row in found.rows]


def identity(home: Path, question: str) -> str:
    rows = ask(home, "select problem_id, question from problems union all select problem_id, question from dropped")
    return next(str(row["problem_id"]) for row in rows if row["question"] == question)


def command(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from flows.cli import app; app(standalone_mode=True)"
    return subprocess.run(
        [sys.executable, "-c", program, "sql", *words],
        cwd=ROOT,
        env={"POSTTRAIN_HOME": str(home), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_questions_why_names_rule_evidence_and_the_other_problem(home: Path) -> None:
    kept = ask(home, "why", identity(home, QUESTION))
    assert [(row["fate"], row["source"], row["row_number"]) for row in kept] == [("kept in pool rl", "sources[0] training.jsonl", 1)]
    copy = ask(home, "why", identity(home, QUESTION.upper() + "?"))
    assert [(row["fate"], row["evidence"], row["other_question"]) for row in copy] == [("dropped: duplicate", QUESTION, QUESTION)]
    proof = ask(home, "why", identity(home, "Prove that 1 = 1."))
    assert [(row["fate"], row["evidence"]) for row in proof] == [("dropped: proof", "Prove that 1 = 1")]
    overlap = ask(home, "why", identity(home, "another thing"))
    assert {row["fate"] for row in overlap} >= {"dropped: same_question", "held out in benchmark test"}
    assert "Another  thing" in {row["other_question"] for row in overlap}


def test_questions_funnel_and_quarantine_count_what_the_rules_met(home: Path) -> None:
    steps = {row["step"]: row["rows"] for row in ask(home, "funnel")}
    assert steps == {
        "read": 5,
        "quarantined": 1,
        "duplicate": 1,
        "proof": 1,
        "same_question": 1,
        "kept": 1,
        "pool rl": 1,
        "benchmark test": 1,
    }
    assert [(row["reason"], row["first_row"]) for row in ask(home, "quarantined")] == [("the question is missing", 5)]
    assert [row["question"] for row in ask(home, "dropped", "proof")] == ["Prove that 1 = 1."]


def test_questions_tables_of_one_name_are_one_with_the_stage_in_front(home: Path) -> None:
    assert ask(home, "select stage, count(*) as n from rollouts group by all order by all") == [
        {"stage": "rl_one", "n": 3},
        {"stage": "rl_two", "n": 3},
    ]
    sampled = ask(home, "sampled", "a" * 16)
    assert [(row["stage"], row["step"], row["rollouts"], row["why"]) for row in sampled] == [
        ("rl_one", 1, 2, None),
        ("rl_one", 2, 1, None),
        ("rl_two", 1, 2, "easy"),
        ("rl_two", 2, 1, "easy"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "from read_text('/etc/passwd')",
        "from '{home}/training.jsonl'",
        "select * from glob('/*')",
        "from read_csv('https://example.org/a.csv')",
        "select * from duckdb_secrets(), read_blob('/etc/hostname')",
    ],
)
def test_questions_other_files_cannot_be_read(home: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="DuckDB refuses the query: Permission Error"):
        ask(home, text.replace("{home}", str(home)))


@pytest.mark.parametrize(
    "text",
    [
        "drop view problems",
        "copy (select 1) to 'out.csv'",
        "set enable_external_access = true",
        "attach 'a.db'",
        "install httpfs",
        "select 1; select 2",
        "explain analyze copy (select 1) to 'out.csv'",
        "pragma database_list",
        "-- nothing",
    ],
)
def test_questions_what_is_not_one_query_is_refused(home: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="is not one query; the rule is one SELECT"):
        ask(home, text)


def test_questions_values_are_data_never_sql(home: Path) -> None:
    assert ask(home, "why", "' or 1 = 1 --") == []


def test_questions_mistakes_say_what_is_known(home: Path) -> None:
    for text, values, message in (
        ("wy", (), "there is no question 'wy'; did you mean why"),
        ("why", (), "the question why takes PROBLEM_ID, 0 given"),
        ("funnel", ("x",), "the question funnel takes nothing, 1 given"),
        ("select 1", ("x",), "SQL takes no further words"),
        ("select * from nowhere", (), "DuckDB refuses the query: Catalog Error"),
        ("difficulty", (), "DuckDB refuses the query: Catalog Error.*--tables"),  # this run has no pass rates
    ):
        with pytest.raises(ConfigError, match=rf"(?s){message}"):
            ask(home, text, *values)


def test_questions_home_without_runs_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no run in .* has a result yet; make one: posttrain run tiny"):
        tables_of(tmp_path)


def test_questions_every_file_is_one_select_with_its_head() -> None:
    for name, question in questions().items():
        assert (QUESTIONS / f"{name}.sql").is_file()
        assert question.about
        assert [statement.type for statement in duckdb.extract_statements(question.sql)] == [duckdb.StatementType.SELECT]
        assert set(question.takes) == set(duckdb.extract_statements(question.sql)[0].named_parameters)
        assert question.sql.rstrip().endswith("select * from final")


def test_command_sql_writes_json_csv_and_a_table(home: Path) -> None:
    query = "select question, answer from problems"
    assert json.loads(command(home, query, "--json").stdout) == [{"question": QUESTION, "answer": "3"}]
    assert list(csv.reader(io.StringIO(command(home, query, "--csv").stdout))) == [["question", "answer"], [QUESTION, "3"]]
    table = command(home, query)
    assert table.returncode == 0
    assert QUESTION in table.stdout
    listed = command(home, "--tables")
    assert "rl_one, rl_two" in listed.stdout
    assert "why PROBLEM_ID" in listed.stdout
    assert command(home, "drop view problems").returncode == 2


@pytest.mark.parametrize("query", [
    "select count(*) from problems a, problems b, range(200000000000000) c",
    "select sum(a.i * b.i) from range(100000) a(i), range(2000000000) b(i)",
    "select a.i from range(2000000000) a(i) order by a.i % 7919",
])  # fmt: skip
def test_command_sql_ends_at_once_on_control_c(home: Path, query: str) -> None:
    program = "from flows.cli import app; import flows.questions, duckdb, pyarrow; print('ready', flush=True); app()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "sql", query],
        cwd=ROOT,
        env={"POSTTRAIN_HOME": str(home), "PATH": "/usr/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        threading.Event().wait(2)  # the query runs for minutes
        assert running.poll() is None
        running.send_signal(signal.SIGINT)
        try:
            said = running.communicate(timeout=20)[0]
        finally:
            running.kill()
    assert (running.returncode, said.startswith("Interrupted.")) == (130, True), said


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, list[tuple[str, Path]]]:
    """Two tables of a home."""
    rows = [{"number": number, "text": f"text {number * 7919 % 10007}"} for number in range(20000)]
    for name in ("problems", "rollouts"):
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    return {name: [("curation", tmp_path / f"{name}.parquet")] for name in ("problems", "rollouts")}


@pytest.mark.parametrize("damage", ["cut", "empty", "footer", "first page", "a page"])
def test_questions_damaged_file_is_named_with_what_makes_it_again(tables: dict[str, list[tuple[str, Path]]], damage: str) -> None:
    path = tables["rollouts"][0][1]
    whole = path.read_bytes()
    half = len(whole) // 2
    damaged = {
        "cut": whole[:half],
        "empty": b"",
        "footer": whole[:-40] + b"\xff" * 32 + whole[-8:],
        "first page": whole[:4] + bytes(200) + whole[204:],
        "a page": whole[:half] + b"\xa5" * 3000 + whole[half + 3000 :],
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(ArtifactError, match=r"rollouts.parquet cannot be read as Parquet .*posttrain stage curation --force"):  # noqa: SIM117
        with opened(tables) as database:
            list(answer(database, "select number, text from rollouts").rows)


def test_questions_wrong_sql_is_no_damage_even_where_it_fails_late(tables: dict[str, list[tuple[str, Path]]]) -> None:
    with opened(tables) as database, pytest.raises(ConfigError, match=r"DuckDB refuses the query: .*\\x1b\[31m"):
        list(answer(database, "select cast(if(number = 19999, chr(27) || '[31m', '1') as integer) from problems").rows)


def test_command_sql_table_shows_control_characters_escaped(home: Path) -> None:
    query = "select chr(27) || '[31m' || chr(155) || chr(8238) || '[red]é' as a, 1 as \"b\x1b[0m\""
    shown = command(home, query).stdout
    assert "\\x1b[31m\\x9b\\u202e[red]é" in shown
    assert "b\\x1b[0m" in shown
    assert "\x1b" not in shown
    assert json.loads(command(home, query, "--json").stdout)[0]["a"] == "\x1b[31m\x9b\u202e[red]é"


def test_command_sql_of_another_run_is_looked_up(home: Path) -> None:
    assert "tiny-1" in command(home, "--tables", "--of", "tiny-1").stdout
    assert "there is no run 'tiny-9'" in command(home, "funnel", "--of", "tiny-9").stdout
