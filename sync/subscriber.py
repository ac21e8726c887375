"""A generator's side of the weights: finds what is announced, and has it verified before an engine takes it up.

Fetching and verification are the slow part, and need no engine: `prepare` does both beforehand, in a thread, once per version
for all processes of a host.
"""

import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path

from sync.merged import MergedFolder
from sync.snapshot import Snapshot, boot_id, read_manifest
from sync.transports.fetcher import Fetcher, TransferFailed
from sync.transports.nccl import Broadcast, make_receiver
from sync.transports.server import SnapshotServer


class Subscriber:
    """Finds what is announced: in the publisher's own folder where that is at hand, else fetched to a folder of this host.

    Not thread-safe.
    """

    def __init__(
        self,
        fetcher: Fetcher | None = None,
        *,
        relay: Callable[[str], SnapshotServer] | None = None,
        broadcast: bool = False,
    ) -> None:
        """`relay`, given an address, serves the fetcher's folder there to other hosts; one process of a host does so. `broadcast`:
        weights are not brought here beforehand, but come by NCCL when an engine takes them up."""
        self._fetcher, self._relay, self._broadcast = fetcher, relay, broadcast
        self._server: SnapshotServer | None = None
        self._lock: int | None = None
        self._receiver = make_receiver()
        self._merged: dict[Path, MergedFolder] = {}
        """By the folder that the adapters are in."""

    @property
    def fetched_bytes(self) -> int:
        """So far, from other hosts."""
        return 0 if self._fetcher is None else self._fetcher.bytes_received

    def locate(self, announced: str, *, again: bool = False) -> str:
        """The manifest that this host reads. `again`: what was fetched before is not what was published.

        Raises TransferFailed, a FileNotFoundError, when it cannot be brought here.
        """
        address, host, path = parse(announced)
        if not address or (host == boot_id() and Path(path).parent.exists()):  # a container may have memory of its own
            return path
        if self._fetcher is None:
            raise TransferFailed(f"{announced} is on another host, and this one has no fetcher")
        name = Path(path).name
        if again:
            self._fetcher.discard(name)
        self._hand_on(self._fetcher, address)
        return str(self._fetcher.fetch(address, name, direct=again))

    def prepare(self, announced: str, *, again: bool = False) -> Snapshot | Broadcast:
        """As `locate`, and verifies the snapshot, so that taking it up afterwards costs no more than it must. Where adapters were
        published it is the whole model's, made on this host.

        Raises also as `read_manifest`, `Snapshot.attest` and `sync.adapter.whole` do.
        """
        if self._broadcast and self._fetcher is not None:
            address, _, path = parse(announced)
            manifest = self._fetcher.manifest(address, Path(path).name)
            assert manifest.adapter is None, "an engine cannot take up adapters by NCCL"
            return Broadcast(manifest, address, self._receiver, self._fetcher.secure)
        snapshot = Snapshot(read_manifest(self.locate(announced, again=again)))
        snapshot.attest()
        if snapshot.manifest.adapter is None:
            return snapshot
        source = Path(snapshot.manifest.path).parent
        return self._merged.setdefault(source, MergedFolder(source)).take(snapshot, again=again)

    def settle(self) -> None:
        """When an engine has taken up what was prepared: makes ready for the next version."""
        if self._fetcher is not None:
            self._fetcher.settle()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._lock is not None:
            os.close(self._lock)
        if self._fetcher is not None:
            self._fetcher.close()
        for merged in self._merged.values():
            merged.close()

    def _hand_on(self, fetcher: Fetcher, address: str) -> None:
        """Sees that some process of this host serves what the host fetches; the publisher tells others of it."""
        if self._relay is None or self._server is not None:
            return
        place = fetcher.open_folder() / "relay"
        lock = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process does
            os.close(lock)
            fetcher.serve_at = place.read_text()
            return
        self._lock = lock
        self._server = self._relay(f"tcp://{_own_address(address)}:0")
        place.write_text(self._server.address)
        fetcher.serve_at = self._server.address


def announce(locator: str, address: str) -> str:
    """What the learner tells: where the manifest is on its host, and where others may fetch it."""
    return f"{address}#{boot_id()}#{locator}"


def parse(announced: str) -> tuple[str, str, str]:
    """(address, host, path) of what was announced; the first two are empty for a path that all hosts see."""
    where, _, path = announced.rpartition("#")
    address, _, host = where.partition("#")
    return address, host, path


def _own_address(peer: str) -> str:
    """This host's address on the way to a peer. Nothing is sent."""
    host, _, port = peer.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])
