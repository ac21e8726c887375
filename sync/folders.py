"""Folders of snapshots in shared memory. None of them outlives the processes that use it, however these end.

Every process that uses a folder locks its `owner` file: a publisher alone, or the fetchers of one host
together. The kernel drops the locks of the dead. Unlike a process id, a lock never passes to another process
by chance, and it holds across containers.

Anybody may write in /dev/shm. So a folder there is made with mode 0700, and one that belongs to another user,
that others may write to, or that is a link, is refused.
"""

import contextlib
import fcntl
import os
import re
import shutil
import stat
import time
from pathlib import Path

from sync.locks import LockTimedOut, acquire_lock

SHARED_MEMORY = Path("/dev/shm")
FOLDER_PREFIX = "slipstream-"
OWNER = "owner"
OWN_FILE = re.compile(r"owner(\.\d+)?|lock|relay|(gpu|turn)-[\w-]+|v\d+-[\w-]+\.[\w-]+")
"""Names of the files that lie in such folders."""
ORPHANED_S = 600.0
"""Seconds without a change after which a folder that has no owner file counts as left behind."""


def shared_memory_folder(run: str) -> Path:
    """Returns the folder in shared memory of this name; a learner's snapshots lie in such a folder, and
    fetched ones too."""
    return SHARED_MEMORY / f"{FOLDER_PREFIX}{run}"


def in_shared_memory(folder: Path) -> bool:
    return folder.is_relative_to(SHARED_MEMORY)


def make_private(folder: Path) -> None:
    """Makes the folder where it is missing. Raises ValueError where it is not private, as `check_private`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder)


def check_private(folder: Path) -> None:
    """Raises ValueError unless the folder is this user's, and only this user may write to it."""
    found = folder.lstat()
    is_link, is_folder = stat.S_ISLNK(found.st_mode), stat.S_ISDIR(found.st_mode)
    kind = "a link" if is_link else "a folder" if is_folder else "no folder"
    if not is_folder or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ValueError(
            f"{folder} must be a folder that belongs to user {os.geteuid()} and that nobody else may "
            f"write to, got {kind} of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}: "
            "remove it, or choose another run.name"
        )


def is_private(folder: Path) -> bool:
    try:
        check_private(folder)
    except (OSError, ValueError):
        return False
    return True


def sweep_folders(parent: Path) -> list[Path]:
    """Removes the folders beside each other in `parent` whose users no longer live; returns them."""
    swept = []
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        # Another publisher may sweep at the same time, so the folder may go at any moment.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            owned = (folder / OWNER).exists() or (folder / OWNER).is_symlink()
            if _remove_unlocked(folder, [folder / OWNER]) if owned else _remove_orphan(folder):
                swept.append(folder)
    return swept


def _remove_orphan(folder: Path) -> bool:
    """Removes the folder of a publisher that was killed before it had its owner file, or while it removed the
    folder.

    Returns false, and leaves the folder, where it may be in use or holds files that are not ours.
    """
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
            except FileNotFoundError:
                raise
            except OSError:
                # BlockingIOError: the user of the folder lives. Others: the file is a link.
                return False
        shutil.rmtree(folder, ignore_errors=True)
    return True


_used: dict[int, Path] = {}
"""Folders that this process uses, by the descriptors of their locks."""


def note_used_folder(folder: Path, lock: int) -> int:
    """Notes that this process uses the folder as long as it holds the lock (a descriptor), and returns the
    lock."""
    _used[lock] = folder
    return lock


def release_folder(lock: int) -> None:
    """Gives up the lock of a folder, which stays and belongs to nobody."""
    # The descriptor is closed only once: its number may be another file's by then.
    if _used.pop(lock, None) is not None:
        os.close(lock)


def leave_all_folders() -> None:
    """Gives up all folders in shared memory that this process uses, before it ends without unwinding."""
    for lock, folder in list(_used.items()):
        if in_shared_memory(folder):
            leave_folder(folder, lock)


def lock_shared_folder(folder: Path) -> int:
    """Makes the folder where it is missing, and locks it together with its other users. Returns the lock.

    The folder stays as long as one of these locks, in this process or another, is held. Raises ValueError as
    `check_private`, LockTimedOut when a process that removes the folder is stuck.
    """
    while True:
        make_private(folder)
        try:
            lock = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            # The folder was swept away in between.
            continue
        try:
            acquire_lock(lock, folder / OWNER, fcntl.LOCK_SH)
            # The lock counts only if the locked file still is the folder's: its last user may have removed it
            # meanwhile.
            if os.stat(folder / OWNER).st_ino == os.fstat(lock).st_ino:
                return note_used_folder(folder, lock)
        except LockTimedOut:
            os.close(lock)
            raise
        except FileNotFoundError:
            pass
        os.close(lock)


def leave_folder(folder: Path, lock: int) -> None:
    """Gives up a folder; its last user removes it."""
    if lock not in _used:
        # `leave_all_folders` has given it up.
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        # Others use the folder.
        pass
    finally:
        release_folder(lock)
