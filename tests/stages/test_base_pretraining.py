"""Base pretraining: the text it is made of, and a model that comes out of a few steps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stages.artifacts import CheckpointRef, digest_of_folder
from stages.base_pretraining import packed_blocks, run
from stages.config import BasePretraining
from stages.records import read_records
from stages.training import load_model, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TINY = BasePretraining(
    vocabulary=400,
    hidden_size=32,
    layers=1,
    heads=1,
    kv_heads=1,
    steps=30,
    blocks_per_step=4,
    block_tokens=64,
    learning_rate=1e-2,
    bf16=False,
)


def test_packed_blocks_hold_true_facts_and_whole_conversations(tokenizer: PreTrainedTokenizerFast) -> None:
    config = TINY.model_copy(update={"steps": 40, "blocks_per_step": 8, "block_tokens": 128})
    blocks = packed_blocks(config, tokenizer, 0)
    assert blocks.shape == (320, 128)
    start = packed_blocks(config.model_copy(update={"steps": 1}), tokenizer, 0)
    assert start.tolist() == blocks[:8].tolist()  # the seed alone decides the text
    documents = tokenizer.decode(blocks.reshape(-1).tolist()).split("<|endoftext|>")[:-1]
    facts = [
        re.fullmatch(r"(?:[a-z ]+ )?(-?\d+)([-+*])(-?\d+)=(-?\d+)", line)
        for text in documents
        if "<" not in text
        for line in text.splitlines()
    ]
    assert len(facts) > 1_000
    for fact in facts:
        assert fact
        left, operator, right, result = fact.groups()
        assert int(result) == {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[operator]
    chats = [text for text in documents if "<" in text]
    assert len(chats) > 50
    for text in chats:
        assert re.fullmatch(
            r"<\|im_start\|>user\n[^<]+<\|im_end\|>\n<\|im_start\|>assistant\n<think>\n[^<]*\n</think>\n\n[^<]+<\|im_end\|>\n", text
        ), text


def test_base_pretraining_few_steps_learn_and_export_a_checkpoint_others_can_load(
    new_stage: Callable[[str], Path], tokenizer: PreTrainedTokenizerFast
) -> None:
    stage_dir = new_stage("base_pretraining")
    output = run(TINY, {}, stage_dir, 0)
    model = output.outputs["model"]
    assert isinstance(model, CheckpointRef)
    assert (model.name, model.digest) == ("base_pretraining.model", digest_of_folder(stage_dir / "checkpoint"))
    assert load_model(model).config.vocab_size == len(load_tokenizer(model)) == 400
    assert load_tokenizer(model).get_vocab() == tokenizer.get_vocab()  # trained twice from one seed
    assert json.loads((model.path / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert "7,680 tokens" in (model.path / "README.md").read_text()
    losses = [
        record["metrics"]["train/loss"] for record in read_records(stage_dir / "metrics.jsonl") if "train/loss" in record.get("metrics", {})
    ]
    assert losses[-1] < 5.5  # ln(400) = 5.99 knows nothing
