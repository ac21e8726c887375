"""Which bytes of a file are there, and the record of them beside a file that is being fetched.

The fetcher adds an entry when it has written the bytes; a relay, in this process or another, reads the entries and hands the bytes on.
"""

import os
import struct
from bisect import bisect_right

ENTRY = struct.Struct("<QQ")
"""Where the bytes of one entry begin and end."""


class Extents:
    """Ranges of bytes, none of which touch each other, in order."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add_range(self, begin: int, end: int) -> None:
        before = [held for held in self._ranges if held[1] < begin]
        after = [held for held in self._ranges if held[0] > end]
        touched = self._ranges[len(before) : len(self._ranges) - len(after)]
        merged = (min([begin, *(held[0] for held in touched)]), max([end, *(held[1] for held in touched)]))
        self._ranges = [*before, merged, *after]

    def end_from(self, begin: int) -> int:
        """Where the bytes end that are there from `begin` on; `begin` itself when there are none."""
        place = bisect_right(self._ranges, (begin, 1 << 63)) - 1
        return max(begin, self._ranges[place][1]) if place >= 0 else begin

    def missing_ranges(self, num_bytes: int) -> list[tuple[int, int]]:
        """The ranges that a file of `num_bytes` lacks."""
        edges = [0, *(edge for held in self._ranges for edge in held), num_bytes]
        return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]

    def read_record(self, record: int, at: int) -> int:
        """Adds the entries of a record (a descriptor) from the place `at` on; returns where it is to be read on. The last entry may
        be torn: it is read again."""
        data = os.pread(record, os.fstat(record).st_size - at, at)
        whole = len(data) - len(data) % ENTRY.size
        for begin, end in ENTRY.iter_unpack(data[:whole]):
            if begin < end:
                self.add_range(begin, end)
        return at + whole
