"""Ctrl-C and SIGTERM: the first asks the run to stop after the step under way, the second stops it at once.

A signal handler that raises can strike anywhere: inside Ray's compiled code, which turns the exception into a
`SystemError` that nobody expects, or between two lines that belong together. So the handler only notes the
signal. `Interrupted` is raised at safe points alone: where the main thread calls `raise_if_hurried`, and
inside a `with interruptible():` block, which holds waits that know how to be interrupted (sockets, sleeps,
pure Python) and no call of Ray.

Schedulers end a job by a SIGTERM to all of its processes, and those that have started the driver hand theirs
on to it. So a SIGTERM that follows one within a moment is the same request.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO_S = 2.0
"""Seconds in which several SIGTERMs are one request."""
KILLED = 130
"""Exit status of a command that a signal has ended."""


class Interrupted(BaseException):
    """The user has asked a second time, and does not wait. Not an `Exception`: no library's `except
    Exception` may end it."""


class StopSignals:
    """Notes requests to stop, and raises `Interrupted` once for the second of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._terminated_at: float | None = None
        """When the last SIGTERM came."""
        self.received: str | None = None
        """Name of the first signal; None before it."""
        self.was_hurried = False
        """True once there was a second signal."""
        self._is_hurried = False
        """True from the second signal until `Interrupted` has been raised at a safe point."""
        self._may_raise = False

    def install_handlers(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._note_signal)

    def ignore_further_signals(self) -> None:
        """A later signal must not interrupt the clearing away, nor kill the interpreter while it ends."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            before, self._terminated_at = self._terminated_at, self._clock()
            if before is not None and self._terminated_at - before < ECHO_S:
                return
        if self.received is None:
            self.received = signal.Signals(number).name
            return
        self.ignore_further_signals()
        self._is_hurried = self.was_hurried = True
        if self._may_raise:
            # Still hurried: a destructor that the signal happened to meet would swallow the exception.
            raise Interrupted

    def raise_if_received(self) -> None:
        """Raises Interrupted when a signal has come: for work that ends at once, before the run begins."""
        if self.received is not None:
            raise Interrupted

    def raise_if_hurried(self) -> None:
        """Marks a safe point. Raises Interrupted when a second signal has come and none was raised for it
        yet."""
        if self._is_hurried:
            self._is_hurried = False
            raise Interrupted

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Leaves the block with Interrupted as soon as a second signal comes. The block must not call Ray."""
        self.raise_if_hurried()
        self._may_raise = True
        try:
            yield
            self.raise_if_hurried()
        except Interrupted:
            self._is_hurried = False
            raise
        finally:
            self._may_raise = False
