"""Weights by NCCL, through vLLM's own transfer engines: a group of two for each generator, and a thread of the learner's.

    NcclBroadcast.ask_to_send ── RequestBroadcast(name, receiver) ──▶ SnapshotServer ──▶ NcclLink: reads the snapshot, tensor by tensor
                    ◀── Rendezvous(host, port) ─                     │
    vLLM's engine  ◀═══════════════════ NCCL ═══════════════════════┘

Generators pull here too. A generator that dies takes its own group along, and the thread that served it, and nothing else: no group
spans the pools, and training waits for none. What arrives has the manifest's digests or does not serve.

Exercised with a stand-in for NCCL only; never run on GPUs.
"""

import contextlib
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch
import zmq
from msgspec import Meta

from sync.manifest import Manifest
from sync.snapshot import Snapshot, read_manifest

if TYPE_CHECKING:
    from sync.vllm_plugin import NcclSender

log = logging.getLogger("slipstream.weights")


MAX_LINKS = 256
"""Lives of generators that one learner sends to."""
STALLED_S = 30.0
"""How long a receiver may take no tensor of those that are sent to it."""


class RequestBroadcast(msgspec.Struct, tag=True, array_like=True, forbid_unknown_fields=True):
    """`receiver` wants the snapshot `name` (the stem of its file), and will join the group that the answer names."""

    name: Annotated[str, Meta(max_length=255)]
    receiver: Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]


class Rendezvous(msgspec.Struct, tag=True, array_like=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(max_length=255)]
    host: Annotated[str, Meta(min_length=1, max_length=255)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    packed: bool
    fresh: bool
    """The group is new: to be joined first."""


rendezvous = msgspec.msgpack.Decoder(Rendezvous)


class NcclLinks:
    """The learner's side: to each receiver its link."""

    def __init__(self, folder: Path, host: str) -> None:
        self._folder, self._host = folder, host
        self._links: dict[str, NcclLink] = {}

    def send_snapshot(self, request: RequestBroadcast) -> Rendezvous:
        """Returns at once. Raises FileNotFoundError when the version is gone, ValueError when there are too many receivers."""
        if request.receiver not in self._links and len(self._links) >= MAX_LINKS:
            raise ValueError(f"at most {MAX_LINKS} generators are sent to by NCCL in one life of the learner")
        snapshot = Snapshot(read_manifest(self._folder / f"{request.name}.json"))
        link = self._links.get(request.receiver)
        fresh = link is None or link.broken
        if link is None or fresh:
            link = self._links[request.receiver] = NcclLink(self._host)
        link.snapshots.put(snapshot)
        return Rendezvous(request.name, self._host, link.port, torch.cuda.is_available(), fresh)

    def close(self) -> None:
        for link in self._links.values():
            link.snapshots.put(None)


class NcclLink:
    """A group of two. When the other side dies in a broadcast, NCCL's kernel would run on the learner's GPU for ever, and whatever
    waits for the whole device would hang: a second thread sees that nothing moves any more, and aborts the group."""

    def __init__(self, host: str) -> None:
        self.snapshots: queue.Queue[Snapshot | None] = queue.Queue()
        self.broken = False
        with socket.socket() as probe:
            probe.bind((host, 0))
            self.port: int = probe.getsockname()[1]
        threading.Thread(target=self._send_snapshots, args=(host,), name="nccl", daemon=True).start()

    def _send_snapshots(self, host: str) -> None:
        from sync.vllm_plugin import NcclSender  # here: only a learner that sends by NCCL needs vLLM

        trainer = None
        try:
            while (snapshot := self.snapshots.get()) is not None:
                trainer = trainer or NcclSender(host, self.port)
                with self._abort_when_stalled(trainer):
                    trainer.send_snapshot(snapshot)
        except Exception:
            log.exception("a generator's NCCL group has broken; it will be given another")
            self.broken = True
        finally:
            if trainer is not None:
                trainer.close()

    @contextlib.contextmanager
    def _abort_when_stalled(self, trainer: "NcclSender") -> Iterator[None]:
        """Aborts the group, and raises TimeoutError, when the receiver takes nothing for `STALLED_S`."""
        sent, stalled = threading.Event(), threading.Event()

        def watch() -> None:
            while not sent.wait(STALLED_S / 10):
                if time.monotonic() - trainer.moved_at > STALLED_S:
                    stalled.set()
                    trainer.close()
                    return

        trainer.moved_at = time.monotonic()
        threading.Thread(target=watch, name="nccl-watch", daemon=True).start()
        try:
            yield
        finally:
            sent.set()
        if stalled.is_set():
            raise TimeoutError(f"the receiver has taken nothing for {STALLED_S:g} s")


class NcclBroadcast:
    """A version that an engine receives while it takes it up; as `Snapshot`, for `generators.engine.Engine.load`."""

    checks = 0

    def __init__(
        self, manifest: Manifest, address: str, receiver: str, secure: Callable[[Any], Any] | None
    ) -> None:
        self.manifest = manifest
        self._address, self._receiver, self._secure = address, receiver, secure

    def ask_to_send(self, timeout_s: float = 10.0) -> Rendezvous:
        """The learner sends from now on. Raises FileNotFoundError when the version is gone or nobody answers."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        asking = context.socket(zmq.DEALER)
        try:
            if self._secure is not None:
                self._secure(asking)
            asking.connect(self._address)
            asking.send(
                msgspec.msgpack.encode(RequestBroadcast(Path(self.manifest.path).stem, self._receiver))
            )
            if asking.poll(int(1000 * timeout_s)):
                with contextlib.suppress(
                    ValueError, RecursionError
                ):  # another reply, or none that can be read
                    return rendezvous.decode(asking.recv_multipart()[0])
        finally:
            asking.close(linger=0)
            context.term()
        raise FileNotFoundError(
            f"version {self.manifest.version} is gone at {self._address}, or nobody answers there"
        )


def make_receiver() -> str:
    """Names one life of a generator."""
    return secrets.token_hex(8)
