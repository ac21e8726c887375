"""Renders conversations for models without a chat template: the messages' text, one behind the other."""

from collections.abc import Sequence
from typing import Any

from generators.environment import Message, ToolSpec
from generators.rendering.encoder import TextEncoder
from generators.rendering.messages import read_content
from generators.rendering.parsing import ReadsReplies, ReplyReader


class PlainRenderer(ReadsReplies):
    """Concatenates contents as they are written. A reply stays as it was sampled, its end token included.

    Nothing is put between messages, so an environment writes its own spaces and line breaks. The policy does
    not see `tools`: an environment that has some describes them in its first message.
    """

    name = "plain-1"

    def __init__(self, tokenizer: Any, reader: ReplyReader) -> None:
        super().__init__(reader)
        self._encoder = TextEncoder(tokenizer)
        self._end = "" if tokenizer.eos_token is None else str(tokenizer.eos_token)
        self.stop_tokens = frozenset(() if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),))

    def render_first(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        encoder, ids, text = self._encoder, list[int](), ""
        for message in messages:
            text += read_content(message)
            if message["role"] == "assistant":
                ids += encoder.encode_literal(text, add_special_tokens=not ids)
                ids += encoder.encode_text(self._end)
                text = ""
        return ids + encoder.encode_literal(text, add_special_tokens=not ids)

    def extend_prompt(
        self, held: list[int], new_messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> list[int] | None:
        if any(message["role"] == "assistant" for message in new_messages):
            return None
        return held + self._encoder.encode_literal("".join(map(read_content, new_messages)))
