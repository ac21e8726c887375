"""Folders of snapshots in shared memory, and how none of them outlives those who use it, however they end.

A folder's `owner` file is locked by every process that uses it: a publisher alone, or the fetchers of one host together. The
kernel drops the locks of the dead. Unlike a process id a lock is never used again, and it holds across containers.

Anybody may write in /dev/shm. A folder there is made with mode 0700, and one that is another user's, that others may write to, or that
is a link, is refused.
"""

import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from sync.locks import HeldLock, LockTimedOut, acquire_lock, hold_lock

log = logging.getLogger("slipstream.weights")

SHARED_MEMORY = Path("/dev/shm")
FOLDER_PREFIX = "slipstream-"
OWNER = "owner"
OWN_FILE = re.compile(r"owner(\.\d+)?|lock|relay|gpu-[\w-]+|v\d+-[\w-]+\.[\w-]+")
"""Names of the files that lie in such folders."""
ORPHANED_S = 600.0
"""A folder without an owner in which nothing has changed for so long was left behind."""
MAX_MOVES = 3
"""Folders that are tried where the processes which hold their locks are stuck."""


def shared_memory_folder(run: str) -> Path:
    """Where a run's snapshots lie when all its roles share one host."""
    return SHARED_MEMORY / f"{FOLDER_PREFIX}{run}"


def in_shared_memory(folder: Path) -> bool:
    return folder.is_relative_to(SHARED_MEMORY)


def make_private(folder: Path) -> None:
    """Makes the folder where it is missing. Raises ValueError as `check_private`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder)


def check_private(folder: Path) -> None:
    """Raises ValueError unless the folder is this user's, and only this user may write to it."""
    found = folder.lstat()
    kind = (
        "a link"
        if stat.S_ISLNK(found.st_mode)
        else "a folder"
        if stat.S_ISDIR(found.st_mode)
        else "no folder"
    )
    if kind != "a folder" or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ValueError(
            f"{folder} must be a folder that belongs to user {os.geteuid()} and that nobody else may write to, got {kind} "
            f"of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}: remove it, or choose another run.name"
        )


def is_private(folder: Path) -> bool:
    try:
        check_private(folder)
    except (OSError, ValueError):
        return False
    return True


def sweep_folders(parent: Path) -> list[Path]:
    """Removes the folders whose users no longer live; returns them."""
    swept = []
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # another publisher is sweeping too
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            owned = (folder / OWNER).exists() or (folder / OWNER).is_symlink()
            if _remove_unlocked(folder, [folder / OWNER]) if owned else _remove_orphan(folder):
                swept.append(folder)
    return swept


def _remove_orphan(folder: Path) -> bool:
    """Of a publisher that was killed before it had its owner file, or while it removed the folder."""
    files = list(folder.iterdir())
    newest = max(path.lstat().st_mtime for path in (folder, *files))
    ours = in_shared_memory(folder) and all(OWN_FILE.fullmatch(path.name) for path in files)
    return ours and time.time() - newest > ORPHANED_S and _remove_unlocked(folder, files)


def _remove_unlocked(folder: Path, files: list[Path]) -> bool:
    """Removes the folder unless one of the files is locked, or is a link."""
    with contextlib.ExitStack() as stack:
        for path in files:
            try:
                lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:  # BlockingIOError: its user lives
                if isinstance(error, FileNotFoundError):
                    raise
                return False
        shutil.rmtree(folder, ignore_errors=True)
    return True


_used: dict[int, Path] = {}
"""The folders that this process uses, by the descriptors of their locks."""


def note_used_folder(folder: Path, lock: int) -> int:
    """Notes that this process uses the folder as long as it holds the lock, which is returned."""
    _used[lock] = folder
    return lock


def release_folder(lock: int) -> None:
    """The folder stays, and belongs to nobody."""
    if _used.pop(lock, None) is not None:  # not a second time: the number may be another file's by then
        os.close(lock)


def leave_all_folders() -> None:
    """For a process that is about to end without ceremony: gives up all folders in shared memory that it uses."""
    for lock, folder in list(_used.items()):
        if in_shared_memory(folder):
            leave_folder(folder, lock)


def lock_shared_folder(folder: Path) -> int:
    """Makes the folder where it is missing; it stays as long as one of the descriptors returned, here or elsewhere, is open.

    Raises ValueError as `check_private`, LockTimedOut when a process that removes the folder is stuck.
    """
    while True:
        make_private(folder)
        try:
            lock = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # swept in between
            continue
        try:
            acquire_lock(lock, folder / OWNER, fcntl.LOCK_SH)
            if os.stat(folder / OWNER).st_ino == os.fstat(lock).st_ino:
                return note_used_folder(folder, lock)
        except LockTimedOut:
            os.close(lock)
            raise
        except FileNotFoundError:
            pass
        os.close(lock)


def leave_folder(folder: Path, lock: int) -> None:
    """Gives up the folder; the last one removes it."""
    if lock not in _used:  # `abandon` has done so
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass  # others use it
    finally:
        release_folder(lock)


class SharedFolder:
    """A folder that processes of a host fill together, one at a time. It is there as long as one of them uses it.

    A process that holds the folder's lock and is stuck (stopped by a signal, say) does not stop the others: they go on in a folder
    beside it, of the same name with a number. The stuck one may write into its own again whenever it likes.
    """

    def __init__(self, folder: Path) -> None:
        self._base = self.path = folder
        self._lock: int | None = None
        self._held: HeldLock | None = None

    @property
    def is_open(self) -> bool:
        return self._lock is not None

    def open_folder(self) -> Path:
        """Makes it, where it is missing. Raises as `share`."""
        if self._lock is None:
            sweep_folders(self.path.parent)
            self._lock = lock_shared_folder(self.path)
        return self.path

    @contextlib.contextmanager
    def hold_alone(self, doing: str) -> Iterator[Path]:
        """Other processes of this host wait; `doing` tells them for what. Yields the folder. Raises LockTimedOut when too many
        processes are stuck."""
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
        """Something has been done under the lock: the others wait on."""
        if self._held is not None:
            self._held.note_progress()

    def close(self) -> None:
        if self._lock is not None:
            leave_folder(self.path, self._lock)
            self._lock = None
