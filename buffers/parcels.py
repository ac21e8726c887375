"""The parcels of a run, as the buffer hands them out. The driver packs them before the buffer starts.

    outputs/NAME/parcels.json     for each parcel its folder on this host, and each file's size and digest
    outputs/NAME/model/           the run's own copy of the small files of its model
    the cache of rows             where this host has them anyway: they may be large

A part of a file is read when it is asked for, and nothing is kept.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import xxhash

from buffers.files import replace_file
from buffers.parcel_messages import Parcel, ParcelFile, ReadParcelPart
from buffers.refusal import Refusal

PARCELS = "parcels.json"
MODEL = "model"
"""Name of the parcel with the small files of the model, and of its folder in the run's."""
READ_BYTES = 1 << 20


class PackedParcel(msgspec.Struct, frozen=True):
    """A parcel, and where its files lie on this host."""

    folder: str
    """Relative to the folder of the list, or absolute."""
    parcel: Parcel


class PackedParcels:
    """The parcels that a list in a run's folder names."""

    def __init__(self, path: Path | None) -> None:
        """`path`: the list. Without a list there are no parcels."""
        packed: list[PackedParcel] = []
        if path is not None and path.is_file():
            packed = msgspec.json.decode(path.read_bytes(), type=list[PackedParcel])
            self._root = path.parent
        self._packed = {one.parcel.name: one for one in packed}

    def list_parcels(self) -> list[Parcel]:
        return [one.parcel for one in self._packed.values()]

    def read_part(self, request: ReadParcelPart) -> bytes:
        """Returns a part of a file; less where the file is shorter. Raises Refusal for a file that is not in
        the list, or not there any more."""
        packed = self._packed.get(request.parcel)
        if packed is None or request.file >= len(packed.parcel.files):
            raise Refusal("unknown file", f"file {request.file} of parcel {request.parcel} must be listed")
        path = self._root / packed.folder / packed.parcel.files[request.file].name
        try:
            with open(path, "rb", buffering=0) as file:
                return os.pread(file.fileno(), request.size, request.offset)
        except OSError as error:
            raise Refusal(
                "lost file",
                f"{path} must be on the buffer's host for as long as the run goes on, got {error.strerror}",
            ) from error


def write_parcels(path: Path, packed: Iterable[PackedParcel]) -> None:
    """Writes the list. Raises DiskFull."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(list(packed)), indent=1))


def describe_files(folder: Path, names: Iterable[str]) -> list[ParcelFile]:
    """Returns sizes and digests of files in a folder, by name in alphabetical order."""
    found = []
    for name in sorted(names):
        path = folder / name
        found.append(ParcelFile(name=name, size=path.stat().st_size, digest=digest_bytes(path)))
    return found


def digest_bytes(path: Path) -> str:
    """Returns the digest of a file's bytes."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


def digest_parcel(files: Sequence[ParcelFile]) -> str:
    """Returns one digest over the names and contents of a parcel's files."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(sorted((one.name, one.digest) for one in files)))
