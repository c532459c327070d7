"""Supervised fine-tuning: what is trained on, what is refused, and a crash that leaves no trace in the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stages.artifacts import CheckpointRef, digest_of_folder, last_checkpoint
from stages.config import ColdStart
from stages.errors import ArtifactError, DataError, TrainingError
from stages.records import read_records
from stages.supervised import Example, check_rendering, direct_example, fine_tune, thinking_example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NewStage = Callable[[str], Path]
Kill = Callable[[Callable[[Path], Any], Path], None]
CONFIG = ColdStart(examples=40, epochs=6, batch_size=4, learning_rate=2e-3, max_tokens=64)  # 60 steps, checkpoints at 25 and 50


@pytest.fixture
def examples(tokenizer: PreTrainedTokenizerFast) -> list[Example]:
    """Forty examples of all four kinds."""
    kinds = [
        (lambda flag: lambda a: thinking_example(tokenizer, f"{a}+3", f"{a}+3={a + 3}", f"\\boxed{{{a + 3}}}", flag=flag)),
        (lambda flag: lambda a: direct_example(tokenizer, f"{a}+3", f"\\boxed{{{a + 3}}}", flag=flag)),
    ]
    return [kind(flag)(a) for a in range(10) for kind in kinds for flag in (False, True)]


def test_check_rendering_examples_of_every_kind_pass(tokenizer: PreTrainedTokenizerFast, examples: list[Example]) -> None:
    longest = max(len(tokenizer(example.prompt + example.completion)["input_ids"]) for example in examples)
    check_rendering(tokenizer, examples, longest)
    with pytest.raises(DataError, match=f"a training text has {longest} tokens; the rule is at most max_tokens = {longest - 1} "):
        check_rendering(tokenizer, examples, longest - 1)


def test_check_rendering_prompt_tokens_that_do_not_open_the_text_are_an_artifact_error(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "<|im_start|>user\nthe sum"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    cut = next(
        n for n in range(len(text) - 1, 0, -1) if ids[: len(part := tokenizer(text[:n], add_special_tokens=False)["input_ids"])] != part
    )
    with pytest.raises(ArtifactError, match="the tokens of the prompt do not open the tokens of the training text"):
        check_rendering(tokenizer, [Example(text[:cut], text[cut:] + "<|im_end|>")], 64)


@pytest.mark.parametrize("ending", ["", "\n", "<|im_end|>\n", "<|endoftext|>"])
def test_check_rendering_text_that_does_not_end_in_the_stop_token_is_an_artifact_error(
    tokenizer: PreTrainedTokenizerFast, ending: str
) -> None:
    example = Example("<|im_start|>user\n3+4<|im_end|>\n<|im_start|>assistant\n", f"\\boxed{{7}}{ending}")
    with pytest.raises(ArtifactError, match=r"the training text ends in .*, the stop token is '<\|im_end\|>'"):
        check_rendering(tokenizer, [example], 64)


def test_fine_tune_loss_covers_the_completion_and_its_stop_token_only(
    random_model: CheckpointRef,
    tokenizer: PreTrainedTokenizerFast,
    examples: list[Example],
    new_stage: NewStage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import trl

    seen: list[tuple[str, str]] = []

    class Watched(trl.SFTTrainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            for ids, labels in zip(inputs["input_ids"].tolist(), inputs["labels"].tolist(), strict=True):
                trained = [label for label in labels if label != -100]
                assert all(label in (-100, token) for label, token in zip(labels, ids, strict=True))
                text = tokenizer.decode([token for token in ids if token != tokenizer.pad_token_id])
                seen.append((text, tokenizer.decode(trained)))
            return super().compute_loss(model, inputs, *rest, **named)

    monkeypatch.setattr(trl, "SFTTrainer", Watched)
    fine_tune(random_model, examples, CONFIG.model_copy(update={"epochs": 1.0}), new_stage("cold_start"), 0, name="x", card="")
    assert sorted(seen) == sorted((example.prompt + example.completion, example.completion) for example in examples)


def test_fine_tune_learns_exports_and_reports(
    random_model: CheckpointRef, examples: list[Example], new_stage: NewStage, tokenizer: PreTrainedTokenizerFast
) -> None:
    stage_dir = new_stage("cold_start")
    before = digest_of_folder(random_model.path)
    checkpoint, metrics = fine_tune(random_model, examples, CONFIG, stage_dir, 0, name="cold_start.model", card="# Card\n")
    losses = [
        record["metrics"]["train/loss"] for record in read_records(stage_dir / "metrics.jsonl") if "train/loss" in record.get("metrics", {})
    ]
    assert len(losses) == 60
    assert losses[-1] < 0.5 * losses[0]
    assert metrics["train/examples"] == 40
    assert (checkpoint.name, checkpoint.path, checkpoint.producer) == ("cold_start.model", stage_dir / "checkpoint", stage_dir.name)
    assert checkpoint.digest == digest_of_folder(checkpoint.path)
    assert (checkpoint.path / "README.md").read_text() == "# Card\n"
    assert {path.name for path in checkpoint.path.iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert last_checkpoint(stage_dir) is None
    assert digest_of_folder(random_model.path) == before


def test_fine_tune_of_one_step_learns_from_it(random_model: CheckpointRef, examples: list[Example], new_stage: NewStage) -> None:
    one_step = CONFIG.model_copy(update={"epochs": 1.0, "batch_size": len(examples)})
    checkpoint, metrics = fine_tune(random_model, examples, one_step, new_stage("cold_start"), 0, name="x", card="")
    assert metrics["train/learning_rate"] == CONFIG.learning_rate
    weights = [(ref.path / "model.safetensors").read_bytes() for ref in (checkpoint, random_model)]
    assert weights[0] != weights[1]


@pytest.mark.slow
def test_fine_tune_killed_and_run_again_gives_the_same_bits(
    random_model: CheckpointRef, examples: list[Example], new_stage: NewStage, kill_at_a_checkpoint: Kill
) -> None:
    def work(stage_dir: Path) -> CheckpointRef:
        return fine_tune(random_model, examples, CONFIG, stage_dir, 3, name="x", card="")[0]

    straight, broken = new_stage("cold_start"), new_stage("cold_start")
    whole = work(straight)
    kill_at_a_checkpoint(work, broken)
    assert not (broken / "checkpoint").exists()
    reached = last_checkpoint(broken)
    assert reached is not None
    done = len(list(read_records(broken / "metrics.jsonl")))

    resumed = work(broken)
    assert (resumed.path / "model.safetensors").read_bytes() == (whole.path / "model.safetensors").read_bytes()
    assert resumed.digest == whole.digest
    again = [record["progress"][0] for record in list(read_records(broken / "metrics.jsonl"))[done:] if "progress" in record]
    assert again == list(range(int(reached.name.removeprefix("checkpoint-")) + 1, 61))


def test_fine_tune_other_seed_gives_other_weights(random_model: CheckpointRef, examples: list[Example], new_stage: NewStage) -> None:
    config = CONFIG.model_copy(update={"epochs": 1.0})
    digests = {fine_tune(random_model, examples, config, new_stage("cold_start"), seed, name="x", card="")[0].digest for seed in (1, 1, 2)}
    assert len(digests) == 2


def test_fine_tune_loss_that_is_not_a_number_is_a_training_error(
    random_model: CheckpointRef, examples: list[Example], new_stage: NewStage
) -> None:
    stage_dir = new_stage("cold_start")
    with pytest.raises(TrainingError, match=r"step \d+: the loss is not a number; lower learning_rate"):
        fine_tune(random_model, examples, CONFIG.model_copy(update={"learning_rate": 1e39}), stage_dir, 0, name="x", card="")
    assert not (stage_dir / "checkpoint").exists()
