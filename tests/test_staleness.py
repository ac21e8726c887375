"""The bound on staleness, attacked: adversarial latencies, lagging, stalling and dying generators, on the pure logic."""

import itertools
import random
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffers.book import Book
from buffers.book_events import apply_event
from buffers.book_state import export_book, restore_book
from buffers.events import Accepted, AnyEvent, Checkpointed, Leased, Published, Rejected, Trained
from buffers.groups import Handout
from buffers.messages import Lease
from buffers.prompts import PromptOrder
from buffers.samplers import SAMPLERS, load_sampler
from buffers.staleness import count_trainable, mask_trainable, min_version
from buffers.state import BookState
from buffers.terms import Terms
from configs.staleness import OnLate


def submit(book: Book, lease_id: int, versions: list[int]) -> str:
    """What the buffer does with a whole group that has come in."""
    held = book.leases.find_open_group(lease_id)
    if held is None:
        if book.leases.attempts.is_accepted(lease_id):
            return "accepted"
        book.leases.count_duplicate(lease_id, len(versions))
        return "duplicate"
    by_version = {v: versions.count(v) for v in set(versions)}
    if book.leases.is_too_new(held[1], max(versions)):
        book.leases.fail_lease(
            lease_id, len(versions), "sampled by a newer version than the step it is for", counts=False
        )
        return "failed"
    book.leases.accept_group(
        Accepted(lease_id, *held, prompt=0, segment=0, offset=0, size=100, xxh3=0, row=0, rows=1, tokens=len(versions),
                 oldest=min(versions), newest=max(versions), reward_mean=0.5, reward_std=0.5, at=0.0, versions=by_version)
    )  # fmt: skip
    return "accepted"


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
    sent: list[int] = field(default_factory=list)


@dataclass
class Step:
    """A trained step, until it is undone."""

    handout: Handout
    staleness: list[int]
    num_late: int


@dataclass
class World:
    """A run on a fake clock. Every choice is the adversary's: `rng`."""

    terms: Terms
    rng: random.Random
    num_generators: int = 3
    sampler: str = "fifo"
    obey_floor: bool = True
    now: float = 0.0
    history: list[Step] = field(default_factory=list)
    expected: dict[int, Handout] = field(default_factory=dict)  # steps that were undone
    checkpoint: int = 0
    events_noted: list[AnyEvent] = field(default_factory=list)
    state: tuple[bytes, int] | None = None  # of the book at some moment, and how many events had come
    num_damaged: int = 0
    submitted: dict[int, list[int]] = field(default_factory=dict)  # group -> versions of its tokens

    def __post_init__(self) -> None:
        self.new_book()
        self.publish(0)
        self.generators = [FakeGenerator(f"g{i}", self.obey_floor) for i in range(self.num_generators)]

    def new_book(self) -> None:
        noted, self.events_noted = self.events_noted, []
        self.book = self.rebuild(None, noted)
        if self.state is not None:  # recovery from a state and what came after leads to the same
            data, num_before = self.state
            replayed, self.book = self.book, self.rebuild(data, noted[num_before:])
            assert described(self.book) == described(replayed)
        self.ledger = self.book.ledger
        self.book.note = self.events_noted.append
        self.events_noted += noted

    def rebuild(self, state: bytes | None, events: list[AnyEvent]) -> Book:
        ids = itertools.count(1_000_000 * (1 + len(self.history) + self.rng.randrange(10**9)))
        book = Book(self.terms, sampler=load_sampler(self.sampler, {}), lease_ids=ids)
        if state is not None:
            restore_book(book, msgspec.msgpack.decode(state, type=BookState), self.now)
        for event in events:
            apply_event(book, event, self.now)
        return book

    def publish(self, version: int) -> None:
        self.book.history.publish_version(version)
        self.events_noted.append(Published(version, "", 0.0))

    @property
    def step(self) -> int:
        return len(self.history)

    @property
    def staleness(self) -> list[int]:
        return [s for step in self.history for s in step.staleness]

    @property
    def num_late(self) -> int:
        return sum(step.num_late for step in self.history)

    @property
    def uses(self) -> Counter[int]:
        return Counter(group for step in self.history for group in step.handout.groups)

    def run(self, max_ticks: int = 20_000) -> None:
        for _ in range(max_ticks):
            self.now += self.rng.random()
            self.rng.choice(self.events)(self, self.rng.choice(self.generators))
            self.book.leases.expire_leases(self.now)
            self.book.leases.cancel_stragglers(self.now)
            assert self.ledger.closes()
            held = sum(
                group.content.tokens
                for group in self.book.pool.groups.values()
                if group.content and not group.num_uses
            )
            assert (
                held <= self.ledger.tokens["in_flight"] and min(self.ledger.tokens.values(), default=0) >= 0
            )
            if self.step == self.terms.steps:
                return
        raise AssertionError(
            f"no end after {max_ticks} events: {self.book.leases.describe_missing(self.step)}"
        )

    # ---- what may happen

    def ask(self, generator: FakeGenerator) -> None:
        if generator.stalled_until > self.now or len(generator.work) > 3:
            return
        lease = self.book.leases.lease_next(generator.name, self.now)
        if lease is None:
            return
        out = sum(bool(group.attempts) for group in self.book.list_groups().values())
        assert out <= (self.terms.max_versions + 1) * self.terms.groups_per_step
        if generator.obeys_floor and generator.version < lease.min_version:
            generator.version = self.rng.randint(lease.min_version, self.book.history.version)
        generator.version = max(generator.version, 0)
        generator.work[lease.id] = Work(lease, self.rng.choice([1, 2, 5, 40]))

    def sample(self, generator: FakeGenerator) -> None:
        if generator.stalled_until > self.now:
            return
        for work in list(generator.work.values()):
            work.versions.append(generator.version)
            if len(work.versions) >= work.length:
                del generator.work[work.lease.id]
                generator.sent.append(work.lease.id)
                if submit(self.book, work.lease.id, work.versions) == "accepted":
                    self.submitted[work.lease.group] = work.versions

    def pull(self, generator: FakeGenerator) -> None:
        if self.rng.random() < 0.3:
            newest = self.book.history.version  # below the one held, where the learner went back
            generator.version = min(newest, max(generator.version, self.rng.randint(0, newest)))

    def beat(self, generator: FakeGenerator) -> None:
        if generator.stalled_until > self.now:
            return
        progress = {lease_id: len(work.versions) for lease_id, work in generator.work.items()}
        late = {
            lease_id: self.rng.randint(0, 5) for lease_id in generator.sent[-4:]
        }  # not heard yet that it was accepted
        self.book.leases.renew_leases(generator.name, late, self.now)
        for lease_id in self.book.leases.renew_leases(generator.name, progress, self.now):
            self.book.leases.fail_lease(lease_id, len(generator.work.pop(lease_id).versions), "revoked")

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
            self.book.leases.fail_lease(lease_id, len(work.versions), "the task raised")

    def learn(self, generator: FakeGenerator) -> None:
        handout = self.book.history.hand_out(self.step, self.now)
        if handout is None:
            return
        assert len(handout.groups) == self.terms.groups_per_step == len(set(handout.groups))
        assert handout == self.expected.pop(self.step, handout), (
            "a step that was undone is handed out as it was"
        )
        if self.rng.random() < 0.2:
            self.expected[self.step] = handout  # nothing comes back: it will be asked for again
            return
        counts, stale, late = [], [], 0
        for group in handout.groups:
            assert self.uses[group] < self.terms.max_uses, "trained too often"
            versions = np.array(self.submitted[group])
            mask = mask_trainable(versions, np.ones(len(versions), bool), self.step, self.terms.max_versions)
            stale += [self.step - int(v) for v in versions[mask]]
            late += int((~mask).sum())
            counts.append(
                count_trainable(
                    self.book.pool.get_content(group).tokens_by_version(), self.step, self.terms.max_versions
                )
            )
            assert counts[-1][:2] == (int(mask.sum()), int((~mask).sum()))
        staleness = sum((Counter(by_staleness) for _, _, by_staleness in counts), Counter())
        trained, excluded = [c[0] for c in counts], [c[1] for c in counts]
        self.book.history.train_step(
            Trained(self.step, handout.groups, trained, excluded, dict(staleness), handout.group_weights)
        )
        self.history.append(Step(handout, stale, late))
        self.publish(self.step)
        if self.rng.random() < 0.3:
            self.checkpoint = self.step
            self.book.history.keep_checkpoint(Checkpointed(self.step, self.step))

    def crash_learner(self, generator: FakeGenerator) -> None:
        if self.rng.random() < 0.02:
            for step in range(self.checkpoint, self.step):
                self.expected[step] = self.history[step].handout
            del self.history[self.checkpoint :]
            self.book.rewind_to(self.checkpoint)
            assert self.book.leases.lease_next("g", self.now) is None, (
                "nothing is leased before a version is published again"
            )
            self.publish(self.checkpoint)  # generators hold what the dead learner published, until they pull

    def crash_buffer(self, generator: FakeGenerator) -> None:
        if self.rng.random() < 0.05:
            before = self.book
            self.new_book()
            for name in ("next_step", "version", "trained_twice"):
                assert getattr(self.book.history, name) == getattr(before.history, name), name
            assert self.book.leases.quarantine == before.leases.quarantine
            assert self.book.pool.num_bytes == before.pool.num_bytes
            assert (
                self.book.list_groups().keys() == before.list_groups().keys()
                and self.book.pool.groups.keys() == before.pool.groups.keys()
            )
            assert self.book.ledger.groups == before.ledger.groups, "every lease has the fate it had"
            assert self.book.ledger.staleness == before.ledger.staleness
            for fate in ("trained", "masked", "late", "zero_variance", "unsampled"):
                assert self.book.ledger.tokens[fate] == before.ledger.tokens[fate]

    def take_state(self, generator: FakeGenerator) -> None:
        if self.rng.random() < 0.05:
            self.state = msgspec.msgpack.encode(export_book(self.book)), len(self.events_noted)

    def damage(self, generator: FakeGenerator) -> None:
        """The disk loses a complete group: handed out or not, trained before or not."""
        if self.book.pool.groups and self.rng.random() < 0.03:
            number = self.rng.choice(sorted(self.book.pool.groups))
            self.expected = {step: one for step, one in self.expected.items() if number not in one.groups}
            self.book.history.replace_damaged(number, "its bytes have changed")
            self.num_damaged += 1

    def control(self, generator: FakeGenerator) -> None:
        """A controller admits as much or as little as it likes, up to the bound."""
        if self.rng.random() < 0.1:
            self.book.leases.admission_lag = self.rng.randint(0, self.terms.max_versions)

    events = [ask, ask, ask, sample, sample, sample, pull, beat, beat, stall, die, break_down, learn, learn, crash_learner,
              crash_buffer, control, take_state, damage]  # fmt: skip


def described(book: Book) -> dict[str, object]:
    """The state of a book, but for what heartbeats alone have told: events do not record that."""
    state = msgspec.to_builtins(export_book(book))
    for attempt in (*state["attempts_under_way"], *state["attempts_ended"]):
        attempt[3] = 0
    generated, leased, tokens, groups, *rest = state.pop("ledger")
    kept = {
        fate: tokens.get(fate, 0)
        for fate in ("trained", "masked", "late", "zero_variance", "unsampled", "damaged")
    }
    return state | {"ledger": [leased, {fate: n for fate, n in groups.items() if n}, kept, *rest]}


def terms(on_late: OnLate, bound: int, batch: int, steps: int = 6, **more: object) -> Terms:
    return Terms(
        groups_per_step=batch, steps=steps, max_versions=bound, on_late=on_late, samples_per_prompt=1, lease_s=20.0,
        max_attempts=3, straggler_timeout_s=15.0 if on_late is OnLate.cancel else None, task="t", seed=0, **more,
    )  # type: ignore[arg-type]  # fmt: skip


seeds = st.integers(0, 2**32).map(random.Random)
worlds = st.builds(
    World,
    terms=st.builds(terms, st.sampled_from(list(OnLate)), st.integers(0, 3), st.integers(1, 4)),
    rng=seeds,
    num_generators=st.integers(1, 4),
)
replaying = st.builds(
    World,
    terms=st.builds(
        terms, st.sampled_from(list(OnLate)), st.integers(1, 4), st.sampled_from([2, 4, 8]),
        max_uses=st.sampled_from([1, 2]), max_tokens=st.none() | st.integers(1, 100),
    ),
    rng=seeds,
    num_generators=st.integers(1, 4),
    sampler=st.sampled_from(sorted(SAMPLERS)),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(worlds)
def test_no_token_is_trained_beyond_the_bound_whatever_crashes_stalls_or_lags(world: World) -> None:
    world.run()
    assert all(0 <= staleness <= world.terms.max_versions for staleness in world.staleness)
    assert sum(world.uses.values()) == world.terms.steps * world.terms.groups_per_step
    if world.terms.on_late is not OnLate.mask:
        assert world.num_late == 0, "under wait and cancel nothing is ever late"


@settings(max_examples=150, deadline=None)
@given(replaying)
def test_the_bound_holds_for_every_sampler_and_for_groups_that_are_trained_again(world: World) -> None:
    world.run()
    assert all(0 <= staleness <= world.terms.max_versions for staleness in world.staleness)
    if world.terms.on_late is not OnLate.mask:
        assert world.num_late == 0
    assert world.ledger.tokens["trained"] + world.ledger.replayed == len(world.staleness)
    assert world.ledger.groups["trained"] == len(world.uses)
    assert world.book.history.trained_twice == 0


@settings(max_examples=80, deadline=None)
@given(worlds)
def test_the_ledger_accounts_for_every_group_and_token_at_the_end(world: World) -> None:
    world.run()
    assert world.ledger.groups["trained"] == len(world.uses)
    assert world.ledger.tokens["trained"] == len(world.staleness)
    assert world.ledger.tokens["masked"] + world.ledger.tokens["late"] == world.num_late
    assert world.ledger.staleness == Counter(world.staleness)
    assert world.book.history.trained_twice == 0
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
    oldest = min_version(due, bound)
    assert due - oldest <= bound
    assert oldest == 0 or due - (oldest - 1) > bound


def test_count_and_mask_agree_and_nothing_from_the_future_is_trained() -> None:
    versions = np.array([-1, 3, 4, 5, 5, 2, 6])
    sampled = versions >= 0
    mask = mask_trainable(versions, sampled, step=5, max_versions=2)
    assert mask.tolist() == [False, True, True, True, True, False, False]
    assert count_trainable({2: 1, 3: 1, 4: 1, 5: 2, 6: 1}, step=5, max_versions=2) == (
        4,
        2,
        {0: 2, 1: 1, 2: 1},
    )


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_admission_lets_out_exactly_the_groups_of_the_steps_within_the_bound(bound: int) -> None:
    book = Book(terms(OnLate.wait, bound, batch=4, steps=20))
    assert book.leases.lease_next("g", 0.0) is None, "nothing may be leased before version 0 is published"
    book.history.publish_version(0)
    leases = list(iter(lambda: book.leases.lease_next("g", 0.0), None))
    assert [lease.group for lease in leases] == list(range(4 * (bound + 1)))
    assert [lease.min_version for lease in leases] == [max(0, g // 4 - bound) for g in range(len(leases))]


def test_a_group_that_keeps_failing_is_quarantined_and_its_place_refilled() -> None:
    book = Book(terms(OnLate.wait, 0, batch=2))
    book.history.publish_version(0)
    other = book.leases.lease_next("g", 0.0)
    for _ in range(3):
        lease = book.leases.lease_next("g", 0.0)
        assert lease is not None and lease.group == 1
        book.leases.fail_lease(lease.id, 5, "ValueError: no such prompt")
    assert book.leases.quarantine.last == {1: "ValueError: no such prompt"}
    refill = book.leases.lease_next("g", 0.0)
    assert refill is not None and (refill.group, refill.due) == (2, 0)
    assert other is not None
    submit(book, other.id, [0] * 1)
    assert book.history.hand_out(0, 0.0) is None
    submit(book, refill.id, [0] * 1)
    assert book.history.hand_out(0, 0.0) == Handout([0, 2], [])
    assert book.ledger.tokens["failed"] == 15 and book.ledger.groups["failed"] == 3


def test_the_first_complete_attempt_wins_and_the_other_is_a_duplicate() -> None:
    book = Book(terms(OnLate.wait, 0, batch=1))
    book.history.publish_version(0)
    slow = book.leases.lease_next("slow", 0.0)
    book.leases.expire_leases(100.0)
    fast = book.leases.lease_next("fast", 100.0)
    assert slow is not None and fast is not None and slow.group == fast.group
    assert submit(book, slow.id, [0] * 7) == "accepted", "late but first"
    assert submit(book, slow.id, [0] * 7) == "accepted", "sent again: idempotent"
    assert book.leases.renew_leases("fast", {fast.id: 4}, 101.0) == [fast.id], "told that it is in vain"
    assert submit(book, fast.id, [0] * 9) == "duplicate"
    assert book.ledger.tokens["duplicate"] == 9 and book.ledger.tokens["in_flight"] == 7
    assert book.ledger.closes()


def test_what_a_generator_held_before_it_was_restarted_is_given_out_at_once() -> None:
    book = Book(terms(OnLate.wait, 0, batch=3))
    book.history.publish_version(0)
    done, lost, other = (
        book.leases.lease_next("g0", 0.0),
        book.leases.lease_next("g0", 0.0),
        book.leases.lease_next("g1", 0.0),
    )
    assert done is not None and lost is not None and other is not None
    submit(book, done.id, [0] * 4)
    assert book.leases.release_generator("g0", "restarted") == [(lost.group, "lost")]
    again = book.leases.lease_next("g1", 0.0)
    assert again is not None and again.group == lost.group
    assert book.leases.renew_leases("g1", {other.id: 1, again.id: 1}, 0.0) == []
    assert book.ledger.closes()


def test_a_straggler_is_cancelled_only_after_holding_its_step_and_is_refilled() -> None:
    book = Book(terms(OnLate.cancel, 1, batch=1))
    book.history.publish_version(0)
    straggler = book.leases.lease_next("g", 0.0)
    assert straggler is not None
    book.leases.renew_leases("g", {straggler.id: 3}, 0.0)
    assert book.leases.cancel_stragglers(1000.0) == [], "nobody waits for it yet"
    assert book.history.hand_out(0, 1000.0) is None
    assert book.leases.cancel_stragglers(1014.0) == []
    assert book.leases.cancel_stragglers(1016.0) == [0]
    refill = book.leases.lease_next("g", 1016.0)
    assert refill is not None and (refill.group, refill.due) == (1, 0)
    assert book.ledger.tokens["cancelled"] == 3


@pytest.mark.parametrize("size", [1, 7, 20])
def test_an_epoch_leases_every_prompt_once_in_an_order_of_its_own(size: int) -> None:
    order = PromptOrder(size, seed=3)
    epochs = [
        [order.prompt_index(group) for group in range(epoch * size, (epoch + 1) * size)] for epoch in range(3)
    ]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert size == 1 or epochs[0] != epochs[1]
    again = PromptOrder(size, seed=3)
    assert [again.prompt_index(group) for group in range(2 * size, 3 * size)] == epochs[2], (
        "whatever was asked for before"
    )


@settings(max_examples=40, deadline=None)
@given(worlds)
def test_no_prompt_is_passed_over_whatever_crashes(world: World) -> None:
    """Groups are numbered without a gap, and each has one fate: trained, rejected, or still to be trained."""
    world.run()
    leased = {event.group for event in world.events_noted if isinstance(event, Leased)}
    rejected = {event.group for event in world.events_noted if isinstance(event, Rejected)}
    assert leased == set(range(len(leased)))
    assert leased == set(world.uses) | rejected | set(world.book.list_groups())
    assert not set(world.uses) & rejected


def test_a_budget_holds_back_what_is_not_needed_yet_and_never_the_step_at_hand() -> None:
    book = Book(terms(OnLate.wait, 2, batch=2, max_groups=3))
    book.history.publish_version(0)
    leases = list(iter(lambda: book.leases.lease_next("g", 0.0), None))
    assert [lease.due for lease in leases] == [0, 0, 1]
    assert book.leases.name_reached_budget() == "buffer.max_groups is reached (3 of 3)"
    tight = Book(terms(OnLate.wait, 2, batch=2, max_tokens=1))
    tight.history.publish_version(0)
    first = tight.leases.lease_next("g", 0.0)
    assert first is not None
    tight.leases.renew_leases("g", {first.id: 5}, 0.0)
    assert [lease.due for lease in iter(lambda: tight.leases.lease_next("g", 0.0), None)] == [0], (
        "the step itself is always made"
    )


def test_memory_stays_flat_however_many_groups_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffers.attempts.MAX_ENDED", 100)
    book = Book(terms(OnLate.wait, 1, batch=16, steps=10**6))

    def train(steps: range) -> int:
        """Bytes in use after these steps."""
        for step in steps:
            book.history.publish_version(step)
            while (lease := book.leases.lease_next("g", float(step))) is not None:
                submit(book, lease.id, [step])
            handout = book.history.hand_out(step, float(step))
            assert handout is not None
            book.history.train_step(Trained(step, handout.groups, [1] * 16, [0] * 16, {0: 16}))
            book.history.keep_checkpoint(Checkpointed(step + 1, step + 1))
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = train(range(300))
        assert train(range(300, 900)) - before < 100_000
    finally:
        tracemalloc.stop()
