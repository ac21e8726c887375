"""Slots that the processes of one generator share: a bound on what they do at the same time.

A task makes them once, and its worker processes are forked from there. The kernel locks one byte of a file in
memory for each slot that is taken, and frees it when its process ends, however it ends.
"""

import asyncio
import errno
import fcntl
import os
import random
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

LOOK_EVERY_S = 0.05


class SharedSlots:
    """At most `num_slots` holders among this process and all that are forked from it."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._file = os.memfd_create("slots")
        self._identity = self._read_identity()
        self._taken: set[int] = set()
        """Slots of this process: the kernel's locks keep only other processes out."""
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._forget_slots)

    @asynccontextmanager
    async def hold_slot(self, timeout_s: float) -> AsyncIterator[int]:
        """Waits until a slot is free, and holds it. Raises TimeoutError where none is free in time."""
        deadline = time.monotonic() + timeout_s
        while (slot := self._try_slots()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"one of the {self.num_slots} slots (max_concurrent) must get free within "
                    f"{timeout_s:g} s (timeout_s), got none"
                )
            await asyncio.sleep(LOOK_EVERY_S * random.uniform(0.5, 1.5))
        try:
            yield slot
        finally:
            with self._lock:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, slot)
                self._taken.discard(slot)

    def _try_slots(self) -> int | None:
        """Takes a free slot and returns it; None where there is none."""
        if self._read_identity() != self._identity:
            raise RuntimeError("the file of the slots must stay open in every process, got it closed")
        with self._lock:
            for slot in range(self.num_slots):
                if slot in self._taken:
                    continue
                try:
                    fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
                except OSError as error:
                    if error.errno not in (errno.EACCES, errno.EAGAIN):
                        raise
                    continue
                self._taken.add(slot)
                return slot
        return None

    def _read_identity(self) -> tuple[int, int]:
        status = os.fstat(self._file)
        return status.st_dev, status.st_ino

    def _forget_slots(self) -> None:
        # A child has none of its parent's locks.
        self._taken, self._lock = set(), threading.Lock()
