"""The ranges of a file that have arrived, and their record beside a file that is being fetched.

The fetcher adds an entry when it has written the bytes. A relay, in this process or another, reads the
entries and hands the bytes on.
"""

import os
import struct
from bisect import bisect_right

ENTRY = struct.Struct("<QQ")
"""One entry of the record: where its bytes begin and end."""


class Extents:
    """Ranges of bytes, in order. No two of them touch."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add_range(self, begin: int, end: int) -> None:
        before = [held for held in self._ranges if held[1] < begin]
        after = [held for held in self._ranges if held[0] > end]
        touched = self._ranges[len(before) : len(self._ranges) - len(after)]
        merged = (min([begin, *(held[0] for held in touched)]), max([end, *(held[1] for held in touched)]))
        self._ranges = [*before, merged, *after]

    def end_from(self, begin: int) -> int:
        """Returns where the bytes end that are there from `begin` on; `begin` itself when there are none."""
        place = bisect_right(self._ranges, (begin, 1 << 63)) - 1
        return max(begin, self._ranges[place][1]) if place >= 0 else begin

    def missing_ranges(self, num_bytes: int) -> list[tuple[int, int]]:
        """Returns the ranges that a file of `num_bytes` lacks."""
        edges = [0, *(edge for held in self._ranges for edge in held), num_bytes]
        return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]

    def read_record(self, record: int, at: int) -> int:
        """Adds the entries of a record (a descriptor) from the place `at` on; returns the place of the next
        entry.

        The last entry may be torn, because its writer is still at it: the next call reads it again.
        """
        data = os.pread(record, os.fstat(record).st_size - at, at)
        whole = len(data) - len(data) % ENTRY.size
        for begin, end in ENTRY.iter_unpack(data[:whole]):
            if begin < end:
                self.add_range(begin, end)
        return at + whole
