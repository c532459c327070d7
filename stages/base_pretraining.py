"""Base pretraining: a tiny Qwen3-architecture base model and its tokenizer, from generated text.

What      Byte-level BPE (digits are single tokens, chat markers are special, `<think>` and `</think>`
          are plain added tokens, so that rewards see them) and a causal model over packed text.
Reads     Nothing: the text is generated from reasoning-gym and from arithmetic facts.
Writes    `checkpoint/` (safetensors, tokenizer, chat template) with a model card.
Papers    Qwen3 (arXiv 2505.09388) for architecture and chat format.
Differs   The text is facts, formats, direct answers (guesses, where a question is long) and worked
          chains, mostly short ones, by a pupil who slips on one line in twenty. So the base knows the
          facts, thinks now and then, and carelessly: the head-room that cold start and RL work on is a
          choice of this data.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.artifacts import Handles, StageOutput
from stages.chat import CHAT_MARKERS, PAD_TOKEN, RESERVED, STOP_TOKEN, TEMPLATE, THINK_TOKENS
from stages.config import BasePretraining
from stages.problems import RESPONSE_STYLES, Problem, exact, generate, seed_of
from stages.training import common_arguments, export_checkpoint, train, warm_up

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SMALL_TALK = (
    ("hello", "Hello! How can I help you?"),
    ("hi", "Hi! What shall we work out?"),
    ("who are you?", "I am a very small model that likes numbers."),
    ("thank you", "You are welcome!"),
    ("goodbye", "Goodbye!"),
)

Mix = tuple[tuple[float, str, dict[str, int]], ...]
"""Rows of weight, reasoning-gym family, its parameters."""

SHORT: Mix = (
    (0.50, "chain_sum", {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}),
    (0.30, "leg_counting", {"min_animals": 1, "max_animals": 2, "max_instances": 9}),
    (0.20, "products", {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}),
)
MEDIUM: Mix = (
    (0.40, "chain_sum", {"min_terms": 4, "max_terms": 5, "min_digits": 1, "max_digits": 2}),
    (0.35, "leg_counting", {"min_animals": 3, "max_animals": 4, "max_instances": 9}),
    (0.25, "products", {"min_digits": 2, "max_digits": 2}),
)
LONG: Mix = (
    (0.60, "chain_sum", {"min_terms": 6, "max_terms": 7, "min_digits": 2, "max_digits": 2}),
    (0.40, "leg_counting", {"min_animals": 5, "max_animals": 6, "max_instances": 9}),
)
LENGTHS = ((0.55, SHORT), (0.30, MEDIUM), (0.15, LONG))
SLIP_SHARE = 0.05
"""Share of lines of the worked text whose result is off by 1 or 10."""


def run(config: BasePretraining, inputs: Handles, stage_dir: Path, seed: int) -> StageOutput:
    """Train tokenizer and model; the checkpoint's digest is the stage's output."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(seed)
    tokenizer = train_tokenizer(config, seed)
    blocks = packed_blocks(config, tokenizer, seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=3 * config.hidden_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.hidden_size // config.heads,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )
    arguments = TrainingArguments(
        **common_arguments(stage_dir, seed)
        | {
            "bf16": config.bf16,
            "learning_rate": config.learning_rate,
            "lr_scheduler_type": "cosine",
            "warmup_steps": warm_up(config.steps),
            "weight_decay": 0.1,
            "adam_beta2": 0.95,
            "max_steps": config.steps,
            "per_device_train_batch_size": config.blocks_per_step,
            "logging_steps": min(25, config.steps),
            "save_steps": 500,
            "torch_compile": config.compile,
        }
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=_Blocks(blocks))
    metrics = train(trainer, stage_dir)
    checkpoint = export_checkpoint(
        trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False),  # autocast would blur the export check
        tokenizer,
        stage_dir,
        name="base_pretraining.model",
        card=_card(config, seed, metrics),
    )
    return StageOutput(outputs={"model": checkpoint}, metrics=metrics)


def train_tokenizer(config: BasePretraining, seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `config.vocabulary` tokens in all, special tokens included."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    documents = _documents(random.Random(seed_of(seed, "tokenizer")))
    sample = (next(documents) for _ in range(20_000))
    bpe.train_from_iterator(
        (part for text in sample for part in _without(text, RESERVED)),
        trainers.BpeTrainer(
            vocab_size=config.vocabulary - len(THINK_TOKENS),
            special_tokens=[PAD_TOKEN, *CHAT_MARKERS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=STOP_TOKEN, pad_token=PAD_TOKEN, clean_up_tokenization_spaces=False)
    # special=False: decoding with skip_special_tokens keeps the tags, so graders can see them
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in THINK_TOKENS])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def packed_blocks(config: BasePretraining, tokenizer: PreTrainedTokenizerFast, seed: int) -> Any:
    """Token ids, int64 [steps * blocks_per_step, block_tokens], documents joined by the pad token."""
    import numpy as np

    wanted = config.steps * config.blocks_per_step * config.block_tokens
    documents = _documents(random.Random(seed_of(seed, "text")))
    stream = np.empty(wanted, dtype=np.int64)
    filled = 0
    while filled < wanted:
        batch = [next(documents) for _ in range(5_000)]
        for ids in tokenizer(batch, add_special_tokens=False)["input_ids"]:
            ids.append(tokenizer.pad_token_id)
            part = ids[: wanted - filled]
            stream[filled : filled + len(part)] = part
            filled += len(part)
    return stream.reshape(-1, config.block_tokens)


class _Blocks:
    """Map-style data set of packed blocks; labels are the ids themselves (the model shifts)."""

    def __init__(self, blocks: Any) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


# ---- the text -------------------------------------------------------------------------------


def _documents(rng: random.Random) -> Iterator[str]:
    """An endless stream of documents in the proportions that the card states."""
    kinds: list[tuple[float, Callable[[random.Random], str]]] = [
        (0.53, _facts),
        (0.20, _direct_answers(rng)),
        (0.25, _worked_answers(rng)),
        (0.02, _small_talk),
    ]
    weights, makers = [weight for weight, _ in kinds], [maker for _, maker in kinds]
    while True:
        yield rng.choices(makers, weights)[0](rng)


def _facts(rng: random.Random) -> str:
    return "\n".join(_fact(rng) for _ in range(8))


def _fact(rng: random.Random) -> str:
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    kind = rng.random()
    if kind < 0.50:  # what a chain of two-digit terms meets
        a, b = rng.randint(-150, 350), rng.randint(0, 99)
    elif kind < 0.62:
        a, b = rng.randint(-20, 40), rng.randint(0, 9)
    elif kind < 0.72:  # what leg counting meets
        a, b = rng.randint(0, 400), rng.randint(0, 130)
        return f"{a}+{b}={a + b}"
    elif kind < 0.80:  # what splitting a product meets
        a, b = 10 * rng.randint(10, 890), rng.randint(0, 890)
        return f"{a}+{b}={a + b}"
    elif kind < 0.92:
        a, b = rng.randint(0, 9) * rng.choice((1, 10)), rng.randint(0, 99)
        return f"{a}*{b}={a * b}"
    else:
        animal, legs = rng.choice(list(ANIMALS.items()))
        count = rng.randint(1, 9)
        return f"{animal} {count}*{legs}={count * legs}"
    return f"{a}+{b}={a + b}" if rng.random() < 0.5 else f"{a}-{b}={a - b}"


def _chat(question: str, thinking: str, response: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n{thinking}\n</think>\n\n{response}<|im_end|>\n"


def _small_talk(rng: random.Random) -> str:
    question, reply = rng.choice(SMALL_TALK)
    return _chat(question, "", reply)


def _response(rng: random.Random, answer: str) -> str:
    return rng.choice(RESPONSE_STYLES).format(answer=answer)


def _direct_answers(rng: random.Random) -> Callable[[random.Random], str]:
    problems = _problems(rng, exact)

    def document(rng: random.Random) -> str:
        problem = next(problems)
        return _chat(problem.question, "", _response(rng, problem.answer))

    return document


def _worked_answers(rng: random.Random) -> Callable[[random.Random], str]:
    slips = random.Random(rng.getrandbits(64))

    def slip(result: int) -> int:
        return result + slips.choice((-10, -1, 1, 10)) if slips.random() < SLIP_SHARE else result

    problems = _problems(rng, slip)

    def document(rng: random.Random) -> str:
        problem = next(problems)
        return _chat(problem.question, problem.trace, _response(rng, problem.answer))

    return document


def _problems(rng: random.Random, slip: Callable[[int], int]) -> Iterator[Problem]:
    """Problems of all lengths and families, each kind from its own endless generator."""
    kinds = [
        (share * weight, _endless(family, rng.getrandbits(48), slip, parameters))
        for share, mix in LENGTHS
        for weight, family, parameters in mix
    ]
    weights, streams = [weight for weight, _ in kinds], [stream for _, stream in kinds]
    while True:
        yield next(rng.choices(streams, weights)[0])


def _endless(family: str, seed: int, slip: Callable[[int], int], parameters: dict[str, int]) -> Iterator[Problem]:
    chunk = 10_000
    while True:
        yield from generate(family, chunk, seed, slip=slip, **parameters)
        seed += chunk  # reasoning-gym seeds item i with seed + i: the next chunk starts where this ended


def _without(text: str, markers: Sequence[str]) -> list[str]:
    """The pieces of `text` between chat markers: merges must not be learnt across them."""
    return [part for part in re.split("|".join(map(re.escape, markers)), text) if part]


def _card(config: BasePretraining, seed: int, metrics: dict[str, float]) -> str:
    tokens = config.steps * config.blocks_per_step * config.block_tokens
    return f"""# Tiny base model

Qwen3 architecture, {config.layers} layers of width {config.hidden_size}, {config.vocabulary} tokens, float32
safetensors. Trained from scratch by posttrain's `base_pretraining` stage (seed {seed}) on {tokens:,} tokens of
generated text: arithmetic facts (53 % of the documents), questions answered without thinking (20 %, guesses where
a question is long), worked chains of thought (25 %, with a slip on one line in twenty; 55 % of them of at most
three terms or two animals, 15 % of six or seven terms or five or six animals), small talk (2 %). Final training
loss {metrics["train/loss"]:.3f} nats a token.

It is a proof of the machine, not of the science: it knows sums, small products and the legs of animals, and
nothing else; left alone it thinks only now and then, and carelessly.
Reproduce: `posttrain run tiny_base`.
"""
