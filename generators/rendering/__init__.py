"""Messages to tokens and back: each model's chat template, held to the tokens that were sampled."""

import logging
from typing import Any

from configs.episodes import EpisodesConfig, RendererKind
from generators.rendering.difference import DifferenceRenderer
from generators.rendering.parsing import ReplyReader
from generators.rendering.plain import PlainRenderer
from generators.rendering.renderer import Renderer, Reply

__all__ = ["Renderer", "Reply", "choose_renderer"]

log = logging.getLogger("slipstream.generator")


def choose_renderer(tokenizer: Any, config: EpisodesConfig) -> Renderer:
    """Returns the renderer that `episodes.renderer` names, or the best for this tokenizer.

    Raises ValueError with field, rule and value where the tokenizer or its chat template does not bear it.
    """
    reader = ReplyReader(tokenizer, config.tool_parser, config.reasoning_parser)
    kind = config.renderer
    if kind is RendererKind.auto:
        kind = RendererKind.difference if tokenizer.chat_template else RendererKind.plain
    if kind is RendererKind.plain:
        return PlainRenderer(tokenizer, reader)
    if not tokenizer.chat_template:
        raise ValueError(
            f"episodes.renderer must be auto or plain for a tokenizer without a chat template, got {kind}"
        )
    return DifferenceRenderer(tokenizer, reader)
