"""Lines for the console about a buffer that does not answer, and answers again."""

import time
from collections.abc import Callable

UNANSWERED_S = 6.0
"""Seconds without an answer after which the console says so."""


class BufferSilence:
    """Says once that the buffer is silent, and once that it is back."""

    def __init__(self, address: str, say: Callable[[str], None], meanwhile: str) -> None:
        """`say` prints a line; `meanwhile` is what others do while the buffer is silent."""
        self._address, self._say, self._meanwhile = address, say, meanwhile
        self._since: float | None = None
        """Time of the last answer, once the console has said that none comes."""

    def note_answer(self) -> None:
        if self._since is not None:
            self._say(f"{self._address} answers again, after {time.monotonic() - self._since:.0f} s")
            self._since = None

    def note_silence(self, silent_s: float) -> bool:
        """Notes that there was no answer for so many seconds; returns whether the console says so now."""
        if silent_s <= UNANSWERED_S or self._since is not None:
            return False
        self._since = time.monotonic() - silent_s
        self._say(f"{self._address} has not answered for {silent_s:.0f} s: {self._meanwhile}")
        return True
