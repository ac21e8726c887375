"""Takes up a run at a checkpoint's step from what the journal holds."""

import logging
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa

from buffers.journal import Rejected, Trained, read_events, read_groups
from buffers.leases import LeaseBook
from buffers.ledger import Ledger
from buffers.staleness import count
from buffers.trajectory import flat
from configs.schema import OnLate

log = logging.getLogger("slipstream.buffer")


def recover(
    folder: Path, step: int, book: LeaseBook, ledger: Ledger, bound: int, on_late: OnLate
) -> tuple[dict[int, pa.RecordBatch], Counter[int]]:
    """Restores `book` and `ledger` as they were when `step` steps had been consumed, with all that was complete by the end.

    Returns the complete groups that wait to be trained, by group, and the trained tokens by staleness.
    """
    consumed: dict[int, list[int]] = {}
    rejected: dict[int, str] = {}
    for event in read_events(folder):
        match event:
            case Trained():
                consumed[event.step] = event.groups
            case Rejected():
                rejected[event.group] = event.reason
    step_of = {group: k for k, groups in consumed.items() for group in groups}
    complete, waiting = [], {}
    staleness: Counter[int] = Counter()
    for batch in read_groups(folder):
        group, due = batch.column("group")[0].as_py(), batch.column("due")[0].as_py()
        num_tokens = int(np.count_nonzero(flat(batch, "sampled")))
        if group in rejected:
            ledger.lease()
            ledger.generate(num_tokens, "in_flight")
            ledger.settle("in_flight", rejected[group], num_tokens)
            continue
        complete.append((group, due, num_tokens))
        if group in step_of and step_of[group] < step:
            trained, excluded, by_staleness = count(batch, step_of[group], bound)
            staleness.update(by_staleness)
            ledger.lease()
            ledger.generate(trained + excluded, "in_flight")
            ledger.train(trained, excluded, "masked" if on_late is OnLate.mask else "late")
        else:
            waiting[group] = batch
    book.restore(step, complete, consumed, rejected)
    log.info("resumed at step %d with %d complete groups at hand", step, len(waiting))
    return waiting, staleness
