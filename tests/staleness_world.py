"""A run of the buffer's book on a fake clock, whose every turn is an adversary's choice: latencies, waits for
tools, crashes, damage, lag."""

import itertools
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from buffers.book import Book
from buffers.book_events import apply_event
from buffers.book_state import export_book, restore_book
from buffers.events import Accepted, AnyEvent, Checkpointed, Published, Trained
from buffers.groups import Handout
from buffers.messages import Lease
from buffers.samplers import load_sampler
from buffers.staleness import count_trainable, mask_trainable
from buffers.state import BookState
from buffers.terms import Terms
from configs.staleness import OnLate
from slipstream_bench.audit import describe_logged_book


def submit_versions(
    book: Book, lease_id: int, versions: list[int], keep: tuple[float, float] | None = None
) -> str:
    """Does what the buffer does with a whole group that comes in; returns the verdict. Its mean reward is
    a whim of its numbers, and is rejected outside `keep`."""
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
    prompt = book.leases.open_groups[held[0]].prompt
    reward_mean = (prompt * 37 + held[0] * 53) % 101 / 100
    book.leases.accept_group(
        Accepted(
            lease_id,
            *held,
            prompt=prompt,
            segment=0,
            offset=0,
            size=100,
            xxh3=0,
            row=0,
            rows=1,
            tokens=len(versions),
            oldest=min(versions),
            newest=max(versions),
            reward_mean=reward_mean,
            reward_std=0.5,
            at=0.0,
            versions=by_version,
        )
    )
    if keep is not None and not keep[0] <= reward_mean <= keep[1]:
        book.history.reject_group(held[0], "uninformative")
        return "uninformative"
    return "accepted"


@dataclass
class SampledWork:
    """A lease that a generator works on, and the version of each token so far, turn after turn."""

    lease: Lease
    length: int
    versions: list[int] = field(default_factory=list)
    waits_until: float = 0.0
    """When the tool answers that its episode waits for."""


@dataclass
class FakeGenerator:
    """Samples a token at a time with the version that it holds.

    It obeys the oldest version of a lease, and is lazy otherwise.
    """

    name: str
    obeys_min_version: bool = True
    version: int = -1
    stalled_until: float = 0.0
    work: dict[int, SampledWork] = field(default_factory=dict)
    sent: list[int] = field(default_factory=list)


@dataclass
class WorldStep:
    """A trained step, until it is undone."""

    handout: Handout
    staleness: list[int]
    num_late: int


@dataclass
class StalenessWorld:
    """A run on a fake clock. Every choice is the adversary's: `rng`."""

    terms: Terms
    rng: random.Random
    num_generators: int = 3
    sampler: str = "fifo"
    obey_min_version: bool = True
    keep: tuple[float, float] | None = None
    bad: Mapping[int, str] = field(default_factory=dict)
    """Prompts that never have a result: they `fail`, `hang` until they are cancelled, or are `silent` until
    their leases expire."""
    now: float = 0.0
    history: list[WorldStep] = field(default_factory=list)
    expected: dict[int, Handout] = field(default_factory=dict)  # steps that were undone
    checkpoint: int = 0
    events_noted: list[AnyEvent] = field(default_factory=list)
    state: tuple[bytes, int] | None = None  # of the book at some moment, and how many events had come
    num_damaged: int = 0
    num_waits: int = 0  # for tools
    submitted: dict[int, list[int]] = field(default_factory=dict)  # group -> versions of its tokens

    def __post_init__(self) -> None:
        self.new_book()
        self.publish_version(0)
        self.generators = [FakeGenerator(f"g{i}", self.obey_min_version) for i in range(self.num_generators)]

    def new_book(self) -> None:
        noted, self.events_noted = self.events_noted, []
        self.book = self.rebuild_book(None, noted)
        if self.state is not None:  # recovery from a state and what came after leads to the same
            data, num_before = self.state
            replayed, self.book = self.book, self.rebuild_book(data, noted[num_before:])
            assert describe_logged_book(self.book) == describe_logged_book(replayed)
        self.ledger = self.book.ledger
        self.book.note = self.events_noted.append
        self.events_noted += noted

    def rebuild_book(self, state: bytes | None, events: list[AnyEvent]) -> Book:
        ids = itertools.count(1_000_000 * (1 + len(self.history) + self.rng.randrange(10**9)))
        book = Book(self.terms, sampler=load_sampler(self.sampler, {}), lease_ids=ids)
        if state is not None:
            restore_book(book, msgspec.msgpack.decode(state, type=BookState), self.now)
        for event in events:
            apply_event(book, event, self.now)
        return book

    def publish_version(self, version: int) -> None:
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
            self.rng.choice(self.moves)(self, self.rng.choice(self.generators))
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

    def ask_lease(self, generator: FakeGenerator) -> None:
        if generator.stalled_until > self.now or len(generator.work) > 3:
            return
        lease = self.book.leases.lease_next(generator.name, self.now)
        if lease is None:
            return
        out = sum(bool(group.attempts) for group in self.book.list_groups().values())
        assert out <= (self.terms.max_versions + 1) * self.terms.groups_per_step
        if generator.obeys_min_version and generator.version < lease.min_version:
            generator.version = self.rng.randint(lease.min_version, self.book.history.version)
        generator.version = max(generator.version, 0)
        generator.work[lease.id] = SampledWork(lease, self.rng.choice([1, 2, 5, 40]))

    def sample_tokens(self, generator: FakeGenerator) -> None:
        if generator.stalled_until > self.now:
            return
        for work in list(generator.work.values()):
            if work.waits_until > self.now:
                continue
            if (trouble := self.bad.get(work.lease.index)) is not None:
                if trouble == "fail":
                    del generator.work[work.lease.id]
                    self.book.leases.fail_lease(work.lease.id, len(work.versions), "the task raised")
                continue
            work.versions.append(generator.version)
            if self.rng.random() < 0.2:
                work.waits_until = self.now + self.rng.choice([0.5, 3, 20, 60])
                self.num_waits += 1
            if len(work.versions) >= work.length:
                del generator.work[work.lease.id]
                generator.sent.append(work.lease.id)
                if submit_versions(self.book, work.lease.id, work.versions, self.keep) == "accepted":
                    self.submitted[work.lease.group] = work.versions

    def pull_version(self, generator: FakeGenerator) -> None:
        if self.rng.random() < 0.3:
            newest = self.book.history.version  # below the one held, where the learner went back
            generator.version = min(newest, max(generator.version, self.rng.randint(0, newest)))

    def send_heartbeat(self, generator: FakeGenerator) -> None:
        if generator.stalled_until > self.now:
            return
        progress = {
            lease_id: len(work.versions)
            for lease_id, work in generator.work.items()
            if self.bad.get(work.lease.index) != "silent"
        }
        late = {
            lease_id: self.rng.randint(0, 5) for lease_id in generator.sent[-4:]
        }  # not heard yet that it was accepted
        self.book.leases.renew_leases(generator.name, late, self.now)
        for lease_id in self.book.leases.renew_leases(generator.name, progress, self.now):
            self.book.leases.fail_lease(lease_id, len(generator.work.pop(lease_id).versions), "revoked")

    def stall_generator(self, generator: FakeGenerator) -> None:
        if self.rng.random() < 0.05:
            generator.stalled_until = self.now + self.rng.choice([1, 10, 100])

    def kill_generator(self, generator: FakeGenerator) -> None:
        if self.rng.random() < 0.05:
            generator.work.clear()
            generator.version = -1

    def fail_work(self, generator: FakeGenerator) -> None:
        if generator.work and self.rng.random() < 0.05:
            lease_id, work = generator.work.popitem()
            self.book.leases.fail_lease(lease_id, len(work.versions), "the task raised")

    def train_step(self, generator: FakeGenerator) -> None:
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
        self.history.append(WorldStep(handout, stale, late))
        self.publish_version(self.step)
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
            self.publish_version(
                self.checkpoint
            )  # generators hold what the dead learner published, until they pull

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

    def damage_group(self, generator: FakeGenerator) -> None:
        """The disk loses a complete group: handed out or not, trained before or not."""
        if self.book.pool.groups and self.rng.random() < 0.03:
            number = self.rng.choice(sorted(self.book.pool.groups))
            self.expected = {step: one for step, one in self.expected.items() if number not in one.groups}
            self.book.history.replace_damaged(number, "its bytes have changed")
            self.num_damaged += 1

    def change_lag(self, generator: FakeGenerator) -> None:
        """A controller admits as much or as little as it likes, up to the bound."""
        if self.rng.random() < 0.1:
            self.book.leases.admission_lag = self.rng.randint(0, self.terms.max_versions)

    moves = (
        *(ask_lease,) * 3,
        *(sample_tokens,) * 3,
        pull_version,
        *(send_heartbeat,) * 2,
        stall_generator,
        kill_generator,
        fail_work,
        *(train_step,) * 2,
        crash_learner,
        crash_buffer,
        change_lag,
        take_state,
        damage_group,
    )
    """Moves of the adversary. A move that stands here n times is n times as likely."""


def make_world_terms(
    on_late: OnLate, max_versions: int, groups_per_step: int, steps: int = 6, **more: object
) -> Terms:
    return Terms(
        groups_per_step=groups_per_step,
        steps=steps,
        max_versions=max_versions,
        on_late=on_late,
        samples_per_prompt=1,
        lease_s=20.0,
        max_attempts=3,
        straggler_timeout_s=15.0 if on_late is OnLate.cancel else None,
        task="t",
        seed=0,
        **more,  # type: ignore[arg-type]
    )
