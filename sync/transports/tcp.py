"""Weights over ZeroMQ: the learner serves its folder of snapshots, and one process of each other host fills
such a folder there."""

from pathlib import Path

from configs.schema import Config
from sync.announcement import Announcement
from sync.snapshot import Snapshot, read_manifest
from sync.transports.ends import GeneratorEnd, LearnerEnd, SocketGuards
from sync.transports.fetcher import Fetcher
from sync.transports.relay import HostRelay, OpenServer
from sync.transports.server import SnapshotServer
from sync.transports.shared_memory import find_at_hand


class FetchingEnd:
    """Reads versions in the learner's folder where that is at hand, and fetches them to a folder of this host
    elsewhere."""

    def __init__(
        self, fetcher: Fetcher, open_server: OpenServer | None = None, ports: range | None = None
    ) -> None:
        """`open_server` opens a server of the fetched files, for other hosts, at one of the ports (None:
        any); one process of a host does so. None: none does."""
        self.fetcher = fetcher
        self.relay = None if open_server is None else HostRelay(fetcher, open_server, ports)

    @property
    def fetched_bytes(self) -> int:
        return self.fetcher.bytes_received

    def bring_version(self, announcement: Announcement, *, again: bool = False) -> Snapshot:
        """Raises also as `find_at_hand` and `Fetcher.fetch_version`."""
        return Snapshot(read_manifest(self.locate_manifest(announcement, again=again), announcement.digest))

    def locate_manifest(self, announcement: Announcement, *, again: bool = False) -> Path:
        """Returns the manifest's path on this host, after a fetch if need be. Raises as `bring_version`."""
        if (path := find_at_hand(announcement)) is not None:
            return path
        if self.relay is not None:
            self.relay.serve_fetched(announcement.address)
        name = Path(announcement.path).name
        return self.fetcher.fetch_version(
            announcement.address, name, digest=announcement.digest, direct=again
        )

    def refresh_spare(self) -> None:
        self.fetcher.refresh_spare()

    def close(self) -> None:
        if self.relay is not None:
            self.relay.close()
        self.fetcher.close()


def open_learner_ends(config: Config, folder: Path, guards: SocketGuards) -> list[LearnerEnd]:
    if config.weights_address is None:
        return []
    return [SnapshotServer(folder, config.weights_address, secure=guards.secure_server, watch=guards.watch)]


def open_generator_end(config: Config, folder: Path, guards: SocketGuards) -> GeneratorEnd:
    def open_server(served: Path, address: str) -> SnapshotServer:
        return SnapshotServer(served, address, secure=guards.secure_server, watch=guards.watch)

    relays = config.sync.relays and guards.may_serve
    fetcher = Fetcher(folder, secure=guards.secure_client)
    return FetchingEnd(fetcher, open_server if relays else None, config.cluster.port_range)
