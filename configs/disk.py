"""Whole writes, and a full disk that is named: where, how much was needed, how much is free."""

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
        "make room, then continue with run.resume"
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
