"""One process of each host hands on to other hosts what its host fetches. The publisher tells hosts which
relay to ask."""

import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path

from sync.announcement import TransferFailed
from sync.transports.fetcher import Fetcher
from sync.transports.server import SnapshotServer

OpenServer = Callable[[Path, str], SnapshotServer]
"""Given a folder and an address, opens a server of the folder's files there."""


class HostRelay:
    """Sees to it that some process of this host serves the fetcher's folder: this one, if it is the first to
    lock it."""

    def __init__(self, fetcher: Fetcher, open_server: OpenServer, ports: range | None = None) -> None:
        """`ports`: those at which it may serve; None: any."""
        self._fetcher, self._open_server = fetcher, open_server
        self._ports = ports
        self.server: SnapshotServer | None = None
        """The server in this process, if it is the one that serves."""
        self.served: Path | None = None
        """Folder that the host serves."""
        self._lock: int | None = None

    def serve_fetched(self, publisher: str) -> None:
        """Starts to serve what comes from the publisher at this address, unless some process of this host
        does so already.

        Raises RuntimeError, with the traceback, when the thread that serves in this process has died,
        ValueError where no port is free, and TransferFailed when there is no way to the publisher now.
        """
        folder = self._fetcher.open_folder()
        if self.server is not None:
            self.server.check_alive()
            if self.served == folder:
                return
            # The fetcher has moved to another folder, because a process was stuck with the lock of the first.
            self._stop_serving()
        own_address = find_own_address(publisher)
        record, self.served = folder / "relay", folder
        lock = os.open(record, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Another process of this host serves, and has written its address into the file.
            os.close(lock)
            self._fetcher.serve_at = record.read_text()
            return
        self._lock = lock
        self.server = open_at_free_port(self._open_server, folder, own_address, self._ports)
        record.write_text(self.server.address)
        self._fetcher.serve_at = self.server.address

    def close(self) -> None:
        self._stop_serving()

    def _stop_serving(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def open_at_free_port(
    open_server: OpenServer, folder: Path, host: str, ports: range | None = None
) -> SnapshotServer:
    """Opens a server at an address of this host. `ports`: those that it may have; None: any.

    Raises ValueError where none is free.
    """
    # From the last one down: the run itself takes its own from the first one up.
    tried = [0] if ports is None else list(reversed(ports))
    for port in tried:
        try:
            return open_server(folder, f"tcp://{host}:{port}")
        except ValueError as error:
            taken = error
    raise ValueError(
        f"cluster.ports must have a free port to serve weights at on {socket.gethostname()}, got "
        f"{tried[-1]}-{tried[0]}"
    ) from taken


def find_own_address(peer: str) -> str:
    """Returns this host's address on the way to a peer. A connected UDP socket knows it; nothing is sent.

    Raises TransferFailed when there is no way: a link is down, or the peer's name is not known.
    """
    host, _, port = peer.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port) or 1))
        except OSError as error:
            raise TransferFailed(f"there is no way to {peer}: {error.strerror}") from error
        return str(probe.getsockname()[0])
