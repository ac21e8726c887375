"""Makes a lease book again after a restart: from a state, and from the events that the log holds since."""

from collections import Counter

from buffers import events as e
from buffers.groups import (
    Handout,
    Quarantine,
    Use,
    export_attempt,
    export_group,
    recorded_terms,
    restore_attempt,
    restore_group,
)
from buffers.leases import LeaseBook
from buffers.state import BookState, StepState
from configs.staleness import OnLate


def apply_event(book: LeaseBook, event: e.AnyEvent, now: float) -> None:
    """Does again what an event says was done. The book must have no `note` that writes it down a second time."""
    match event:
        case e.Began():
            book.adopt_terms(recorded_terms(book.terms, event.terms))
        case e.Leased():
            book.grant_lease(event.lease, event.group, event.due, event.generator, now)
        case e.Accepted():
            book.accept(event)
        case e.Failed():
            book.fail(event.lease, event.tokens, event.error, counts=event.counts)
        case e.Duplicate():
            book.duplicate(event.lease, event.tokens)
        case e.Rejected(group=number, reason=reason):
            if number in book.groups:  # else rejected by the failure before it
                overtaken = reason == "damaged" and event.due < book.num_consumed
                book.reject(number, reason, event.error, refill=reason != "unsampled" and not overtaken)
        case e.Opened():
            book.open_places(event.step, event.places)
        case e.Retired():
            for number in event.groups:
                book.retire_group(number)
                book.drop_scripts(number)
        case e.Handed():
            book.scripted[event.step] = Handout(event.groups, event.weights)
        case e.Trained():
            book.consume(event)
        case e.Rewound():
            book.rewind(event.step)
        case e.Checkpointed():
            book.checkpoint(event)
        case e.Published():
            book.publish(event.version)
        case e.Repaired():
            reopen_lost_places(book)


def reopen_lost_places(book: LeaseBook) -> None:
    """For a log that has lost lines: places whose groups are lost go to fresh ones, and steps that were handed lost
    groups are chosen anew."""
    whole = {
        step: one for step, one in book.scripted.items() if all(number in book.pool for number in one.groups)
    }
    book.scripted = {step: one for step, one in whole.items() if step >= book.num_consumed}
    used_up = {use.number: use.group for uses, _ in book.trained.values() for use in uses}
    early = [
        g.due for number, g in used_up.items() if number not in book.groups and g.due >= book.num_consumed
    ]
    held = Counter([*(group.due for group in book.groups.values()), *early])
    unfinished = Counter(group.due for group in book.groups.values() if group.content is None)
    book.places.reopen_missing(book.num_consumed, held, unfinished, book.terms.on_late is OnLate.mask)


def export_book(book: LeaseBook) -> BookState:
    """All that the book holds, for `restore_book`."""
    used_up = {
        use.number: use.group
        for uses, _ in book.trained.values()
        for use in uses
        if use.number not in book.groups
    }
    return BookState(
        version=book.version,
        newest_version=book.newest_version,
        num_consumed=book.num_consumed,
        trained_twice=book.trained_twice,
        num_rejected=dict(book.num_rejected),
        quarantined=book.quarantine.total,
        quarantine=dict(book.quarantine.last),
        groups=[export_group(number, group) for number, group in book.groups.items()],
        retired=[export_group(number, group) for number, group in used_up.items()],
        attempts=[export_attempt(attempt) for attempt in book.attempts.values()],
        dead=[export_attempt(attempt) for attempt in book.dead.values()],
        next_group=book.next_group,
        places=book.places.export_state(),
        scripted={step: (handout.groups, handout.weights) for step, handout in book.scripted.items()},
        trained=[StepState(event, [use.first for use in uses]) for uses, event in book.trained.values()],
        floor_step=book.floor_step,
        ledger=book.ledger.export_state(),
    )


def restore_book(book: LeaseBook, state: BookState, now: float) -> None:
    """A new book goes on from a state; leases get a whole `lease_s` again."""
    book.version, book.newest_version = state.version, state.newest_version
    book.num_consumed, book.trained_twice = state.num_consumed, state.trained_twice
    book.num_rejected = Counter(state.num_rejected)
    book.quarantine = Quarantine(state.quarantined, dict(state.quarantine))
    book.groups = {one.number: restore_group(one) for one in state.groups}
    book.pool = {number: group for number, group in book.groups.items() if group.content is not None}
    book.bytes_held = sum(book.content(number).size for number in book.pool)
    for one in state.attempts:
        attempt = restore_attempt(one, now, book.terms.lease_s)
        book.attempts[one.lease] = attempt
        book.deadlines.add(attempt)
    book.dead.update((one.lease, restore_attempt(one, now, 0.0)) for one in state.dead)
    book.next_group = state.next_group
    book.places.restore_state(state.places)
    book.lost = sorted(
        (group.due, number)
        for number, group in book.groups.items()
        if not group.attempts and group.content is None
    )
    book.scripted = {step: Handout(groups, weights) for step, (groups, weights) in state.scripted.items()}
    known = {**{one.number: restore_group(one) for one in state.retired}, **book.groups}
    for step in state.trained:
        done = step.trained
        rows = zip(done.groups, done.trained, done.excluded, step.first, strict=True)
        uses = [
            Use(number, known[number], trained, excluded, first) for number, trained, excluded, first in rows
        ]
        book.trained[done.step] = (uses, done)
    book.floor_step = state.floor_step
    book.ledger.restore_state(state.ledger)


def segments_needed(book: LeaseBook) -> set[int]:
    """Segments of groups that may still be trained, or trained again after a rewind."""
    alive = [group.content for group in book.groups.values()]
    undoable = [use.group.content for uses, _ in book.trained.values() for use in uses]
    return {content.segment for content in (*alive, *undoable) if content is not None}


def count_entries(book: LeaseBook) -> int:
    """How large the book's state is, about: groups that are kept, those of steps that may be undone included."""
    return len(book.groups) + len(book.trained) * book.terms.groups_per_step
