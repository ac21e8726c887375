"""Folders of snapshots in shared memory, and how none of them outlives those who use it, however they end.

A folder's `owner` file is locked by every process that uses it: a publisher alone, or the fetchers of one host together. The
kernel drops the locks of the dead. Unlike a process id a lock is never used again, and it holds across containers.
"""

import fcntl
import os
import shutil
from pathlib import Path

PREFIX = "slipstream-"
OWNER = "owner"


def shared_memory_folder(run: str) -> Path:
    """Where a run's snapshots lie when all its roles share one host."""
    return Path("/dev/shm") / f"{PREFIX}{run}"


def sweep(parent: Path) -> list[Path]:
    """Removes the folders whose users no longer live; returns them."""
    swept = []
    for owner in parent.glob(f"{PREFIX}*/{OWNER}"):
        folder = owner.parent
        if folder.is_symlink() or owner.is_symlink() or folder.stat().st_uid != os.geteuid():
            continue
        try:
            lock = os.open(owner, os.O_RDWR)
        except FileNotFoundError:  # another publisher is sweeping too
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            swept.append(folder)
        except BlockingIOError:
            pass  # its publisher lives
        finally:
            os.close(lock)
    return swept


_used: dict[int, Path] = {}
"""The folders that this process uses, by the descriptors of their locks."""


def use(folder: Path, lock: int) -> int:
    """Notes that this process uses the folder as long as it holds the lock, which is returned."""
    _used[lock] = folder
    return lock


def let_go(lock: int) -> None:
    """The folder stays, and belongs to nobody."""
    _used.pop(lock, None)
    os.close(lock)


def abandon() -> None:
    """For a process that is about to end without ceremony: gives up all folders in shared memory that it uses."""
    for lock, folder in list(_used.items()):
        if folder.is_relative_to("/dev/shm"):
            leave(folder, lock)


def share(folder: Path) -> int:
    """Makes the folder where it is missing; it stays as long as one of the descriptors returned, here or elsewhere, is open."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # swept in between
            continue
        fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            if os.stat(folder / OWNER).st_ino == os.fstat(lock).st_ino:
                return use(folder, lock)
        except FileNotFoundError:
            pass
        os.close(lock)


def leave(folder: Path, lock: int) -> None:
    """Gives up the folder; the last one removes it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass  # others use it
    finally:
        let_go(lock)
