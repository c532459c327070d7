"""Garbage: what may be freed and why not, and that freeing harms nothing else, whenever it is cut short."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flows.garbage import Item, free, survey
from flows.holding import hold, set_aside
from flows.plan import make_plan
from flows.recipe import load_recipe
from stages.artifacts import CheckpointRef, DatasetRef, StageResult, digest_of_folder, is_there, write_json
from stages.errors import ArtifactError

ROOT = Path(__file__).parents[2]
NOW = 2_000_000_000.0
DAY = 86_400
COLD, RL, FUSION = "c" * 16, "a" * 16, "f" * 16
SIZE = 64 * 1024


def result_of(folder: Path, outputs: dict[str, CheckpointRef | DatasetRef]) -> StageResult:
    spent: dict[str, Any] = {"seconds": 1, "busy_seconds": 1, "tokens": 1, "peak_memory_mib": 1}
    return StageResult(stage="s", fingerprint=folder.name * 4, key={}, outputs=outputs, metrics={}, versions={}, **spent)


def finish(folder: Path, weights: str = "") -> CheckpointRef:
    """Do as if a stage had trained a model in its folder."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / "model.safetensors").write_text((weights or folder.name) * (SIZE // 16))
    (checkpoint / "model.safetensors").chmod(0o444)  # as MLflow's store leaves it
    (folder / "log.txt").write_text("trained")
    ref = CheckpointRef(name="m", digest=digest_of_folder(checkpoint), path=checkpoint, producer=folder.name)
    write_json(folder / "result.json", result_of(folder, {"model": ref}).model_dump(mode="json"))
    return ref


def begin(folder: Path, *reads: CheckpointRef, days_ago: float) -> None:
    """Do as if a stage had begun in its folder and was last seen some days ago."""
    (folder / "trainer" / "checkpoint-1").mkdir(parents=True)
    (folder / "trainer" / "checkpoint-1" / "model.safetensors").write_text("half")
    inputs = {f"model{number}": ref.model_dump(mode="json") for number, ref in enumerate(reads)}
    write_json(folder / "config.json", {"node": "my_fusion", "inputs": inputs})
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (NOW - days_ago * DAY,) * 2)


class Home:
    """A project home with two trained stages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cold, self.rl = path / "stages" / "cold_start" / COLD, path / "stages" / "reasoning_rl" / RL
        self.cold_ref, self.rl_ref = finish(self.cold), finish(self.rl)
        self.fusion = path / "stages" / "fusion" / FUSION

    def survey(self, aliased: frozenset[str] = frozenset(), **needed: str) -> dict[Path, Item]:
        return {item.folder: item for item in survey(self.path, needed=needed, aliased=aliased, now=NOW)}

    def why(self, aliased: frozenset[str] = frozenset(), **needed: str) -> dict[str, str | None]:
        return {folder.name: item.why_kept for folder, item in self.survey(aliased, **needed).items()}

    def free(self) -> int:
        return free(self.survey().values())


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@contextmanager
def another_process(program: str) -> Iterator[None]:
    """A process that says a line when it is ready, and lives until its standard input ends."""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield


def held_elsewhere(folder: Path) -> Any:
    code = f"""
        import sys
        from pathlib import Path
        from flows.holding import hold
        with hold(Path({str(folder)!r}), "n"):
            print("held", flush=True)
            sys.stdin.read()
    """
    return another_process(textwrap.dedent(code))


# ---- what may be freed


def test_survey_checkpoint_that_nothing_needs_is_to_be_freed(home: Home) -> None:
    item = home.survey()[home.cold]
    assert item == Item(home.cold, "checkpoint", item.bytes, (home.cold_ref.digest,), None)
    assert SIZE <= item.bytes <= 2 * SIZE


@pytest.mark.parametrize("digits", [16, 64])
def test_survey_needed_stage_is_kept_with_the_reason_given(home: Home, digits: int) -> None:
    assert home.why(**{(COLD * 4)[:digits]: "is of tiny-3, the latest run"}) == {COLD: "is of tiny-3, the latest run", RL: None}


def test_survey_aliased_checkpoint_is_kept(home: Home) -> None:
    assert home.why(frozenset({home.rl_ref.digest})) == {COLD: None, RL: "has a registry alias"}


def test_survey_stage_that_another_process_holds_is_kept_and_what_it_reads(home: Home) -> None:
    begin(home.fusion, home.rl_ref, days_ago=100)
    with held_elsewhere(home.fusion):
        assert home.why() == {COLD: None, RL: "is read by my_fusion, which is not finished", FUSION: "is being run"}
    assert home.why() == {COLD: None, RL: None, FUSION: None}


def test_survey_finished_stage_that_is_held_is_kept_and_what_it_reads(home: Home) -> None:
    write_json(home.rl / "config.json", {"node": "my_rl", "inputs": {"model": home.cold_ref.model_dump(mode="json")}})
    with held_elsewhere(home.rl):
        assert home.why() == {COLD: "is read by my_rl, which is not finished", RL: "is being run"}
    assert home.why() == {COLD: None, RL: None}


@pytest.mark.parametrize(("days", "kept"), [(6.9, True), (7.1, False)])
def test_survey_unfinished_stage_is_kept_for_a_week_and_what_it_reads(home: Home, days: float, kept: bool) -> None:
    begin(home.fusion, home.cold_ref, days_ago=days)
    item, read = home.survey()[home.fusion], home.survey()[home.cold]
    assert (item.what, item.digests) == ("unfinished", ())
    assert item.why_kept == (f"changed {days} days ago, of 7" if kept else None)
    assert read.why_kept == ("is read by my_fusion, which is not finished" if kept else None)


def test_survey_unfinished_stage_counts_from_its_newest_file(home: Home) -> None:
    begin(home.fusion, days_ago=30)
    os.utime(home.fusion / "trainer" / "checkpoint-1" / "model.safetensors", (NOW - DAY,) * 2)
    assert home.survey()[home.fusion].why_kept == "changed 1.0 days ago, of 7"
    short = survey(home.path, needed={}, aliased=frozenset(), unfinished_days=0.5, now=NOW)
    assert [item.why_kept for item in short if item.what == "unfinished"] == [None]


def test_survey_needed_unfinished_stage_is_kept_and_what_it_reads(home: Home) -> None:
    begin(home.fusion, home.rl_ref, days_ago=100)
    reads = "is read by my_fusion, which is not finished"
    assert home.why(**{FUSION: "would be resumed"}) == {COLD: None, RL: reads, FUSION: "would be resumed"}


def set_aside_of(folder: Path) -> Path:
    with hold(folder, "cold_start"):
        aside = set_aside(folder)
    assert aside is not None
    return aside


def test_survey_folder_set_aside_is_to_be_freed_when_its_rerun_has_finished(home: Home) -> None:
    aside = set_aside_of(home.cold)
    begin(home.cold, days_ago=1)
    assert home.why()[aside.name] == "its rerun is not finished"
    shutil.rmtree(home.cold)
    finish(home.cold, "other weights")
    item = home.survey(**{COLD: "is needed"})[aside]  # its fingerprint is its rerun's
    assert (item.what, item.why_kept, item.digests) == ("set aside", None, (home.cold_ref.digest,))
    assert home.survey(frozenset(item.digests))[aside].why_kept == "has a registry alias"


def test_survey_folder_set_aside_is_kept_while_its_rerun_starts(home: Home) -> None:
    aside = set_aside_of(home.cold)
    with held_elsewhere(home.cold):  # which has not made its folder yet
        assert home.why()[aside.name] == "its rerun is not finished"
    assert home.why()[aside.name] is None


def test_survey_digest_that_a_kept_stage_has_too_is_not_handed_out(home: Home) -> None:
    aside = set_aside_of(home.cold)
    finish(home.cold)  # the rerun gave the same weights
    assert home.survey()[aside].digests == (home.cold_ref.digest,)
    assert home.survey(**{COLD: "is needed"})[aside].digests == ()


def test_survey_counts_a_hard_link_within_an_item_once_and_links_of_the_store_too(home: Home) -> None:
    before = home.survey()[home.cold].bytes
    (home.path / "artifacts").mkdir()
    os.link(home.cold / "checkpoint" / "model.safetensors", home.path / "artifacts" / "model.safetensors")
    assert home.survey()[home.cold].bytes == before
    os.link(home.cold / "checkpoint" / "model.safetensors", home.cold / "checkpoint" / "again.safetensors")
    assert home.survey()[home.cold].bytes == before


def test_survey_result_that_cannot_be_read_keeps_the_folder(home: Home) -> None:
    aside = set_aside_of(home.rl)
    (aside / "result.json").write_text("{")
    (home.cold / "result.json").write_text("{")
    assert home.why() == {COLD: "its result.json cannot be read", aside.name: "its result.json cannot be read"}


def test_survey_settings_of_an_unfinished_stage_that_cannot_be_read_are_an_error(home: Home) -> None:
    begin(home.fusion, days_ago=1)
    (home.fusion / "config.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"config\.json cannot be read .* nothing is freed"):
        home.survey()


def test_survey_leaves_out_what_is_not_a_stage_with_weights(home: Home, tmp_path: Path) -> None:
    before = home.why()
    data = DatasetRef(name="d", digest="d" * 64, path=tmp_path, producer="given", rows=1)
    curation = home.path / "stages" / "curation" / ("d" * 16)
    curation.mkdir(parents=True)
    write_json(curation / "result.json", result_of(curation, {"rl": data}).model_dump(mode="json"))
    (home.path / "stages" / "cold_start" / "my notes").mkdir()  # not ours
    (home.path / "stages" / "README").write_text("not a folder")
    assert home.why() == before
    assert survey(tmp_path / "no home", needed={}, aliased=frozenset(), now=NOW) == ()


# ---- freeing


def test_free_takes_the_weights_and_leaves_the_rest(home: Home) -> None:
    begin(home.fusion, days_ago=100)
    aside = set_aside_of(home.rl)
    items = home.survey(**{RL: "is needed"})
    assert free(items.values()) == sum(item.bytes for item in items.values()) > 2 * SIZE
    assert sorted(path.name for path in home.cold.iterdir()) == ["log.txt", "result.json"]
    assert not aside.exists()
    assert not home.fusion.exists()
    assert home.survey() == {}
    assert free(items.values()) == 0  # nothing twice


def test_free_leaves_kept_items_alone(home: Home) -> None:
    begin(home.fusion, home.cold_ref, days_ago=1)
    assert free(home.survey(frozenset({home.rl_ref.digest})).values()) == 0
    assert digest_of_folder(home.cold / "checkpoint") == home.cold_ref.digest
    assert (home.fusion / "trainer").exists()


def test_free_leaves_alone_what_was_taken_up_or_finished_since_the_survey(home: Home) -> None:
    begin(home.fusion, days_ago=100)
    items = home.survey()
    with held_elsewhere(home.cold):
        (home.fusion / "result.json").write_text("finished")
        assert free(items.values()) == items[home.rl].bytes
    assert is_there(home.cold / "checkpoint")
    assert (home.fusion / "trainer").exists()


def test_free_leaves_the_store_its_files_as_they_are(home: Home) -> None:
    (home.path / "artifacts").mkdir()
    stored = home.path / "artifacts" / "model.safetensors"
    os.link(home.cold / "checkpoint" / "model.safetensors", stored)
    (home.cold / "checkpoint" / "inner").mkdir(mode=0o555)
    assert home.free() > 0
    assert stored.stat().st_mode & 0o777 == 0o444
    assert stored.stat().st_size == SIZE
    assert not is_there(home.cold / "checkpoint")


def test_free_removes_links_and_never_what_they_point_to(home: Home, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "models").mkdir(parents=True)
    (outside / "models" / "mine").write_text("mine" * SIZE)
    (outside / "models").chmod(0o500)
    shutil.rmtree(home.cold / "checkpoint")
    (home.cold / "checkpoint").symlink_to(outside / "models")
    (home.rl / "checkpoint" / "link").symlink_to(outside / "models")
    begin(home.fusion, days_ago=100)
    (home.fusion / "link").symlink_to(outside)
    os.utime(home.fusion, (NOW - 100 * DAY,) * 2)
    os.utime(home.fusion / "link", (NOW - 100 * DAY,) * 2, follow_symlinks=False)
    assert home.survey()[home.cold].bytes < SIZE
    assert home.free() > 0
    assert home.survey() == {}
    assert not os.path.lexists(home.cold / "checkpoint")
    assert (outside / "models" / "mine").read_text() == "mine" * SIZE
    assert (outside / "models").stat().st_mode & 0o777 == 0o500


def test_survey_does_not_look_behind_linked_stage_folders(home: Home, tmp_path: Path) -> None:
    elsewhere = Home(tmp_path / "elsewhere")
    begin(elsewhere.fusion, days_ago=100)
    (home.path / "stages" / "rlhf").symlink_to(elsewhere.path / "stages" / "fusion")
    (home.path / "stages" / "cold_start" / ("e" * 16)).symlink_to(elsewhere.cold)
    assert home.survey().keys() == {home.cold, home.rl}


def test_free_folder_that_became_a_link_is_refused(home: Home, tmp_path: Path) -> None:
    items = home.survey()
    (home.path / "stages" / "cold_start").rename(tmp_path / "moved")
    (home.path / "stages" / "cold_start").symlink_to(tmp_path / "moved")
    with pytest.raises(ArtifactError, match="behind a symbolic link"):
        free([items[home.cold]])
    assert is_there(tmp_path / "moved" / COLD / "checkpoint")


def test_free_path_outside_a_home_is_refused(tmp_path: Path) -> None:
    (tmp_path / COLD).mkdir()
    with pytest.raises(ArtifactError, match="is not in a project home"):
        free([Item(tmp_path / COLD, "unfinished", 0, (), None)])
    assert (tmp_path / COLD).exists()


DYING = """
import os, sys
from pathlib import Path
from flows.garbage import free, survey
items = survey(Path(sys.argv[1]), needed={}, aliased=frozenset(), now=2e9)
left = int(sys.argv[2])
def die(event, arguments):
    global left
    if event in ("os.rename", "os.chmod", "os.remove", "os.rmdir"):
        if left == 0:
            os._exit(9)
        left -= 1
sys.addaudithook(die)
free(items)
"""


def test_free_cut_short_leaves_each_checkpoint_whole_or_gone(tmp_path: Path) -> None:
    for moment in range(40):
        home = Home(tmp_path / str(moment))
        begin(home.fusion, days_ago=100)
        aside = set_aside_of(home.rl)
        ended = subprocess.run([sys.executable, "-c", DYING, str(home.path), str(moment)], cwd=ROOT).returncode
        for folder, digest in ((home.cold, home.cold_ref.digest), (aside, home.rl_ref.digest)):
            assert not is_there(folder / "checkpoint") or digest_of_folder(folder / "checkpoint") == digest
        assert not home.fusion.exists() or (home.fusion / "trainer" / "checkpoint-1" / "model.safetensors").exists()
        home.free()
        assert sorted(path.name for path in home.path.rglob("*") if path.is_file() and path.suffix != ".lock") == ["log.txt", "result.json"]
        if ended == 0:
            break
        assert ended == 9
    assert moment > 10
    assert ended == 0


def test_free_leftover_goes_and_the_new_checkpoint_stays(home: Home) -> None:
    (home.cold / "checkpoint").rename(home.cold / "checkpoint.deleted-1")
    (home.cold / "result.json").unlink()
    ref = finish(home.cold)
    items = home.survey(**{COLD: "is needed", RL: "is needed"})
    assert {folder.name: item.what for folder, item in items.items() if item.why_kept is None} == {"checkpoint.deleted-1": "leftover"}
    assert free(items.values()) >= SIZE
    assert sorted(path.name for path in home.cold.iterdir()) == ["checkpoint", "log.txt", "result.json"]
    assert digest_of_folder(home.cold / "checkpoint") == ref.digest


def test_plan_after_freeing_says_that_the_output_is_gone(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("name: base\nstages:\n  base_pretraining: {steps: 10}\n")
    recipe = load_recipe(str(tmp_path / "base.yaml"), ())
    (first, *_) = make_plan(recipe, tmp_path)
    assert first.folder is not None
    finish(first.folder)
    assert make_plan(recipe, tmp_path)[0].action == "reuse"
    assert free(survey(tmp_path, needed={}, aliased=frozenset(), now=NOW)) > SIZE
    after = make_plan(recipe, tmp_path)[0]
    assert (after.action, after.why) == ("run", f"its output {first.folder / 'checkpoint'} is gone")


def test_garbage_import_is_light() -> None:
    code = "import sys, flows.garbage; print([name for name in ('torch', 'mlflow', 'prefect', 'pyarrow', 'scipy') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip() == "[]"
