"""The protocol of a game in plain text, which the tiny model plays before any engine runs."""

from typing import Protocol


class TextGame(Protocol):
    @property
    def text(self) -> str:
        """Text that the policy reads next, before it replies. Empty when the game has ended."""
        ...

    @property
    def reward(self) -> float:
        """Sum of the rewards so far."""
        ...

    @property
    def is_done(self) -> bool: ...

    def take_reply(self, reply: str) -> None:
        """Takes the policy's reply, without its end token."""
        ...
