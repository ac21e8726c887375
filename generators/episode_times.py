"""Time limits of the episodes under way.

They stand still while the engine sleeps (`placement.mode=colocated`): an episode that waits for a reply then
waits for the learner.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class EpisodeLimit:
    """The time limit of one episode, counted while the engine is awake."""

    def __init__(self, timeout: asyncio.Timeout, timeout_s: float) -> None:
        self._timeout, self._timeout_s = timeout, timeout_s
        self._left_s: float | None = timeout_s
        """Seconds left when it was paused last; None: without a limit."""
        self._is_paused = False

    @property
    def has_expired(self) -> bool:
        return self._timeout.expired()

    def limit_time(self, is_limited: bool) -> None:
        """With False the time stops, with True it begins anew."""
        self._left_s = self._timeout_s if is_limited else None
        self._apply()

    def pause(self) -> None:
        when = self._timeout.when()
        self._left_s = None if when is None else when - asyncio.get_running_loop().time()
        self._is_paused = True
        self._apply()

    def resume(self) -> None:
        self._is_paused = False
        self._apply()

    def _apply(self) -> None:
        if not self._timeout.expired():
            runs = self._left_s is not None and not self._is_paused
            now = asyncio.get_running_loop().time()
            self._timeout.reschedule(now + (self._left_s or 0.0) if runs else None)


class EpisodeTimes:
    """All methods are for the episode thread."""

    def __init__(self) -> None:
        self._limits: set[EpisodeLimit] = set()
        self._are_paused = False

    @asynccontextmanager
    async def limit_episode(self, timeout_s: float) -> AsyncIterator[EpisodeLimit]:
        """Cancels the block after `timeout_s`; raises TimeoutError then, as `asyncio.timeout` does."""
        async with asyncio.timeout(timeout_s) as timeout:
            limit = EpisodeLimit(timeout, timeout_s)
            if self._are_paused:
                limit.pause()
            self._limits.add(limit)
            try:
                yield limit
            finally:
                self._limits.discard(limit)

    async def pause(self) -> None:
        self._are_paused = True
        for limit in self._limits:
            limit.pause()

    async def resume(self) -> None:
        self._are_paused = False
        for limit in self._limits:
            limit.resume()
