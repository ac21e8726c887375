"""A generator's side of the weights: finds what is announced, and has it verified before an engine takes it up.

Fetching and verification are the slow part, and need no engine: `prepare` does both beforehand, in a thread, once per version
for all processes of a host.
"""

from pathlib import Path

from sync.snapshot import Snapshot, boot_id, read_manifest
from sync.transports.tcp import Fetcher, SnapshotServer, TransferFailed


class Subscriber:
    """Finds what is announced: in the publisher's own folder where that is at hand, else fetched to a folder of this host."""

    def __init__(self, fetcher: Fetcher | None = None, server: SnapshotServer | None = None) -> None:
        """`server` serves the fetcher's folder to other hosts."""
        self._fetcher, self._server = fetcher, server

    @property
    def fetched_bytes(self) -> int:
        """So far, from other hosts."""
        return 0 if self._fetcher is None else self._fetcher.bytes_received

    def locate(self, announced: str, *, again: bool = False) -> str:
        """The manifest that this host reads. `again`: what was fetched before is not what was published.

        Raises TransferFailed, a FileNotFoundError, when it cannot be brought here.
        """
        address, host, path = parse(announced)
        if not address or host == boot_id():
            return path
        if self._fetcher is None:
            raise TransferFailed(f"{announced} is on another host, and this one has no fetcher")
        name = Path(path).name
        if again:
            self._fetcher.discard(name)
        return str(self._fetcher.fetch(address, name, direct=again))

    def prepare(self, announced: str, *, again: bool = False) -> Snapshot:
        """As `locate`, and verifies the snapshot, so that taking it up afterwards costs no more than it must.

        Raises also as `read_manifest` and `Snapshot.attest` do.
        """
        snapshot = Snapshot(read_manifest(self.locate(announced, again=again)))
        snapshot.attest()
        return snapshot

    def settle(self) -> None:
        """When an engine has taken up what was prepared: makes ready for the next version."""
        if self._fetcher is not None:
            self._fetcher.settle()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._fetcher is not None:
            self._fetcher.close()


def announce(locator: str, address: str) -> str:
    """What the learner tells: where the manifest is on its host, and where others may fetch it."""
    return f"{address}#{boot_id()}#{locator}"


def parse(announced: str) -> tuple[str, str, str]:
    """(address, host, path) of what was announced; the first two are empty for a path that all hosts see."""
    where, _, path = announced.rpartition("#")
    address, _, host = where.partition("#")
    return address, host, path
