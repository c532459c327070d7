"""One rollout engine for every stage: vLLM in the stage's own process.

Prompts go in as token ids, each with its own seed; completions come out in order of completion with
log-probabilities and the version of the weights. Weights are swapped without a restart. Measured on
CPU (vLLM 0.32): reloading from a path silently leaves a tied output head stale, and a swap without
clearing the prefix cache mixes two models; both are handled here and guarded by a test.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stages.config import EngineConfig, SamplerConfig
from stages.errors import RolloutError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Request(NamedTuple):
    """One completion to draw."""

    key: Any
    """What the caller calls it; comes back with the completion."""
    prompt_ids: list[int]
    seed: int
    max_new_tokens: int | None = None
    """Overrides the sampler's limit."""
    stop_token_ids: tuple[int, ...] = ()
    """Extra tokens to stop at, besides the model's own stop token."""


class Completion(NamedTuple):
    """One finished completion."""

    key: Any
    token_ids: list[int]
    logprobs: list[float]
    """Log-probability (nats) of each token under the sampling distribution; empty unless asked for."""
    finish: str
    """`stop` (the model ended it) or `length`."""
    version: str
    """Weights it was drawn from."""


class RolloutEngine:
    """vLLM over one model folder. Close it, or leave its `with` block, before the stage ends."""

    def __init__(self, path: Path, config: EngineConfig) -> None:
        self.config = config
        self._numbers = itertools.count()
        self._llm = _build(path, config)
        self.version = str(path)

    def __enter__(self) -> RolloutEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load_live(self, model: PreTrainedModel, version: str) -> None:
        """Take over the weights of a model in training, between two rollouts.

        Raises RolloutError when the engine refuses them; it cannot be used afterwards.
        """
        import torch

        weights = dict(model.state_dict())
        if getattr(model.config, "tie_word_embeddings", False):  # else the packed head keeps its old weights
            weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
        try:
            with torch.no_grad():
                self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights.items()})
        except Exception as error:
            self.close()
            raise RolloutError(
                f"the engine refused the weights of {version}: {error}; rerun the stage, it resumes from its last checkpoint"
            ) from error
        if not self._llm.llm_engine.reset_prefix_cache(reset_running_requests=True):
            raise RolloutError(f"the engine kept cached keys and values of {self.version} after taking {version}; rerun the stage")
        self.version = version

    def stream(self, requests: Iterable[Request], sampler: SamplerConfig, *, logprobs: bool = False) -> Iterator[Completion]:
        """Yield completions as they end. Leaving the loop early aborts the rest.

        Raises RolloutError for a prompt that leaves no room in the context.
        """
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        engine, waiting, requests = self._llm.llm_engine, {}, list(requests)
        for request in requests:
            if len(request.prompt_ids) >= self.config.max_model_tokens:
                raise RolloutError(
                    f"prompt {request.key!r} has {len(request.prompt_ids)} tokens; the rule is fewer than "
                    f"engine.max_model_tokens = {self.config.max_model_tokens}; raise it"
                )
        for request in requests:
            limit = request.max_new_tokens or sampler.max_new_tokens
            room = self.config.max_model_tokens - len(request.prompt_ids)
            number = str(next(self._numbers))
            waiting[number] = request
            engine.add_request(
                number,
                TokensPrompt(prompt_token_ids=list(request.prompt_ids)),
                SamplingParams(
                    temperature=sampler.temperature,
                    top_p=sampler.top_p,
                    max_tokens=min(limit, room),
                    seed=request.seed % 2**63,
                    stop_token_ids=list(request.stop_token_ids) or None,
                    logprobs=0 if logprobs else None,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                ),
            )
        try:
            while waiting and engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished and output.request_id in waiting:
                        request = waiting.pop(output.request_id)
                        yield _completion(request.key, output.outputs[0], self.version)
        finally:
            if waiting:
                engine.abort_request(list(waiting))
            while engine.has_unfinished_requests():
                engine.step()

    def generate(self, requests: Iterable[Request], sampler: SamplerConfig, *, logprobs: bool = False) -> list[Completion]:
        """All completions, in the order of the requests (whose keys must differ)."""
        ordered = list(requests)
        finished = {completion.key: completion for completion in self.stream(ordered, sampler, logprobs=logprobs)}
        return [finished[request.key] for request in ordered]

    def close(self) -> None:
        """End the engine and give its memory back."""
        import gc

        self._llm = None
        gc.collect()


def _completion(key: Any, output: Any, version: str) -> Completion:
    token_ids = list(output.token_ids)
    drawn = output.logprobs
    logprobs = [] if drawn is None else [entry[token].logprob for entry, token in zip(drawn, token_ids, strict=True)]
    return Completion(key, token_ids, logprobs, output.finish_reason, version)


def _build(path: Path, config: EngineConfig) -> Any:
    import torch

    gpu = torch.cuda.is_available()
    arguments: dict[str, Any] = {
        "model": str(path),
        "max_model_len": config.max_model_tokens,
        "max_num_seqs": config.max_sequences,
        "logprobs_mode": "processed_logprobs",  # the default is wrong for every temperature but 1
        "block_size": 32,
        "seed": 0,
        "trust_remote_code": False,
        "disable_log_stats": True,
    }
    if gpu:
        arguments |= {"gpu_memory_utilization": config.gpu_memory_share, "dtype": "auto"}
    else:
        arguments |= {
            "kv_cache_memory_bytes": config.kv_cache_mib << 20,
            "dtype": "float32",
            "enforce_eager": True,
            # a prompt split over two steps rewinds the generator of a seeded request, which CPU generators cannot do
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(4096, config.max_model_tokens),
        }
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process: 3 s instead of 25
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM

    try:
        with suppress(AttributeError):
            # vLLM 0.32 on CPU reads the attributes of every object there is, and llvmlite's library takes `__dict__` for a function
            if ffi := sys.modules.get("llvmlite.binding.ffi"):
                ffi.lib._fntab["__dict__"] = {}
        with _random_state_kept():
            return LLM(**arguments)
    except Exception as error:
        raise RolloutError(f"vLLM could not load {path}: {error}") from error


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """vLLM reseeds the global generators and replaces torch.set_num_threads: put them back."""
    import numpy as np
    import torch

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
