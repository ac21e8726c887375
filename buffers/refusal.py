"""Requests that a buffer does not take, and how many there have been."""

import logging
from collections import Counter

log = logging.getLogger("slipstream.buffer")


class Refusal(ValueError):
    """A request that does not fit. `reason` is one of a few; the text says which request and why."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class RefusalCounts:
    def __init__(self) -> None:
        self.by_reason: Counter[str] = Counter()
        """Refused messages by reason."""

    def refuse_message(self, reason: str, detail: str) -> None:
        """Counts a refused message. `reason` is one of a few; `detail` says which message and why."""
        self.by_reason[reason] += 1
        count = self.by_reason[reason]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th: a flood of them does not fill the log
            log.warning("refused (%d times by now), %s: %s", count, reason, detail)
