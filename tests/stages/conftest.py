"""Tiny models for the tests of the stages: one with random weights, one that has learnt a single answer.

The environment is set before any library is imported, as `stages/preload.py` does it for a stage's process.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from stages.artifacts import CheckpointRef, DatasetRef, digest_of_file, digest_of_folder, last_checkpoint
from stages.config import BasePretraining, ColdStart, EngineConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

for name, value in {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(name, value)

SMALL_ENGINE = EngineConfig(max_model_tokens=192, max_sequences=64, kv_cache_mib=32)


@pytest.fixture
def new_stage(tmp_path: Path) -> Callable[[str], Path]:
    """Make an empty stage folder of a kind, as the conductor does; each call makes another."""
    return lambda kind: _stage_dir(tmp_path, kind)


@pytest.fixture
def kill_at_a_checkpoint() -> Callable[[Callable[[Path], Any], Path], None]:
    """Does work in a stage folder in a process of its own, and kills it once a trainer's checkpoint is there."""

    def kill(work: Callable[[Path], Any], stage_dir: Path) -> None:
        process = multiprocessing.get_context("fork").Process(target=work, args=(stage_dir,))
        process.start()
        while last_checkpoint(stage_dir) is None and process.is_alive():
            process.join(0.01)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL

    return kill


@pytest.fixture
def room_for() -> Callable[[int], AbstractContextManager[None]]:
    """Within `with room_for(n):` this process can open n more files, wherever the numbers of those it has open leave gaps."""

    @contextmanager
    def limited(files: int) -> Iterator[None]:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 40, limits[1]))
        held: list[int] = []
        try:
            with suppress(OSError):
                while True:
                    held.append(os.open(os.devnull, os.O_RDONLY))
            for _ in range(files):
                os.close(held.pop())
            yield
        finally:
            for descriptor in held:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    return limited


@pytest.fixture
def problems(tmp_path: Path) -> Callable[[Sequence[dict[str, Any]]], DatasetRef]:
    """Write rows to a Parquet file and give its handle."""

    def write(rows: Sequence[dict[str, Any]]) -> DatasetRef:
        path = tmp_path / f"problems_{len(list(tmp_path.glob('problems_*')))}.parquet"
        parquet.write_table(pa.Table.from_pylist(list(rows)), path)
        return DatasetRef(name="curation.rl", digest=digest_of_file(path), path=path, producer="given", rows=len(rows))

    return write


@pytest.fixture(scope="session")
def small_engine() -> EngineConfig:
    return SMALL_ENGINE


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    from stages.base_pretraining import train_tokenizer

    return train_tokenizer(BasePretraining(vocabulary=400), 0)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> CheckpointRef:
    """A Qwen3 of two layers with random weights and the project's own tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    path = tmp_path_factory.mktemp("random_model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return CheckpointRef(name="random", digest=digest_of_folder(path), path=path, producer="given")


@pytest.fixture(scope="session")
def pupil(tmp_path_factory: pytest.TempPathFactory, random_model: CheckpointRef, tokenizer: PreTrainedTokenizerFast) -> CheckpointRef:
    """The random model after fine-tuning on one lesson: whatever is asked, the answer is 7, in any of the styles."""
    from stages.problems import RESPONSE_STYLES

    return _taught([style.format(answer=7) for style in RESPONSE_STYLES], random_model, tokenizer, tmp_path_factory.mktemp("pupil"))


@pytest.fixture(scope="session")
def json_pupil(tmp_path_factory: pytest.TempPathFactory, random_model: CheckpointRef, tokenizer: PreTrainedTokenizerFast) -> CheckpointRef:
    """The random model after fine-tuning on one lesson: whatever is asked, the answer is a JSON object with 7 in it."""
    return _taught(['{"x": 7}'] * 4, random_model, tokenizer, tmp_path_factory.mktemp("json_pupil"))


def _taught(answers: Sequence[str], model: CheckpointRef, tokenizer: PreTrainedTokenizerFast, root: Path) -> CheckpointRef:
    from stages.supervised import direct_example, fine_tune, thinking_example

    examples = [
        make(question, answer, flag)
        for question in (f"{a}+{7 - a}" for a in range(8))
        for answer in answers
        for flag in (False, True)
        for make in (
            lambda question, answer, flag: thinking_example(tokenizer, question, "3+4=7", answer, flag=flag),
            lambda question, answer, flag: direct_example(tokenizer, question, answer, flag=flag),
        )
    ]
    config = ColdStart(examples=len(examples), epochs=12, batch_size=16, learning_rate=1e-2, max_tokens=128)
    checkpoint, _ = fine_tune(model, examples, config, _stage_dir(root, "cold_start"), 0, name="pupil", card="# Pupil\n")
    return checkpoint


def _stage_dir(root: Path, kind: str) -> Path:
    folder = root / "stages" / kind
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{len(list(folder.iterdir())):016x}"
    path.mkdir()
    return path


@pytest.fixture(autouse=True)
def _trainers_leave_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries that write beside the working folder write into the test's."""
    monkeypatch.chdir(tmp_path)
