"""The event log: `journal/log/<number>.jsonl`, an event a line, a checksum in each line.

    log/000004.jsonl    Began(log=4, previous=3, previous_bytes=…), then the events in order
    log/000005.jsonl    Began(log=5, previous=4, …): begun at a rotation, or by the next life of the buffer

A line that does not match its checksum is one of two things. Where a write was cut short, nothing whole
follows it: that is a torn tail, which was never acknowledged and is set aside. Anywhere else it is damage:
the log then refuses to open and says where, because the lines that follow rest on the lost one
(`buffers.repair` saves what can be saved).

With `durability=fsync` a loss of power may leave a hole in bytes that were not synced yet, with whole lines
behind it. `Synced` lines say up to where the disk had everything. A bad line beyond that point is a torn tail
too, however much follows it, because answers are sent only after their lines are synced.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from buffers import events as e
from buffers.files import list_numbers
from buffers.state import state_numbers
from configs.buffer import Durability

LogPlace = tuple[int, int]
"""(number of the file, byte in it)."""


class DamagedLog(ValueError):
    """The log has lost lines that later lines rest on."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """An event, and where its line ends."""

    event: e.AnyEvent
    end: LogPlace


@dataclass(slots=True)
class LogTail:
    """The contents of a log from some file on."""

    lines: list[LogLine] = field(default_factory=list)
    durable: LogPlace = (-1, 0)
    """The disk had all before this place at some time."""
    torn: LogPlace | None = None
    """Where the torn tail begins; None when there is none."""
    torn_files: list[int] = field(default_factory=list)
    """Files behind the torn tail. Nothing in them counts."""
    end: LogPlace = (-1, 0)
    """Where the log ends without the torn tail: its last file and the size of that file."""


def log_folder(journal: Path) -> Path:
    return journal / "log"


def log_path(journal: Path, number: int) -> Path:
    return log_folder(journal) / f"{number:06d}.jsonl"


def log_numbers(journal: Path) -> list[int]:
    """Returns the numbers of the log's files, in order."""
    return list_numbers(log_folder(journal), ".jsonl")


@dataclass(slots=True)
class ParsedFile:
    """The lines of one file."""

    number: int
    size: int
    """Bytes that were read."""
    lines: list[LogLine]
    bad: list[int]
    """Bytes at which the lines begin that do not match their checksums."""

    @property
    def began(self) -> e.Began | None:
        """The first line; None when that is lost."""
        first = self.lines[0].event if self.lines else None
        return first if isinstance(first, e.Began) else None


def parse_log_file(journal: Path, number: int, limit: int | None = None) -> ParsedFile:
    """Reads a file's lines, up to byte `limit`."""
    parsed, place = ParsedFile(number, 0, [], []), 0
    with open(log_path(journal, number), "rb") as file:
        for line in file:
            if limit is not None and place >= limit:
                break
            event = e.decode_line(line)
            if event is None:
                parsed.bad.append(place)
            place += len(line)
            if event is not None:
                parsed.lines.append(LogLine(event, (number, place)))
    parsed.size = place
    return parsed


def read_tail(journal: Path, first: int) -> LogTail:
    """Reads the log from file `first` on, or from the next one where `first` was never begun. Changes
    nothing.

    Raises DamagedLog where lines are lost that are not a torn tail, and where a file is missing.
    """
    files = _parse_files(journal, first)
    # A state is written after everything before its file of the log is on the disk.
    durable = (max([first, *state_numbers(journal)]), 0)
    tail = LogTail(durable=durable, end=find_end_before(journal, first))
    last_good = max((parsed.lines[-1].end for parsed in files if parsed.lines), default=(-1, 0))
    for parsed in files:
        for line in parsed.lines:
            if isinstance(line.event, e.Synced):
                tail.durable = max(tail.durable, (line.event.log, line.event.end))
    before: ParsedFile | None = None
    for parsed in files:
        damage = _find_damage(journal, first, before, parsed)
        if damage is not None:
            place, what = damage
            holes_are_torn = _find_durability(parsed, before) == Durability.fsync and place >= tail.durable
            if place < last_good and not holes_are_torn:
                raise DamagedLog(_describe_damage(journal, place, what))
            _end_at_torn_place(tail, place, parsed, files)
            return tail
        tail.lines += parsed.lines
        tail.end = (parsed.number, parsed.size)
        before = parsed
    return tail


def _end_at_torn_place(
    tail: LogTail, place: LogPlace, parsed: ParsedFile, files: Sequence[ParsedFile]
) -> None:
    tail.torn = place
    tail.torn_files = [other.number for other in files if other.number > place[0]]
    tail.lines = [line for line in [*tail.lines, *parsed.lines] if line.end <= place]
    tail.end = place if place[1] else tail.end


def _parse_files(journal: Path, first: int) -> list[ParsedFile]:
    files = [parse_log_file(journal, number) for number in log_numbers(journal) if number >= first]
    for parsed, following in zip(files, files[1:], strict=False):
        began = following.began
        if began is not None and began.previous == parsed.number and began.previous_bytes < parsed.size:
            # The next life saw this file end earlier: the bytes beyond were never part of the log.
            limited = parse_log_file(journal, parsed.number, began.previous_bytes)
            parsed.lines, parsed.bad, parsed.size = limited.lines, limited.bad, limited.size
    return files


def find_end_before(journal: Path, first: int) -> LogPlace:
    """Returns where the part of the log ends that lies before file `first`."""
    before = max((number for number in log_numbers(journal) if number < first), default=-1)
    return (before, log_path(journal, before).stat().st_size) if before >= 0 else (-1, 0)


def _find_damage(
    journal: Path, first: int, before: ParsedFile | None, parsed: ParsedFile
) -> tuple[LogPlace, str] | None:
    """Returns (place, words) of the first damage of a file that follows `before`; None when it is whole."""
    began = parsed.began
    if parsed.bad and (began is None or parsed.bad[0] == 0):
        return (parsed.number, 0), "its first line does not match its checksum"
    if began is None:
        return (parsed.number, 0), "it has no first line"
    if before is not None and began.previous != before.number:
        return (before.number, before.size), f"the file that {parsed.number:06d}.jsonl continues is missing"
    if before is None and parsed.number != first and began.previous >= first:
        return (first, 0), "the file is missing"
    if before is not None and before.size < began.previous_bytes:
        lost = began.previous_bytes - before.size
        return (before.number, before.size), f"its last {lost} bytes are missing"
    if parsed.bad:
        return (parsed.number, parsed.bad[0]), "a line does not match its checksum"
    return None


def _find_durability(parsed: ParsedFile, before: ParsedFile | None) -> str:
    """Returns how a file was written, as its first line says, or that of the file before."""
    began = parsed.began or (before.began if before is not None else None)
    return Durability.os if began is None else began.durability


def _describe_damage(journal: Path, place: LogPlace, what: str) -> str:
    number, byte = place
    return (
        f"the journal's log must be whole, got damage at byte {byte} of {log_path(journal, number)}: "
        f"{what}, and whole lines follow. Nothing was changed. `scripts/repair.sh {journal}` saves what can "
        "be saved, and lists the rest"
    )


def read_events(journal: Path, *, pass_over_damage: bool = False) -> Iterator[e.AnyEvent]:
    """Yields every event that the log still holds, from its first file on, without the torn tail of its last
    file.

    Raises DamagedLog where lines are lost that are not a torn tail; with `pass_over_damage` they are left
    out.
    """
    numbers = log_numbers(journal)
    for number, following in zip_longest(numbers, numbers[1:]):
        limit = None
        if following is not None and (began := parse_first_line(journal, following)) is not None:
            limit = began.previous_bytes if began.previous == number else None
        place, bad, event = 0, -1, None
        with open(log_path(journal, number), "rb") as file:
            for line in file:
                if limit is not None and place >= limit:
                    break
                event = e.decode_line(line)
                if event is None and bad < 0:
                    bad = place
                place += len(line)
                if event is not None:
                    if bad >= 0 and not pass_over_damage:
                        break
                    yield event
        if bad >= 0 and not pass_over_damage and (following is not None or event is not None):
            raise DamagedLog(_describe_damage(journal, (number, bad), "a line does not match its checksum"))


def parse_first_line(journal: Path, number: int) -> e.Began | None:
    """Returns the file's first line; None when it is not whole."""
    with open(log_path(journal, number), "rb") as file:
        event = e.decode_line(file.readline())
    return event if isinstance(event, e.Began) else None
