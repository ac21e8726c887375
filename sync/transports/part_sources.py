"""The addresses that have the bytes of a published file."""

from bisect import bisect_right
from collections.abc import Iterable
from typing import Protocol

from sync.manifest import FileParts
from sync.transports.puller import ByteRange


class FileSources(Protocol):
    def divide_ranges(self, missing: Iterable[ByteRange]) -> dict[str, list[ByteRange]]:
        """Returns ranges of the file by the address that has their bytes."""
        ...


class OneSource:
    """One address has the whole file."""

    def __init__(self, address: str) -> None:
        self._address = address

    def divide_ranges(self, missing: Iterable[ByteRange]) -> dict[str, list[ByteRange]]:
        ranges = list(missing)
        return {self._address: ranges} if ranges else {}


class PartSources:
    """Ranks on several hosts have written the file."""

    def __init__(self, parts: FileParts) -> None:
        self._parts = parts
        self._ends = [part.end for part in parts.parts]

    def divide_ranges(self, missing: Iterable[ByteRange]) -> dict[str, list[ByteRange]]:
        divided: dict[str, list[ByteRange]] = {}
        for begin, end in missing:
            while begin < end:
                number = bisect_right(self._ends, begin)
                part = self._parts.parts[number]
                stop = min(end, part.end)
                ranges = divided.setdefault(self._parts.sources[part.source].address, [])
                if ranges and ranges[-1][1] == begin:
                    ranges[-1] = (ranges[-1][0], stop)
                else:
                    ranges.append((begin, stop))
                begin = stop
        return divided
