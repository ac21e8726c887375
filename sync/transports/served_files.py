"""The files of a folder of snapshots that are being asked for, mapped, whether whole or still being
fetched."""

import contextlib
import mmap
import os
import time
from pathlib import Path

from sync.extents import Extents

SNAPSHOT = ".safetensors"
KEEP_GONE, KEEP_MAPPED = 4, 32
"""Number of snapshots that stay mapped although they have been deleted, and of all other files. Deleted
snapshots take memory that nothing else would."""
IDLE_S, UNFINISHED_S = 5.0, 15.0
"""Seconds after which a file that nobody has asked about is unmapped, and one that nobody has asked for to
its end: longer than a host waits for a chunk, which may be that slow."""


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
        self.used_at = self.mapped_at = time.monotonic()
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

    def is_gone(self) -> bool:
        """True when it has been deleted since it was mapped."""
        return not (self._path.exists() or self._part.exists())

    def end_from(self, offset: int) -> int:
        """Returns where the bytes end that can be served from `offset` on."""
        if self._record is None:
            return len(self.mapped)
        self._record_end = self._arrived.read_record(self._record, self._record_end)
        return min(self._arrived.end_from(offset), len(self.mapped))


class ServedFiles:
    """Maps the files that hosts ask for, so that a host may finish a file that has been deleted since it
    began."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mapped: dict[str, ServedFile] = {}

    def __len__(self) -> int:
        return len(self._mapped)

    def open_file(self, name: str) -> ServedFile:
        """Returns a file, mapped. Raises as `ServedFile`.

        A host that asks for a manifest fetches the snapshot next. On a slow link that is many publications
        later, so the snapshot is mapped with its manifest.
        """
        file = self._map_file(name)
        if name.endswith(".json"):
            with contextlib.suppress(OSError, ValueError):
                self._map_file(str(Path(name).with_suffix(SNAPSHOT)))
        return file

    def unmap_idle(self) -> None:
        now = time.monotonic()
        for name, file in list(self._mapped.items()):
            if now - file.used_at > (IDLE_S if file.is_asked_to_end else UNFINISHED_S):
                del self._mapped[name]

    def unmap_deleted(self) -> None:
        """Lets go of the files that take up room for slow hosts alone."""
        self._mapped = {name: file for name, file in self._mapped.items() if not file.is_gone()}

    def _map_file(self, name: str) -> ServedFile:
        file = self._mapped.get(name)
        if file is None or file.is_stale():
            file = ServedFile(self.folder / name)
            self._mapped.pop(name, None)
            self._unmap_surplus()
            self._mapped[name] = file
        file.used_at = time.monotonic()
        return file

    def _unmap_surplus(self) -> None:
        """Makes room for one more file. Of the deleted snapshots those go first that were sent to their ends,
        then those that were mapped last: the hosts that have fetched for the longest time come to their end,
        however many others begin. Python unmaps a file when ZeroMQ has sent the last chunk of it."""
        gone = [name for name, file in self._mapped.items() if name.endswith(SNAPSHOT) and file.is_gone()]
        gone.sort(key=lambda name: (self._mapped[name].is_asked_to_end, self._mapped[name].mapped_at))
        others = sorted(self._mapped.keys() - gone, key=lambda name: -self._mapped[name].used_at)
        for name in gone[KEEP_GONE:] + others[KEEP_MAPPED - 1 :]:
            del self._mapped[name]


def _open_plain_file(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
