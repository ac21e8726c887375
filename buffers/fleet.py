"""What the generators say of themselves, added up over all of them and over the lives of each."""

from collections import OrderedDict
from typing import Any

import msgspec

from buffers import messages as m

MAX_GENERATORS = 1000
"""Names kept: beyond it, whoever has been silent for longest is added to those whose lives are over."""
LARGEST = 2**62
"""What a sum stops at: an answer holds 64 bits."""


class Fleet:
    def __init__(self) -> None:
        self._lives: OrderedDict[str, m.GeneratorReport] = OrderedDict()
        """The latest report of each generator's life under way; whoever has spoken last is the last."""
        self._over = m.GeneratorReport()
        """All lives that are over, added up."""

    def join(self, generator: str) -> None:
        """A new life begins."""
        self._end_life(generator)
        self._begin_life(generator)

    def report(self, generator: str, report: m.GeneratorReport) -> bool:
        """Takes in a report; true if the generator has sampled since its last."""
        if generator not in self._lives:
            self._begin_life(generator)
        moved = report.sampled_tokens > self._lives[generator].sampled_tokens
        self._lives[generator] = report
        self._lives.move_to_end(generator)
        return moved

    def _begin_life(self, generator: str) -> None:
        self._lives[generator] = m.GeneratorReport()
        while len(self._lives) > MAX_GENERATORS:
            self._end_life(next(iter(self._lives)))

    def _end_life(self, generator: str) -> None:
        if (report := self._lives.pop(generator, None)) is not None:
            sums = {name: min(LARGEST, value + getattr(report, name)) for name, value in _fields(self._over).items()}
            self._over = m.GeneratorReport(**sums)

    def summary(self) -> dict[str, Any]:
        """The fields of `messages.Status` that speak of generators."""
        lives = [self._over, *self._lives.values()]
        alive = sum(life.alive_s for life in lives)
        updates = sum(life.updates for life in lives)
        return {
            "generators": dict(sorted(self._lives.items())),
            "generator_idle": sum(life.idle_s for life in lives) / alive if alive else 0.0,
            "weight_updates": updates,
            "weight_bytes": sum(life.update_bytes for life in lives),
            "fetched_bytes": sum(life.fetched_bytes for life in lives),
            "prepare_s_mean": sum(life.prepare_s for life in lives) / max(1, updates),
            "pause_s_mean": sum(life.pause_s for life in lives) / max(1, updates),
            "digest_checks": sum(life.digest_checks for life in lives),
            "digest_mismatches": sum(life.digest_mismatches for life in lives),
        }


def _fields(report: m.GeneratorReport) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(report).items() if name != "version"}
