"""Small tokenizers of four families: byte-level BPE, the family's special tokens, its chat template.

The expected text behind a reply is written here once more, by hand, from the published formats.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from generators.environment import Message

TEMPLATES = Path(__file__).parent / "templates"
# Letters with the space before them, digits one by one, and line breaks in runs, as Qwen's and Llama's do.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CORPUS = [
    "user assistant system tool the answer is four five weather in the city\n",
    'name arguments parameters add file {"name": "add", "arguments": {"a": 1}}\n\n',
    "hello world.\n\n\n\n think it over!\n",
]


@dataclass(frozen=True)
class ChatFamily:
    name: str
    specials: tuple[str, ...]
    markers: tuple[str, ...]
    """Added tokens that the family does not call special."""
    eos: str | None
    close: str
    """The end of a reply in the template's text."""
    expect_suffix: Callable[[list[Message]], str]
    """Returns what stands between a reply's close and the next reply. It is written by hand."""
    thinks: bool = False

    @property
    def template(self) -> str | None:
        path = TEMPLATES / f"{self.name}.jinja"
        return path.read_text() if path.exists() else None


def expect_qwen(messages: list[Message]) -> str:
    text, before = "\n", ""
    for message, after in zip(messages, [*messages[1:], {"role": ""}], strict=True):
        if message["role"] == "tool":
            text += "<|im_start|>user" if before != "tool" else ""
            text += f"\n<tool_response>\n{message['content']}\n</tool_response>"
            text += "<|im_end|>\n" if after["role"] != "tool" else ""
        else:
            text += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
        before = message["role"]
    return text + "<|im_start|>assistant\n"


def expect_llama(messages: list[Message]) -> str:
    text = ""
    for message in messages:
        is_tool, content = message["role"] == "tool", message["content"]
        role, said = (
            ("ipython", json.dumps(content, ensure_ascii=False))
            if is_tool
            else (message["role"], content.strip())
        )
        text += f"<|start_header_id|>{role}<|end_header_id|>\n\n{said}<|eot_id|>"
    return text + "<|start_header_id|>assistant<|end_header_id|>\n\n"


def expect_plain(messages: list[Message]) -> str:
    return "".join(message["content"] for message in messages)


QWEN_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOOL_MARKERS = ("<tool_call>", "</tool_call>")
THINK_MARKERS = ("<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA_SPECIALS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
FAMILIES = {
    family.name: family
    for family in (
        ChatFamily("qwen2p5", QWEN_SPECIALS, TOOL_MARKERS, "<|im_end|>", "<|im_end|>", expect_qwen),
        ChatFamily(
            "qwen3",
            QWEN_SPECIALS,
            TOOL_MARKERS + THINK_MARKERS,
            "<|im_end|>",
            "<|im_end|>",
            expect_qwen,
            thinks=True,
        ),
        ChatFamily("llama3", LLAMA_SPECIALS, (), "<|eot_id|>", "<|eot_id|>", expect_llama),
        ChatFamily("tiny", ("<eos>",), (), "<eos>", "", expect_plain),
    )
}


def make_tokenizer(
    template: str | None, specials: tuple[str, ...], markers: tuple[str, ...] = (), eos: str | None = None
) -> Any:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        CORPUS * 20, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=eos, pad_token=eos, clean_up_tokenization_spaces=False
    )
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in markers])
    if "<|begin_of_text|>" in specials:
        tokenizer.bos_token = "<|begin_of_text|>"
    tokenizer.chat_template = template
    return tokenizer


@cache
def family_tokenizer(name: str) -> Any:
    family = FAMILIES[name]
    return make_tokenizer(family.template, family.specials, family.markers, family.eos)
