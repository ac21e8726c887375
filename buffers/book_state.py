"""Exports a book as a state, and restores it from one."""

from buffers.attempts import export_attempt
from buffers.book import Book
from buffers.groups import GroupUse, Handout, export_group, restore_group
from buffers.history import TrainedStep
from buffers.leases import Quarantine
from buffers.state import BookState, StepState


def export_book(book: Book) -> BookState:
    """Returns all that the book holds, for `restore_book`."""
    history, leases = book.history, book.leases
    used_up = {
        use.number: use.group
        for step in history.trained.values()
        for use in step.uses
        if use.number not in book.pool.groups
    }
    return BookState(
        version=history.version,
        newest_version=history.newest_version,
        next_step=history.next_step,
        trained_twice=history.trained_twice,
        quarantined=leases.quarantine.total,
        quarantine=dict(leases.quarantine.last),
        groups=[export_group(number, group) for number, group in book.list_groups().items()],
        retired=[export_group(number, group) for number, group in used_up.items()],
        attempts_under_way=[export_attempt(attempt) for attempt in leases.attempts.under_way.values()],
        attempts_ended=[export_attempt(attempt) for attempt in leases.attempts.ended.values()],
        next_group=leases.next_group,
        places=book.places.export_state(),
        handed={step: (handout.groups, handout.group_weights) for step, handout in history.handed.items()},
        trained=[
            StepState(step.event, [use.is_first for use in step.uses]) for step in history.trained.values()
        ],
        oldest_checkpoint=history.oldest_checkpoint,
        ledger=book.ledger.export_state(),
        supply=book.supply.export_state(),
    )


def restore_book(book: Book, state: BookState, now: float) -> None:
    """Fills a new book from a state. Leases run for a whole `lease_s` again, from `now` on."""
    history, leases = book.history, book.leases
    groups = {one.number: restore_group(one) for one in state.groups}
    for number, group in groups.items():
        if group.content is None:
            leases.open_groups[number] = group
        else:
            book.pool.add_group(number, group)
    leases.find_lost_groups()
    leases.next_group = state.next_group
    leases.quarantine = Quarantine(state.quarantined, dict(state.quarantine))
    leases.attempts.restore_attempts(state.attempts_under_way, state.attempts_ended, now, book.terms.lease_s)
    book.places.restore_state(state.places)
    book.ledger.restore_state(state.ledger)
    history.version, history.newest_version = state.version, state.newest_version
    history.next_step, history.trained_twice = state.next_step, state.trained_twice
    history.oldest_checkpoint = state.oldest_checkpoint
    history.handed = {step: Handout(numbers, weights) for step, (numbers, weights) in state.handed.items()}
    known = {one.number: restore_group(one) for one in state.retired} | groups
    book.supply.restore_state(state.supply, known, state.next_group, book.ledger.groups["trained"])
    for step in state.trained:
        event = step.trained
        rows = zip(event.groups, event.trained, event.excluded, step.is_first, strict=True)
        uses = [
            GroupUse(number, known[number], num_trained, num_excluded, is_first)
            for number, num_trained, num_excluded, is_first in rows
        ]
        history.trained[event.step] = TrainedStep(uses, event)


def find_needed_segments(book: Book) -> set[int]:
    """Returns the segments of groups that may still be trained, or trained again after a rewind."""
    waiting = [group.content for group in book.pool.groups.values()]
    undoable = [use.group.content for step in book.history.trained.values() for use in step.uses]
    return {content.segment for content in (*waiting, *undoable) if content is not None}


def count_entries(book: Book) -> int:
    """Returns about how many groups a state of the book holds, those of steps that may be undone included."""
    groups = len(book.leases.open_groups) + len(book.pool.groups)
    return groups + len(book.history.trained) * book.terms.groups_per_step
