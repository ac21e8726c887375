"""Writes the snapshot file: a stock safetensors file, part by part as the learner yields them.

    8 bytes: length of the header | header: JSON, padded with spaces | raw tensors, one after the other

The tensors come in parts (`sync.stream`), each written and digested before the next is asked for. The header
stands first but is known last, so room for it is left at the front. Tensors that inference engines hold as
one matrix (q, k and v; gate and up) lie side by side, so that an engine can map them where they are. Where
the first version comes in another order, or its header does not fit, the file is rearranged once; the
versions that follow are written in place.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Protocol

import msgspec

from configs.disk import disk_full, is_disk_full, write_all
from sync.digest import StreamDigest, raw_bytes
from sync.manifest import SAFETENSORS_DTYPES, TensorEntry, dtype_name
from sync.stream import TensorPart

MERGED = {
    "q_proj": ("qkv", 0),
    "k_proj": ("qkv", 1),
    "v_proj": ("qkv", 2),
    "gate_proj": ("gate_up", 0),
    "up_proj": ("gate_up", 1),
}
"""Layers that engines merge into one, and their place in it. An engine that merges others copies those."""

HEADER_ROOM = 1 << 14
"""Least bytes before the first tensor."""

Places = dict[str, tuple[int, int]]
"""Where each tensor begins and ends, in bytes after the header, in the file's order."""


class SnapshotWriter:
    """Writes snapshots of one model, version after version; at no time does it hold more than one part."""

    def __init__(self, header_room: int = HEADER_ROOM) -> None:
        self._room = header_room
        """Bytes before the first tensor."""
        self._places: Places = {}
        """Places of the tensors in the version before."""
        self._hasher = ThreadPoolExecutor(1, "digest")
        self.copy_s = 0.0
        """Seconds that copying alone took, of the last version."""
        self.largest_part = 0
        """Bytes of the largest part of the last version."""

    def write_snapshot(self, path: Path, parts: Iterable[TensorPart]) -> tuple[TensorEntry, ...]:
        """Writes the file at `path` (over what is there; the caller renames it) and returns what it holds, in
        order.

        Raises DiskFull, and removes the file, when there is no room for it.
        """
        sizes: dict[str, int] = {}
        counted = _note_sizes(parts, sizes)
        try:
            return self._write_parts(path, counted)
        except OSError as error:
            if not is_disk_full(error):
                raise
            # The rest is taken all the same: every rank takes part in yielding it, and it tells how much room
            # would do.
            for _ in counted:
                pass
            path.unlink(missing_ok=True)
            path.with_suffix(".moving").unlink(missing_ok=True)
            raise disk_full(path, sum(sizes.values())) from error

    def _write_parts(self, path: Path, parts: Iterable[TensorPart]) -> tuple[TensorEntry, ...]:
        entries: dict[str, TensorEntry] = {}
        places: Places = {}
        free = max((end for _, end in self._places.values()), default=0)
        self.copy_s, self.largest_part = 0.0, 0
        with path.open("r+b" if path.exists() else "w+b", buffering=0) as file:
            for name, group in groupby(parts, key=lambda part: part.name):
                assert name not in entries, f"{name} was published twice"
                digest, written = StreamDigest(), 0
                for part in group:
                    if not written:
                        # The first part of a tensor decides where the tensor goes: to its place in the
                        # version before, or for now behind all others.
                        size = math.prod(part.shape) * part.published_dtype.itemsize
                        begin, end = self._places.get(name, (0, -1))
                        if end - begin != size:
                            begin, free = free, free + size
                    raw = raw_bytes(part.cast_elements())
                    digested = self._hasher.submit(digest.update, raw)
                    began = time.perf_counter()
                    file.seek(self._room + begin + written)
                    write_all(file.fileno(), raw)
                    self.copy_s += time.perf_counter() - began
                    self.largest_part = max(self.largest_part, raw.nbytes)
                    written += raw.nbytes
                    digested.result()
                assert written == size, f"{name} {part.shape} was published with {written} of {size} bytes"
                dtype = dtype_name(part.published_dtype)
                entries[name] = TensorEntry(name, dtype, part.shape, digest.hexdigest())
                places[name] = (begin, begin + size)
        wanted = _lay_out_places(places)
        header = encode_header(entries, wanted)
        if places != wanted or len(header) + 8 > self._room:
            self._rearrange_file(path, places, wanted, len(header))
        self._places = wanted
        room = self._room - 8
        with path.open("r+b") as file:
            file.write(room.to_bytes(8, "little") + header.ljust(room))
            file.truncate(self._room + max((end for _, end in wanted.values()), default=0))
        return tuple(entries[name] for name in wanted)

    def _rearrange_file(self, path: Path, places: Places, wanted: Places, header_bytes: int) -> None:
        """Copies the tensors to where they belong, behind a header of so many bytes."""
        room, rearranged = self._room, path.with_suffix(".moving")
        self._room = find_room(header_bytes, room)
        with path.open("rb") as old, rearranged.open("wb") as new:
            for name, (begin, _) in wanted.items():
                old_begin, old_end = places[name]
                old.seek(room + old_begin)
                new.seek(self._room + begin)
                for left in range(old_end - old_begin, 0, -(1 << 24)):
                    new.write(old.read(min(left, 1 << 24)))
        rearranged.rename(path)


def _note_sizes(parts: Iterable[TensorPart], sizes: dict[str, int]) -> Iterator[TensorPart]:
    """Passes the parts on, and notes how many bytes each tensor has."""
    for part in parts:
        sizes[part.name] = math.prod(part.shape) * part.published_dtype.itemsize
        yield part


def file_order(names: Iterable[str]) -> list[str]:
    """Returns the names in their order, but the parts of a merged layer at the place of the first of them."""
    groups: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        module, _, kind = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        merged, rank = MERGED.get(leaf, (leaf, 0))
        groups.setdefault(f"{parent}.{merged}.{kind}", []).append((rank, name))
    return [name for members in groups.values() for _, name in sorted(members)]


def _lay_out_places(places: Places) -> Places:
    wanted, end = {}, 0
    for name in file_order(sorted(places, key=lambda name: places[name])):
        begin, stop = places[name]
        wanted[name] = (end, end + stop - begin)
        end += stop - begin
    return wanted


def find_room(header_bytes: int, least: int) -> int:
    """Returns the bytes before the first tensor: the header's length, the header, and padding."""
    return least if header_bytes + 8 <= least else -(-(header_bytes + 8) // 4096) * 4096


class _Described(Protocol):
    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def encode_header(tensors: Mapping[str, _Described], places: Places) -> bytes:
    """Returns the header of a safetensors file, without padding."""
    return msgspec.json.encode(
        {
            name: {
                "dtype": SAFETENSORS_DTYPES[tensors[name].dtype],
                "shape": tensors[name].shape,
                "data_offsets": place,
            }
            for name, place in places.items()
        }
    )
