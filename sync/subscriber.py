"""A generator's side of the weights: finds what is announced, and has it verified before an engine takes it up.

Fetching and verification are the slow part, and need no engine: `prepare` does both beforehand, in a thread, once per version
for all processes of a host.
"""

import fcntl
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from configs.host import boot_id
from sync.folders import check_private, in_shared_memory, is_private
from sync.manifest import Manifest
from sync.merged import MergedFolder
from sync.snapshot import Snapshot, read_manifest
from sync.transports.fetcher import Fetcher
from sync.transports.nccl import NcclBroadcast, make_receiver
from sync.transports.puller import TransferFailed
from sync.transports.server import SnapshotServer
from sync.transports.tcp import SNAPSHOT

DIGEST = re.compile(r"[0-9a-f]{32}")
MANIFEST = re.compile(rf"{SNAPSHOT}\.json")


class Subscriber:
    """Finds what is announced: in the publisher's own folder where that is at hand, else fetched to a folder of this host.

    Not thread-safe.
    """

    def __init__(
        self,
        fetcher: Fetcher | None = None,
        *,
        relay: Callable[[Path, str], SnapshotServer] | None = None,
        broadcast: bool = False,
    ) -> None:
        """`relay`, given a folder and an address, serves it there to other hosts; one process of a host does so. `broadcast`:
        weights are not brought here beforehand, but come by NCCL when an engine takes them up."""
        self._fetcher, self._relay, self._broadcast = fetcher, relay, broadcast
        self._server: SnapshotServer | None = None
        self._served: Path | None = None
        self._lock: int | None = None
        self._receiver = make_receiver()
        self._merged: dict[Path, MergedFolder] = {}
        """By the folder that the adapters are in."""

    @property
    def fetched_bytes(self) -> int:
        """So far, from other hosts."""
        return 0 if self._fetcher is None else self._fetcher.bytes_received

    def locate_manifest(self, announced: str, *, again: bool = False) -> str:
        """The manifest that this host reads. `again`: what was fetched before is not what was published.

        Raises TransferFailed, a FileNotFoundError, when it cannot be brought here; ValueError when the learner's folder in shared
        memory is not private (`sync.folders`).
        """
        address, host, digest, path = parse_announcement(announced)
        folder = Path(path).parent
        if not address:
            if in_shared_memory(folder):
                check_private(folder)
            return path
        if host == boot_id() and folder.exists() and (is_private(folder) or not in_shared_memory(folder)):
            return path  # and elsewhere a container with memory of its own fetches
        if self._fetcher is None:
            raise TransferFailed(f"{announced} is on another host, and this one has no fetcher")
        self._serve_fetched(self._fetcher, address)
        return str(self._fetcher.fetch_version(address, Path(path).name, digest=digest, direct=again))

    def prepare_version(self, announced: str, *, again: bool = False) -> Snapshot | NcclBroadcast:
        """As `locate`, and verifies the snapshot, so that taking it up afterwards costs no more than it must. Where adapters were
        published it is the whole model's, made on this host.

        Raises also as `read_manifest`, `Snapshot.attest` and `sync.adapter.merge_adapters` do.
        """
        if self._broadcast and self._fetcher is not None:
            address, _, digest, path = parse_announcement(announced)
            manifest = self._fetcher.fetch_manifest(address, Path(path).name, digest)
            assert manifest.adapter is None, "an engine cannot take up adapters by NCCL"
            return NcclBroadcast(manifest, address, self._receiver, self._fetcher.secure)
        snapshot = Snapshot(
            read_manifest(self.locate_manifest(announced, again=again), parse_announcement(announced).digest)
        )
        snapshot.attest()
        if snapshot.manifest.adapter is None:
            return snapshot
        source = Path(snapshot.manifest.path).parent
        return self._merged.setdefault(source, MergedFolder(source)).merge_version(snapshot, again=again)

    def refresh_spare(self) -> None:
        """When an engine has taken up what was prepared: makes ready for the next version."""
        if self._fetcher is not None:
            self._fetcher.refresh_spare()

    def close(self) -> None:
        self._stop_relay()
        if self._fetcher is not None:
            self._fetcher.close()
        for merged in self._merged.values():
            merged.close()

    def _serve_fetched(self, fetcher: Fetcher, address: str) -> None:
        """Sees that some process of this host serves what the host fetches; the publisher tells others of it. Raises RuntimeError,
        with the traceback, when the thread that does so here has died."""
        if self._relay is None:
            return
        folder = fetcher.open_folder()
        if self._server is not None:
            self._server.check_alive()
            if self._served == folder:
                return
            self._stop_relay()
        place, self._served = folder / "relay", folder
        lock = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process does
            os.close(lock)
            fetcher.serve_at = place.read_text()
            return
        self._lock = lock
        self._server = self._relay(folder, f"tcp://{_own_address(address)}:0")
        place.write_text(self._server.address)
        fetcher.serve_at = self._server.address

    def _stop_relay(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class Announcement(NamedTuple):
    address: str
    """Where hosts that do not see the path may fetch the version; empty: all see it."""
    host: str
    """Boot id of the learner's host."""
    digest: str
    """The manifest's. Whichever way the version comes, it has this digest or does not serve."""
    path: str
    """Of the manifest, on the learner's host."""


def announce_version(manifest: Manifest, address: str = "") -> str:
    """What the learner tells: see `Announcement`."""
    return "#".join(Announcement(address, boot_id(), manifest.digest, manifest.locator))


def parse_announcement(announced: str) -> Announcement:
    """Raises TransferFailed when it is none, as in a journal that was written by an older program."""
    fields = announced.split("#", 3)
    if len(fields) != 4 or not DIGEST.fullmatch(fields[2]) or not MANIFEST.fullmatch(Path(fields[3]).name):
        raise TransferFailed(
            f"weights must be announced as ADDRESS#HOST#DIGEST#MANIFEST, got {announced[:200]!r}"
        )
    return Announcement(*fields)


def _own_address(peer: str) -> str:
    """This host's address on the way to a peer. Nothing is sent."""
    host, _, port = peer.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])
