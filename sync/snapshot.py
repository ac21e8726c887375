"""The snapshot file: a stock safetensors file, written tensor by tensor as the learner yields them.

    8 bytes: length of the header | header: JSON, padded with spaces | raw tensors, one after the other

The header stands first but is known last, so room for it is left at the front. Tensors that inference engines hold as one
matrix (q, k and v; gate and up) lie side by side, so that an engine can map them where they are. Where the first version
comes in another order, or its header does not fit, the file is put right once; versions that follow are written in place.
"""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch
import xxhash

from sync.manifest import TensorEntry, dtype_name, raw_bytes

SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
MERGED = {
    "q_proj": ("qkv", 0),
    "k_proj": ("qkv", 1),
    "v_proj": ("qkv", 2),
    "gate_proj": ("gate_up", 0),
    "up_proj": ("gate_up", 1),
}
"""Layers that engines merge into one, and their place in it. Engines that merge others copy those."""

Places = dict[str, tuple[int, int]]
"""Where each tensor begins and ends, in bytes after the header, in the file's order."""


class SnapshotWriter:
    """Writes snapshots of one model, version after version; at no time does it hold more than one tensor."""

    def __init__(self, header_room: int = 1 << 14) -> None:
        self._room = header_room
        """Bytes before the first tensor."""
        self._places: Places = {}
        """Of the version before."""
        self._hasher = ThreadPoolExecutor(1, "digest")

    def write(self, path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[TensorEntry, ...]:
        """Writes the file at `path` (in place: the caller renames it) and returns what it holds, in order."""
        entries: dict[str, TensorEntry] = {}
        places: Places = {}
        free = max((end for _, end in self._places.values()), default=0)
        with path.open("w+b", buffering=0) as file:
            for name, tensor in tensors:
                assert name not in entries, f"{name} was published twice"
                raw = raw_bytes(tensor)
                begin, end = self._places.get(name, (0, -1))
                if end - begin != raw.nbytes:  # not so in the version before: behind all others, for now
                    begin, free = free, free + raw.nbytes
                digest = self._hasher.submit(xxhash.xxh3_128_hexdigest, raw)
                file.seek(self._room + begin)
                _write(file.fileno(), raw)
                entries[name] = TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), digest.result())
                places[name] = (begin, begin + raw.nbytes)
        wanted = _lay_out(places)
        header = _header(entries, wanted)
        if places != wanted or len(header) + 8 > self._room:
            self._put_right(path, places, wanted, len(header) + 8)
        self._places = wanted
        room = self._room - 8
        with path.open("r+b") as file:
            file.write(room.to_bytes(8, "little") + header.ljust(room))
            file.truncate(self._room + max((end for _, end in wanted.values()), default=0))
        return tuple(entries[name] for name in wanted)

    def _put_right(self, path: Path, places: Places, wanted: Places, at_least: int) -> None:
        """Copies the tensors to where they belong, behind a header of this size."""
        room, right = self._room, path.with_suffix(".moving")
        if at_least > room:
            self._room = -(-at_least // 4096) * 4096
        with path.open("rb") as old, right.open("wb") as new:
            for name, (begin, _) in wanted.items():
                at, end = places[name]
                old.seek(room + at)
                new.seek(self._room + begin)
                for left in range(end - at, 0, -(1 << 24)):
                    new.write(old.read(min(left, 1 << 24)))
        right.rename(path)


def file_order(names: Iterable[str]) -> list[str]:
    """The names in their order, but parts of a merged layer at the place of the first of them."""
    groups: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        module, _, kind = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        merged, rank = MERGED.get(leaf, (leaf, 0))
        groups.setdefault(f"{parent}.{merged}.{kind}", []).append((rank, name))
    return [name for members in groups.values() for _, name in sorted(members)]


def _lay_out(places: Places) -> Places:
    wanted, end = {}, 0
    for name in file_order(sorted(places, key=lambda name: places[name])):
        begin, stop = places[name]
        wanted[name] = (end, end + stop - begin)
        end += stop - begin
    return wanted


def _header(entries: dict[str, TensorEntry], places: Places) -> bytes:
    return msgspec.json.encode(
        {
            name: {
                "dtype": SAFETENSORS_DTYPES[entries[name].dtype],
                "shape": entries[name].shape,
                "data_offsets": place,
            }
            for name, place in places.items()
        }
    )


def _write(file: int, data: memoryview) -> None:
    """All of it, however little the kernel takes at a time."""
    while data:
        data = data[os.write(file, data) :]
