"""The snapshot file: a stock safetensors file, written part by part as the learner yields them.

    8 bytes: length of the header | header: JSON, padded with spaces | raw tensors, one after the other

The tensors come in parts (`sync.stream`), each written and digested before the next is asked for. The header stands first but
is known last, so room for it is left at the front. Tensors that inference engines hold as one
matrix (q, k and v; gate and up) lie side by side, so that an engine can map them where they are. Where the first version
comes in another order, or its header does not fit, the file is put right once; versions that follow are written in place.

A reader maps the file and verifies its bytes once per host: a seal beside it says that it has been done, and where.
"""

import errno
import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np
import torch

from configs.disk import disk_full, is_disk_full, write_all
from configs.host import boot_id
from sync.digest import StreamDigest, raw_bytes, tensor_digest
from sync.locks import hold_lock
from sync.manifest import (
    SAFETENSORS_DTYPES,
    DigestMismatch,
    Manifest,
    TensorEntry,
    dtype_name,
    parse_manifest,
)
from sync.stream import TensorPart

log = logging.getLogger("slipstream.weights")

MERGED = {
    "q_proj": ("qkv", 0),
    "k_proj": ("qkv", 1),
    "v_proj": ("qkv", 2),
    "gate_proj": ("gate_up", 0),
    "up_proj": ("gate_up", 1),
}
"""Layers that engines merge into one, and their place in it. Engines that merge others copy those."""

UNMAPPED_BYTES = 1 << 22
"""At a time."""

Places = dict[str, tuple[int, int]]
"""Where each tensor begins and ends, in bytes after the header, in the file's order."""


class SnapshotWriter:
    """Writes snapshots of one model, version after version; at no time does it hold more than one part."""

    def __init__(self, header_room: int = 1 << 14) -> None:
        self._room = header_room
        """Bytes before the first tensor."""
        self._places: Places = {}
        """Of the version before."""
        self._hasher = ThreadPoolExecutor(1, "digest")
        self.copy_s = 0.0
        """What copying alone took, of the last version."""
        self.largest_part = 0
        """Bytes, of the last version."""

    def write_snapshot(self, path: Path, parts: Iterable[TensorPart]) -> tuple[TensorEntry, ...]:
        """Writes the file at `path` (over what is there; the caller renames it) and returns what it holds, in order.

        Raises DiskFull, and removes the file, when there is no room for it.
        """
        sizes: dict[str, int] = {}
        counted = _note_sizes(parts, sizes)
        try:
            return self._write_parts(path, counted)
        except OSError as error:
            if not is_disk_full(error):
                raise
            for (
                _
            ) in counted:  # to know how much there would have been, and because every rank takes part in it
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
                digest, at = StreamDigest(), 0
                for part in group:
                    if not at:  # its first
                        size = math.prod(part.shape) * part.elements.element_size()
                        begin, end = self._places.get(name, (0, -1))
                        if end - begin != size:  # not so in the version before: behind all others, for now
                            begin, free = free, free + size
                    raw = raw_bytes(part.elements)
                    digested = self._hasher.submit(digest.update, raw)
                    began = time.perf_counter()
                    file.seek(self._room + begin + at)
                    write_all(file.fileno(), raw)
                    self.copy_s += time.perf_counter() - began
                    self.largest_part = max(self.largest_part, raw.nbytes)
                    at += raw.nbytes
                    digested.result()
                assert at == size, f"{name} {part.shape} was published with {at} of {size} bytes"
                entries[name] = TensorEntry(
                    name, dtype_name(part.elements.dtype), part.shape, digest.hexdigest()
                )
                places[name] = (begin, begin + size)
        wanted = _lay_out_places(places)
        header = _encode_header(entries, wanted)
        if places != wanted or len(header) + 8 > self._room:
            self._rearrange_file(path, places, wanted, len(header) + 8)
        self._places = wanted
        room = self._room - 8
        with path.open("r+b") as file:
            file.write(room.to_bytes(8, "little") + header.ljust(room))
            file.truncate(self._room + max((end for _, end in wanted.values()), default=0))
        return tuple(entries[name] for name in wanted)

    def _rearrange_file(self, path: Path, places: Places, wanted: Places, at_least: int) -> None:
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


def _note_sizes(parts: Iterable[TensorPart], sizes: dict[str, int]) -> Iterator[TensorPart]:
    """Hands the parts on, and notes how many bytes each tensor has."""
    for part in parts:
        sizes[part.name] = math.prod(part.shape) * part.elements.element_size()
        yield part


def file_order(names: Iterable[str]) -> list[str]:
    """The names in their order, but parts of a merged layer at the place of the first of them."""
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


def _encode_header(entries: dict[str, TensorEntry], places: Places) -> bytes:
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


def read_manifest(locator: str | Path, digest: str = "") -> Manifest:
    """The manifest at `locator` (`Manifest.locator`); its snapshot is looked for beside it, wherever that is mounted. `digest`: what
    was announced, if it was.

    Raises FileNotFoundError when a newer version has replaced it, DigestMismatch when it contradicts itself or the announcement.
    """
    locator = Path(locator)
    manifest = parse_manifest(locator.read_bytes(), str(locator), locator.stem, digest)
    return msgspec.structs.replace(manifest, path=str(locator.with_suffix(".safetensors")))


class HeaderEntry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Snapshot:
    """The tensors of a version, mapped: nothing is copied until it is read, and deleting the file does not end it.

    Writing to a tensor changes this mapping alone. `attested`: the file's bytes are known to be what was published.
    """

    attested = False
    checks = 0
    """How often its bytes were compared with the manifest here."""

    def __init__(self, manifest: Manifest) -> None:
        """Raises FileNotFoundError when the file is gone, DigestMismatch when it is not what the manifest describes."""
        self.manifest = manifest
        file = _open_plain(manifest.path)
        try:
            self._stat = os.fstat(file)
            num_bytes = self._stat.st_size
            if num_bytes != manifest.num_bytes or not num_bytes:
                raise DigestMismatch(
                    f"{manifest.path} has {num_bytes} bytes, its manifest says {manifest.num_bytes}"
                )
            self._map = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(file)
        self._entries = {entry.name: entry for entry in manifest.tensors}
        self._places = self._read_header()

    def _read_header(self) -> dict[str, tuple[int, int]]:
        """Where each tensor begins and ends in the file."""
        first = 8 + int.from_bytes(self._map[:8], "little")
        try:
            header = msgspec.json.decode(self._map[8:first], type=dict[str, HeaderEntry])
        except (ValueError, RecursionError) as error:
            raise DigestMismatch(f"{self.manifest.path} is not a snapshot: {error}") from None
        absent = {entry.name for entry in self.manifest.tensors}.symmetric_difference(header)
        if absent:
            raise DigestMismatch(
                f"{self.manifest.path} and its manifest differ in the tensors {sorted(absent)[:3]}"
            )
        places = {}
        for entry in self.manifest.tensors:
            found = header[entry.name]
            begin, end = (first + offset for offset in found.data_offsets)
            size = math.prod(entry.shape) * getattr(torch, entry.dtype).itemsize
            if (found.dtype, found.shape) != (
                SAFETENSORS_DTYPES[entry.dtype],
                entry.shape,
            ) or end - begin != size:
                raise DigestMismatch(f"{entry.name} is {found} in {self.manifest.path}, not {entry}")
            if not first <= begin <= end <= len(self._map):
                raise DigestMismatch(
                    f"{entry.name} must lie within {self.manifest.path}, got bytes {begin} to {end}"
                )
            places[entry.name] = (begin, end)
        return places

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) in the manifest's order, as views of the mapping."""
        return ((name, self.view_tensor(name)) for name in self._entries)

    def find_place(self, name: str) -> tuple[TensorEntry, int]:
        """(entry, where in the file it begins). Raises KeyError."""
        return self._entries[name], self._places[name][0]

    def view_tensor(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        return self._view_bytes(self._places[name][0], entry.dtype, entry.shape)

    def view_merged(self, names: Sequence[str]) -> torch.Tensor | None:
        """One view of tensors that lie side by side, stacked along their first dimension; None where they do not."""
        parts = [self._entries[name] for name in names]
        places = [self._places[name] for name in names]
        adjacent = all(left[1] == right[0] for left, right in zip(places, places[1:], strict=False))
        kinds = {(part.dtype, part.shape[1:]) for part in parts}
        if not adjacent or len(kinds) > 1 or not parts[0].shape:
            return None
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        return self._view_bytes(places[0][0], parts[0].dtype, shape)

    def _view_bytes(self, begin: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        count, kind = math.prod(shape), getattr(torch, dtype)
        if not count:
            return torch.empty(shape, dtype=kind)
        return torch.frombuffer(self._map, dtype=kind, count=count, offset=begin).view(shape)

    def verify_bytes(self, progress: Callable[[], None] = lambda: None) -> None:
        """Raises DigestMismatch, naming the first tensors whose bytes differ, unless the file is what was published. `progress` is
        called after each tensor."""
        self.checks += 1
        digests = {}
        for name, tensor in self.named_tensors():
            digests[name] = tensor_digest(tensor)
            progress()
        expect_digests(self.manifest, digests, "the file")
        self.attested = True

    def attest(self) -> None:
        """As `verify`, but once per host: the process that comes first verifies, the others wait for it and believe it. They verify
        for themselves where it makes no progress, where the folder may only be read, and where the seal is another user's.

        Either way all pages are mapped afterwards, so that an engine that uses them need not wait for the kernel.
        """
        if self.attested:
            return
        path = Path(self.manifest.path).with_suffix(f".{boot_id()}")
        try:
            os.stat(self.manifest.locator)  # a version that has gone gets no seal
            with hold_lock(path) as seal:
                if seal.is_own() and seal.read_text() == self._seal_text():
                    np.frombuffer(self._map, np.uint8)[:: mmap.PAGESIZE].max()
                else:
                    seal.write_claim(f"verifies version {self.manifest.version}")
                    self.verify_bytes(seal.note_progress)
                    seal.write_text(self._seal_text())
                self.attested = True
        except OSError as error:  # LockTimedOut is one
            log.warning("%s; version %d is verified by this process for itself", error, self.manifest.version)
        if not self.attested:
            self.verify_bytes()
            self.attested = True

    def _seal_text(self) -> str:
        """Says that this very file has these bytes: whatever is written or put in its place later has another time of change."""
        found = self._stat
        return f"{self.manifest.digest} {found.st_ino} {found.st_size} {found.st_ctime_ns}"

    def release_memory(self) -> None:
        """Gives the memory back, when no tensor uses it any more."""
        unmap_gradually(self.__dict__.pop("_map"))


def _open_plain(path: str) -> int:
    """A descriptor of a file that is no link. Raises FileNotFoundError when it is gone, DigestMismatch when it is a link."""
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DigestMismatch(f"{path} must be a file, got a link") from None
        raise


def unmap_gradually(mapped: mmap.mmap) -> None:
    """Gives a mapping up that nobody uses; in a thread and little by little, because the kernel lets a process neither map nor
    unmap meanwhile. The caller must not hold it."""
    threading.Thread(target=_unmap_pieces, args=(mapped,), daemon=True).start()


def _unmap_pieces(mapped: mmap.mmap) -> None:
    for begin in range(0, len(mapped), UNMAPPED_BYTES):
        mapped.madvise(mmap.MADV_DONTNEED, begin, min(UNMAPPED_BYTES, len(mapped) - begin))
        time.sleep(0)


def expect_digests(
    manifest: Manifest, digests: dict[str, str], holder: str, error: type[DigestMismatch] = DigestMismatch
) -> None:
    """Raises `error` unless `holder` has exactly the manifest's tensors; `digests`: by name."""
    differ = [entry.name for entry in manifest.tensors if digests.get(entry.name) != entry.digest]
    if differ:
        names = ", ".join(differ[:3]) + (", ..." if len(differ) > 3 else "")
        raise error(
            f"version {manifest.version}: {len(differ)} of {len(manifest.tensors)} tensors in {holder} "
            f"do not have the published digest: {names}"
        )
