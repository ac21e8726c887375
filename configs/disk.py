"""Whole writes, and a full disk that is named: where, how much was needed, how much is free.

And the cache, a folder of the user's for what could be made again.
"""

import errno
import os
import shutil
from pathlib import Path


class DiskFull(ValueError):
    """There is no room to write. Making room and resuming the run is all that is needed."""


def is_disk_full(error: BaseException) -> bool:
    """True for the errors that a file system raises when it, or a quota, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def disk_full(path: Path, needed_bytes: int) -> DiskFull:
    """Returns the error that names the path, the bytes that were to be written, and the bytes that are free
    there."""
    place = path if path.exists() else path.parent
    free = shutil.disk_usage(place).free
    return DiskFull(
        f"the disk of {path} must have room for {needed_bytes:,} bytes more, got {free:,} bytes free: "
        "make room, then continue (a run with run.resume, an evaluation with the same command)"
    )


def find_cache(part: str) -> Path:
    """Returns the folder of a part of the cache, which may not be there yet. Raises ValueError where nothing
    says where the cache is."""
    try:
        root = os.environ.get("SLIPSTREAM_CACHE") or Path.home() / ".cache" / "slipstream"
    except RuntimeError as error:
        raise ValueError(
            f"SLIPSTREAM_CACHE must name a folder where the user has no home, got none: {error}"
        ) from error
    return Path(root) / part


def make_cache(folder: Path) -> None:
    """Makes a folder of the cache where it is missing. Raises ValueError where it cannot be made or
    written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except OSError as error:
        raise unwritable_cache(folder, error) from error


def unwritable_cache(folder: Path, error: OSError) -> ValueError:
    """Returns the error for a folder of the cache in which this user may not do what it must."""
    return ValueError(
        "SLIPSTREAM_CACHE must name a folder that can be written (default: ~/.cache/slipstream), got "
        f"{folder.parent}: {error}"
    )


def write_all(file: int, data: bytes | memoryview, path: Path | None = None) -> None:
    """Writes all of the data to a file descriptor, however little the kernel takes at a time.

    Raises DiskFull, which names `path`, when the disk is full; without a `path`, what the system raises.
    """
    left = memoryview(data).cast("B")
    while left:
        try:
            left = left[os.write(file, left) :]
        except OSError as error:
            if path is not None and is_disk_full(error):
                raise disk_full(path, len(left)) from error
            raise
