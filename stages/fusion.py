"""Thinking-mode fusion: one model, two modes, switched by `/think`, `/no_think` or the template.

What      SFT on the RL model's own verified thinking traces and on direct answers.
Reads     `model`, `thinking` (traces of rejection_sampling), `direct` (problems with answers).
Writes    `model`.
Papers    Qwen3 (arXiv 2505.09388) 4.3 and Table 9: flags in the user's message, thinking as the default
          (so some thinking samples carry no flag), an empty think block when not thinking.
Differs   Single-turn only. Direct answers are the gold answers of the curated problems (those of programs and JSON
          have none and are left out); half of them use the flag (the model writes the empty block), half the template's
          switch (the prompt has it).
"""

from __future__ import annotations

import random
from pathlib import Path

from stages.artifacts import CheckpointRef, Handles, StageOutput
from stages.config import Fusion
from stages.errors import DataError
from stages.problems import RESPONSE_STYLES
from stages.records import Recorder
from stages.rewards.tasks import Task
from stages.supervised import direct_example, fine_tune, thinking_example
from stages.tables import read_rows
from stages.training import load_tokenizer


def run(config: Fusion, inputs: Handles, stage_dir: Path, seed: int) -> StageOutput:
    """Fine-tune on `config.examples` examples, `config.thinking_share` of them in thinking mode."""
    model = inputs["model"]
    assert isinstance(model, CheckpointRef)
    tokenizer, rng = load_tokenizer(model), random.Random(seed)
    wanted = round(config.examples * config.thinking_share)
    traces = read_rows(inputs["thinking"], columns=("question", "trace", "response"))[:wanted]
    if len(traces) < wanted:
        print(f"{len(traces)} thinking traces in place of {wanted}: thinking_share falls short; sample more problems in rejection_sampling")
    problems = read_rows(inputs["direct"], columns=("question", "answer"))
    direct = [row for row in problems if Task.of(row).boxed][: config.examples - wanted]
    if not direct and wanted < config.examples:
        raise DataError(
            f"{inputs['direct'].name}: none of {len(problems)} problems has an answer to learn: their gold answers are schemas or tests of "
            "programs, which answers are held against; read `direct` from problems with other answers, or set thinking_share to 1"
        )
    examples = [
        thinking_example(tokenizer, row["question"], row["trace"], row["response"], flag=rng.random() >= config.unflagged_share)
        for row in traces
    ]
    examples += [
        direct_example(tokenizer, row["question"], rng.choice(RESPONSE_STYLES).format(answer=row["answer"]), flag=index % 2 == 0)
        for index, row in enumerate(direct)
    ]
    checkpoint, metrics = fine_tune(
        model,
        examples,
        config,
        stage_dir,
        seed,
        name="fusion.model",
        card=f"# Thinking-mode fusion\n\n`{model.name}` fine-tuned on {len(traces)} of its own thinking traces and {len(direct)} direct "
        "answers (posttrain, stage `fusion`). `/think` and `/no_think` in the user's message switch the mode.\n",
    )
    metrics["fusion/thinking_share"] = len(traces) / len(examples)
    Recorder(stage_dir).metrics(0, {"fusion/thinking_share": metrics["fusion/thinking_share"]})
    return StageOutput(outputs={"model": checkpoint}, metrics=metrics)
