"""The connections over which learners speak, and which of them belong to a life before the last rewind."""

from collections.abc import Iterable

from buffers import messages as m

LearnerRequest = (
    m.PublishVersion
    | m.ReportTrainedStep
    | m.ReportCheckpoint
    | m.LocateJournal
    | m.RequestBatch
    | m.RequestParityProbe
    | m.ReportDamagedGroups
    | m.AwaitEvaluations
)
"""Requests that only a rank of the learner makes, and that count no more once another life of the learner has
begun."""


class LearnerConnections:
    """Knows each connection by its sender, which ZeroMQ names anew for every connection."""

    def __init__(self) -> None:
        self._current: set[bytes] = set()
        self._outdated: set[bytes] = set()

    def is_outdated(self, sender: bytes) -> bool:
        """True for a sender of a life before the last rewind: a message of it has come late."""
        return sender in self._outdated

    def add_sender(self, sender: bytes) -> None:
        self._current.add(sender)

    def begin_life(self, first: bytes) -> None:
        """Another life of the learner has begun with a rewind that `first` has asked for."""
        self._outdated |= self._current - {first}
        self._current &= {first}

    def forget_senders(self, gone: Iterable[bytes]) -> None:
        """Forgets senders whose connections have ended, and of whom nothing more can come."""
        self._current.difference_update(gone)
        self._outdated.difference_update(gone)
