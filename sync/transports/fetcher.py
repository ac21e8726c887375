"""A host's side of weights over ZeroMQ: brings what a publisher serves into a folder of this host."""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from sync.folders import leave, share, sweep
from sync.manifest import DigestMismatch, Manifest, parse_manifest
from sync.patch import WORTH, apply_patches
from sync.snapshot import read_manifest
from sync.spares import SPARE, WAS, complete, copy_over, drop_spares, find_spare, retire
from sync.transports import tcp
from sync.transports.tcp import (
    MAX_BYTES,
    NAME,
    Chunk,
    Enlist,
    Get,
    Gone,
    Parent,
    Patches,
    Reply,
    Route,
    Secure,
    encode,
    replies,
)

log = logging.getLogger("slipstream.weights")

WINDOW = 8
"""Chunks asked for and not come yet: enough to fill a link of 10 GB/s and 3 ms."""
PASSING = (".part", ".chunks", ".patch", ".patching", ".settled", ".unfinished")


class TransferFailed(FileNotFoundError):
    """The snapshot could not be brought here: nobody answers, or it is gone. What has come is kept, and a later try goes on."""


class Fetcher:
    """Brings versions into a folder of this host, once for all of the host's processes.

        v<k>-<life>.part, .chunks               a snapshot on its way, and which chunks of it have come
        v<k>-<life>-from-v<j>-<life>.patch      a patch that has come
        v<k>-<life>.patching                    a file that patches are being applied to
        v<k>-<life>.safetensors, .json          as the publisher's
        v<k>-<life>.spare, .was                 a version that has gone: the next one is written over it

    Not thread-safe; several processes may share a folder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        serve_at: str = "",
        secure: Secure | None = None,
        timeout_s: float = 10.0,
        patience_s: float = 2.0,
    ) -> None:
        """`serve_at`: where this host serves what it has fetched, if it does. `timeout_s`: of silence. `patience_s`: how long
        a relay is waited for that does not have a version yet; then the publisher itself is asked."""
        self.serve_at, self.secure = serve_at, secure
        self._folder, self._timeout_s, self._patience_s = folder, timeout_s, patience_s
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._lock: int | None = None
        self.bytes_received = self.patches = 0

    def close(self) -> None:
        for socket in self._sockets.values():
            socket.close(linger=0)
        self._context.term()
        if self._lock is not None:
            leave(self._folder, self._lock)

    def open_folder(self) -> Path:
        """Makes it, where it is missing: it is there as long as a fetcher of this host uses it."""
        if self._lock is None:
            sweep(self._folder.parent)
            self._lock = share(self._folder)
        return self._folder

    def fetch(self, address: str, name: str, *, direct: bool = False) -> Path:
        """The local manifest `name` (`v<k>-<life>.json`) of the publisher at `address`, its snapshot beside it, not verified yet.

        `direct`: whole and from the publisher itself, whoever else may have it. Raises TransferFailed.
        """
        local = self._folder / name
        with self._alone():
            if not local.exists():
                manifest = self.manifest(address, name)
                parent = "" if direct or not self.serve_at else self._parent(address)
                self._clear(local)
                if direct or local.with_suffix(".part").exists() or not self._patch(address, parent, local):
                    self._whole(address, parent, local, manifest)
                unfinished = local.with_suffix(".unfinished")
                unfinished.write_bytes(msgspec.json.encode(manifest))
                unfinished.rename(local)
        return local

    def settle(self) -> None:
        """Between two fetches: brings the spare up to the newest version, so that the next patch is the only one to apply."""
        if self._lock is None:
            return
        with self._alone():
            self._clear(None)
            spare, newest = find_spare(self._folder), self._newest()
            if spare is None or newest is None or not (patches := self._way(spare, newest)):
                return
            stem = self._folder / Path(newest.path).stem
            if self._overwrite(spare, patches, stem.with_suffix(".settled")):
                drop_spares(self._folder)
                stem.with_suffix(WAS).write_bytes(msgspec.json.encode(newest))
                stem.with_suffix(".settled").rename(stem.with_suffix(SPARE))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Other processes of this host wait."""
        with open(self.open_folder() / "lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def discard(self, name: str) -> None:
        """Forgets what has been fetched, because it is not what was published."""
        for path in self._folder.glob(f"{name.removesuffix('.json')}.*"):
            path.unlink(missing_ok=True)

    def manifest(self, address: str, name: str) -> Manifest:
        """The publisher's. Raises TransferFailed."""
        socket = self._connect(address)
        socket.send(encode(Get(name, 0, MAX_BYTES)))
        part, data = self._receive(address, name)
        if isinstance(part, Gone):
            raise TransferFailed(f"{name} is gone at {address}")
        return parse_manifest(data, f"{name} at {address}")

    def _parent(self, address: str) -> str:
        self._connect(address).send(encode(Enlist(self.serve_at)))
        parent, _ = self._receive(address, None)
        return parent.address if isinstance(parent, Parent) else ""

    def _newest(self) -> Manifest | None:
        found = complete(self._folder)
        return read_manifest(found[-1]) if found else None

    def _way(self, base: Manifest, version: Manifest) -> list[Path] | None:
        """The patches here that lead from one version to another; None where they do not."""
        way: list[Path] = []
        at, start = Path(version.path).stem, Path(base.path).stem
        while at != start:
            patch = next(self._folder.glob(f"{at}-from-*.patch"), None)
            if patch is None or patch in way:
                return None
            way.insert(0, patch)
            at = patch.stem.partition("-from-")[2]
        return way

    def _clear(self, coming: Path | None) -> None:
        """Keeps the newest version, the spare and its way to the newest version, and what has come of the one that is `coming`.
        Who has an older version mapped keeps it."""
        for locator in complete(self._folder)[:-1]:
            retire(locator)
        spare, newest = find_spare(self._folder), self._newest()
        way = spare and newest and self._way(spare, newest)
        for path in self._folder.glob("v*"):
            if (
                path.suffix in PASSING
                and path not in (way or ())
                and not (coming and path.stem.startswith(coming.stem))
            ):
                path.unlink(missing_ok=True)

    def _whole(self, address: str, parent: str, local: Path, manifest: Manifest) -> None:
        part, snapshot = local.with_suffix(".part"), local.with_suffix(".safetensors")
        if not part.exists() and (spare := find_spare(self._folder)) is not None:
            Path(spare.path).rename(part)
        if not self._file(address, parent, snapshot.name, manifest.num_bytes):
            raise TransferFailed(f"{snapshot.name} is gone at {address}, or nobody answers there")

    def _patch(self, address: str, parent: str, local: Path) -> bool:
        """Makes the snapshot from the newest version here and patches; false where there are none, or they do not fit."""
        base = self._newest()
        if base is None:
            return False
        self._connect(address).send(encode(Route(local.stem, Path(base.path).stem)))
        route, _ = self._receive(address, local.stem)
        if not isinstance(route, Patches) or not 0 < sum(size for _, size in route.files) <= WORTH * base.num_bytes:
            return False
        for name, num_bytes in route.files:
            if not NAME.fullmatch(name) or not self._file(address, parent, name, num_bytes):
                return False
        spare, patches = find_spare(self._folder), [self._folder / name for name, _ in route.files]
        if spare is not None and (way := self._way(spare, base)) is not None:
            base, patches = spare, way + patches
        done = self._overwrite(base, patches, local.with_suffix(".safetensors"))
        self.patches += done
        return done

    def _overwrite(self, base: Manifest, patches: list[Path], into: Path) -> bool:
        """Makes the file `into` of a version here and patches: over the spare, if there is one; a `base` that is not the spare
        is copied first."""
        patching = into.with_suffix(".patching")
        try:
            if (spare := find_spare(self._folder)) is not None:
                Path(spare.path).rename(patching)
            if Path(base.path).suffix != SPARE:
                copy_over(Path(base.path), patching)
            apply_patches(msgspec.structs.replace(base, path=str(patching)), patches)
            patching.rename(into)
        except (DigestMismatch, FileNotFoundError) as error:
            log.warning("%s; the whole snapshot is fetched", error)
            return False
        finally:
            patching.unlink(missing_ok=True)
        return True

    def _file(self, address: str, parent: str, name: str, num_bytes: int) -> bool:
        """Brings a file, or what is missing of it; false when it is not to be had whole."""
        part, chunks = ((self._folder / name).with_suffix(suffix) for suffix in (".part", ".chunks"))
        with open(part, "ab"), open(part, "r+b", buffering=0) as file, open(chunks, "a+b", buffering=0) as record:
            record.seek(0)
            come = {int.from_bytes(entry, "little") for entry in _entries(record.read())}
            missing = [n for n in range(-(-num_bytes // tcp.CHUNK_BYTES)) if n not in come]
            deadline = time.monotonic() + self._patience_s
            while parent and missing and time.monotonic() < deadline:  # the relay is fetching it itself
                before = missing
                missing = self._get(parent, name, num_bytes, missing, file, record, self._patience_s)
                time.sleep(0.02 if missing == before else 0)
            if missing and self._get(address, name, num_bytes, missing, file, record, self._timeout_s):
                return False
            file.truncate(num_bytes)
        chunks.unlink()
        part.rename(self._folder / name)
        return True

    def _get(
        self, address: str, name: str, num_bytes: int, missing: list[int], file: Any, record: Any, timeout_s: float
    ) -> list[int]:
        """Asks for chunks, a window at a time; returns those that did not come."""
        socket = self._connect(address)
        left, waiting = list(reversed(missing)), set[int]()
        while left or waiting:
            while left and len(waiting) < WINDOW:
                number = left.pop()
                socket.send(encode(Get(name, number * tcp.CHUNK_BYTES, tcp.CHUNK_BYTES)))
                waiting.add(number)
            try:
                part, data = self._receive(address, name, timeout_s)
            except TransferFailed:
                break
            if isinstance(part, Gone):
                self._drop(address)
                break
            assert isinstance(part, Chunk)
            number = part.offset // tcp.CHUNK_BYTES
            wanted = min(tcp.CHUNK_BYTES, num_bytes - part.offset)
            if number not in waiting or part.offset % tcp.CHUNK_BYTES or len(data) != wanted:
                log.warning(
                    "%s sent %d bytes at %d of %s, which were not asked for", address, len(data), part.offset, name
                )
                self._drop(address)
                break
            os.pwrite(file.fileno(), data, part.offset)
            record.write(number.to_bytes(8, "little"))
            self.bytes_received += len(data)
            waiting.discard(number)
        return sorted([*left, *waiting])

    def _receive(self, address: str, name: str | None, timeout_s: float | None = None) -> tuple[Reply, memoryview]:
        """The next answer about `name`. Raises TransferFailed after a silence."""
        socket = self._connect(address)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            header, *payload = socket.recv_multipart(copy=False)
            with contextlib.suppress(msgspec.DecodeError):
                reply = replies.decode(header.buffer)
                if getattr(reply, "name", None) == name:
                    return reply, payload[0].buffer if payload else memoryview(b"")
        self._drop(address)
        raise TransferFailed(f"nobody has answered at {address} for {timeout_s} s")

    def _connect(self, address: str) -> "zmq.Socket[bytes]":
        if address not in self._sockets:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            if self.secure is not None:
                self.secure(socket)
            socket.connect(address)
            self._sockets[address] = socket
        return self._sockets[address]

    def _drop(self, address: str) -> None:
        """Answers that are still on their way must not be taken for those to a later question."""
        if address in self._sockets:
            self._sockets.pop(address).close(linger=0)


def _entries(data: bytes) -> Iterator[bytes]:
    """Whole entries of 8 bytes: the last one may be torn."""
    return (data[at : at + 8] for at in range(0, len(data) - 7, 8))
