"""Ask a model questions and grade what it says: the shared act of best-of-8, rejection sampling,
reward modelling, distillation and evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from stages.chat import THINK_TOKENS, Reply, parse_reply, render_prompt
from stages.config import SamplerConfig
from stages.errors import RewardError
from stages.problems import seed_of
from stages.records import Recorder
from stages.rewards.grading import Grade, Verdict
from stages.rewards.sandbox import require_sandbox
from stages.rewards.tasks import Grader, Task, grade_tasks
from stages.rollouts.engine import Completion, Request, RolloutEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Question(NamedTuple):
    """A problem as the model meets it."""

    problem_id: str
    question: str
    gold: str
    family: str = ""
    answer_type: str = "text"
    grading: str = ""
    """What the answer's type needs beside the gold answer (`stages/rewards/tasks.py`)."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Question:
        """The problem of a row of a pool or a benchmark."""
        kind = row.get("answer_type") or "text"
        return cls(row["problem_id"], row["question"], row["answer"], row.get("family") or "", kind, row.get("grading") or "")

    def row(self) -> dict[str, Any]:
        """The problem as columns of a row, which `of` reads."""
        return {
            "problem_id": self.problem_id,
            "question": self.question,
            "answer": self.gold,
            "answer_type": self.answer_type,
            "grading": self.grading,
        }

    @property
    def task(self) -> Task:
        """How an answer to it is graded."""
        return Task(self.gold, self.answer_type, self.grading, self.question)


class Answer(NamedTuple):
    """One graded sample."""

    question: Question
    sample: int
    seed: int
    text: str
    """The whole completion, stop token left out."""
    reply: Reply
    grade: Grade
    tokens: int
    thinking_tokens: int
    stopped: bool
    """The model ended the reply itself; False when it ran into the length limit."""


def ask(
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    *,
    attempts: int,
    first: int = 0,
    thinking: bool,
    sampler: SamplerConfig,
    seed: int,
    recorder: Recorder,
    what: str,
    flag: bool = False,
    budget: int | None = None,
    budget_text: str = "",
    grader: Grader = grade_tasks,
) -> list[Answer]:
    """Draw `attempts` answers to each question, in question order, all of one question together.

    Samples are numbered from `first`; a sample's seed comes from its question and number alone, so
    samples drawn in several calls are those of one call.

    `flag` uses the soft switch (`/think`, `/no_think`) in place of the template's. With a thinking
    `budget` (tokens), thinking that is not over by then is cut and `budget_text` appended, and the
    model goes on from there (Qwen3, arXiv 2505.09388, section 4.7).
    """
    prompts = {
        question.problem_id: _ids(tokenizer, render_prompt(tokenizer, question.question, thinking=thinking, flag=flag))
        for question in questions
    }
    wanted = [(question, sample) for question in questions for sample in range(first, first + attempts)]
    seeds = [seed_of(seed, question.problem_id, sample, what) for question, sample in wanted]
    requests = [Request(index, prompts[question.problem_id], seeds[index]) for index, (question, _) in enumerate(wanted)]
    if any(question.answer_type == "code" for question in questions):
        require_sandbox()
    tags = _ids(tokenizer, THINK_TOKENS[0])[0], _ids(tokenizer, THINK_TOKENS[1])[0]
    with recorder.busy() as work:
        if budget is None:
            completions = _generate(engine, requests, sampler, recorder, what)
        else:
            completions = _generate_within(engine, requests, sampler, recorder, what, budget, tags, _ids(tokenizer, budget_text))
        work.tokens = sum(len(completion.token_ids) for completion in completions)
    texts = [tokenizer.decode(completion.token_ids, skip_special_tokens=True) for completion in completions]
    replies = [parse_reply(text) for text in texts]
    grades = grader(replies, [question.task for question, _ in wanted])
    answers = []
    for index, ((question, sample), completion) in enumerate(zip(wanted, completions, strict=True)):
        ids = completion.token_ids
        answers.append(
            Answer(
                question=question,
                sample=sample,
                seed=seeds[index],
                text=texts[index],
                reply=replies[index],
                grade=grades[index],
                tokens=len(ids),
                thinking_tokens=ids.index(tags[1]) if tags[1] in ids else 0,
                stopped=completion.finish == "stop",
            )
        )
    return answers


def require_graded(answers: Sequence[Answer], max_share: float) -> None:
    """Raise RewardError when more than `max_share` of the answers could not be graded."""
    failed = [answer for answer in answers if answer.grade.verdict is Verdict.NOT_GRADED]
    if len(failed) > max_share * len(answers):
        first = failed[0]
        raise RewardError(
            f"{len(failed)} of {len(answers)} answers could not be graded (first: problem {first.question.problem_id}, "
            f"{first.grade.reason}); the rule is at most {max_share:.0%}; mend the gold answers or raise max_not_graded_share"
        )


def _generate(
    engine: RolloutEngine, requests: Sequence[Request], sampler: SamplerConfig, recorder: Recorder, what: str
) -> list[Completion]:
    finished: dict[int, Completion] = {}
    every = max(1, len(requests) // 20)
    for completion in engine.stream(requests, sampler):
        finished[completion.key] = completion
        if len(finished) % every == 0:
            recorder.progress(len(finished), len(requests), what)
    return [finished[index] for index in range(len(requests))]


def _generate_within(
    engine: RolloutEngine,
    requests: Sequence[Request],
    sampler: SamplerConfig,
    recorder: Recorder,
    what: str,
    budget: int,
    tags: tuple[int, int],
    cut: list[int],
) -> list[Completion]:
    """Two calls: think for at most `budget` tokens, then answer from there."""
    thought = _generate(
        engine,
        [request._replace(max_new_tokens=budget, stop_token_ids=tags[1:]) for request in requests],
        sampler,
        recorder,
        what,
    )
    begun: list[Completion] = []
    unfinished: list[Request] = []
    for request, part in zip(requests, thought, strict=True):
        closed = part.token_ids[-1:] == [tags[1]]
        if part.finish == "stop" and not closed:  # ended without thinking
            begun.append(part)
            continue
        thinks = part.token_ids[:1] == [tags[0]]  # a reply without thinking goes on uncut
        so_far = part.token_ids + cut if thinks and not closed else part.token_ids
        begun.append(part._replace(token_ids=so_far, logprobs=[]))
        unfinished.append(request._replace(key=len(begun) - 1, prompt_ids=request.prompt_ids + so_far))
    for completion in engine.generate(unfinished, sampler):
        before = begun[completion.key]
        begun[completion.key] = completion._replace(token_ids=before.token_ids + completion.token_ids, logprobs=[])
    return begun


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
