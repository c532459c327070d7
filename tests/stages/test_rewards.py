"""Rewards: full marks for what was asked, nothing for its known imitations; golden numbers; what was not graded is masked."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyarrow import parquet
from pydantic import ValidationError

from stages.chat import parse_reply
from stages.config import EngineConfig, ReasoningRL
from stages.errors import RewardError
from stages.problems import RESPONSE_STYLES
from stages.reasoning_rl import run
from stages.records import read_records
from stages.reinforcement import require_gradable, train_policy, trainer_columns
from stages.rewards.grading import Grade, Verdict
from stages.rewards.rewards import (
    format_reward,
    language_consistency,
    length_rewards,
    missing_stop_penalty,
    overlong_punishment,
    preference_score,
    repetition_penalty,
)
from stages.rewards.scoring import Prompt, Rollout, Scores, score_by_rules, weights_of
from stages.tables import read_rows

if TYPE_CHECKING:
    from stages.artifacts import CheckpointRef

WORKED = "<think>\n3+4=7\n</think>\n\n\\boxed{7}"
DIRECT = "<think>\n\n</think>\n\n\\boxed{7}"
SETTINGS: dict[str, Any] = {"steps": 1, "learning_rate": 1e-3}
PROMPT = Prompt("text", "id", "3+4", "7", True)
RIGHT, WRONG, NOT_GRADED = (Grade(verdict, "because") for verdict in (Verdict.RIGHT, Verdict.WRONG, Verdict.NOT_GRADED))


def rollout(completion: str, prompt: Prompt = PROMPT, *, tokens: int = 9, stopped: bool = True, step: int = 0) -> Rollout:
    return Rollout(prompt, parse_reply(completion), tokens, stopped, completion, step)


@pytest.mark.parametrize(
    ("completion", "thinking", "stopped", "reward"),
    [
        (WORKED, True, True, 1.0),
        (WORKED, False, True, 0.0),  # the other mode
        (WORKED, True, False, 0.0),  # ran into the length limit
        (DIRECT, False, True, 1.0),
        (DIRECT, True, True, 0.0),  # bare tags
        ("<think> \n\n \t</think>\\boxed{7}", True, True, 0.0),  # tags around space
        ("<think>\n. . . ---\n</think>\\boxed{7}", True, True, 0.0),  # tags around dots
        ("<think>\n. . . ---\n</think>\\boxed{7}", False, True, 0.0),  # which is not an empty block either
        ("<think><think></think>\\boxed{7}", True, True, 0.0),  # tags around a tag
        ("<think><answer></answer></think>\\boxed{7}", True, True, 0.0),
        ("<think>\n好\n</think>\\boxed{7}", True, True, 1.0),
        ("\\boxed{7}", False, True, 1.0),
        ("\\boxed{7}", True, True, 0.0),
        ("</think>\\boxed{7}", True, True, 0.0),
        ("<think>\n3+4=7 \\boxed{7}", True, True, 0.0),  # never closed
        ("<think>\n3+4=7\n</think>\n\n7", True, True, 0.0),  # no box
        ("<think>\n\\boxed{7}\n</think>\n\n7", True, True, 0.0),  # box in the thinking only
        (WORKED + "\\boxed{7}", True, True, 0.0),  # two boxes
        (WORKED + "\\boxed{7", True, True, 0.0),  # a box that is not closed
        ("", True, True, 0.0),
        ("", False, True, 0.0),
    ],
)
def test_format_reward_pays_only_the_finished_reply_in_the_mode_asked_for(
    completion: str, thinking: bool, stopped: bool, reward: float
) -> None:
    assert format_reward(parse_reply(completion), thinking=thinking, stopped=stopped) == reward


def test_format_reward_does_not_pay_an_unclosed_think_block_in_non_thinking_mode() -> None:
    assert format_reward(parse_reply("<think>\nlong thoughts \\boxed{7}"), thinking=False, stopped=True) == 0.0


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ('<think>\nx is 1\n</think>\n\n{"x": 1}', 1.0),
        ("<think>\nx is 1\n</think>\n\n", 0.0),
        ('<think></think>{"x": 1}', 0.0),
    ],
)
def test_format_reward_of_an_answer_that_is_the_response_needs_no_box(completion: str, reward: float) -> None:
    assert format_reward(parse_reply(completion), thinking=True, stopped=True, boxed=False) == reward


# ---- golden numbers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "text", "share"),
    [
        ("What is the sum?", "first of all we add the two numbers then 我 们 看", 9 / 12),  # the golden number: 9 of 12 words
        ("What is the sum?", "Let me compute 3+4=7, so the answer is \\boxed{7}.", 1.0),
        ("求和是多少？", "我们 need 计算 sum", 4 / 6),  # a Han character is a word
        ("求和是多少？", "先算三加四，得七。", 1.0),
        ("求和是多少？", "let me think about it", 0.0),
        ("合計はいくつですか", "まず計算する", 1.0),  # Japanese writes in three scripts
        ("What is the sum?", "α + β = γ, so x = \\frac{y}{2} and `код` is $формула$ of it", 1.0),  # formulas and code are no words
        ("Сколько будет?", "сначала сложим both числа", 3 / 4),
        ("求最大值。", "我们 need to 计算 x 的 value", 5 / 8),  # single Latin letters are variables
        ("求最大值。", "设 x² + y₁ = 10²，①所以 \\(AB + CD\\) 与 \\[EF\\] 最大", 1.0),  # raised digits are no letters; \\( \\) is a formula
        ("求最大值。", "点Ａ在线ＡＢ上", 4 / 5),  # full-width Latin is Latin
        ("求最大值。", "时时刻刻、人々 think", 6 / 7),
        ("What is the sum?", "First, 10² = 100, so half (½) of it is 50 \\(und 我们\\)", 1.0),
        ("What is the sum?", "\\(AB\\) 我们 add them \\(CD", 3 / 5),  # a formula that is not closed is text
        ("合計はいくつですか", "コンピューターで計算する", 1.0),  # the mark of a long vowel is kana
        ("합은 얼마입니까?", "먼저 더한다 then 곱한다", 3 / 4),
        ("What is the sum?", "", 0.0),
        ("What is the sum?", "<think><answer></answer>", 0.0),
        ("What is the sum?", "3+4=7", 0.0),  # no words, so nothing to pay for
        ("3+4", "adding them", 0.0),  # a question without a language
    ],
)
def test_language_consistency_of_a_chain_of_thought_is_the_share_of_its_words(question: str, text: str, share: float) -> None:
    assert language_consistency(text, question) == pytest.approx(share)


@pytest.mark.parametrize(
    ("tokens", "right", "expected"),
    [
        ([100, 200, 300, 400], [1, 0, 1, 0], [0.5, 0, -0.166667, -0.5]),
        ([100, 200, 300, 400], [0, 1, 0, 1], [0, 0.166667, -0.166667, -0.5]),
        ([120, 480, 300, 840], [1, 1, 0, 0], [0.5, 0, 0, -0.5]),
        ([256] * 4, [1, 0, 1, 0], [0, 0, 0, 0]),
        ([100, 100, 100, 900], [0, 0, 0, 1], [0, 0, 0, -0.5]),
        ([7], [1], [0]),
    ],
)
def test_length_rewards_of_worked_groups_are_the_worked_numbers(tokens: list[int], right: list[int], expected: list[float]) -> None:
    assert length_rewards(tokens, [bool(value) for value in right]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("limit", "cache", "tokens", "expected"),
    [
        (20480, 4096, 1, 0.0),
        (20480, 4096, 16384, 0.0),
        (20480, 4096, 16385, -0.000244),
        (20480, 4096, 17408, -0.25),
        (20480, 4096, 18432, -0.5),
        (20480, 4096, 20480, -1.0),
        (20480, 4096, 20481, -1.0),
        (100, 20, 80, 0.0),
        (100, 20, 81, -0.05),
        (100, 20, 90, -0.5),
    ],
)
def test_overlong_punishment_of_a_length_is_that_of_dapo_equation_13(limit: int, cache: int, tokens: int, expected: float) -> None:
    assert overlong_punishment(tokens, limit, cache) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("a b c a b c", 3, -0.25),  # abc bca cab abc: three of four are new
        ("a b c d e f", 3, 0.0),
        ("no " * 10, 2, -8 / 9),
        ("no No nO NO no", 2, -3 / 4),  # capitals make no other words
        ("想想想想想", 2, -3 / 4),  # no spaces needed
        ("too short", 3, 0.0),
        ("", 2, 0.0),
    ],
)
def test_repetition_penalty_of_a_text_is_minus_its_share_of_repeated_runs(text: str, words: int, expected: float) -> None:
    assert repetition_penalty(text, words) == pytest.approx(expected)


@pytest.mark.parametrize("unit", ["\\(", "\\[", "`", "```", "$", "<", "</", "我", "a ", "\\", "²"])
def test_text_rewards_of_a_hostile_text_are_quick(unit: str) -> None:
    start = time.process_time()
    language_consistency(unit * 50_000, unit * 50_000)
    repetition_penalty(unit * 50_000, 20)
    assert time.process_time() - start < 2


def test_missing_stop_penalty_falls_on_replies_cut_at_the_limit_only() -> None:
    assert (missing_stop_penalty(stopped=True), missing_stop_penalty(stopped=False)) == (0.0, -1.0)


@pytest.mark.parametrize(
    ("response", "score_of_it"),
    [
        ("\\boxed{7}", 1.0),
        ("Answer: \\boxed{7}", 1.0),
        ("The answer is \\boxed{7}.", 2.0),
        ("The answer is \\boxed{7}. I hope this helps!", 3.0),
        ("  The answer is \\boxed{7}. I hope this helps!\n", 3.0),
        ("I hope this helps!", 2.0),
        ("The answer is \\boxed{7}. " + "I hope this helps! " * 2, 2.0),  # flattery pays once or not at all
        ("The answer is \\boxed{7}. I hope this helps! " + "really " * 20, 2.0),  # too long
        ("The answer is \\boxed{7}.\nI hope this helps!", 2.0),  # two lines
        ("</think>The answer is 7.", 0.0),
        ("", 0.0),
    ],
)
def test_preference_score_of_a_response_is_the_sum_of_its_three_points(response: str, score_of_it: float) -> None:
    assert preference_score(response) == score_of_it


def test_preference_score_orders_the_response_styles_and_ignores_whether_they_are_right() -> None:
    for answer in ("7", "8"):
        assert [preference_score(style.format(answer=answer)) for style in RESPONSE_STYLES] == [1.0, 1.0, 2.0, 3.0]


# ---- parts and their sum --------------------------------------------------------------------


def test_scores_by_default_are_accuracy_and_format_of_gold_empty_misplaced_and_exploit() -> None:
    completions = {
        WORKED: (1.0, 1.0),
        "<think>\n3+4=8\n</think>\n\n\\boxed{8}": (0.0, 1.0),
        "": (0.0, 0.0),
        "<think>\n\\boxed{7}\n</think>\n\nseven": (0.0, 0.0),
        "<think>\nhm\n</think>\n\n" + "".join(f"\\boxed{{{number}}}" for number in range(10)): (0.0, 0.0),
        "<think>\nhm \\boxed{7}": (0.0, 0.0),  # thinking that never ends
    }
    config = ReasoningRL.model_validate(SETTINGS)
    scores = score_by_rules([rollout(completion) for completion in completions], config)
    assert list(scores.parts) == ["accuracy", "format"]
    assert list(zip(scores.parts["accuracy"], scores.parts["format"], strict=True)) == list(completions.values())
    weights = weights_of(config, accuracy=config.accuracy_weight, format=config.format_weight)
    assert weights == {"accuracy": 1.0, "format": 0.2}
    assert scores.totals(weights) == [1.2, 0.2, 0.0, 0.0, 0.0, 0.0]


def test_scores_with_every_part_on_log_each_and_add_them_with_their_weights() -> None:
    parts = {"language": 1.0, "length": 0.5, "overlong": 2.0, "repetition": 0.0, "missing_stop": 4.0}
    extra = {"length_from_step": 3, "overlong_cache_tokens": 20, "repetition_words": 2}
    config = ReasoningRL.model_validate(SETTINGS | {"max_new_tokens": 100, "rewards": parts | extra})
    prompts = [PROMPT._replace(question="Add them, please."), PROMPT._replace(problem_id="other")]
    seen = [
        rollout("<think>\nadd them up 加\n</think>\n\n\\boxed{7}", prompts[0], tokens=10, step=3),
        rollout("<think>\nadd add add add", prompts[0], tokens=90, stopped=False, step=3),
        rollout(WORKED, prompts[1], tokens=50, step=3),
    ]
    weights = weights_of(config, accuracy=1.0, format=0.2)
    scores = score_by_rules(seen, config)
    assert scores.parts == {
        "accuracy": [1.0, 0.0, 1.0],
        "format": [1.0, 0.0, 1.0],
        "language": [pytest.approx(3 / 4), 0.0, 0.0],
        "length": [0.5, -0.5, 0.0],  # alone in its group, the third has nobody to be shorter than
        "overlong": [0.0, -0.5, 0.0],
        "repetition": [0.0, pytest.approx(-2 / 4), 0.0],  # also of a thinking that was cut off, runs of two: "<think> add", then "add add"
        "missing_stop": [0.0, -1.0, 0.0],
    }
    assert scores.totals(weights) == pytest.approx([1.2 + 0.75 + 0.25, -0.25 - 1.0 - 4.0, 1.2])
    early = score_by_rules([item._replace(step=2) for item in seen], config)
    assert early.parts["length"] == [0.0, 0.0, 0.0]  # Kimi: first without, then constant
    assert {name: values for name, values in early.parts.items() if name != "length"} == {
        name: values for name, values in scores.parts.items() if name != "length"
    }


def test_length_reward_leaves_what_was_not_graded_out_of_its_group() -> None:
    config = ReasoningRL.model_validate(SETTINGS | {"rewards": {"length": 1.0}})
    seen = [rollout(WORKED, tokens=tokens) for tokens in (100, 200, 300, 900)]
    scores = score_by_rules(seen, config, lambda *_: [RIGHT, RIGHT, WRONG, NOT_GRADED])
    assert scores.parts["length"] == [0.5, 0.0, -0.5, 0.0]


def test_overlong_part_with_a_cache_longer_than_the_limit_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValidationError, match=r"overlong_cache_tokens = 50; the rule is at most max_new_tokens = 40"):
        ReasoningRL.model_validate(SETTINGS | {"max_new_tokens": 40, "rewards": {"overlong": 1.0, "overlong_cache_tokens": 50}})


@pytest.mark.parametrize(
    ("question", "gold", "answer", "right"),
    [
        ("Reduce \\frac{6}{8}.", "\\frac{6}{8}", "\\frac{6}{8}", True),  # the gold answer itself
        ("What is 3+4?", "7", "7", True),
        ("Which is larger, 3/4 or 2/3?", "3/4", "3/4", True),
    ],
)
def test_expression_of_the_question_is_right_only_as_the_gold_answer(question: str, gold: str, answer: str, right: bool) -> None:
    prompt = Prompt("", "id", question, gold, True)
    (grade,) = score_by_rules([rollout(f"<think>\nx\n</think>\\boxed{{{answer}}}", prompt)], ReasoningRL.model_validate(SETTINGS)).grades
    assert (grade.verdict is Verdict.RIGHT) == right


# ---- not graded -----------------------------------------------------------------------------


def test_require_gradable_gold_that_cannot_be_graded_is_a_reward_error() -> None:
    require_gradable([Prompt("text", "good", "3+4", "7", True)])
    for gold in ("", " ", "{", "1} \\boxed{1"):
        with pytest.raises(RewardError, match=r"problem bad: its own gold answer .* is not graded right"):
            require_gradable([Prompt("text", "good", "3+4", "7", True), Prompt("text", "bad", "3+4", gold, True)])


def test_require_gradable_typed_golds_are_graded_by_their_own_graders() -> None:
    choices = '{"choices": ["red", "blue"]}'
    require_gradable([Prompt("", "a", "", "B", True, answer_type="multiple_choice", grading=choices)])
    require_gradable([Prompt("", "b", "", '{"type": "object"}', True, answer_type="json_schema")])
    with pytest.raises(RewardError, match=r"problem c: its own gold answer 'C' is not graded right \(gold answer 'C' is no choice"):
        require_gradable([Prompt("", "c", "", "C", True, answer_type="multiple_choice", grading=choices)])
    with pytest.raises(RewardError, match=r"problem d: .* cannot be used \(the schema accepts anything\)"):
        require_gradable([Prompt("", "d", "", "{}", True, answer_type="json_schema")])


def test_require_gradable_grader_that_pays_an_empty_answer_is_a_reward_error() -> None:
    with pytest.raises(RewardError, match="problem id: an empty answer is graded right"):
        require_gradable([PROMPT], lambda replies, _: [RIGHT] * len(replies))


def test_trainer_columns_with_everything_graded_hold_the_parts_and_no_mask() -> None:
    scores = Scores({"accuracy": [1.0, 0.0], "format": [1.0, 1.0]}, [RIGHT, WRONG])
    assert trainer_columns(scores, [[5], [6, 7]]) == scores.parts


def test_trainer_columns_of_a_rollout_not_graded_miss_every_part_and_mask_its_tokens() -> None:
    scores = Scores({"accuracy": [1.0, 0.0], "format": [1.0, 1.0]}, [RIGHT, NOT_GRADED])
    assert trainer_columns(scores, [[5], [6, 7]]) == {"accuracy": [1.0, None], "format": [1.0, None], "env_mask": [[1], [0, 0]]}
    assert scores.totals({"accuracy": 1.0, "format": 0.2}) == [1.2, None]


class TrainingWouldBeginError(Exception):
    """Raised in place of training: the trainer is built, and now the test's."""


@pytest.fixture(scope="module")
def build_trainer(random_model: CheckpointRef, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Build the trainer that the policy stages build, for groups of four rollouts; the engine is never asked."""
    import trl
    import vllm

    built: dict[str, Any] = {}

    def build(advantage: str) -> Any:
        if advantage not in built:

            class Kept(trl.GRPOTrainer):  # type: ignore[misc]
                def train(self, **_: Any) -> None:
                    built[advantage] = self
                    raise TrainingWouldBeginError

            config = ReasoningRL.model_validate(
                SETTINGS | {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 8, "advantage": advantage, "kl_weight": 0.1}
            )
            prompts = [Prompt(f"question {index}", str(index), "", "7", True) for index in range(2)]
            stage_dir: Path = tmp_path_factory.mktemp("reasoning_rl")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(trl, "GRPOTrainer", Kept)
                patch.setattr(vllm, "LLM", lambda **_: None)
                with pytest.raises(TrainingWouldBeginError):
                    train_policy(
                        random_model, prompts, lambda _: Scores({}, []), {"accuracy": 1.0, "format": 0.5}, config, stage_dir, 0,
                        name="reasoning_rl.model", card="",
                    )  # fmt: skip
        trainer = built[advantage]
        trainer.model.train()
        return trainer

    return build


def prepared(trainer: Any, accuracy: list[float | None], format_ok: list[float]) -> dict[str, Any]:
    """What the trainer makes of two groups of four, in which None was not graded. Completions have one to eight tokens."""
    grades = [NOT_GRADED if value is None else RIGHT if value else WRONG for value in accuracy]
    scores = Scores({"accuracy": [value or 0.0 for value in accuracy], "format": format_ok}, grades)
    ids = [[7] * (length + 1) for length in range(8)]
    trainer.rollout_func = lambda texts, _: {
        "prompt_ids": [[5, 6]] * 8,
        "completion_ids": ids,
        "logprobs": [[-1.0] * len(tokens) for tokens in ids],
        **trainer_columns(scores, ids),
    }
    made: dict[str, Any] = trainer._generate_and_score_completions([{"prompt": f"question {index // 4}"} for index in range(8)])
    return made


FORMAT = [1.0, 1.0, 0.0, 0.0] * 2


@pytest.mark.parametrize(
    ("advantage", "accuracy", "expected"),
    [
        # rewards of the first group 1.5, -, 0, 0: mean 0.5 and standard deviation sqrt(0.75) of the three that were graded
        ("group", [1, None, 0, 0, 1, 0, 1, 0], [1.154567, 0, -0.577284, -0.577284, 1.161715, -0.387238, 0.387238, -1.161715]),
        ("none", [1, None, 0, 0, 1, 0, 1, 0], [1.0, 0, -0.5, -0.5, 0.75, -0.25, 0.25, -0.75]),
        # of the first group one is graded: no baseline, no advantage; of the second none
        ("group", [1, None, None, None, None, None, None, None], [0.0] * 8),
        ("none", [1, None, None, None, None, None, None, None], [0.0] * 8),
    ],
)
def test_advantages_of_groups_with_rollouts_not_graded_are_those_of_the_rest(
    build_trainer: Callable[[str], Any], advantage: str, accuracy: list[float | None], expected: list[float]
) -> None:
    made = prepared(build_trainer(advantage), accuracy, FORMAT)
    assert made["advantages"].tolist() == pytest.approx(expected, abs=1e-6)


def test_advantages_with_nothing_masked_are_as_before(build_trainer: Callable[[str], Any]) -> None:
    made = prepared(build_trainer("none"), [1, 0, 0, 0, 1, 0, 1, 0], FORMAT)
    assert "tool_mask" not in made
    assert made["advantages"].tolist() == pytest.approx([1.0, 0.0, -0.5, -0.5, 0.75, -0.25, 0.25, -0.75], abs=1e-6)


def test_tokens_of_a_rollout_not_graded_enter_neither_loss_nor_kl(build_trainer: Callable[[str], Any]) -> None:
    import torch

    trainer = build_trainer("none")
    made = prepared(trainer, [1, None, 0, 0, 1, 0, 1, 0], FORMAT)
    assert made["num_items_in_batch"].item() == sum(range(1, 9)) - 2  # all tokens but those of the second completion
    trainer.current_gradient_accumulation_steps = 1
    new = torch.full((8, 8), -1.0, requires_grad=True)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (new, torch.zeros(8, 8), None)
    made |= {"old_per_token_logps": torch.full((8, 8), -1.0), "ref_per_token_logps": torch.full((8, 8), -1.5)}
    loss = trainer._compute_loss(trainer.model, made)
    loss.backward()
    touched = new.grad.abs().sum(dim=1) > 0
    assert touched.tolist() == [True, False, True, True, True, True, True, True]
    assert math.isfinite(loss.item())


# ---- a stage with a grader that fails -------------------------------------------------------


class AsleepJudge(BaseHTTPRequestHandler):
    """A judge that says the same of 7 and seven, and to everything else nothing."""

    def do_POST(self) -> None:
        instruction = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        nonce = re.findall(r'"nonce": "(\w+)"', instruction)[0]
        verdict = json.dumps({"nonce": nonce, "analysis": "", "same": True})
        body = json.dumps({"choices": [{"message": {"content": verdict}}]}).encode()
        self.send_response(200 if '"seven"' in instruction else 500)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def with_dead_judge(small_engine: EngineConfig) -> Iterator[dict[str, Any]]:
    """Settings of two steps in which only a bare right box is graded: for the rest a judge is asked that answers no more."""
    with ThreadingHTTPServer(("127.0.0.1", 0), AsleepJudge) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield _settings_of_two_steps(small_engine, f"http://127.0.0.1:{server.server_address[1]}/v1")
        server.shutdown()
        thread.join()


def _settings_of_two_steps(small_engine: EngineConfig, address: str) -> dict[str, Any]:
    return {
        "steps": 2,
        "prompts_per_step": 2,
        "group_size": 4,
        "learning_rate": 1e-3,
        "warmup_steps": 0,
        "temperature": 1.5,
        "max_new_tokens": 40,
        "engine": small_engine.model_dump(),
        "judge": {"address": address, "model": "m", "decides": "all", "tries": 1},
        "audit": {"blocks": False},
    }


ROWS = [{"problem_id": f"p{index}", "question": f"{index}+{7 - index}", "answer": "7"} for index in range(4)]


@pytest.mark.slow
def test_reasoning_rl_with_rollouts_not_graded_keeps_them_without_reward_and_trains_on_the_rest(
    pupil: CheckpointRef, new_stage: Callable[[str], Path], problems: Any, with_dead_judge: dict[str, Any]
) -> None:
    config = ReasoningRL.model_validate(with_dead_judge | {"max_not_graded_share": 1.0})
    stage_dir = new_stage("reasoning_rl")
    output = run(config, {"model": pupil, "problems": problems(ROWS)}, stage_dir, 0)
    rows = read_rows(output.outputs["rollouts"])
    missing = [row for row in rows if row["verdict"] == "not_graded"]
    assert 0 < len(missing) < len(rows)
    unreached = "the judge gave no verdict: the address answered with status 500"
    given_up = "the judge gave no verdict: 8 requests in a row got no reply, so the rest was not asked"
    assert unreached in {row["reason"] for row in missing} <= {unreached, given_up}
    for row in rows:
        graded = row["verdict"] != "not_graded"
        assert (row["reward"] is not None) == (row["reward_accuracy"] is not None) == graded
        assert row["reward_format"] is not None
    told = [record for record in read_records(stage_dir / "metrics.jsonl") if "rollout/tokens_mean" in record.get("metrics", {})]
    metrics = {record["step"]: record["metrics"] for record in told}
    for step in (0, 1):
        part = [row for row in rows if row["step"] == step]
        kept = [row["reward"] for row in part if row["reward"] is not None]
        assert metrics[step + 1]["rollout/not_graded_share"] == pytest.approx(1 - len(kept) / 8)
        assert metrics[step + 1].get("rollout/reward", 0.0) == pytest.approx(sum(kept) / max(1, len(kept)))
    assert output.outputs["model"].digest != pupil.digest


@pytest.mark.slow
def test_reasoning_rl_past_its_share_of_rollouts_not_graded_stops_and_keeps_their_reasons(
    pupil: CheckpointRef, new_stage: Callable[[str], Path], problems: Any, with_dead_judge: dict[str, Any]
) -> None:
    stage_dir = new_stage("reasoning_rl")
    with pytest.raises(RewardError, match=r"step 1: \d of 8 rollouts could not be graded .*the judge gave no verdict.* at most 5%"):
        run(ReasoningRL.model_validate(with_dead_judge), {"model": pupil, "problems": problems(ROWS)}, stage_dir, 0)
    kept = parquet.read_table(stage_dir / "data" / "rollouts" / "step_000000.parquet").to_pylist()
    assert "not_graded" in {row["verdict"] for row in kept}


@pytest.mark.slow
def test_reasoning_rl_with_a_judge_that_answers_no_more_is_refused_by_the_audit(
    pupil: CheckpointRef, new_stage: Callable[[str], Path], problems: Any, with_dead_judge: dict[str, Any]
) -> None:
    with pytest.raises(RewardError, match=r"reasoning_rl: the audit of its rewards failed.*\n"):
        run(
            ReasoningRL.model_validate(with_dead_judge | {"audit": {}}),
            {"model": pupil, "problems": problems(ROWS)},
            new_stage("reasoning_rl"),
            0,
        )
