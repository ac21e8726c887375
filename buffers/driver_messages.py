"""The messages by which drivers, or whoever watches, follow a run and end it."""

from typing import Annotated

from msgspec import Meta

from buffers.message_fields import (
    MAX_INT63,
    BoundedText,
    GeneratorCount,
    RoleName,
    Seconds,
    WireRecord,
)
from buffers.run_status import EvaluationRecord, RunStatus, Scaling, StepRecord

RUN_OVER = "the run is over"
"""Why a run is stopped that has trained all its steps."""


class WatchRun(WireRecord):
    """-> RunNews as soon as there are step records after `after`, else after `wait_s`. Any role may
    watch."""

    after: Annotated[int, Meta(ge=0, le=MAX_INT63)]
    """Number of records that the sender has already; 2^63 - 1 asks for the status alone."""
    wait_s: Seconds
    after_evaluation: Annotated[int, Meta(ge=0, le=MAX_INT63)] = 0
    """Number of the newest evaluation record that the sender has already."""


class RunNews(WireRecord):
    """Carries the step records that a watcher lacks (the first few hundred of them) and the state of the
    run."""

    records: list[StepRecord]
    evaluations: list[EvaluationRecord]
    """Evaluations after the one that the watcher has named, of all lives of the run."""
    status: RunStatus


class WatchGenerators(WireRecord):
    """-> GeneratorNews as soon as the run is told to end, else after `wait_s`. A command asks for its own
    generators. There may be a thousand such commands, so the answer has no more than they need."""

    generators: Annotated[list[RoleName], Meta(max_length=1000)]
    wait_s: Seconds


class GeneratorNews(WireRecord):
    """Says how far some generators and the run are."""

    num_trained_steps: int
    end: str | None
    """Why the run was told to end: `RUN_OVER`, or what stopped it before its last step. None while it goes
    on."""
    versions: dict[str, int]
    """Version that each of them holds, -1 before the first; without those that have not been heard of."""
    activities: dict[str, str]
    """Activity of each of them; without those that have left."""


class ScaleGenerators(WireRecord):
    """-> Acknowledged. An operator wants another number of generators for training, of those that the run's
    driver starts. `RunStatus.scaling` says how far the driver is. Idempotent by `order`."""

    order: RoleName
    """Name of the change, as in `Scaling`."""
    count: GeneratorCount
    run: BoundedText = ""
    """Random name of the run that is meant (`announcements.RUN_FILE`). Empty: whichever answers."""


class ReportScaling(WireRecord):
    """-> Acknowledged. The driver says how far it is with a change. A buffer that was started again learns of
    the change by it."""

    scaling: Scaling


class StopRun(WireRecord):
    """-> Acknowledged. The driver ends the run: from now on the buffer answers requests for leases with
    `ended` and requests for batches with `RunStopped`."""

    reason: BoundedText
