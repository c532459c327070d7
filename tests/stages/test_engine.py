"""The engine: it serves the weights it was given, repeats itself from a seed, and leaves nothing behind."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stages.artifacts import CheckpointRef
from stages.config import EngineConfig, SamplerConfig
from stages.errors import RewardError, RolloutError
from stages.records import Recorder, read_records, work_done
from stages.reinforcement import logprob_gap
from stages.rewards.grading import Verdict
from stages.rollouts.answers import Question, ask, require_graded
from stages.rollouts.engine import Completion, Request, RolloutEngine
from stages.training import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

pytestmark = pytest.mark.slow
SAMPLER = SamplerConfig(max_new_tokens=16)
PROMPTS = ("3+4=", "the legs of a dog", "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
QUESTIONS = [Question(f"p{index}", f"{index}+{7 - index}", "7") for index in range(4)]


@pytest.fixture(scope="module")
def built(random_model: CheckpointRef, small_engine: EngineConfig) -> Iterator[tuple[RolloutEngine, Any, Any]]:
    """An engine, and the state of the random generators before and after it was built, in a process that has loaded numba."""
    import numba  # noqa: F401 - its library makes vLLM 0.32 fail on CPU unless the engine sees to it

    before = random_state()
    with RolloutEngine(random_model.path, small_engine) as engine:
        yield engine, before, random_state()


@pytest.fixture(scope="module")
def engine(built: tuple[RolloutEngine, Any, Any]) -> RolloutEngine:
    """One engine for this file (vLLM stands one at a time in a process); tests hand it the weights they need."""
    return built[0]


def random_state() -> tuple[Any, ...]:
    import numpy as np
    import torch

    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), torch.get_num_threads()


@pytest.fixture(scope="module")
def loud(random_model: CheckpointRef) -> PreTrainedModel:
    """The random model with larger weights everywhere, so that its distributions are far from flat."""
    import torch

    model = load_model(random_model).eval()
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, generator=noise))
    return model


def requests(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> list[Request]:
    ids = tokenizer(list(PROMPTS), add_special_tokens=False)["input_ids"]
    return [Request((prompt, sample), ids[prompt], 1000 * seed + 10 * prompt + sample) for prompt in range(3) for sample in range(3)]


def gap(model: PreTrainedModel, drawn: list[Completion], asked: list[Request], temperature: float = 1.0) -> float:
    return logprob_gap(model, [request.prompt_ids for request in asked], drawn, temperature)


def unfinished(engine: RolloutEngine) -> bool:
    return bool(engine._llm.llm_engine.has_unfinished_requests())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_engine_handed_live_weights_gives_the_trainers_log_probabilities(
    engine: RolloutEngine, loud: PreTrainedModel, random_model: CheckpointRef, tokenizer: PreTrainedTokenizerFast, temperature: float
) -> None:
    asked, sampler = requests(tokenizer), SamplerConfig(max_new_tokens=16, temperature=temperature)
    plain = load_model(random_model)
    engine.load_live(plain, "plain")
    before = engine.generate(asked, sampler, logprobs=True)
    assert gap(plain, before, asked, temperature) < 1e-3
    assert gap(loud, before, asked, temperature) > 0.1  # without the handover the difference shows
    engine.load_live(loud, "loud")
    after = engine.generate(asked, sampler, logprobs=True)
    assert gap(loud, after, asked, temperature) < 1e-3
    assert gap(plain, after, asked, temperature) > 0.1
    assert ({item.version for item in before}, {item.version for item in after}) == ({"plain"}, {"loud"})


def test_engine_prefix_cache_of_old_weights_is_not_used_for_new_ones(
    engine: RolloutEngine, loud: PreTrainedModel, random_model: CheckpointRef, tokenizer: PreTrainedTokenizerFast
) -> None:
    long = tokenizer("3+4=7\n" * 16, add_special_tokens=False)["input_ids"]  # spans cached blocks
    assert len(long) > 64
    asked = [Request(seed, long, seed) for seed in range(3)]
    for version, model in (("plain", load_model(random_model)), ("loud", loud), ("plain again", load_model(random_model))):
        engine.load_live(model, version)
        assert gap(model, engine.generate(asked, SAMPLER, logprobs=True), asked) < 1e-3


def test_engine_same_seed_gives_the_same_tokens_in_any_order_and_another_seed_others(
    engine: RolloutEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    asked = requests(tokenizer)
    first = {item.key: item.token_ids for item in engine.generate(asked, SAMPLER)}
    backwards = {item.key: item.token_ids for item in engine.generate(reversed(asked), SAMPLER)}
    alone = {request.key: engine.generate([request], SAMPLER)[0].token_ids for request in asked}
    other = {item.key: item.token_ids for item in engine.generate(requests(tokenizer, seed=1), SAMPLER)}
    assert first == backwards == alone
    assert all(first[key] != other[key] for key in first)
    assert len({tuple(ids) for ids in first.values()}) == 9


def test_engine_generate_keeps_the_order_of_the_requests_and_their_limits(
    engine: RolloutEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = tokenizer("3+4=", add_special_tokens=False)["input_ids"]
    drawn = engine.generate([Request(limit, ids, 1, max_new_tokens=limit) for limit in (9, 1, 5)], SAMPLER, logprobs=True)
    assert [item.key for item in drawn] == [9, 1, 5]
    for item in drawn:
        assert len(item.token_ids) == len(item.logprobs) <= item.key
        assert all(value <= 0 for value in item.logprobs)
        assert item.finish in ("stop", "length")
        assert (item.finish == "stop") == (item.token_ids[-1] == tokenizer.eos_token_id)


def test_engine_building_it_leaves_the_random_state_alone(built: tuple[RolloutEngine, Any, Any]) -> None:
    _, before, after = built
    assert after == before


def test_engine_prompt_without_room_is_a_rollout_error_and_leaves_nothing_behind(engine: RolloutEngine, small_engine: EngineConfig) -> None:
    limit = small_engine.max_model_tokens
    with pytest.raises(RolloutError, match=f"prompt 'long' has {limit} tokens; the rule is fewer than engine.max_model_tokens = {limit}"):
        engine.generate([Request("short", [5, 6], 0), Request("long", [5] * limit, 0)], SAMPLER)
    assert not unfinished(engine)


def test_engine_completion_is_cut_where_the_context_ends(engine: RolloutEngine, small_engine: EngineConfig) -> None:
    room = 3
    drawn = engine.generate([Request(0, [5] * (small_engine.max_model_tokens - room), 0)], SAMPLER)
    assert len(drawn[0].token_ids) <= room


def test_engine_stream_left_early_leaves_no_request_behind(engine: RolloutEngine, tokenizer: PreTrainedTokenizerFast) -> None:
    asked = [request._replace(max_new_tokens=1 if index == 0 else 100) for index, request in enumerate(requests(tokenizer))]
    stream = engine.stream(asked, SAMPLER)
    assert next(stream).key == asked[0].key
    assert unfinished(engine)
    stream.close()
    assert not unfinished(engine)
    assert [item.key for item in engine.generate(asked[:2], SAMPLER)] == [request.key for request in asked[:2]]


def test_engine_folder_without_a_model_is_a_rollout_error(tmp_path: Path, small_engine: EngineConfig) -> None:
    with pytest.raises(RolloutError, match="vLLM could not load"):
        RolloutEngine(tmp_path, small_engine)


# ---- asking -----------------------------------------------------------------------------------


@pytest.fixture
def asking(
    engine: RolloutEngine, pupil: CheckpointRef, tokenizer: PreTrainedTokenizerFast, new_stage: Callable[[str], Path]
) -> Callable[..., Any]:
    """Ask the model that has learnt to answer 7."""
    engine.load_live(load_model(pupil), "pupil")
    recorder = Recorder(new_stage("evaluation"))

    def asked(questions: list[Question] = QUESTIONS, **settings: Any) -> Any:
        defaults = {
            "attempts": 2,
            "thinking": True,
            "sampler": SamplerConfig(max_new_tokens=60, temperature=0.6),
            "seed": 0,
            "what": "test",
        }
        return ask(engine, tokenizer, questions, recorder=recorder, **(defaults | settings))

    asked.metrics = recorder.path  # type: ignore[attr-defined]
    return asked


def test_ask_answers_come_in_question_order_graded_and_counted(asking: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    answers = asking()
    assert [(answer.question.problem_id, answer.sample) for answer in answers] == [
        (f"p{index}", sample) for index in range(4) for sample in range(2)
    ]
    assert len({answer.seed for answer in answers}) == 8
    assert sum(answer.grade.verdict is Verdict.RIGHT for answer in answers) >= 6
    for answer in answers:
        ids = tokenizer(answer.text, add_special_tokens=False)["input_ids"]
        assert answer.stopped
        assert answer.tokens == len(ids) + 1  # and the stop token
        assert answer.thinking_tokens == ids.index(tokenizer.convert_tokens_to_ids("</think>"))
    assert work_done(asking.metrics)[1] == sum(answer.tokens for answer in answers)
    assert [record["progress"][:2] for record in read_records(asking.metrics) if "progress" in record][-1] == [8, 8]


@pytest.mark.parametrize("flag", [False, True])
def test_ask_non_thinking_mode_gives_no_thinking(asking: Any, flag: bool) -> None:
    answers = asking(thinking=False, flag=flag)
    assert sum(not answer.reply.thinking for answer in answers) >= 7
    assert sum(answer.grade.verdict is Verdict.RIGHT for answer in answers) >= 6


def test_ask_seed_of_an_answer_depends_on_problem_and_sample_not_on_company(asking: Any) -> None:
    whole = {(answer.question.problem_id, answer.sample): answer.text for answer in asking()}
    part = {(answer.question.problem_id, answer.sample): answer.text for answer in asking(QUESTIONS[3:1:-1])}
    assert part.items() <= whole.items()
    assert [answer.text for answer in asking(seed=1)] != list(whole.values())


def test_ask_thinking_budget_bounds_the_thinking_and_an_answer_follows(asking: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    text = "\nEnough.\n</think>\n\n"
    cut = tokenizer(text, add_special_tokens=False)["input_ids"]
    for budget in (1, 3):
        for answer in asking(budget=budget, budget_text=text):
            assert answer.thinking_tokens <= budget + len(cut)
            assert "Enough." in answer.text
            assert answer.reply.thinking is not None
    free = asking()
    ample = asking(budget=40, budget_text=text)
    assert not any("Enough." in answer.text for answer in ample)
    assert max(answer.thinking_tokens for answer in ample) <= 40
    assert sum(answer.grade.verdict is Verdict.RIGHT for answer in ample) >= 6
    assert [answer.reply.thinking for answer in ample] == [
        answer.reply.thinking for answer in free
    ]  # the budget changes nothing it need not


def test_ask_budget_does_not_touch_an_answer_given_without_thinking(asking: Any) -> None:
    answers = asking(thinking=False, budget=40, budget_text="\nEnough.\n</think>\n\n")
    assert sum(answer.grade.verdict is Verdict.RIGHT for answer in answers) >= 6
    assert not any("Enough." in answer.text for answer in answers)


def test_require_graded_share_of_ungraded_answers_past_the_rule_is_a_reward_error(asking: Any) -> None:
    answers = asking([QUESTIONS[0], Question("bad", "1+6", " ")])
    assert [answer.grade.verdict is Verdict.NOT_GRADED for answer in answers] == [False, False, True, True]
    require_graded(answers, 0.5)
    with pytest.raises(RewardError, match=r"2 of 4 answers could not be graded \(first: problem bad, gold answer is empty\)"):
        require_graded(answers, 0.49)


def test_engine_more_seeded_prompts_than_fit_one_step_all_finish(engine: RolloutEngine) -> None:
    """vLLM splits a prompt that does not fit a step's token budget and rewinds its generator, which on CPU ends the engine."""
    asked = [Request(number, [5 + number % 40] * 150, number) for number in range(64)]  # 9,600 tokens; a step takes 4,096
    drawn = engine.generate(asked, SamplerConfig(max_new_tokens=2))
    assert [completion.key for completion in drawn] == list(range(64))
    assert all(completion.token_ids for completion in drawn)
