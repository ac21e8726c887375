"""The lease book: who may make which group, for which step, and what became of it. Pure logic: no sockets, no clock, no files.

A group's life:

    opened ──lease──▶ leased ──submit──▶ complete ──consume──▶ trained, up to `max_uses` times
      ▲                 │  ▲                │
      │      expire, fail  lease            └──reject(zero_variance, unsampled)──▶ rejected
      │                 ▼  │
      │                lost ──max_attempts──▶ rejected (failed), quarantined
      └── a fresh group takes a freed place and inherits its due step

Each lease has its own fate on the ledger: in flight until its group is trained or it loses (failed, duplicate, cancelled,
zero_variance, unsampled, damaged). Every change is told as an event; `buffers.book_state` makes the same book of the same
events, or of a state.
Times are seconds on any monotonic clock, passed in.
"""

import heapq
import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator

import numpy as np

from buffers import events as e
from buffers.groups import Attempt, Deadlines, Group, Handout, Quarantine, Terms, Use, name_holders
from buffers.ledger import Ledger
from buffers.messages import Lease
from buffers.places import Places
from buffers.prompts import PromptOrder
from buffers.samplers import Fifo, Sampler, draw
from buffers.staleness import admits, floor
from configs.staleness import OnLate

MAX_DEAD = 10_000  # lost leases remembered, so that what their generators still say of them is understood


class LeaseBook:
    def __init__(
        self,
        terms: Terms,
        ledger: Ledger,
        *,
        sampler: Sampler | None = None,
        lease_ids: Iterator[int] | None = None,
        note: Callable[[e.AnyEvent], None] = lambda event: None,
    ) -> None:
        self.terms = terms
        self.lag = (
            terms.max_versions
        )  # groups are admitted this far ahead of the newest version: the bound, or less
        self.ledger = ledger
        self.version = -1
        """Newest published version."""
        self.newest_version = -1
        """Newest version that any life of the learner has published."""
        self.groups: dict[int, Group] = {}
        self.quarantine = Quarantine()
        self.num_consumed = self.trained_twice = 0
        self.num_rejected: Counter[str] = Counter()
        self.bytes_held = 0
        """Journal bytes of complete groups that may still be trained."""
        self._prompts = PromptOrder(terms.task_size, terms.seed)
        self._sampler = Fifo() if sampler is None else sampler
        self._note = note
        self.attempts: dict[int, Attempt] = {}  # in flight
        self.dead: OrderedDict[int, Attempt] = OrderedDict()  # lost, or accepted and done with
        self._lease_ids = itertools.count() if lease_ids is None else lease_ids
        self.deadlines = Deadlines(self.attempts)
        self.next_group = 0
        self.places = Places(terms)
        self.lost: list[tuple[int, int]] = []  # heap of (due, group)
        self.pool: dict[int, Group] = {}
        """Complete groups that are not used up."""
        self._changed = True
        self.scripted: dict[int, Handout] = {}
        self.trained: dict[int, tuple[list[Use], e.Trained]] = {}  # by step, since the oldest checkpoint
        self.floor_step = 0  # steps before this one cannot be undone any more
        self._held: tuple[int, float] | None = None  # the step the learner waits for, since when

    # ---- generators

    def lease(self, generator: str, now: float) -> Lease | None:
        """The next group that may be given out, lowest due step first; None when admission, a budget or the end forbids."""
        due, is_lost = self._next_opening()
        if due >= self.terms.steps or self.version < 0 or not admits(due, self.version, self.lag):
            return None
        if due > self.num_consumed and self.budget_reached() is not None:
            return None
        number = self.lost[0][1] if is_lost else self.next_group
        lease_id = next(self._lease_ids)
        self.grant_lease(lease_id, number, due, generator, now)
        self._note(e.Leased(lease=lease_id, group=number, due=due, generator=generator, at=time.time()))
        return Lease(
            id=lease_id, split="train", task=self.terms.task, index=self._prompts.index(number), seed=self.terms.seed,
            group=number, due=due, min_version=floor(due, self.lag), num_samples=self.terms.samples_per_prompt,
        )  # fmt: skip

    def room(self) -> int:
        """How many leases there are to be had, at most: `lease` may stop before."""
        if self.version < 0:
            return 0
        last = min(self.version + self.lag, self.terms.steps - 1)
        places = self.places.num_open(last) + len(self.lost)
        if self.terms.max_groups is None:
            return places
        return min(places, max(1, self.terms.max_groups - len(self.pool) - len(self.attempts)))

    def _next_opening(self) -> tuple[int, bool]:
        """(due step, whether its group was lost and is made again) of the place to be given out next."""
        while self.lost and not self._is_lost(self.lost[0][1]):
            heapq.heappop(self.lost)
        due, _ = self.places.next_opening()
        return (self.lost[0][0], True) if self.lost and self.lost[0][0] <= due else (due, False)

    def _is_lost(self, number: int) -> bool:
        group = self.groups.get(number)
        return group is not None and not group.attempts and group.accepted is None

    def grant_lease(self, lease_id: int, number: int, due: int, generator: str, now: float) -> None:
        if number not in self.groups:
            self.places.take_place(due)
            self.next_group = number + 1
            self.groups[number] = Group(due)
        self.groups[number].attempts.add(lease_id)
        self.attempts[lease_id] = Attempt(lease_id, number, generator, now + self.terms.lease_s, now)
        self.deadlines.add(self.attempts[lease_id])
        self.ledger.lease()

    def budget_reached(self) -> str | None:
        """The budget that holds new leases back, in words. What the step at hand needs is leased all the same."""
        for name, amount, limit in (
            ("max_groups", len(self.pool) + len(self.attempts), self.terms.max_groups),
            ("max_tokens", self.ledger.tokens["in_flight"], self.terms.max_tokens),
            ("max_bytes", self.bytes_held, self.terms.max_bytes),
        ):
            if limit is not None and amount >= limit:
                return f"buffer.{name} is reached ({amount:,} of {limit:,})"
        return None

    def heartbeat(self, generator: str, progress: dict[int, int], now: float) -> list[int]:
        """Renews the leases named and notes how far they are; returns those that are no longer the generator's."""
        revoked = []
        for lease_id, num_tokens in progress.items():
            attempt = self.attempts.get(lease_id)
            if attempt is None:
                revoked.append(lease_id)
                attempt = self.dead.get(lease_id)
            elif attempt.generator != generator:
                continue  # nobody renews another's lease
            else:
                attempt.deadline = now + self.terms.lease_s
            if attempt is not None and attempt.fate != "accepted":
                self._progress(attempt, num_tokens)
        return revoked

    def find(self, lease_id: int) -> Attempt | None:
        """What is known (still) of a lease."""
        return self.attempts.get(lease_id) or self.dead.get(lease_id)

    def lease_of(self, lease_id: int) -> tuple[int, int] | None:
        """(group, due) of a lease that could still be accepted."""
        attempt = self.find(lease_id)
        group = self.groups.get(attempt.group) if attempt else None
        return (attempt.group, group.due) if attempt and group and group.accepted is None else None

    def is_accepted(self, lease_id: int) -> bool:
        """Has this very lease been accepted already?"""
        return lease_id in self.dead and self.dead[lease_id].fate == "accepted"

    def is_too_new(self, due: int, newest: int) -> bool:
        """True for a group that versions newer than its step have sampled: one made anew for a step that was undone, by a
        generator that still holds a version of the learner's life before (`staleness`, Rewind)."""
        return newest > due and self.terms.on_late is not OnLate.mask

    def accept(self, content: e.Accepted) -> None:
        """The first complete attempt of its group (`lease_of` has said so). Other attempts become duplicates."""
        lease_id = content.lease
        attempt = self.attempts.get(lease_id) or self.dead[lease_id]
        group = self.groups[attempt.group]
        assert group.accepted is None, f"group {attempt.group} was accepted twice"
        self.ledger.generate(content.tokens - attempt.num_tokens, attempt.fate)
        attempt.num_tokens = content.tokens
        if attempt.fate != "in_flight":  # late, but first
            self.ledger.settle(attempt.fate, "in_flight", attempt.num_tokens)
        self._bury(attempt, "accepted")
        group.accepted, group.content = attempt, content
        for other in group.attempts - {lease_id}:
            self._settle(self.attempts[other], "duplicate")
        group.attempts.clear()
        self.pool[attempt.group] = group
        self.bytes_held += content.size
        self.newest_version = max(
            self.newest_version, content.newest
        )  # where the line that published it is lost
        self._changed = True
        self.places.fill_place(group.due)
        self._note(content)

    def duplicate(self, lease_id: int, num_tokens: int) -> None:
        """A complete group that comes too late: its place is taken, or gone."""
        attempt = self.find(lease_id)
        if attempt is None:
            self.ledger.generate(num_tokens, "duplicate")
        elif attempt.fate == "accepted":
            return  # sent again because the receipt was lost
        else:
            num_tokens = self._progress(attempt, num_tokens)
            if attempt.fate != "duplicate":
                self._settle(attempt, "duplicate")
        self._note(e.Duplicate(lease=lease_id, tokens=num_tokens))

    def fail(self, lease_id: int, num_tokens: int, error: str, *, counts: bool = True) -> str:
        """The group could not be made: it is given out again, or quarantined after `max_attempts`. Returns `lost`,
        `quarantined`, or `over` when the lease had lost its group before."""
        attempt = self.attempts.get(lease_id)
        if attempt is None:
            dead = self.dead.get(lease_id)
            if dead is not None and dead.fate == "accepted":
                return "over"
            if dead is None:
                self.ledger.generate(num_tokens, "failed")
            else:
                num_tokens = self._progress(dead, num_tokens)
            self._note(e.Failed(lease=lease_id, tokens=num_tokens, error=error, counts=False, at=time.time()))
            return "over"
        self._progress(attempt, num_tokens)
        return self._lose(attempt, error, counts)

    def release(self, generator: str, error: str | None) -> list[tuple[int, str]]:
        """Takes back what a generator holds; returns (group, outcome) of each. `error` None: it left in good order."""
        held = [attempt for attempt in self.attempts.values() if attempt.generator == generator]
        return [(a.group, self._lose(a, error or f"{generator} left", error is not None)) for a in held]

    def expire(self, now: float) -> list[tuple[int, str]]:
        """Takes back leases whose deadline has passed; returns (group, outcome) of each."""
        return [
            (attempt.group, self._lose(attempt, f"lease expired at {attempt.generator}", True))
            for attempt in self.deadlines.passed(now)
        ]

    def _lose(self, attempt: Attempt, error: str, counts: bool) -> str:
        self._settle(attempt, "failed")
        self._note(e.Failed(attempt.lease, attempt.num_tokens, error, time.time(), counts))
        group = self.groups[attempt.group]
        group.attempts.discard(attempt.lease)
        group.num_failures += counts
        if group.num_failures >= self.terms.max_attempts and not group.attempts:
            self.quarantine.add(attempt.group, error)
            self.reject(attempt.group, "failed", error)
            return "quarantined"
        if not group.attempts:
            heapq.heappush(self.lost, (group.due, attempt.group))
        return "lost"

    def _progress(self, attempt: Attempt, num_tokens: int) -> int:
        """What is reported late never takes back what was known. Returns what is known now."""
        self.ledger.generate(max(0, num_tokens - attempt.num_tokens), attempt.fate)
        attempt.num_tokens = max(num_tokens, attempt.num_tokens)
        return attempt.num_tokens

    def _settle(self, attempt: Attempt, fate: str) -> None:
        """The attempt is over and will not be trained."""
        self.ledger.settle(attempt.fate, fate, attempt.num_tokens)
        self._bury(attempt, fate)

    def _bury(self, attempt: Attempt, fate: str) -> None:
        attempt.fate = fate
        self.attempts.pop(attempt.lease, None)
        self.dead[attempt.lease] = attempt
        while len(self.dead) > MAX_DEAD:
            self.dead.popitem(last=False)

    # ---- learner

    def publish(self, version: int) -> None:
        assert version > self.version, f"version {version} was published after {self.version}"
        self.version, self.newest_version = version, max(version, self.newest_version)

    def ready(self, step: int, now: float) -> Handout | None:
        """What step `step` trains; None while some of it is missing."""
        if step in self.scripted:
            return self.scripted[step]
        if self._changed and (handout := self._choose(step)) is not None:
            self.scripted[step] = handout
            self._note(e.Handed(step, handout.groups, handout.weights))
            return handout
        self._changed = False
        if self._held is None or self._held[0] != step:
            self._held = (step, now)
        return None

    def _choose(self, step: int) -> Handout | None:
        wait = self.terms.on_late is not OnLate.mask
        all_due = self.places.filled_through > step
        if (wait and not all_due) or (not all_due and len(self.pool) < self.terms.groups_per_step):
            return None
        self._evict(step)
        barred = self._promised() | self._sampled_later(step)
        pool = sorted((group.due, number) for number, group in self.pool.items() if number not in barred)
        short = self.terms.groups_per_step - len(pool)
        if short > 0:
            if self.places.filled_through > step:  # nothing more is on its way: places are added
                self.open_places(step, short)
            return None
        if isinstance(self._sampler, Fifo):  # the rule, without the columns
            return Handout(sorted(number for _, number in pool[: self.terms.groups_per_step]), [])
        return self._sample(step, [number for _, number in pool])

    def open_places(self, step: int, places: int) -> None:
        self.places.add_places(step, places)
        self._note(e.Opened(step, places))

    def _sample(self, step: int, pool: list[int]) -> Handout:
        contents = [self.content(number) for number in pool]
        uses = [self.pool[number].uses for number in pool]
        rng = np.random.default_rng([self.terms.seed, step])
        rows, weights = draw(self._sampler, contents, uses, self.terms.groups_per_step, rng)
        chosen = sorted((pool[row], weight) for row, weight in zip(rows, weights, strict=True))
        unweighted = all(weight == 1.0 for weight in weights)
        return Handout(
            [number for number, _ in chosen], [] if unweighted else [weight for _, weight in chosen]
        )

    def _evict(self, step: int) -> None:
        """Lets go of groups that the bound forbids from now on: a sampler (or a former one), `max_uses`, a repair leave such."""
        in_order, promised, retired = (
            isinstance(self._sampler, Fifo) and self.terms.max_uses == 1,
            self._promised(),
            [],
        )
        if in_order and self.terms.on_late is OnLate.mask:
            return
        for number, group in list(self.pool.items()):
            content = self.content(number)
            version = content.newest if self.terms.on_late is OnLate.mask else content.oldest
            is_left = (
                not in_order or group.due < step
            )  # one that is due is trained, and what is late of it is named
            if is_left and version < step - self.terms.max_versions and number not in promised:
                if group.uses:
                    self.retire_group(number)
                    retired.append(number)
                else:
                    self.reject(number, "unsampled", refill=False)
        if retired:
            self._note(e.Retired(retired))

    def _promised(self) -> set[int]:
        """Groups that steps were handed and have not trained, or will be handed again after a rewind."""
        return {number for handout in self.scripted.values() for number in handout.groups}

    def _sampled_later(self, step: int) -> set[int]:
        """Groups that versions above the step's have sampled: a life of the learner before this one published those."""
        are_some = self.newest_version > step and self.terms.on_late is not OnLate.mask
        return {number for number in self.pool if are_some and self.content(number).newest > step}

    def retire_group(self, number: int) -> None:
        self.bytes_held -= self.content(number).size
        del self.groups[number], self.pool[number]

    def cancel_stragglers(self, now: float) -> list[int]:
        """`cancel` only: rejects groups that have held the step being waited for too long; returns them."""
        if self.terms.on_late is not OnLate.cancel or self._held is None:
            return []
        step, since = self._held
        assert self.terms.straggler_timeout_s is not None
        late = []
        for number, group in self.groups.items():
            if group.due <= step and group.accepted is None and group.attempts:
                began = max([since, *(self.attempts[lease].leased_at for lease in group.attempts)])
                if now - began >= self.terms.straggler_timeout_s:
                    late.append(number)
        for number in late:
            self.reject(number, "cancelled")
        return late

    def reject(self, number: int, reason: str, error: str = "", *, refill: bool = True) -> None:
        """A group will not be trained. With `refill`, its place goes to a fresh one."""
        group = self.groups.pop(number)
        num_tokens = group.accepted.num_tokens if group.accepted else 0
        for lease_id in list(group.attempts):
            self._settle(self.attempts[lease_id], reason)
        if group.accepted is not None and group.content is not None:
            self.ledger.settle("in_flight", reason, group.accepted.num_tokens)
            self.pool.pop(number, None)
            self.bytes_held -= group.content.size
            self.drop_scripts(number)
            if refill:
                self._changed = True
                self.places.fill_place(group.due, -1)
        if refill:
            self.places.free_place(group.due)
        self.num_rejected[reason] += 1
        self._note(e.Rejected(number, reason, error, group.due, num_tokens, time.time()))

    def reject_damaged(self, number: int, error: str) -> None:
        """The bytes of a complete group are lost: a fresh one takes its place, in the step that it was for or in the
        one at hand."""
        group, overtaken = self.groups[number], self.groups[number].due < self.num_consumed
        if group.uses:
            self.retire_group(number)
            self.drop_scripts(number)
            self._note(e.Retired([number]))
            return
        self.reject(number, "damaged", error, refill=not overtaken)
        if overtaken:
            self.open_places(self.num_consumed, 1)

    def drop_scripts(self, number: int) -> None:
        """Steps that were to train this group are to be chosen anew."""
        for step in [step for step, handout in self.scripted.items() if number in handout.groups]:
            del self.scripted[step]
            self._changed = True

    def consume(self, event: e.Trained) -> None:
        """A step has been trained."""
        assert event.step == self.num_consumed, f"step {event.step} was trained after {self.num_consumed}"
        uses = []
        for number, trained, excluded in zip(event.groups, event.trained, event.excluded, strict=True):
            group = self.groups[number]
            first = group.uses == 0
            if first:
                self.ledger.train(trained, excluded, self.terms.excluded_as)
            else:
                self.ledger.replayed += trained
            group.uses += 1
            self.trained_twice += group.uses > self.terms.max_uses
            uses.append(Use(number, group, trained, excluded, first))
            if group.uses >= self.terms.max_uses:
                self.retire_group(number)
        self.ledger.staleness.update(event.staleness)
        self.trained[event.step] = (uses, event)
        self.scripted.pop(event.step, None)
        self.num_consumed, self._changed, self._held = event.step + 1, True, None
        self._note(event)

    def checkpoint(self, event: e.Checkpointed) -> None:
        """Steps before the oldest kept checkpoint cannot be undone any more, and are forgotten."""
        for step in range(self.floor_step, min(event.oldest, self.num_consumed)):
            self.trained.pop(step, None)
        self.places.forget_before(event.oldest)
        self.floor_step = max(self.floor_step, event.oldest)
        self._note(event)

    def rewind(self, step: int) -> None:
        """The learner starts again from the checkpoint of `step`: later steps are undone and will be handed out as they were.

        Raises ValueError as `check_rewind`.
        """
        self.check_rewind(step)
        self._revoke_beyond(step)
        for undone in range(self.num_consumed - 1, step - 1, -1):
            uses, event = self.trained.pop(undone)
            for use in uses:
                group = use.group
                if use.first:
                    self.ledger.untrain(use.trained, use.excluded, self.terms.excluded_as)
                else:
                    self.ledger.replayed -= use.trained
                group.uses -= 1
                if use.number not in self.pool:
                    self.groups[use.number] = self.pool[use.number] = group
                    self.bytes_held += self.content(use.number).size
            self.ledger.staleness.subtract(event.staleness)
            self.scripted[undone] = Handout(event.groups, event.weights)
        self.ledger.staleness += Counter()  # drops what has come to zero
        self.num_consumed, self.version = step, -1
        self._changed, self._held = True, None
        self._note(e.Rewound(step=step))

    def _revoke_beyond(self, step: int) -> None:
        """Takes back leases that version `step` does not admit: their generators will fall behind the floor."""
        open_groups = {number: group for number, group in self.groups.items() if group.accepted is None}
        beyond = {
            n for n, group in open_groups.items() if not admits(group.due, step, self.terms.max_versions)
        }
        for attempt in [attempt for attempt in self.attempts.values() if attempt.group in beyond]:
            self._lose(attempt, f"the learner went back to step {step}", False)
        for attempt in self.dead.values():
            if attempt.group in beyond:
                attempt.group = -1  # so that it cannot come in late

    def waiting_for(self, step: int, nobody: str = "") -> str:
        """Who holds step `step`, in a sentence. `nobody`: why no generator does, where it is known."""
        attempts = self.attempts.values()
        missing = [a for a in attempts if a.group in self.groups and self.groups[a.group].due <= step]
        at_hand = sum(group.due <= step or self.terms.on_late is OnLate.mask for group in self.pool.values())
        have = f"step {step} has {at_hand} of {self.terms.groups_per_step} groups"
        return (
            f"{have}; {name_holders(missing) if missing else nobody or 'no generator holds a lease for it'}"
        )

    def check_rewind(self, step: int) -> None:
        """Raises ValueError for a step that is not between the oldest kept checkpoint and the newest trained step."""
        if not self.floor_step <= step <= self.num_consumed:
            raise ValueError(
                f"step must be in {self.floor_step}..{self.num_consumed} to rewind to, got {step}"
            )

    def adopt_terms(self, terms: Terms) -> None:
        """From now on the book is kept by these."""
        self.terms = self.places.terms = terms

    # ---- what the rest of the buffer asks

    def content(self, number: int) -> e.Accepted:
        """Where a complete group is."""
        content = self.groups[number].content
        assert content is not None
        return content
