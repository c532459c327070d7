"""Rewards of the reinforcement stages as pure functions: text, counts and verdicts in, numbers out.

Penalties are 0 or negative, so that every weight is positive. Which parts a stage adds up, and with which weights,
its settings say (`stages/rewards/scoring.py`).
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

from stages.chat import Reply
from stages.rewards.grading import boxed_answers

_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_TOKEN = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W\d_{_UNSPACED}]+")
_FORMULA = re.compile(
    r"```.*?```|`[^`\n]*`|\$[^$]*\$|\\\((?:(?!\\[()]).)*\\\)|\\\[(?:(?!\\[\[\]]).)*\\\]|\\[A-Za-z]+",
    re.DOTALL,
)
_TAG = re.compile(r"</?\w*>")
_KANA = frozenset({"HIRAGANA", "KATAKANA"})
_JAPANESE = _KANA | {"CJK"}
_SIGNS = frozenset({"GREEK", "MATHEMATICAL", "DOUBLE", "SCRIPT", "MODIFIER", ""})


def format_reward(reply: Reply, *, thinking: bool, stopped: bool, boxed: bool = True) -> float:
    """1 for a finished reply in the mode that was asked for with exactly one boxed answer, else 0; without `boxed`, with any response.

    In thinking mode the content between the tags counts, not the tags (R1, arXiv 2501.12948, section
    2.2.2; bare tags are the oldest hack): a letter or a digit at least, outside of tags. In non-thinking mode the block must be
    empty or absent.
    """
    boxes = boxed_answers(reply.response)
    answered = boxes is not None and len(boxes) == 1 if boxed else bool(reply.response.strip())
    thought = (reply.thinking or "").strip()
    in_mode = any(map(str.isalnum, _TAG.sub(" ", thought))) if thinking else not thought
    return float(stopped and answered and in_mode)


def language_consistency(text: str, question: str) -> float:
    """R1's share of target-language words in a chain of thought (arXiv 2501.12948, 2.3.2), from 0 to 1.

    The target is the script that most words of the question are in; a Han character is a word, since Chinese puts no
    spaces, and a question with kana is Japanese, which writes in three scripts. Formulas, code, tags, numbers and
    single Latin letters are no words. Two languages of one script (English, French) are not told apart. A text without
    words earns 0, and so does every text when the question has none.
    """
    found, wanted = words_by_script(text), words_by_script(question)
    if not found or not wanted:
        return 0.0
    target = _JAPANESE if _KANA & wanted.keys() else {wanted.most_common(1)[0][0]}
    return sum(count for script, count in found.items() if script in target) / found.total()


def words_by_script(text: str) -> Counter[str]:
    """How many words of a text are in each script, by the script's name in Unicode (`LATIN`, `CJK`, `CYRILLIC`)."""
    found = Counter(_script(word) for word in _WORD.findall(_FORMULA.sub(" ", _TAG.sub(" ", text))))
    del found[""]
    return found


@functools.lru_cache(maxsize=65536)
def _script(word: str) -> str:
    """The script of a word's first letter; none for the letters of formulas: Greek, styled ones, single Latin ones, raised digits."""
    letters = "".join(filter(str.isalpha, word))
    if not letters:
        return ""
    script = re.split("[ -]", unicodedata.name(letters[0], ""))[0]
    if script in ("FULLWIDTH", "HALFWIDTH"):
        script = unicodedata.name(unicodedata.normalize("NFKC", letters[0]), "").split(" ")[0]
    if script == "IDEOGRAPHIC":  # the mark that repeats a Han character
        return "CJK"
    return "" if script in _SIGNS or (script == "LATIN" and len(letters) == 1) else script


def length_rewards(tokens: Sequence[int], right: Sequence[bool]) -> list[float]:
    """Kimi k1.5's length reward (arXiv 2501.12599, 2.3.3) of the responses to one problem.

    lambda = 0.5 - (length - shortest) / (longest - shortest); a right response gets lambda, a wrong one at most 0;
    all get 0 when they are of one length.
    """
    shortest, longest = min(tokens), max(tokens)
    if shortest == longest:
        return [0.0] * len(tokens)
    shares = [0.5 - (length - shortest) / (longest - shortest) for length in tokens]
    return [share if is_right else min(0.0, share) for share, is_right in zip(shares, right, strict=True)]


def overlong_punishment(tokens: int, max_tokens: int, cache_tokens: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): 0, then linear to -1 over the last `cache_tokens`."""
    soft = max_tokens - cache_tokens
    if tokens <= soft:
        return 0.0
    return max(-1.0, (soft - tokens) / cache_tokens)


def repetition_penalty(text: str, words: int) -> float:
    """Minus the share of runs of `words` words that occurred before: 0 without repetition, towards -1 for one phrase over and over.

    As open-r1's (n = 3 there, capitals make no other words); a Han character is a word.
    """
    tokens = _TOKEN.findall(text.casefold())
    runs = [tuple(tokens[start : start + words]) for start in range(len(tokens) - words + 1)]
    return len(set(runs)) / len(runs) - 1.0 if runs else 0.0


def missing_stop_penalty(*, stopped: bool) -> float:
    """-1 for a reply that ran into the length limit, else 0 (Tulu 3, arXiv 2411.15124, has -10 for it)."""
    return 0.0 if stopped else -1.0


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
