"""The driver's side of a tracker in a process of its own.

Records go into a queue, and a thread hands them to the process, one at a time. The driver never waits for
either, except for a bounded time at the end of the run.
"""

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from slipstream.tracking.orders import (
    AnyOrder,
    CloseRun,
    LogMetrics,
    LogSamples,
    OpenRun,
    OrderFailed,
    OrderTaken,
    receive_answer,
    send_message,
)

MAX_WAITING = 1000
"""Records that wait for a tracker. Where it is too slow, further ones are lost, and counted."""
LEAVE_S = 10.0
"""Seconds that a tracker has to flush and to close the run when the driver has died."""
KILL_S = 5.0
"""Seconds that a keeper has to kill everything below it."""


class TrackerFailed(Exception):
    """The tracker has failed, or its process has. The message says how."""


class RemoteTracker:
    """A tracker in a process of its own. Its methods never wait and never raise, but for `finish`."""

    def __init__(
        self, name: str, order: OpenRun, log: Path, timeout_s: float, say: Callable[[str], None]
    ) -> None:
        """`say` is called with a line for the user, by another thread."""
        self.name = name
        self.num_logged = self.num_lost = 0
        self.reason: str | None = None
        """Why the tracker was dropped; None while it is not."""
        self._opening, self._log, self._timeout_s, self._say = order, log, timeout_s, say
        self._queue: queue.SimpleQueue[AnyOrder] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._has_said_lost = False
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._serve_process, daemon=True, name=f"tracker-{name}")

    def start(self) -> None:
        self._thread.start()

    def log_record(self, order: LogMetrics | LogSamples) -> None:
        with self._lock:
            is_full = self._queue.qsize() >= MAX_WAITING
            if self.reason is None and not is_full:
                self._queue.put(order)
                return
            self.num_lost += 1
        if is_full and not self._has_said_lost:
            self._has_said_lost = True
            self._say(
                f"{self.name} is too slow for this run: {MAX_WAITING} records wait, and others are lost"
            )

    def ask_to_close(self, order: CloseRun) -> None:
        """The last order, after all records that wait."""
        self._queue.put(order)

    @property
    def has_ended(self) -> bool:
        """True when the process has closed the run, or the tracker was dropped."""
        return not self._thread.is_alive()

    def kill(self, reason: str) -> None:
        """Drops the tracker, unless it has ended, and kills its process with all below it."""
        if not self.has_ended:
            self._drop(reason, is_told=False)
        self._end_process()
        if self._thread.ident is not None:  # a run that failed early has started none
            self._thread.join(KILL_S)

    def try_opening(self) -> None:
        """Starts the process, gives it the first order, and ends it. Raises TrackerFailed."""
        try:
            self._start_process()
            self._exchange(self._opening)
        finally:
            self._end_process()

    # ---- the thread

    def _serve_process(self) -> None:
        """Consumes the queue. Ends when the run is closed, or the tracker is dropped."""
        try:
            self._start_process()
            if place := self._exchange(self._opening).place:
                self._say(f"{self.name}: {place}")
            while True:
                order = self._queue.get()
                if isinstance(order, CloseRun):
                    self._exchange(order)
                    return
                try:
                    self.num_logged += not self._exchange(order).was_known
                except TrackerFailed:
                    self.num_lost += 1
                    raise
        except TrackerFailed as failed:
            self._drop(str(failed))
        finally:
            self._end_process()

    def _start_process(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "slipstream.tracking.keeper"]
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid()), str(self._log), str(LEAVE_S)],
                stdin=subprocess.PIPE,  # the keeper is told through it to kill
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the driver
            )
        except OSError as error:
            ours.close()
            raise TrackerFailed(f"its process could not be started: {error}") from error
        finally:
            theirs.close()
        self._link = ours
        if self.reason is not None:  # `kill` came before there was a process
            raise TrackerFailed(self.reason)

    def _exchange(self, order: AnyOrder) -> OrderTaken:
        """Gives an order, and waits for its answer. Raises TrackerFailed."""
        assert self._link is not None, "the process is started first"
        try:
            self._link.settimeout(self._timeout_s)
            send_message(self._link, order)
            answer = receive_answer(self._link, time.monotonic() + self._timeout_s)
        except TimeoutError as error:
            raise TrackerFailed(f"it took longer than {self._timeout_s:g} s for {order.what}") from error
        except (OSError, msgspec.DecodeError) as error:
            raise TrackerFailed(f"its process has ended in {order.what}") from error
        # What a message cannot hold: half a surrogate pair, an integer of 65 bits.
        except (ValueError, TypeError, OverflowError) as error:
            raise TrackerFailed(f"{order.what} must fit into a message: {error}") from error
        if isinstance(answer, OrderFailed):
            raise TrackerFailed(f"{answer.error}, in {order.what}")
        return answer

    def _drop(self, reason: str, *, is_told: bool = True) -> None:
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
            with contextlib.suppress(queue.Empty):
                while True:
                    self.num_lost += isinstance(self._queue.get_nowait(), LogMetrics | LogSamples)
        if is_told:
            self._say(f"{self.name} is dropped, and the run goes on without it: {reason}. Log: {self._log}")

    def _end_process(self) -> None:
        """Kills the process and all below it, where the keeper has not done so."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None, "it is a pipe"
        with contextlib.suppress(OSError):
            process.stdin.write(b"k")
            process.stdin.close()
        try:
            process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._link is not None:
            self._link.close()


def try_tracker(name: str, order: OpenRun, timeout_s: float) -> None:
    """Raises ValueError, in the words of the configuration, for a class that cannot be a tracker."""
    try:
        RemoteTracker(name, order, Path(os.devnull), timeout_s, print).try_opening()
    except TrackerFailed as failed:
        told = str(failed).removeprefix("ValueError: ")
        if not told.startswith("tracking."):
            told = f"tracking.trackers must name a class that can be made, got {name!r}: {told}"
        raise ValueError(told) from failed
