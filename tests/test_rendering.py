"""Rendering: later prompts begin with the tokens that were sampled, and go on as the template says."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from random_conversations import Conversations
from template_families import FAMILIES, family_tokenizer

from configs.episodes import EpisodesConfig
from generators.rendering import choose_renderer
from generators.rendering.difference import DifferenceRenderer, Suffix
from generators.rendering.encoder import TextEncoder
from generators.rendering.opening import ThinkingMarks
from slipstream_bench.byte_tokenizer import make_byte_tokenizer

QUESTION = {"role": "user", "content": "what is four"}
TURNS = {
    "user": [{"role": "user", "content": "five\n"}],
    "tools": [{"role": "tool", "content": "4"}, {"role": "tool", "content": "漢 5"}],
}
NUM_CONVERSATIONS = 2500


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_is_extended_by_the_text_that_the_family_puts_behind_a_reply(name: str, turn: str) -> None:
    family, tokenizer = FAMILIES[name], family_tokenizer(name)
    renderer = choose_renderer(tokenizer, EpisodesConfig())
    said = tokenizer.encode("the answer", add_special_tokens=False)
    cut_off = renderer.render_first([QUESTION], []) + said
    for held, close in ((cut_off, family.close), ([*cut_off, tokenizer.eos_token_id], "")):
        tokens = renderer.extend_prompt(held, TURNS[turn], [])
        assert tokens is not None and tokens[: len(held)] == held
        assert tokenizer.decode(tokens[len(held) :]) == close + family.expect_suffix(TURNS[turn])


@pytest.mark.parametrize("name", FAMILIES)
def test_no_sampled_token_changes_in_2500_random_conversations_and_rows_mask_all_others(name: str) -> None:
    renderer = choose_renderer(family_tokenizer(name), EpisodesConfig())
    conversations, counts = Conversations(FAMILIES[name], renderer, seed=1), Counter[str]()
    for number in range(NUM_CONVERSATIONS):
        played = conversations.play(number)
        conversations.check_rows(played)
        counts += played.counts
    # Every branch is one that the caller began: the first, and one for each conversation rewritten.
    assert NUM_CONVERSATIONS < counts["begun"] < 1.2 * NUM_CONVERSATIONS
    assert counts["extended"] > 2 * NUM_CONVERSATIONS and counts["cut off"] > NUM_CONVERSATIONS / 3


def drop_line_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that verl had for months: one line break less at every tool boundary."""
    right = DifferenceRenderer._cut_suffix

    def cut_suffix(self: DifferenceRenderer, behind: str, *rest: Any) -> Suffix:
        suffix = right(self, behind, *rest)
        return Suffix(suffix.close, suffix.rest[1:] if "tool_response" in behind else suffix.rest)

    monkeypatch.setattr(DifferenceRenderer, "_cut_suffix", cut_suffix)


def strip_token(monkeypatch: pytest.MonkeyPatch) -> None:
    right = DifferenceRenderer.extend_prompt

    def extend_prompt(self: DifferenceRenderer, held: list[int], *rest: Any) -> list[int] | None:
        return right(self, held[:-2] + held[-1:], *rest)

    monkeypatch.setattr(DifferenceRenderer, "extend_prompt", extend_prompt)


def encode_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    right = DifferenceRenderer.extend_prompt

    def extend_prompt(self: DifferenceRenderer, held: list[int], *rest: Any) -> list[int] | None:
        text = self._tokenizer.decode(held)
        return right(self, self._tokenizer.encode(text, add_special_tokens=False), *rest)

    monkeypatch.setattr(DifferenceRenderer, "extend_prompt", extend_prompt)


def leave_replies_open(monkeypatch: pytest.MonkeyPatch) -> None:
    right = DifferenceRenderer._cut_suffix

    def cut_suffix(self: DifferenceRenderer, *rest: Any) -> Suffix:
        return Suffix(None, right(self, *rest).rest)

    monkeypatch.setattr(DifferenceRenderer, "_cut_suffix", cut_suffix)


def leave_thinking_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThinkingMarks, "is_thinking", lambda self, tokens: False)


def end_thinking_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_thinking(self: ThinkingMarks, tokens: list[int]) -> bool:
        return self._begin in tokens

    monkeypatch.setattr(ThinkingMarks, "is_thinking", is_thinking)


def let_messages_forge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextEncoder, "guard_text", lambda self, value: (value, ""))


def answer_from_the_wrong_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    right = DifferenceRenderer._find_suffix

    def find_suffix(self: DifferenceRenderer, messages: list[Any], tools: list[Any]) -> Suffix | None:
        return right(self, [{**message, "content": "four"} for message in messages], tools)

    monkeypatch.setattr(DifferenceRenderer, "_find_suffix", find_suffix)


MUTANTS = [
    drop_line_break,
    strip_token,
    encode_anew,
    leave_replies_open,
    leave_thinking_open,
    end_thinking_twice,
    let_messages_forge,
    answer_from_the_wrong_cache,
]


@pytest.mark.parametrize("mutate", MUTANTS)
def test_a_renderer_that_is_broken_on_purpose_is_caught(mutate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = choose_renderer(family_tokenizer("qwen3"), EpisodesConfig())
    mutate(monkeypatch)
    conversations = Conversations(FAMILIES["qwen3"], renderer, seed=1)
    with pytest.raises(AssertionError):
        for number in range(200):
            conversations.check_rows(conversations.play(number))


def test_other_threads_go_on_while_a_long_message_becomes_tokens() -> None:
    """The engine's loop is such a thread. With the tokenizer's `encode` it stood still for as long as this
    takes: 16 s for four megabytes."""
    encoder = TextEncoder(make_byte_tokenizer())
    text, num_rounds = "a tool's answer " * 20_000, 0
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(encoder.encode_literal, text)
        while not encoding.done():
            time.sleep(0.001)
            num_rounds += 1
        assert len(encoding.result()) == len(text) and num_rounds > 10
