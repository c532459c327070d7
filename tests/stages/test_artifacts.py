"""Handles and digests: what is the same artifact, and how a damaged one is met."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from stages.artifacts import CheckpointRef, DatasetRef, StageResult, digest_of_file, digest_of_folder, read_result, verify, write_json
from stages.errors import ArtifactError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    (path / "sub").mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "sub" / "weights.safetensors").write_bytes(b"\x00\x01")
    return path


def result(**changes: Any) -> StageResult:
    values: dict[str, Any] = {
        "stage": "fusion",
        "fingerprint": "f" * 64,
        "key": {},
        "outputs": {},
        "metrics": {"a": 1.0},
        "seconds": 1.0,
        "busy_seconds": 0.5,
        "tokens": 3,
        "peak_memory_mib": 10.0,
        "versions": {},
    }
    return StageResult.model_validate(values | changes)


def test_digest_of_file_is_the_sha256_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    path.write_bytes(b"posttrain")
    assert digest_of_file(path) == hashlib.sha256(b"posttrain").hexdigest()


@pytest.mark.parametrize("change", ["content", "name", "new", "gone"])
def test_digest_of_folder_any_change_of_content_changes_it(folder: Path, change: str) -> None:
    before, weights = digest_of_folder(folder), folder / "sub" / "weights.safetensors"
    match change:
        case "content":
            weights.write_bytes(b"\x00\x02")
        case "name":
            weights.rename(folder / "weights.safetensors")
        case "new":
            (folder / "tokenizer.json").write_text("{}")
        case "gone":
            weights.unlink()
    assert digest_of_folder(folder) != before


def test_digest_of_folder_model_card_trainer_arguments_and_place_do_not_count(folder: Path, tmp_path: Path) -> None:
    before = digest_of_folder(folder)
    (folder / "README.md").write_text("# card")
    (folder / "training_args.bin").write_bytes(b"x")
    assert digest_of_folder(folder) == before
    assert digest_of_folder(folder.rename(tmp_path / "moved")) == before


def test_digest_of_folder_without_files_is_an_artifact_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="holds no files"):
        digest_of_folder(tmp_path)


def test_verify_untouched_artifact_passes_and_a_changed_or_lost_one_says_which(folder: Path) -> None:
    ref = CheckpointRef(name="fusion.model", digest=digest_of_folder(folder), path=folder, producer="0123456789abcdef")
    verify(ref)
    (folder / "config.json").write_text("{ }")
    with pytest.raises(ArtifactError, match=r"fusion\.model: .*has changed \(digest \w{12}, recorded \w{12}\)"):
        verify(ref)
    lost = ref.model_copy(update={"path": folder / "nowhere"})
    with pytest.raises(ArtifactError, match=r"fusion\.model: .* is gone; rerun the stage that made it \(0123456789ab\)"):
        verify(lost)


def test_verify_changed_data_set_is_an_artifact_error(tmp_path: Path) -> None:
    path = tmp_path / "rl.parquet"
    path.write_bytes(b"rows")
    ref = DatasetRef(name="curation.rl", digest=digest_of_file(path), path=path, producer="given", rows=1)
    verify(ref)
    path.write_bytes(b"rovs")
    with pytest.raises(ArtifactError, match="has changed"):
        verify(ref)


def test_ref_is_frozen_and_closed() -> None:
    ref = CheckpointRef(name="a", digest="b", path=Path("/c"), producer="d")
    with pytest.raises(ValidationError, match="frozen"):
        ref.name = "x"  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Extra inputs"):
        CheckpointRef.model_validate({"name": "a", "digest": "b", "path": "/c", "producer": "d", "rows": 1})


def test_write_json_leaves_only_the_finished_file_and_replaces_the_old(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    for content in ({"a": 1}, {"b": "ü"}):
        write_json(path, content)
        assert json.loads(path.read_text()) == content
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_write_json_content_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


def test_read_result_finished_stage_comes_back_equal(tmp_path: Path) -> None:
    outputs = {
        "model": CheckpointRef(name="fusion.model", digest="a" * 64, path=tmp_path / "checkpoint", producer="f"),
        "traces": DatasetRef(name="fusion.traces", digest="b" * 64, path=tmp_path / "traces.parquet", producer="f", rows=2),
    }
    written = result(outputs=outputs)
    assert read_result(tmp_path) is None
    write_json(tmp_path / "result.json", written.model_dump(mode="json"))
    read = read_result(tmp_path)
    assert read == written
    assert {name: type(ref) for name, ref in read.outputs.items()} == {"model": CheckpointRef, "traces": DatasetRef}


@pytest.mark.parametrize("text", ["", "{", "{}", '{"stage": "fusion", "unknown": 1}'])
def test_read_result_file_that_cannot_be_read_is_an_artifact_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_result(tmp_path)
