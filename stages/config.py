"""The settings of every stage: closed, frozen, documented. Light ground: imports no torch.

A stage's config class also says what the stage reads and writes (`reads`, `writes`), so that a
recipe can be checked and planned without importing the stage. Fields marked as placement (device,
memory, logging) never enter a fingerprint: changing one reuses what is finished.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

PLACEMENT: dict[str, Any] = {"placement": True}
SECRET = "secret"
"""Type of a fault whose value is not shown: it may hold a key."""

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


class JudgeConfig(Settings):
    """A model that says whether an answer equals the reference (Kimi k1.5's chain-of-thought reward model)."""

    address: str = Field(
        pattern=r"^https?://[^\s@?#]+$",
        description="OpenAI-compatible address without a key in it, for instance http://127.0.0.1:8000/v1.",
        json_schema_extra=PLACEMENT,
    )
    model: str = Field(min_length=1, description="Name of the model at that address.")
    decides: Literal["not_graded", "all"] = Field(
        "not_graded", description="What it decides on: answers that the rules could not grade, or every answer in place of the rules."
    )
    max_tokens: int = Field(1024, ge=16, description="Length limit of its reply, in tokens.")
    key_variable: str | None = Field(
        None,
        pattern=r"^[A-Z][A-Z0-9_]*$",
        description="Environment variable that holds the key; it is never logged.",
        json_schema_extra=PLACEMENT,
    )
    timeout_s: float = Field(60.0, gt=0, description="Wait for one reply.", json_schema_extra=PLACEMENT)
    tries: int = Field(3, ge=1, description="Requests for one verdict before it counts as not graded.", json_schema_extra=PLACEMENT)
    retry_wait_s: float = Field(1.0, ge=0, description="Wait before the second try; doubles with each.", json_schema_extra=PLACEMENT)
    parallel: int = Field(8, ge=1, description="Requests at once.", json_schema_extra=PLACEMENT)
    cache: Path | None = Field(
        None, description="Folder of verdicts, shared by runs; without it each stage keeps its own.", json_schema_extra=PLACEMENT
    )

    @field_validator("address", mode="before")
    @classmethod
    def _address_holds_no_key(cls, address: Any) -> Any:
        if isinstance(address, str) and set("@?#") & set(address):
            raise PydanticCustomError(
                SECRET,
                "holds a name, a key or a query, and settings are written to logs and to MLflow; leave it at host and path, and "
                "name the environment variable of the key in judge.key_variable",
            )
        return address


class ReasoningGymSource(Settings):
    """Problems from a reasoning-gym family, written and scored by that library."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    family: Literal["chain_sum", "leg_counting", "products"] = Field(description="reasoning-gym family with worked traces.")
    size: int = Field(ge=1, description="Problems to generate.")
    parameters: dict[str, int] = Field(default_factory=dict, description="The family's own settings, for instance max_terms.")
    id: str | None = Field(None, pattern=r"^[\w.-]+$", description="Name of the source in tables; without it its place and its family.")
    licence: str | None = Field(None, description="Licence of the problems, for the data report.")


AnswerType = Literal["text", "math", "exact", "number", "integer", "multiple_choice", "json_schema", "code", "reasoning_gym"]
"""How an answer is graded (`stages/rewards/tasks.py`)."""


class RowSource(Settings):
    """Problems from rows with a question and an answer column: what every such source says about itself."""

    id: str | None = Field(
        None, min_length=1, pattern=r"^[\w.-]+$", description="Name of the source in tables; without it its place and its file's name."
    )
    revision: str | None = Field(
        None, description="Pinned revision: of a hub data set its commit; of a file its SHA-256, which is then checked.", min_length=7
    )
    licence: str | None = Field(None, description="Licence of the rows, for the data report.")
    question: str = Field("question", description="Column that holds the question.")
    answer: str = Field("answer", description="Column that holds the gold answer.")
    answer_after: str | None = Field(
        None, min_length=1, description="Mark in the answer column after which the gold answer stands, for instance ####."
    )
    trace: str | None = Field(None, description="Column with a worked chain of thought, when there is one.")
    row_id: str | None = Field(None, description="Column that names a row; a row whose name is taken goes to quarantine. Empty is none.")
    family: str = Field("file", min_length=1, description="Name for these problems in tables.")
    answer_type: AnswerType = Field(
        "text",
        description="How answers are graded; `number` and `integer` also put a row with another answer into quarantine. "
        "As an integer counts 5.0 of a column of floats.",
    )
    grading: str | None = Field(
        None, description="Column with what the answer's type needs, as a JSON object: `choices`, `relative` and `absolute`, `metadata`."
    )
    max_bad_share: Fraction = Field(0.05, description="Share of unreadable rows past which curation stops.")


class FileSource(RowSource):
    """A JSONL, Parquet or CSV file."""

    kind: Literal["file"] = "file"
    path: Path = Field(description="A .jsonl, .parquet or .csv file.")

    def files(self) -> tuple[Path, ...]:
        """The file."""
        return (self.path,)


class DuckDBSource(RowSource):
    """A table of a DuckDB file."""

    kind: Literal["duckdb"] = "duckdb"
    path: Path = Field(description="The database file; it is opened read-only.")
    table: str = Field(description="Table or view that holds the rows.")

    def files(self) -> tuple[Path, ...]:
        """The database file, and its write-ahead log when there is one: DuckDB reads both."""
        log = self.path.with_name(f"{self.path.name}.wal")
        return (self.path, log) if log.is_file() else (self.path,)


class HuggingFaceSource(RowSource):
    """A data set in the form of Hugging Face: a folder, or a name on the hub. Code that comes with a data set is never run."""

    kind: Literal["huggingface"] = "huggingface"
    name: str = Field(description="A local folder (of `save_to_disk`, or of data files), or a hub name such as org/name.")
    configuration: str | None = Field(None, description="Configuration (subset) of the data set.")
    split: str = Field("train", description="Split to read; a saved data set without splits that names its own must be of that one.")

    @model_validator(mode="after")
    def _hub_name_is_pinned(self) -> HuggingFaceSource:
        if self.revision is None and not Path(self.name).is_dir():
            raise ValueError(f"{self.name} is no folder here, so it is a hub name; the rule is a pinned `revision` (a commit) beside it")
        return self

    def files(self) -> tuple[Path, ...]:
        """Every file of a local folder; nothing for a hub name, which its revision pins."""
        return tuple(sorted(path for path in Path(self.name).rglob("*") if path.is_file()))


Source = Annotated[ReasoningGymSource | FileSource | DuckDBSource | HuggingFaceSource, Field(discriminator="kind")]


DecontaminationRule = Literal["open_r1", "tulu3", "r1", "gpt3", "masked_number", "embedding"]


class Decontamination(Settings):
    """Which overlap with a benchmark counts, and what follows from it. A question that equals a benchmark's is always dropped."""

    drop: tuple[DecontaminationRule, ...] = Field(("open_r1",), description="Rules whose hits leave the training problems.")
    report: tuple[DecontaminationRule, ...] = Field(
        ("tulu3", "r1", "gpt3", "masked_number"), description="Rules whose hits are listed and counted, and stay."
    )
    wording_share: Fraction | None = Field(
        0.2,
        description="A run of words in more than this share of a benchmark family's and of a training family's questions is wording and "
        "no evidence; null for the rules as they were published.",
    )
    tulu3_coverage: Fraction = Field(0.5, description="Share of a benchmark question's words past which one training question covers it.")
    tulu3_flagged_share: Fraction = Field(
        0.02, description="Share of a benchmark's questions past which a source that covers them is flagged."
    )
    embedding_model: Path | None = Field(None, description="Local folder of a sentence model (safetensors), for the rule `embedding`.")
    embedding_similarity: Fraction = Field(0.9, description="Cosine similarity from which two questions count as the same.")
    embedding_max_tokens: int = Field(512, ge=8, description="Tokens of a question that the sentence model sees; the rest is cut.")
    embedding_batch_size: int = Field(64, ge=1, description="Questions encoded at once.", json_schema_extra=PLACEMENT)

    @property
    def rules(self) -> tuple[DecontaminationRule, ...]:
        """Every rule that is run, those that drop first."""
        return tuple(dict.fromkeys((*self.drop, *self.report)))

    @model_validator(mode="after")
    def _embedding_has_a_model(self) -> Decontamination:
        if "embedding" in self.rules and self.embedding_model is None:
            raise ValueError("the rule embedding has no model; name a local folder under embedding_model, or leave the rule out")
        return self

    def files(self) -> tuple[Path, ...]:
        """Every file of the sentence model's folder."""
        folder = self.embedding_model
        return () if folder is None else tuple(sorted(path for path in folder.rglob("*") if path.is_file()))


class PoolConfig(Settings):
    """A share of the curated problems, disjoint from every other pool."""

    share: Fraction = Field(description="Share of the problems of each family.")
    with_trace: bool = Field(False, description="Keep only problems that come with a worked trace.")


Exclusion = Literal["multiple choice", "true or false", "proof", "multi-part", "no checkable answer"]


class Curation(StageConfig):
    """Settings of `curation`."""

    writes: ClassVar[dict[str, Literal["model", "dataset"]]] = {
        "cold_start": "dataset",
        "rl": "dataset",
        "preference": "dataset",
        "distillation": "dataset",
        "benchmarks": "dataset",
    }

    sources_file: str = Field("datasets/sources.yaml", description="Describes sources by id; `sources` and `benchmarks` may name them.")
    sources: tuple[Source, ...] = Field(min_length=1, description="Where training problems come from: settings, or an id of sources_file.")
    benchmarks: dict[str, tuple[Source, ...]] = Field(min_length=1, description="Held-out problem sets by name.")
    benchmark_size: int = Field(128, ge=2, description="Problems kept per benchmark, families in equal parts where possible.")
    max_characters: int = Field(20_000, ge=1, description="Longest question and longest answer; a row past it goes to quarantine.")
    exclude: tuple[Exclusion, ...] = Field(
        ("multiple choice", "true or false", "proof", "multi-part", "no checkable answer"),
        description="Kinds of training problems that are dropped: a verifier cannot tell right answers from lucky ones (Kimi k1.5, Qwen3).",
    )
    near_duplicate_similarity: Fraction = Field(
        0.9,
        description="Jaccard similarity of word 5-grams from which a later question with the same numbers, signs and answer is dropped: "
        "0.5 to 1; 0: off.",
    )
    twins_kept: int = Field(0, ge=0, description="Most problems kept that differ in their numbers only; 0 keeps all and only reports them.")
    decontamination: Decontamination = Field(default_factory=Decontamination, description="Which overlap with a benchmark counts.")
    decontamination_ngram: int = Field(8, ge=2, description="Words in a shared n-gram that marks contamination (open-r1: 8).")
    pools: dict[Literal["cold_start", "rl", "preference", "distillation"], PoolConfig] = Field(
        description="Disjoint shares of the problems."
    )

    @model_validator(mode="before")
    @classmethod
    def _named_sources_are_looked_up(cls, content: Any) -> Any:
        """Put the description of `sources_file` in the place of every id, so that it counts as if it stood in the recipe."""
        if not isinstance(content, dict):
            return content
        path = Path(content.get("sources_file", cls.model_fields["sources_file"].default))

        def described(group: Any) -> Any:
            if not isinstance(group, list | tuple):
                return group
            return [_described(path, item) if isinstance(item, str) else item for item in group]

        benchmarks = content.get("benchmarks")
        found = {"sources": described(content.get("sources"))} if "sources" in content else {}
        if isinstance(benchmarks, dict):
            found["benchmarks"] = {name: described(group) for name, group in benchmarks.items()}
        return content | found

    @model_validator(mode="after")
    def _near_duplicates_can_be_found(self) -> Curation:
        if 0 < self.near_duplicate_similarity < 0.5:
            raise ValueError(
                f"near_duplicate_similarity is {self.near_duplicate_similarity:g}; the rule is 0.5 to 1, or 0 for off; "
                "questions less alike are found by too few MinHashes"
            )
        return self

    @model_validator(mode="after")
    def _shares_fit(self) -> Curation:
        total = sum(pool.share for pool in self.pools.values())
        if total > 1 + 1e-9:
            raise ValueError(f"pool shares add up to {total:g}; the rule is at most 1; lower one of {sorted(self.pools)}")
        return self

    def files(self) -> tuple[Path, ...]:
        every = [*self.sources, *(source for group in self.benchmarks.values() for source in group)]
        rows = tuple(path for source in every if not isinstance(source, ReasoningGymSource) for path in source.files())
        return rows + self.decontamination.files()


def _described(path: Path, name: str) -> dict[str, Any]:
    """What `sources_file` says about a source, its id included. Raises ValueError naming the ids that there are."""
    try:
        listed = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{name!r} stands for a source of {path}, which cannot be read ({error}); mend sources_file") from error
    if not isinstance(listed, dict) or not isinstance(listed.get(name), dict):
        known = sorted(listed) if isinstance(listed, dict) else []
        raise ValueError(f"{path} describes no source {name!r}; the rule is one of {known}, or settings in the recipe")
    return {"id": name, **listed[name]}


RateFilter = Literal["band", "kimi_easy", "olmo3", "skywork", "qwen2_5_math", "big_math"]
"""Filters on the pass rate alone, by their source."""


class PassRates(StageConfig):
    """Settings of `pass_rates`."""

    reads: ClassVar[dict[str, Literal["model", "dataset"]]] = {"model": "model", "second_model": "model", "problems": "dataset"}
    optional_reads: ClassVar[frozenset[str]] = frozenset({"second_model"})
    writes: ClassVar[dict[str, Literal["model", "dataset"]]] = {"pass_rates": "dataset", "attempts": "dataset", "band": "dataset"}

    attempts: int = Field(8, ge=2, description="Samples per problem (best-of-8).")
    problems: int = Field(512, ge=1, description="At most this many problems are tried, in pool order.")
    thinking: bool = Field(True, description="Answer in thinking mode.")
    filters: tuple[RateFilter | Literal["kimi_guess", "qwen3_guess", "s1"], ...] = Field(
        ("band",), description="Filters a problem must pass, by their source; `s1` needs the input `second_model`."
    )
    band: tuple[Fraction, Fraction] = Field((0.125, 0.875), description="Filter `band`: pass rates kept for RL, both ends included.")
    kimi_easy_rate: float = Field(1.0, gt=0, le=1, description="Filter `kimi_easy`: a pass rate from here on is trivial (none published).")
    olmo3_max_rate: Fraction = Field(0.625, description="Filter `olmo3`: highest pass rate kept.")
    kimi_guess_tries: int = Field(8, ge=1, description="Filter `kimi_guess`: answers without thinking, none of which may be right.")
    qwen3_guess_tries: int = Field(1, ge=1, description="Filter `qwen3_guess`: answers without thinking, none of which may be right.")
    stop_when_certain: bool = Field(
        False, description="Stop trying a problem once no outcome of its remaining attempts can change what any filter says."
    )
    attempts_per_round: int = Field(2, ge=1, description="With `stop_when_certain`: attempts between two looks.")
    judge: JudgeConfig | None = Field(None, description="A model that grades in place of the rules, or where they cannot.")
    max_not_graded_share: Fraction = Field(0.05, description="Share of ungraded samples past which the stage stops.")
    sampler: SamplerConfig = Field(default_factory=SamplerConfig, description="How completions are drawn.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="The rollout engine.")

    @model_validator(mode="after")
    def _band_is_ordered(self) -> PassRates:
        if self.band[0] > self.band[1]:
            raise ValueError(f"band {self.band} is empty; the rule is low <= high")
        return self

    @model_validator(mode="after")
    def _filters_are_named_once(self) -> PassRates:
        if len(set(self.filters)) < len(self.filters):
            raise ValueError(f"filters {list(self.filters)}: one is named twice; name each once")
        return self


class SupervisedConfig(StageConfig):
    """Settings shared by the stages that fine-tune on text."""

    examples: int = Field(ge=1, description="At most this many training examples.")
    epochs: float = Field(1.0, gt=0, description="Passes over the examples.")
    batch_size: int = Field(32, ge=1, description="Examples per optimizer step.")
    learning_rate: Positive = Field(description="Peak learning rate; cosine to a tenth.")
    max_tokens: int = Field(384, ge=16, description="Longest training text, in tokens; longer ones are an error.")


class ResponseFilterLimits(Settings):
    """Limits of the response filters; none of them is published, so they are ours."""

    max_repeated_share: Fraction = Field(0.3, description="`repetition`: share of 8-word runs that occurred before.")
    max_line_repeats: int = Field(4, ge=1, description="`repetition`: times that one line may follow itself.")
    max_foreign_share: Fraction = Field(0.02, description="`language`: share of words in another script than the question's.")
    max_paragraph_words: int = Field(400, ge=1, description="`paragraphs`: words in one paragraph of the thinking.")
    max_similarity: Fraction = Field(0.9, description="`validation`: likeness to a validation item, in shared 3-word runs.")


ResponseFilter = Literal["answer", "repetition", "guesswork", "agreement", "language", "validation", "paragraphs", "code_blocks"]
"""Qwen3's six (arXiv 2505.09388, 4.1), then two of R1's readability rules (arXiv 2501.12948, 2.3.3)."""


class ColdStart(SupervisedConfig):
    """Settings of `cold_start`."""

    reads: ClassVar[dict[str, Literal["model", "dataset"]]] = {"model": "model", "traces": "dataset", "validation": "dataset"}
    optional_reads: ClassVar[frozenset[str]] = frozenset({"validation"})
    writes: ClassVar[dict[str, Literal["model", "dataset"]]] = {"model": "model", "selection": "dataset"}

    filters: tuple[ResponseFilter, ...] = Field(
        ("answer", "repetition", "guesswork", "agreement", "language", "paragraphs", "code_blocks"),
        description="Filters that a trace must pass; `validation` needs the input of that name.",
    )
    limits: ResponseFilterLimits = Field(default_factory=ResponseFilterLimits, description="Limits of the filters.")
    judge: JudgeConfig | None = Field(None, description="Filter `answer`: a model that grades in place of the rules, or where they cannot.")
    review: Path | None = Field(
        None, description="A JSONL file of traces that people have reviewed; then only those marked `keep` are used."
    )

    def files(self) -> tuple[Path, ...]:
        return () if self.review is None else (self.review,)


class CurriculumConfig(Settings):
    """Which problems a step of RL takes."""

    order: Literal["uniform", "easy_to_hard", "prioritised", "band", "warmup_then_hard"] = Field(
        "uniform",
        description="All in turn; from the highest success rate to the lowest; in proportion to 1 - rate; only rates inside `band`; "
        "uniform at first, then only rates below `hard_below` (the last four: Kimi k1.5, arXiv 2501.12599, 2.3.4).",
    )
    band: tuple[Fraction, Fraction] = Field((0.25, 0.75), description="Order `band`: success rates taken, both ends included.")
    uniform_steps: int = Field(24, ge=0, description="Order `warmup_then_hard`: steps before the change (Kimi k1.5, figure 9: 24).")
    hard_below: Fraction = Field(0.5, description="Order `warmup_then_hard`: success rates below are hard.")
    balance_topics: bool = Field(False, description="Give every topic (family) the same total weight.")
    live: bool = Field(False, description="Rollouts change the success rates; without it they stay those of `pass_rates`.")
    update: Literal["counts", "exponential"] = Field(
        "counts", description="Live: rate from all counts, or moved a part of the way to each new group's."
    )
    prior_tries: float = Field(8.0, gt=0, description="Live, `counts`: attempts that the starting rate stands for.")
    update_rate: float = Field(0.3, gt=0, le=1, description="Live, `exponential`: part of the way to the new group's rate.")
    retire_at: float | None = Field(
        None, gt=0, le=1, description="Live: a problem with this success rate or a higher one is mastered and leaves."
    )
    retire_after: int = Field(16, ge=1, description="Live: rollouts of a problem before it may leave.")

    @model_validator(mode="after")
    def _fits_together(self) -> CurriculumConfig:
        if self.band[0] > self.band[1]:
            raise ValueError(f"band {self.band} is empty; the rule is low <= high")
        if self.retire_at is not None and not self.live:
            raise ValueError("retire_at needs the rollouts' success rates; set live: true")
        if self.balance_topics and self.order == "easy_to_hard":
            raise ValueError("easy_to_hard walks through one ranking, so topics cannot be balanced; choose another order")
        return self


class RewardParts(Settings):
    """Reward parts beside accuracy and format, each with its weight: null leaves a part out, 0 logs it without effect."""

    language: float | None = Field(
        None, ge=0, description="Share of the thinking's words that are in the question's script (R1 adds it with weight 1)."
    )
    length: float | None = Field(None, ge=0, description="Kimi k1.5's length reward within a group (no weight published).")
    length_from_step: int = Field(0, ge=0, description="`length`: steps that train without it; from there on it is constant.")
    overlong: float | None = Field(None, ge=0, description="DAPO's soft punishment of replies that come near the length limit.")
    overlong_cache_tokens: int = Field(
        32, ge=1, description="`overlong`: the last tokens before the limit, over which it grows to -1 (DAPO: a fifth of the limit)."
    )
    repetition: float | None = Field(None, ge=0, description="Minus the share of word runs in the completion that occurred before.")
    repetition_words: int = Field(8, ge=2, description="`repetition`: words of a run.")
    missing_stop: float | None = Field(None, ge=0, description="-1 for a reply that ran into the length limit.")

    def weights(self) -> dict[str, float]:
        """The parts that are on, with their weights."""
        every = {
            "language": self.language,
            "length": self.length,
            "overlong": self.overlong,
            "repetition": self.repetition,
            "missing_stop": self.missing_stop,
        }
        return {name: weight for name, weight in every.items() if weight is not None}


class AuditConfig(Settings):
    """What the graders must show before a policy is trained on them (`stages/rewards/audit.py`)."""

    blocks: bool = Field(True, description="Refuse to train when the audit fails; false only reports.")
    rows: tuple[Path, ...] = Field((), description="JSONL files with rows of your own, beside the shipped ones.")
    min_recall: Fraction = Field(0.99, description="Share of equivalent pairs that must be graded right.")
    max_disagreement: Fraction = Field(
        0.25,
        description="Share of the pairs on which a second grader may say otherwise; math-verify alone does on 0.20 of the shipped ones, "
        "which were chosen because they are hard.",
    )
    max_not_graded_share: Fraction = Field(0.05, description="Share of audited answers that may end as not graded.")
    max_ms_per_grade: float = Field(100.0, gt=0, description="Mean time that one grade may take, milliseconds.")


class PolicyGradientConfig(StageConfig):
    """Settings shared by the stages that train on their own rollouts (GRPO)."""

    steps: int = Field(ge=1, description="Optimizer steps; each uses one fresh batch of rollouts.")
    prompts_per_step: int = Field(16, ge=1, description="Problems per step.")
    group_size: int = Field(8, ge=2, description="Rollouts per problem (G).")
    learning_rate: Positive = Field(description="Constant learning rate after warm-up.")
    warmup_steps: int = Field(3, ge=0, description="Steps of linear warm-up; the last step is never part of it.")
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
    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig, description="Which problems a step takes.")
    rewards: RewardParts = Field(default_factory=RewardParts, description="Reward parts beside accuracy and format.")
    judge: JudgeConfig | None = Field(None, description="A model that grades in place of the rules, or where they cannot.")
    max_not_graded_share: Fraction = Field(
        0.05, description="Share of a step's rollouts that may end as not graded; they are masked. Past it the stage stops."
    )
    second_opinion_share: Fraction = Field(
        0.05, description="Share of the answers in mathematics that a second grader sees too.", json_schema_extra=PLACEMENT
    )
    audit: AuditConfig = Field(
        default_factory=AuditConfig, description="What the graders must show before training.", json_schema_extra=PLACEMENT
    )
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

    @model_validator(mode="after")
    def _overlong_fits(self) -> PolicyGradientConfig:
        if self.rewards.overlong is not None and self.rewards.overlong_cache_tokens > self.max_new_tokens:
            raise ValueError(
                f"rewards.overlong_cache_tokens = {self.rewards.overlong_cache_tokens}; the rule is at most max_new_tokens = "
                f"{self.max_new_tokens}; lower it"
            )
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
    filters: tuple[Literal["repetition", "guesswork", "agreement", "language", "paragraphs", "code_blocks"], ...] = Field(
        (), description="Response filters that a right sample must pass, as in `cold_start`."
    )
    limits: ResponseFilterLimits = Field(default_factory=ResponseFilterLimits, description="Limits of the filters.")
    judge: JudgeConfig | None = Field(None, description="A model that grades in place of the rules, or where they cannot.")
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
    judge: JudgeConfig | None = Field(None, description="A model that grades in place of the rules, or where they cannot.")
    max_not_graded_share: Fraction = Field(0.05, description="Share of ungraded samples past which the stage stops.")
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
    judge: JudgeConfig | None = Field(None, description="A model that grades in place of the rules, or where they cannot.")
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
