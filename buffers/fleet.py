"""What the roles say of themselves: which are heard of and what they do; and totals over all generators and all their lives."""

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from buffers import messages as m
from buffers.heartbeat import HEARTBEAT_S
from buffers.run_status import GeneratorReport, RoleState

SILENT_S = 3 * HEARTBEAT_S
"""A role that has not been heard of for longer is named."""
LONG_S = 1.0
"""What a role has been doing for longer is named, unless it waits or samples."""
MAX_NAMED = 4
GONE_S = 10.0
"""A role that has not been heard of for longer is not at work, whatever it said last."""
IDLE = ("waiting", "sampling")
"""How activities begin that are no work of their own: what a generator's engine has sampled is counted in tokens."""
JOINED, STARTING = "joined", "starting the engine"
"""Activities of a generator that is not ready yet: it has not been heard of since it joined, or its engine starts."""


@dataclass(slots=True)
class Heard:
    """The last heartbeat of a role."""

    at: float
    activity: str
    since: float
    moved_at: float
    """When it last got on with it."""


MAX_GENERATORS = 1000
"""Names kept: beyond it, whoever has been silent for longest is added to those whose lives are over."""
LARGEST = 2**62
"""What a sum stops at: an answer holds 64 bits."""


class Fleet:
    def __init__(self, expected: int = 0, reached: dict[str, float] | None = None) -> None:
        """`expected`: how many generators the run starts itself. `reached`: where to note when their engines run."""
        self._expected, self._reached = expected, {} if reached is None else reached
        self._ready: set[str] = set()
        """The first generators whose engines ran."""
        self._lives: OrderedDict[str, GeneratorReport] = OrderedDict()
        """The latest report of each generator's life under way; whoever has spoken last is the last."""
        self._over = GeneratorReport()
        """All lives that are over, added up."""
        self._counted: OrderedDict[str, GeneratorReport] = OrderedDict()
        """Lives that were taken for over because others had spoken since: their part of that."""
        self._heard: OrderedDict[str, Heard] = OrderedDict()
        """By role; whoever was heard last is the last."""
        self._left: OrderedDict[str, None] = OrderedDict()
        """Generators whose last heartbeats may come after their farewell, which they say over another connection."""

    def join(self, generator: str, now: float) -> None:
        """A new life begins."""
        self._end_life(generator)
        self._counted.pop(generator, None)
        self._begin_life(generator)
        self._left.pop(generator, None)
        self.hear(generator, m.RoleHeartbeat(role=generator, activity=JOINED), now)

    def report(self, beat: m.GeneratorHeartbeat, now: float) -> bool:
        """Takes in a generator's heartbeat; true if its engine has sampled since its last."""
        generator = beat.generator
        self.hear(generator, beat, now)
        if generator not in self._lives:
            self._begin_life(generator)
        moved = beat.report.decoded_tokens != self._lives[generator].decoded_tokens
        self._lives[generator] = beat.report
        self._lives.move_to_end(generator)
        is_ready = beat.activity not in (JOINED, STARTING) and generator not in self._ready
        if is_ready and len(self._ready) < self._expected:
            self._ready.add(generator)
            self._reached["engines"] = time.time()
        return moved

    def hear(self, role: str, beat: m.GeneratorHeartbeat | m.RoleHeartbeat, now: float) -> None:
        """A heartbeat, at `now`."""
        if role in self._left:
            return
        self._heard[role] = Heard(now, beat.activity, now - beat.activity_s, now - beat.standstill_s)
        self._heard.move_to_end(role)
        while len(self._heard) > MAX_GENERATORS:
            self._heard.popitem(last=False)

    def leave(self, generator: str) -> None:
        """It is not heard of again before it joins again."""
        self.forget(generator)
        self._left[generator] = None
        while len(self._left) > MAX_GENERATORS:
            self._left.popitem(last=False)

    def forget(self, role: str) -> None:
        """It has said farewell."""
        self._heard.pop(role, None)

    def roles(self, now: float) -> dict[str, RoleState]:
        return {
            role: RoleState(
                last_heard_s=now - heard.at, activity=heard.activity, activity_s=now - heard.since
            )
            for role, heard in sorted(self._heard.items())
        }

    def is_at_work(self, now: float, stalled_s: float) -> bool:
        """True when a role that is heard of does something that others wait for, and has got on with it within `stalled_s`."""
        return any(
            now - heard.at <= GONE_S
            and now - heard.moved_at <= stalled_s
            and not heard.activity.startswith(IDLE)
            for heard in self._heard.values()
        )

    def _begin_life(self, generator: str) -> None:
        self._lives[generator] = GeneratorReport()
        if (counted := self._counted.pop(generator, None)) is not None:  # it goes on
            self._add(counted, -1)
        while len(self._lives) > MAX_GENERATORS:
            silent = next(iter(self._lives))
            self._counted[silent] = self._lives[silent]
            self._end_life(silent)
        while len(self._counted) > 10 * MAX_GENERATORS:
            self._counted.popitem(last=False)

    def _end_life(self, generator: str) -> None:
        if (report := self._lives.pop(generator, None)) is not None:
            self._add(report, 1)

    def _add(self, report: GeneratorReport, times: int) -> None:
        sums = {name: value + times * getattr(report, name) for name, value in _fields(self._over).items()}
        self._over = GeneratorReport(**{name: max(0, min(LARGEST, value)) for name, value in sums.items()})

    def summary(self, now: float) -> dict[str, Any]:
        """The fields of `messages.Status` that speak of the roles."""
        lives = [self._over, *self._lives.values()]
        alive = sum(life.alive_s for life in lives)
        updates = sum(life.updates for life in lives)
        return {
            "generators": dict(sorted(self._lives.items())),
            "roles": self.roles(now),
            "generator_idle_share": sum(life.idle_s for life in lives) / alive if alive else 0.0,
            "weight_updates": updates,
            "weight_bytes": sum(life.update_bytes for life in lives),
            "fetched_bytes": sum(life.fetched_bytes for life in lives),
            "prepare_s_mean": sum(life.prepare_s for life in lives) / max(1, updates),
            "pause_s_mean": sum(life.pause_s for life in lives) / max(1, updates),
            "digest_checks": sum(life.digest_checks for life in lives),
            "digest_mismatches": sum(life.digest_mismatches for life in lives),
            "abandoned_scores": sum(life.abandoned_scores for life in lives),
        }

    def starts(self, now: float) -> str:
        """The states of the generators in words while not all have joined or some are not ready; else empty."""
        here = [role for name, role in self.roles(now).items() if name in self._lives]
        starting = [role for role in here if role.activity == STARTING]
        joined = [role for role in here if role.activity == JOINED]
        if here and not starting and not joined:
            return ""
        ready, total = len(here) - len(starting) - len(joined), max(self._expected, len(here))
        words = [f"{ready} of {total} generators ready"]
        if starting:
            words.append(f"{len(starting)} {STARTING} for {max(role.activity_s for role in starting):.0f} s")
        if joined:
            words.append(f"{len(joined)} {JOINED}")
        if total > len(here):
            words.append(f"{total - len(here)} not here yet")
        return ", ".join(words)

    def long_waits(self, now: float, told: str = "waiting") -> str:
        """Who has not been heard of, and who has been doing something for long, in words; empty if nobody. `told`: an activity
        that has been told of already."""
        return name_long_waits(self.roles(now), told)


def name_long_waits(roles: dict[str, RoleState], told: str = "waiting") -> str:
    silent = {name: role for name, role in roles.items() if role.last_heard_s > SILENT_S}
    busy = {
        name: role
        for name, role in roles.items()
        if name not in silent and role.activity_s > LONG_S and not role.activity.startswith((*IDLE, told))
    }
    words = [
        f"{name}: not heard of for {role.last_heard_s:.0f} s (then: {role.activity})"
        for name, role in sorted(silent.items(), key=lambda item: -item[1].last_heard_s)
    ] + [
        f"{name}: {role.activity} for {role.activity_s:.0f} s"
        for name, role in sorted(busy.items(), key=lambda item: -item[1].activity_s)
    ]
    more = [f"{len(words) - MAX_NAMED} more"] if len(words) > MAX_NAMED else []
    return "; ".join(words[:MAX_NAMED] + more)


def _fields(report: GeneratorReport) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(report).items() if name != "version"}
