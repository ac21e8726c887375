"""The protocol of a renderer, which turns messages into tokens and sampled tokens into messages.

render_first(messages) ─▶ prompt ─▶ the engine samples ─▶ parse_reply(completion) ─▶ a message
                            │
extend_prompt(prompt + completion, new messages) ─▶ the next prompt, which begins with these tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from generators.environment import Message, ToolSpec


@dataclass(frozen=True, slots=True)
class Reply:
    """A sampled reply as a message in OpenAI's form: `role`, `content`, and where there are any
    `reasoning_content` and `tool_calls`."""

    message: Message
    parse_error: str | None = None
    """The reason why a tool call could not be read. The message then holds the text as it is."""


class Renderer(Protocol):
    name: str
    """The renderer's name and version, for the log and the record."""
    stop_tokens: frozenset[int]
    """A reply ends with one of these tokens, unless it was cut off: the engine stops at them."""

    def render_first(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Renders a whole conversation, up to where the policy begins its reply.

        Raises ValueError for messages that the model's chat template refuses.
        """
        ...

    def extend_prompt(
        self, held: list[int], new_messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> list[int] | None:
        """Returns tokens that begin with exactly `held`, go on with the new messages, and end where the
        policy begins its reply.

        `held` is the last prompt and its completion as sampled, cut off or not. Returns None where there is
        no such continuation: the caller then begins a new branch with `render_first`.
        """
        ...

    def parse_reply(
        self,
        tokens: Sequence[int],
        finish_reason: str,
        *,
        tools: Sequence[ToolSpec] = (),
        turn: int = 0,
        reads_calls: bool = True,
    ) -> Reply:
        """Reads a completion. The ids of tool calls follow from `tokens` and `turn`: the same reply in
        another turn of the episode has other ids. `reads_calls=False` leaves what looks like a call as
        text."""
        ...
