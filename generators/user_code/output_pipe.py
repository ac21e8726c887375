"""The pipe that takes what a process of the task's code prints; the end of it is kept for errors."""

import asyncio
import os
from collections.abc import Callable

_KEPT_BYTES = 4096
"""The end of the output, which errors show."""
_CHUNK_BYTES = 1 << 16


class OutputPipe:
    """Reads in the event loop for as long as the process writes."""

    def __init__(self, max_bytes: int, take_excess: Callable[[], None]) -> None:
        """`take_excess` is called once more than `max_bytes` have come since the last call began."""
        self._max_bytes, self._take_excess = max_bytes, take_excess
        self._read_end, write_end = os.pipe2(os.O_CLOEXEC)
        self._write_end: int | None = write_end
        os.set_blocking(self._read_end, False)
        self._kept = bytearray()
        self._num_bytes = 0
        self._is_open = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_end, self._read_chunk)

    @property
    def write_end(self) -> int:
        """The descriptor for the process."""
        assert self._write_end is not None, "it is closed once the process has it"
        return self._write_end

    @property
    def is_beyond_limit(self) -> bool:
        return self._num_bytes > self._max_bytes

    def begin_call(self) -> None:
        """Counts from here, and forgets what was printed before."""
        self._num_bytes = 0
        self._kept.clear()

    def show_end(self) -> str:
        """Returns the end of what was printed since the last call began."""
        return self._kept.decode(errors="replace")

    def close_write_end(self) -> None:
        """Closes this process's copy of the other end, so that the end of the output can be seen."""
        if self._write_end is not None:
            os.close(self._write_end)
            self._write_end = None

    def close(self) -> None:
        """Takes what has come, and closes the pipe."""
        self.close_write_end()
        while self._is_open and self._read_chunk():
            pass
        self._close_read_end()

    def _read_chunk(self) -> bool:
        """Returns False when there is nothing to read now."""
        try:
            chunk = os.read(self._read_end, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self._close_read_end()
            return False
        was_within = not self.is_beyond_limit
        self._num_bytes += len(chunk)
        self._kept = (self._kept + chunk)[-_KEPT_BYTES:]
        if was_within and self.is_beyond_limit:
            self._take_excess()
        return not self.is_beyond_limit

    def _close_read_end(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._read_end)
            os.close(self._read_end)
