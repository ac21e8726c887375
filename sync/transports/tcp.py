"""Weights to other hosts, over ZeroMQ: a server beside a folder of snapshots, and a fetcher that fills such a folder elsewhere.

    Fetcher ── Get(name, offset, size) ──▶ SnapshotServer        a few chunks under way at once
            ◀── Part, the bytes ──────────                       straight out of the mapped file

What has been fetched is a folder of snapshots again: mapped by all engines of that host, verified once, and served on to others, so
that the publisher's own link carries a few copies whatever the number of hosts. The publisher says who asks whom (`Enlist`);
a manifest always comes from the publisher itself, so that whatever a relay hands on is held against the publisher's digests.

Who has an earlier version asks for the patch that leads from it (`sync.patch`), which a server makes when it is first asked
for, and keeps; whatever does not work out, or would not be much smaller, is answered by the whole snapshot.

A snapshot file never changes, so no buffer is reused while ZeroMQ still sends from it; a chunk keeps its file mapped until then.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from sync.folders import leave, share, sweep
from sync.manifest import DigestMismatch, Manifest, parse_manifest
from sync.patch import apply_patch, make_patch
from sync.snapshot import Snapshot, read_manifest

log = logging.getLogger("slipstream.weights")

CHUNK_BYTES = 4 << 20
WINDOW = 8
"""Chunks asked for and not come yet: enough to fill a link of 10 GB/s and 3 ms."""
FAN_OUT = 2
"""Hosts that ask one host."""
MAX_BYTES = 64 << 20
KEEP = 2
TICK_S = 0.1
NAME = re.compile(r"v\d+-\w+\.(json|safetensors|from-(?P<base>v\d+-\w+)\.patch)")

Secure = Callable[["zmq.Socket[bytes]"], Any]
"""Gives a socket its keys, before it is bound or connected."""


class Get(msgspec.Struct, tag=True, array_like=True):
    name: str
    offset: int
    size: int


class Enlist(msgspec.Struct, tag=True, array_like=True):
    """A host will serve what it has fetched at this address."""

    address: str


class Part(msgspec.Struct, tag=True, array_like=True):
    """Comes with the bytes."""

    name: str
    offset: int
    total: int
    """Bytes of the whole file."""


class Gone(msgspec.Struct, tag=True, array_like=True):
    """The file is not here: not yet, or not any more."""

    name: str


class Parent(msgspec.Struct, tag=True, array_like=True):
    """Where to ask for snapshots; empty: here."""

    address: str


_requests = msgspec.msgpack.Decoder(Get | Enlist)
_replies = msgspec.msgpack.Decoder(Part | Gone | Parent)
_encode = msgspec.msgpack.Encoder().encode


class TransferFailed(FileNotFoundError):
    """The snapshot could not be brought here: nobody answers, or it is gone. What has come is kept, and a later try goes on."""


class SnapshotServer:
    """Serves the snapshots in a folder, in a thread, to whoever may connect."""

    def __init__(self, folder: Path, address: str = "tcp://127.0.0.1:0", *, secure: Secure | None = None) -> None:
        """Raises ValueError when the address is taken."""
        self._folder = folder
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._enlisted: list[str] = []
        self.bytes_sent = 0
        self.refused = 0
        """Requests that could not be read, or asked for something that is no snapshot."""
        self._context = zmq.Context()  # of its own: a context has one authenticator
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 1 << 16)
        self._door = secure(self._socket) if secure is not None else None
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._close_socket()
            raise ValueError(f"sync.address must be free, got {address}: {error.strerror}") from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._running = True
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._running = False
        self._thread.join()

    def _close_socket(self) -> None:
        self._socket.close()
        if self._door is not None:
            self._door.close()
        self._context.term()

    def _run(self) -> None:
        """Waits for requests only, at most `TICK_S`."""
        try:
            while self._running:
                if not self._socket.poll(int(TICK_S * 1000)):
                    continue
                sender, *frames = self._socket.recv_multipart()
                try:
                    reply, payload = self._reply(_requests.decode(frames[-1] if frames else b""))
                except (msgspec.DecodeError, ValueError) as error:
                    self.refused += 1
                    log.warning("refused a request for weights: %s", error)
                    continue
                self._socket.send_multipart([sender, _encode(reply), *payload], copy=False)
                self.bytes_sent += sum(len(part) for part in payload)
        finally:
            self._close_socket()

    def _reply(self, request: Get | Enlist) -> tuple[Part | Gone | Parent, list[memoryview]]:
        if isinstance(request, Enlist):
            if request.address not in self._enlisted:
                self._enlisted.append(request.address)
            place = self._enlisted.index(request.address)
            return Parent("" if place < FAN_OUT else self._enlisted[place // FAN_OUT - 1]), []
        if not NAME.fullmatch(request.name):
            raise ValueError(f"name must be that of a snapshot or manifest, got {request.name[:80]!r}")
        try:
            mapped = self._map(request.name)
        except (FileNotFoundError, ValueError):  # ValueError: an empty file
            return Gone(request.name), []
        if not (0 <= request.offset <= len(mapped) and 0 <= request.size <= MAX_BYTES):
            raise ValueError(f"offset and size must lie within {len(mapped)} bytes, got {request}")
        part = memoryview(mapped)[request.offset : request.offset + request.size]
        return Part(request.name, request.offset, len(mapped)), [part]

    def _map(self, name: str) -> mmap.mmap:
        """Of the last few files, also when they have been deleted since: who has begun may end."""
        if name not in self._maps:
            if (base := NAME.fullmatch(name)["base"]) is not None:  # type: ignore[index]
                self._make_patch(base, name)
            with open(self._folder / name, "rb") as file:
                self._maps[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            while len(self._maps) > 2 * KEEP:
                self._maps.popitem(last=False)  # unmapped when ZeroMQ has sent the last of it
        return self._maps[name]

    def _make_patch(self, base: str, name: str) -> None:
        """Raises FileNotFoundError where one of the versions is not here; makes nothing where it would not be worth it."""
        path = self._folder / name
        if path.exists():
            return
        old, new = (Snapshot(read_manifest(self._folder / f"{stem}.json")) for stem in (base, name.partition(".")[0]))
        make_patch(old, new, path)


class Fetcher:
    """Brings versions into a folder of this host, once for all of the host's processes.

        v<k>-<life>.part, .chunks           a snapshot on its way, and which chunks of it have come
        v<k>-<life>.from-<base>.patch       a patch that has come
        v<k>-<life>.safetensors, .json      as the publisher's

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
        self._patience_s = patience_s
        self._folder, self._serve_at, self._secure, self._timeout_s = folder, serve_at, secure, timeout_s
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        sweep(folder.parent)
        self._lock = share(folder)
        self.bytes_received = self.patches = 0

    def close(self) -> None:
        for socket in self._sockets.values():
            socket.close(linger=0)
        self._context.term()
        leave(self._folder, self._lock)

    def fetch(self, address: str, name: str, *, direct: bool = False) -> Path:
        """The local manifest `name` (`v<k>-<life>.json`) of the publisher at `address`, its snapshot beside it, not verified yet.

        `direct`: whole and from the publisher itself, whoever else may have it. Raises TransferFailed.
        """
        local = self._folder / name
        with open(self._folder / "lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process of this host may be at it
            if local.exists():
                return local
            manifest = self._manifest(address, name)
            parent = "" if direct or not self._serve_at else self._parent(address)
            self._snapshot(address, parent, local, manifest, direct)
            self._prune()
        return local

    def discard(self, name: str) -> None:
        """Forgets what has been fetched, because it is not what was published."""
        for path in self._folder.glob(f"{name.removesuffix('.json')}.*"):
            path.unlink(missing_ok=True)

    def _manifest(self, address: str, name: str) -> Manifest:
        socket = self._connect(address)
        socket.send(_encode(Get(name, 0, MAX_BYTES)))
        part, data = self._receive(address, name)
        if isinstance(part, Gone):
            raise TransferFailed(f"{name} is gone at {address}")
        return parse_manifest(data, f"{name} at {address}")

    def _parent(self, address: str) -> str:
        self._connect(address).send(_encode(Enlist(self._serve_at)))
        parent, _ = self._receive(address, None)
        return parent.address if isinstance(parent, Parent) else ""

    def _snapshot(self, address: str, parent: str, local: Path, manifest: Manifest, direct: bool) -> None:
        part, snapshot = local.with_suffix(".part"), local.with_suffix(".safetensors")
        base = None if direct or part.exists() else self._last()
        if base is None or not self._patch(address, parent, base, local):
            if not self._file(address, parent, f"{local.stem}.safetensors", part, manifest.num_bytes):
                raise TransferFailed(f"{snapshot.name} is gone at {address}, or nobody answers there")
            part.rename(snapshot)
        unfinished = local.with_suffix(".unfinished")
        unfinished.write_bytes(msgspec.json.encode(manifest))
        unfinished.rename(local)

    def _last(self) -> Path | None:
        """The manifest of the version that was fetched last."""
        return max(self._folder.glob("v*.json"), key=lambda path: path.stat().st_mtime, default=None)

    def _patch(self, address: str, parent: str, base: Path, local: Path) -> bool:
        """Makes the snapshot from the version here and a patch; false where there is none, or it does not fit."""
        name = f"{local.stem}.from-{base.stem}.patch"
        path = self._folder / name
        try:
            num_bytes = self._size(address, name)
            if num_bytes is None or not self._file(address, parent, name, path, num_bytes):
                return False
            apply_patch(Snapshot(read_manifest(base)), path, local.with_suffix(".safetensors"))
        except (DigestMismatch, FileNotFoundError) as error:
            log.warning("%s; the whole snapshot is fetched", error)
            return False
        finally:
            path.unlink(missing_ok=True)
            path.with_suffix(".chunks").unlink(missing_ok=True)
        self.patches += 1
        return True

    def _size(self, address: str, name: str) -> int | None:
        self._connect(address).send(_encode(Get(name, 0, 0)))
        part, _ = self._receive(address, name)
        return part.total if isinstance(part, Part) else None

    def _file(self, address: str, parent: str, name: str, path: Path, num_bytes: int) -> bool:
        """Brings a file, or what is missing of it; false when it is not to be had whole."""
        chunks = path.with_suffix(".chunks")
        with open(path, "ab"), open(path, "r+b", buffering=0) as file, open(chunks, "a+b", buffering=0) as record:
            record.seek(0)
            come = {int.from_bytes(entry, "little") for entry in _entries(record.read())}
            missing = [n for n in range(-(-num_bytes // CHUNK_BYTES)) if n not in come]
            deadline = time.monotonic() + self._patience_s
            while parent and missing and time.monotonic() < deadline:  # the relay is fetching it itself
                before, missing = missing, self._get(parent, name, num_bytes, missing, file, record)
                time.sleep(0.02 if missing == before else 0)
            if missing and self._get(address, name, num_bytes, missing, file, record):
                return False
            file.truncate(num_bytes)
        chunks.unlink()
        return True

    def _get(self, address: str, name: str, num_bytes: int, missing: list[int], file: Any, record: Any) -> list[int]:
        """Asks for chunks, a window at a time; returns those that did not come."""
        socket = self._connect(address)
        left, waiting = list(reversed(missing)), set[int]()
        while left or waiting:
            while left and len(waiting) < WINDOW:
                number = left.pop()
                socket.send(_encode(Get(name, number * CHUNK_BYTES, CHUNK_BYTES)))
                waiting.add(number)
            try:
                part, data = self._receive(address, name)
            except TransferFailed:
                break
            if isinstance(part, Gone):
                self._drop(address)
                break
            assert isinstance(part, Part)
            number = part.offset // CHUNK_BYTES
            wanted = min(CHUNK_BYTES, num_bytes - part.offset)
            if number not in waiting or part.offset % CHUNK_BYTES or len(data) != wanted:
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

    def _receive(self, address: str, name: str | None) -> tuple[Part | Gone | Parent, memoryview]:
        """The next answer about `name`. Raises TransferFailed after a silence."""
        socket = self._connect(address)
        deadline = time.monotonic() + self._timeout_s
        while socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            header, *payload = socket.recv_multipart(copy=False)
            with contextlib.suppress(msgspec.DecodeError):
                reply = _replies.decode(header.buffer)
                if getattr(reply, "name", None) == name:
                    return reply, payload[0].buffer if payload else memoryview(b"")
        self._drop(address)
        raise TransferFailed(f"nobody has answered at {address} for {self._timeout_s} s")

    def _connect(self, address: str) -> "zmq.Socket[bytes]":
        if address not in self._sockets:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            if self._secure is not None:
                self._secure(socket)
            socket.connect(address)
            self._sockets[address] = socket
        return self._sockets[address]

    def _drop(self, address: str) -> None:
        """Answers that are still on their way must not be taken for those to a later question."""
        if address in self._sockets:
            self._sockets.pop(address).close(linger=0)

    def _prune(self) -> None:
        """Keeps what was touched last: the newest few versions, of whatever life."""
        touched: dict[str, float] = {}
        for path in self._folder.glob("v*.*"):
            touched[path.stem] = max(touched.get(path.stem, 0.0), path.stat().st_mtime)
        for stem in sorted(touched, key=lambda stem: touched[stem])[:-KEEP]:
            self.discard(stem)


def _entries(data: bytes) -> Iterator[bytes]:
    """Whole entries of 8 bytes: the last one may be torn."""
    return (data[at : at + 8] for at in range(0, len(data) - 7, 8))
