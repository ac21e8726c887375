"""A file of a folder of snapshots, mapped to be served, whether it is whole or is still being fetched."""

import mmap
import os
import time
from pathlib import Path

from sync.extents import Extents


class ServedFile:
    """A mapped file. Of a file that is being fetched (`.part`, `.chunks`) only the bytes that have arrived
    are served."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when it is not there, or is a link; ValueError when it is empty."""
        self._path, self._part = path, path.with_suffix(".part")
        self._record: int | None = None
        """Descriptor of the record of what has arrived; None: the file is whole."""
        self._arrived, self._record_end = Extents(), 0
        try:
            file = _open_plain_file(path)
        except FileNotFoundError:
            file = _open_plain_file(self._part)
            try:
                self._record = _open_plain_file(path.with_suffix(".chunks"))
            except OSError:
                os.close(file)
                raise
        self._inode = os.fstat(file).st_ino
        try:
            self.mapped = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(file)
        self.used_at = time.monotonic()
        self.is_asked_to_end = False
        """True when the last bytes that were asked for are the last of the file."""

    def __del__(self) -> None:
        # The attribute is missing where the constructor has raised.
        if getattr(self, "_record", None) is not None:
            os.close(self._record)  # type: ignore[arg-type]

    def is_stale(self) -> bool:
        """True when the fetcher has thrown away what it had, and perhaps begun anew."""
        if self._record is None:
            return False
        try:
            if os.stat(self._path).st_ino == self._inode:
                # The file is whole now: the fetcher has given it its name.
                os.close(self._record)
                self._record = None
                return False
        except FileNotFoundError:
            pass
        try:
            return os.stat(self._part).st_ino != self._inode
        except FileNotFoundError:
            # The file was renamed between the two looks, or is gone: the next look tells.
            return not self._path.exists()

    def end_from(self, offset: int) -> int:
        """Returns where the bytes end that can be served from `offset` on."""
        if self._record is None:
            return len(self.mapped)
        self._record_end = self._arrived.read_record(self._record, self._record_end)
        return min(self._arrived.end_from(offset), len(self.mapped))


def _open_plain_file(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
