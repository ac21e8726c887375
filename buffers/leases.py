"""The lease book: who may make which group, for which step, and what became of it. Pure logic: no sockets, no clock.

A group's life:

    opened ──lease──▶ leased ──submit──▶ complete ──consume──▶ trained
      ▲                 │  ▲                │
      │      expire, fail  lease            └──reject(zero_variance)──▶ rejected: its place is freed
      │                 ▼  │
      │                lost ──max_attempts──▶ rejected (failed), quarantined
      └── a fresh group takes a freed place and inherits its due step

Each lease has its own fate on the ledger: in flight until its group is trained or it loses (failed, duplicate, cancelled,
zero_variance). Times are seconds on any monotonic clock, passed in.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from buffers.ledger import Ledger
from buffers.messages import Lease
from buffers.staleness import admits, floor
from configs.schema import OnLate


@dataclass(slots=True)
class Attempt:
    """One lease of one group."""

    group: int
    generator: str
    deadline: float
    leased_at: float
    num_tokens: int = 0
    fate: str = "in_flight"


@dataclass(slots=True)
class Group:
    """A group that is neither trained nor rejected."""

    due: int
    attempts: set[int] = field(default_factory=set)
    """Leases under way."""
    accepted: int | None = None
    """The lease whose submission won."""
    num_failures: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the book is kept by; see `configs.schema` for the fields of the same names."""

    groups_per_step: int
    steps: int
    max_versions: int
    on_late: OnLate
    samples_per_prompt: int
    lease_s: float
    max_attempts: int
    straggler_timeout_s: float | None
    task: str
    seed: int


class LeaseBook:
    def __init__(self, terms: Terms, ledger: Ledger, lease_ids: Iterator[int] | None = None) -> None:
        self.terms = terms
        self.ledger = ledger
        self.version = -1
        """Newest published version."""
        self.groups: dict[int, Group] = {}
        self.quarantined: dict[int, str] = {}
        self.num_consumed = 0
        self.trained_twice = 0
        self._attempts: dict[int, Attempt] = {}
        self._lease_ids = itertools.count() if lease_ids is None else lease_ids
        self._next_group = 0
        self._next_place = 0
        self._lost: list[tuple[int, int]] = []  # heap of (due, group)
        self._freed: list[int] = []  # heap of due
        self._unused: list[int] = []  # heap of group numbers that a restart found leased but not complete
        self._complete: defaultdict[int, set[int]] = defaultdict(set)  # by due
        self._consumed: set[int] = set()
        self._scripted: dict[int, list[int]] = {}
        self._held: tuple[int, float] | None = None  # the step the learner waits for, since when

    # ---- generators

    def lease(self, generator: str, now: float) -> Lease | None:
        """The next group that may be given out, lowest due step first; None when admission or the run's end forbids."""
        opening = self._open_group()
        if opening is None:
            return None
        number, group = opening
        lease_id = next(self._lease_ids)
        group.attempts.add(lease_id)
        self._attempts[lease_id] = Attempt(number, generator, now + self.terms.lease_s, now)
        self.ledger.lease()
        return Lease(
            id=lease_id,
            split="train",
            task=self.terms.task,
            index=number,
            seed=self.terms.seed,
            group=number,
            due=group.due,
            floor=floor(group.due, self.terms.max_versions),
            num_samples=self.terms.samples_per_prompt,
        )

    def _open_group(self) -> tuple[int, Group] | None:
        while self._lost and self._lost[0][1] not in self.groups:
            heapq.heappop(self._lost)  # completed or rejected since it was lost
        fresh = self._next_place // self.terms.groups_per_step
        candidates = [
            (self._lost[0][0] if self._lost else self.terms.steps, "lost"),
            (self._freed[0] if self._freed else self.terms.steps, "freed"),
            (fresh, "fresh"),
        ]
        due, source = min(candidates, key=lambda candidate: candidate[0])
        if self.version < 0 or due >= self.terms.steps or not admits(due, self.version, self.terms.max_versions):
            return None
        if source == "lost":
            _, number = heapq.heappop(self._lost)
            if self.groups[number].attempts or self.groups[number].accepted is not None:
                return self._open_group()
            return number, self.groups[number]
        if source == "freed":
            heapq.heappop(self._freed)
        else:
            self._next_place += 1
        number = heapq.heappop(self._unused) if self._unused else self._next_group
        self._next_group = max(self._next_group, number + 1)
        self.groups[number] = Group(due)
        return number, self.groups[number]

    def heartbeat(self, generator: str, progress: dict[int, int], now: float) -> list[int]:
        """Renews the leases named and notes how far they are; returns those that are no longer the generator's."""
        revoked = []
        for lease_id, num_tokens in progress.items():
            attempt = self._attempts.get(lease_id)
            if attempt is None:
                revoked.append(lease_id)
                continue
            self._note(attempt, num_tokens)
            attempt.deadline = now + self.terms.lease_s
            if attempt.fate != "in_flight":
                revoked.append(lease_id)
        return revoked

    def lease_of(self, lease_id: int) -> tuple[int, int] | None:
        """(group, due) of a lease that could still be accepted."""
        attempt = self._attempts.get(lease_id)
        group = self.groups.get(attempt.group) if attempt else None
        return (attempt.group, group.due) if attempt and group else None

    def submit(self, lease_id: int, num_tokens: int) -> str:
        """`accepted` for the first complete attempt of a group (and when it is sent again), else `duplicate`."""
        attempt = self._attempts.get(lease_id)
        if attempt is None:
            self.ledger.generate(num_tokens, "duplicate")
            return "duplicate"
        self._note(attempt, num_tokens)
        group = self.groups.get(attempt.group)
        if group is None or group.accepted not in (None, lease_id):
            self._settle(attempt, "duplicate")
            del self._attempts[lease_id]
            return "duplicate"
        if group.accepted is None:
            self._settle(attempt, "in_flight")
            group.accepted = lease_id
            self._complete[group.due].add(attempt.group)
            for other in group.attempts - {lease_id}:
                self._settle(self._attempts[other], "duplicate")
            group.attempts.clear()
        return "accepted"

    def is_complete(self, lease_id: int) -> bool:
        """Has this very lease been accepted already?"""
        attempt = self._attempts.get(lease_id)
        group = self.groups.get(attempt.group) if attempt else None
        return group is not None and group.accepted == lease_id

    def fail(self, lease_id: int, num_tokens: int, error: str) -> str:
        """The group could not be made: it is given out again, or quarantined after `max_attempts`.

        Returns `lost`, `quarantined`, or `over` when the lease had lost its group before.
        """
        attempt = self._attempts.get(lease_id)
        if attempt is None:
            self.ledger.generate(num_tokens, "failed")
            return "over"
        self._note(attempt, num_tokens)
        del self._attempts[lease_id]
        if attempt.fate != "in_flight":
            return "over"
        return self._lose(lease_id, attempt, error)

    def release(self, generator: str) -> list[tuple[int, str]]:
        """Takes back what a generator held that has begun a new life; returns (group, outcome) for each."""
        for attempt in self._attempts.values():
            if attempt.generator == generator:
                attempt.deadline = float("-inf")
        return self.expire(float("-inf"))

    def expire(self, now: float) -> list[tuple[int, str]]:
        """Takes back leases whose deadline has passed; returns (group, outcome) for each."""
        expired = [
            (lease_id, attempt)
            for lease_id, attempt in self._attempts.items()
            if attempt.fate == "in_flight" and attempt.deadline <= now and not self.is_complete(lease_id)
        ]
        return [
            (attempt.group, self._lose(lease_id, attempt, f"lease expired at {attempt.generator}"))
            for lease_id, attempt in expired
        ]

    def _lose(self, lease_id: int, attempt: Attempt, error: str) -> str:
        self._settle(attempt, "failed")
        group = self.groups[attempt.group]
        group.attempts.discard(lease_id)
        group.num_failures += 1
        if group.num_failures >= self.terms.max_attempts:
            self.quarantined[attempt.group] = error
            self.reject(attempt.group, "failed")
            return "quarantined"
        heapq.heappush(self._lost, (group.due, attempt.group))
        return "lost"

    def _note(self, attempt: Attempt, num_tokens: int) -> None:
        self.ledger.generate(num_tokens - attempt.num_tokens, attempt.fate)
        attempt.num_tokens = num_tokens

    def _settle(self, attempt: Attempt, fate: str) -> None:
        self.ledger.settle(attempt.fate, fate, attempt.num_tokens)
        attempt.fate = fate

    # ---- learner

    def publish(self, version: int) -> None:
        assert version > self.version, f"version {version} was published after {self.version}"
        self.version = version

    def ready(self, step: int, now: float) -> list[int] | None:
        """Groups that step `step` trains, in the order of their numbers; None while some are missing."""
        groups = self._choose(step)
        if groups is not None:
            self._held = None
        elif self._held is None or self._held[0] != step:
            self._held = (step, now)
        return groups

    def _choose(self, step: int) -> list[int] | None:
        if step in self._scripted:
            return self._scripted[step]
        if self.terms.on_late is OnLate.mask:
            complete = sorted((due, number) for due, numbers in self._complete.items() for number in numbers)
            chosen = [number for _, number in complete[: self.terms.groups_per_step]]
        else:
            chosen = list(self._complete[step])
        return sorted(chosen) if len(chosen) == self.terms.groups_per_step else None

    def cancel_stragglers(self, now: float) -> list[int]:
        """`cancel` only: rejects groups that have held the step being waited for too long; returns them."""
        if self.terms.on_late is not OnLate.cancel or self._held is None:
            return []
        step, since = self._held
        assert self.terms.straggler_timeout_s is not None
        late = [
            number
            for number, group in self.groups.items()
            if group.due == step and group.accepted is None and group.attempts
            and now - max([since, *(self._attempts[a].leased_at for a in group.attempts)]) >= self.terms.straggler_timeout_s
        ]  # fmt: skip
        for number in late:
            self.reject(number, "cancelled")
        return late

    def reject(self, number: int, reason: str) -> None:
        """A group will not be trained. Its place goes to a fresh one."""
        group = self.groups.pop(number)
        accepted = () if group.accepted is None else (group.accepted,)
        for lease_id in (*group.attempts, *accepted):
            self._settle(self._attempts[lease_id], reason)
        for lease_id in accepted:
            del self._attempts[lease_id]
        self._complete[group.due].discard(number)
        heapq.heappush(self._freed, group.due)

    def consume(self, step: int, counts: dict[int, tuple[int, int]]) -> None:
        """Step `step` trained these groups; `counts` gives (tokens trained, tokens excluded) of each."""
        excluded = "masked" if self.terms.on_late is OnLate.mask else "late"
        for number, (num_trained, num_excluded) in counts.items():
            group = self.groups.pop(number)
            assert group.accepted is not None
            del self._attempts[group.accepted]
            self._complete[group.due].discard(number)
            self.ledger.train(num_trained, num_excluded, excluded)
            self.trained_twice += number in self._consumed
            self._consumed.add(number)
        self.num_consumed = step + 1
        self._complete.pop(step, None) if self.terms.on_late is not OnLate.mask else None
        self._scripted.pop(step, None)

    def waiting_for(self, step: int, now: float) -> str:
        """Who holds step `step`, in a sentence."""
        missing = sorted(
            (attempt.generator, attempt.group)
            for attempt in self._attempts.values()
            if attempt.fate == "in_flight"
            and (group := self.groups.get(attempt.group)) is not None
            and group.accepted is None
            and group.due <= step
        )
        num_complete = sum(
            len(v) for due, v in self._complete.items() if due == step or self.terms.on_late is OnLate.mask
        )
        have = f"step {step} has {num_complete} of {self.terms.groups_per_step} groups"
        if not missing:
            return f"{have}; no generator holds a lease for it"
        holders = ", ".join(
            f"{name} ({sum(1 for n, _ in missing if n == name)})" for name in sorted({n for n, _ in missing})
        )
        return f"{have}; leased to {holders}, the oldest is group {min(g for _, g in missing)}"

    # ---- restart

    def restore(
        self,
        step: int,
        complete: Iterable[tuple[int, int, int]],
        consumed: dict[int, list[int]],
        rejected: Iterable[int],
    ) -> None:
        """Takes up a run at the checkpoint of step `step`.

        `complete` holds (group, due, sampled tokens) of every group in the journal that was not rejected, `consumed` the
        groups of every step that was trained, `rejected` all rejected groups. Steps from `step` on are handed the same
        groups again where the step log names them.
        """
        done = {number for k, numbers in consumed.items() if k < step for number in numbers}
        self._scripted = {k: sorted(numbers) for k, numbers in consumed.items() if k >= step}
        self._consumed, self.num_consumed = done, step
        filled: defaultdict[int, int] = defaultdict(int)
        used = set(rejected)
        for number, due, num_tokens in complete:
            used.add(number)
            filled[due] += 1
            if number in done:
                continue
            lease_id = next(self._lease_ids)
            self.groups[number] = Group(due, accepted=lease_id)
            self._attempts[lease_id] = Attempt(number, "journal", float("inf"), 0.0, num_tokens)
            self._complete[due].add(number)
            self.ledger.lease()
            self.ledger.generate(num_tokens, "in_flight")
        self._next_group = max(used, default=-1) + 1
        self._unused = sorted(set(range(self._next_group)) - used)
        opened = max(filled, default=-1) + 1
        self._next_place = opened * self.terms.groups_per_step
        self._freed = sorted(d for d in range(opened) for _ in range(self.terms.groups_per_step - filled[d]))
