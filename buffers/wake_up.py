"""A call that ends another thread's wait on a poller."""

import contextlib
import os
import threading


class WakeUp:
    """A call that ends another thread's wait on a poller. Calls before a wait end that wait at once."""

    def __init__(self) -> None:
        self._event: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        """Guards `_event`: after `close` its number may belong to another file."""

    def __call__(self) -> None:
        with self._lock:
            if self._event is not None:
                os.eventfd_write(self._event, 1)

    def fileno(self) -> int:
        assert self._event is not None, "the wake-up has been closed"
        return self._event

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fileno())

    def close(self) -> None:
        with self._lock:
            if self._event is not None:
                os.close(self._event)
            self._event = None
