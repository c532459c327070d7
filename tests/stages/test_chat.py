"""The chat format: Qwen3's forms, and training text that opens with what inference sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stages.chat import STOP_TOKEN, THINK_TOKENS, parse_reply, render_completion, render_prompt
from stages.problems import RESPONSE_STYLES, generate
from stages.supervised import direct_example, thinking_example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EMPTY_THINK = "<think>\n\n</think>\n\n"
OPENING = "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("thinking", "flag", "text"),
    [
        (True, False, f"<|im_start|>user\n3+4<|im_end|>\n{OPENING}"),
        (False, False, f"<|im_start|>user\n3+4<|im_end|>\n{OPENING}<think>\n\n</think>\n\n"),
        (True, True, f"<|im_start|>user\n3+4 /think<|im_end|>\n{OPENING}"),
        (False, True, f"<|im_start|>user\n3+4 /no_think<|im_end|>\n{OPENING}"),
    ],
)
def test_render_prompt_each_mode_has_the_form_of_qwen3(tokenizer: PreTrainedTokenizerFast, thinking: bool, flag: bool, text: str) -> None:
    assert render_prompt(tokenizer, "3+4", thinking=thinking, flag=flag) == text


def test_render_completion_block_is_filled_empty_or_absent() -> None:
    assert render_completion("7", thinking="3+4=7") == "<think>\n3+4=7\n</think>\n\n7<|im_end|>"
    assert render_completion("7", thinking="") == f"{EMPTY_THINK}7<|im_end|>"
    assert render_completion("7", thinking=None) == "7<|im_end|>"


def test_template_earlier_turns_lose_their_thinking_and_the_last_keeps_it(tokenizer: PreTrainedTokenizerFast) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "3+4"},
        {"role": "assistant", "content": "<think>\n3+4=7\n</think>\n\n7"},
        {"role": "user", "content": "4+4"},
        {"role": "assistant", "content": "<think>\n4+4=8\n</think>\n\n8"},
    ]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n3+4<|im_end|>\n<|im_start|>assistant\n7<|im_end|>\n"
        "<|im_start|>user\n4+4<|im_end|>\n<|im_start|>assistant\n<think>\n4+4=8\n</think>\n\n8<|im_end|>\n"
    )


def test_template_reply_without_thinking_carries_the_empty_block(tokenizer: PreTrainedTokenizerFast) -> None:
    turns = [{"role": "user", "content": "3+4"}, {"role": "assistant", "content": "7"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False).endswith(f"{OPENING}{EMPTY_THINK}7<|im_end|>\n")


def test_template_training_text_is_prompt_plus_completion(tokenizer: PreTrainedTokenizerFast) -> None:
    turns = [{"role": "user", "content": "3+4"}, {"role": "assistant", "content": "<think>\n3+4=7\n</think>\n\n7"}]
    whole = render_prompt(tokenizer, "3+4", thinking=True) + render_completion("7", thinking="3+4=7")
    assert tokenizer.apply_chat_template(turns, tokenize=False) == whole + "\n"


def test_examples_of_every_kind_open_with_the_inference_prompt_in_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    for family in ("chain_sum", "leg_counting", "products"):
        for index, problem in enumerate(generate(family, 20, 3)):
            response = RESPONSE_STYLES[index % 4].format(answer=problem.answer)
            for flag in (False, True):
                for thinking in (False, True):
                    if thinking:
                        example = thinking_example(tokenizer, problem.question, problem.trace, response, flag=flag)
                    else:
                        example = direct_example(tokenizer, problem.question, response, flag=flag)
                    assert example.prompt == render_prompt(tokenizer, problem.question, thinking=thinking, flag=flag)
                    prompt = tokenizer(example.prompt, add_special_tokens=False)["input_ids"]
                    text = tokenizer(example.prompt + example.completion, add_special_tokens=False)["input_ids"]
                    assert text[: len(prompt)] == prompt
                    assert text[-1] == tokenizer.eos_token_id
                    reply = parse_reply(tokenizer.decode(text[len(prompt) :]))
                    assert reply.response == response
                    assert reply.thinking == (problem.trace if thinking else "" if flag else None)


def test_tokenizer_think_tags_are_single_tokens_that_survive_decoding(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "<think>\n3+4=7\n</think>\n\n\\boxed{7}<|im_end|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for token in (*THINK_TOKENS, STOP_TOKEN):
        assert ids.count(tokenizer.convert_tokens_to_ids(token)) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>\n3+4=7\n</think>\n\n\\boxed{7}"
    assert tokenizer.decode(ids) == text


def test_tokenizer_has_exactly_the_vocabulary_single_digits_and_two_end_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == 400
    assert tokenizer.eos_token == STOP_TOKEN
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    ids = tokenizer("2027", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["2", "0", "2", "7"]


@pytest.mark.parametrize("text", ["12 + 7 = 19", "Grüße, 世界 🙂\t\n\n x", "a\r\nb", "it's <think> odd"])
def test_tokenizer_any_text_comes_back_unchanged(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@pytest.mark.parametrize(
    ("completion", "thinking", "response"),
    [
        ("<think>\na\nb\n</think>\n\nr<|im_end|>\njunk", "a\nb", "r"),
        ("<think>\n\n</think>\n\nr", "", "r"),
        ("r", None, "r"),
        ("", None, ""),
        ("<think></think>", "", ""),
        ("<think>\na\n</think>\n\nr</think>s", "a", "r</think>s"),
        ("r <think>\na\n</think>", None, "r <think>\na\n</think>"),
        ("a\n</think>\n\nr", None, "a\n</think>\n\nr"),
    ],
)
def test_parse_reply_takes_a_completion_apart(completion: str, thinking: str | None, response: str) -> None:
    assert parse_reply(completion) == (thinking, response)


def test_parse_reply_block_that_is_not_closed_leaves_no_response() -> None:
    assert parse_reply("<think>\n3+4=7, \\boxed{7}") == (None, "")
