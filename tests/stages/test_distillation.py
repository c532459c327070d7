"""Distillation: verified traces, the control without a teacher, reverse KL on the student's own samples."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import CheckpointRef, DatasetRef, last_checkpoint
from stages.chat import Reply
from stages.config import Distillation, EngineConfig
from stages.distillation import require_same_tokens, run
from stages.errors import ArtifactError, DataError
from stages.rewards.grading import Verdict, grade
from stages.tables import read_rows

NewStage = Callable[[str], Path]
Problems = Callable[[Sequence[dict[str, Any]]], DatasetRef]
ROWS = [{"problem_id": f"p{index}", "question": f"{index}+{7 - index}", "answer": "8" if index == 1 else "7"} for index in range(8)]


@pytest.fixture
def settings(small_engine: EngineConfig) -> dict[str, Any]:
    return {
        "examples": 8,
        "epochs": 2,
        "batch_size": 4,
        "learning_rate": 1e-3,
        "max_tokens": 96,
        "attempts": 4,
        "sampler": {"max_new_tokens": 40, "temperature": 0.6},
        "engine": small_engine.model_dump(),
    }


@pytest.mark.slow
def test_distillation_trains_on_the_teachers_verified_answers_then_towards_its_distribution(
    random_model: CheckpointRef,
    pupil: CheckpointRef,
    new_stage: NewStage,
    problems: Problems,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    import trl
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    golden: list[float] = []

    class Watched(trl.DistillationTrainer):  # type: ignore[misc]
        def train(self, *rest: Any, **named: Any) -> Any:
            student, teacher = (torch.tensor([[row]]).log() for row in ([0.3, 0.5, 0.2], [0.7, 0.2, 0.1]))
            head = torch.eye(3)
            loss, _, _ = _chunked_divergence_loss(student, teacher, head, head, torch.ones(1, 1), self.beta, temperature=self.temperature)
            golden.append(loss.item())
            return super().train(*rest, **named)

    monkeypatch.setattr(trl, "DistillationTrainer", Watched)
    config = Distillation.model_validate(settings | {"on_policy_steps": 2, "on_policy_batch": 4})
    output = run(config, {"model": random_model, "teacher": pupil, "problems": problems(ROWS)}, new_stage("distillation"), 0)
    assert golden == pytest.approx([0.342585], abs=1e-6)
    rows = read_rows(output.outputs["traces"])
    assert {row["problem_id"] for row in rows} <= {row["problem_id"] for row in ROWS} - {"p1"}  # never solved
    assert len(rows) >= 5
    for row in rows:
        assert row.keys() == {"problem_id", "question", "answer", "answer_type", "grading", "trace", "response"}
        if row["trace"]:  # an answer without thinking is kept right or wrong: it teaches the mode
            assert grade(Reply(row["trace"], row["response"]), row["answer"]).verdict is Verdict.RIGHT
        assert bool(row["trace"]) == (int(row["problem_id"][1:]) % 3 != 0)  # every third is asked without thinking
    model = output.outputs["model"]
    assert isinstance(model, CheckpointRef)
    assert model.digest not in (random_model.digest, pupil.digest)
    assert math.isfinite(output.metrics["on_policy/loss"])
    assert output.metrics["on_policy/loss"] > 0


def test_distillation_without_a_teacher_is_the_control_on_gold_answers(
    random_model: CheckpointRef, new_stage: NewStage, problems: Problems, settings: dict[str, Any]
) -> None:
    config = Distillation.model_validate(settings | {"examples": 6, "on_policy_steps": 2})
    output = run(config, {"model": random_model, "problems": problems(ROWS)}, new_stage("distillation"), 0)
    rows = read_rows(output.outputs["traces"])
    assert [row["problem_id"] for row in rows] == [row["problem_id"] for row in ROWS[:6]]
    assert all(row["trace"] is None and grade(Reply(None, row["response"]), row["answer"]).verdict is Verdict.RIGHT for row in rows)
    assert output.metrics["train/examples"] == 6
    assert not [name for name in output.metrics if name.startswith("on_policy/")]


@pytest.mark.slow
def test_distillation_teacher_that_solves_nothing_is_a_data_error(
    random_model: CheckpointRef, new_stage: NewStage, problems: Problems, settings: dict[str, Any]
) -> None:
    config = Distillation.model_validate(settings | {"sampler": {"max_new_tokens": 4}})
    with pytest.raises(DataError, match=r"distillation\.traces would be empty: the teacher solved no problem"):
        run(config, {"model": random_model, "teacher": random_model, "problems": problems(ROWS)}, new_stage("distillation"), 0)


@pytest.mark.slow
def test_distillation_killed_in_the_on_policy_phase_and_run_again_gives_the_same_model(
    random_model: CheckpointRef, pupil: CheckpointRef, new_stage: NewStage, problems: Problems, settings: dict[str, Any]
) -> None:
    config = Distillation.model_validate(
        settings | {"on_policy_steps": 35, "on_policy_batch": 2, "sampler": {"max_new_tokens": 12, "temperature": 0.6}}
    )
    inputs = {"model": random_model, "teacher": pupil, "problems": problems(ROWS)}
    straight, broken = new_stage("distillation"), new_stage("distillation")
    process = multiprocessing.get_context("fork").Process(target=run, args=(config, inputs, broken, 0))
    process.start()
    while not ((broken / "checkpoint").exists() and last_checkpoint(broken)) and process.is_alive():
        process.join(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert run(config, inputs, broken, 0).outputs["model"].digest == run(config, inputs, straight, 0).outputs["model"].digest


def test_require_same_tokens_other_tokenizer_of_the_same_size_is_an_artifact_error(random_model: CheckpointRef, tmp_path: Path) -> None:
    require_same_tokens(random_model, random_model)
    path = tmp_path / "other"
    shutil.copytree(random_model.path, path)
    content = json.loads((path / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    (path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match=r"student random and teacher other encode the same text into"):
        require_same_tokens(random_model, random_model.model_copy(update={"name": "other", "path": path}))
