"""The protocols of reward parts, which rate replies. `composition.py` adds the parts up."""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from generators.environment import Row


@dataclass(frozen=True, slots=True)
class Rating:
    """A reply as one part sees it."""

    value: float
    """The part's number, before its weight."""
    details: Mapping[str, float] = field(default_factory=dict)
    """Further numbers for the record, by name."""


@dataclass(frozen=True, slots=True)
class GroupReply:
    """A reply of a group, as a part that sees the whole group gets it."""

    text: str
    num_tokens: int = 0
    """Sampled tokens, the one that ends the reply included."""
    tokens: Sequence[int] = ()
    """The sampled tokens themselves, for a part that has `needs_tokens`."""


class RewardPart(Protocol):
    """Rates a reply by the row that its prompt was made from.

    A part runs in a worker process, so it may block, and a deadline outside ends it. A reply that is bad gets
    a low number; a rating that could not be made (no server, no grade, no right answer in the row) is an
    error, which fails the attempt and is never a reward of 0.

    A part with an attribute `max_concurrent` rates at most so many replies at a time in one generator.
    """

    is_async: bool
    """True when `rate_reply` is a coroutine function. Such parts run at the same time."""

    def rate_reply(self, row: Row, reply: str) -> Rating | Awaitable[Rating]: ...


class GroupPart(Protocol):
    """Rates all replies to a row beside one another, after the parts that rate each reply alone."""

    is_async: bool
    """True when `rate_group` is a coroutine function."""
    needs_tokens: bool
    """True when it reads the tokens of replies."""

    def rate_group(
        self, row: Row, replies: Sequence[GroupReply]
    ) -> Sequence[Rating | None] | Awaitable[Sequence[Rating | None]]:
        """Returns a rating for each reply; None where the part has nothing to say about it."""
        ...
