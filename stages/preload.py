"""Pays the imports of every stage once: the fork server imports this file, and each stage's process is forked from it.

The environment is set first, because the libraries read it when they are imported. Nothing here may
start CUDA: a process forked after that could not use the GPU.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from contextlib import suppress

from stages.config import STAGES

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # models are fetched by the conductor, before any stage starts
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking whether there is a GPU must not start CUDA
}
MODULES = (
    "torch",
    "transformers",
    "transformers.models.qwen3.modeling_qwen3",
    "datasets",
    "trl.trainer.sft_trainer",
    "trl.trainer.grpo_trainer",
    "trl.trainer.reward_trainer",
    "trl.trainer.distillation_trainer",
    "vllm",
    "vllm.v1.engine.llm_engine",
    "duckdb",
    "pyarrow.parquet",
    "reasoning_gym",
    "scipy.stats",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
)


def preload() -> None:
    """Import `MODULES` quietly. One that cannot be imported is left to the stage that needs it, whose log then says why."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal group; the conductor ends us
    quiet = os.open(os.devnull, os.O_WRONLY)
    kept = os.dup(1), os.dup(2)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        stages = (f"stages.{name}" for name in (*STAGES, "child", "rollouts.answers", "rewards.scoring"))
        for name in (*MODULES, *stages):  # the stages too: a file edited while a recipe runs must not change what runs
            with suppress(Exception):
                importlib.import_module(name)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for target, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, target)
            os.close(copy)
        os.close(quiet)


if __name__ != "__main__":
    preload()
