"""Reads a journal that is opened: the newest state, the log since, and the groups that the disk has lost."""

from dataclasses import dataclass, field
from pathlib import Path

from buffers import events as e
from buffers.book import Book
from buffers.book_events import apply_event
from buffers.book_state import restore_book
from buffers.evaluation import Evaluations
from buffers.event_log import LogLine, LogPlace, LogTail, read_tail
from buffers.older_schemas import READABLE_SCHEMAS
from buffers.segments import Reader, is_closed, read_head, segment_numbers, segment_path
from buffers.state import State, read_newest_state
from buffers.step_records import StepRecords, read_report
from buffers.terms import Terms, TermsRecord, apply_record, check_terms, record_terms
from configs.buffer import Durability
from configs.eval import HELD_OUT
from configs.host import boot_id


@dataclass(slots=True)
class Recovery:
    """The contents of a journal: the newest state, and everything that has happened since."""

    state: State | None
    tail: LogTail
    next_segment: int = 0
    """Segments from this number on have not been written yet."""
    ends: dict[int, int] = field(default_factory=dict)
    """Byte at which the acknowledged groups of a segment end, by segment, as far as state and tail know."""
    dropped: set[int] = field(default_factory=set)
    """Segments that are not needed any more."""
    unclosed: set[int] = field(default_factory=set)
    """Segments without a footer."""
    accepted_at: dict[int, LogPlace] = field(default_factory=dict)
    """Where the line of an accepted lease ends, by lease."""
    last_began: e.Began | None = None
    """First line of the newest file of the log."""
    boot: str = field(default_factory=boot_id)
    """Name of this host and its last start."""

    def is_in_doubt(self, content: e.Accepted) -> bool:
        """True for a group whose bytes the disk may have lost after they were acknowledged.

        The groups of segments that were being written are in doubt. So are, under `fsync`, those accepted
        beyond the last durable point, because a closed segment's bytes may reach the disk later than its
        footer. All are in doubt once the host was started again, and on another host, where the journal is a
        copy.
        """
        began = self.last_began
        if content.segment in self.unclosed or began is None or began.boot != self.boot:
            return True
        is_durable = self.accepted_at.get(content.lease, (-1, 0)) <= self.tail.durable
        return began.durability == Durability.fsync and not is_durable


def read_journal(folder: Path) -> Recovery:
    """Reads the newest state and the log since. Changes nothing.

    Raises DamagedLog when lines are lost that are not a torn tail, ValueError for a journal of another
    version.
    """
    if (folder / "log.jsonl").exists():
        raise ValueError(f"the journal must be of this version of Slipstream, got an older one in {folder}")
    number, state = read_newest_state(folder)
    found = Recovery(state, read_tail(folder, number))
    if state is not None:
        found.next_segment = state.next_segment
        if state.open_segment is not None:
            found.ends[state.open_segment[0]] = state.open_segment[1]
    for line in found.tail.lines:
        note_log_line(found, line)
    present = segment_numbers(folder)
    written = {read_head(segment_path(folder, number)).schema_version for number in present}
    if unknown := written - {None, *READABLE_SCHEMAS}:
        readable = " or ".join(map(str, READABLE_SCHEMAS))
        raise ValueError(f"the journal must have schema version {readable}, got {unknown} in {folder}")
    in_question = (
        present if state is None else {n for n in present if n >= state.next_segment or n in found.ends}
    )
    found.unclosed = {n for n in in_question if not is_closed(segment_path(folder, n))}
    found.next_segment = 1 + max([*found.ends, *found.dropped, *present, found.next_segment - 1])
    return found


def note_log_line(found: Recovery, line: LogLine) -> None:
    """Notes what a line says about segments and about the life that wrote it."""
    match line.event:
        case e.Accepted(segment=segment, offset=offset, size=size):
            found.ends[segment] = max(found.ends.get(segment, 0), offset + size)
            found.accepted_at[line.event.lease] = line.end
        case e.Dropped(segments=segments):
            found.dropped.update(segments)
        case e.Began():
            found.last_began = line.event
            found.next_segment = max(found.next_segment, line.event.next_segment)


def rebuild_book(
    book: Book,
    evaluations: Evaluations,
    found: Recovery,
    terms: Terms,
    now: float,
    step_records: StepRecords,
) -> str:
    """Fills a new book from a journal, with the evaluations and step records of the run, and lets it be kept
    by `terms` from now on. Returns where the newest version's manifest is.

    Raises ValueError, naming the setting, for terms that the journal cannot go on with.
    """
    record: TermsRecord = record_terms(terms)
    manifest_locator = ""
    if found.state is not None:
        record, manifest_locator = found.state.terms, found.state.manifest_locator
        book.adopt_terms(apply_record(terms, record))
        restore_book(book, found.state.book, now)
        carried = found.state.carried_evaluations
        for version in found.state.unevaluated:
            evaluations.request_overdue(name for at, name in carried if at == version)
            evaluations.request_version(version, found.state.unevaluated_locators.get(version, ""))
        evaluations.request_overdue(name for at, name in carried if at < 0)
        for result in found.state.evaluations:
            evaluations.withdraw_version(result.version, result.evaluation_set)
        evaluations.restore_results(
            found.state.evaluations, found.state.evaluation_numbers, found.state.num_evaluations
        )
        if found.state.step_records is not None:
            step_records.restore_state(found.state.step_records)
    for line in found.tail.lines:
        apply_event(book, line.event, now)
        match line.event:
            case e.Began():
                record = line.event.terms
            case e.Published():
                manifest_locator = line.event.manifest_locator
                evaluations.request_version(line.event.version, manifest_locator)
                step_records.note_published(line.event.at)
            case e.Reported():
                step_records.add_record(read_report(line.event))
            case e.Evaluated(result=done):
                name = HELD_OUT if done is None else done.evaluation_set
                evaluations.withdraw_version(line.event.version, name)
                evaluations.add_results([] if done is None else [done])
            case e.Rewound(step=step):
                evaluations.rewind_to(step)
    check_terms(terms, record)
    book.adopt_terms(terms)
    return manifest_locator


def find_damaged_groups(book: Book, found: Recovery, reader: Reader) -> list[int]:
    """Returns the complete groups in doubt whose bytes are lost.

    Other groups are checked whenever they are read.
    """
    contents = {number: book.pool.get_content(number) for number in book.pool.groups}
    return [
        number for number, one in contents.items() if found.is_in_doubt(one) and not reader.is_intact(one)
    ]
