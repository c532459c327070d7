"""Supervised fine-tuning on prompt and completion text, shared by cold start, fusion and distillation.

The loss covers the completion only, its think block and stop token included. Before training, every
example is checked as the next stage will meet it: the prompt's tokens must open the example's tokens
(else inference never sees what was trained), and the last token must be the stop token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stages.artifacts import CheckpointRef
from stages.chat import render_completion, render_prompt
from stages.config import SupervisedConfig
from stages.errors import ArtifactError, DataError
from stages.training import common_arguments, cosine_to_a_tenth, export_checkpoint, load_model, load_tokenizer, train

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Example(NamedTuple):
    """One training text: the loss covers `completion`."""

    prompt: str
    completion: str


def thinking_example(tokenizer: PreTrainedTokenizerBase, question: str, thinking: str, response: str, *, flag: bool = False) -> Example:
    """An example in thinking mode; `flag` adds `/think` to the question (Qwen3, Table 9)."""
    return Example(render_prompt(tokenizer, question, thinking=True, flag=flag), render_completion(response, thinking=thinking))


def direct_example(tokenizer: PreTrainedTokenizerBase, question: str, response: str, *, flag: bool = False) -> Example:
    """An example in non-thinking mode.

    Without the flag the prompt holds the empty think block; with `/no_think` the model writes the
    empty block itself, so it stands in the completion and under the loss.
    """
    return Example(
        render_prompt(tokenizer, question, thinking=False, flag=flag), render_completion(response, thinking="" if flag else None)
    )


def fine_tune(
    model_ref: CheckpointRef, examples: Sequence[Example], config: SupervisedConfig, stage_dir: Path, seed: int, *, name: str, card: str
) -> tuple[CheckpointRef, dict[str, float]]:
    """Train on the examples (shuffled) and export the checkpoint; returns it with the last metrics.

    Raises DataError for an example longer than `max_tokens`, ArtifactError when the rendering does
    not hold together.
    """
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokenizer = load_tokenizer(model_ref)
    check_rendering(tokenizer, examples, config.max_tokens)
    order = random.Random(seed).sample(range(len(examples)), len(examples))
    torch.manual_seed(seed % 2**63)
    arguments = SFTConfig(
        **common_arguments(stage_dir, seed)
        | cosine_to_a_tenth(config.epochs * len(examples) / config.batch_size)
        | {
            "learning_rate": config.learning_rate,
            "num_train_epochs": config.epochs,
            "per_device_train_batch_size": config.batch_size,
            "max_length": config.max_tokens,
            "completion_only_loss": True,
            "weight_decay": 0.0,
            "save_steps": 25,
            "dataset_num_proc": None,
        }
    )
    trainer = SFTTrainer(
        model=load_model(model_ref),
        args=arguments,
        train_dataset=Dataset.from_list([examples[index]._asdict() for index in order]),
        processing_class=tokenizer,
    )
    metrics = train(trainer, stage_dir)
    metrics["train/examples"] = float(len(examples))
    return export_checkpoint(trainer.model, tokenizer, stage_dir, name=name, card=card), metrics


def check_rendering(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], max_tokens: int) -> None:
    """Raise when an example would train something that inference never meets (see the module's text)."""
    prompts = tokenizer([example.prompt for example in examples], add_special_tokens=False)["input_ids"]
    texts = tokenizer([example.prompt + example.completion for example in examples], add_special_tokens=False)["input_ids"]
    for example, prompt, text in zip(examples, prompts, texts, strict=True):
        if text[: len(prompt)] != prompt:
            raise ArtifactError(
                f"the tokens of the prompt do not open the tokens of the training text ({example.prompt[-40:]!r} + "
                f"{example.completion[:40]!r}); inference would never see what is trained; mend the chat template or tokenizer"
            )
        if text[-1] != tokenizer.eos_token_id:
            raise ArtifactError(
                f"the training text ends in {tokenizer.decode(text[-1:])!r}, the stop token is {tokenizer.eos_token!r}; "
                "the model would never learn to stop; mend the chat template"
            )
        if len(text) > max_tokens:
            raise DataError(
                f"a training text has {len(text)} tokens; the rule is at most max_tokens = {max_tokens} "
                f"(nothing is cut silently); raise max_tokens or leave the problem out: {example.prompt[:80]!r}"
            )
