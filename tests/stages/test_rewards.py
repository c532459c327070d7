"""Rewards: full marks for what was asked, nothing for its known imitations."""

from __future__ import annotations

import pytest

from stages.chat import parse_reply
from stages.errors import RewardError
from stages.problems import RESPONSE_STYLES
from stages.reasoning_rl import score
from stages.reinforcement import Prompt, Rollout, require_gradable
from stages.rewards.rewards import format_reward, preference_score

WORKED = "<think>\n3+4=7\n</think>\n\n\\boxed{7}"
DIRECT = "<think>\n\n</think>\n\n\\boxed{7}"


@pytest.mark.parametrize(
    ("completion", "thinking", "stopped", "reward"),
    [
        (WORKED, True, True, 1.0),
        (WORKED, False, True, 0.0),  # the other mode
        (WORKED, True, False, 0.0),  # ran into the length limit
        (DIRECT, False, True, 1.0),
        (DIRECT, True, True, 0.0),  # bare tags
        ("<think> \n\n \t</think>\\boxed{7}", True, True, 0.0),  # tags around space
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


def test_reasoning_rl_score_gold_empty_misplaced_and_exploit() -> None:
    prompt = Prompt("text", "id", "3+4", "7", True)
    completions = {
        WORKED: (1.0, 1.0),
        "<think>\n3+4=8\n</think>\n\n\\boxed{8}": (0.0, 1.0),
        "": (0.0, 0.0),
        "<think>\n\\boxed{7}\n</think>\n\nseven": (0.0, 0.0),
        "<think>\nhm\n</think>\n\n" + "".join(f"\\boxed{{{number}}}" for number in range(10)): (0.0, 0.0),
        "<think>\nhm \\boxed{7}": (0.0, 0.0),  # thinking that never ends
    }
    parts = score([Rollout(prompt, parse_reply(completion), 9, True) for completion in completions])
    assert list(zip(parts["accuracy"], parts["format"], strict=True)) == list(completions.values())


def test_require_gradable_gold_that_cannot_be_graded_is_a_reward_error() -> None:
    require_gradable([Prompt("text", "good", "3+4", "7", True)])
    for gold in ("", " ", "{", "1} \\boxed{1"):
        with pytest.raises(RewardError, match=r"problem bad: its own gold answer .* is not graded right"):
            require_gradable([Prompt("text", "good", "3+4", "7", True), Prompt("text", "bad", "3+4", gold, True)])
