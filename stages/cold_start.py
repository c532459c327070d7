"""Cold start: light supervised fine-tuning on long chains of thought, before any RL.

What      SFT of the base model on worked traces in thinking mode.
Reads     `model`, `traces` (problems with a worked trace).
Writes    `model`.
Papers    DeepSeek-R1 (arXiv 2501.12948) 2.3.1; Qwen3 (arXiv 2505.09388) 4.1: as few samples and steps
          as possible, so that RL keeps room.
Differs   The embedded default's traces are worked out by code (stages/problems.py), not sampled from
          a larger model and curated; give a JSONL or Parquet source with a trace column for your own.
"""

from __future__ import annotations

import random
from pathlib import Path

from stages.artifacts import CheckpointRef, Handles, StageOutput
from stages.config import ColdStart
from stages.errors import DataError
from stages.problems import RESPONSE_STYLES
from stages.supervised import fine_tune, thinking_example
from stages.tables import read_rows
from stages.training import load_tokenizer


def run(config: ColdStart, inputs: Handles, stage_dir: Path, seed: int) -> StageOutput:
    """Fine-tune on the first `config.examples` traces; final answers in all response styles."""
    model = inputs["model"]
    assert isinstance(model, CheckpointRef)
    problems = read_rows(inputs["traces"], columns=("question", "answer", "trace"))
    worked = [row for row in problems if row["trace"]][: config.examples]
    if not worked:
        raise DataError(
            f"{inputs['traces'].name}: none of {len(problems)} problems has a trace; cold start needs worked traces; "
            "set `trace` in the source or `with_trace: true` in the pool"
        )
    tokenizer, rng = load_tokenizer(model), random.Random(seed)
    examples = [
        thinking_example(tokenizer, row["question"], row["trace"], rng.choice(RESPONSE_STYLES).format(answer=row["answer"]))
        for row in worked
    ]
    checkpoint, metrics = fine_tune(
        model,
        examples,
        config,
        stage_dir,
        seed,
        name="cold_start.model",
        card=f"# Cold start\n\n`{model.name}` fine-tuned on {len(examples)} worked traces (posttrain, stage `cold_start`).\n",
    )
    return StageOutput(outputs={"model": checkpoint}, metrics=metrics)
