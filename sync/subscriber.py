"""A generator's side of the weights: reads a manifest, maps the snapshot it names, verifies the bytes.

Fetching and verification are the slow part, and need no engine: `prepare` does both beforehand, in a thread, once per version
for all processes of a host. A seal beside the snapshot says that it has been done, and on which host.
"""

import fcntl
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from sync.manifest import DigestMismatch, Manifest, tensor_digest, whole_digest
from sync.snapshot import SAFETENSORS_DTYPES
from sync.transports.tcp import Fetcher, SnapshotServer, TransferFailed


def read_manifest(locator: str | Path) -> Manifest:
    """The manifest at `locator` (`Manifest.locator`); its snapshot is looked for beside it, wherever that is mounted.

    Raises FileNotFoundError when a newer version has replaced it, DigestMismatch when it contradicts itself.
    """
    locator = Path(locator)
    try:
        manifest = msgspec.json.decode(locator.read_bytes(), type=Manifest)
    except msgspec.DecodeError as error:
        raise DigestMismatch(f"{locator} is not a manifest: {error}") from None
    if whole_digest(manifest.tensors) != manifest.digest:
        raise DigestMismatch(f"{locator}: the list of tensors does not have the manifest's digest")
    return msgspec.structs.replace(manifest, path=str(locator.with_suffix(".safetensors")))


class Subscriber:
    """Finds what is announced: in the publisher's own folder where that is at hand, else fetched to a folder of this host."""

    def __init__(self, fetcher: Fetcher | None = None, server: SnapshotServer | None = None) -> None:
        """`server` serves the fetcher's folder to other hosts."""
        self._fetcher, self._server = fetcher, server

    def locate(self, announced: str, *, again: bool = False) -> str:
        """The manifest that this host reads. `again`: what was fetched before is not what was published.

        Raises TransferFailed, a FileNotFoundError, when it cannot be brought here.
        """
        address, host, path = parse(announced)
        if not address or host == boot_id():
            return path
        if self._fetcher is None:
            raise TransferFailed(f"{announced} is on another host, and this one has no fetcher")
        name = Path(path).name
        if again:
            self._fetcher.discard(name)
        return str(self._fetcher.fetch(address, name, direct=again))

    def prepare(self, announced: str) -> str:
        """As `locate`, and verifies the snapshot, so that taking it up afterwards costs no more than it must.

        Raises also as `read_manifest` and `Snapshot.attest` do.
        """
        locator = self.locate(announced)
        Snapshot(read_manifest(locator)).attest()
        return locator

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._fetcher is not None:
            self._fetcher.close()


def announce(locator: str, address: str) -> str:
    """What the learner tells: where the manifest is on its host, and where others may fetch it."""
    return f"{address}#{boot_id()}#{locator}"


def parse(announced: str) -> tuple[str, str, str]:
    """(address, host, path) of what was announced; the first two are empty for a path that all hosts see."""
    where, _, path = announced.rpartition("#")
    address, _, host = where.partition("#")
    return address, host, path


class Header(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Snapshot:
    """The tensors of a version, mapped: nothing is copied until it is read, and deleting the file does not end it.

    Writing to a tensor changes this mapping alone.
    """

    def __init__(self, manifest: Manifest) -> None:
        """Raises FileNotFoundError when the file is gone, DigestMismatch when it is not what the manifest describes."""
        self.manifest = manifest
        with open(manifest.path, "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes != manifest.num_bytes or not num_bytes:
                raise DigestMismatch(f"{manifest.path} has {num_bytes} bytes, its manifest says {manifest.num_bytes}")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._entries = {entry.name: entry for entry in manifest.tensors}
        self._places = self._read_header()

    def _read_header(self) -> dict[str, tuple[int, int]]:
        """Where each tensor begins and ends in the file."""
        first = 8 + int.from_bytes(self._map[:8], "little")
        try:
            header = msgspec.json.decode(self._map[8:first], type=dict[str, Header])
        except msgspec.DecodeError as error:
            raise DigestMismatch(f"{self.manifest.path} is not a snapshot: {error}") from None
        absent = {entry.name for entry in self.manifest.tensors}.symmetric_difference(header)
        if absent:
            raise DigestMismatch(f"{self.manifest.path} and its manifest differ in the tensors {sorted(absent)[:3]}")
        places = {}
        for entry in self.manifest.tensors:
            found = header[entry.name]
            begin, end = (first + offset for offset in found.data_offsets)
            size = math.prod(entry.shape) * getattr(torch, entry.dtype).itemsize
            if (found.dtype, found.shape) != (SAFETENSORS_DTYPES[entry.dtype], entry.shape) or end - begin != size:
                raise DigestMismatch(f"{entry.name} is {found} in {self.manifest.path}, not {entry}")
            if not first <= begin <= end <= len(self._map):
                raise DigestMismatch(f"{entry.name} must lie within {self.manifest.path}, got bytes {begin} to {end}")
            places[entry.name] = (begin, end)
        return places

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) in the manifest's order, as views of the mapping."""
        return ((name, self.tensor(name)) for name in self._entries)

    def tensor(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        return self._view(self._places[name][0], entry.dtype, entry.shape)

    def merged(self, names: Sequence[str]) -> torch.Tensor | None:
        """One view of tensors that lie side by side, stacked along their first dimension; None where they do not."""
        parts = [self._entries[name] for name in names]
        places = [self._places[name] for name in names]
        adjacent = all(left[1] == right[0] for left, right in zip(places, places[1:], strict=False))
        kinds = {(part.dtype, part.shape[1:]) for part in parts}
        if not adjacent or len(kinds) > 1 or not parts[0].shape:
            return None
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        return self._view(places[0][0], parts[0].dtype, shape)

    def _view(self, begin: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        count, kind = math.prod(shape), getattr(torch, dtype)
        if not count:
            return torch.empty(shape, dtype=kind)
        return torch.frombuffer(self._map, dtype=kind, count=count, offset=begin).view(shape)

    def verify(self) -> None:
        """Raises DigestMismatch, naming the first tensors whose bytes differ, unless the file is what was published."""
        digests = {name: tensor_digest(tensor) for name, tensor in self.tensors()}
        expect_digests(self.manifest, digests, "the file")

    def attest(self) -> None:
        """As `verify`, but once per host: the process that comes first verifies, the others wait for it and believe it."""
        seal = Path(self.manifest.path).with_suffix(f".{boot_id()}")
        with open(self.manifest.locator, "rb") as manifest:
            fcntl.flock(manifest, fcntl.LOCK_EX)
            if seal.exists() and seal.read_text() == self.manifest.digest:
                return
            self.verify()
            seal.write_text(self.manifest.digest)


def boot_id() -> str:
    """Names this host, until it is started again."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


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
