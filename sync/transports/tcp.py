"""Weights to other hosts, over ZeroMQ: a server beside a folder of snapshots, and a fetcher that fills such a folder elsewhere.

    Fetcher ── Get(name, offset, size) ──▶ SnapshotServer        a few chunks under way at once
            ◀── Part, the bytes ──────────                       straight out of the mapped file

What has been fetched is a folder of snapshots again: mapped by all engines of that host, verified once, and served on to others, so
that the publisher's own link carries a few copies whatever the number of hosts. The publisher says who asks whom (`Enlist`);
a manifest always comes from the publisher itself, so that whatever a relay hands on is held against the publisher's digests.

Who has an earlier version asks the publisher for patches that lead from it (`Route`, `sync.patch`) and writes them over a file that no
engine of the host uses any more; whatever does not work out, or would not be much smaller, is answered by the whole snapshot.

A file that is served is not written to before ZeroMQ has let go of it: every chunk under way keeps its file mapped, and a file is
used again only when nobody has it mapped. (A multipart send's own tracker speaks for its last frame only, and small frames count
as done at once.)
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
from sync.patch import WORTH, PatchMaker, apply_patches
from sync.snapshot import read_manifest
from sync.spares import SPARE, WAS, copy_over, drop_spares, find_spare, retire

log = logging.getLogger("slipstream.weights")

CHUNK_BYTES = 4 << 20
WINDOW = 8
"""Chunks asked for and not come yet: enough to fill a link of 10 GB/s and 3 ms."""
FAN_OUT = 2
"""Hosts that ask one host."""
MAX_BYTES = 64 << 20
KEEP_MAPPED = 4
PASSING = (".part", ".chunks", ".patch", ".patching", ".settled", ".unfinished")
IDLE_S = 5.0
"""A file that nobody has asked about for so long is not kept mapped."""
TICK_S = 0.1
SNAPSHOT = r"v\d+-\w+"
NAME = re.compile(rf"{SNAPSHOT}(\.json|\.safetensors|-from-{SNAPSHOT}\.patch)")

Secure = Callable[["zmq.Socket[bytes]"], Any]
"""Gives a socket its keys, before it is bound or connected."""


class Get(msgspec.Struct, tag=True, array_like=True):
    name: str
    offset: int
    size: int


class Route(msgspec.Struct, tag=True, array_like=True):
    """Who has `base` wants `name` (stems of their files)."""

    name: str
    base: str


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


class Patches(msgspec.Struct, tag=True, array_like=True):
    """How to come to `name`, in order; nothing: by the whole snapshot."""

    name: str
    files: list[tuple[str, int]]
    """Names and bytes."""


class Parent(msgspec.Struct, tag=True, array_like=True):
    """Where to ask for snapshots; empty: here."""

    address: str


Request = Get | Route | Enlist
Reply = Part | Gone | Patches | Parent
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)
_encode = msgspec.msgpack.Encoder().encode


class TransferFailed(FileNotFoundError):
    """The snapshot could not be brought here: nobody answers, or it is gone. What has come is kept, and a later try goes on."""


class SnapshotServer:
    """Serves the snapshots in a folder, in a thread, to whoever may connect."""

    def __init__(self, folder: Path, address: str = "tcp://127.0.0.1:0", *, secure: Secure | None = None) -> None:
        """Raises ValueError when the address is taken."""
        self._folder = folder
        self._maps: OrderedDict[str, tuple[mmap.mmap, float]] = OrderedDict()
        """Of the files that are being asked for, and when each was last."""
        self._enlisted: list[str] = []
        self._patches = PatchMaker(folder)
        self._unanswered: list[tuple[bytes, Request]] = []
        """Those that wait for a patch in the making."""
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

    def offer(self, manifest: Manifest) -> None:
        """The folder has a new version. Returns at once."""
        self._patches.offer(manifest)

    def close(self) -> None:
        self._running = False
        self._thread.join()
        self._patches.close()

    def _close_socket(self) -> None:
        self._socket.close()
        if self._door is not None:
            self._door.close()
        self._context.term()

    def _run(self) -> None:
        """Waits for requests only, at most `TICK_S`, or less while a patch is being made that somebody waits for."""
        try:
            while self._running:
                if self._socket.poll(2 if self._unanswered else int(TICK_S * 1000)):
                    sender, *frames = self._socket.recv_multipart()
                    try:
                        self._unanswered.append((sender, _requests.decode(frames[-1] if frames else b"")))
                    except msgspec.DecodeError as error:
                        self._refuse(error)
                self._unanswered = [one for one in self._unanswered if not self._answer(*one)]
                while self._maps and time.monotonic() - next(iter(self._maps.values()))[1] > IDLE_S:
                    self._maps.popitem(last=False)
        finally:
            self._close_socket()

    def _answer(self, sender: bytes, request: Request) -> bool:
        """False when it is too early to."""
        try:
            reply, payload = self._reply(request)
        except ValueError as error:
            self._refuse(error)
            return True
        if reply is not None:
            self._socket.send_multipart([sender, _encode(reply), *payload], copy=False)
            self.bytes_sent += sum(len(part) for part in payload)
        return reply is not None

    def _refuse(self, error: Exception) -> None:
        self.refused += 1
        log.warning("refused a request for weights: %s", error)

    def _reply(self, request: Request) -> tuple[Reply | None, list[memoryview]]:
        match request:
            case Enlist():
                if request.address not in self._enlisted:
                    self._enlisted.append(request.address)
                place = self._enlisted.index(request.address)
                return Parent("" if place < FAN_OUT else self._enlisted[place // FAN_OUT - 1]), []
            case Route():
                files = self._patches.route(request.base, request.name)
                return None if files is None else Patches(request.name, files), []
        self._patches.wanted()
        if not NAME.fullmatch(request.name):
            raise ValueError(f"name must be that of a snapshot, manifest or patch, got {request.name[:80]!r}")
        try:
            mapped = self._map(request.name)
        except (FileNotFoundError, ValueError):  # ValueError: an empty file
            return Gone(request.name), []
        if not (0 <= request.offset <= len(mapped) and 0 <= request.size <= MAX_BYTES):
            raise ValueError(f"offset and size must lie within {len(mapped)} bytes, got {request}")
        part = memoryview(mapped)[request.offset : request.offset + request.size]
        return Part(request.name, request.offset, len(mapped)), [part]

    def _map(self, name: str) -> mmap.mmap:
        """Also of files that have been deleted since: who has begun may end."""
        if name in self._maps:
            mapped, _ = self._maps.pop(name)
        else:
            with open(self._folder / name, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._maps[name] = (mapped, time.monotonic())
        while len(self._maps) > KEEP_MAPPED:
            self._maps.popitem(last=False)  # unmapped when ZeroMQ has sent the last of it
        return mapped


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
        with self._alone():
            if not local.exists():
                manifest = self._manifest(address, name)
                parent = "" if direct or not self._serve_at else self._parent(address)
                self._clear(local)
                if direct or local.with_suffix(".part").exists() or not self._patch(address, parent, local):
                    self._whole(address, parent, local, manifest)
                unfinished = local.with_suffix(".unfinished")
                unfinished.write_bytes(msgspec.json.encode(manifest))
                unfinished.rename(local)
        return local

    def settle(self) -> None:
        """Between two fetches: brings the spare up to the newest version, so that the next patch is the only one to apply."""
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
        with open(self._folder / "lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

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

    def _newest(self) -> Manifest | None:
        """Of the versions that are here whole."""
        found = sorted(self._folder.glob("v*.json"), key=lambda path: path.stat().st_mtime)
        return read_manifest(found[-1]) if found else None

    def _way(self, base: Manifest, version: Manifest) -> list[Path] | None:
        """The patches here that lead from one version to another; None where they do not."""
        way: list[Path] = []
        at, start = Path(version.path).stem, Path(base.path).stem
        while at != start:
            patch = next(self._folder.glob(f"{at}-from-*.patch"), None)
            if patch is None:
                return None
            way.insert(0, patch)
            at = patch.stem.partition("-from-")[2]
        return way

    def _clear(self, coming: Path | None) -> None:
        """Keeps the newest version, the spare and its way to the newest version, and what has come of the one that is `coming`.
        Who has an older version mapped keeps it."""
        found = sorted(self._folder.glob("v*.json"), key=lambda path: path.stat().st_mtime)
        for locator in found[:-1]:
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
        self._connect(address).send(_encode(Route(local.stem, Path(base.path).stem)))
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
            missing = [n for n in range(-(-num_bytes // CHUNK_BYTES)) if n not in come]
            deadline = time.monotonic() + self._patience_s
            while parent and missing and time.monotonic() < deadline:  # the relay is fetching it itself
                before, missing = missing, self._get(parent, name, num_bytes, missing, file, record)
                time.sleep(0.02 if missing == before else 0)
            if missing and self._get(address, name, num_bytes, missing, file, record):
                return False
            file.truncate(num_bytes)
        chunks.unlink()
        part.rename(self._folder / name)
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

    def _receive(self, address: str, name: str | None) -> tuple[Reply, memoryview]:
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


def _entries(data: bytes) -> Iterator[bytes]:
    """Whole entries of 8 bytes: the last one may be torn."""
    return (data[at : at + 8] for at in range(0, len(data) - 7, 8))
