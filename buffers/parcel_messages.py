"""The messages by which a host that joins a run gets files that it lacks: the small files of the model, and
the rows.

A parcel is a folder of such files. Its list travels in one answer, its files in parts.
"""

from typing import Annotated

from msgspec import Meta

from buffers.message_fields import Ordinal, RunTotal, WireRecord

MAX_FILE_PART_BYTES = 1 << 20
"""Bytes of a file that travel in one answer. Few, because many hosts may join at once."""
ParcelName = Annotated[str, Meta(min_length=1, max_length=100)]


class ParcelFile(WireRecord, array_like=True):
    """A file of a parcel."""

    name: str
    """Its path within the folder."""
    size: int
    """Bytes."""
    digest: str
    """xxh3-128 of the bytes."""


class Parcel(WireRecord):
    """A folder of files that hosts may fetch."""

    name: str
    """`model`, or the name of a folder of the cache of rows."""
    files: list[ParcelFile]


class ListParcels(WireRecord):
    """-> ParcelList. A generator that joins asks what the run reads from files."""


class ParcelList(WireRecord):
    """Lists all parcels of the run."""

    parcels: list[Parcel]


class ReadParcelPart(WireRecord):
    """-> ParcelPart. A generator's host fetches some bytes of a file."""

    parcel: ParcelName
    file: Ordinal
    """Place of the file in the parcel's list."""
    offset: RunTotal
    size: Annotated[int, Meta(ge=0, le=MAX_FILE_PART_BYTES)]
    """Bytes wanted."""


class ParcelPart(WireRecord):
    """Carries bytes of a file as a frame: fewer than asked for where the file is shorter."""
