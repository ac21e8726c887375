"""The end of a reply: the special tokens with which a chat template closes one that nothing follows."""

import json
from typing import Any

from generators.environment import Message
from generators.rendering.messages import TEMPLATE_ERRORS
from generators.rendering.opening import QUESTION

MARK = "MARKEDREPLY"


def find_ends(tokenizer: Any) -> frozenset[int]:
    """Returns the tokens that end an answer and a tool call. The engine stops at them, whatever the model's
    generation config says: that of a base model knows no turns.

    None where the template closes an answer by the beginning of the next message. What stands between an
    answer and the next message is no end by itself: it may stand within a reply too.
    """
    specials = {
        token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    answer: Message = {"role": "assistant", "content": MARK}
    closes = _list_behind(tokenizer, [QUESTION, answer], specials)
    if not closes:
        return frozenset()
    following = _list_behind(tokenizer, [QUESTION, answer, QUESTION], specials)
    usual = [text for text in following if text == tokenizer.eos_token] or following
    ends = {usual[0] if usual[:1] and usual[0] in closes else closes[-1]}
    for arguments in ({"value": MARK}, json.dumps({"value": MARK})):
        call = {"id": "call00000", "type": "function", "function": {"name": "tool", "arguments": arguments}}
        calling: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        closes = _list_behind(tokenizer, [QUESTION, calling], specials)
        known = [text for text in closes if text in ends or text == tokenizer.eos_token]
        ends.update(known[:1] or closes[-1:])
    return frozenset(specials[text] for text in ends)


def _list_behind(tokenizer: Any, messages: list[Message], specials: dict[str, int]) -> list[str]:
    """Returns the special tokens behind a marked reply, in their order. Empty where the template refuses the
    messages, or does not show the mark."""
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except TEMPLATE_ERRORS:
        return []
    _, found, behind = text.rpartition(MARK)
    held = [special for special in specials if special in behind] if found else []
    return sorted(held, key=behind.index)
