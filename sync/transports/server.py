"""The publisher's side of weights over ZeroMQ, and a relay's: serves the snapshots in a folder."""

import logging
import mmap
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import zmq

from configs.sockets import randomize_peer_names
from sync.extents import Extents
from sync.manifest import DigestMismatch, Manifest
from sync.patch import PatchMaker
from sync.transports.nccl import NcclLinks, Rendezvous, RequestBroadcast
from sync.transports.tcp import (
    MAX_FRAMES,
    MAX_REQUEST_BYTES,
    NAME,
    UNREADABLE,
    Chunk,
    ChunkPending,
    EnlistRelay,
    FileGone,
    GetChunk,
    GetPatchRoute,
    PatchRoute,
    RelayParent,
    Reply,
    Request,
    Secure,
    TransferRefused,
    encode,
    requests,
)

log = logging.getLogger("slipstream.weights")

CHAIN = 8
"""Relays from which on the publisher sends a second copy: two chains share those that follow."""
KEEP_CHAINS = 16
"""Files whose chains of relays are remembered."""
MAX_RELAYS = 4096
"""Hosts in the chains of a file; those that come later ask the publisher."""
KEEP_MAPPED = 4
IDLE_S = 5.0
"""A file that nobody has asked about for so long is not kept mapped."""
PARKED_S = 0.5
"""A request for bytes that are not there yet waits so long for an answer."""
MAX_PARKED = 1024
"""Requests that wait, for bytes or for patches in the making."""
TICK_S = 0.1


class ConnectionWatch(Protocol):
    """Looks after the connections of a socket: `buffers.connections.Connections`."""

    def count(self, frames: list[zmq.Frame]) -> None: ...

    def count_sent(self, frames: Sequence[Any]) -> None: ...

    def shut_down_unfinished(self, *, drained: bool) -> list[int]: ...

    def shut_down_deaf(self) -> list[int]: ...

    def shut_down_surplus(self) -> int: ...

    def take_gone(self, *, drained: bool) -> list[bytes]: ...

    def close(self) -> None: ...


class RequestGate(Protocol):
    """Lets known keys in, and knows what their owners may say: `buffers.keys.Authenticator`."""

    def objection(self, user: str, kind: str) -> str:
        """Why the owner of a key may not say a request of this name; empty: it may."""

    def check(self) -> None: ...

    def close(self) -> None: ...


class ServedFile:
    """A file of the folder, mapped; also one that is being fetched (`.part`, `.chunks`), of which only what has come is served."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when it is not there, or is a link; ValueError when it is empty."""
        self._path, self._part = path, path.with_suffix(".part")
        self._record: int | None = None
        self._come, self._read = Extents(), 0
        try:
            file = _open_plain(path)
        except FileNotFoundError:
            file = _open_plain(self._part)
            try:
                self._record = _open_plain(path.with_suffix(".chunks"))
            except OSError:
                os.close(file)
                raise
        self._inode = os.fstat(file).st_ino
        try:
            self.mapped = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(file)
        self.used_at = time.monotonic()

    def __del__(self) -> None:
        if getattr(self, "_record", None) is not None:
            os.close(self._record)  # type: ignore[arg-type]

    def is_stale(self) -> bool:
        """True when the fetcher has thrown away what it had, and perhaps begun anew."""
        if self._record is None:
            return False
        try:
            if os.stat(self._path).st_ino == self._inode:  # it is complete
                os.close(self._record)
                self._record = None
                return False
        except FileNotFoundError:
            pass
        try:
            return os.stat(self._part).st_ino != self._inode
        except FileNotFoundError:  # renamed between the two looks, or gone: the next look tells
            return not self._path.exists()

    def end_from(self, offset: int) -> int:
        """Where the bytes end that can be served from `offset` on."""
        if self._record is None:
            return len(self.mapped)
        self._read = self._come.read_record(self._record, self._read)
        return min(self._come.end_from(offset), len(self.mapped))


class SnapshotServer:
    """Serves the snapshots in a folder, in a thread, to whoever may connect."""

    def __init__(
        self,
        folder: Path,
        address: str = "tcp://127.0.0.1:0",
        *,
        secure: Secure | None = None,
        watch: Callable[["zmq.Socket[bytes]"], ConnectionWatch] | None = None,
        nccl: bool = False,
    ) -> None:
        """`watch`, given the socket before it is bound, limits what connections may send of messages that never end. `nccl`:
        requests to send by NCCL are granted. Raises ValueError when the address is taken."""
        self._folder = folder
        self._files: OrderedDict[str, ServedFile] = OrderedDict()
        """Those that are being asked for, the one asked for last at the end."""
        self._relays: OrderedDict[str, list[str]] = OrderedDict()
        """By file: the relays that have begun to fetch it, in this order."""
        self._patches = PatchMaker(folder)
        self._links = NcclLinks(folder, address.removeprefix("tcp://").rpartition(":")[0]) if nccl else None
        self._parked: list[tuple[float, bytes, Request]] = []
        """Those that wait for a patch in the making or for bytes to come, and since when."""
        self._died: BaseException | None = None
        self.bytes_sent = 0
        self.refused = Counter[str]()
        """Requests that could not be read, asked for something that is not to be had, or came with a key that may not say them; and
        connections that were ended for what they sent, did not read, or were too many of: by reason."""
        randomize_peer_names()
        self._context = zmq.Context()  # of its own: a context has one authenticator
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._watch = watch(self._socket) if watch is not None else None
        self._door: RequestGate | None = secure(self._socket) if secure is not None else None
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._close_socket()
            raise ValueError(f"sync.address must be free, got {address}: {error.strerror}") from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._running = True
        self._thread = threading.Thread(target=self._serve_requests, name="weights", daemon=True)
        self._thread.start()

    def offer_version(self, manifest: Manifest) -> None:
        """The folder has a new version. Returns at once. Raises as `check`."""
        self.check_alive()
        self._patches.offer_version(manifest)

    def check_alive(self) -> None:
        """Raises RuntimeError, with the traceback of what has ended the thread, unless it lives."""
        if self._died is not None:
            raise RuntimeError(f"the thread that serves weights at {self.address} has died") from self._died

    def close(self) -> None:
        self._running = False
        self._thread.join()
        self._patches.close()
        if self._links is not None:
            self._links.close()

    def _close_socket(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._socket.close()
        if self._door is not None:
            self._door.close()
        self._context.term()

    def _serve_requests(self) -> None:
        """Waits for requests only, at most `TICK_S`, or less while somebody waits for what is being made or fetched."""
        looked_at = time.monotonic()
        try:
            while self._running:
                if has_come := self._socket.poll(2 if self._parked else int(TICK_S * 1000)):
                    self._take_request(*self._receive_request())
                if self._door is not None:
                    self._door.check()
                if self._watch is not None and time.monotonic() - looked_at > TICK_S:
                    looked_at = time.monotonic()
                    self._end_connections(self._watch, drained=not has_come)
                self._parked = [one for one in self._parked if not self._answer_request(*one)]
                while self._files and time.monotonic() - next(iter(self._files.values())).used_at > IDLE_S:
                    self._files.popitem(last=False)
        except BaseException as error:
            log.exception("the thread that serves weights at %s has died", self.address)
            self._died = error
        finally:
            self._close_socket()

    def _end_connections(self, watch: ConnectionWatch, *, drained: bool) -> None:
        """Of those that send without end, do not read what they have asked for, or are too many."""
        ended = {
            "unfinished message": len(watch.shut_down_unfinished(drained=drained)),
            "unread answers": len(watch.shut_down_deaf()),
            "too many connections": watch.shut_down_surplus(),
        }
        watch.take_gone(drained=drained)
        for reason in filter(ended.get, ended):
            log.warning("%d connections were ended: %s", ended[reason], reason)
            self.refused[reason] += ended[reason]

    def _receive_request(self) -> tuple[bytes, bytes, str]:
        """(sender, request, the sender's key); the request is empty when there were too few frames or too many."""
        frames = self._socket.recv_multipart(copy=False)
        if self._watch is not None:
            self._watch.count(frames)
        user = "" if self._door is None else str(frames[-1].get("User-Id"))
        return frames[0].bytes, frames[-1].bytes if 1 < len(frames) <= MAX_FRAMES else b"", user

    def _take_request(self, sender: bytes, data: bytes, user: str) -> None:
        try:
            request = requests.decode(data)
        except UNREADABLE as error:
            self._refuse_request(sender, "malformed message", error)
            return
        if self._door is not None and (objection := self._door.objection(user, type(request).__name__)):
            self._refuse_request(sender, "forbidden", PermissionError(objection))
        elif len(self._parked) >= MAX_PARKED:
            self._refuse_request(
                sender, "too many requests", ValueError(f"{MAX_PARKED} requests wait already")
            )
        else:
            self._parked.append((time.monotonic(), sender, request))

    def _answer_request(self, since: float, sender: bytes, request: Request) -> bool:
        """False when it is too early to."""
        try:
            reply, payload = self._make_reply(request)
        except ValueError as error:
            self._refuse_request(sender, "not to be had", error)
            return True
        except (OSError, DigestMismatch) as error:
            log.warning("cannot answer %s: %s", request, error)
            reply, payload = FileGone(getattr(request, "name", "")), []
        if reply is None and isinstance(request, GetChunk) and time.monotonic() - since > PARKED_S:
            reply = ChunkPending(request.name, request.offset)
        if reply is not None:
            self._send_frames([sender, encode(reply), *payload])
            self.bytes_sent += sum(len(part) for part in payload)
        return reply is not None

    def _send_frames(self, frames: Sequence[bytes | memoryview]) -> None:
        self._socket.send_multipart(frames, copy=False)
        if self._watch is not None:
            self._watch.count_sent(frames)

    def _refuse_request(self, sender: bytes, reason: str, error: Exception) -> None:
        self.refused[reason] += 1
        what, count = f"{type(error).__name__}: {error}"[:200], self.refused[reason]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th: a flood of them does not fill the log
            log.warning("refused (%d times by now), %s: %s", count, reason, what)
        self._send_frames([sender, encode(TransferRefused(what))])

    def _make_reply(self, request: Request) -> tuple[Reply | None, list[memoryview]]:
        match request:
            case EnlistRelay():
                return RelayParent(request.name, self._find_parent(request)), []
            case RequestBroadcast():
                return self._send_by_broadcast(request), []
            case GetPatchRoute():
                files = self._patches.find_route(request.base, request.name)
                return None if files is None else PatchRoute(request.name, files), []
        self._patches.note_interest()
        if not NAME.fullmatch(request.name):
            raise ValueError(f"name must be that of a snapshot, manifest or patch, got {request.name[:80]!r}")
        try:
            file = self._open_file(request.name)
        except (OSError, ValueError):  # ValueError: an empty file
            return FileGone(request.name), []
        total = len(file.mapped)
        if request.offset >= total:
            raise ValueError(f"offset must lie within {total} bytes, got {request}")
        end = min(request.offset + request.size, file.end_from(request.offset))
        if end == request.offset:
            return None, []
        return Chunk(request.name, request.offset, total), [memoryview(file.mapped)[request.offset : end]]

    def _send_by_broadcast(self, request: RequestBroadcast) -> Rendezvous:
        if self._links is None:
            raise ValueError("sync.transport must be nccl for weights to be sent by NCCL")
        if not NAME.fullmatch(f"{request.name}.json"):
            raise ValueError(f"name must be that of a snapshot, got {request.name[:80]!r}")
        return self._links.send_snapshot(request)

    def _find_parent(self, request: EnlistRelay) -> str:
        """Whom a relay asks for a file; empty: this server. Those that fetch it are a chain, in the order in which they have begun:
        every link carries one copy, so the last has it little later than the first. Whoever is asked has begun before, so a
        relay that has died earlier is in nobody's way."""
        if not NAME.fullmatch(request.name):
            raise ValueError(f"name must be that of a snapshot or patch, got {request.name[:80]!r}")
        relays = self._relays.setdefault(request.name, [])
        while len(self._relays) > KEEP_CHAINS:
            self._relays.popitem(last=False)
        if request.lost in relays:
            log.warning("the relay %s is passed over: %s has asked it in vain", request.lost, request.address)
            relays.remove(request.lost)
        if request.address not in relays:
            if len(relays) >= MAX_RELAYS:
                return ""
            relays.append(request.address)
        place = relays.index(request.address)
        if place in (0, CHAIN):
            return ""
        return relays[place - 1 if place < CHAIN else place - 2]

    def _open_file(self, name: str) -> ServedFile:
        """Also files that have been deleted since: who has begun may end."""
        file = self._files.pop(name, None)
        if file is None or file.is_stale():
            file = ServedFile(self._folder / name)
        file.used_at = time.monotonic()
        self._files[name] = file
        while len(self._files) > KEEP_MAPPED:
            self._files.popitem(last=False)  # unmapped when ZeroMQ has sent the last of it
        return file


def _open_plain(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
