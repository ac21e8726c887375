"""Rows on disk, each read alone: `rows.jsonl` beside `offsets.u64`, where each row begins and the last ends.

A reader maps the offsets and reads one row's bytes at a time, so a million rows take no memory.
"""

import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from buffers.files import naming_full_disk
from generators.environment import Row

ROWS, OFFSETS = "rows.jsonl", "offsets.u64"
WRITTEN_ROWS = 4096


class RowStore:
    """The rows of a folder. Threads and forked processes may share it."""

    def __init__(self, folder: Path) -> None:
        """Raises FileNotFoundError where there is no store."""
        self._file = os.open(folder / ROWS, os.O_RDONLY | os.O_CLOEXEC)
        self._offsets = np.memmap(folder / OFFSETS, dtype="<u8", mode="r")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def read_row(self, index: int) -> Row:
        begin, end = int(self._offsets[index]), int(self._offsets[index + 1])
        row: Row = json.loads(os.pread(self._file, end - begin, begin))
        return row


def write_store(folder: Path, rows: Iterator[bytes]) -> int:
    """Writes rows, each a JSON text without line breaks, into an empty folder. Returns their number.

    Raises DiskFull.
    """
    number, end = 0, 0
    with (
        naming_full_disk(folder / ROWS),
        open(folder / ROWS, "wb", buffering=1 << 20) as texts,
        open(folder / OFFSETS, "wb") as offsets,
    ):
        begun = array("Q", [0])
        for text in rows:
            texts.write(text)
            texts.write(b"\n")
            number, end = number + 1, end + len(text) + 1
            begun.append(end)
            if len(begun) >= WRITTEN_ROWS:
                begun.tofile(offsets)
                del begun[:]
        begun.tofile(offsets)
        for file in (texts, offsets):
            file.flush()
            os.fsync(file.fileno())
    return number
