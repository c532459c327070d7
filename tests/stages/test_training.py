"""Loading, resuming and exporting: what the next stage can rely on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stages.artifacts import CheckpointRef, digest_of_folder, last_checkpoint
from stages.errors import ArtifactError
from stages.rewards.scoring import score_texts
from stages.training import export_checkpoint, load_model, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NewStage = Callable[[str], Path]


def test_last_checkpoint_is_the_newest_complete_one_by_number(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    for name, complete in (("checkpoint-9", True), ("checkpoint-25", True), ("checkpoint-100", False), ("checkpoint-best", True)):
        folder = tmp_path / "trainer" / "train" / name
        folder.mkdir(parents=True)
        (folder / "model.safetensors").touch()
        if complete:
            (folder / "trainer_state.json").write_text("{}")
    cut = tmp_path / "trainer" / "train" / "checkpoint-50"
    cut.mkdir()
    (cut / "trainer_state.json").write_text('{"global')  # the disk was full
    assert last_checkpoint(tmp_path) == tmp_path / "trainer" / "train" / "checkpoint-25"


def test_export_checkpoint_of_a_loaded_model_writes_the_same_weights_and_ends_the_phase(
    random_model: CheckpointRef, tokenizer: PreTrainedTokenizerFast, new_stage: NewStage
) -> None:
    stage_dir = new_stage("fusion")
    resumable = stage_dir / "trainer" / "train" / "checkpoint-1"
    resumable.mkdir(parents=True)
    (resumable / "trainer_state.json").write_text("{}")
    first = export_checkpoint(load_model(random_model), tokenizer, stage_dir, name="fusion.model", card="# A\n")
    assert not resumable.exists()
    second = export_checkpoint(load_model(first), load_tokenizer(first), new_stage("fusion"), name="fusion.model", card="# B\n")
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"):
        assert (second.path / name).read_bytes() == (first.path / name).read_bytes()
    assert not [path for path in second.path.glob("*.json") if str(first.path.parent) in path.read_text()]


def test_export_checkpoint_that_does_not_hold_the_live_weights_is_an_artifact_error(
    random_model: CheckpointRef, tokenizer: PreTrainedTokenizerFast, new_stage: NewStage
) -> None:
    import torch

    model = load_model(random_model)
    with torch.no_grad():
        model.model.rotary_emb.inv_freq.mul_(3)  # in the live model, but in no file
    with pytest.raises(ArtifactError, match=r"fusion\.model: logits moved by .* in the export"):
        export_checkpoint(model, tokenizer, new_stage("fusion"), name="fusion.model", card="")


def test_export_checkpoint_weights_that_are_not_numbers_are_an_artifact_error(
    random_model: CheckpointRef, tokenizer: PreTrainedTokenizerFast, new_stage: NewStage
) -> None:
    import torch

    model = load_model(random_model)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ArtifactError, match=r"fusion\.model"):
        export_checkpoint(model, tokenizer, new_stage("fusion"), name="fusion.model", card="")


def test_export_checkpoint_vocabulary_smaller_than_the_tokenizer_is_an_artifact_error(
    random_model: CheckpointRef, tokenizer: PreTrainedTokenizerFast, new_stage: NewStage
) -> None:
    model = load_model(random_model)
    model.resize_token_embeddings(len(tokenizer) - 2)
    with pytest.raises(ArtifactError, match=f"{len(tokenizer)} tokens but {len(tokenizer) - 2} embeddings; resize the model"):
        export_checkpoint(model, tokenizer, new_stage("fusion"), name="fusion.model", card="")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pad_token": "<|im_end|>"}, "they must be two tokens"),
        ({"pad_token": None}, "they must be two tokens"),
        (None, "has no chat template"),
    ],
)
def test_load_tokenizer_that_cannot_train_is_an_artifact_error(
    random_model: CheckpointRef, tmp_path: Path, change: dict[str, str | None] | None, message: str
) -> None:
    path = tmp_path / "model"
    shutil.copytree(random_model.path, path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    if change is None:
        (path / "chat_template.jinja").unlink()
    (path / "tokenizer_config.json").write_text(json.dumps(settings | (change or {})))
    with pytest.raises(ArtifactError, match=message):
        load_tokenizer(random_model.model_copy(update={"path": path}))


def test_load_model_scalar_kind_has_one_score_and_survives_the_export(
    random_model: CheckpointRef, tokenizer: PreTrainedTokenizerFast, new_stage: NewStage
) -> None:
    import torch

    torch.manual_seed(0)
    judge = load_model(random_model, kind="scalar")
    texts = ["<|im_start|>user\n3+4<|im_end|>\n", "a longer text, so that the other one is padded<|im_end|>", "x<|im_end|>"]
    together = score_texts(judge, tokenizer, texts)
    alone = [score_texts(judge, tokenizer, [text])[0] for text in texts]
    assert together == pytest.approx(alone, abs=1e-5)  # read at the last token, not at padding
    assert len(set(together)) == 3
    exported = export_checkpoint(judge, tokenizer, new_stage("reward_model"), name="reward_model.reward_model", card="")
    assert score_texts(load_model(exported, kind="scalar"), tokenizer, texts) == pytest.approx(together, abs=1e-5)
    assert exported.digest == digest_of_folder(exported.path)
