"""Reads the snapshot file (`sync.snapshot_writer`): maps it, and verifies its bytes once per host.

A seal beside the file says that its bytes have been verified, on which host, and for which very file.
"""

import errno
import logging
import math
import mmap
import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import torch
import xxhash

from configs.host import boot_id
from sync.digest import CHUNK_BYTES, digest_pieces, tensor_digest
from sync.locks import hold_lock
from sync.manifest import SAFETENSORS_DTYPES, DigestMismatch, Manifest, TensorEntry, parse_manifest

log = logging.getLogger("slipstream.weights")

UNMAPPED_BYTES = 1 << 22
"""Bytes that are unmapped at a time."""


def read_manifest(locator: str | Path, digest: str = "") -> Manifest:
    """Reads the manifest at `locator` (`Manifest.locator`). Its snapshot is looked for beside it, wherever
    that is mounted.

    `digest`: that of the announcement, if there was one.

    Raises FileNotFoundError when a newer version has replaced it, DigestMismatch when it contradicts itself
    or the announcement.
    """
    locator = Path(locator)
    manifest = parse_manifest(locator.read_bytes(), str(locator), locator.stem, digest)
    return msgspec.structs.replace(manifest, path=str(locator.with_suffix(".safetensors")))


class HeaderEntry(msgspec.Struct):
    """One tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class SnapshotLoader(Protocol):
    """An engine that takes up snapshots of this host."""

    def load_snapshot(self, snapshot: "Snapshot") -> dict[str, str]:
        """Maps or copies a snapshot; returns the digests of the engine's parameters afterwards, by name."""
        ...


class Snapshot:
    """The tensors of a version, mapped: nothing is copied until it is read, and the mapping outlives the
    file's name.

    Writing to a tensor changes this mapping alone.
    """

    attested = False
    """True when the file's bytes are known to be those that were published."""
    checks = 0
    """Number of times that this process has compared the bytes with the manifest."""

    def __init__(self, manifest: Manifest) -> None:
        """Raises FileNotFoundError when the file is gone, DigestMismatch when it is not what the manifest
        describes."""
        self.manifest = manifest
        file = _open_plain_file(manifest.path)
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
        """Returns where each tensor begins and ends in the file."""
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
            kind = (SAFETENSORS_DTYPES[entry.dtype], entry.shape)
            if (found.dtype, found.shape) != kind or end - begin != size:
                raise DigestMismatch(f"{entry.name} is {found} in {self.manifest.path}, not {entry}")
            if not first <= begin <= end <= len(self._map):
                raise DigestMismatch(
                    f"{entry.name} must lie within {self.manifest.path}, got bytes {begin} to {end}"
                )
            places[entry.name] = (begin, end)
        return places

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) in the manifest's order, as views of the mapping."""
        return ((name, self.view_tensor(name)) for name in self._entries)

    def find_place(self, name: str) -> tuple[TensorEntry, int]:
        """Returns a tensor's entry, and where in the file its bytes begin. Raises KeyError."""
        return self._entries[name], self._places[name][0]

    def view_tensor(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        return self._view_bytes(self._places[name][0], entry.dtype, entry.shape)

    def view_merged(self, names: Sequence[str]) -> torch.Tensor | None:
        """Returns one view of tensors that lie side by side, stacked along their first dimension; None where
        they do not."""
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
        """Raises DigestMismatch, naming the first tensors whose bytes differ, unless the file is what was
        published.

        `progress` is called after each tensor.
        """
        self.checks += 1
        digests = {}
        for name, tensor in self.named_tensors():
            digests[name] = tensor_digest(tensor)
            progress()
        expect_digests(self.manifest, digests, f"the file{self._name_wrong_hosts(digests)}")
        self.attested = True

    def _name_wrong_hosts(self, digests: dict[str, str]) -> str:
        """Returns which hosts of the learner's ranks have other bytes than they have published; empty where
        there are none, or one host has the whole file."""
        if self.manifest.parts is None:
            return ""
        ends = [part.end for part in self.manifest.parts.parts]
        wrong: set[str] = set()
        for entry in self.manifest.tensors:
            if digests[entry.name] == entry.digest:
                continue
            tensor, stop = self._places[entry.name]
            begin = tensor
            for part in self.manifest.parts.parts[bisect_right(ends, tensor) : bisect_left(ends, stop) + 1]:
                data = memoryview(self._map)[begin : part.end]
                head = min(len(data), (tensor - begin) % CHUNK_BYTES)
                if xxhash.xxh3_128_hexdigest(b"".join(digest_pieces(data, head))) != part.digest:
                    source = self.manifest.parts.sources[part.source]
                    wrong.add(f"{source.host} ({source.address})")
                begin = part.end
        return f", whose rows came from {', '.join(sorted(wrong))}," if wrong else ""

    def attest(self, *, map_pages: bool = True) -> None:
        """Verifies the bytes once per host: the first process does it and leaves a seal, the others wait for
        it and trust the seal.

        A process verifies for itself where the first one makes no progress, where the folder may only be
        read, and where the seal is another user's. Either way all pages are mapped afterwards, so that an
        engine that uses them need not wait for the kernel; `map_pages=False` is for one that reads a part.
        Raises DigestMismatch.
        """
        if self.attested:
            return
        path = Path(self.manifest.path).with_suffix(f".{boot_id()}")
        try:
            # A version that has gone gets no seal.
            os.stat(self.manifest.locator)
            with hold_lock(path) as seal:
                if seal.is_own() and seal.read_text() == self._seal_text():
                    if map_pages:
                        np.frombuffer(self._map, np.uint8)[:: mmap.PAGESIZE].max()
                else:
                    seal.write_claim(f"verifies version {self.manifest.version}")
                    self.verify_bytes(seal.note_progress)
                    seal.write_text(self._seal_text())
                self.attested = True
        except OSError as error:
            # LockTimedOut is an OSError too.
            log.warning("%s; version %d is verified by this process for itself", error, self.manifest.version)
        if not self.attested:
            self.verify_bytes()
            self.attested = True

    def load_into(self, engine: SnapshotLoader) -> dict[str, str]:
        """Puts the version into an engine (`sync.weight_source.WeightSource`)."""
        return engine.load_snapshot(self)

    def _seal_text(self) -> str:
        """Returns the text that says that this very file has these bytes.

        It holds inode, size and time of change: whatever is written to the file, or put in its place later,
        has another time of change.
        """
        found = self._stat
        return f"{self.manifest.digest} {found.st_ino} {found.st_size} {found.st_ctime_ns}"

    def holds_tensor(self, tensor: torch.Tensor) -> bool:
        """True for a tensor that lies in this mapping."""
        begin = np.frombuffer(self._map, np.uint8).ctypes.data
        return begin <= tensor.data_ptr() < begin + len(self._map)

    def release_memory(self) -> None:
        """Unmaps the file. The caller makes sure that no tensor uses it any more."""
        unmap_gradually(self.__dict__.pop("_map"))


def leave_memory(parameter: torch.Tensor, before: Snapshot | None) -> None:
    """Gives a parameter that lies in a snapshot's memory some of its own, to be written to: the snapshot's
    is released once another version has been taken up."""
    if before is not None and before.holds_tensor(parameter):
        parameter.data = torch.empty_like(parameter)


def _open_plain_file(path: str) -> int:
    """Opens a file that is no link. Raises FileNotFoundError when it is gone, DigestMismatch when it is a
    link."""
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DigestMismatch(f"{path} must be a file, got a link") from None
        raise


def unmap_gradually(mapped: mmap.mmap) -> None:
    """Unmaps a mapping that nobody uses, in a thread and little by little: while the kernel unmaps, the
    process can neither map nor unmap anything else. The caller must not hold the mapping."""
    threading.Thread(target=_unmap_pieces, args=(mapped,), daemon=True).start()


def _unmap_pieces(mapped: mmap.mmap) -> None:
    for begin in range(0, len(mapped), UNMAPPED_BYTES):
        mapped.madvise(mmap.MADV_DONTNEED, begin, min(UNMAPPED_BYTES, len(mapped) - begin))
        time.sleep(0)


def expect_digests(
    manifest: Manifest, digests: dict[str, str], holder: str, error: type[DigestMismatch] = DigestMismatch
) -> None:
    """Raises `error` unless the digests, by name, are those of the manifest's tensors. `holder` names what
    was digested."""
    differ = [entry.name for entry in manifest.tensors if digests.get(entry.name) != entry.digest]
    if differ:
        names = ", ".join(differ[:3]) + (", ..." if len(differ) > 3 else "")
        raise error(
            f"version {manifest.version}: {len(differ)} of {len(manifest.tensors)} tensors in {holder} "
            f"do not have the published digest: {names}"
        )
