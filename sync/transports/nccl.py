"""Weights by NCCL, through vLLM's own transfer engines: a group of two for each generator, and a thread of
the learner for each group.

    NcclBroadcast ── RequestBroadcast(name, receiver) ──▶ SnapshotServer ──▶ NcclLink
                  ◀── Rendezvous(host, port) ────────────                       │ reads the snapshot,
    vLLM's engine ◀═══════════════════════════ NCCL ════════════════════════════┘ tensor by tensor

Generators pull here too. A generator that dies takes along its own group and the thread that served it, and
nothing else: no group spans the pools, and training waits for none. What arrives has the manifest's digests
or does not serve.

Exercised with a stand-in for NCCL only; never run on GPUs.
"""

import contextlib
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
import zmq

from configs.schema import Config
from sync.announcement import Announcement
from sync.manifest import Manifest
from sync.snapshot import Snapshot, read_manifest
from sync.transports.ends import GeneratorEnd, LearnerEnd, SecureSocket, SocketGuards
from sync.transports.fetcher import Fetcher
from sync.transports.messages import UNREADABLE, Rendezvous, RequestBroadcast, encode, replies
from sync.transports.server import SnapshotServer
from sync.weight_source import EngineWeights

log = logging.getLogger("slipstream.weights")

MAX_LINKS = 256
"""Most lives of generators that one learner sends to."""
STALLED_S = 30.0
"""Seconds in which a receiver takes none of the tensors that are sent to it, after which its group is
aborted."""


class GroupSender(Protocol):
    """The learner's end of a group of two: `sync.transports.nccl_sender.NcclSender`."""

    moved_at: float
    """Monotonic time at which the last tensor was taken to be sent."""

    def send_snapshot(self, snapshot: Snapshot) -> None: ...

    def close(self) -> None: ...


class NcclLinks:
    """The learner's links, one to each receiver."""

    def __init__(self, folder: Path, host: str) -> None:
        self._folder, self._host = folder, host
        self.links: dict[str, NcclLink] = {}
        """By the name of the receiver."""

    def send_snapshot(self, request: RequestBroadcast) -> Rendezvous:
        """Queues a snapshot and returns at once. Raises FileNotFoundError when the version is gone,
        ValueError when there are too many receivers."""
        if request.receiver not in self.links and len(self.links) >= MAX_LINKS:
            raise ValueError(f"at most {MAX_LINKS} generators are sent to by NCCL in one life of the learner")
        snapshot = Snapshot(read_manifest(self._folder / f"{request.name}.json"))
        link = self.links.get(request.receiver)
        fresh = link is None or link.broken
        if link is None or fresh:
            link = self.links[request.receiver] = NcclLink(self._host)
        link.snapshots.put(snapshot)
        return Rendezvous(request.name, self._host, link.port, torch.cuda.is_available(), fresh)

    def close(self) -> None:
        for link in self.links.values():
            link.snapshots.put(None)


class NcclLink:
    """A group of two, and the thread that sends to it.

    When the other side dies in a broadcast, NCCL's kernel would run on the learner's GPU for ever, and
    whatever waits for the whole device would hang. So a second thread watches the transfer, and aborts the
    group when nothing moves any more.
    """

    def __init__(self, host: str) -> None:
        self.snapshots: queue.Queue[Snapshot | None] = queue.Queue()
        """Snapshots to send; None ends the thread."""
        self.broken = False
        with socket.socket() as probe:
            probe.bind((host, 0))
            self.port: int = probe.getsockname()[1]
        threading.Thread(target=self._send_snapshots, args=(host,), name="nccl", daemon=True).start()

    def _send_snapshots(self, host: str) -> None:
        # Imported here, because it imports vLLM, which only a learner that sends by NCCL needs.
        from sync.transports.nccl_sender import NcclSender

        sender = None
        try:
            while (snapshot := self.snapshots.get()) is not None:
                sender = sender or NcclSender(host, self.port)
                with self._abort_when_stalled(sender):
                    sender.send_snapshot(snapshot)
        except Exception:
            log.exception("a generator's NCCL group has broken; it will be given another")
            self.broken = True
        finally:
            if sender is not None:
                sender.close()

    @contextlib.contextmanager
    def _abort_when_stalled(self, sender: GroupSender) -> Iterator[None]:
        """Aborts the group, and raises TimeoutError, when the receiver takes nothing for `STALLED_S`."""
        sent, stalled = threading.Event(), threading.Event()

        def watch_progress() -> None:
            while not sent.wait(STALLED_S / 10):
                if time.monotonic() - sender.moved_at > STALLED_S:
                    stalled.set()
                    sender.close()
                    return

        sender.moved_at = time.monotonic()
        threading.Thread(target=watch_progress, name="nccl-watch", daemon=True).start()
        try:
            yield
        finally:
            sent.set()
        if stalled.is_set():
            raise TimeoutError(f"the receiver has taken nothing for {STALLED_S:g} s")


class NcclBroadcast:
    """A version that an engine receives while it takes it up."""

    checks = 0

    def __init__(self, manifest: Manifest, address: str, receiver: str, secure: SecureSocket | None) -> None:
        self.manifest = manifest
        self._address, self._receiver, self._secure = address, receiver, secure

    def attest(self) -> None:
        """Does nothing: there are no bytes before the engine has received them."""

    def load_into(self, engine: EngineWeights) -> dict[str, str]:
        manifest = self.manifest
        engine.check_manifest(manifest)
        rendezvous = self.ask_to_send()
        group = {
            "master_address": rendezvous.host,
            "master_port": rendezvous.port,
            "rank_offset": 1,
            "world_size": 2,
            "packed": rendezvous.packed,
        }
        update = {
            "names": [entry.name for entry in manifest.tensors],
            "dtype_names": [entry.dtype for entry in manifest.tensors],
            "shapes": [list(entry.shape) for entry in manifest.tensors],
        }
        engine.receive_update(manifest, update, group if rendezvous.fresh else None)
        return engine.held_digests(manifest)

    def ask_to_send(self, timeout_s: float = 10.0) -> Rendezvous:
        """Asks the learner to send from now on. Raises FileNotFoundError when the version is gone or nobody
        answers."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        asking = context.socket(zmq.DEALER)
        try:
            if self._secure is not None:
                self._secure(asking)
            asking.connect(self._address)
            asking.send(encode(RequestBroadcast(Path(self.manifest.path).stem, self._receiver)))
            if asking.poll(int(1000 * timeout_s)):
                with contextlib.suppress(*UNREADABLE):
                    reply = replies.decode(asking.recv_multipart()[0])
                    if isinstance(reply, Rendezvous):
                        return reply
        finally:
            asking.close(linger=0)
            context.term()
        raise FileNotFoundError(
            f"version {self.manifest.version} is gone at {self._address}, or nobody answers there"
        )


class BroadcastEnd:
    """Fetches manifests only: the tensors arrive when an engine takes them up."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._receiver = make_receiver_name()

    @property
    def fetched_bytes(self) -> int:
        return self._fetcher.bytes_received

    def bring_version(self, announcement: Announcement, *, again: bool = False) -> NcclBroadcast:
        name = Path(announcement.path).name
        manifest = self._fetcher.fetch_manifest(announcement.address, name, announcement.digest)
        assert manifest.adapter is None, "an engine cannot take up adapters by NCCL"
        return NcclBroadcast(manifest, announcement.address, self._receiver, self._fetcher.secure)

    def refresh_spare(self) -> None:
        self._fetcher.refresh_spare()

    def close(self) -> None:
        self._fetcher.close()


def make_receiver_name() -> str:
    """Returns a random name for one life of a generator."""
    return secrets.token_hex(8)


def open_learner_ends(config: Config, folder: Path, guards: SocketGuards) -> list[LearnerEnd]:
    address = config.weights_address
    assert address is not None, "the table says that the learner serves hosts"
    return [open_nccl_server(folder, address, guards)]


def open_nccl_server(folder: Path, address: str, guards: SocketGuards) -> SnapshotServer:
    """Opens a server that also sends to generators by NCCL, from the host in its address."""
    links = NcclLinks(folder, address.removeprefix("tcp://").rpartition(":")[0])
    return SnapshotServer(folder, address, secure=guards.secure_server, watch=guards.watch, sender=links)


def open_generator_end(config: Config, folder: Path, guards: SocketGuards) -> GeneratorEnd:
    return BroadcastEnd(Fetcher(folder, secure=guards.secure_client))
