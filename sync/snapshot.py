"""The snapshot file: a stock safetensors file, written tensor by tensor as the learner yields them.

    8 bytes: length of the header | header: JSON, padded with spaces | raw tensors, one after the other

The header stands first but is known last. So room for it is left at the front; where it turns out too small the file is
copied once behind a larger one, and the writer remembers the size for the versions that follow.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

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


class SnapshotWriter:
    """Writes snapshots of one model, version after version; at no time does it hold more than one tensor."""

    def __init__(self, header_room: int = 1 << 14) -> None:
        self._header_room = header_room
        """Bytes before the first tensor."""

    def write(self, path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[TensorEntry, ...]:
        """Writes the file at `path` (in place: the caller renames it) and returns what it holds, in order."""
        entries: list[TensorEntry] = []
        offsets: list[tuple[int, int]] = []
        end = 0
        with path.open("w+b") as file:
            file.seek(self._header_room)
            for name, tensor in tensors:
                raw = raw_bytes(tensor)
                file.write(raw)
                digest = xxhash.xxh3_128_hexdigest(raw)
                entries.append(TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), digest))
                offsets.append((end, end + raw.nbytes))
                end += raw.nbytes
            header = _header(entries, offsets)
            if len(header) + 8 > self._header_room:
                self._make_room(file, path, len(header) + 8)
            file.seek(0)
            room = self._header_room - 8
            file.write(room.to_bytes(8, "little") + header.ljust(room))
        return tuple(entries)

    def _make_room(self, file: BinaryIO, path: Path, at_least: int) -> None:
        """Moves the tensors back, so that the header fits before them. Reading and writing go through two handles."""
        behind = path.with_suffix(".moving")
        file.seek(self._header_room)
        with behind.open("wb") as copy:
            shutil.copyfileobj(file, copy, 1 << 24)
        self._header_room = -(-at_least // 4096) * 4096
        file.seek(self._header_room)
        with behind.open("rb") as copy:
            shutil.copyfileobj(copy, file, 1 << 24)
        behind.unlink()


def _header(entries: list[TensorEntry], offsets: list[tuple[int, int]]) -> bytes:
    assert len({entry.name for entry in entries}) == len(entries), "a tensor was published twice"
    return msgspec.json.encode(
        {
            entry.name: {"dtype": SAFETENSORS_DTYPES[entry.dtype], "shape": entry.shape, "data_offsets": place}
            for entry, place in zip(entries, offsets, strict=True)
        }
    )
