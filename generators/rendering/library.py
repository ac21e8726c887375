"""Renderers of the package `renderers` (Prime Intellect, Apache-2.0), which knows many families of models.

Which one a model gets follows from `model_type` in its own folder. Nothing is asked of a hub.
"""

import copy
import importlib.util
import json
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from generators.environment import Message, ToolSpec
from generators.rendering.messages import adapt_message
from generators.rendering.opening import ThinkingMarks, find_opening, find_reply
from generators.rendering.parsing import ReadsReplies, ReplyReader

FAMILIES: dict[str, tuple[str, ...]] = {
    "glm4_moe": ("GLM45RendererConfig",),
    "kimi_k2": ("KimiK2RendererConfig",),
    "llama": ("Llama3RendererConfig",),
    "minimax_m2": ("MiniMaxM2RendererConfig",),
    "nemotron_h": ("Nemotron3RendererConfig",),
    "qwen3": ("Qwen3RendererConfig",),
    "qwen3_moe": ("Qwen3RendererConfig",),
    "qwen3_5": ("Qwen35RendererConfig", "Qwen36RendererConfig"),
    "qwen3_5_moe": ("Qwen35RendererConfig", "Qwen36RendererConfig"),
}
"""The configurations to try for a `model_type`. The proof decides: a type names several templates.

Two of the package's families are left out. That of gpt-oss downloads a vocabulary; those of DeepSeek look for
their special tokens by encoding text, which here never has any.
"""


class LibraryRenderer(ReadsReplies):
    """A renderer of the package, held to the tokens that were sampled.

    The package puts special tokens where its templates have them, by their ids, and everything else is text:
    its tokenizer reads no special token in a message.
    """

    def __init__(self, tokenizer: Any, reader: ReplyReader, config_name: str) -> None:
        """Raises ValueError where the tokenizer lacks what the family needs."""
        import renderers

        super().__init__(reader)
        own = copy.deepcopy(tokenizer)
        own.split_special_tokens = True
        # Rewriting earlier thinking would change sampled tokens, so all of it stays.
        config = getattr(renderers, config_name)(thinking_retention="all")
        try:
            self._inner = renderers.create_renderer(own, config)
        # Each family complains in its own way of a tokenizer that lacks its tokens.
        except Exception as error:
            raise ValueError(f"the tokenizer must suit {config_name}, got {error}") from error
        self.name = f"renderers-{version('renderers')}:{config.name}"
        self.stop_tokens = frozenset(map(int, self._inner.get_stop_token_ids()))
        self._opening = find_opening(tokenizer)
        reader.thinks_at_once = ThinkingMarks(tokenizer).is_thinking(self._opening)

    def render_first(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        rendered = self._inner.render_ids(
            self._adapt_all(messages), tools=list(tools) or None, add_generation_prompt=True
        )
        return list(rendered)

    def extend_prompt(
        self, held: list[int], new_messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> list[int] | None:
        begin = find_reply(held, self._opening)
        if begin is None or any(message["role"] == "assistant" for message in new_messages):
            return None
        begin += len(self._opening)
        extended = self._inner.bridge_to_next_turn(
            held[:begin], held[begin:], self._adapt_all(new_messages), tools=list(tools) or None
        )
        if extended is None:
            return None
        # The package cuts off what stands behind the last close.
        tokens = list(extended.token_ids)
        return tokens if tokens[: len(held)] == held else None

    def _adapt_all(self, messages: Sequence[Message]) -> list[Message]:
        return [adapt_message(message, arguments_as_objects=True) for message in messages]


def list_library_renderers(tokenizer: Any, reader: ReplyReader) -> Iterator[LibraryRenderer]:
    """Yields the package's renderers for this model: none where the package is not installed, or where the
    model's folder names no family of its."""
    if importlib.util.find_spec("renderers") is None or not tokenizer.chat_template:
        return
    for config_name in FAMILIES.get(_read_model_type(tokenizer), ()):
        try:
            yield LibraryRenderer(tokenizer, reader, config_name)
        except ValueError:
            continue


def _read_model_type(tokenizer: Any) -> str:
    path = Path(str(tokenizer.name_or_path)) / "config.json"
    return str(json.loads(path.read_text()).get("model_type", "")) if path.is_file() else ""
