"""Two things about Arrow's IPC format that pyarrow does not offer: a look at a message before it is read, and a footer.

Both read flatbuffers by hand (Arrow format, Message.fbs and File.fbs). A table is a position whose int32 leads back to its
vtable: uint16 size of the vtable, uint16 size of the table, then a uint16 a field: its place in the table, or 0.
"""

import struct
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

MAGIC = b"ARROW1"
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
RECORD_BATCH = 3
"""`MessageHeader.RecordBatch`."""


class BadMessage(ValueError):
    """A message that is not a plain record batch."""


def check_record_batch(message: memoryview) -> tuple[memoryview, list[list[int]]]:
    """(body, [offset, length] of each buffer in it). Raises BadMessage unless the message is one uncompressed record batch without nulls whose buffers lie inside it.

    To be asked before pyarrow reads what a stranger sent: a compressed buffer names its own size, which the reader would
    allocate, and buffers that reach beyond the message are found here at no cost.
    """
    try:
        marker, num_metadata = struct.unpack_from("<Ii", message, 0)
        if marker != 0xFFFFFFFF or not 0 < num_metadata <= len(message) - 8:
            raise BadMessage("the message must begin with its marker and the length of its metadata")
        metadata, body = message[8 : 8 + num_metadata], message[8 + num_metadata :]
        root = _at(metadata, "<I", 0)
        if _scalar(metadata, root, 1, "<B") != RECORD_BATCH:
            raise BadMessage("the message must be a record batch")
        header = _table(metadata, root, 2)
        if _field(metadata, header, 3):
            raise BadMessage("buffers must not be compressed")
        nodes, buffers = (_structs(metadata, header, field) for field in (1, 2))
    except struct.error as error:
        raise BadMessage(f"the metadata must be a flatbuffer of an Arrow message: {error}") from error
    if any(num_nulls for _, num_nulls in nodes):
        raise BadMessage("columns must hold no nulls")
    size = len(body)
    if buffers and (min(map(min, buffers)) < 0 or max(map(sum, buffers)) > size):
        raise BadMessage(f"buffers must lie within the {size} bytes of the message")
    return body, buffers


def is_aligned(message: memoryview) -> bool:
    """Whether the message, which `check_record_batch` has passed, keeps every buffer aligned to 8 bytes, as the format asks: then
    any reader can map it, and it may be stored as it came."""
    _, num_metadata = struct.unpack_from("<Ii", message, 0)
    header = _table(message[8:], _at(message[8:], "<I", 0), 2)
    places = _structs(message[8:], header, 2)
    return num_metadata % 8 == 0 and len(message) % 8 == 0 and not any(offset & 7 for offset, _ in places)


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


def _at(data: memoryview | bytearray, form: str, position: int) -> int:
    if position < 0:
        raise struct.error(f"position {position}")
    return int(struct.unpack_from(form, data, position)[0])


def _field(data: memoryview | bytearray, table: int, field: int) -> int:
    """Where in the table a field is; 0 when it is not there."""
    vtable = table - _at(data, "<i", table)
    return _at(data, "<H", vtable + 4 + 2 * field) if 4 + 2 * field < _at(data, "<H", vtable) else 0


def _scalar(data: memoryview, table: int, field: int, form: str) -> int:
    place = _field(data, table, field)
    return _at(data, form, table + place) if place else 0


def _table(data: memoryview, table: int, field: int) -> int:
    place = _field(data, table, field)
    if not place:
        raise struct.error(f"field {field} is missing")
    return table + place + _at(data, "<I", table + place)


def _structs(data: memoryview, table: int, field: int) -> list[list[int]]:
    """A vector of structs of two longs."""
    vector = _table(data, table, field)
    count = _at(data, "<I", vector)
    if vector + 4 + 16 * count > len(data):
        raise struct.error(f"a vector of {count} structs at {vector}")
    return np.frombuffer(data, "<i8", 2 * count, vector + 4).reshape(count, 2).tolist()
