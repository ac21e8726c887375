"""Locks between processes of a host. Nobody waits for them in silence, or for ever.

A lock's file says which process holds the lock and for what. A waiting process gives up after a while when
the holder makes no progress. The kernel drops the locks of the dead; but a process that has been stopped
(SIGSTOP, a debugger, a frozen container) lives, and holds on.
"""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger("slipstream.weights")

PATIENCE_S = 30.0
"""Seconds without progress after which a holder is not waited for any more."""
LOOK_S = 0.02
"""Seconds between two tries."""
SAY_S = 10.0
"""Seconds after which a waiting process logs that it waits."""


class LockTimedOut(FileNotFoundError):
    """Another process, which the message names, holds the lock and makes no progress. What the lock protects
    cannot be had now."""


class HeldLock:
    """A lock that this process holds, and the text in its file."""

    def __init__(self, file: int) -> None:
        self._file = file

    def is_own(self) -> bool:
        """True when this user has made the file."""
        return os.fstat(self._file).st_uid == os.geteuid()

    def read_text(self) -> str:
        return os.pread(self._file, 4096, 0).decode(errors="replace")

    def write_text(self, text: str) -> None:
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, text.encode(), 0)

    def write_claim(self, doing: str) -> None:
        """Writes into the file which process holds the lock, and for what. Where the disk is full, nothing is
        written."""
        with contextlib.suppress(OSError):
            self.write_text(f"process {os.getpid()}, which {doing}\n")

    def note_progress(self) -> None:
        """Tells waiting processes that something has been done: they wait for another `PATIENCE_S`."""
        os.utime(self._file)


@contextlib.contextmanager
def hold_lock(path: Path, doing: str | None = None, patience_s: float | None = None) -> Iterator[HeldLock]:
    """Holds the lock file at `path`, which is made where it is missing and is left there.

    `doing` ("fetches version 3") is written into it; None: its text stays. Raises LockTimedOut, naming the
    holder, when the holder has made no progress for `patience_s` (default: `PATIENCE_S`).
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        acquire_lock(file, path, fcntl.LOCK_EX, patience_s)
        lock = HeldLock(file)
        if doing is not None:
            lock.write_claim(doing)
        yield lock
    finally:
        os.close(file)


def acquire_lock(file: int, path: Path, kind: int, patience_s: float | None = None) -> None:
    """Locks a file as `flock` does, with a deadline that the holder's progress puts off. Raises LockTimedOut,
    naming the holder."""
    patience_s = PATIENCE_S if patience_s is None else patience_s
    began = said = seen_at = time.monotonic()
    seen = os.fstat(file).st_mtime_ns
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        now, changed = time.monotonic(), os.fstat(file).st_mtime_ns
        if changed != seen:
            seen, seen_at = changed, now
        if now - seen_at > patience_s:
            raise LockTimedOut(
                f"{path} is locked by {_describe_holder(file)}, "
                f"which has made no progress for {now - seen_at:.1f} s"
            )
        if now - said > SAY_S:
            said = now
            log.info(
                "has waited %.0f s for %s: it is locked by %s", now - began, path, _describe_holder(file)
            )
        time.sleep(LOOK_S)


def _describe_holder(file: int) -> str:
    holder = os.pread(file, 200, 0).decode(errors="replace").partition("\n")[0]
    return holder or "a process that has not said its name"
