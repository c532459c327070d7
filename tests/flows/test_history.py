"""Records of runs: ids, what is found again, and what a kill may leave."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flows.history import Finished, find_run, keep, open_run, read_runs
from stages.errors import ArtifactError

ABOUT = {"text": "name: small", "overrides": {}, "variant": "default"}


def test_open_run_numbers_each_recipe_by_itself(tmp_path: Path) -> None:
    ids = [open_run(tmp_path, recipe, kind="recipe", **ABOUT).id for recipe in ("small", "small", "small_2", "small")]
    assert ids == ["small-1", "small-2", "small_2-1", "small-3"]
    assert [run.id for run in read_runs(tmp_path, "small")] == ["small-1", "small-2", "small-3"]


def test_open_run_by_two_processes_at_once_gives_two_ids(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from flows.history import open_run\n"
        "for _ in range(20): print(open_run(Path(sys.argv[1]), 'small', kind='recipe', text='', overrides={}, variant='').id)"
    )
    both = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    ids = [line for process in both for line in process.communicate()[0].split()]
    assert len(ids) == len(set(ids)) == 40


def test_kept_run_is_found_by_each_of_its_names(tmp_path: Path) -> None:
    run = open_run(tmp_path, "small", kind="recipe", prefect_run="p-1", **ABOUT)
    run = keep(tmp_path, run, mlflow_run="m-1", status="finished", nodes={"first": Finished(stage="curation", fingerprint="f" * 64)})
    for name in ("small-1", "p-1", "m-1", "latest"):
        assert find_run(tmp_path, name, "small") == run


def test_find_run_latest_is_the_newest_whole_recipe(tmp_path: Path) -> None:
    whole = open_run(tmp_path, "small", kind="recipe", **ABOUT)
    open_run(tmp_path, "small", kind="rerun", stage="first", **ABOUT)
    open_run(tmp_path, "other", kind="recipe", **ABOUT)
    assert find_run(tmp_path, "latest", "small") == whole


@pytest.mark.parametrize("name", ["latest", "small-7"])
def test_find_run_unknown_names_the_runs_there_are(name: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=f"there is no run '{name}' of small.*none yet.*posttrain run small"):
        find_run(tmp_path, name, "small")
    open_run(tmp_path, "small", kind="rerun", **ABOUT)
    with pytest.raises(ArtifactError, match="the last ones: small-1"):
        find_run(tmp_path, name, "small")


def test_read_runs_with_a_file_that_a_kill_left_empty_gives_the_others(tmp_path: Path) -> None:
    run = open_run(tmp_path, "small", kind="recipe", **ABOUT)
    (tmp_path / "runs" / "small-2.json").touch()
    assert read_runs(tmp_path) == [run]
    assert open_run(tmp_path, "small", kind="recipe", **ABOUT).id == "small-3"


def test_read_runs_with_a_broken_file_names_it_and_the_remedy(tmp_path: Path) -> None:
    open_run(tmp_path, "small", kind="recipe", **ABOUT)
    (tmp_path / "runs" / "small-1.json").write_text('{"id": "small-1"')
    with pytest.raises(ArtifactError, match=r"small-1.json cannot be read .*delete it"):
        read_runs(tmp_path)


def test_read_runs_of_a_process_that_is_gone_died(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from flows.history import open_run\n"
        "open_run(Path(sys.argv[1]), 'small', kind='recipe', text='', overrides={}, variant='')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    mine = open_run(tmp_path, "small", kind="recipe", **ABOUT)
    assert {run.id: run.status for run in read_runs(tmp_path)} == {"small-1": "died", mine.id: "running"}
