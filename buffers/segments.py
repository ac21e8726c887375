"""Segments: files of groups, an Arrow record batch each, that any Arrow reader opens once they are closed.

A segment is written record batch after record batch and gets its footer when it is closed. A crash leaves a
segment without a footer. `close_torn_segment` then sets aside what was never acknowledged, and writes the
footer. A segment begins with its schema, which may be an older one (`buffers.older_schemas`).
"""

import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import xxhash

from buffers import events as e
from buffers.arrow_ipc import MAGIC, find_blocks, make_footer
from buffers.files import cut_file, list_numbers, naming_full_disk, sync_file
from buffers.message_fields import GroupSlice
from buffers.older_schemas import READABLE_SCHEMAS, read_stored_batch
from buffers.trajectory import SCHEMA, SCHEMA_VERSION
from configs.disk import write_all


def make_head(schema: pa.Schema) -> bytes:
    """Returns the first bytes of a segment of this schema."""
    return MAGIC + bytes(2) + schema.serialize().to_pybytes()


HEAD = make_head(SCHEMA)
"""The first bytes of every new segment."""
MAX_MAPPED = 8
"""Segments that a reader keeps mapped."""


class DamagedGroup(ValueError):
    """A group's bytes do not match their checksum."""


@dataclass(slots=True)
class Segment:
    """The segment that is being written."""

    number: int
    path: Path
    file: int
    size: int = len(HEAD)
    blocks: list[tuple[int, int, int]] = field(default_factory=list)
    """(offset, bytes of metadata, bytes of body) of each record batch, for the footer."""

    def append(self, message: memoryview) -> tuple[int, int]:
        """Writes a record batch, as an Arrow IPC message; returns (offset, xxh3-64). Raises DiskFull."""
        offset, num_metadata = self.size, 8 + int.from_bytes(message[4:8], "little")
        write_all(self.file, message, self.path)
        self.blocks.append((offset, num_metadata, len(message) - num_metadata))
        self.size += len(message)
        return offset, xxhash.xxh3_64_intdigest(message)

    def write_footer(self) -> None:
        """Closes the segment to writers.

        The footer may reach the disk late: recovery writes a missing one.
        """
        write_all(self.file, make_footer(SCHEMA, self.blocks), self.path)


def create_segment(folder: Path, number: int) -> Segment:
    path = segment_path(folder, number)
    with naming_full_disk(path):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
    write_all(file, HEAD, path)
    return Segment(number, path, file)


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.arrow"


def segment_numbers(folder: Path) -> set[int]:
    """Returns the numbers of the segments that are in the folder."""
    return set(list_numbers(folder, ".arrow"))


@dataclass(frozen=True, slots=True)
class SegmentHead:
    """The beginning of a segment."""

    schema_version: int | None
    """Version of the schema that it was written in; None where nothing tells it."""
    size: int
    """Bytes before the first group."""
    is_lost: bool = False
    """True where its bytes are damaged, and the version is that of the first group."""

    @property
    def schema(self) -> pa.Schema:
        """The schema, for the footer: the present one where nothing tells it."""
        return READABLE_SCHEMAS.get(self.schema_version or SCHEMA_VERSION, SCHEMA)


def read_head(path: Path) -> SegmentHead:
    start = len(MAGIC) + 2
    with open(path, "rb") as file:
        head = file.read(4 * len(HEAD))[start:]
    try:
        version = int(pa.ipc.read_schema(pa.py_buffer(head)).metadata[b"slipstream.schema"])
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError):
        return _find_lost_head(path)
    # A schema is a message without a body: its marker, the length of its metadata, and these.
    return SegmentHead(version, start + 8 + int.from_bytes(head[4:8], "little"))


def _find_lost_head(path: Path) -> SegmentHead:
    """Returns the head of a segment whose beginning is damaged: its groups stand behind it."""
    with _mapping(path) as data:
        for version, schema in READABLE_SCHEMAS.items():
            size = len(make_head(schema))
            if find_blocks(data, size):
                return SegmentHead(version, size, is_lost=True)
    return SegmentHead(None, len(HEAD), is_lost=True)


@contextmanager
def _mapping(path: Path) -> Iterator[memoryview]:
    """Gives the bytes of a file, mapped."""
    with open(path, "rb") as file:
        # An empty file cannot be mapped.
        if not os.fstat(file.fileno()).st_size:
            yield memoryview(b"")
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
            yield data


def is_closed(path: Path) -> bool:
    """True when the file ends as a segment with a footer does."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size < len(HEAD) + len(MAGIC):
            return False
        file.seek(-len(MAGIC), os.SEEK_END)
        return file.read() == MAGIC


def close_torn_segment(path: Path, end: int, *, sync: bool = True) -> str | None:
    """Writes the footer of a segment whose acknowledged groups end at byte `end`, and sets aside what
    follows.

    A segment without any acknowledged group is set aside whole. A damaged head is written anew. Returns
    words for what was set aside, or None.
    """
    head = read_head(path)
    if end <= head.size:
        return cut_file(path, 0, sync=sync)
    told = cut_file(path, end, sync=sync)
    # Where the disk has lost a part, its groups are found damaged when they are read.
    if path.stat().st_size < end:
        return told
    with _mapping(path) as data:
        blocks = find_blocks(data, head.size)
    with open(path, "r+b") as file:
        if head.is_lost and head.schema_version is not None:
            write_all(file.fileno(), make_head(head.schema), path)
        file.seek(0, os.SEEK_END)
        write_all(file.fileno(), make_footer(head.schema, blocks), path)
        if sync:
            sync_file(file.fileno(), path)
    return told


def find_whole_end(path: Path) -> int:
    """Returns where the last whole record batch of a torn segment ends: for segments of which nobody has
    noted what was acknowledged."""
    with _mapping(path) as data:
        blocks = find_blocks(data, len(HEAD))
    return sum(blocks[-1]) if blocks else 0


def join_slices(contents: Iterable[e.Accepted]) -> list[GroupSlice]:
    """Returns where groups are, in this order. Groups that lie together are one slice."""
    slices: list[GroupSlice] = []
    for content in contents:
        last = slices[-1] if slices else None
        place = (content.segment, content.offset, content.row)
        if last is not None and (last.segment, last.offset, last.row + last.rows) == place:
            last.rows += content.rows
        else:
            slices.append(GroupSlice(*place[:2], content.size, content.xxh3, content.row, content.rows))
    return slices


def read_bytes(folder: Path, segment: int, offset: int, size: int) -> bytes:
    """Returns a copy of the bytes there; fewer where the file is shorter. Raises FileNotFoundError."""
    with open(segment_path(folder, segment), "rb") as file:
        return os.pread(file.fileno(), size, offset)


class Reader:
    """Reads groups where `Accepted` events (or `messages.Slice`) say that they are.

    Segments are mapped, not copied.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[int, pa.Buffer] = {}
        self._last: tuple[tuple[int, int, int], pa.RecordBatch] | None = None
        """The batch that was read last, after its (segment, offset, checksum).

        Groups that came together lie together.
        """

    def read(self, content: e.Accepted | GroupSlice) -> pa.RecordBatch:
        """Returns the rows of a group. Raises DamagedGroup when the bytes are not those that were written."""
        where = (content.segment, content.offset, content.xxh3)
        if self._last is not None and self._last[0] == where:
            return self._last[1].slice(content.row, content.rows)
        data = self._map_bytes(content.segment, content.offset, content.size)
        if data is None or xxhash.xxh3_64_intdigest(data) != content.xxh3:
            path = segment_path(self._folder, content.segment)
            raise DamagedGroup(
                f"the {content.size} bytes at {content.offset} of {path} must have checksum "
                f"{content.xxh3:016x}"
            )
        batch = read_stored_batch(data)
        self._last = (where, batch)
        return batch.slice(content.row, content.rows)

    def drop_last(self) -> None:
        """Drops the batch that was read last, which `read` keeps for the next group in it.

        Segments stay mapped.
        """
        self._last = None

    def is_intact(self, content: e.Accepted) -> bool:
        """True when the group's bytes are there as they were written. Reads them anew."""
        data = self._map_bytes(content.segment, content.offset, content.size)
        return data is not None and xxhash.xxh3_64_intdigest(data) == content.xxh3

    def _map_bytes(self, segment: int, offset: int, size: int) -> pa.Buffer | None:
        """Returns the bytes there, mapped; None when the file does not reach so far."""
        path = segment_path(self._folder, segment)
        # A file that is mapped already is looked at too: reading a mapped page that is gone kills the
        # process.
        if not path.exists() or path.stat().st_size < offset + size:
            return None
        mapped = self._maps.get(segment)
        if mapped is None or mapped.size < offset + size:
            mapped = self._maps[segment] = pa.memory_map(str(path)).read_buffer()
            while len(self._maps) > MAX_MAPPED:
                del self._maps[next(iter(self._maps))]
        return mapped.slice(offset, size)
