"""Makes a book again after a restart from the events that the log holds."""

from collections import Counter

from buffers import events as e
from buffers.book import Book
from buffers.groups import Handout
from buffers.terms import apply_record
from configs.staleness import OnLate


def apply_event(book: Book, event: e.AnyEvent, now: float) -> None:
    """Does again what an event tells. `book.note` must not write the event down a second time."""
    match event:
        case e.Began():
            book.adopt_terms(apply_record(book.terms, event.terms))
        case e.Leased():
            book.leases.grant_lease(event.lease, event.group, event.due, event.generator, now, event.prompt)
        case e.Accepted():
            book.leases.accept_group(event)
        case e.Failed():
            book.leases.fail_lease(event.lease, event.tokens, event.error, counts=event.counts)
        case e.Duplicate():
            book.leases.count_duplicate(event.lease, event.tokens)
        case e.Rejected():
            _reject_again(book, event)
        case e.Opened():
            book.history.open_places(event.step, event.places)
        case e.Retired():
            book.history.retire_groups(event.groups)
        case e.Handed():
            book.history.handed[event.step] = Handout(event.groups, event.group_weights)
        case e.Trained():
            book.history.train_step(event)
        case e.Rewound():
            book.rewind_to(event.step)
        case e.Checkpointed():
            book.history.keep_checkpoint(event)
        case e.Published():
            book.history.publish_version(event.version)
        case e.Repaired():
            reopen_lost_places(book)


def _reject_again(book: Book, event: e.Rejected) -> None:
    """Rejects a group again, unless the failure before it has done so: quarantining tells two events."""
    # A damaged group whose step was trained without it gets a place at another step, which `Opened` tells.
    is_overtaken = event.reason == "damaged" and event.due < book.history.next_step
    refill = event.reason != "unsampled" and not is_overtaken
    if event.group in book.leases.open_groups:
        book.leases.reject_open_group(event.group, event.reason, event.error, refill=refill)
    elif event.group in book.pool.groups:
        book.history.reject_group(event.group, event.reason, event.error, refill=refill)


def reopen_lost_places(book: Book) -> None:
    """Mends a book whose log has lost lines: places whose groups are lost go to fresh groups, and the
    groups of steps that were handed lost ones are chosen anew."""
    history, pool = book.history, book.pool
    history.handed = {
        step: handout
        for step, handout in history.handed.items()
        if step >= history.next_step and all(number in pool.groups for number in handout.groups)
    }
    groups = book.list_groups()
    used_up = {use.number: use.group for step in history.trained.values() for use in step.uses}
    trained_early = [
        group.due
        for number, group in used_up.items()
        if number not in groups and group.due >= history.next_step
    ]
    held = Counter([*(group.due for group in groups.values()), *trained_early])
    unfinished = Counter(group.due for group in book.leases.open_groups.values())
    overtakes = book.terms.on_late is OnLate.mask
    book.places.reopen_missing(history.next_step, held, unfinished, overtakes)
