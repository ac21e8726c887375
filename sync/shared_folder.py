"""A folder that the processes of a host fill together, one at a time."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from sync.folders import leave_folder, lock_shared_folder, sweep_folders
from sync.locks import HeldLock, LockTimedOut, hold_lock

log = logging.getLogger("slipstream.weights")

MAX_MOVES = 3
"""Number of folders that are tried where the processes that hold their locks are stuck."""


class SharedFolder:
    """A folder that processes of a host fill together, one at a time. It exists as long as one of them uses
    it.

    A process that holds the folder's lock and is stuck (stopped by a signal, say) does not stop the others:
    they go on in a folder beside it, of the same name with a number. The stuck one may write into its own
    again whenever it likes.
    """

    def __init__(self, folder: Path) -> None:
        self._base = self.path = folder
        self._lock: int | None = None
        self._held: HeldLock | None = None

    @property
    def is_open(self) -> bool:
        return self._lock is not None

    def open_folder(self) -> Path:
        """Makes the folder where it is missing, and returns its path. Raises as `lock_shared_folder`."""
        if self._lock is None:
            sweep_folders(self.path.parent)
            self._lock = lock_shared_folder(self.path)
        return self.path

    @contextlib.contextmanager
    def hold_alone(self, doing: str) -> Iterator[Path]:
        """Yields the folder while the other processes of this host wait; `doing` tells them for what.

        Raises LockTimedOut when too many processes are stuck.
        """
        with contextlib.ExitStack() as stack:
            for move in range(1, MAX_MOVES + 1):
                try:
                    self._held = stack.enter_context(hold_lock(self.open_folder() / "lock", doing))
                    break
                except LockTimedOut as error:
                    if move == MAX_MOVES:
                        raise
                    self.close()
                    self.path = self._base.with_name(f"{self._base.name}-{move + 1}")
                    log.error("%s; this process goes on in %s", error, self.path)
            try:
                yield self.path
            finally:
                self._held = None

    def note_progress(self) -> None:
        """Tells the processes that wait that something has been done under the lock: they wait on."""
        if self._held is not None:
            self._held.note_progress()

    def close(self) -> None:
        if self._lock is not None:
            leave_folder(self.path, self._lock)
            self._lock = None
