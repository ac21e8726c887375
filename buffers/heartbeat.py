"""The heartbeat of a role: a thread reports what the role is doing and since when, whatever the role itself
waits for.

    role's loop ── set_activity, set_composer ─▶ HeartbeatThread ─ GeneratorHeartbeat, RoleHeartbeat ▶ buffer
                ◀─ take_standings ──────────────                 ◀ GeneratorStanding, Acknowledged ────

The thread has a client of its own, because a client belongs to one thread. Python gives it the processor a
hundred times a second while the loop runs Python, waits, or computes in a library that releases the
interpreter's lock (vLLM's steps, torch and sockets do). A call that holds the lock for long stops the
heartbeat too: then the status says "not heard of".
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from buffers import messages as m
from buffers.client import BufferClient
from buffers.timeline import Timeline

log = logging.getLogger("slipstream.heartbeat")

HEARTBEAT_S = 0.5
"""Seconds between two heartbeats."""
WAKE_S = 0.1
"""Seconds within which the thread notices that it is to end."""
MAX_UNANSWERED = 4
"""Heartbeats on the way at most, so that a buffer that was away for an hour does not get thousands of them at
once."""


class ComposeHeartbeat(Protocol):
    """Makes a heartbeat from the role's activity, the seconds since it began, and the seconds since the role
    moved."""

    def __call__(
        self, *, activity: str, activity_s: float, standstill_s: float
    ) -> m.GeneratorHeartbeat | m.RoleHeartbeat: ...


class HeartbeatThread:
    """Sends a heartbeat every `HEARTBEAT_S` until it is closed. All methods may be called from any thread."""

    def __init__(
        self,
        client: BufferClient,
        compose: ComposeHeartbeat,
        activity: str,
        clock: Callable[[], float] = time.monotonic,
        timeline: Timeline | None = None,
    ) -> None:
        """Starts the thread with a first activity. The client belongs to the thread from now on, and the
        timeline to this."""
        self._client, self._compose, self._clock = client, compose, clock
        self.timeline = timeline or Timeline()
        """Every activity goes into it."""
        self.timeline.begin_activity(activity)
        self._farewell: m.Request | None = None
        self._lock = threading.Lock()
        self._activity = activity
        self._since = self._moved_at = clock()
        self._standings: deque[m.GeneratorStanding] = deque()
        self._error: Exception | None = None
        self._under_way: set[int] = set()
        self.silent_s = 0.0
        """Seconds for which the buffer had left heartbeats without an answer when the thread last looked for
        one. They do not count until now, because a process that was held up has answers that it has not
        read."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")
        self._thread.start()

    def set_activity(self, activity: str, moved: bool = True) -> None:
        """Sets what the role is doing now. Setting the same again shows that its loop has come round, unless
        `moved` is false."""
        with self._lock:
            now = self._clock()
            is_another = activity != self._activity
            if is_another:
                self._activity, self._since, self._moved_at = activity, now, now
            elif moved:
                self._moved_at = now
        # Without the lock: no heartbeat waits for a disk.
        if is_another:
            self.timeline.begin_activity(activity)

    def set_composer(self, compose: ComposeHeartbeat) -> None:
        """Sets what every heartbeat carries from now on."""
        self._compose = compose

    def take_standings(self) -> list[m.GeneratorStanding]:
        """Returns the buffer's answers since the last call. Raises the error that has ended the thread, if
        one has."""
        if self._error is not None:
            raise self._error
        return [self._standings.popleft() for _ in range(len(self._standings))]

    def close(self, farewell: m.Request | None = None) -> None:
        """Ends the thread. It sends `farewell` last, after all heartbeats."""
        self.timeline.close()
        self._farewell = farewell
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        """Produces heartbeats, consumes their answers. Waits for the clock only. Ends when it is closed."""
        try:
            while not self._closing.is_set():
                self._send_heartbeat()
                due = self._clock() + HEARTBEAT_S
                while (left := due - self._clock()) > 0 and not self._closing.is_set():
                    self._read_answers(min(left, WAKE_S))
            if self._farewell is not None:
                self._client.send_request(self._farewell)
        except Exception as error:  # `take_standings` raises it in the role's loop
            self._error = error
        finally:
            self._client.close()

    def _send_heartbeat(self) -> None:
        if len(self._under_way) >= MAX_UNANSWERED:
            return
        with self._lock:
            now = self._clock()
            activity, activity_s, standstill_s = self._activity, now - self._since, now - self._moved_at
        self._under_way.add(
            self._client.send_request(
                self._compose(activity=activity, activity_s=activity_s, standstill_s=standstill_s)
            )
        )

    def _read_answers(self, wait_s: float) -> None:
        for answer in self._client.receive_answers(wait_s):
            self._under_way.discard(answer.number)
            match answer.reply:
                case m.GeneratorStanding() as standing:
                    self._standings.append(standing)
                case m.RefusedRequest(reason=reason):
                    log.error("the buffer has refused a heartbeat: %s", reason)
        self.silent_s = self._client.silent_s
