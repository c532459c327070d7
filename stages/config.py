"""The settings of every stage: closed, frozen, documented. Light ground: imports no torch.

A stage's config class also says what the stage reads and writes (`reads`, `writes`), so that a
recipe can be checked and planned without importing the stage. Fields marked as placement (device,
memory, logging) never enter a fingerprint: changing one reuses what is finished.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PLACEMENT: dict[str, Any] = {"placement": True}

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=1)]


class Settings(BaseModel):
    """Ground of every settings model: unknown keys are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def _placement(settings: Settings) -> dict[str, Any]:
    """The placement fields of a model and of the models inside it, in the form that pydantic's `exclude` takes."""
    found: dict[str, Any] = {}
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("placement"):
            found[name] = True
        elif isinstance(value, Settings) and (inner := _placement(value)):
            found[name] = inner
    return found


class StageConfig(Settings):
    """Ground of every stage's settings."""

    reads: ClassVar[dict[str, Literal["model", "dataset"]]] = {}
    optional_reads: ClassVar[frozenset[str]] = frozenset()
    writes: ClassVar[dict[str, Literal["model", "dataset"]]] = {}

    max_minutes: float = Field(120.0, gt=0, description="Wall-clock limit; past it the stage is ended.", json_schema_extra=PLACEMENT)
    max_idle_minutes: float = Field(
        30.0,
        gt=0,
        description="Longest wait for the next record of progress or metrics; past it without a new record the stage is ended.",
        json_schema_extra=PLACEMENT,
    )

    def identity(self) -> dict[str, Any]:
        """The settings that decide the result, as plain JSON values; placement left out."""
        return self.model_dump(mode="json", exclude=_placement(self))

    def files(self) -> tuple[Path, ...]:
        """Files outside the recipe whose content decides the result."""
        return ()


class EngineConfig(Settings):
    """The rollout engine (vLLM). Memory knobs are placement."""

    max_model_tokens: int = Field(384, ge=16, description="Longest prompt plus completion, in tokens.")
    max_sequences: int = Field(256, ge=1, description="Sequences decoded at once.", json_schema_extra=PLACEMENT)
    kv_cache_mib: int = Field(256, ge=16, description="KV cache on CPU, MiB.", json_schema_extra=PLACEMENT)
    gpu_memory_share: float = Field(0.3, gt=0, le=0.95, description="Share of GPU memory for the engine.", json_schema_extra=PLACEMENT)


class SamplerConfig(Settings):
    """How completions are drawn."""

    temperature: float = Field(1.0, gt=0, description="Softmax temperature; greedy decoding is not offered.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus mass; 1 keeps the whole distribution.")
    max_new_tokens: int = Field(160, ge=1, description="Length limit of a completion, in tokens.")


class ReasoningGymSource(Settings):
    """Problems from a reasoning-gym family, written and scored by that library."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    family: Literal["chain_sum", "leg_counting", "products"] = Field(description="reasoning-gym family with worked traces.")
    size: int = Field(ge=1, description="Problems to generate.")
    parameters: dict[str, int] = Field(default_factory=dict, description="The family's own settings, for instance max_terms.")


class FileSource(Settings):
    """Problems from a JSONL or Parquet file with a question and an answer column."""

    kind: Literal["file"] = "file"
    path: Path = Field(description="A .jsonl or .parquet file.")
    question: str = Field("question", description="Column that holds the question.")
    answer: str = Field("answer", description="Column that holds the gold answer.")
    trace: str | None = Field(None, description="Column with a worked chain of thought, when there is one.")
    family: str = Field("file", description="Name for these problems in tables.")
    max_bad_share: Fraction = Field(0.05, description="Share of unreadable rows past which curation stops.")


Source = Annotated[ReasoningGymSource | FileSource, Field(discriminator="kind")]


class PoolConfig(Settings):
    """A share of the curated problems, disjoint from every other pool."""

    share: Fraction = Field(description="Share of the problems of each family.")
    with_trace: bool = Field(False, description="Keep only problems that come with a worked trace.")


class Curation(StageConfig):
    """Settings of `curation`."""

    writes: ClassVar[dict[str, Literal["model", "dataset"]]] = {
        "cold_start": "dataset",
        "rl": "dataset",
        "preference": "dataset",
        "distillation": "dataset",
        "benchmarks": "dataset",
    }

    sources: tuple[Source, ...] = Field(min_length=1, description="Where training problems come from.")
    benchmarks: dict[str, tuple[Source, ...]] = Field(min_length=1, description="Held-out problem sets by name.")
    benchmark_size: int = Field(128, ge=2, description="Problems kept per benchmark, families in equal parts where possible.")
    decontamination_ngram: int = Field(8, ge=2, description="Words in a shared n-gram that marks contamination (open-r1: 8).")
    pools: dict[Literal["cold_start", "rl", "preference", "distillation"], PoolConfig] = Field(
        description="Disjoint shares of the problems."
    )

    @model_validator(mode="after")
    def _shares_fit(self) -> Curation:
        total = sum(pool.share for pool in self.pools.values())
        if total > 1 + 1e-9:
            raise ValueError(f"pool shares add up to {total:g}; the rule is at most 1; lower one of {sorted(self.pools)}")
        return self

    def files(self) -> tuple[Path, ...]:
        every = [*self.sources, *(source for group in self.benchmarks.values() for source in group)]
        return tuple(source.path for source in every if isinstance(source, FileSource))


class PassRates(StageConfig):
    """Settings of `pass_rates`."""

    reads: ClassVar[dict[str, Literal["model", "dataset"]]] = {"model": "model", "problems": "dataset"}
    writes: ClassVar[dict[str, Literal["model", "dataset"]]] = {"pass_rates": "dataset", "band": "dataset"}

    attempts: int = Field(8, ge=2, description="Samples per problem (best-of-8).")
    problems: int = Field(512, ge=1, description="At most this many problems are tried, in pool order.")
    thinking: bool = Field(True, description="Answer in thinking mode.")
    band: tuple[Fraction, Fraction] = Field((0.125, 0.875), description="Pass rates kept for RL, both ends included.")
    max_not_graded_share: Fraction = Field(0.05, description="Share of ungraded samples past which the stage stops.")
    sampler: SamplerConfig = Field(default_factory=SamplerConfig, description="How completions are drawn.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="The rollout engine.")

    @model_validator(mode="after")
    def _band_is_ordered(self) -> PassRates:
        if self.band[0] > self.band[1]:
            raise ValueError(f"band {self.band} is empty; the rule is low <= high")
        return self


class SupervisedConfig(StageConfig):
    """Settings shared by the stages that fine-tune on text."""

    examples: int = Field(ge=1, description="At most this many training examples.")
    epochs: float = Field(1.0, gt=0, description="Passes over the examples.")
    batch_size: int = Field(32, ge=1, description="Examples per optimizer step.")
    learning_rate: Positive = Field(description="Peak learning rate; cosine to a tenth.")
    max_tokens: int = Field(384, ge=16, description="Longest training text, in tokens; longer ones are an error.")


class ColdStart(SupervisedConfig):
    """Settings of `cold_start`."""

    reads: ClassVar[dict[str, Literal["model", "dataset"]]] = {"model": "model", "traces": "dataset"}
    writes: ClassVar[dict[str, Literal["model", "dataset"]]] = {"model": "model"}


class PolicyGradientConfig(StageConfig):
    """Settings shared by the stages that train on their own rollouts (GRPO)."""

    steps: int = Field(ge=1, description="Optimizer steps; each uses one fresh batch of rollouts.")
    prompts_per_step: int = Field(16, ge=1, description="Problems per step.")
    group_size: int = Field(8, ge=2, description="Rollouts per problem (G).")
    learning_rate: Positive = Field(description="Constant learning rate after warm-up.")
    warmup_steps: int = Field(3, ge=0, description="Steps of linear warm-up.")
    loss: Literal["grpo", "dr_grpo", "dapo", "bnpo"] = Field(
        "dapo", description="Token aggregation (papers: DeepSeekMath, Dr. GRPO, DAPO)."
    )
    clip_low: Positive = Field(0.2, description="Lower clip epsilon.")
    clip_high: Positive = Field(0.28, description="Upper clip epsilon (DAPO: 0.28).")
    advantage: Literal["group", "batch", "none"] = Field(
        "group", description="What the centred reward is divided by: the standard deviation of the group, of the batch, or nothing."
    )
    kl_weight: float = Field(0.0, ge=0, description="Weight of the k3 KL penalty against the starting model; 0 turns it off.")
    temperature: float = Field(1.0, gt=0, description="Rollout temperature; nothing is truncated, so log-probabilities match.")
    max_new_tokens: int = Field(160, ge=1, description="Length limit of a rollout, in tokens.")
    micro_batch: int = Field(
        128, ge=1, description="Rollouts per forward pass; gradients add up to the whole step.", json_schema_extra=PLACEMENT
    )
    save_every: int = Field(10, ge=1, description="Steps between checkpoints a rerun can resume from.", json_schema_extra=PLACEMENT)
    engine: EngineConfig = Field(default_factory=EngineConfig, description="The rollout engine.")

    @model_validator(mode="after")
    def _micro_batch_fits(self) -> PolicyGradientConfig:
        batch = self.prompts_per_step * self.group_size
        if batch % min(batch, self.micro_batch):
            raise ValueError(
                f"{self.prompts_per_step} prompts x {self.group_size} rollouts = {batch} a step, which micro_batch = {self.micro_batch} "
                f"does not divide; set micro_batch to a divisor of {batch}"
            )
        if self.loss == "bnpo" and self.micro_batch < batch:
            raise ValueError(f"bnpo averages over the tokens of a micro-batch; the rule is micro_batch >= {batch}, the whole step")
        return self


class ReasoningRL(PolicyGradientConfig):
    """Settings of `reasoning_rl`."""

    reads: ClassVar[dict[str, Literal["model", "dataset"]]] = {"model": "model", "problems": "dataset"}
    writes: ClassVar[dict[str, Literal["model", "dataset"]]] = {"model": "model", "rollouts": "dataset"}

    accuracy_weight: float = Field(1.0, ge=0, description="Weight of a right final answer.")
    format_weight: float = Field(0.2, ge=0, description="Weight of a reply with a filled think block and one boxed answer.")


class RejectionSampling(StageConfig):
    """Settings of `rejection_sampling`."""

    reads: ClassVar[dict[str, Literal["model", "dataset"]]] = {"model": "model", "problems": "dataset"}
    writes: ClassVar[dict[str, Literal["model", "dataset"]]] = {"traces": "dataset"}

    problems: int = Field(256, ge=1, description="At most this many problems are sampled.")
    attempts: int = Field(4, ge=1, description="Samples per problem.")
    keep_per_problem: int = Field(1, ge=1, description="Right samples kept per problem, shortest first.")
    max_not_graded_share: Fraction = Field(0.05, description="Share of ungraded samples past which the stage stops.")
    sampler: SamplerConfig = Field(default_factory=SamplerConfig, description="How completions are drawn.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="The rollout engine.")


class Fusion(SupervisedConfig):
    """Settings of `fusion`."""

    reads: ClassVar[dict[str, Literal["model", "dataset"]]] = {"model": "model", "thinking": "dataset", "direct": "dataset"}
    writes: ClassVar[dict[str, Literal["model", "dataset"]]] = {"model": "model"}

    thinking_share: Fraction = Field(0.6, description="Share of examples in thinking mode.")
    unflagged_share: Fraction = Field(0.3, description="Share of thinking examples without the /think flag (thinking is the default).")


class RewardModel(StageConfig):
    """Settings of `reward_model`."""

    reads: ClassVar[dict[str, Literal["model", "dataset"]]] = {"model": "model", "problems": "dataset"}
    writes: ClassVar[dict[str, Literal["model", "dataset"]]] = {"reward_model": "model", "pairs": "dataset"}

    prompts: int = Field(256, ge=2, description="Problems that pairs are sampled for.")
    attempts: int = Field(4, ge=2, description="Samples per problem; the best and the worst by the annotator make the pair.")
    label_noise: Fraction = Field(0.1, description="Share of pairs whose order the synthetic annotator swaps.")
    epochs: float = Field(2.0, gt=0, description="Passes over the pairs.")
    batch_size: int = Field(32, ge=1, description="Pairs per optimizer step.")
    learning_rate: Positive = Field(description="Peak learning rate; cosine to a tenth.")
    centering: float = Field(0.01, ge=0, description="Weight of (s_w + s_l)^2 (arXiv 2312.09244).")
    sampler: SamplerConfig = Field(default_factory=SamplerConfig, description="How completions are drawn.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="The rollout engine.")


class RLHF(PolicyGradientConfig):
    """Settings of `rlhf`."""

    reads: ClassVar[dict[str, Literal["model", "dataset"]]] = {"model": "model", "reward_model": "model", "problems": "dataset"}
    writes: ClassVar[dict[str, Literal["model", "dataset"]]] = {"model": "model", "rollouts": "dataset"}

    preference_weight: float = Field(1.0, ge=0, description="Weight of the reward model's score, standardised on the starting model.")
    accuracy_weight: float = Field(1.0, ge=0, description="Weight of a right final answer.")
    format_weight: float = Field(0.2, ge=0, description="Weight of a reply in the mode that was asked for, with one boxed answer.")
    thinking_share: Fraction = Field(0.7, description="Share of prompts in thinking mode.")


class Distillation(SupervisedConfig):
    """Settings of `distillation`."""

    reads: ClassVar[dict[str, Literal["model", "dataset"]]] = {"model": "model", "teacher": "model", "problems": "dataset"}
    optional_reads: ClassVar[frozenset[str]] = frozenset({"teacher"})
    writes: ClassVar[dict[str, Literal["model", "dataset"]]] = {"model": "model", "traces": "dataset"}

    attempts: int = Field(2, ge=1, description="Teacher samples per problem; the first right one is kept.")
    on_policy_steps: int = Field(
        0, ge=0, description="Steps in which the student's own samples are scored by the teacher (reverse KL per token)."
    )
    on_policy_batch: int = Field(64, ge=1, description="Student samples per on-policy step.")
    on_policy_learning_rate: Positive = Field(1e-4, description="Learning rate of the on-policy phase.")
    sampler: SamplerConfig = Field(default_factory=SamplerConfig, description="How the teacher's completions are drawn.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="The rollout engine.")


class Evaluation(StageConfig):
    """Settings of `evaluation`; one specification for all rows of a recipe's table."""

    reads: ClassVar[dict[str, Literal["model", "dataset"]]] = {"model": "model", "benchmarks": "dataset"}
    writes: ClassVar[dict[str, Literal["model", "dataset"]]] = {"samples": "dataset"}

    samples: int = Field(4, ge=2, description="Samples per problem and mode (n of pass@1).")
    sampler: SamplerConfig = Field(
        default_factory=lambda: SamplerConfig(temperature=0.6, top_p=0.95),
        description="How completions are drawn (R1: temperature 0.6, top-p 0.95).",
    )
    thinking_budgets: tuple[Count, ...] = Field(
        (), description="Thinking budgets in tokens; each gives a point of the score-versus-budget curve."
    )
    budget_text: str = Field(
        "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly now.\n</think>\n\n",
        description="What is appended when a thinking budget runs out (default: Qwen3's documentation).",
    )
    budget_problems: int = Field(64, ge=1, description="Problems of each benchmark that are asked with a thinking budget.")
    flag_problems: int = Field(64, ge=0, description="Problems asked with /think and /no_think to see whether the flag is followed.")
    max_not_graded_share: Fraction = Field(0.05, description="Share of ungraded samples past which the stage stops.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="The rollout engine.")


class BasePretraining(StageConfig):
    """Settings of `base_pretraining`."""

    writes: ClassVar[dict[str, Literal["model", "dataset"]]] = {"model": "model"}

    vocabulary: int = Field(512, ge=300, description="Tokens in all, special tokens included.")
    hidden_size: int = Field(128, ge=16, description="Width of the residual stream.")
    layers: int = Field(4, ge=1, description="Transformer layers.")
    heads: int = Field(4, ge=1, description="Attention heads.")
    kv_heads: int = Field(2, ge=1, description="Key and value heads.")
    max_positions: int = Field(512, ge=64, description="Longest context, in tokens.")
    steps: int = Field(2500, ge=1, description="Optimizer steps.")
    blocks_per_step: int = Field(32, ge=1, description="Packed blocks per step.")
    block_tokens: int = Field(256, ge=16, description="Tokens per packed block.")
    learning_rate: Positive = Field(4e-3, description="Peak learning rate; 5 % warm-up, cosine to 0.")
    bf16: bool = Field(True, description="Autocast to bfloat16; weights stay float32.")
    compile: bool = Field(False, description="torch.compile the model.", json_schema_extra=PLACEMENT)


STAGES: dict[str, type[StageConfig]] = {
    "base_pretraining": BasePretraining,
    "curation": Curation,
    "pass_rates": PassRates,
    "cold_start": ColdStart,
    "reasoning_rl": ReasoningRL,
    "rejection_sampling": RejectionSampling,
    "fusion": Fusion,
    "reward_model": RewardModel,
    "rlhf": RLHF,
    "distillation": Distillation,
    "evaluation": Evaluation,
}
"""Stage name, which is also the name of its file in this package, to its settings."""
