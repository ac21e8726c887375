"""The journal: every accepted group on disk, an Arrow record batch each, in segment files; beside it the step log.

A segment is an Arrow IPC file. While it is written it has no footer, and is read as the stream that it holds; once closed,
any Arrow reader opens it. Each batch carries the xxh3-64 of its serialized bytes; the first batch that is cut or does not
match ends its segment, and what follows is not trusted.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import pyarrow as pa
import xxhash

from buffers.trajectory import SCHEMA
from configs.schema import Durability

_MAGIC = 8  # "ARROW1" and two bytes of padding, before the stream begins


class Trained(msgspec.Struct, frozen=True, tag=True):
    """Step `step` consumed these groups."""

    step: int
    groups: list[int]


class Rejected(msgspec.Struct, frozen=True, tag=True):
    group: int
    reason: str
    error: str = ""


Event = Trained | Rejected


class Journal:
    """Writer of one folder. `append` and `note` buffer; `commit` makes all of it as durable as was asked for."""

    def __init__(self, folder: Path, durability: Durability, segment_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._durability = durability
        self._segment_bytes = segment_bytes
        self._log = open(folder / "steps.jsonl", "ab", buffering=1 << 16)  # noqa: SIM115
        self._segment: tuple[BinaryIO, pa.ipc.RecordBatchFileWriter] | None = None
        self._next_segment = len(list(folder.glob("*.arrow")))

    def append(self, batch: pa.RecordBatch) -> None:
        if self._segment is None:
            file = open(self._folder / f"{self._next_segment:06d}.arrow", "xb", buffering=1 << 20)  # noqa: SIM115
            self._segment = (file, pa.ipc.new_file(file, SCHEMA))
            self._next_segment += 1
        self._segment[1].write_batch(batch, custom_metadata={"xxh3": _checksum(batch)})

    def note(self, event: Event) -> None:
        self._log.write(msgspec.json.encode(event) + b"\n")

    def commit(self) -> None:
        """Returns once everything written so far is where `durability` wants it."""
        for file in [self._log] if self._segment is None else [self._log, self._segment[0]]:
            if self._durability is not Durability.none:
                file.flush()
            if self._durability is Durability.fsync:
                os.fsync(file.fileno())
        if self._segment is not None and self._segment[0].tell() >= self._segment_bytes:
            self._close_segment()

    def close(self) -> None:
        self._close_segment()
        self._log.close()

    def _close_segment(self) -> None:
        if self._segment is not None:
            file, writer = self._segment
            writer.close()
            file.close()
            self._segment = None


def _checksum(batch: pa.RecordBatch) -> str:
    return xxhash.xxh3_64_hexdigest(batch.serialize())


def read_groups(folder: Path) -> Iterator[pa.RecordBatch]:
    """Every intact batch, in the order written."""
    for path in sorted(folder.glob("*.arrow")):
        yield from _read_segment(path)


def _read_segment(path: Path) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(path)) as file:
        if file.size() <= _MAGIC:
            return
        try:
            stream = pa.ipc.open_stream(file.read_buffer()[_MAGIC:])
            while True:
                batch, metadata = stream.read_next_batch_with_custom_metadata()
                if metadata is None or metadata[b"xxh3"].decode() != _checksum(batch):
                    return
                yield batch
        except (StopIteration, pa.ArrowException, OSError):
            return  # the end, or a torn tail


def read_events(folder: Path) -> Iterator[Event]:
    """Every whole line of the step log."""
    path = folder / "steps.jsonl"
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(Event)
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield decoder.decode(line)
