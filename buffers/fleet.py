"""What the roles say of themselves: which are heard of and what they do; and totals over all generators and all their lives."""

from dataclasses import dataclass
from typing import Any

from buffers import messages as m
from buffers.heartbeat import HEARTBEAT_S

SILENT_S = 3 * HEARTBEAT_S
"""A role that has not been heard of for longer is named."""
LONG_S = 1.0
"""What a role has been doing for longer is named, unless it waits or samples."""
MAX_NAMED = 4


@dataclass(slots=True)
class Heard:
    """The last heartbeat of a role."""

    at: float
    activity: str
    since: float


class Fleet:
    def __init__(self) -> None:
        self._lives: dict[str, list[m.GeneratorReport]] = {}
        """The latest report of each life, by generator."""
        self._heard: dict[str, Heard] = {}
        """By role."""
        self._left: set[str] = set()
        """Generators whose last heartbeats may come after their farewell, which they say over another connection."""

    def join(self, generator: str) -> None:
        """A new life begins."""
        self._lives.setdefault(generator, []).append(m.GeneratorReport())
        self._left.discard(generator)

    def report(self, beat: m.Heartbeat, now: float) -> bool:
        """Takes in a generator's heartbeat; true if it has sampled since its last."""
        self.hear(beat.generator, beat.activity, beat.for_s, now)
        lives = self._lives.setdefault(beat.generator, [m.GeneratorReport()])
        moved = beat.report.sampled_tokens > lives[-1].sampled_tokens
        lives[-1] = beat.report
        return moved

    def hear(self, role: str, activity: str, for_s: float, now: float) -> None:
        """A heartbeat, at `now`."""
        if role not in self._left:
            self._heard[role] = Heard(now, activity, now - for_s)

    def leave(self, generator: str) -> None:
        """It is not heard of again before it joins again."""
        self.forget(generator)
        self._left.add(generator)

    def forget(self, role: str) -> None:
        """It has said farewell."""
        self._heard.pop(role, None)

    def roles(self, now: float) -> dict[str, m.RoleState]:
        return {
            role: m.RoleState(last_heard_s=now - heard.at, activity=heard.activity, for_s=now - heard.since)
            for role, heard in sorted(self._heard.items())
        }

    def summary(self, now: float) -> dict[str, Any]:
        """The fields of `messages.Status` that speak of the roles."""
        lives = [life for lives in self._lives.values() for life in lives]
        alive = sum(life.alive_s for life in lives)
        updates = sum(life.updates for life in lives)
        return {
            "generators": {name: lives[-1] for name, lives in self._lives.items()},
            "roles": self.roles(now),
            "generator_idle": sum(life.idle_s for life in lives) / alive if alive else 0.0,
            "weight_updates": updates,
            "weight_bytes": sum(life.update_bytes for life in lives),
            "fetched_bytes": sum(life.fetched_bytes for life in lives),
            "prepare_s_mean": sum(life.prepare_s for life in lives) / max(1, updates),
            "pause_s_mean": sum(life.pause_s for life in lives) / max(1, updates),
            "digest_checks": sum(life.digest_checks for life in lives),
            "digest_mismatches": sum(life.digest_mismatches for life in lives),
            "abandoned_scores": sum(life.abandoned_scores for life in lives),
        }

    def long_waits(self, now: float) -> str:
        """Who has not been heard of, and who has been doing something for long, in words; empty if nobody."""
        return name_long_waits(self.roles(now))


def name_long_waits(roles: dict[str, m.RoleState]) -> str:
    silent = {name: role for name, role in roles.items() if role.last_heard_s > SILENT_S}
    busy = {
        name: role
        for name, role in roles.items()
        if name not in silent and role.for_s > LONG_S and not role.activity.startswith(("waiting", "sampling"))
    }
    words = [
        f"{name}: not heard of for {role.last_heard_s:.0f} s (then: {role.activity})"
        for name, role in sorted(silent.items(), key=lambda item: -item[1].last_heard_s)
    ] + [
        f"{name}: {role.activity} for {role.for_s:.0f} s"
        for name, role in sorted(busy.items(), key=lambda item: -item[1].for_s)
    ]
    more = [f"{len(words) - MAX_NAMED} more"] if len(words) > MAX_NAMED else []
    return "; ".join(words[:MAX_NAMED] + more)
