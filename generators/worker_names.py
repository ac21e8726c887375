"""The names of what the processes of one engine share: sockets and a rendezvous in a folder of its own, and
shared memory whose names begin with the rendezvous's.

Processes need the names only until all of them have connected. Then the names go, and nothing is left behind
however the processes end. The next engine sweeps away what a start that was killed has left.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "slipstream-engine-"
RENDEZVOUS = "vllm_dist_*"
"""vLLM's names of the rendezvous file."""


class WorkerNames:
    """The folder of one engine. It counts as left behind as soon as this process has ended."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        for left in parent.glob(f"{PREFIX}*"):
            if (lock := _lock_folder(left)) is not None:
                _remove_names(left)
                os.close(lock)
        self._lock: int | None = None
        while self._lock is None:  # another engine may sweep the folder away before it is locked
            self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self._lock = _lock_folder(self.folder)

    def remove(self) -> None:
        if self._lock is not None:
            _remove_names(self.folder)
            os.close(self._lock)
            self._lock = None


def _lock_folder(folder: Path) -> int | None:
    """Returns the descriptor of the lock of a folder that nobody has locked and that is still there; else
    None."""
    with contextlib.suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(folder).st_ino == os.fstat(lock).st_ino:
                return lock
        os.close(lock)
    return None


def _remove_names(folder: Path) -> None:
    for rendezvous in folder.glob(RENDEZVOUS):
        for shared in SHARED_MEMORY.glob(f"{rendezvous.name}-*"):
            with contextlib.suppress(OSError):
                shared.unlink()
    shutil.rmtree(folder, ignore_errors=True)
