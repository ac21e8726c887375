"""Checks of an Arrow IPC message before it is read, and footers of Arrow files. pyarrow offers neither.

Both read flatbuffers by hand (Arrow format, Message.fbs and File.fbs). A table is a position whose int32
leads back to its vtable: uint16 size of the vtable, uint16 size of the table, then one uint16 for each field:
its place in the table, or 0.
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
"""Arrow's number of a record batch among the kinds of messages (`MessageHeader.RecordBatch`)."""


class BadMessage(ValueError):
    """Raised for a message that is not a plain record batch."""


@dataclass(frozen=True, slots=True)
class MetadataLayout:
    """Positions, in a message's metadata, of the numbers that differ between record batches of one schema.

    All other bytes of the metadata are the same in every message that one writer makes. So a message whose
    other bytes are equal needs no parsing: its numbers stand where they always do.
    """

    num_metadata: int
    """Bytes of the metadata."""
    fixed: tuple[slice, ...]
    """The bytes between the numbers."""
    contents: tuple[bytes, ...]
    """The contents of `fixed`."""
    nodes: slice
    """Length and null count of each column."""
    buffers: slice
    """Offset and length of each buffer."""

    def fits(self, metadata: bytes) -> bool:
        """True when the metadata differs from this layout's in the numbers at most."""
        return self.num_metadata == len(metadata) and all(
            metadata[part] == known for part, known in zip(self.fixed, self.contents, strict=True)
        )


def check_record_batch(
    message: memoryview, usual: MetadataLayout | None = None
) -> tuple[memoryview, list[list[int]]]:
    """Returns (body, [offset, length] of each buffer in it).

    Raises BadMessage unless the message is one uncompressed record batch without nulls whose buffers lie
    inside it.

    Call it before pyarrow reads a stranger's message: a compressed buffer names its own size, and the reader
    would allocate it. Buffers that reach beyond the message are found here at no cost. `usual` is the layout
    of a message that was written here: where it fits, the metadata is not parsed.
    """
    try:
        marker, num_metadata = struct.unpack_from("<Ii", message, 0)
        if marker != 0xFFFFFFFF or not 0 < num_metadata <= len(message) - 8:
            raise BadMessage("the message must begin with its marker and the length of its metadata")
        metadata, body = message[8 : 8 + num_metadata], message[8 + num_metadata :]
        data = bytes(metadata)
        layout = usual if usual is not None and usual.fits(data) else _parse_layout(data)
    except struct.error as error:
        raise BadMessage(f"the metadata must be a flatbuffer of an Arrow message: {error}") from error
    if np.frombuffer(data[layout.nodes], "<i8")[1::2].any():
        raise BadMessage("columns must hold no nulls")
    places = np.frombuffer(data[layout.buffers], "<i8").reshape(-1, 2)
    buffers: list[list[int]] = places.tolist()
    if buffers and (int(places.min()) < 0 or max(map(sum, buffers)) > len(body)):
        raise BadMessage(f"buffers must lie within the {len(body)} bytes of the message")
    return body, buffers


def find_layout(message: memoryview) -> MetadataLayout:
    """Returns the layout of a record batch that was written here. A stranger's may have structure and numbers
    overlap, so its layout must not be the usual one."""
    return _parse_layout(bytes(message[8 : 8 + int.from_bytes(message[4:8], "little")]))


def _parse_layout(metadata: bytes) -> MetadataLayout:
    root = _read_number(metadata, "<I", 0)
    if _read_scalar(metadata, root, 1, "<B") != RECORD_BATCH:
        raise BadMessage("the message must be a record batch")
    header = _follow_field(metadata, root, 2)
    if _find_field(metadata, header, 3):
        raise BadMessage("buffers must not be compressed")
    nodes, buffers = (_find_structs(metadata, header, field) for field in (1, 2))
    free = [nodes, buffers]
    # Two more numbers differ, both of them longs: the bytes of the body, and the rows.
    for table, field in ((root, 3), (header, 0)):
        if place := _find_field(metadata, table, field):
            free.append(slice(table + place, table + place + 8))
    free.sort(key=lambda part: part.start)
    edges = [0, *(edge for part in free for edge in (part.start, part.stop)), len(metadata)]
    fixed = tuple(itertools.starmap(slice, zip(edges[::2], edges[1::2], strict=True)))
    return MetadataLayout(len(metadata), fixed, tuple(metadata[part] for part in fixed), nodes, buffers)


def is_aligned(message: memoryview, buffers: Sequence[Sequence[int]]) -> bool:
    """True when the message keeps its buffers, as `check_record_batch` has found them, aligned to 8 bytes.

    The format asks for that. Then any reader can map the message, and it may be stored as it came.
    """
    _, num_metadata = struct.unpack_from("<Ii", message, 0)
    return num_metadata % 8 == 0 and len(message) % 8 == 0 and not any(offset & 7 for offset, _ in buffers)


def find_blocks(data: memoryview, start: int) -> list[tuple[int, int, int]]:
    """Returns (offset, bytes of metadata, bytes of body) of each message from byte `start` on, for
    `make_footer`.

    Stops at the first message that is not whole. Only for messages that were written here: in a stranger's
    the lengths may lie.
    """
    blocks = []
    while start + 8 <= len(data):
        marker, num_metadata = struct.unpack_from("<Ii", data, start)
        if marker != 0xFFFFFFFF or not 0 < num_metadata <= len(data) - start - 8:
            break
        metadata = bytes(data[start + 8 : start + 8 + num_metadata])
        try:
            num_body = _read_scalar(metadata, _read_number(metadata, "<I", 0), 3, "<q")
        except struct.error:
            break
        if not 0 <= num_body <= len(data) - start - 8 - num_metadata:
            break
        blocks.append((start, 8 + num_metadata, num_body))
        start += 8 + num_metadata + num_body
    return blocks


def make_footer(schema: pa.Schema, blocks: Sequence[tuple[int, int, int]]) -> bytes:
    """Returns the bytes that turn a stream into an Arrow IPC file: end of stream, index of the record
    batches, magic.

    `blocks` gives (offset in the file, bytes of metadata, bytes of body) of each record batch. pyarrow writes
    footers only for batches that it writes itself. So the footer of an empty file is taken and its vector of
    blocks is replaced (table Footer, field 3, of struct Block {offset: long; metaDataLength: int; bodyLength:
    long}). Flatbuffers refer forward, so the new vector may stand at the end.
    """
    sink = pa.BufferOutputStream()
    pa.ipc.new_file(sink, schema).close()
    empty = sink.getvalue().to_pybytes()
    size = int.from_bytes(empty[-10:-6], "little")
    table = bytearray(empty[-10 - size : -10])
    root = _read_number(table, "<I", 0)
    field = root + _find_field(table, root, 3)
    # The structs are aligned to 8 bytes, and the vector's length, of 4 bytes, stands before them.
    table += bytes((4 - len(table)) % 8)
    struct.pack_into("<I", table, field, len(table) - field)
    table += struct.pack("<I", len(blocks))
    for offset, num_metadata, num_body in blocks:
        table += struct.pack("<qi4xq", offset, num_metadata, num_body)
    return END_OF_STREAM + bytes(table) + struct.pack("<i", len(table)) + MAGIC


def _read_number(data: bytes | bytearray, form: str, position: int) -> int:
    """Returns the number of this format at a position. Raises struct.error for a position outside the
    data."""
    if position < 0:  # Python would count it from the end
        raise struct.error(f"position {position}")
    return int(struct.unpack_from(form, data, position)[0])


def _find_field(data: bytes | bytearray, table: int, field: int) -> int:
    """Returns the place of a field in its table; 0 when it is not there."""
    vtable = table - _read_number(data, "<i", table)
    return (
        _read_number(data, "<H", vtable + 4 + 2 * field)
        if 4 + 2 * field < _read_number(data, "<H", vtable)
        else 0
    )


def _read_scalar(data: bytes, table: int, field: int, form: str) -> int:
    """Returns the number in a field; 0 when it is not there."""
    place = _find_field(data, table, field)
    return _read_number(data, form, table + place) if place else 0


def _follow_field(data: bytes, table: int, field: int) -> int:
    """Returns the position of the table or vector that a field refers to. Raises struct.error when it is
    missing."""
    place = _find_field(data, table, field)
    if not place:
        raise struct.error(f"field {field} is missing")
    return table + place + _read_number(data, "<I", table + place)


def _find_structs(data: bytes, table: int, field: int) -> slice:
    """Returns the bytes of a vector of structs of two longs. Raises struct.error where they reach beyond the
    data."""
    vector = _follow_field(data, table, field)
    count = _read_number(data, "<I", vector)
    if vector + 4 + 16 * count > len(data):
        raise struct.error(f"a vector of {count} structs at {vector}")
    return slice(vector + 4, vector + 4 + 16 * count)
