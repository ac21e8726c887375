"""Attempts: each is one lease of one group.

This module knows until when a lease runs, and the fate of its tokens.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from buffers.ledger import Ledger
from buffers.state import AttemptState

MAX_ENDED = 10_000
"""Ended attempts that are remembered, so that the buffer understands what their generators still say of
them."""
BEGIN_S = 5.0
"""Most seconds in which a generator is to take up a published version. One that has not done so gets only
leases that it can begin with the version that it holds, and hands back those that it has not begun."""


@dataclass(slots=True)
class Attempt:
    """One lease of one group."""

    lease: int
    group: int
    """Number of the group; -1 once the group may not be accepted from this lease any more."""
    generator: str
    deadline: float
    """When the lease expires, in seconds on the buffer's clock. Heartbeats move it on."""
    leased_at: float
    """When the lease was given, in seconds on the buffer's clock."""
    num_tokens: int = 0
    """Sampled tokens that the buffer has heard of."""
    fate: str = "in_flight"
    """Fate on the ledger, or `accepted` once the group is complete by this attempt."""


class Attempts:
    """Attempts under way, and the newest `MAX_ENDED` of those that have ended.

    The ledger follows every change.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.under_way: dict[int, Attempt] = {}
        """By lease."""
        self.ended: OrderedDict[int, Attempt] = OrderedDict()
        """By lease, oldest first."""
        self._deadlines = Deadlines(self.under_way)

    def start_attempt(self, attempt: Attempt) -> None:
        self.under_way[attempt.lease] = attempt
        self._deadlines.add_deadline(attempt)
        self._ledger.count_lease()

    def find_attempt(self, lease: int) -> Attempt | None:
        """Returns the attempt of a lease; None when the lease is not known, or not known any more."""
        return self.under_way.get(lease) or self.ended.get(lease)

    def is_accepted(self, lease: int) -> bool:
        """True when the group of this very lease has been accepted."""
        return lease in self.ended and self.ended[lease].fate == "accepted"

    def report_tokens(self, attempt: Attempt, num_tokens: int) -> int:
        """Notes how many tokens an attempt has sampled. A late report never takes back a higher number.

        Returns the number that is known now.
        """
        self._ledger.count_tokens(max(0, num_tokens - attempt.num_tokens), attempt.fate)
        attempt.num_tokens = max(num_tokens, attempt.num_tokens)
        return attempt.num_tokens

    def accept_attempt(self, attempt: Attempt, num_tokens: int) -> None:
        """The attempt has completed its group. Its tokens are in flight until a step trains them."""
        self._ledger.count_tokens(num_tokens - attempt.num_tokens, attempt.fate)
        attempt.num_tokens = num_tokens
        # An attempt that had expired or failed may still be the first to complete its group.
        if attempt.fate != "in_flight":
            self._ledger.change_fate(attempt.fate, "in_flight", num_tokens)
        self._move_to_ended(attempt, "accepted")

    def end_attempt(self, attempt: Attempt, fate: str) -> None:
        """The attempt is over and will not be trained."""
        self._ledger.change_fate(attempt.fate, fate, attempt.num_tokens)
        self._move_to_ended(attempt, fate)

    def _move_to_ended(self, attempt: Attempt, fate: str) -> None:
        attempt.fate = fate
        self.under_way.pop(attempt.lease, None)
        self.ended[attempt.lease] = attempt
        while len(self.ended) > MAX_ENDED:
            self.ended.popitem(last=False)

    def extend_deadlines(self, seconds: float) -> None:
        for attempt in self.under_way.values():
            attempt.deadline += seconds

    def pop_expired(self, now: float) -> list[Attempt]:
        """Returns the attempts under way whose deadline has passed, each once. The caller must end them."""
        return self._deadlines.pop_passed(now)

    def restore_attempts(
        self, under_way: Sequence[AttemptState], ended: Sequence[AttemptState], now: float, lease_s: float
    ) -> None:
        """Fills an empty object from a state. Leases run for a whole `lease_s` again."""
        for state in under_way:
            attempt = _restore_attempt(state, now, lease_s)
            self.under_way[attempt.lease] = attempt
            self._deadlines.add_deadline(attempt)
        self.ended.update((state.lease, _restore_attempt(state, now, 0.0)) for state in ended)


class Deadlines:
    """Finds the attempts whose deadline has passed without looking at all of them."""

    def __init__(self, under_way: Mapping[int, Attempt]) -> None:
        """`under_way` has the attempts by lease. Their deadlines may move on at any time."""
        self._under_way = under_way
        self._heap: list[tuple[float, int]] = []

    def add_deadline(self, attempt: Attempt) -> None:
        heapq.heappush(self._heap, (attempt.deadline, attempt.lease))
        # Ended leases stay in the heap until they come up. The heap is cleaned when most of its entries are
        # such.
        if len(self._heap) > 2 * len(self._under_way) + 1000:
            self._heap = [entry for entry in self._heap if entry[1] in self._under_way]
            heapq.heapify(self._heap)

    def pop_passed(self, now: float) -> list[Attempt]:
        """Returns the attempts whose deadline has passed, each once."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            attempt = self._under_way.get(heapq.heappop(self._heap)[1])
            if attempt is not None and attempt.deadline > now:
                heapq.heappush(self._heap, (attempt.deadline, attempt.lease))
            elif attempt is not None:
                passed.append(attempt)
        return passed


def export_attempt(attempt: Attempt) -> AttemptState:
    return AttemptState(attempt.lease, attempt.group, attempt.generator, attempt.num_tokens, attempt.fate)


def _restore_attempt(state: AttemptState, now: float, lease_s: float) -> Attempt:
    return Attempt(
        state.lease, state.group, state.generator, now + lease_s, now, state.num_tokens, state.fate
    )


def name_holders(missing: Sequence[Attempt]) -> str:
    """Returns words that name who holds these leases (at least one)."""
    holders = Counter(attempt.generator for attempt in missing)
    named = ", ".join(f"{name} ({count})" for name, count in sorted(holders.items())[:8])
    more = f" and {len(holders) - 8} more" if len(holders) > 8 else ""
    return f"leased to {named}{more}, the oldest is group {min(attempt.group for attempt in missing)}"
