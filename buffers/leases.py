"""Leases: who may make which group, for which step, and what becomes of each attempt.

An open group's life:

    opened ──lease──▶ leased ──accept──▶ complete (`buffers.history`) ──▶ trained, up to `max_uses` times
      ▲                 │  ▲
      │      expire, fail  lease
      │                 ▼  │
      │                lost ──max_attempts──▶ rejected (failed), quarantined
      └── a fresh group takes a freed place and inherits its due step

Each lease has its own fate on the ledger: it is in flight until its group is trained, or until it loses.
Progress keeps a lease: heartbeats renew those that a generator has begun, and the others for `BEGIN_S` only.
It gets only leases that it can begin with the version that it holds, or soon.
Times are seconds on any monotonic clock, passed in.
"""

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from buffers import events as e
from buffers.attempts import BEGIN_S, Attempt, Attempts, name_holders
from buffers.groups import GroupRecord
from buffers.history import History
from buffers.ledger import Ledger
from buffers.messages import Lease
from buffers.places import Places
from buffers.pool import GroupPool
from buffers.staleness import is_admitted, min_version
from buffers.supply import PromptSupply
from buffers.terms import Terms
from configs.staleness import OnLate


@dataclass(slots=True)
class Quarantine:
    """Groups that failed for good."""

    total: int = 0
    last: dict[int, str] = field(default_factory=dict)
    """The errors of the last ten, by group. The log has all of them."""

    def add_group(self, group: int, error: str) -> None:
        self.total += 1
        self.last[group] = error
        if len(self.last) > 10:
            del self.last[next(iter(self.last))]


LEAST_BEGIN_S = 0.2
"""Seconds that every generator has for that, however fast versions come."""
MAX_PUBLISHED = 64
"""Newest versions of which the time is known."""


class Leases:
    """Open groups and the attempts at them. Pure logic: no sockets, no clock, no files.

    Every change is told to `note` as an event.
    """

    def __init__(
        self,
        terms: Terms,
        places: Places,
        pool: GroupPool,
        supply: PromptSupply,
        history: History,
        ledger: Ledger,
        lease_ids: Iterator[int],
        note: Callable[[e.AnyEvent], None],
    ) -> None:
        self.terms = terms
        self.admission_lag = terms.max_versions
        """Groups are leased this many versions ahead of the newest one: `max_versions` or less."""
        self.attempts = Attempts(ledger)
        self.open_groups: dict[int, GroupRecord] = {}
        """Groups that are leased or lost, and not complete, by number."""
        self.next_group = 0
        """The number of the next fresh group."""
        self.quarantine = Quarantine()
        self._places, self._pool, self._history, self._ledger = places, pool, history, ledger
        self._supply = supply
        self._lease_ids, self._note = lease_ids, note
        self._published_at: OrderedDict[int, float] = OrderedDict()
        """When the newest versions were published, oldest first."""
        self._follow_s = BEGIN_S
        """Seconds within which a generator that follows the learner has taken up a version."""
        self._lost: list[tuple[int, int]] = []
        """Heap of (due step, number) of groups without an attempt.

        Some of them may be leased again or gone meanwhile.
        """

    # ---- giving leases

    def lease_next(self, generator: str, now: float, held: int | None = None) -> Lease | None:
        """Leases the group that falls due first; None when admission, a budget or the end of the run
        forbids it, while all prompts of a curriculum are under way, and to a generator that cannot begin it.

        `held` is the version that the generator holds; None: any that is needed.
        """
        due, is_lost = self._next_opening()
        if due >= self.terms.steps or self._history.version < 0:
            return None
        if not is_admitted(due, self._history.version, self.admission_lag):
            return None
        if held is not None and not self.can_begin(due, held, now):
            return None
        if due > self._history.next_step and self.name_reached_budget() is not None:
            return None
        number = self._lost[0][1] if is_lost else self.next_group
        if is_lost:
            prompt: int | None = self.open_groups[number].prompt
        else:
            is_idle = not self.attempts.under_way
            prompt = self._supply.curriculum.choose_prompt(number, may_repeat=is_idle)
        if prompt is None:
            return None
        lease_id = next(self._lease_ids)
        self.grant_lease(lease_id, number, due, generator, now, prompt)
        self._note(e.Leased(lease_id, number, due, generator, time.time(), prompt))
        return Lease(
            id=lease_id,
            split="train",
            task=self.terms.task,
            index=prompt,
            seed=self.terms.seed,
            group=number,
            due=due,
            min_version=min_version(due, self.admission_lag),
            num_samples=self.terms.samples_per_prompt,
        )

    def note_published(self, version: int, now: float) -> None:
        """Notes when a version was published, or when this life of the buffer has begun with it."""
        while self._published_at and next(reversed(self._published_at)) >= version:
            self._published_at.popitem()  # of a life of the learner before a rewind
        self._published_at[version] = now
        if len(self._published_at) > MAX_PUBLISHED:
            self._published_at.popitem(last=False)
        num_intervals = len(self._published_at) - 1
        if num_intervals:
            interval_s = (now - next(iter(self._published_at.values()))) / num_intervals
            self._follow_s = min(BEGIN_S, max(LEAST_BEGIN_S, interval_s / 2))
        else:
            self._follow_s = BEGIN_S

    def can_begin(self, due: int, held: int, now: float) -> bool:
        """True for a generator that holds the oldest version that may begin a group due at this step, or
        that follows the learner. A slower one would hold the step."""
        return held >= min(min_version(due, self.admission_lag), self.find_last_follower(now))

    def find_last_follower(self, now: float) -> int:
        """Returns the oldest version whose holder follows the learner: no version after it is older than half
        the time between two versions, and than `BEGIN_S`."""
        published = reversed(self._published_at.items())
        return next((version for version, at in published if now - at > self._follow_s), -1)

    @property
    def next_floor(self) -> int:
        """Oldest version that may begin the group that is leased next."""
        return min_version(self._next_opening()[0], self.admission_lag)

    @property
    def has_opening_at_hand(self) -> bool:
        """True when a group of the step that is trained next may be leased."""
        due, _ = self._next_opening()
        return due <= self._history.next_step

    def grant_lease(
        self, lease_id: int, number: int, due: int, generator: str, now: float, prompt: int = -1
    ) -> None:
        """Books that a generator has a lease of a group, fresh or lost. A fresh one asks `prompt`; -1 in a
        journal of before, whose prompts the group's number tells."""
        if number not in self.open_groups:
            self._places.take_place(due)
            self.next_group = number + 1
            self.open_groups[number] = GroupRecord(due, self._supply.start_group(number, prompt))
        self.open_groups[number].attempts.add(lease_id)
        self.attempts.start_attempt(Attempt(lease_id, number, generator, now + self.terms.lease_s, now))

    def _next_opening(self) -> tuple[int, bool]:
        """Returns (due step, whether its group was lost) of the place that is leased next."""
        while self._lost and not self._is_lost(self._lost[0][1]):
            heapq.heappop(self._lost)
        due, _ = self._places.next_opening()
        return (self._lost[0][0], True) if self._lost and self._lost[0][0] <= due else (due, False)

    def _lacks_prompt(self) -> bool:
        """True where a fresh group is next, and all prompts of the curriculum are under way."""
        _, is_lost = self._next_opening()
        return not is_lost and self._supply.curriculum.choose_prompt(self.next_group) is None

    def _is_lost(self, number: int) -> bool:
        return number in self.open_groups and not self.open_groups[number].attempts

    def find_lost_groups(self) -> None:
        """Fills the heap of lost groups anew. To be called when `open_groups` was filled from a state."""
        groups = self.open_groups.items()
        self._lost = sorted((group.due, number) for number, group in groups if not group.attempts)

    def count_openings(self) -> int:
        """Returns how many leases there are to be had at most. `lease_next` may stop before."""
        if self._history.version < 0:
            return 0
        last = min(self._history.version + self.admission_lag, self.terms.steps - 1)
        openings = self._places.num_open(last) + len(self._lost)
        if self.terms.max_groups is None:
            return openings
        return min(openings, max(1, self.terms.max_groups - self._num_groups_held))

    @property
    def _num_groups_held(self) -> int:
        """Number of complete groups and of attempts under way, which `buffer.max_groups` bounds."""
        return len(self._pool.groups) + len(self.attempts.under_way)

    @property
    def has_opening(self) -> bool:
        """True when `lease_next` has a lease for a generator that can begin it."""
        due, _ = self._next_opening()
        is_held_back = due > self._history.next_step and self.name_reached_budget() is not None
        if is_held_back or not self.count_openings():
            return False
        return not self.attempts.under_way or not self._lacks_prompt()

    def name_reached_budget(self) -> str | None:
        """Returns words for the budget that holds new leases back; None when none does.

        The groups of the step at hand are leased all the same, or the run would stand still.
        """
        for name, amount, limit in (
            ("max_groups", self._num_groups_held, self.terms.max_groups),
            ("max_tokens", self._ledger.tokens["in_flight"], self.terms.max_tokens),
            ("max_bytes", self._pool.num_bytes, self.terms.max_bytes),
        ):
            if limit is not None and amount >= limit:
                return f"buffer.{name} is reached ({amount:,} of {limit:,})"
        return None

    # ---- attempts under way

    def take_back_overdue(self, generator: str, overdue: Sequence[int]) -> list[tuple[int, str]]:
        """Takes back leases that a generator could not begin; returns (group, outcome) of each, as
        `fail_lease` has it. They do not count against `max_attempts`."""
        held = [self.attempts.under_way.get(lease_id) for lease_id in overdue]
        late = [attempt for attempt in held if attempt is not None and attempt.generator == generator]
        why = f"{generator} could not begin it"
        return [(attempt.group, self._lose_attempt(attempt, why, False)) for attempt in late]

    def renew_leases(self, generator: str, progress: dict[int, int], now: float) -> list[int]:
        """Renews leases and notes their progress; returns those that are not the generator's any more.

        `progress` maps leases to their sampled tokens.
        """
        revoked = []
        for lease_id, num_tokens in progress.items():
            attempt = self.attempts.find_attempt(lease_id)
            if lease_id not in self.attempts.under_way:
                revoked.append(lease_id)
            if attempt is None or attempt.generator != generator:
                continue  # nobody speaks for another
            if attempt.fate == "in_flight":
                attempt.deadline = now + self.terms.lease_s
            if attempt.fate != "accepted":
                self.attempts.report_tokens(attempt, num_tokens)
        return revoked

    def find_open_group(self, lease_id: int) -> tuple[int, int] | None:
        """Returns (number, due step) of the group that a lease may still complete; None when there is
        none."""
        attempt = self.attempts.find_attempt(lease_id)
        group = self.open_groups.get(attempt.group) if attempt is not None else None
        return (attempt.group, group.due) if attempt is not None and group is not None else None

    def is_too_new(self, due: int, newest: int) -> bool:
        """True for a group that a version newer than its step has sampled, unless late tokens are masked.

        Such a group was made anew for a step that was undone, by a generator that still holds a version of an
        earlier life of the learner (`staleness`, Rewind).
        """
        return newest > due and self.terms.on_late is not OnLate.mask

    # ---- ends of attempts

    def accept_group(self, content: e.Accepted) -> None:
        """Books the first complete attempt at a group. Other attempts at it become duplicates.

        The lease must be one for which `find_open_group` returns the group.
        """
        attempt = self.attempts.find_attempt(content.lease)
        assert attempt is not None and attempt.group in self.open_groups, (
            f"lease {content.lease} has no open group"
        )
        group = self.open_groups.pop(attempt.group)
        self.attempts.accept_attempt(attempt, content.tokens)
        for other in group.attempts - {content.lease}:
            self.attempts.end_attempt(self.attempts.under_way[other], "duplicate")
        group.attempts.clear()
        self._history.complete_group(attempt.group, group, content)

    def count_duplicate(self, lease_id: int, num_tokens: int) -> None:
        """Books a complete group that comes too late: another attempt has completed it, or it was
        rejected."""
        attempt = self.attempts.find_attempt(lease_id)
        if attempt is None:
            self._ledger.count_tokens(num_tokens, "duplicate")
        elif attempt.fate == "accepted":
            return  # sent again because the receipt was lost
        else:
            num_tokens = self.attempts.report_tokens(attempt, num_tokens)
            if attempt.fate != "duplicate":
                self.attempts.end_attempt(attempt, "duplicate")
        self._note(e.Duplicate(lease=lease_id, tokens=num_tokens))

    def fail_lease(self, lease_id: int, num_tokens: int, error: str, *, counts: bool = True) -> str:
        """Books that a group could not be made. It is leased again, or quarantined after `max_attempts`
        failures.

        Returns `lost`, `quarantined`, or `over` when the lease had lost its group before. With `counts=False`
        the failure does not count against `max_attempts`.
        """
        attempt = self.attempts.under_way.get(lease_id)
        if attempt is not None:
            self.attempts.report_tokens(attempt, num_tokens)
            return self._lose_attempt(attempt, error, counts)
        ended = self.attempts.ended.get(lease_id)
        if ended is not None and ended.fate == "accepted":
            return "over"
        if ended is None:
            self._ledger.count_tokens(num_tokens, "failed")
        else:
            num_tokens = self.attempts.report_tokens(ended, num_tokens)
        self._note(e.Failed(lease=lease_id, tokens=num_tokens, error=error, counts=False, at=time.time()))
        return "over"

    def release_generator(self, generator: str, error: str | None) -> list[tuple[int, str]]:
        """Takes back what a generator holds; returns (group, outcome) of each lease, as `fail_lease` has it.

        `error` is None when the generator left in good order: then nothing counts against `max_attempts`.
        """
        held = [one for one in self.attempts.under_way.values() if one.generator == generator]
        why, counts = error or f"{generator} left", error is not None
        return [(attempt.group, self._lose_attempt(attempt, why, counts)) for attempt in held]

    def expire_leases(self, now: float) -> list[tuple[int, str]]:
        """Takes back leases whose deadline has passed; returns (group, outcome) of each, as `fail_lease`
        has it."""
        return [
            (attempt.group, self._lose_attempt(attempt, f"lease expired at {attempt.generator}", True))
            for attempt in self.attempts.pop_expired(now)
        ]

    def _lose_attempt(self, attempt: Attempt, error: str, counts: bool) -> str:
        self.attempts.end_attempt(attempt, "failed" if counts else "returned")
        self._note(e.Failed(attempt.lease, attempt.num_tokens, error, time.time(), counts))
        group = self.open_groups[attempt.group]
        group.attempts.discard(attempt.lease)
        group.num_failures += counts
        if group.num_failures >= self.terms.max_attempts and not group.attempts:
            self.quarantine.add_group(attempt.group, error)
            self.reject_open_group(attempt.group, "failed", error)
            return "quarantined"
        if not group.attempts:
            heapq.heappush(self._lost, (group.due, attempt.group))
        return "lost"

    def reject_open_group(self, number: int, reason: str, error: str = "", *, refill: bool = True) -> None:
        """A group that is not complete will not be made any more.

        With `refill` its place goes to a fresh group.
        """
        group = self.open_groups.pop(number)
        self._supply.drop_group(group.prompt)
        for lease_id in list(group.attempts):
            self.attempts.end_attempt(self.attempts.under_way[lease_id], reason)
        if refill:
            self._places.free_place(group.due)
        self._note(e.Rejected(number, reason, error, group.due, 0, time.time()))

    def cancel_stragglers(self, now: float) -> list[int]:
        """Under `cancel`, rejects groups that have held the step that the learner waits for too long;
        returns them. Groups of later steps hold it too where they have the prompts that it needs."""
        if self.terms.on_late is not OnLate.cancel or self._history.awaited is None:
            return []
        step, since = self._history.awaited
        assert self.terms.straggler_timeout_s is not None
        lacks_prompt = self._next_opening()[0] <= step and self._lacks_prompt()
        late = []
        for number, group in self.open_groups.items():
            if (group.due <= step or lacks_prompt) and group.attempts:
                leased_at = (self.attempts.under_way[lease].leased_at for lease in group.attempts)
                if now - max([since, *leased_at]) >= self.terms.straggler_timeout_s:
                    late.append(number)
        for number in late:
            self.reject_open_group(number, "cancelled")
        return late

    def revoke_beyond(self, step: int) -> None:
        """Takes back leases that version `step` does not admit.

        After a rewind to it, no version can reach their floor.
        """
        beyond = {
            number
            for number, group in self.open_groups.items()
            if not is_admitted(group.due, step, self.terms.max_versions)
        }
        for attempt in [one for one in self.attempts.under_way.values() if one.group in beyond]:
            self._lose_attempt(attempt, f"the learner went back to step {step}", False)
        for attempt in self.attempts.ended.values():
            if attempt.group in beyond:
                attempt.group = -1  # so that it cannot come in late

    def describe_limit(self) -> str | None:
        """Returns why a generator that asks for leases gets none; None where there are some to be had."""
        due, _ = self._next_opening()
        if (budget := self.name_reached_budget()) is not None:
            return budget
        if due >= self.terms.steps or not is_admitted(due, self._history.version, self.admission_lag):
            return "the staleness bound admits no more groups"
        return "all prompts of the curriculum are under way" if self._lacks_prompt() else None

    def describe_missing(self, step: int, nobody: str = "") -> str:
        """Returns a sentence that says who holds `step`.

        `nobody` says why no generator does, where that is known.
        """
        missing = [
            attempt
            for attempt in self.attempts.under_way.values()
            if attempt.group in self.open_groups and self.open_groups[attempt.group].due <= step
        ]
        takes_any = self.terms.on_late is OnLate.mask
        num_ready = sum(group.due <= step or takes_any for group in self._pool.groups.values())
        holders = name_holders(missing) if missing else nobody or "no generator holds a lease for it"
        return f"step {step} has {num_ready} of {self.terms.groups_per_step} groups; {holders}"
