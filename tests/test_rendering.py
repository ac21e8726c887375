"""Rendering: later prompts begin with the tokens that were sampled, and go on as the template says."""

import pytest
from template_families import FAMILIES, family_tokenizer

from configs.episodes import EpisodesConfig
from generators.rendering import choose_renderer

QUESTION = {"role": "user", "content": "what is four"}
TURNS = {
    "user": [{"role": "user", "content": "five\n"}],
    "tools": [{"role": "tool", "content": "4"}, {"role": "tool", "content": "漢 5"}],
}


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
