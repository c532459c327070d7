"""The lock of a stage folder between processes, and results that are set aside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flows.holding import hold, is_held, set_aside, set_damaged_aside
from stages.artifacts import last_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "stages" / "cold_start" / "ab12"


@contextmanager
def another_holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder until its standard input ends."""
    program = f"""
        import sys
        from pathlib import Path
        from flows.holding import hold
        with hold(Path({str(folder)!r}), "cold_start"):
            print("held", flush=True)
            sys.stdin.read()
    """
    arguments = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process


def test_hold_taken_folder_says_once_by_whom_and_waits_for_it(folder: Path) -> None:
    said: list[str] = []
    looks: list[bool] = []
    with another_holder(folder) as other:

        def stop() -> None:
            looks.append(is_held(folder))
            if len(looks) == 5:
                other.communicate()

        with hold(folder, "cold_start", said.append, stop):
            assert said == [f"cold_start is being run by process {other.pid}; waiting for it"]
            assert looks[:5] == [True] * 5
            assert other.returncode == 0
            assert (folder.parent / "ab12.lock").read_text().split()[0] == str(os.getpid())


def test_hold_waiting_and_stopped_gives_up(folder: Path) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with another_holder(folder) as other:
        with pytest.raises(KeyboardInterrupt), hold(folder, "cold_start", stop=stop):
            pytest.fail("the folder is another's")
        other.communicate()


def test_hold_after_the_holder_was_killed_enters_at_once(folder: Path) -> None:
    said: list[str] = []
    with another_holder(folder) as other:
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert not is_held(folder)
        with hold(folder, "cold_start", said.append):
            pass
    assert said == []


def test_hold_one_folder_leaves_others_free(folder: Path) -> None:
    with another_holder(folder) as other:
        with hold(folder.with_name("cd34"), "cold_start"):
            assert is_held(folder.with_name("cd34"))
        other.communicate()


def test_hold_failing_block_frees_the_folder_and_raises_the_same(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="of the block"), hold(folder, "cold_start"):
        raise FileNotFoundError("of the block")
    assert not is_held(folder)


def test_is_held_free_folder_leaves_no_trace(folder: Path) -> None:
    assert not is_held(folder)
    assert not folder.parent.exists()
    with hold(folder, "cold_start"):
        assert is_held(folder)
    assert not is_held(folder)
    assert not folder.exists()  # the lock stands beside it


def test_set_aside_unfinished_folder_stays_where_it_is(folder: Path) -> None:
    assert set_aside(folder) is None
    folder.mkdir(parents=True)
    (folder / "log.txt").write_text("half")
    assert set_aside(folder) is None
    assert (folder / "log.txt").exists()


def test_set_aside_finished_folders_one_after_another_are_all_kept(folder: Path) -> None:
    kept: list[Path | None] = []
    for text in "abc":  # within one second
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(text)
        kept.append(set_aside(folder))
        assert not folder.exists()
    assert [(path / "result.json").read_text() for path in kept if path is not None] == ["a", "b", "c"]
    assert all(path is not None and path.name.startswith("ab12.before-2") for path in kept)


def checkpoint(folder: Path, step: int) -> Path:
    """A trainer's checkpoint as the libraries write it."""
    import torch
    from safetensors.torch import save_file

    path = folder / "trainer" / "train" / f"checkpoint-{step}"
    path.mkdir(parents=True)
    save_file({"weight": torch.ones(8, 8), "bias": torch.zeros(8)}, path / "model.safetensors")
    torch.save({"state": torch.ones(64)}, path / "optimizer.pt")
    torch.save({"cpu": torch.get_rng_state()}, path / "rng_state.pth")
    (path / "trainer_state.json").write_text("{}")
    return path


def test_damaged_checkpoint_that_is_whole_stays(tmp_path: Path) -> None:
    whole = checkpoint(tmp_path, 20)
    assert set_damaged_aside(tmp_path) is None
    assert last_checkpoint(tmp_path) == whole


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "rng_state.pth"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_damaged_checkpoint_with_a_file_cut_short_is_named_and_an_earlier_one_is_used(file: str, share: float, tmp_path: Path) -> None:
    earlier, cut = checkpoint(tmp_path, 10), checkpoint(tmp_path, 20)
    content = (cut / file).read_bytes()
    (cut / file).write_bytes(content[: int(share * len(content))])
    said = set_damaged_aside(tmp_path)
    assert said is not None
    assert f"checkpoint-20 is damaged ({file} was cut short)" in said
    assert (cut.parent / "damaged-checkpoint-20" / file).exists()
    assert last_checkpoint(tmp_path) == earlier


def test_damaged_checkpoint_of_a_stage_that_never_saved_is_none(tmp_path: Path) -> None:
    assert set_damaged_aside(tmp_path / "nothing") is None
