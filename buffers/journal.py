"""The journal: every accepted group on disk, and the log of what became of it.

    journal/000000.arrow   groups, an Arrow record batch each, in an Arrow IPC file
    journal/log.jsonl      events (`buffers.events`), a JSON line each; `Accepted` says where a group is, and its checksum

A segment is written record batch after record batch and gets its footer when it is closed; from then on any Arrow reader
opens it. The log is the authority: a group is in the journal when its line is whole and its bytes match the line's xxh3-64.
Whatever follows the first line or the first bytes that do not is a torn tail: cut at recovery, never trusted.
"""

import fcntl
import logging
import os
import secrets
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import xxhash

from buffers import events as e
from buffers.arrow_ipc import MAGIC, footer
from buffers.messages import Slice
from buffers.trajectory import SCHEMA
from configs.schema import Durability

log = logging.getLogger("slipstream.buffer")

HEAD = MAGIC + bytes(2) + SCHEMA.serialize().to_pybytes()
"""How every segment begins."""


@dataclass(slots=True)
class Segment:
    """The one being written."""

    number: int
    file: int
    size: int
    blocks: list[tuple[int, int, int]]
    """(offset, bytes of metadata, bytes of body) of each record batch, for the footer."""


class Journal:
    """Writer of one folder; one process at a time. `append` writes a group while it is still in the processor's cache, `note`
    gathers events; `commit` makes all of it durable at once."""

    def __init__(self, folder: Path, durability: Durability, segment_bytes: int) -> None:
        """Raises ValueError when another process writes this journal."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._durability = durability
        self._segment_bytes = segment_bytes
        self._lock = os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ValueError(f"the journal must have one writer, got {folder}, which another process writes") from error
        self.mark = f"{boot_id()} {secrets.token_hex(8)}"
        os.ftruncate(self._lock, 0)
        os.write(self._lock, self.mark.encode())
        self._log = os.open(folder / "log.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._segment: Segment | None = None
        self._next_segment = 1 + max((int(path.stem) for path in folder.glob("*.arrow")), default=-1)
        self._unsynced = False
        self._disk, self._sweeper = ThreadPoolExecutor(1, "journal"), ThreadPoolExecutor(1, "journal")
        self._dropped: set[int] = set()
        self._lines: list[bytes] = []

    def append(self, message: memoryview) -> tuple[int, int, int]:
        """Takes in a record batch, as an Arrow IPC message; returns (segment, offset, xxh3-64)."""
        if self._segment is None:
            file = os.open(segment_path(self.folder, self._next_segment), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            self._segment = Segment(self._next_segment, file, len(HEAD), [])
            self._next_segment += 1
            _write(file, HEAD)
        offset, num_metadata = self._segment.size, 8 + int.from_bytes(message[4:8], "little")
        self._segment.blocks.append((offset, num_metadata, len(message) - num_metadata))
        self._segment.size += len(message)
        _write(self._segment.file, message)
        self._unsynced = True
        return self._segment.number, offset, xxhash.xxh3_64_intdigest(message)

    def note(self, event: e.AnyEvent) -> None:
        self._lines.append(e.encode(event))

    def commit(self) -> None:
        """Returns once everything taken in so far is where `durability` wants it."""
        self.start_commit().result()

    def start_commit(self) -> "Future[None]":
        """Done once everything taken in so far is where `durability` wants it; raises what the disk raised. Meanwhile more may
        be taken in."""
        files = []
        if self._segment is not None and self._unsynced:
            files.append(self._segment.file)
            self._unsynced = False
        if self._lines:
            _write(self._log, b"".join(self._lines))
            self._lines.clear()
            files.append(self._log)
        done: Future[None] = Future()
        if self._durability is Durability.fsync:
            done = self._disk.submit(_sync, files)
        else:
            done.set_result(None)
        if self._segment is not None and self._segment.size >= self._segment_bytes:
            self._close_segment()
        return done

    def close(self) -> None:
        try:
            self.commit()
        finally:
            self._close_segment()
            self._disk.shutdown()
            self._sweeper.shutdown()
            os.close(self._log)
            os.close(self._lock)

    def drop(self, segments: list[int]) -> None:
        """Says that these closed segments are not needed any more, and deletes them when that is durable."""
        self.note(e.Dropped(segments))
        self._dropped.update(segments)
        self._sweeper.submit(_delete, self.start_commit(), [segment_path(self.folder, number) for number in segments])

    def closed_segments(self) -> set[int]:
        """Those that are in the folder and not written any more."""
        present = {int(path.stem) for path in self.folder.glob("*.arrow")}
        return present - self._dropped - ({self._segment.number} if self._segment else set())

    def _close_segment(self) -> None:
        """The footer may follow the groups to the disk when the system sees fit: recovery puts one where there is none."""
        if self._segment is not None:
            _write(self._segment.file, footer(SCHEMA, self._segment.blocks))
            self._disk.submit(os.close, self._segment.file)  # after the commit under way
            self._segment = None


def _sync(files: list[int]) -> None:
    for file in files:
        os.fdatasync(file)


def _delete(after: "Future[None]", paths: list[Path]) -> None:
    after.result()
    for path in paths:
        path.unlink(missing_ok=True)


def boot_id() -> str:
    """Names this host, until it is started again."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def is_here(folder: Path, mark: str) -> bool:
    """Is the journal in `folder` the one whose `Journal.mark` this is, on this very host (so that it may be mapped)?"""
    try:
        return mark.startswith(boot_id()) and (folder / ".lock").read_text() == mark
    except OSError:
        return False


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.arrow"


def _write(file: int, data: bytes | memoryview) -> None:
    """All of it, however little the kernel takes at a time."""
    left = memoryview(data).cast("B")
    while left:
        left = left[os.write(file, left) :]


def read_bytes(folder: Path, segment: int, offset: int, size: int) -> bytes:
    """A copy of what is there."""
    with open(segment_path(folder, segment), "rb") as file:
        return os.pread(file.fileno(), size, offset)


class Reader:
    """Reads groups where `Accepted` events (or `messages.Slice`) say that they are. Segments are mapped, not copied."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[int, pa.Buffer] = {}
        self._last: tuple[tuple[int, int, int], pa.RecordBatch] | None = None  # groups that came together lie together

    def read(self, content: e.Accepted | Slice) -> pa.RecordBatch:
        """Raises DamagedGroup when the bytes are not those that were written."""
        where = (content.segment, content.offset, content.xxh3)
        if self._last is not None and self._last[0] == where:
            return self._last[1].slice(content.row, content.rows)
        data = self.data(content.segment, content.offset, content.size)
        if data is None or xxhash.xxh3_64_intdigest(data) != content.xxh3:
            raise DamagedGroup(
                f"the {content.size} bytes at {content.offset} of {segment_path(self._folder, content.segment)} must have "
                f"checksum {content.xxh3:016x}"
            )
        batch = pa.ipc.read_record_batch(data, SCHEMA)
        self._last = (where, batch)
        return batch.slice(content.row, content.rows)

    def data(self, segment: int, offset: int, size: int) -> pa.Buffer | None:
        """The bytes there, mapped; None when the file does not reach so far."""
        mapped = self._maps.get(segment)
        if mapped is None or mapped.size < offset + size:
            path = segment_path(self._folder, segment)
            if not path.exists() or path.stat().st_size < offset + size:
                return None
            mapped = self._maps[segment] = pa.memory_map(str(path)).read_buffer()
            while len(self._maps) > 8:
                del self._maps[next(iter(self._maps))]
        return mapped.slice(offset, size)


class DamagedGroup(ValueError):
    """A group's bytes do not match their checksum."""


def read_events(folder: Path) -> Iterator[e.AnyEvent]:
    """Every event up to the first line that is not whole."""
    for event, _ in _read_log(folder):
        yield event


def _read_log(folder: Path) -> Iterator[tuple[e.AnyEvent, int]]:
    """(event, end of its line in the file)."""
    path = folder / "log.jsonl"
    if not path.exists():
        return
    end = 0
    with open(path, "rb") as file:
        for line in file:
            end += len(line)
            event = e.decode(line)
            if event is None:
                return
            yield event, end


def read_groups(folder: Path) -> Iterator[pa.RecordBatch]:
    """Every group in the journal, in the order of acceptance. Raises DamagedGroup."""
    reader = Reader(folder)
    dropped = {number for event in read_events(folder) if isinstance(event, e.Dropped) for number in event.segments}
    for event in read_events(folder):
        if isinstance(event, e.Accepted) and event.segment not in dropped:
            yield reader.read(event)


def mend(folder: Path) -> list[str]:
    """Cuts torn tails, and closes the segments that a crash has left without a footer. Returns what was cut, in words.

    The log is cut at its first broken line, or at the first group whose bytes do not match: an acknowledged group is
    therefore lost only where the disk has lost it. Called before a `Journal` is opened, by the process that will open it.
    """
    if not (folder / "log.jsonl").exists():
        return []
    told, reader, end = [], Reader(folder), 0
    contents: dict[int, list[e.Accepted]] = {}
    dropped: set[int] = set()
    closed = {int(path.stem): _is_closed(path) for path in folder.glob("*.arrow")}
    for event, line_end in _read_log(folder):
        if isinstance(event, e.Dropped):
            dropped.update(event.segments)
        if isinstance(event, e.Accepted):
            # The groups of a closed segment are checked when they are read.
            if not closed.get(event.segment) and event.segment not in dropped and not _whole(reader, event):
                told.append(f"group {event.group}, and all after it: its bytes are torn or changed")
                break
            contents.setdefault(event.segment, []).append(event)
        end = line_end
    size = (folder / "log.jsonl").stat().st_size
    if size > end:
        told.append(f"the last {size - end} bytes of log.jsonl")
        os.truncate(folder / "log.jsonl", end)
    for number, done in closed.items():
        if number in dropped:
            segment_path(folder, number).unlink()
        elif not done:
            _close_torn(segment_path(folder, number), contents.get(number, []), told)
    return told


def _whole(reader: Reader, content: e.Accepted) -> bool:
    data = reader.data(content.segment, content.offset, content.size)
    return data is not None and xxhash.xxh3_64_intdigest(data) == content.xxh3


def _is_closed(path: Path) -> bool:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size < len(HEAD) + len(MAGIC):
            return False
        file.seek(-len(MAGIC), os.SEEK_END)
        return file.read() == MAGIC


def _close_torn(path: Path, contents: list[e.Accepted], told: list[str]) -> None:
    end = max((content.offset + content.size for content in contents), default=len(HEAD))
    size = path.stat().st_size
    if size > end:
        told.append(f"the last {size - end} bytes of {path.name}")
    if not contents:
        path.unlink()
        return
    file = os.open(path, os.O_RDWR)
    try:
        os.ftruncate(file, end)
        blocks = []
        for offset, size in sorted({(content.offset, content.size) for content in contents}):
            num_metadata = 8 + int.from_bytes(os.pread(file, 4, offset + 4), "little")
            blocks.append((offset, num_metadata, size - num_metadata))
        os.lseek(file, 0, os.SEEK_END)
        _write(file, footer(SCHEMA, blocks))
        os.fsync(file)
    finally:
        os.close(file)
