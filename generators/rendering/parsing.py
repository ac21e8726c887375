"""Reads sampled tokens as a message."""

from collections.abc import Collection, Sequence
from typing import Any

from generators.environment import Message, ToolSpec
from generators.rendering.renderer import Reply


class ReplyReader:
    """Reads completions: the text without its end token."""

    def __init__(self, tokenizer: Any, stop_tokens: Collection[int] = ()) -> None:
        self._tokenizer, self._stop_tokens = tokenizer, frozenset(stop_tokens)

    def read_reply(
        self, tokens: Sequence[int], finish_reason: str, tools: Sequence[ToolSpec], turn: int
    ) -> Reply:
        message: Message = {"role": "assistant", "content": self._read_text(tokens)}
        return Reply(message)

    def _read_text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
