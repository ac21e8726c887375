"""The publisher's side of weights over ZeroMQ, and a relay's: serves the snapshots in a folder."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import zmq

from configs.sockets import randomize_peer_names
from sync.manifest import DigestMismatch, Manifest
from sync.patch import PatchMaker
from sync.transports.ends import ConnectionWatch, LearnerEnd, SecureSocket, WatchSocket
from sync.transports.messages import (
    FILE_NAME,
    MAX_FRAMES,
    MAX_REQUEST_BYTES,
    UNREADABLE,
    Chunk,
    ChunkPending,
    EnlistRelay,
    FileGone,
    GetChunk,
    GetPatchRoute,
    PatchPending,
    PatchRoute,
    RelayParent,
    Rendezvous,
    Reply,
    Request,
    RequestBroadcast,
    TransferRefused,
    encode,
    requests,
)
from sync.transports.relay_chains import RelayChains
from sync.transports.served_files import ServedFiles

log = logging.getLogger("slipstream.weights")

PARKED_S, ROUTE_PARKED_S = 0.5, 4.0
"""Seconds that a request waits for bytes that are not there yet, and for patches in the making, before the
answer is `ChunkPending` or `PatchPending`."""
MAX_PARKED = 1024
"""Most requests that wait, for bytes or for patches in the making."""
TICK_S = 0.1
"""Seconds between two looks at the connections."""
MAKE_ROOM_S = 2.0
"""Seconds in which the thread comes to unmap what can be spared."""


class RequestGate(Protocol):
    """Lets known keys in, and knows what their owners may ask for: `buffers.keys.Authenticator`."""

    def objection(self, user: str, kind: str) -> str:
        """Returns why the owner of a key may not send a request of this name; empty: it may."""

    def check(self) -> None: ...

    def close(self) -> None: ...


class SnapshotSender(Protocol):
    """Sends snapshots from GPU to GPU: `sync.transports.nccl.NcclLinks`."""

    def send_snapshot(self, request: RequestBroadcast) -> Rendezvous: ...

    def close(self) -> None: ...


class SnapshotServer(LearnerEnd):
    """Serves the snapshots in a folder, in a thread, to whoever may connect."""

    def __init__(
        self,
        folder: Path,
        address: str = "tcp://127.0.0.1:0",
        *,
        secure: SecureSocket | None = None,
        watch: WatchSocket | None = None,
        sender: SnapshotSender | None = None,
    ) -> None:
        """`secure` returns the `RequestGate` of the socket. `watch` limits messages that never end. `sender`
        sends to those who ask for it; None: such requests are refused. Raises ValueError when the address
        is taken."""
        self._sender = sender
        self.files = ServedFiles(folder)
        self.chains = RelayChains()
        self.patches = PatchMaker(folder)
        self._parked: list[tuple[float, bytes, Request]] = []
        """Time, sender and request of those that wait for a patch in the making, or for bytes to arrive."""
        self._died: BaseException | None = None
        self.bytes_sent = 0
        self.refused = Counter[str]()
        """By reason, the number of requests that could not be read, asked for something that does not exist,
        or came with a key that may not send them; and of connections that were ended for what they sent,
        left unread, or were too many of."""
        randomize_peer_names()
        # The server has a ZeroMQ context of its own, because a context has one authenticator.
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._watch = watch(self._socket) if watch is not None else None
        self._gate: RequestGate | None = secure(self._socket) if secure is not None else None
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._close_socket()
            raise ValueError(f"sync.address must be free, got {address}: {error.strerror}") from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._running = True
        self._has_room = threading.Event()
        """Cleared when what can be spared is to be unmapped."""
        self._has_room.set()
        self._thread = threading.Thread(target=self._serve_requests, name="weights", daemon=True)
        self._thread.start()

    def offer_version(self, manifest: Manifest) -> None:
        """Starts to make the patch that leads to this version. Returns at once. Raises as `check_alive`."""
        self.check_alive()
        if manifest.parts is None:  # of a file with holes there is none
            self.patches.offer_version(manifest)

    def make_room(self) -> None:
        """Drops the patches, and the deleted versions that slow hosts are still at: they begin anew. Waits a
        moment for the thread, which has these mapped."""
        self.patches.drop_patches()
        self._has_room.clear()
        self._has_room.wait(MAKE_ROOM_S)

    def check_alive(self) -> None:
        """Raises RuntimeError, with the traceback of the error that has ended the thread, unless the thread
        lives."""
        if self._died is not None:
            raise RuntimeError(f"the thread that serves weights at {self.address} has died") from self._died

    def close(self) -> None:
        self._running = False
        self._thread.join()
        self.patches.close()
        if self._sender is not None:
            self._sender.close()

    def _close_socket(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._socket.close()
        if self._gate is not None:
            self._gate.close()
        self._context.term()

    def _serve_requests(self) -> None:
        """Runs in the thread. It waits for requests only, at most `TICK_S`, or less while a request waits for
        an answer."""
        looked_at = time.monotonic()
        try:
            while self._running:
                if has_come := self._socket.poll(2 if self._parked else int(TICK_S * 1000)):
                    self._take_request(*self._receive_request())
                if self._gate is not None:
                    self._gate.check()
                if self._watch is not None and time.monotonic() - looked_at > TICK_S:
                    looked_at = time.monotonic()
                    self._end_connections(self._watch, drained=not has_come)
                self._parked = [one for one in self._parked if not self._answer_request(*one)]
                self.files.unmap_idle()
                if not self._has_room.is_set():
                    self.files.unmap_deleted()
                    self._has_room.set()
        except BaseException as error:
            log.exception("the thread that serves weights at %s has died", self.address)
            self._died = error
        finally:
            self._close_socket()

    def _end_connections(self, watch: ConnectionWatch, *, drained: bool) -> None:
        """Ends connections that send without end, do not read what they have asked for, or are too many."""
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
        """Returns sender, request and the sender's key. The request is empty when it had too few frames or
        too many."""
        frames = self._socket.recv_multipart(copy=False)
        if self._watch is not None:
            self._watch.count(frames)
        user = "" if self._gate is None else str(frames[-1].get("User-Id"))
        return frames[0].bytes, frames[-1].bytes if 1 < len(frames) <= MAX_FRAMES else b"", user

    def _take_request(self, sender: bytes, data: bytes, user: str) -> None:
        try:
            request = requests.decode(data)
        except UNREADABLE as error:
            self._refuse_request(sender, "malformed message", error)
            return
        if self._gate is not None and (objection := self._gate.objection(user, type(request).__name__)):
            self._refuse_request(sender, "forbidden", PermissionError(objection))
        elif len(self._parked) >= MAX_PARKED:
            full = ValueError(f"{MAX_PARKED} requests wait already")
            self._refuse_request(sender, "too many requests", full)
        else:
            self._parked.append((time.monotonic(), sender, request))

    def _answer_request(self, since: float, sender: bytes, request: Request) -> bool:
        """Answers a request that has waited since that time; false when it is too early to answer."""
        try:
            reply, payload = self._make_reply(request)
        except ValueError as error:
            self._refuse_request(sender, "not to be had", error)
            return True
        except (OSError, DigestMismatch) as error:
            log.warning("cannot answer %s: %s", request, error)
            reply, payload = FileGone(getattr(request, "name", "")), []
        if reply is None:
            reply = _ask_for_patience(request, time.monotonic() - since)
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
        text, count = f"{type(error).__name__}: {error}"[:200], self.refused[reason]
        # The 1st, 2nd, 4th, 8th refusal is logged: a flood of them does not fill the log.
        if count & (count - 1) == 0:
            log.warning("refused (%d times by now), %s: %s", count, reason, text)
        self._send_frames([sender, encode(TransferRefused(text))])

    def _make_reply(self, request: Request) -> tuple[Reply | None, list[memoryview]]:
        """Returns the reply and the bytes that follow it; no reply when it is too early. Raises ValueError to
        refuse the request."""
        match request:
            case EnlistRelay():
                return RelayParent(request.name, self.chains.find_parent(request)), []
            case RequestBroadcast():
                return self._start_broadcast(request), []
            case GetPatchRoute():
                files = self.patches.find_route(request.base, request.name)
                return None if files is None else PatchRoute(request.name, files), []
        self.patches.note_interest()
        if not FILE_NAME.fullmatch(request.name):
            raise ValueError(f"name must be that of a snapshot, manifest or patch, got {request.name[:80]!r}")
        try:
            file = self.files.open_file(request.name)
        except (OSError, ValueError):
            # ValueError: the file is empty and cannot be mapped.
            return FileGone(request.name), []
        total = len(file.mapped)
        if request.offset >= total:
            raise ValueError(f"offset must lie within {total} bytes, got {request}")
        end = min(request.offset + request.size, file.end_from(request.offset))
        if end == request.offset:
            return None, []
        file.is_asked_to_end = end == total
        return Chunk(request.name, request.offset, total), [memoryview(file.mapped)[request.offset : end]]

    def _start_broadcast(self, request: RequestBroadcast) -> Rendezvous:
        if self._sender is None:
            raise ValueError("sync.transport must be nccl for weights to be sent by NCCL")
        if not FILE_NAME.fullmatch(f"{request.name}.json"):
            raise ValueError(f"name must be that of a snapshot, got {request.name[:80]!r}")
        return self._sender.send_snapshot(request)


def _ask_for_patience(request: Request, waited_s: float) -> Reply | None:
    """Returns the answer to a request that has waited so long in vain; None while that is not long."""
    match request:
        case GetChunk() if waited_s > PARKED_S:
            return ChunkPending(request.name, request.offset)
        case GetPatchRoute() if waited_s > ROUTE_PARKED_S:
            return PatchPending(request.name)
    return None
