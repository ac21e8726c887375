"""Ends a run in which nothing moves and nobody is at work, and names who waits for whom."""

import logging
from collections.abc import Callable

log = logging.getLogger("slipstream.buffer")


class Stuck(RuntimeError):
    """The run cannot go on: nothing has moved for too long, or every group fails."""


class Watchdog:
    def __init__(self, limit_s: float, now: float) -> None:
        """Warns after `limit_s` seconds (`buffer.watchdog_s`) and raises after twice as long."""
        self._limit_s = limit_s
        self.moved_at = now
        """When data have moved last: a group came, a step was trained, a version was published."""
        self.worked_at = now
        """When a role was last at work, however long its work takes."""
        self._warned_at = now

    def check(self, now: float, waiting_for: Callable[[], str]) -> None:
        """Raises Stuck, with what `waiting_for` says."""
        still = now - max(self.moved_at, self.worked_at)
        if still > 2 * self._limit_s:
            raise Stuck(f"nothing has moved for {still:.0f} s: {waiting_for()}")
        if still > self._limit_s and now - self._warned_at > self._limit_s:
            self._warned_at = now
            log.warning("nothing has moved for %.0f s: %s", still, waiting_for())
