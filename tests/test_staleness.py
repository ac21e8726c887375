"""The bound on staleness, attacked: adversarial latencies, lagging, stalling and dying generators, on the pure logic."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffers.leases import LeaseBook, Terms
from buffers.ledger import Ledger
from buffers.messages import Lease
from buffers.staleness import floor, histogram, trainable
from configs.schema import OnLate


@dataclass
class Work:
    lease: Lease
    length: int
    versions: list[int] = field(default_factory=list)


@dataclass
class FakeGenerator:
    """Samples a token at a time with whatever version it holds; obeys floors, otherwise as lazy as chance has it."""

    name: str
    obeys_floor: bool = True
    version: int = -1
    stalled_until: float = 0.0
    work: dict[int, Work] = field(default_factory=dict)


@dataclass
class World:
    """A run on a fake clock. Every choice is the adversary's: `rng`."""

    terms: Terms
    rng: random.Random
    num_generators: int = 3
    obey_floor: bool = True
    now: float = 0.0
    step: int = 0
    trained: dict[int, int] = field(default_factory=dict)  # group -> step
    num_late: int = 0
    staleness: list[int] = field(default_factory=list)
    submitted: dict[int, list[int]] = field(default_factory=dict)  # group -> versions of its tokens

    def __post_init__(self) -> None:
        self.ledger = Ledger()
        self.book = LeaseBook(self.terms, self.ledger)
        self.book.publish(0)
        self.generators = [FakeGenerator(f"g{i}", self.obey_floor) for i in range(self.num_generators)]

    def run(self, max_ticks: int = 20_000) -> None:
        for _ in range(max_ticks):
            self.now += self.rng.random()
            self.rng.choice(self.events)(self, self.rng.choice(self.generators))
            self.book.expire(self.now)
            self.book.cancel_stragglers(self.now)
            assert self.ledger.closes()
            if self.step == self.terms.steps:
                return
        raise AssertionError(f"no end after {max_ticks} events: {self.book.waiting_for(self.step, self.now)}")

    # ---- what may happen

    def ask(self, generator: FakeGenerator) -> None:
        if generator.stalled_until > self.now or len(generator.work) > 3:
            return
        lease = self.book.lease(generator.name, self.now)
        if lease is None:
            return
        out = sum(group.accepted is None for group in self.book.groups.values())
        assert out <= (self.terms.max_versions + 1) * self.terms.groups_per_step
        if generator.obeys_floor and generator.version < lease.floor:
            generator.version = self.rng.randint(lease.floor, self.book.version)
        generator.version = max(generator.version, 0)
        generator.work[lease.id] = Work(lease, self.rng.choice([1, 2, 5, 40]))

    def sample(self, generator: FakeGenerator) -> None:
        if generator.stalled_until > self.now:
            return
        for work in list(generator.work.values()):
            work.versions.append(generator.version)
            if len(work.versions) >= work.length:
                del generator.work[work.lease.id]
                if self.book.submit(work.lease.id, len(work.versions)) == "accepted":
                    self.submitted[work.lease.group] = work.versions

    def pull(self, generator: FakeGenerator) -> None:
        if self.rng.random() < 0.3:
            generator.version = max(generator.version, self.rng.randint(0, self.book.version))

    def beat(self, generator: FakeGenerator) -> None:
        if generator.stalled_until > self.now:
            return
        progress = {lease_id: len(work.versions) for lease_id, work in generator.work.items()}
        for lease_id in self.book.heartbeat(generator.name, progress, self.now):
            self.book.fail(lease_id, len(generator.work.pop(lease_id).versions), "revoked")

    def stall(self, generator: FakeGenerator) -> None:
        if self.rng.random() < 0.05:
            generator.stalled_until = self.now + self.rng.choice([1, 10, 100])

    def die(self, generator: FakeGenerator) -> None:
        if self.rng.random() < 0.05:
            generator.work.clear()
            generator.version = -1

    def break_down(self, generator: FakeGenerator) -> None:
        if generator.work and self.rng.random() < 0.05:
            lease_id, work = generator.work.popitem()
            self.book.fail(lease_id, len(work.versions), "the task raised")

    def learn(self, generator: FakeGenerator) -> None:
        groups = self.book.ready(self.step, self.now)
        if groups is None:
            return
        assert len(groups) == self.terms.groups_per_step
        counts = {}
        for group in groups:
            assert group not in self.trained, "trained twice"
            self.trained[group] = self.step
            versions = np.array(self.submitted[group])
            mask = trainable(versions, np.ones(len(versions), bool), self.step, self.terms.max_versions)
            self.staleness += [self.step - int(v) for v in versions[mask]]
            self.num_late += int((~mask).sum())
            counts[group] = (int(mask.sum()), int((~mask).sum()))
        self.book.consume(self.step, counts)
        self.step += 1
        self.book.publish(self.step)

    events = [ask, ask, ask, sample, sample, sample, pull, beat, beat, stall, die, break_down, learn]


def terms(on_late: OnLate, bound: int, batch: int, steps: int = 6) -> Terms:
    return Terms(
        groups_per_step=batch, steps=steps, max_versions=bound, on_late=on_late, samples_per_prompt=1, lease_s=20.0,
        max_attempts=3, straggler_timeout_s=15.0 if on_late is OnLate.cancel else None, task="t", seed=0,
    )  # fmt: skip


worlds = st.builds(
    World,
    terms=st.builds(terms, st.sampled_from(list(OnLate)), st.integers(0, 3), st.integers(1, 4)),
    rng=st.integers(0, 2**32).map(random.Random),
    num_generators=st.integers(1, 4),
)


@settings(max_examples=150, deadline=None)
@given(worlds)
def test_no_token_is_trained_beyond_the_bound_whatever_generators_do(world: World) -> None:
    world.run()
    assert all(0 <= staleness <= world.terms.max_versions for staleness in world.staleness)
    assert len(world.trained) == world.terms.steps * world.terms.groups_per_step
    if world.terms.on_late is not OnLate.mask:
        assert world.num_late == 0, "under wait and cancel nothing is ever late"


@settings(max_examples=60, deadline=None)
@given(worlds)
def test_the_ledger_accounts_for_every_group_and_token_at_the_end(world: World) -> None:
    world.run()
    assert world.ledger.groups["trained"] == len(world.trained)
    assert world.ledger.tokens["trained"] == len(world.staleness)
    assert world.ledger.tokens["masked"] + world.ledger.tokens["late"] == world.num_late
    assert world.book.trained_twice == 0
    assert min(world.ledger.tokens.values()) >= 0 and min(world.ledger.groups.values()) >= 0


def test_generators_that_ignore_the_floor_are_caught_and_their_tokens_masked() -> None:
    late = 0
    for seed in range(20):
        world = World(terms(OnLate.wait, 1, 2), random.Random(seed), obey_floor=False)
        world.run()
        assert all(0 <= staleness <= 1 for staleness in world.staleness)
        late += world.num_late
        assert world.ledger.tokens["late"] == world.num_late
    assert late > 0, "the adversary never got past the floor: this test shows nothing"


@given(st.integers(0, 50), st.integers(0, 8))
def test_floor_is_the_oldest_version_within_the_bound(due: int, bound: int) -> None:
    oldest = floor(due, bound)
    assert due - oldest <= bound
    assert oldest == 0 or due - (oldest - 1) > bound


def test_histogram_counts_only_what_was_trained() -> None:
    versions = np.array([-1, 3, 4, 5, 5, 2])
    sampled = versions >= 0
    mask = trainable(versions, sampled, step=5, bound=2)
    assert mask.tolist() == [False, True, True, True, True, False]
    assert histogram(versions, mask, step=5) == {0: 2, 1: 1, 2: 1}


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_admission_lets_out_exactly_the_groups_of_the_steps_within_the_bound(bound: int) -> None:
    book = LeaseBook(terms(OnLate.wait, bound, batch=4, steps=20), Ledger())
    assert book.lease("g", 0.0) is None, "nothing may be leased before version 0 is published"
    book.publish(0)
    leases = list(iter(lambda: book.lease("g", 0.0), None))
    assert [lease.group for lease in leases] == list(range(4 * (bound + 1)))
    assert [lease.floor for lease in leases] == [max(0, g // 4 - bound) for g in range(len(leases))]


def test_a_group_that_keeps_failing_is_quarantined_and_its_place_refilled() -> None:
    book = LeaseBook(terms(OnLate.wait, 0, batch=2), Ledger())
    book.publish(0)
    other = book.lease("g", 0.0)
    for _ in range(3):
        lease = book.lease("g", 0.0)
        assert lease is not None and lease.group == 1
        book.fail(lease.id, 5, "ValueError: no such prompt")
    assert book.quarantined == {1: "ValueError: no such prompt"}
    refill = book.lease("g", 0.0)
    assert refill is not None and (refill.group, refill.due) == (2, 0)
    assert other is not None
    book.submit(other.id, 1)
    assert book.ready(0, 0.0) is None
    book.submit(refill.id, 1)
    assert book.ready(0, 0.0) == [0, 2]
    assert book.ledger.tokens["failed"] == 15 and book.ledger.groups["failed"] == 3


def test_the_first_complete_attempt_wins_and_the_other_is_a_duplicate() -> None:
    book = LeaseBook(terms(OnLate.wait, 0, batch=1), Ledger())
    book.publish(0)
    slow = book.lease("slow", 0.0)
    book.expire(100.0)
    fast = book.lease("fast", 100.0)
    assert slow is not None and fast is not None and slow.group == fast.group
    assert book.submit(slow.id, 7) == "accepted", "late but first"
    assert book.submit(slow.id, 7) == "accepted", "sent again: idempotent"
    assert book.heartbeat("fast", {fast.id: 4}, 101.0) == [fast.id], "told that it is in vain"
    assert book.submit(fast.id, 9) == "duplicate"
    assert book.ledger.tokens["duplicate"] == 9 and book.ledger.tokens["in_flight"] == 7
    assert book.ledger.closes()


def test_what_a_generator_held_before_it_was_restarted_is_given_out_at_once() -> None:
    book = LeaseBook(terms(OnLate.wait, 0, batch=3), Ledger())
    book.publish(0)
    done, lost, other = book.lease("g0", 0.0), book.lease("g0", 0.0), book.lease("g1", 0.0)
    assert done is not None and lost is not None and other is not None
    book.submit(done.id, 4)
    assert book.release("g0") == [(lost.group, "lost")]
    again = book.lease("g1", 0.0)
    assert again is not None and again.group == lost.group
    assert book.heartbeat("g1", {other.id: 1, again.id: 1}, 0.0) == []
    assert book.ledger.closes()


def test_a_straggler_is_cancelled_only_after_holding_its_step_and_is_refilled() -> None:
    book = LeaseBook(terms(OnLate.cancel, 1, batch=1), Ledger())
    book.publish(0)
    straggler = book.lease("g", 0.0)
    assert straggler is not None
    book.heartbeat("g", {straggler.id: 3}, 0.0)
    assert book.cancel_stragglers(1000.0) == [], "nobody waits for it yet"
    assert book.ready(0, 1000.0) is None
    assert book.cancel_stragglers(1014.0) == []
    assert book.cancel_stragglers(1016.0) == [0]
    refill = book.lease("g", 1016.0)
    assert refill is not None and (refill.group, refill.due) == (1, 0)
    assert book.ledger.tokens["cancelled"] == 3


def test_a_restart_hands_out_the_same_groups_and_skips_no_prompt() -> None:
    book = LeaseBook(terms(OnLate.wait, 1, batch=2, steps=10), Ledger())
    consumed = {0: [0, 1], 1: [2, 4], 2: [5, 6]}
    journal = [(g, due, 3) for g, due in [(0, 0), (1, 0), (2, 1), (4, 1), (5, 2), (6, 2), (8, 3)]]
    book.restore(1, journal, consumed, rejected=[3])
    book.publish(1)
    assert book.ready(1, 0.0) == [2, 4] and book.ready(2, 0.0) == [5, 6]
    assert book.lease("g", 0.0) is None, "steps 1 and 2 are at hand, step 3 is not admitted at version 1"
    book.publish(2)
    leases = list(iter(lambda: book.lease("g", 0.0), None))
    assert [(lease.group, lease.due) for lease in leases] == [(7, 3)], "7 was lost in flight, 8 is in the journal"
    book.publish(3)
    assert [(lease.group, lease.due) for lease in iter(lambda: book.lease("g", 0.0), None)] == [(9, 4), (10, 4)]
