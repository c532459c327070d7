"""What `posttrain gc` may free, and the freeing: weights of finished stages, folders set aside, folders never finished.

Only weights leave a finished stage. Its result, metrics, log and samples stay, so tables and comparisons
go on working, and a plan says that the output is gone and runs the stage again when something needs it.
Kept are checkpoints that a run or a plan needs, that have an alias in the registry, or that are read by
a stage that is running or may be resumed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flows.holding import hold, is_held
from stages.artifacts import CONFIG, RESULT, CheckpointRef, StageResult, read_result
from stages.errors import ArtifactError

_STAGES = "stages"
_CHECKPOINT = "checkpoint"
_DELETED = ".deleted-"
_NAME = re.compile(r"(?P<fingerprint>[0-9a-f]{16})(?P<aside>\.before-.+)?")
_LEFTOVER = re.compile(r"[0-9a-f]{16}(\.before-.+)?\.deleted-\d+")
_BLOCK = 512
_DAY_S = 86_400


class Item(NamedTuple):
    """Something that takes space in a project home and can be had again."""

    folder: Path
    """The stage folder; of a leftover, itself."""
    what: Literal["checkpoint", "set aside", "unfinished", "leftover"]
    """A finished stage's `checkpoint/`; a whole folder that a forced rerun replaced, or that never finished; what an
    interrupted `free` left behind."""
    bytes: int
    """Disk use. Counts files that MLflow's store holds too, by hard links: that space comes back when `Tracker.forget`
    has removed those as well."""
    digests: tuple[str, ...]
    """Of its checkpoints. An item to be freed leaves out what a kept item holds, too: that must not be forgotten."""
    why_kept: str | None
    """None: to be freed."""


class _Folder(NamedTuple):
    path: Path
    fingerprint: str
    """The first 16 digits."""
    aside: bool
    result: StageResult | None
    fault: str | None
    """Why its result cannot be read."""

    @property
    def digests(self) -> tuple[str, ...]:
        outputs = self.result.outputs.values() if self.result else ()
        return tuple(ref.digest for ref in outputs if isinstance(ref, CheckpointRef) and ref.path.name == _CHECKPOINT)


def survey(home: Path, *, needed: Mapping[str, str], aliased: frozenset[str], unfinished_days: float = 7.0, now: float) -> tuple[Item, ...]:
    """Everything under `<home>/stages` that could be freed, with the reason where it is kept.

    `needed` gives the reasons to keep stages, by fingerprint (whole, or its first 16 digits); `aliased` the
    digests of checkpoints with an alias in the registry. An unfinished folder is kept until nothing in it
    has changed for `unfinished_days` before `now`, in seconds since 1970. Changes nothing. Folders behind
    symbolic links, and those that are not named by a fingerprint, are not looked at.
    """
    reasons = {fingerprint[:16]: reason for fingerprint, reason in needed.items()}
    folders = list(_folders(home / _STAGES))
    held = {folder.path for folder in folders if is_held(folder.path)}

    def first_reason(folder: Path, digests: Iterable[str], otherwise: str | None) -> str | None:
        if folder in held:
            return "is being run"
        if folder.name in reasons:
            return reasons[folder.name]
        return "has a registry alias" if aliased.intersection(digests) else otherwise

    unfinished: dict[Path, Item] = {}
    for folder in folders:
        if folder.result is None and not folder.aside:
            days = (now - _newest(folder.path)) / _DAY_S
            recent = f"changed {max(days, 0):.1f} days ago, of {unfinished_days:g}" if days <= unfinished_days else None
            why = first_reason(folder.path, (), folder.fault or recent)
            unfinished[folder.path] = Item(folder.path, "unfinished", _disk_use(folder.path), (), why)
    waiting = {path for path, item in unfinished.items() if item.why_kept} | held
    readers = {name: node for path in waiting for name, node in _reads(path)}
    items = list(unfinished.values())
    for folder in folders:
        checkpoint = folder.path / _CHECKPOINT
        if folder.aside:
            main = folder.path.with_name(folder.fingerprint)
            rerun = "its rerun is not finished" if main in waiting or is_held(main) else None
            why = "has a registry alias" if aliased.intersection(folder.digests) else folder.fault or rerun
            items.append(Item(folder.path, "set aside", _disk_use(folder.path), folder.digests, why))
        elif folder.digests and os.path.lexists(checkpoint):
            reader = readers.get(folder.fingerprint)
            why = first_reason(folder.path, folder.digests, f"is read by {reader}, which is not finished" if reader else None)
            items.append(Item(folder.path, "checkpoint", _disk_use(checkpoint), folder.digests, why))
    items += [Item(path, "leftover", _disk_use(path), (), None) for path in _leftovers(home / _STAGES)]
    kept = {digest for item in items if item.why_kept for digest in item.digests}
    return tuple(
        item if item.why_kept else item._replace(digests=tuple(digest for digest in item.digests if digest not in kept))
        for item in sorted(items, key=lambda item: item.folder)
    )


def free(items: Iterable[Item]) -> int:
    """Delete what is to be freed among the items of a `survey`; returns the bytes of what was deleted.

    What has been taken up or finished since the survey is left alone. A symbolic link is removed, never
    what it points to. What is deleted is first renamed, so a kill in between leaves no half checkpoint
    under a valid name; the next survey finds the rest. Raises ArtifactError when something cannot be
    deleted, or is not under a `stages` folder without symbolic links in between.
    """
    return sum(item.bytes for item in items if item.why_kept is None and _freed(item))


def _freed(item: Item) -> bool:
    path = item.folder / _CHECKPOINT if item.what == "checkpoint" else item.folder
    inside = list(takewhile(lambda folder: folder.name != _STAGES, path.parents))
    if len(inside) == len(path.parents) or any(folder.is_symlink() for folder in inside):
        raise ArtifactError(f"{path} is not in a project home, or behind a symbolic link, and is not deleted; remove it by hand")
    if item.what == "leftover":
        return _delete(path)
    try:
        with hold(item.folder.with_name(item.folder.name[:16]), "posttrain gc", stop=_give_up):
            if item.what == "unfinished" and (path / RESULT).exists():
                return False
            return _delete(path)
    except _TakenError:
        return False


class _TakenError(Exception):
    """Someone else holds the stage folder."""


def _give_up() -> None:
    raise _TakenError


def _delete(path: Path) -> bool:
    """Remove a file tree; whether there was one."""
    try:
        if path.is_symlink():
            path.unlink()
            return True
        if _DELETED not in path.name:
            path = path.rename(path.with_name(f"{path.name}{_DELETED}{time.time_ns()}"))
        path.chmod(0o700)
        for root, folders, _ in os.walk(path):  # of files the mode does not matter, and MLflow's links share it
            for folder in folders:
                if not (inner := Path(root, folder)).is_symlink():
                    inner.chmod(0o700)
        shutil.rmtree(path)
    except OSError as error:
        if not path.exists():
            return False
        raise ArtifactError(f"{path} cannot be deleted ({error}); mend its permissions and run posttrain gc again") from error
    return True


# ---- what is there --------------------------------------------------------------------------


def _subfolders(folder: Path) -> list[Path]:
    """Real folders, no links to any."""
    return [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.is_symlink()] if folder.is_dir() else []


def _folders(stages: Path) -> Iterator[_Folder]:
    for path in [path for kind in _subfolders(stages) for path in _subfolders(kind)]:
        if (name := _NAME.fullmatch(path.name)) is None or _LEFTOVER.fullmatch(path.name):
            continue
        result, fault = None, None
        try:
            result = read_result(path)
        except ArtifactError:
            fault = f"its {RESULT} cannot be read"
        yield _Folder(path, name["fingerprint"], name["aside"] is not None, result, fault)


def _leftovers(stages: Path) -> Iterator[Path]:
    for kind in _subfolders(stages):
        for folder in _subfolders(kind):
            yield from [folder] if _LEFTOVER.fullmatch(folder.name) else folder.glob(f"{_CHECKPOINT}{_DELETED}*")


def _reads(folder: Path) -> list[tuple[str, str]]:
    """What a stage reads: first 16 digits of the fingerprint that made it, and the name of the node that reads it."""
    path = folder / CONFIG
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        names = {name for ref in content["inputs"].values() for name in (ref["producer"][:16], Path(ref["path"]).parent.name)}
        return [(name, content["node"]) for name in names]
    except FileNotFoundError:
        return []  # its process has not been told what to do
    except (ValueError, KeyError) as error:
        raise ArtifactError(
            f"{path} cannot be read ({error}), so what its stage reads is not known and nothing is freed; delete {folder} and try again"
        ) from error


def _everything(path: Path) -> Iterator[os.stat_result]:
    """The status of a path and of all below it, of links themselves. What a running stage removes meanwhile is left out."""
    below = [] if path.is_symlink() else [Path(root, name) for root, folders, files in os.walk(path) for name in (*folders, *files)]
    for inner in (path, *below):
        with suppress(FileNotFoundError):
            yield inner.lstat()


def _newest(path: Path) -> float:
    return max((status.st_mtime for status in _everything(path)), default=0.0)


def _disk_use(path: Path) -> int:
    return sum(blocks for blocks in {(status.st_dev, status.st_ino): status.st_blocks * _BLOCK for status in _everything(path)}.values())
