"""Reads the rows of a file one after the other, as JSON texts, without loading the file."""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from generators.data.found_file import FileKind, FoundFile

BATCH_ROWS = 1024
LONGEST_LINE = 64 << 20
"""Bytes of a line: more is no row, but a file without line breaks."""
READ_BYTES = 1 << 20


class RowRefused(ValueError):
    """A row, or a file, is wrong. The text names both."""


def digest_file(file: FoundFile) -> str:
    """Returns a digest of the file's bytes and kind. Raises RowRefused for one that cannot be read."""
    digest = xxhash.xxh3_128(str(file.kind).encode())
    try:
        with open(file.path, "rb") as opened:
            while data := opened.read(READ_BYTES):
                digest.update(data)
    except OSError as error:
        raise RowRefused(f"{file.path} must be a file that can be read, got {error}") from error
    return digest.hexdigest()


def read_rows(file: FoundFile) -> Iterator[bytes]:
    """Yields the rows as JSON objects in UTF-8. Raises RowRefused, which names the file and the row, counted
    from 0."""
    reading = _read_lines(file) if file.kind is FileKind.lines else _read_table(file)
    row = 0
    try:
        for text in reading:
            yield text
            row += 1
    except RowRefused:
        raise
    # Arrow's own errors for a damaged file are ValueErrors too.
    except (OSError, ValueError) as error:
        where = f" at row {row}" if row else ""
        raise RowRefused(f"{file.path} must be a file that can be read, got{where}: {error}") from error


def _read_lines(file: FoundFile) -> Iterator[bytes]:
    # Arrow reads plain and compressed files alike.
    with closing(pa.input_stream(str(file.path), compression="detect")) as stream:
        number = row = 0
        for line in _split_lines(stream):
            number += 1
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not (line := line.strip()):
                continue
            try:
                value = json.loads(line.decode(), object_pairs_hook=_make_object)
                if not isinstance(value, dict):
                    raise ValueError(f"a line must be a JSON object, got {str(value)[:200]}")
            except (ValueError, RecursionError) as error:
                raise RowRefused(
                    f"{file.path} must have a JSON object in each line, got row {row} (line {number}): "
                    f"{error}"
                ) from error
            yield line
            row += 1


def _split_lines(stream: Any) -> Iterator[bytes]:
    rest = b""
    while data := stream.read(READ_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
        if len(rest) > LONGEST_LINE:
            raise ValueError(f"a line must have at most {LONGEST_LINE} bytes, got more")
    yield rest


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise ValueError(f"an object must have each key once, got {twice!r} twice")
    return made


def _read_table(file: FoundFile) -> Iterator[bytes]:
    row = 0
    for batch in _open_batches(file):
        try:
            values = _cut_times(batch).to_pylist(maps_as_pydicts="strict")
        # A date may lie beyond Python's years.
        except (ValueError, KeyError, OverflowError) as error:
            raise RowRefused(
                f"{file.path} must have rows that JSON can hold, got rows {row} to "
                f"{row + batch.num_rows - 1}: {error}"
            ) from error
        for value in values:
            try:
                yield ENCODER.encode(value).encode()
            except (ValueError, TypeError) as error:
                raise RowRefused(
                    f"{file.path} must have rows that JSON can hold, got row {row}: {error}"
                ) from error
            row += 1


def _cut_times(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Returns the rows with whole microseconds in their times: Python has no nanoseconds."""
    types = [_cut_type(field.type) for field in batch.schema]
    if types == batch.schema.types:
        return batch
    columns = [
        column if column.type == kind else column.cast(kind, safe=False)
        for column, kind in zip(batch.columns, types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _cut_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if pa.types.is_time64(kind) and kind.unit == "ns":
        return pa.time64("us")
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_cut_type(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_cut_type(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_cut_type(kind.value_type)))
    return kind


def _open_batches(file: FoundFile) -> Iterator[pa.RecordBatch]:
    if file.kind is FileKind.parquet:
        # Without `pre_buffer=False` a whole row group is in memory at once.
        with pq.ParquetFile(file.path, pre_buffer=False, buffer_size=READ_BYTES) as table:
            yield from table.iter_batches(BATCH_ROWS)
        return
    with pa.memory_map(str(file.path)) as opened, pa.ipc.open_stream(opened) as stream:
        for batch in stream:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield batch.slice(start, BATCH_ROWS)


def _write_value(value: Any) -> Any:
    """Returns a value of Arrow's that JSON lacks as a text: dates and exact decimals."""
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, bytes | bytearray):
        raise ValueError("prompts must be text alone, got a column of bytes (images?)")
    return str(value)


ENCODER = json.JSONEncoder(ensure_ascii=False, default=_write_value)
