"""The opening of a reply: the tokens with which a chat template lets the policy begin it."""

from collections.abc import Sequence
from typing import Any

from generators.environment import Message

QUESTION: Message = {"role": "user", "content": "q"}


def find_opening(tokenizer: Any) -> list[int]:
    """Returns the tokens that a template puts behind a conversation for the reply to begin, or none where the
    template does not simply add them."""
    asked, begun = (
        str(tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=reply_follows))
        for reply_follows in (False, True)
    )
    if not begun.startswith(asked):
        return []
    return list(tokenizer.encode(begun.removeprefix(asked), add_special_tokens=False))


def find_reply(held: Sequence[int], opening: Sequence[int]) -> int | None:
    """Returns where the last reply of a conversation begins, its opening included."""
    for place in range(len(held) - len(opening), -1, -1) if opening else ():
        if held[place] == opening[0] and list(held[place : place + len(opening)]) == list(opening):
            return place
    return None


class ThinkingMarks:
    """Tells whether some tokens end within thinking, where it stands between two added tokens."""

    def __init__(self, tokenizer: Any) -> None:
        ids = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
        self._begin, self._end = ids.get("<think>"), ids.get("</think>")
        self.are_known = None not in (self._begin, self._end)
        self.ending = list[int](tokenizer.encode("\n</think>\n\n", add_special_tokens=False))
        """The tokens that end thinking."""

    def is_thinking(self, tokens: Sequence[int]) -> bool:
        if self._begin is None or self._end is None:
            return False
        marks = (self._begin, self._end)
        return next((token == self._begin for token in reversed(tokens) if token in marks), False)
