"""Rewards of the reinforcement stages as pure functions: a reply in, a number out."""

from __future__ import annotations

import re

from stages.chat import Reply
from stages.rewards.grading import boxed_answers

MIN_THINKING_WORDS = 1


def format_reward(reply: Reply, *, thinking: bool, stopped: bool) -> float:
    """1 for a finished reply in the mode that was asked for with exactly one boxed answer, else 0.

    In thinking mode the content between the tags counts, not the tags (R1, arXiv 2501.12948, section
    2.2.2; bare tags are the oldest hack). In non-thinking mode the block must be empty or absent.
    """
    boxes = boxed_answers(reply.response)
    filled = reply.thinking is not None and len(reply.thinking.split()) >= MIN_THINKING_WORDS
    return float(stopped and boxes is not None and len(boxes) == 1 and filled == thinking)


def preference_score(response: str) -> float:
    """The synthetic annotator of the embedded default: how pleasant a final response reads, 0 to 3.

    A stand-in for people, stated openly: one point for a whole sentence around the answer, one for
    a friendly close, one for a response without noise (no think tags, one line, at most 20 words).
    It looks at the response only, never at whether the answer is right.
    """
    text = response.strip()
    sentence = bool(re.match(r"The answer is .+\.", text))
    friendly = "I hope this helps!" in text and text.count("I hope this helps!") == 1
    clean = 0 < len(text.split()) <= 20 and "\n" not in text and "think>" not in text
    return float(sentence) + float(friendly) + float(clean)
