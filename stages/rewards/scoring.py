"""Scores of a scalar reward model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH = 64


def score_texts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[float]:
    """One score per rendered conversation (prompt and response), read at its last token."""
    import torch

    model.eval()
    scores: list[float] = []
    with torch.no_grad():
        for start in range(0, len(texts), BATCH):
            batch = tokenizer(list(texts[start : start + BATCH]), add_special_tokens=False, padding=True, return_tensors="pt")
            logits = model(input_ids=batch["input_ids"].to(model.device), attention_mask=batch["attention_mask"].to(model.device)).logits
            scores += logits[:, 0].float().cpu().tolist()
    return scores
