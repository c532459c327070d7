"""Models that a recipe starts from, found or downloaded; and digests of files and folders, read once.

Light: huggingface_hub is imported when a hub name has to be looked up.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import stages
from flows.recipe import Recipe
from stages.artifacts import CheckpointRef, Ref, digest_of_file, digest_of_folder, is_there, write_json
from stages.errors import ConfigError

_ROOT = Path(stages.__file__).parents[1]
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.\-/]+))?")
_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja"]
_DIGESTS = "digests.json"


def models_used(recipe: Recipe) -> list[str]:
    """Names of the models that the recipe's nodes read, in order of first use."""
    return list(dict.fromkeys(source.node for node in recipe.nodes for source in node.inputs.values() if source.output is None))


def find_model(name: str, value: str, home: Path, *, download: bool) -> CheckpointRef | None:
    """The checkpoint of a `models` entry: a folder here or beside the package, or a hub name.

    Without `download`, None for a hub model that is not in the local cache. Raises ConfigError when
    there is no such folder and no such model, or the hub cannot be reached.
    """
    folder = next((path for path in (Path(value).expanduser(), _ROOT / value) if path.is_dir()), None)
    if folder is None:
        hub = _HUB_NAME.fullmatch(value)
        first = Path(value).parts[0] if value else ""
        if hub is None or value.startswith((".", "/", "~")) or Path(first).is_dir() or (_ROOT / first).is_dir():
            raise ConfigError(
                f"models.{name} = {value!r}: there is no such folder (seen from {Path.cwd()}); "
                "give a folder that exists, or a hub name such as org/name@revision"
            )
        folder = _from_hub(name, hub["name"], hub["revision"], download=download)
        if folder is None:
            return None
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ConfigError(f"models.{name} = {value!r}: {folder} must hold config.json and *.safetensors; export the model there")
    folder = folder.resolve()
    return CheckpointRef(name=name, digest=_digest(folder, home), path=folder, producer="given")


def _from_hub(name: str, model: str, revision: str | None, *, download: bool) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    where = f"models.{name} = {model}{f'@{revision}' if revision else ''}"
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=_HUB_FILES, local_files_only=not download))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        if not download:
            return None
        raise ConfigError(
            f"{where}: is not in the local cache and the hub cannot be reached; go online once, or give a local folder"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{where}: cannot be downloaded ({reason}); check name and revision, or give a local folder") from error


# ---- digests --------------------------------------------------------------------------------


def fault_of(ref: Ref, home: Path) -> str | None:
    """What is wrong with a finished artifact, in words: gone or changed; None when it is what its digest says.

    Its content is read again only when the names, sizes or times of its files have changed since the last look.
    """
    if not is_there(ref.path):
        return f"{ref.path} is gone"
    if _digest(ref.path, home) != ref.digest:
        return f"{ref.path} has changed"
    return None


def note_digests(home: Path, *refs: Ref) -> None:
    """Keep the digests of artifacts that were just made, so that the next plan need not read them."""
    write_json(home / _DIGESTS, {**_known(home), **{str(ref.path): [_signature(ref.path), ref.digest] for ref in refs}})


def _digest(path: Path, home: Path) -> str:
    signature, known = _signature(path), _known(home)
    if known.get(str(path), [""])[0] == signature:
        return known[str(path)][1]
    digest = digest_of_folder(path) if path.is_dir() else digest_of_file(path)
    if home.is_dir():
        write_json(home / _DIGESTS, {**known, str(path): [signature, digest]})
    return digest


def _signature(path: Path) -> str:
    """Digest of names, sizes and times of the files at a path."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    listing = [(file.name, file.relative_to(path).as_posix(), stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]]
    return hashlib.sha256(repr(listing).encode()).hexdigest()


def _known(home: Path) -> dict[str, list[str]]:
    try:
        known: dict[str, list[str]] = json.loads((home / _DIGESTS).read_text())
    except (OSError, ValueError):
        return {}
    return known
