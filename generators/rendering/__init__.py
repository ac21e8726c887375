"""Messages to tokens and back: each model's chat template, held to the tokens that were sampled."""

import logging
from collections.abc import Iterator
from typing import Any

from configs.episodes import EpisodesConfig, RendererKind
from generators.rendering.difference import DifferenceRenderer
from generators.rendering.library import list_library_renderers
from generators.rendering.parsing import ReplyReader
from generators.rendering.plain import PlainRenderer
from generators.rendering.proof import ToollessRenderer, UnprovedRenderer, prove_renderer
from generators.rendering.renderer import Renderer, Reply

__all__ = ["Renderer", "Reply", "choose_renderer"]

log = logging.getLogger("slipstream.generator")


def choose_renderer(tokenizer: Any, config: EpisodesConfig) -> Renderer:
    """Returns the renderer that `episodes.renderer` names, or the best for this tokenizer, proved on it.

    Raises ValueError with field, rule and value where there is none. With `episodes.exact=false` a renderer
    that cannot be proved begins a new branch at each turn. One whose turns with tools alone cannot be proved
    serves tasks without tools.
    """
    reader = ReplyReader(tokenizer, config.tool_parser, config.reasoning_parser)
    renderer: Renderer | None = None
    toolless: Renderer | None = None
    problem = ""
    for renderer in _list_renderers(tokenizer, config.renderer, reader):
        follows_template = not isinstance(renderer, PlainRenderer)
        proof = prove_renderer(renderer, tokenizer, follows_template=follows_template)
        if proof.problem is None:
            turns = ", ".join(proof.proved)
            log.info("%s renders the conversations; proved on this tokenizer: %s turns", renderer.name, turns)
            return renderer
        problem = f"{renderer.name}, {proof.problem}"
        if proof.holds_without_tools and toolless is None:
            toolless = ToollessRenderer(renderer, problem, config.exact)
            log.warning("%s is proved for conversations without tools only: %s", renderer.name, proof.problem)
        else:
            log.info("%s is not used: %s", renderer.name, proof.problem)
    if toolless is not None:
        return toolless
    assert renderer is not None, "each kind of renderer yields one or raises"
    if config.exact:
        raise ValueError(
            "episodes.renderer must keep the sampled tokens and say what the model's chat template says "
            f"(episodes.exact=false begins a new branch at each turn instead), got {problem}"
        )
    log.warning("each turn begins a new branch, because the renderer cannot be proved: %s", problem)
    return UnprovedRenderer(renderer)


def _list_renderers(tokenizer: Any, kind: RendererKind, reader: ReplyReader) -> Iterator[Renderer]:
    """Yields the renderers to try, the best first."""
    if not tokenizer.chat_template:
        if kind is RendererKind.difference:
            raise ValueError(
                f"episodes.renderer must be auto or plain for a tokenizer without a chat template, got {kind}"
            )
        kind = RendererKind.plain
    if kind is RendererKind.plain:
        yield PlainRenderer(tokenizer, reader)
        return
    if kind is RendererKind.auto:
        yield from list_library_renderers(tokenizer, reader)
    yield DifferenceRenderer(tokenizer, reader)
