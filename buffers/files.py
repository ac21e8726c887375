"""Files that must survive: whole replacements, synced names, and tails that are set aside rather than
thrown away."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from configs.disk import disk_full, is_disk_full, write_all

COPIED_BYTES = 1 << 22
"""Bytes copied at a time."""
UNFINISHED = ".unfinished"
"""Ends the name of what is to take the place of a file or a folder, once it is whole."""


@contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Raises DiskFull, which names `path`, in the place of the system's error for a full disk."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(path, 0) from error
        raise


def sync_file(file: int, path: Path) -> None:
    """Waits until the file's data are on the disk.

    Raises DiskFull, because some file systems notice only now.
    """
    with naming_full_disk(path):
        os.fdatasync(file)


def sync_path(path: Path) -> None:
    """Does what `sync_file` does, for a file that somebody else may have deleted meanwhile."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        sync_file(file, path)
    finally:
        os.close(file)


def sync_folder(folder: Path) -> None:
    """Waits until the names of the folder's files are on the disk. Raises DiskFull."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with naming_full_disk(folder):
            os.fsync(file)
    finally:
        os.close(file)


def replace_file(path: Path, data: bytes | memoryview, *, sync: bool = True) -> None:
    """Makes the file appear whole or not at all.

    With `sync` it is on the disk when this returns. Raises DiskFull.
    """
    unfinished = path.with_name(f"{path.name}{UNFINISHED}")
    try:
        with open(unfinished, "wb", buffering=0) as file:
            write_all(file.fileno(), data, unfinished)
            if sync:
                os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(unfinished, len(data)) from error
        raise
    if sync:
        sync_folder(path.parent)


def cut_file(path: Path, end: int, *, sync: bool = True) -> str | None:
    """Ends the file at byte `end`. The bytes behind it stay beside the file, as `<name>.cut-<end>`.

    A file that is cut at 0 gets that name itself. Returns words for what was cut; None when nothing was.
    """
    size = path.stat().st_size
    if end and size <= end:
        return None
    aside = find_free_name(path.with_name(f"{path.name}.cut-{end}"))
    if not end:
        os.replace(path, aside)
    else:
        try:
            with open(path, "rb") as whole, open(aside, "wb") as tail:
                whole.seek(end)
                shutil.copyfileobj(whole, tail, COPIED_BYTES)
                tail.flush()
                if sync:
                    os.fsync(tail.fileno())
        except OSError as error:
            aside.unlink(missing_ok=True)
            if is_disk_full(error):
                raise disk_full(aside, size - end) from error
            raise
        # The copy must be on the disk for good before the original is cut, or a loss of power could cost
        # both.
        if sync:
            sync_folder(path.parent)
        os.truncate(path, end)
        if sync:
            sync_path(path)
    if sync:
        sync_folder(path.parent)
    return f"the last {size - end} bytes of {path.name} (kept as {aside.name})"


def find_free_name(path: Path) -> Path:
    """Returns the path, or the first `<path>-<n>` that no file has, so that an earlier cut at the same
    place is kept as well."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def list_numbers(folder: Path, suffix: str) -> list[int]:
    """Returns the numbers of the files `<number><suffix>`, in order.

    Users may keep other files beside them.
    """
    return sorted(
        int(path.stem) for path in folder.glob(f"*{suffix}") if re.fullmatch(r"[0-9]{6,}", path.stem)
    )
