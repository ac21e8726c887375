"""The staleness bound is attacked on the pure logic: adversarial latencies, episodes that wait for tools,
lagging, stalling and dying generators."""

import random
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from staleness_world import StalenessWorld, make_world_terms, submit_versions

from buffers.book import Book
from buffers.events import Checkpointed, Leased, Rejected, Trained
from buffers.groups import Handout
from buffers.prompts import PromptOrder
from buffers.samplers import SAMPLERS
from buffers.staleness import count_trainable, mask_trainable, min_version
from buffers.terms import SourceTerms
from configs.staleness import OnLate

seeds = st.integers(0, 2**32).map(random.Random)
worlds = st.builds(
    StalenessWorld,
    terms=st.builds(make_world_terms, st.sampled_from(list(OnLate)), st.integers(0, 3), st.integers(1, 4)),
    rng=seeds,
    num_generators=st.integers(1, 4),
)
replaying = st.builds(
    StalenessWorld,
    terms=st.builds(
        make_world_terms, st.sampled_from(list(OnLate)), st.integers(1, 4), st.sampled_from([2, 4, 8]),
        max_uses=st.sampled_from([1, 2]), max_tokens=st.none() | st.integers(1, 100),
    ),
    rng=seeds,
    num_generators=st.integers(1, 4),
    sampler=st.sampled_from(sorted(SAMPLERS)),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(worlds)
def test_no_token_is_trained_beyond_the_bound_whatever_crashes_stalls_or_lags(world: StalenessWorld) -> None:
    world.run()
    assert all(0 <= staleness <= world.terms.max_versions for staleness in world.staleness)
    assert sum(world.uses.values()) == world.terms.steps * world.terms.groups_per_step
    if world.terms.on_late is not OnLate.mask:
        assert world.num_late == 0, "under wait and cancel nothing is ever late"


@settings(max_examples=150, deadline=None)
@given(replaying)
def test_the_bound_holds_for_every_sampler_and_for_groups_that_are_trained_again(
    world: StalenessWorld,
) -> None:
    world.run()
    assert all(0 <= staleness <= world.terms.max_versions for staleness in world.staleness)
    if world.terms.on_late is not OnLate.mask:
        assert world.num_late == 0
    assert world.ledger.tokens["trained"] + world.ledger.replayed == len(world.staleness)
    assert world.ledger.groups["trained"] == len(world.uses)
    assert world.book.history.trained_twice == 0


@settings(max_examples=80, deadline=None)
@given(worlds)
def test_the_ledger_accounts_for_every_group_and_token_at_the_end(world: StalenessWorld) -> None:
    world.run()
    assert world.ledger.groups["trained"] == len(world.uses)
    assert world.ledger.tokens["trained"] == len(world.staleness)
    assert world.ledger.tokens["masked"] + world.ledger.tokens["late"] == world.num_late
    assert world.ledger.staleness == Counter(world.staleness)
    assert world.book.history.trained_twice == 0
    assert min(world.ledger.tokens.values()) >= 0 and min(world.ledger.groups.values()) >= 0


def test_generators_that_ignore_the_oldest_version_are_caught_and_their_tokens_masked() -> None:
    late = 0
    for seed in range(20):
        world = StalenessWorld(
            make_world_terms(OnLate.wait, 1, 2), random.Random(seed), obey_min_version=False
        )
        world.run()
        assert all(0 <= staleness <= 1 for staleness in world.staleness)
        late += world.num_late
        assert world.ledger.tokens["late"] == world.num_late
    assert late > 0, "the adversary never got past the oldest version: this test shows nothing"


@pytest.mark.parametrize("on_late", OnLate)
def test_turns_after_a_tool_wait_are_sampled_by_newer_versions_and_stay_within_the_bound(
    on_late: OnLate,
) -> None:
    num_waits, spans = 0, set[int]()
    for seed in range(15):
        world = StalenessWorld(make_world_terms(on_late, 2, 2), random.Random(seed))
        world.run()
        num_waits += world.num_waits
        spans |= {max(versions) - min(versions) for versions in world.submitted.values()}
        assert all(0 <= staleness <= 2 for staleness in world.staleness)
        assert world.num_late == 0 or on_late is OnLate.mask
    assert num_waits > 100 and max(spans) > 0, (
        "no episode went on under a newer version: this test shows nothing"
    )


@given(st.integers(0, 50), st.integers(0, 8))
def test_the_oldest_version_of_a_lease_is_within_the_bound(due: int, max_versions: int) -> None:
    oldest = min_version(due, max_versions)
    assert due - oldest <= max_versions
    assert oldest == 0 or due - (oldest - 1) > max_versions


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


@pytest.mark.parametrize("max_versions", [0, 1, 3])
def test_admission_lets_out_exactly_the_groups_of_the_steps_within_the_bound(max_versions: int) -> None:
    book = Book(make_world_terms(OnLate.wait, max_versions, groups_per_step=4, steps=20))
    assert book.leases.lease_next("g", 0.0) is None, "nothing may be leased before version 0 is published"
    book.history.publish_version(0)
    leases = list(iter(lambda: book.leases.lease_next("g", 0.0), None))
    assert [lease.group for lease in leases] == list(range(4 * (max_versions + 1)))
    assert [lease.min_version for lease in leases] == [
        max(0, g // 4 - max_versions) for g in range(len(leases))
    ]


def test_a_group_that_keeps_failing_is_quarantined_and_its_place_refilled() -> None:
    book = Book(make_world_terms(OnLate.wait, 0, groups_per_step=2))
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
    submit_versions(book, other.id, [0] * 1)
    assert book.history.hand_out(0, 0.0) is None
    submit_versions(book, refill.id, [0] * 1)
    assert book.history.hand_out(0, 0.0) == Handout([0, 2], [])
    assert book.ledger.tokens["failed"] == 15 and book.ledger.groups["failed"] == 3


def test_the_first_complete_attempt_wins_and_the_other_is_a_duplicate() -> None:
    book = Book(make_world_terms(OnLate.wait, 0, groups_per_step=1))
    book.history.publish_version(0)
    slow = book.leases.lease_next("slow", 0.0)
    book.leases.expire_leases(100.0)
    fast = book.leases.lease_next("fast", 100.0)
    assert slow is not None and fast is not None and slow.group == fast.group
    assert submit_versions(book, slow.id, [0] * 7) == "accepted", "late but first"
    assert submit_versions(book, slow.id, [0] * 7) == "accepted", "sent again: idempotent"
    assert book.leases.renew_leases("fast", {fast.id: 4}, 101.0) == [fast.id], "told that it is in vain"
    assert submit_versions(book, fast.id, [0] * 9) == "duplicate"
    assert book.ledger.tokens["duplicate"] == 9 and book.ledger.tokens["in_flight"] == 7
    assert book.ledger.closes()


def test_what_a_generator_held_before_it_was_restarted_is_given_out_at_once() -> None:
    book = Book(make_world_terms(OnLate.wait, 0, groups_per_step=3))
    book.history.publish_version(0)
    done, lost, other = (
        book.leases.lease_next("g0", 0.0),
        book.leases.lease_next("g0", 0.0),
        book.leases.lease_next("g1", 0.0),
    )
    assert done is not None and lost is not None and other is not None
    submit_versions(book, done.id, [0] * 4)
    assert book.leases.release_generator("g0", "restarted") == [(lost.group, "lost")]
    again = book.leases.lease_next("g1", 0.0)
    assert again is not None and again.group == lost.group
    assert book.leases.renew_leases("g1", {other.id: 1, again.id: 1}, 0.0) == []
    assert book.ledger.closes()


def test_a_straggler_is_cancelled_only_after_holding_its_step_and_is_refilled() -> None:
    book = Book(make_world_terms(OnLate.cancel, 1, groups_per_step=1))
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
    order = PromptOrder([SourceTerms("", size)], seed=3)
    epochs = [
        [order.prompt_index(group) for group in range(epoch * size, (epoch + 1) * size)] for epoch in range(3)
    ]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert size == 1 or epochs[0] != epochs[1]
    again = PromptOrder([SourceTerms("", size)], seed=3)
    assert [again.prompt_index(group) for group in range(2 * size, 3 * size)] == epochs[2], (
        "whatever was asked for before"
    )


@settings(max_examples=40, deadline=None)
@given(worlds)
def test_no_prompt_is_passed_over_whatever_crashes(world: StalenessWorld) -> None:
    """Groups are numbered without a gap, and each has one fate: trained, rejected, or still to be trained."""
    world.run()
    leased = {event.group for event in world.events_noted if isinstance(event, Leased)}
    rejected = {event.group for event in world.events_noted if isinstance(event, Rejected)}
    assert leased == set(range(len(leased)))
    assert leased == set(world.uses) | rejected | set(world.book.list_groups())
    assert not set(world.uses) & rejected


def test_a_budget_holds_back_what_is_not_needed_yet_and_never_the_step_at_hand() -> None:
    book = Book(make_world_terms(OnLate.wait, 2, groups_per_step=2, max_groups=3))
    book.history.publish_version(0)
    leases = list(iter(lambda: book.leases.lease_next("g", 0.0), None))
    assert [lease.due for lease in leases] == [0, 0, 1]
    assert book.leases.name_reached_budget() == "buffer.max_groups is reached (3 of 3)"
    tight = Book(make_world_terms(OnLate.wait, 2, groups_per_step=2, max_tokens=1))
    tight.history.publish_version(0)
    first = tight.leases.lease_next("g", 0.0)
    assert first is not None
    tight.leases.renew_leases("g", {first.id: 5}, 0.0)
    assert [lease.due for lease in iter(lambda: tight.leases.lease_next("g", 0.0), None)] == [0], (
        "the step itself is always made"
    )


def test_memory_stays_flat_however_many_groups_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffers.attempts.MAX_ENDED", 100)
    book = Book(make_world_terms(OnLate.wait, 1, groups_per_step=16, steps=10**6))

    def train_steps(steps: range) -> int:
        """Bytes in use after these steps."""
        for step in steps:
            book.history.publish_version(step)
            while (lease := book.leases.lease_next("g", float(step))) is not None:
                submit_versions(book, lease.id, [step])
            handout = book.history.hand_out(step, float(step))
            assert handout is not None
            book.history.train_step(Trained(step, handout.groups, [1] * 16, [0] * 16, {0: 16}))
            book.history.keep_checkpoint(Checkpointed(step + 1, step + 1))
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = train_steps(range(300))
        assert train_steps(range(300, 900)) - before < 100_000
    finally:
        tracemalloc.stop()
