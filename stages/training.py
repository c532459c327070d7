"""What every training stage shares: Hugging Face trainer arguments, live metrics, resume, export.

The arguments turn off what is a GPU default and a loss on CPU (bf16, gradient checkpointing), and
keep trainers away from MLflow: the conductor forwards `metrics.jsonl` instead.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.artifacts import TRAINER_DIR, CheckpointRef, digest_of_folder, newest_checkpoint
from stages.errors import ArtifactError, TrainingError
from stages.records import Recorder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

_NOT_LOGGED = frozenset({"epoch", "total_flos", "train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second"})
MAX_LOGIT_DRIFT = 1e-3
"""Largest difference of a logit before and after export; float32 on CPU gives 0."""


def common_arguments(stage_dir: Path, seed: int, *, phase: str = "train") -> dict[str, Any]:
    """Arguments for any Hugging Face or TRL trainer config. A stage that trains twice names its phases, so that each resumes its own."""
    import torch

    gpu = torch.cuda.is_available()
    return {
        "output_dir": str(stage_dir / TRAINER_DIR / phase),
        "seed": seed % 2**32,
        "use_cpu": not gpu,
        "bf16": gpu,
        "gradient_checkpointing": gpu,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "steps",
        "save_total_limit": 1,
        "dataloader_pin_memory": gpu,
    }


def warm_up(steps: float) -> float:
    """Share of the steps that is warm-up. Its first step has a learning rate of 0, so one step alone has none: it would learn nothing."""
    return 0.05 if steps > 1 else 0.0


def cosine_to_a_tenth(steps: float) -> dict[str, Any]:
    """Scheduler arguments: linear warm-up, then cosine to a tenth of the peak (R1, SI B.4.2)."""
    return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "warmup_steps": warm_up(steps)}


def train(trainer: Trainer, stage_dir: Path, *, prefix: str = "train") -> dict[str, float]:
    """Train to the end, from the last checkpoint in the stage folder when there is one.

    Metrics are recorded as `<prefix>/<name>`; a stage's second phase takes another prefix, since its
    steps begin at 1 again. Returns the last ones logged. Raises TrainingError when the loss is not a number.
    """
    from transformers import TrainerCallback

    recorder = Recorder(stage_dir)
    last: dict[str, float] = {}

    class Follow(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            values = {
                f"{prefix}/{name}": float(value)
                for name, value in (logs or {}).items()
                if name not in _NOT_LOGGED and isinstance(value, int | float)
            }
            if not math.isfinite(values.get(f"{prefix}/loss", 0.0)):
                raise TrainingError(f"step {state.global_step}: the loss is not a number; lower learning_rate and run again")
            recorder.metrics(state.global_step, values)
            last.update(values)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            recorder.progress(state.global_step, state.max_steps, "step")

    trainer.add_callback(Follow())
    for callback in ("PrinterCallback", "ProgressCallback"):
        for known in [item for item in trainer.callback_handler.callbacks if type(item).__name__ == callback]:
            trainer.remove_callback(known)
    checkpoint = newest_checkpoint(Path(trainer.args.output_dir))
    if checkpoint is not None:
        print(f"resuming from {checkpoint.name}", flush=True)
    with recorder.busy() as work:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        work.tokens = int(trainer.state.num_input_tokens_seen or last.get(f"{prefix}/num_tokens", 0))
    return last


def load_model(ref: CheckpointRef, *, kind: str = "causal") -> PreTrainedModel:
    """Load a checkpoint for training in float32 on CPU, in its own dtype on GPU. Never runs code from it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    loader = AutoModelForCausalLM if kind == "causal" else AutoModelForSequenceClassification
    arguments: dict[str, Any] = {
        "dtype": "auto" if torch.cuda.is_available() else torch.float32,
        "use_safetensors": True,
        "trust_remote_code": False,
    }
    if kind == "scalar":
        arguments["num_labels"] = 1
    model: PreTrainedModel = loader.from_pretrained(ref.path, **arguments)
    return model


def load_tokenizer(ref: CheckpointRef) -> PreTrainedTokenizerBase:
    """Load a checkpoint's tokenizer. Raises ArtifactError without a chat template or with pad = stop."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(ref.path, trust_remote_code=False)
    if not tokenizer.chat_template:
        raise ArtifactError(f"{ref.name}: {ref.path} has no chat template; add chat_template.jinja to the folder")
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise ArtifactError(
            f"{ref.name}: the pad token is {tokenizer.pad_token!r} and the stop token {tokenizer.eos_token!r}; "
            "they must be two tokens, or the model never learns to stop; set pad_token in tokenizer_config.json"
        )
    return tokenizer


def export_checkpoint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stage_dir: Path, *, name: str, card: str, phase: str = "train"
) -> CheckpointRef:
    """Write a checkpoint folder and check it as the next stage will see it.

    The export is loaded again and its logits on a probe compared with the live model's. Raises
    ArtifactError when they differ by more than MAX_LOGIT_DRIFT, or when the vocabulary does not
    cover the tokenizer. The trainer's own checkpoints of this phase are deleted afterwards.
    """
    import torch

    path = stage_dir / "checkpoint"
    shutil.rmtree(path, ignore_errors=True)
    model.eval()
    model.save_pretrained(path, safe_serialization=True)
    tokenizer.save_pretrained(path)
    (path / "README.md").write_text(card)
    ref = CheckpointRef(name=name, digest=digest_of_folder(path), path=path, producer=stage_dir.name)
    if model.config.vocab_size < len(tokenizer):
        raise ArtifactError(f"{name}: {len(tokenizer)} tokens but {model.config.vocab_size} embeddings; resize the model")
    probe = torch.tensor([_probe_ids(tokenizer)], device=model.device)
    kind = "causal" if "CausalLM" in type(model).__name__ else "scalar"
    with torch.no_grad():
        before = model(probe).logits.float().cpu()
        after = load_model(ref, kind=kind).eval()(probe.cpu()).logits.float()
    drift = float((before - after).abs().max())
    if math.isnan(drift) or (drift > MAX_LOGIT_DRIFT and not torch.cuda.is_available()):
        raise ArtifactError(
            f"{name}: logits moved by {drift:.2g} in the export (nan: the weights are not numbers); the rule is at most "
            f"{MAX_LOGIT_DRIFT:g}; lower learning_rate and run the stage again"
        )
    shutil.rmtree(stage_dir / TRAINER_DIR / phase, ignore_errors=True)
    return ref


def _probe_ids(tokenizer: PreTrainedTokenizerBase) -> Sequence[int]:
    ids: list[int] = tokenizer("12 + 7 = 19. The answer is \\boxed{19}.", add_special_tokens=False)["input_ids"]
    return ids
