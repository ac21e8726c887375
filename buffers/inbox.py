"""Messages that have come in and are not handled yet."""

from collections import Counter, deque
from collections.abc import Callable, Container, Iterator

import zmq

from buffers.connections import Connections

MAX_FRAMES = 4
"""Frames of a message: sender, number, request, and perhaps an Arrow frame."""
MAX_MESSAGES_PER_TURN = 1000
MAX_BYTES_PER_TURN = 4 << 20
"""Bytes of submissions that a turn handles: then those who wait for an answer get it."""
MAX_INBOX_BYTES = 64 << 20
"""Bytes of messages that are kept here. Further ones stay in ZeroMQ's queues."""


class Inbox:
    """Hands out small requests at once and submissions in portions, so that whoever only asks something does
    not wait behind a thousand submissions. The messages of one sender are handed out in the order in which
    they came."""

    def __init__(self, socket: "zmq.Socket[bytes]", connections: Connections) -> None:
        self._socket, self._connections = socket, connections
        self._messages: deque[list[zmq.Frame]] = deque()
        self._num_bytes = 0
        self._num_queued: Counter[bytes] = Counter()
        """Messages in the queue, by sender."""
        self.is_drained = True
        """True when the last turn has read all whole messages that had come."""

    @property
    def senders(self) -> Container[bytes]:
        """Senders with messages in the queue."""
        return self._num_queued

    def take_messages(self, wait_s: float, is_full: Callable[[], bool]) -> Iterator[list[zmq.Frame]]:
        """Yields the messages that one turn handles: 3 or 4 frames where well-formed, else any other number.

        Waits up to `wait_s` for the first one, but not while messages are queued. Reads no more from the
        socket once `is_full` says that the answers do not fit into this turn.
        """
        self.is_drained = False
        if not self._socket.poll(0 if self._messages else int(wait_s * 1000)) and not self._messages:
            self.is_drained = True
            return
        yield from self._read_socket(is_full)
        yield from self._take_queued()

    def _read_socket(self, is_full: Callable[[], bool]) -> Iterator[list[zmq.Frame]]:
        """Yields small requests and queues submissions, and whatever comes from a sender whose submission is
        queued."""
        for _ in range(MAX_MESSAGES_PER_TURN):
            if self._num_bytes > MAX_INBOX_BYTES or is_full():
                return
            if (frames := self._connections.receive_message(MAX_FRAMES)) is None:
                self.is_drained = True
                return
            if len(frames) == MAX_FRAMES or (len(frames) == 3 and frames[0].bytes in self._num_queued):
                self._messages.append(frames)
                self._num_queued[frames[0].bytes] += 1
                self._num_bytes += sum(map(len, frames))
            else:
                yield frames

    def _take_queued(self) -> Iterator[list[zmq.Frame]]:
        num_bytes = 0
        while self._messages and num_bytes < MAX_BYTES_PER_TURN:
            frames = self._messages.popleft()
            num_bytes += sum(map(len, frames))
            sender = frames[0].bytes
            self._num_queued[sender] -= 1
            if not self._num_queued[sender]:
                del self._num_queued[sender]
            yield frames
        self._num_bytes -= num_bytes
