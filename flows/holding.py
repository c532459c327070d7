"""A stage folder in one pair of hands: its lock, what a rerun sets aside, and what the file system refuses."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import shutil
import socket
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

from stages.artifacts import RESULT, last_checkpoint
from stages.errors import StageError

_LOOK_EVERY_S = 0.2
_FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))


@contextmanager
def hold(
    stage_dir: Path,
    node: str,
    on_wait: Callable[[str], None] = lambda text: None,
    stop: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Keep everyone else out of a stage folder, which need not exist yet, while the block runs.

    The lock is the file `<stage_dir>.lock` beside the folder; it names its holder and is never deleted.
    The kernel frees it with the process, however that ends. While someone else holds it the call waits:
    `on_wait` is told once who that is, `stop` is called at each look and may raise to give up. The
    folder may have changed meanwhile, so decide inside the block. A second `hold` of the same folder
    inside the block would wait for ever. Raises StageError when the lock cannot be written.
    """
    path, looks = _lock_of(stage_dir), 0
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = FileIO(path, "a+")
    with file:
        while not _taken(file, path):
            if looks == 1:  # at the first look it may have been `is_held` of another process
                on_wait(f"{node} is being run by {_holder(path)}; waiting for it")
            stop()
            time.sleep(_LOOK_EVERY_S)
            looks += 1
        with writing(path):
            file.truncate(0)
            file.write(f"{os.getpid()} {socket.gethostname()}".encode())
        yield


def is_held(stage_dir: Path) -> bool:
    """Whether someone holds the folder at this moment; neither waits nor writes."""
    try:
        with _lock_of(stage_dir).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def set_aside(stage_dir: Path) -> Path | None:
    """Rename a folder that holds a finished result to `<name>.before-<UTC time>`, so that a rerun destroys nothing.

    Returns the new path, or None when nothing had finished there. The paths inside its `result.json` go on
    naming the old place. The caller holds the folder. Raises StageError when it cannot be renamed.
    """
    if not (stage_dir / RESULT).exists():
        return None
    name = f"{stage_dir.name}.before-{datetime.now(UTC):%Y%m%dT%H%M%S}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    aside = next(path for path in map(stage_dir.with_name, names) if not path.exists())
    with writing(stage_dir):
        stage_dir.rename(aside)
    return aside


def set_damaged_aside(stage_dir: Path) -> str | None:
    """Rename the trainer's last checkpoint when one of its files was cut, so that the stage resumes from an earlier one or starts over.

    Returns what is wrong with it, None when it is whole or there is none. The caller holds the folder. Lengths are checked, not contents.
    """
    checkpoint = last_checkpoint(stage_dir)
    cut = next((file for file in sorted(checkpoint.iterdir()) if _is_cut(file)), None) if checkpoint else None
    if checkpoint is None or cut is None:
        return None
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    with writing(stage_dir):
        checkpoint.rename(aside)
    return f"{checkpoint.name} is damaged ({cut.name} was cut short) and is not resumed from; it is now {aside}"


def _is_cut(file: Path) -> bool:
    """Whether a file of a trainer's checkpoint is shorter than it says."""
    if file.suffix in (".pt", ".pth", ".bin"):
        return not zipfile.is_zipfile(file)  # what torch saves is an archive whose index comes last
    if file.suffix != ".safetensors":
        return False
    with file.open("rb") as content:
        try:
            header = int.from_bytes(content.read(8), "little")
            tensors = json.loads(content.read(header))
            end = max((tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"), default=0)
        except (ValueError, MemoryError, OverflowError):
            return True
    return file.stat().st_size != 8 + header + end


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the file system refuses inside the block into a StageError that names path, cause and remedy."""
    try:
        yield
    except OSError as error:
        if says_full(str(error)):
            raise StageError(no_space(path, str(error))) from error
        raise StageError(
            f"{path} cannot be written: {error}; it must be a place that you may write to. "
            "Mend its permissions or set POSTTRAIN_HOME to another folder, and run the same command again"
        ) from error


def says_full(text: str) -> bool:
    """Whether a message is the system's for a full disk or a used-up quota, also when a library passes it on."""
    return any(full in text for full in _FULL)


def free_mib(path: Path) -> float:
    """Free space on the disk of a path that need not exist, MiB."""
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free / 2**20


def no_space(path: Path, said: str) -> str:
    """What to tell people when `said` shows that a disk is full: where, how full, and the remedy."""
    return (
        f"no space is left on a disk: {said}\n{path} has {free_mib(path):,.1f} MiB free; "
        "free some space and run the same command again; finished stages are kept"
    )


def _lock_of(stage_dir: Path) -> Path:
    return stage_dir.with_name(f"{stage_dir.name}.lock")


def _taken(file: FileIO, path: Path) -> bool:
    with writing(path):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _holder(path: Path) -> str:
    pid, _, host = path.read_text().partition(" ")
    if not pid:
        return "another process"
    return f"process {pid}" if host == socket.gethostname() else f"process {pid} on {host}"
