"""Pass rates: how often a model solves each problem (best-of-8), and the problems worth training on.

What      k graded attempts a problem, a beta-binomial estimate, and the problems that pass the difficulty filters.
Reads     `model`, `problems`; `second_model` for the filter `s1`.
Writes    `pass_rates` (one row a problem, keyed by problem, model, template, sampler and grader),
          `attempts` (one row an attempt, with its seed, verdict and reason) and
          `band` (the problems that every filter keeps, for RL). `report/`: how hard the problems are, by topic.
Papers    Kimi k1.5 (arXiv 2501.12599) 2.1 for pass rate as difficulty and for guesses without thinking;
          Qwen3 (arXiv 2505.09388) 4.1 for the latter; OLMo 3 (arXiv 2512.13961) for 8 rollouts from the
          exact starting checkpoint; s1 (arXiv 2501.19393) for two models; stages/difficulty.py holds the rules.
Differs   The band is two-sided (as Qwen2.5-Math and Big-Math do); Kimi and OLMo 3 cut one side only.
          Kimi asks an SFT model and Qwen3 a 72B model for the guesses; here the model itself guesses.
          `stop_when_certain` leaves the filters' decisions as they are, but estimates from fewer attempts
          are wider, and pass rates of problems that stopped early lean towards their first attempts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stages.artifacts import REPORT, CheckpointRef, Handles, StageOutput
from stages.chat import TEMPLATE
from stages.config import PassRates
from stages.data_report import write_difficulty
from stages.difficulty import Evidence, RateRule, beta_binomial, dropped_by, guess_tries, is_settled, rate_rules
from stages.errors import DataError, RewardError
from stages.records import Recorder
from stages.rewards.grading import Verdict
from stages.rewards.model_judge import grader_of, name_of
from stages.rewards.tasks import Grader
from stages.rollouts.answers import Answer, Question, ask, require_graded
from stages.rollouts.engine import RolloutEngine
from stages.tables import read_rows, write_rows
from stages.training import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NO_GUESS_RIGHT = RateRule(0, 0)


class _Tried(NamedTuple):
    """What one model answered to one purpose, by problem."""

    purpose: str
    """`attempt`, `guess` (without thinking) or `second_model`."""
    model: str
    template: str
    thinking: bool
    answers: dict[str, list[Answer]]


def run(config: PassRates, inputs: Handles, stage_dir: Path, seed: int) -> StageOutput:
    """Try the first `config.problems` problems at most `config.attempts` times each."""
    problems = read_rows(inputs["problems"], columns=("problem_id", "question", "answer", "family"))[: config.problems]
    if len({row["problem_id"] for row in problems}) < len(problems):
        raise DataError(f"{inputs['problems'].name}: a problem_id stands twice; attempts are counted by it; deduplicate the problems")
    if ("s1" in config.filters) != ("second_model" in inputs):
        raise DataError("the filter `s1` and the input `second_model` belong together; give both or neither")
    recorder = Recorder(stage_dir)
    tried = _try_all(config, inputs, problems, grader_of(config.judge, stage_dir, seed), recorder, seed)
    attempts = tried[0]
    require_graded([answer for answers in attempts.answers.values() for answer in answers], config.max_not_graded_share)

    rows, band, drops = [], [], []
    for problem in problems:
        row, dropped = _judge(problem["problem_id"], tried, config)
        rows.append(row)
        drops.append(dropped)
        if row["kept"]:
            band.append({**problem, "pass_rate": row["pass_rate"]})
    rates = [row["pass_rate"] for row in rows if row["pass_rate"] is not None]
    if not rates:
        raise RewardError(
            f"none of {sum(row['drawn'] for row in rows)} answers could be graded; a pass rate needs at least one; mend the gold answers"
        )
    drawn = sum(len(answers) for each in tried for answers in each.answers.values())
    planned = len(problems) * (config.attempts + guess_tries(config) + ("s1" in config.filters))
    metrics = {
        "pass_rates/mean": sum(rates) / len(rates),
        "pass_rates/never": sum(rate == 0 for rate in rates) / len(rates),
        "pass_rates/always": sum(rate == 1 for rate in rates) / len(rates),
        "pass_rates/in_band": len(band) / len(problems),
        "pass_rates/attempts_saved": 1 - drawn / planned,
        **{f"pass_rates/dropped/{name}": float(sum(name in dropped for dropped in drops)) for name in (*config.filters, "not_graded")},
    }
    recorder.metrics(0, metrics)
    write_difficulty(stage_dir / REPORT, [{**row, "family": problem["family"]} for row, problem in zip(rows, problems, strict=True)])
    return StageOutput(
        outputs={
            "pass_rates": write_rows(rows, stage_dir, "pass_rates", empty_rule="no problem was tried"),
            "attempts": write_rows(_attempt_rows(tried, config), stage_dir, "attempts", empty_rule="no problem was tried"),
            "band": write_rows(band, stage_dir, "band", empty_rule=_why_empty(config, metrics)),
        },
        metrics=metrics,
    )


def _try_all(
    config: PassRates, inputs: Handles, problems: Sequence[dict[str, Any]], grader: Grader, recorder: Recorder, seed: int
) -> list[_Tried]:
    """Attempts of the model, then its guesses and the second model's attempts where a filter wants them."""
    model = inputs["model"]
    assert isinstance(model, CheckpointRef)
    questions = [Question.of(row) for row in problems]
    per_round = config.attempts_per_round if config.stop_when_certain else max(config.attempts, guess_tries(config))
    rules = tuple(rate_rules(config).values())

    def draw(
        engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, tries: int, thinking: bool, what: str, rules: Sequence[RateRule]
    ) -> dict[str, list[Answer]]:
        def more(wanted: Sequence[Question], first: int, count: int) -> list[Answer]:
            return ask(
                engine,
                tokenizer,
                wanted,
                attempts=count,
                first=first,
                thinking=thinking,
                sampler=config.sampler,
                seed=seed,
                recorder=recorder,
                what=what,
                grader=grader,
            )

        return _in_rounds(more, questions, tries, per_round, rules)

    tokenizer = load_tokenizer(model)
    template = _template_of(tokenizer)
    with RolloutEngine(model.path, config.engine) as engine:
        answers = draw(engine, tokenizer, config.attempts, config.thinking, "attempts", rules)
        tried = [_Tried("attempt", model.digest, template, config.thinking, answers)]
        if tries := guess_tries(config):
            guesses = draw(engine, tokenizer, tries, False, "guesses", (_NO_GUESS_RIGHT,))
            tried.append(_Tried("guess", model.digest, template, False, guesses))
    if "second_model" in inputs:
        second = inputs["second_model"]
        assert isinstance(second, CheckpointRef)
        tokenizer = load_tokenizer(second)
        with RolloutEngine(second.path, config.engine) as engine:
            answers = draw(engine, tokenizer, 1, config.thinking, "second_model", ())
        tried.append(_Tried("second_model", second.digest, _template_of(tokenizer), config.thinking, answers))
    return tried


def _in_rounds(
    more: Callable[[Sequence[Question], int, int], list[Answer]],
    questions: Sequence[Question],
    tries: int,
    per_round: int,
    rules: Sequence[RateRule],
) -> dict[str, list[Answer]]:
    """Answers by problem, at most `tries` each; a problem that is settled under the rules leaves the rounds."""
    answers: dict[str, list[Answer]] = {question.problem_id: [] for question in questions}
    done, waiting = 0, list(questions)
    while waiting and done < tries:
        count = min(per_round, tries - done)
        for answer in more(waiting, done, count):
            answers[answer.question.problem_id].append(answer)
        done += count
        waiting = [item for item in waiting if not is_settled(rules, *_counts(answers[item.problem_id]), tries - done)]
    return answers


def _judge(problem_id: str, tried: Sequence[_Tried], config: PassRates) -> tuple[dict[str, Any], dict[str, str]]:
    """A problem's row, and the filters that drop it with their reasons."""
    answers = {each.purpose: each.answers[problem_id] for each in tried}
    attempts, guesses, second = (answers.get(purpose, []) for purpose in ("attempt", "guess", "second_model"))
    right, graded = _counts(attempts)
    mean, low, high = beta_binomial(right, graded)
    dropped = dropped_by(
        Evidence(
            right,
            graded,
            guesses=tuple(_is_right(answer) for answer in guesses),
            first_right=_is_right(attempts[0]),
            second_right=any(_is_right(answer) for answer in second),
        ),
        config,
    )
    row = {
        "problem_id": problem_id,
        "model": tried[0].model,
        "template": tried[0].template,
        "sampler": config.sampler.model_dump_json(),
        "grader": name_of(attempts[0].question.answer_type, config.judge),
        "thinking": config.thinking,
        "drawn": len(attempts),
        "attempts": graded,
        "right": right,
        "not_graded": len(attempts) - graded,
        "pass_rate": right / graded if graded else None,
        "posterior_mean": mean,
        "posterior_low": low,
        "posterior_high": high,
        "tokens_mean": sum(answer.tokens for answer in attempts) / len(attempts),
        "guesses": len(guesses),
        "guesses_right": sum(_is_right(answer) for answer in guesses),
        "second_model_attempts": len(second),
        "second_model_right": sum(_is_right(answer) for answer in second),
        "kept": not dropped,
        "dropped_by": ", ".join(dropped),
        "reason": "; ".join(f"{name}: {reason}" for name, reason in dropped.items()),
    }
    return row, dropped


def _attempt_rows(tried: Sequence[_Tried], config: PassRates) -> list[dict[str, Any]]:
    """One row an answer: enough to draw it again and to grade it again."""
    return [
        {
            "problem_id": answer.question.problem_id,
            "purpose": each.purpose,
            "model": each.model,
            "template": each.template,
            "sampler": config.sampler.model_dump_json(),
            "grader": name_of(answer.question.answer_type, config.judge),
            "thinking": each.thinking,
            "attempt": answer.sample,
            "seed": answer.seed,
            "verdict": str(answer.grade.verdict),
            "reason": answer.grade.reason,
            "tokens": answer.tokens,
            "stopped": answer.stopped,
            "completion": answer.text,
        }
        for each in tried
        for answers in each.answers.values()
        for answer in answers
    ]


def _why_empty(config: PassRates, metrics: dict[str, float]) -> str:
    rules = [f"no pass rate lies in {rule}" if name == "band" else f"{name} keeps {rule}" for name, rule in rate_rules(config).items()]
    counts = ", ".join(f"{name} drops {metrics[f'pass_rates/dropped/{name}']:.0f}" for name in (*config.filters, "not_graded"))
    return (
        f"{'; '.join(rules) or 'nothing is left'} (mean {metrics['pass_rates/mean']:.2f}, never solved {metrics['pass_rates/never']:.0%}, "
        f"always solved {metrics['pass_rates/always']:.0%}; {counts}); widen `band` or take a filter out of `filters`"
    )


def _counts(answers: Sequence[Answer]) -> tuple[int, int]:
    """Right and graded answers."""
    return sum(_is_right(answer) for answer in answers), sum(answer.grade.verdict is not Verdict.NOT_GRADED for answer in answers)


def _is_right(answer: Answer) -> bool:
    return answer.grade.verdict is Verdict.RIGHT


def _template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    return hashlib.sha256((tokenizer.chat_template or TEMPLATE).encode()).hexdigest()[:16]
