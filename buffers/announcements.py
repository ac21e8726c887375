"""Announcements of the newest version to generators, as part of two kinds of answers."""

from buffers import messages as m
from buffers.buffer import Buffer


class Announcer:
    """Numbers the announcements, so that a generator knows which of two answers is the newer one.

    A version alone does not tell: after a rewind the newest version is lower than before.
    """

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        # A later life of the buffer counts on from a higher number, because it begins later.
        self._number = int(1e9 * buffer.journal.began_at)

    def count_change(self) -> None:
        """Notes that a version was published or that the run was rewound."""
        self._number += 1

    def make_lease_grant(self, leases: list[m.Lease]) -> m.LeaseGrant:
        return m.LeaseGrant(
            leases=leases,
            version=self._buffer.progress.version,
            manifest_locator=self._buffer.progress.manifest_locator,
            announcement_number=self._number,
            ended=self._buffer.stopping is not None,
        )

    def make_standing(self, revoked: list[int]) -> m.GeneratorStanding:
        return m.GeneratorStanding(
            revoked=revoked,
            version=self._buffer.progress.version,
            manifest_locator=self._buffer.progress.manifest_locator,
            announcement_number=self._number,
            ended=self._buffer.stopping is not None,
        )
