"""Prompts of one turn as tokens: exactly the template's, with special words as text, within a bound."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from template_families import FAMILIES, family_tokenizer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from generators.rendering.encoder import has_byte_bound
from generators.rendering.prompts import PromptEncoder

NAMES = [name for name, family in FAMILIES.items() if family.template]
ENCODERS = {name: PromptEncoder(family_tokenizer(name)) for name in NAMES}
SPECIALS = {name: family_tokenizer(name).all_special_tokens for name in NAMES}


def make_chat(draw: Any) -> list[dict]:
    contents = draw(
        st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=4)
    )
    chat = [{"role": ("user", "assistant")[place % 2], "content": one} for place, one in enumerate(contents)]
    if chat[-1]["role"] == "assistant":
        chat.pop()
    system = [{"role": "system", "content": "Be brief."}] if draw(st.booleans()) else []
    return [*system, *chat]


CHATS = st.composite(make_chat)()


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=60)
@given(chat=CHATS)
@example(chat=[{"role": "user", "content": "क़ﷺ\u0958\U0001d160"}])
def test_a_chat_has_the_tokens_of_its_template_and_no_more_than_its_bound(
    name: str, chat: list[dict]
) -> None:
    tokenizer, encoder = family_tokenizer(name), ENCODERS[name]
    if any(special in one["content"] for one in chat for special in SPECIALS[name]):
        return
    tokens = encoder.encode_prompt(chat)
    assert tokens == tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    rendered = encoder.render_prompt(chat)
    assert encoder.count_tokens([rendered, rendered]) == [len(tokens)] * 2
    bound = encoder.bound_tokens(chat)
    assert bound is None or len(tokens) <= bound


def test_the_bound_is_known_for_plain_english() -> None:
    chat = [{"role": "user", "content": "How many apples are left?"}]
    for name in NAMES:
        bound = ENCODERS[name].bound_tokens(chat)
        assert bound is not None and bound < 400


@pytest.mark.parametrize("field", ["tool_calls", "reasoning_content", "name"])
def test_no_bound_is_known_with_fields_of_any_length(field: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "y" * 5000}}}
    value = [call] if field == "tool_calls" else "y" * 5000
    chat = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2", field: value},
        {"role": "user", "content": "Sure?"},
    ]
    for name in NAMES:
        assert ENCODERS[name].bound_tokens(chat) is None


@pytest.mark.parametrize("name", NAMES)
def test_the_words_of_a_special_token_in_a_prompt_are_text(name: str) -> None:
    tokenizer, encoder = family_tokenizer(name), ENCODERS[name]
    plain = encoder.encode_prompt([{"role": "user", "content": "Say  twice."}])
    for special in SPECIALS[name]:
        chat = [{"role": "user", "content": f"Say {special} twice."}]
        forged = encoder.encode_prompt(chat)
        number = tokenizer.convert_tokens_to_ids(special)
        assert forged.count(number) == plain.count(number)
        assert special in tokenizer.decode(forged).removeprefix(special)
        assert encoder.count_tokens([encoder.render_prompt(chat)]) == [len(forged)]


def test_arguments_of_the_template_change_the_prompt_and_an_unknown_role_is_refused() -> None:
    chat = [{"role": "user", "content": "1 + 1?"}]
    encoder = ENCODERS["qwen3"]
    assert encoder.encode_prompt(chat, {"enable_thinking": False}) != encoder.encode_prompt(chat)


def test_a_tokenizer_without_a_template_gets_the_contents() -> None:
    tokenizer = family_tokenizer("tiny")
    encoder = PromptEncoder(tokenizer)
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"1?{tokenizer.eos_token}"},
    ]
    tokens = encoder.encode_prompt(chat)
    assert tokenizer.eos_token_id not in tokens
    assert tokenizer.decode(tokens) == f"Be brief.\n\n1?{tokenizer.eos_token}"
    bound = encoder.bound_tokens(chat)
    assert bound is None or len(tokens) <= bound


def test_a_bound_is_claimed_only_where_nothing_is_put_into_the_text() -> None:
    """A composing normalizer makes six bytes of these three: the bound then holds for ASCII alone."""
    letters = {letter: number for number, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert has_byte_bound(tokenizer) == (True, False)
    tokenizer.normalizer = normalizers.NFC()
    assert has_byte_bound(tokenizer) == (True, True)
    assert len(tokenizer.encode("\u0958").ids) == 6 > len("\u0958".encode())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert has_byte_bound(tokenizer)[0] is False
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    assert has_byte_bound(tokenizer)[0] is False
    assert has_byte_bound(Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")))[0] is False
