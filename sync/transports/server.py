"""The publisher's side of weights over ZeroMQ, and a relay's: serves the snapshots in a folder."""

import logging
import mmap
import threading
import time
from collections import OrderedDict
from pathlib import Path

import msgspec
import zmq

from sync.manifest import DigestMismatch, Manifest
from sync.patch import PatchMaker
from sync.transports.nccl import Links, Rendezvous, Send
from sync.transports.tcp import (
    ADDRESS,
    MAX_BYTES,
    NAME,
    Chunk,
    Enlist,
    Gone,
    Parent,
    Patches,
    Reply,
    Request,
    Route,
    Secure,
    encode,
    requests,
)

log = logging.getLogger("slipstream.weights")

FAN_OUT = 2
"""Hosts that ask one host."""
KEEP_MAPPED = 4
IDLE_S = 5.0
"""A file that nobody has asked about for so long is not kept mapped."""
ENLISTED_S = 600.0
"""A relay enlists with each version that it fetches; one that has not for so long is forgotten."""
TICK_S = 0.1


class SnapshotServer:
    """Serves the snapshots in a folder, in a thread, to whoever may connect."""

    def __init__(self, folder: Path, address: str = "tcp://127.0.0.1:0", *, secure: Secure | None = None) -> None:
        """Raises ValueError when the address is taken."""
        self._folder = folder
        self._maps: OrderedDict[str, tuple[mmap.mmap, float]] = OrderedDict()
        """Of the files that are being asked for, and when each was last."""
        self._enlisted: dict[str, float] = {}
        """Relays, and when each was last heard of."""
        self._patches = PatchMaker(folder)
        self._links = Links(folder, address.removeprefix("tcp://").rpartition(":")[0])
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
        self._links.close()

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
                        self._unanswered.append((sender, requests.decode(frames[-1] if frames else b"")))
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
        except (OSError, DigestMismatch) as error:
            log.warning("cannot answer %s: %s", request, error)
            reply, payload = Gone(getattr(request, "name", "")), []
        if reply is not None:
            self._socket.send_multipart([sender, encode(reply), *payload], copy=False)
            self.bytes_sent += sum(len(part) for part in payload)
        return reply is not None

    def _refuse(self, error: Exception) -> None:
        self.refused += 1
        log.warning("refused a request for weights: %s", error)

    def _reply(self, request: Request) -> tuple[Reply | None, list[memoryview]]:
        match request:
            case Enlist():
                if not ADDRESS.fullmatch(request.address):
                    raise ValueError(f"address must read tcp://HOST:PORT, got {request.address[:80]!r}")
                return Parent(self._parent(request.address)), []
            case Send():
                return self._sent(request), []
            case Route():
                files = self._patches.route(request.base, request.name)
                return None if files is None else Patches(request.name, files), []
        self._patches.wanted()
        if not NAME.fullmatch(request.name):
            raise ValueError(f"name must be that of a snapshot, manifest or patch, got {request.name[:80]!r}")
        try:
            mapped = self._map(request.name)
        except (OSError, ValueError):  # ValueError: an empty file
            return Gone(request.name), []
        if not (0 <= request.offset <= len(mapped) and 0 <= request.size <= MAX_BYTES):
            raise ValueError(f"offset and size must lie within {len(mapped)} bytes, got {request}")
        part = memoryview(mapped)[request.offset : request.offset + request.size]
        return Chunk(request.name, request.offset, len(mapped)), [part]

    def _sent(self, request: Send) -> Rendezvous:
        if not NAME.fullmatch(f"{request.name}.json"):
            raise ValueError(f"name must be that of a snapshot, got {request.name[:80]!r}")
        return self._links.send(request)

    def _parent(self, relay: str) -> str:
        """Whom a relay asks; empty: this server. They are a tree, in the order in which they have come."""
        now = time.monotonic()
        self._enlisted[relay] = now
        self._enlisted = {address: heard for address, heard in self._enlisted.items() if now - heard < ENLISTED_S}
        relays = list(self._enlisted)
        place = relays.index(relay)
        return "" if place < FAN_OUT else relays[place // FAN_OUT - 1]

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
