"""Records of trained steps for those who watch a run.

They count from the start or the resumption of the run. The journal has them too, so a buffer that is started
again in between knows them, and a watcher misses none.
"""

import math

from buffers import events as e
from buffers.run_status import StepRecord
from buffers.state import StepRecordsState

MAX_RECORDS = 10_000
"""Records kept in memory."""
MAX_STORED = 500
"""Records kept in a state. A watcher asks for the next ones several times a second."""


class StepRecords:
    """The newest records, and when the first version was published."""

    def __init__(self) -> None:
        self.count = 0
        """Number of records, those that were dropped included."""
        self.began_at: float | None = None
        """Unix time in seconds at which the first version was published; None before that."""
        self._newest: list[StepRecord] = []

    @property
    def last(self) -> StepRecord | None:
        return self._newest[-1] if self._newest else None

    def note_published(self, at: float) -> None:
        """Notes that a version was published, at this Unix time in seconds."""
        self.began_at = at if self.began_at is None else self.began_at

    def add_record(self, record: StepRecord) -> None:
        self.count += 1
        self._newest.append(record)
        del self._newest[:-MAX_RECORDS]

    def list_after(self, number: int, most: int) -> list[StepRecord]:
        """Returns the records after the first `number` of them, `most` of these at most."""
        first = max(0, number - (self.count - len(self._newest)))
        return self._newest[first : first + most]

    def export_state(self) -> StepRecordsState:
        return StepRecordsState(self.count, self.began_at, self._newest[-MAX_STORED:])

    def restore_state(self, state: StepRecordsState) -> None:
        self.count, self.began_at, self._newest = state.count, state.began_at, list(state.newest)


def make_report(record: StepRecord) -> e.Reported:
    """Returns the event that tells a record. JSON has no numbers that are not finite: they become text."""
    metrics = {name: one if math.isfinite(one) else str(one) for name, one in record.metrics.items()}
    return e.Reported(record.step, record.time, metrics, record.samples)


def read_report(event: e.Reported) -> StepRecord:
    metrics = {name: float(one) for name, one in event.metrics.items()}
    return StepRecord(step=event.step, time=event.seconds, metrics=metrics, samples=event.samples)
