"""Ends a run in which nothing moves and nobody is at work, and names who waits for whom."""

import logging
from collections.abc import Callable

log = logging.getLogger("slipstream.buffer")


class Stuck(RuntimeError):
    """The run cannot go on: nothing has moved for too long, or every group fails."""


class Watchdog:
    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        """Warns after `limit_s` seconds (`buffer.watchdog_s`) and raises after twice as long.

        `clock` counts seconds.
        """
        self._limit_s, self._clock = limit_s, clock
        self._moved_at = self._worked_at = self._warned_at = clock()

    @property
    def standstill_s(self) -> float:
        """Seconds since data last moved."""
        return self._clock() - self._moved_at

    def note_movement(self) -> None:
        """Data have moved: a group came, a step was trained, or a version was published."""
        self._moved_at = self._clock()

    def note_work(self) -> None:
        """A role is at work. Its work may take as long as it likes."""
        self._worked_at = self._clock()

    def check_standstill(self, describe_waiting: Callable[[], str]) -> None:
        """Raises Stuck, with the sentence of `describe_waiting`, when nothing has moved and nobody has
        worked for too long."""
        now = self._clock()
        still_s = now - max(self._moved_at, self._worked_at)
        if still_s > 2 * self._limit_s:
            raise Stuck(f"nothing has moved for {still_s:.0f} s: {describe_waiting()}")
        if still_s > self._limit_s and now - self._warned_at > self._limit_s:
            self._warned_at = now
            log.warning("nothing has moved for %.0f s: %s", still_s, describe_waiting())
