"""Two things about Arrow's IPC format that pyarrow does not offer: a look at a message before it is read, and a footer.

Both read flatbuffers by hand (Arrow format, Message.fbs and File.fbs). A table is a position whose int32 leads back to its
vtable: uint16 size of the vtable, uint16 size of the table, then a uint16 a field: its place in the table, or 0.
"""

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

MAGIC = b"ARROW1"
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
RECORD_BATCH = 3
"""`MessageHeader.RecordBatch`."""


class BadMessage(ValueError):
    """A message that is not a plain record batch."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where in a message's metadata the numbers stand that differ from record batch to record batch of one schema."""

    num_metadata: int
    fixed: tuple[slice, ...]
    """All that is between those numbers."""
    between: tuple[bytes, ...]
    """What stands in `fixed`."""
    nodes: slice
    buffers: slice

    def fits(self, metadata: bytes) -> bool:
        return self.num_metadata == len(metadata) and all(
            metadata[part] == known for part, known in zip(self.fixed, self.between, strict=True)
        )


def check_record_batch(
    message: memoryview, usual: Layout | None = None
) -> tuple[memoryview, list[list[int]]]:
    """(body, [offset, length] of each buffer in it). Raises BadMessage unless the message is one uncompressed record batch
    without nulls whose buffers lie inside it.

    To be asked before pyarrow reads what a stranger sent: a compressed buffer names its own size, which the reader would
    allocate, and buffers that reach beyond the message are found here at no cost. `usual` is the layout of a message that was
    written here: where it fits, nothing has to be looked for.
    """
    try:
        marker, num_metadata = struct.unpack_from("<Ii", message, 0)
        if marker != 0xFFFFFFFF or not 0 < num_metadata <= len(message) - 8:
            raise BadMessage("the message must begin with its marker and the length of its metadata")
        metadata, body = message[8 : 8 + num_metadata], message[8 + num_metadata :]
        data = bytes(metadata)
        layout = usual if usual is not None and usual.fits(data) else _find_layout(data)
    except struct.error as error:
        raise BadMessage(f"the metadata must be a flatbuffer of an Arrow message: {error}") from error
    if np.frombuffer(data[layout.nodes], "<i8")[1::2].any():
        raise BadMessage("columns must hold no nulls")
    places = np.frombuffer(data[layout.buffers], "<i8").reshape(-1, 2)
    buffers: list[list[int]] = places.tolist()
    if buffers and (int(places.min()) < 0 or max(map(sum, buffers)) > len(body)):
        raise BadMessage(f"buffers must lie within the {len(body)} bytes of the message")
    return body, buffers


def layout_of(message: memoryview) -> Layout:
    """Of a record batch that was written here: in a stranger's, structure and numbers may overlap."""
    return _find_layout(bytes(message[8 : 8 + int.from_bytes(message[4:8], "little")]))


def _find_layout(metadata: bytes) -> Layout:
    root = _at(metadata, "<I", 0)
    if _scalar(metadata, root, 1, "<B") != RECORD_BATCH:
        raise BadMessage("the message must be a record batch")
    header = _table(metadata, root, 2)
    if _field(metadata, header, 3):
        raise BadMessage("buffers must not be compressed")
    nodes, buffers = (_structs(metadata, header, field) for field in (1, 2))
    free = [nodes, buffers]
    for table, field in ((root, 3), (header, 0)):  # bytes of the body, rows: two longs
        if place := _field(metadata, table, field):
            free.append(slice(table + place, table + place + 8))
    free.sort(key=lambda part: part.start)
    edges = [0, *(edge for part in free for edge in (part.start, part.stop)), len(metadata)]
    fixed = tuple(itertools.starmap(slice, zip(edges[::2], edges[1::2], strict=True)))
    return Layout(len(metadata), fixed, tuple(metadata[part] for part in fixed), nodes, buffers)


def is_aligned(message: memoryview, buffers: Sequence[Sequence[int]]) -> bool:
    """Whether the message, whose buffers `check_record_batch` has found, keeps each of them aligned to 8 bytes, as the format
    asks: then any reader can map it, and it may be stored as it came."""
    _, num_metadata = struct.unpack_from("<Ii", message, 0)
    return num_metadata % 8 == 0 and len(message) % 8 == 0 and not any(offset & 7 for offset, _ in buffers)


def find_blocks(data: memoryview, start: int) -> list[tuple[int, int, int]]:
    """(offset, bytes of metadata, bytes of body) of each message from byte `start` to the end of `data`, for `footer`.

    Stops at the first message that is not whole. For what was written here: in a stranger's message the lengths may lie.
    """
    blocks = []
    while start + 8 <= len(data):
        marker, num_metadata = struct.unpack_from("<Ii", data, start)
        if marker != 0xFFFFFFFF or not 0 < num_metadata <= len(data) - start - 8:
            break
        metadata = bytes(data[start + 8 : start + 8 + num_metadata])
        try:
            num_body = _scalar(metadata, _at(metadata, "<I", 0), 3, "<q")
        except struct.error:
            break
        if not 0 <= num_body <= len(data) - start - 8 - num_metadata:
            break
        blocks.append((start, 8 + num_metadata, num_body))
        start += 8 + num_metadata + num_body
    return blocks


def footer(schema: pa.Schema, blocks: Sequence[tuple[int, int, int]]) -> bytes:
    """What turns the stream before it into an Arrow IPC file: end of stream, index of the record batches, magic.

    `blocks` gives (offset in the file, bytes of metadata, bytes of body) of each record batch. pyarrow writes footers only
    for batches that it writes itself, so that of an empty file is taken and its vector of blocks replaced: flatbuffers
    refer forward, so a new vector may stand at the end (table Footer, field 3, of struct Block {offset: long;
    metaDataLength: int; bodyLength: long}).
    """
    sink = pa.BufferOutputStream()
    pa.ipc.new_file(sink, schema).close()
    empty = sink.getvalue().to_pybytes()
    size = int.from_bytes(empty[-10:-6], "little")
    table = bytearray(empty[-10 - size : -10])
    root = _at(table, "<I", 0)
    field = root + _field(table, root, 3)
    table += bytes((4 - len(table)) % 8)  # the length stands before the structs, which are aligned to 8
    struct.pack_into("<I", table, field, len(table) - field)
    table += struct.pack("<I", len(blocks))
    for offset, num_metadata, num_body in blocks:
        table += struct.pack("<qi4xq", offset, num_metadata, num_body)
    return END_OF_STREAM + bytes(table) + struct.pack("<i", len(table)) + MAGIC


def _at(data: bytes | bytearray, form: str, position: int) -> int:
    if position < 0:
        raise struct.error(f"position {position}")
    return int(struct.unpack_from(form, data, position)[0])


def _field(data: bytes | bytearray, table: int, field: int) -> int:
    """Where in the table a field is; 0 when it is not there."""
    vtable = table - _at(data, "<i", table)
    return _at(data, "<H", vtable + 4 + 2 * field) if 4 + 2 * field < _at(data, "<H", vtable) else 0


def _scalar(data: bytes, table: int, field: int, form: str) -> int:
    place = _field(data, table, field)
    return _at(data, form, table + place) if place else 0


def _table(data: bytes, table: int, field: int) -> int:
    place = _field(data, table, field)
    if not place:
        raise struct.error(f"field {field} is missing")
    return table + place + _at(data, "<I", table + place)


def _structs(data: bytes, table: int, field: int) -> slice:
    """Where a vector of structs of two longs is."""
    vector = _table(data, table, field)
    count = _at(data, "<I", vector)
    if vector + 4 + 16 * count > len(data):
        raise struct.error(f"a vector of {count} structs at {vector}")
    return slice(vector + 4, vector + 4 + 16 * count)
