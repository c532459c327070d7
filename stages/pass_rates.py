"""Pass rates: how often a model solves each problem (best-of-8), and the band worth training on.

What      k graded attempts a problem, a beta-binomial estimate, and the problems inside the band.
Reads     `model`, `problems`.
Writes    `pass_rates` (one row a problem, keyed by problem, model, template, sampler and grader) and
          `band` (the problems whose pass rate lies in the band, for RL).
Papers    Kimi k1.5 (arXiv 2501.12599) 2.1 for pass rate as difficulty; OLMo 3 (arXiv 2512.13961) for
          8 rollouts from the exact starting checkpoint.
Differs   The band is two-sided (as Qwen2.5-Math and Big-Math do); Kimi and OLMo 3 cut one side only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from stages.artifacts import CheckpointRef, Handles, StageOutput
from stages.chat import TEMPLATE
from stages.config import PassRates
from stages.errors import RewardError
from stages.records import Recorder
from stages.rewards.grading import GRADER, Verdict
from stages.rollouts.answers import Question, ask, require_graded
from stages.rollouts.engine import RolloutEngine
from stages.tables import read_rows, write_rows
from stages.training import load_tokenizer


def run(config: PassRates, inputs: Handles, stage_dir: Path, seed: int) -> StageOutput:
    """Try the first `config.problems` problems `config.attempts` times each."""
    model = inputs["model"]
    assert isinstance(model, CheckpointRef)
    problems = read_rows(inputs["problems"], columns=("problem_id", "question", "answer", "family"))[: config.problems]
    tokenizer, recorder = load_tokenizer(model), Recorder(stage_dir)
    questions = [Question(row["problem_id"], row["question"], row["answer"], row["family"]) for row in problems]
    with RolloutEngine(model.path, config.engine) as engine:
        answers = ask(
            engine,
            tokenizer,
            questions,
            attempts=config.attempts,
            thinking=config.thinking,
            sampler=config.sampler,
            seed=seed,
            recorder=recorder,
            what="attempts",
        )
    require_graded(answers, config.max_not_graded_share)
    template = hashlib.sha256((tokenizer.chat_template or TEMPLATE).encode()).hexdigest()[:16]
    rows = []
    for index, problem in enumerate(problems):
        tried = answers[index * config.attempts : (index + 1) * config.attempts]
        graded = [answer for answer in tried if answer.grade.verdict is not Verdict.NOT_GRADED]
        right = sum(answer.grade.verdict is Verdict.RIGHT for answer in graded)
        mean, low, high = beta_binomial(right, len(graded))
        rows.append(
            {
                "problem_id": problem["problem_id"],
                "model": model.digest,
                "template": template,
                "sampler": config.sampler.model_dump_json(),
                "grader": GRADER,
                "thinking": config.thinking,
                "attempts": len(graded),
                "right": right,
                "not_graded": len(tried) - len(graded),
                "pass_rate": right / len(graded) if graded else None,
                "posterior_mean": mean,
                "posterior_low": low,
                "posterior_high": high,
                "tokens_mean": sum(answer.tokens for answer in tried) / len(tried),
            }
        )
    low, high = config.band
    band = [
        {**problem, "pass_rate": row["pass_rate"]}
        for problem, row in zip(problems, rows, strict=True)
        if row["pass_rate"] is not None and low <= row["pass_rate"] <= high
    ]
    rates = [row["pass_rate"] for row in rows if row["pass_rate"] is not None]
    if not rates:
        raise RewardError(f"none of {len(answers)} answers could be graded; a pass rate needs at least one; mend the gold answers")
    metrics = {
        "pass_rates/mean": sum(rates) / len(rates),
        "pass_rates/never": sum(rate == 0 for rate in rates) / len(rates),
        "pass_rates/always": sum(rate == 1 for rate in rates) / len(rates),
        "pass_rates/in_band": len(band) / len(problems),
    }
    recorder.metrics(0, metrics)
    return StageOutput(
        outputs={
            "pass_rates": write_rows(rows, stage_dir, "pass_rates", empty_rule="no problem was tried"),
            "band": write_rows(
                band,
                stage_dir,
                "band",
                empty_rule=f"no pass rate lies in [{low:g}, {high:g}] (mean {metrics['pass_rates/mean']:.2f}, "
                f"never solved {metrics['pass_rates/never']:.0%}, always solved {metrics['pass_rates/always']:.0%}); widen `band`",
            ),
        },
        metrics=metrics,
    )


def beta_binomial(right: int, attempts: int) -> tuple[float, float, float]:
    """Mean and central 95 % interval of the pass rate under a uniform prior: Beta(right + 1, wrong + 1)."""
    from scipy.stats import beta

    posterior = beta(right + 1, attempts - right + 1)
    return float(posterior.mean()), float(posterior.ppf(0.025)), float(posterior.ppf(0.975))
