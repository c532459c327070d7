"""Chat format: markers, template, thinking modes, and what a reply is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol

CHAT_MARKERS = ("<|im_start|>", "<|im_end|>")
STOP_TOKEN = "<|im_end|>"
THINK_TOKENS = ("<think>", "</think>")
PAD_TOKEN = "<|endoftext|>"
RESERVED = (PAD_TOKEN, *CHAT_MARKERS, *THINK_TOKENS)
"""What no text of a problem or a trace may hold: a tokenizer would take it for structure."""
TEMPLATE = (Path(__file__).parent / "template.jinja").read_text()


class Tokenizer(Protocol):
    """What is asked of a tokenizer here; those of transformers do it."""

    def apply_chat_template(self, conversation: list[dict[str, str]], /, **settings: Any) -> Any:
        """The conversation in the template's form."""


class Reply(NamedTuple):
    """A completion taken apart. `thinking` is None when the block is missing or not closed."""

    thinking: str | None
    response: str


def render_prompt(tokenizer: Tokenizer, question: str, *, thinking: bool, flag: bool = False) -> str:
    """The text a model continues.

    `flag` adds Qwen3's soft switch (`/think`, `/no_think`) to the user's message and leaves the
    opening of the reply to the model; without it, non-thinking mode opens the reply with the
    empty block (Qwen3, arXiv 2505.09388, section 4.3 and Table 9).
    """
    if flag:
        question = f"{question} {'/think' if thinking else '/no_think'}"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=thinking or flag,
    )
    assert isinstance(text, str)
    return text


def render_completion(response: str, *, thinking: str | None) -> str:
    """What follows `render_prompt` in training text; `thinking=None` when the prompt holds the empty block."""
    block = "" if thinking is None else f"<think>\n{thinking}\n</think>\n\n"
    return f"{block}{response}{STOP_TOKEN}"


def parse_reply(completion: str) -> Reply:
    """Take a completion apart at its think tags; the stop token and what follows it are dropped."""
    text = completion.split(STOP_TOKEN)[0]
    if text.startswith("<think>") and "</think>" in text:
        thinking, response = text.removeprefix("<think>").split("</think>", 1)
        return Reply(thinking.strip("\n"), response.strip())
    if text.startswith("<think>"):  # cut off while thinking: nothing was answered
        return Reply(None, "")
    return Reply(None, text.strip())
