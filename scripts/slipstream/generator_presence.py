"""Lines for the console about generators that join, leave, fall silent, come back or start again."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from buffers.role_registry import FORGOTTEN_S, name_some
from buffers.run_status import RunStatus

MISSING_S = 5.0
"""Seconds without a heartbeat after which a generator is named. On a busy host one may come a second late."""


@dataclass(frozen=True, slots=True)
class Presence:
    """A generator as it was when it was last looked at."""

    heard_at: float
    """Time of its last heartbeat in seconds."""
    is_missing: bool
    alive_s: float
    """Seconds since its life began, as it has reported."""


class GeneratorPresence:
    """Compares the status of a run with the one before. Generators of which the same is to be said share a
    line, because there may be a thousand."""

    def __init__(self, expected: Collection[str]) -> None:
        """`expected` are the run's own generators: nothing is said when they first join."""
        self._expected = set(expected)
        self._seen: dict[str, Presence] = {}

    def expect_again(self) -> None:
        """Another life of the buffer knows no generator before it has heard of it: nothing is said of those
        that were there."""
        self._expected |= self._seen.keys()
        self._seen.clear()

    def describe_changes(self, status: RunStatus, now: float) -> list[str]:
        """Returns a line for each kind of change since the last call. `now` is in seconds, on any clock."""
        changes: dict[str, list[str]] = defaultdict(list)
        before, self._seen = self._seen, {}
        for name, report in status.generators.items():
            if (role := status.roles.get(name)) is None:
                continue
            is_missing = role.last_heard_s > MISSING_S
            seen = self._seen[name] = Presence(now - role.last_heard_s, is_missing, report.alive_s)
            known = before.pop(name, None)
            if known is None:
                if name not in self._expected:
                    changes["joined"].append(name)
                self._expected.discard(name)
            elif is_missing and not known.is_missing:
                changes["not heard of"].append(
                    f"{name} (for {role.last_heard_s:.0f} s; then: {role.activity})"
                )
            elif known.is_missing and not is_missing:
                changes["heard of again"].append(f"{name} (after {seen.heard_at - known.heard_at:.0f} s)")
            elif seen.alive_s < known.alive_s:
                changes["started again"].append(name)
        for name, seen in before.items():
            changes["given up" if now - seen.heard_at > FORGOTTEN_S else "left"].append(name)
        return [f"generators {what}: {name_some(names)}" for what, names in changes.items() if names]
