"""Repairs a journal whose log has lost lines: saves what can be saved, and lists the rest. Its command is
`scripts/repair.sh`.

    newest state ─▶ every whole line since, with leniency
                 ─▶ groups that only the segments still know ─▶ a state, a new log

Most facts of a lost line stand elsewhere too: a group's rows name the group, a step that was handed out names
the groups that it trained, and a gap in the numbers of groups is a lease. Groups that cannot be found again
are made again: their places are given to fresh ones. The damaged files stay beside the mended ones, as
`<name>.damaged`.
"""

import itertools
import mmap
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from buffers import events as e
from buffers.arrow_ipc import find_blocks
from buffers.book import Book
from buffers.book_events import apply_event
from buffers.book_state import export_book, restore_book
from buffers.evaluation import replay_results
from buffers.event_log import (
    LogLine,
    LogTail,
    ParsedFile,
    find_end_before,
    log_numbers,
    log_path,
    parse_log_file,
)
from buffers.files import find_free_name, replace_file
from buffers.group_checks import ExpectedGroup, GroupFacts, check_groups
from buffers.journal import Journal
from buffers.older_schemas import read_stored_batch
from buffers.recovery import Recovery, note_log_line
from buffers.segments import is_closed, read_head, segment_numbers, segment_path
from buffers.staleness import count_trainable
from buffers.state import State, read_newest_state
from buffers.terms import FIXED_SETTINGS, Terms, TermsRecord, apply_record
from buffers.trajectory import MalformedGroup, encode_batch
from configs.buffer import Durability
from configs.host import boot_id
from configs.staleness import OnLate

LOST_LEASE = "lost by the log"
"""Generator that a lease gets when its line is lost."""


@dataclass(slots=True)
class RepairReport:
    """The findings and the work of a repair, in sentences."""

    damage: list[str] = field(default_factory=list)
    """The places of lines that are lost."""
    saved: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    lost_groups: set[int] = field(default_factory=set)
    """Numbers of groups that were accepted and cannot be had any more."""
    step: int = 0
    """Number of steps that count as trained."""


def repair_journal(folder: Path) -> RepairReport:
    """Mends a journal. One without damage is left as it is.

    Raises ValueError when another process writes it, and when nothing says on what terms it was written.
    """
    journal = Journal(folder, Durability.fsync, 1 << 20)
    try:
        return _Repair(journal, folder).run()
    finally:
        journal.close()


class _Repair:
    """One repair.

    `run` goes through the lines of the log in order, with leniency, and then writes the mended files.
    """

    def __init__(self, journal: Journal, folder: Path) -> None:
        self._journal, self._folder = journal, folder
        self._number, self._state = read_newest_state(folder)
        self._files = [
            parse_log_file(folder, number) for number in log_numbers(folder) if number >= self._number
        ]
        self._report = RepairReport()
        self._orphans: dict[int, e.Accepted] = {}
        self._training_known = True
        self._events: list[e.AnyEvent] = []
        """Events of the file that is being mended."""

    def run(self) -> RepairReport:
        report = self._report
        report.damage = list(self._find_damage())
        if not report.damage:
            return report
        record = self._find_terms()
        terms = apply_record(_make_placeholder_terms(), record)
        self._book = book = Book(terms)
        if self._state is not None:
            restore_book(book, self._state.book, 0.0)
        lines = [line for parsed in self._files for line in parsed.lines]
        found = Recovery(self._state, LogTail(lines))
        for line in lines:
            note_log_line(found, line)
        if self._state is not None and self._state.open_segment is not None:
            found.ends.setdefault(*self._state.open_segment)
        present = segment_numbers(self._folder)
        found.next_segment = 1 + max([-1, found.next_segment - 1, *found.ends, *present])
        self._orphans = {one.group: one for one in self._find_orphans(lines)}
        for one in self._orphans.values():
            found.ends[one.segment] = max(found.ends.get(one.segment, 0), one.offset + one.size)
        found.unclosed = {
            n for n in found.ends if n in present and not is_closed(segment_path(self._folder, n))
        }
        mended = [self._mend_file(parsed) for parsed in self._files]
        for number in sorted(self._orphans):
            self._complete_group(number)
        self._end_repair()
        files = self._encode_files(mended)
        self._begin_journal(
            found, record, len(files[-1])
        )  # from here on the old files of the log are history
        self._rewrite_files(files, mended)
        return report

    def _mend_file(self, parsed: ParsedFile) -> list[e.AnyEvent]:
        """Returns the events that a mended file of the log holds.

        The last file's list grows until all is done.
        """
        self._events = []
        for line in parsed.lines:
            self._apply_leniently(line.event)
        return self._events

    def _redo_event(self, event: e.AnyEvent) -> None:
        """Applies an event to the book and writes it into the mended log."""
        apply_event(self._book, event, 0.0)
        self._events.append(event)

    def _find_damage(self) -> Iterator[str]:
        first = self._files[0].began if self._files else None
        if first is not None and first.log > self._number <= first.previous:
            yield f"before {log_path(self._folder, first.log)}: {self._number:06d}.jsonl is missing"
        for before, parsed in zip([None, *self._files], self._files, strict=False):
            if parsed.began is None and not parsed.bad and (parsed.lines or parsed is not self._files[-1]):
                yield f"byte 0 of {log_path(self._folder, parsed.number)}: its first line is missing"
            for byte in parsed.bad:
                path = log_path(self._folder, parsed.number)
                yield f"byte {byte} of {path}: a line does not match its checksum"
            began = parsed.began
            if before is not None and began is not None and began.previous != before.number:
                yield f"before {log_path(self._folder, parsed.number)}: a file of the log is missing"
            elif before is not None and began is not None and began.previous_bytes > before.size:
                lost = began.previous_bytes - before.size
                yield f"the end of {log_path(self._folder, before.number)}: its last {lost} bytes are missing"

    def _find_terms(self) -> TermsRecord:
        record: TermsRecord | None = None if self._state is None else self._state.terms
        for parsed in self._files:
            record = parsed.began.terms if parsed.began is not None else record
        if record is None or not FIXED_SETTINGS.keys() <= record.keys():
            raise ValueError(
                "a journal must say on what terms it was written, "
                f"got {self._folder} without a state or first line"
            )
        return record

    # ---- groups that only the segments know

    def _find_orphans(self, lines: list[LogLine]) -> Iterator[e.Accepted]:
        """Yields groups whose rows are whole in a segment although no line names them."""
        known = {(one.segment, one.offset, one.row) for one in self._known_contents(lines)}
        dropped = {n for line in lines if isinstance(line.event, e.Dropped) for n in line.event.segments}
        since = 0
        if self._state is not None:
            since = self._state.open_segment[0] if self._state.open_segment else self._state.next_segment
        for number in sorted(segment_numbers(self._folder) - dropped):
            if number >= since:
                yield from self._read_orphans(number, known)

    def _known_contents(self, lines: list[LogLine]) -> Iterator[e.Accepted]:
        yield from (line.event for line in lines if isinstance(line.event, e.Accepted))
        if self._state is not None:
            groups = (*self._state.book.groups, *self._state.book.retired)
            yield from (one.content for one in groups if one.content is not None)

    def _read_orphans(self, segment: int, known: set[tuple[int, int, int]]) -> Iterator[e.Accepted]:
        path = segment_path(self._folder, segment)
        head = read_head(path)
        if path.stat().st_size <= head.size:
            return
        with open(path, "rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        for offset, num_metadata, num_body in find_blocks(data, head.size):
            message = bytes(data[offset : offset + num_metadata + num_body])
            groups = self._read_groups(segment, offset, message)
            yield from (one for one in groups if (segment, offset, one.row) not in known)

    def _read_groups(self, segment: int, offset: int, message: bytes) -> Iterator[e.Accepted]:
        terms = self._book.terms
        try:
            batch = read_stored_batch(pa.py_buffer(message), validate=True)
        except MalformedGroup:
            return
        starts = np.flatnonzero(
            (batch.column("sample").to_numpy() == 0) & (batch.column("branch").to_numpy() == 0)
        ).tolist()
        for row, end in itertools.pairwise([*starts, batch.num_rows]):
            one = batch.slice(row, end - row)
            group, due, prompt = (one.column(name)[0].as_py() for name in ("group", "due", "prompt_id"))
            wanted = ExpectedGroup(group, due, prompt, one.num_rows)
            verdict = check_groups(
                encode_batch(pa.concat_batches([one])),
                [wanted],
                num_samples=terms.samples_per_prompt,
                newest_version=2**31 - 1,
            ).verdicts[0]
            if isinstance(verdict, GroupFacts):
                yield e.Accepted(
                    lease=-1,
                    group=wanted.group,
                    due=wanted.due,
                    prompt=wanted.prompt,
                    segment=segment,
                    offset=offset,
                    size=len(message),
                    xxh3=xxhash.xxh3_64_intdigest(message),
                    row=row,
                    rows=one.num_rows,
                    tokens=verdict.num_tokens,
                    oldest=verdict.oldest_version,
                    newest=verdict.newest_version,
                    reward_mean=verdict.reward_mean,
                    reward_std=verdict.reward_std,
                    at=float(one.column("finished_at")[0].as_py()),
                    versions=verdict.tokens_by_version,
                )

    # ---- lines, with leniency

    def _apply_leniently(self, event: e.AnyEvent) -> None:
        book = self._book
        match event:
            case e.Leased(group=number):
                self._grant_before(number)
                if number == book.leases.next_group or (number in book.leases.open_groups):
                    self._redo_event(event)
            case e.Accepted():
                self._accept_group(event)
            case e.Duplicate(lease=lease, tokens=tokens) if (
                lease in book.leases.attempts.under_way
            ):  # why it came too late is lost
                if not self._complete_group(book.leases.attempts.under_way[lease].group):
                    self._redo_event(e.Failed(lease, tokens, LOST_LEASE, 0.0, counts=False))
                else:
                    self._redo_event(event)
            case e.Retired(groups=groups):
                self._redo_event(e.Retired([number for number in groups if number in book.pool.groups]))
            case e.Handed():
                if event.step >= book.history.next_step and all(
                    [self._complete_group(number) for number in event.groups]
                ):
                    self._redo_event(event)
            case e.Trained():
                self._train_again(event)
            case e.Rewound(step=step) if book.history.oldest_checkpoint <= step <= book.history.next_step:
                self._redo_event(event)
                self._training_known = True
            case e.Checkpointed(step=step) if step <= book.history.next_step:
                self._redo_event(event)
            case e.Published(version=version):
                if version < book.history.version:  # the rewind before it is lost
                    self._rewind_again(version)
                if version > book.history.version:
                    self._redo_event(event)
            case e.Synced() | e.Rewound() | e.Checkpointed():
                pass
            case _:
                self._redo_event(event)

    def _grant_before(self, number: int) -> None:
        """Leases and loses the groups below this number that no line names, so that they are made again."""
        book = self._book
        while book.leases.next_group < number:
            due, _ = book.places.next_opening()
            lost = book.leases.next_group
            prompt = book.supply.find_prompt(lost)
            self._redo_event(e.Leased(-1 - lost, lost, due, LOST_LEASE, 0.0, prompt))
            self._redo_event(e.Failed(-1 - lost, 0, LOST_LEASE, 0.0, counts=False))
            self._report.saved.append(f"group {lost}: its lease is lost, and it is given out again")

    def _accept_group(self, content: e.Accepted) -> None:
        book, number = self._book, content.group
        self._grant_before(number)
        group = book.find_group(number)
        if number < book.leases.next_group and (group is None or group.content is not None):
            return
        if book.leases.find_open_group(content.lease) is None:
            self._redo_event(e.Leased(content.lease, number, content.due, LOST_LEASE, 0.0, content.prompt))
        self._redo_event(content)

    def _complete_group(self, number: int) -> bool:
        """Completes a group from its segment where its line is lost; true when the group is complete."""
        book = self._book
        group = book.find_group(number)
        if group is not None and group.content is not None:
            return True
        content = self._orphans.get(number)
        if content is None or (group is None and number < book.leases.next_group):
            return False
        lease = min(group.attempts, default=-1 - number) if group is not None else -1 - number
        self._accept_group(msgspec.structs.replace(content, lease=lease))
        self._report.saved.append(
            f"group {number}: its line and checksum are lost, "
            f"its rows are well formed in segment {content.segment}"
        )
        return True

    def _rewind_again(self, step: int) -> None:
        if self._book.history.oldest_checkpoint <= step <= self._book.history.next_step:
            self._redo_event(e.Rewound(step))
            self._report.saved.append(f"step {step}: a rewind to it is lost, and was done again")
            self._training_known = True

    def _train_again(self, event: e.Trained) -> None:
        book = self._book
        if event.step < book.history.next_step:
            self._rewind_again(event.step)
        while self._training_known and book.history.next_step < event.step:
            self._training_known = self._train_as_handed(book.history.next_step)
        known = self._training_known and book.history.next_step == event.step
        if known and all([self._complete_group(number) for number in event.groups]):
            if event.step not in book.history.handed:
                self._redo_event(e.Handed(event.step, event.groups, event.group_weights))  # its line is lost
            self._redo_event(event)
            return
        self._training_known = False
        self._report.lost.append(f"step {event.step} was trained, and counts as not trained")
        self._report.lost_groups.update(n for n in event.groups if book.find_group(n) is None)

    def _train_as_handed(self, step: int) -> bool:
        """Trains a step whose line is lost as it was handed out; false when that is lost too."""
        book = self._book
        handout = book.history.handed.get(step)
        if handout is None or any(number not in book.pool.groups for number in handout.groups):
            return False
        counts = [
            count_trainable(book.pool.get_content(n).tokens_by_version(), step, book.terms.max_versions)
            for n in handout.groups
        ]
        staleness = sum((Counter(by_staleness) for _, _, by_staleness in counts), Counter[int]())
        trained = e.Trained(
            step,
            handout.groups,
            [c[0] for c in counts],
            [c[1] for c in counts],
            dict(staleness),
            handout.group_weights,
        )
        self._redo_event(trained)
        self._report.saved.append(f"step {step}: its line is lost, it was trained as it was handed out")
        return True

    # ---- the mended journal

    def _end_repair(self) -> None:
        report = self._report
        report.step = self._book.history.next_step
        before = len(self._book.places.freed)
        self._redo_event(
            e.Repaired(report.step, sorted(report.lost_groups), [*report.damage, *report.saved, *report.lost])
        )
        if reopened := len(self._book.places.freed) - before:
            report.lost.append(f"{reopened} places had lost their groups, which are made anew")

    def _encode_files(self, mended: list[list[e.AnyEvent]]) -> list[bytes]:
        """Returns the new contents of the files. Each says where the one before it ends."""
        previous, files = find_end_before(self._folder, self._number), []
        for parsed, events in zip(self._files, mended, strict=True):
            if not (events and isinstance(events[0], e.Began)):
                events.insert(0, self._make_began(parsed.number))
            events[0] = msgspec.structs.replace(events[0], previous=previous[0], previous_bytes=previous[1])
            files.append(b"".join(map(e.encode_line, events)))
            previous = (parsed.number, len(files[-1]))
        return files

    def _rewrite_files(self, files: list[bytes], mended: list[list[e.AnyEvent]]) -> None:
        """Writes the mended events into the files.

        Files that said something else stay beside them as they were.
        """
        for parsed, data, events in zip(self._files, files, mended, strict=True):
            path = log_path(self._folder, parsed.number)
            if parsed.bad or not self._says_as_much(parsed, events):
                os.link(path, find_free_name(path.with_name(f"{path.name}.damaged")))
            replace_file(path, data)

    def _says_as_much(self, parsed: ParsedFile, mended: list[e.AnyEvent]) -> bool:
        """True when the mended file says all that the file said, but for the end of the one before it."""
        said = [line.event for line in parsed.lines if not isinstance(line.event, e.Began | e.Synced)]
        left = iter(mended)
        return all(event in left for event in said)

    def _make_began(self, number: int) -> e.Began:
        return e.Began(number, 0, 0, 0, dict(self._find_terms()), str(Durability.fsync), boot_id(), 0.0)

    def _begin_journal(self, found: Recovery, record: TermsRecord, last_bytes: int) -> None:
        """Puts the state that the repair has led to on the disk.

        A repair that is killed has either changed nothing that counts, or is done but for the history.
        """
        locator = "" if self._state is None else self._state.manifest_locator
        for line in found.tail.lines:
            if isinstance(line.event, e.Published):
                locator = line.event.manifest_locator
        found.tail.end = (self._files[-1].number, last_bytes)
        state = State(
            terms=dict(record),
            book=export_book(self._book),
            manifest_locator=locator,
            unevaluated=[] if self._state is None else self._state.unevaluated,
            carried_evaluations=[] if self._state is None else self._state.carried_evaluations,
            evaluations=replay_results(
                [] if self._state is None else self._state.evaluations,
                (line.event for line in found.tail.lines),
            ),
            next_segment=0,
            open_segment=None,
        )
        self._journal.begin(found, state)


def _make_placeholder_terms() -> Terms:
    """Returns terms that those of the record replace."""
    return Terms(
        groups_per_step=1, steps=1, max_versions=0, on_late=OnLate.wait, samples_per_prompt=1, lease_s=1.0,
        max_attempts=1, straggler_timeout_s=None, task="", seed=0,
    )  # fmt: skip
