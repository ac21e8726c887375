"""The TCP connections of a server's socket: how much of what they have sent is not part of a whole message yet, how much of what
they were sent they have not taken, and how many there are.

ZeroMQ hands out whole messages only, and keeps the frames of one that never ends without any limit; it counts answers that wait
for their reader, and not their bytes; and it accepts as long as there are file descriptors. So what the kernel says has gone through
a connection (TCP_INFO) is compared with what was read from it and given to it here. A connection that has too much between the two
is shut down. The kernel's keepalive ends those whose other side is not there any more.

Which bytes belong to a message that is unfinished? All that are left when everything whole has been read (`drained`). In a flood that
never happens. But ZeroMQ takes from all connections in turn: when twice as many messages have been read as there are connections
(and those between two looks at what has come), and none of them came from this one, it had none that was whole, and what had come from
it by then was unfinished.
"""

import contextlib
import itertools
import os
import resource
import socket
import struct
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from buffers.process import allow_many_connections, give_back_freed_memory

BYTES_ACKED, BYTES_RECEIVED = 120, 128
"""The places of `tcpi_bytes_acked` and `tcpi_bytes_received`, a uint64 each, in Linux's struct tcp_info."""
CURVE_BYTES = 33
"""Of a frame that travels encrypted: name of the command, nonce, flags, authenticator."""
SLACK_BYTES = 16 << 20
"""For the handshake, and for what is in the kernel's buffers."""
POLL_RATE = 100
"""Messages that ZeroMQ hands out, at most, before it looks which connections have more (`inbound_poll_rate` in its config.hpp)."""
MAX_GONE = 10_000
"""Senders remembered whose connection has ended, as long as something of them may still come."""
GONE_S = 1.0
TRIMS = 20
"""Looks after the end of a connection at which freed memory is given back."""
UNREAD_S, UNREAD_BYTES = 60.0, 1 << 20
"""More answers than that, of which a client has taken nothing for so long, cost it the connection."""
KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 15,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
"""The kernel asks a connection that is silent for 15 s, three times, whether there is another side."""

_numbers = itertools.count()


@dataclass(slots=True)
class Connection:
    inode: int
    """Tells the socket from a later one with the same descriptor."""
    sender: bytes = b""
    """Its name among the socket's peers; empty before its first message."""
    num_read: int = 0
    """Bytes that the messages read from it had on the wire."""
    num_sent: int = 0
    """The same of the messages sent to it."""
    look: "Look | None" = None
    unfinished: int = 0
    """Bytes known to be of a message that has not come whole."""
    num_acked: int = 0
    """Bytes that the other side had taken at the last look, which it had by `acked_at`."""
    acked_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Look:
    """What a look has found of a connection."""

    at: int
    """Messages read from all connections by then."""
    num_read: int
    unread: int


class Connections:
    def __init__(
        self, server: "zmq.Socket[bytes]", *, encrypted: bool, max_message: int, max_waiting: int, max_total: int,
        max_unread: int, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Watches a socket that is not bound yet. `max_message` bounds a message, `max_waiting` the whole messages of a
        connection that ZeroMQ keeps for the server, `max_total` the bytes of all connections' unfinished messages, and
        `max_unread` the bytes of answers that a connection has not taken. Half of the process's file descriptors are for
        connections."""
        self._max_message, self._max_waiting, self._max_total = max_message, max_waiting, max_total
        self._max_unread, self._clock = max_unread, clock
        allow_many_connections()
        self._max_open = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._by_sender: dict[bytes, Connection] = {}
        self._gone: dict[
            bytes, tuple[int, float]
        ] = {}  # senders: messages read when the connection had ended, and when that was
        self._num_read = 0  # messages, of all
        self._trims = 0  # looks at which freed memory is still to be given back
        self._overhead = CURVE_BYTES if encrypted else 0
        self._open: dict[int, Connection] = {}
        self._server = server
        self._loan = Loan()
        for option, value in KEEPALIVE.items():
            server.setsockopt(option, value)
        address = f"inproc://connections-{next(_numbers)}"
        server.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._events: zmq.Socket[bytes] = server.context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.RCVHWM, 0)  # ZeroMQ's own thread would wait for a full queue
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.connect(address)

    def close(self) -> None:
        self._server.disable_monitor()
        self._events.close()
        self._loan.close()

    def receive(self, max_frames: int) -> list[zmq.Frame] | None:
        """Reads and counts a message, if there is one. Of one with too many frames, the first few are returned."""
        try:
            frames = [self._server.recv(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return None
        while frames[-1].more and len(frames) < max_frames + 1:
            frames.append(self._server.recv(copy=False))
        self.count(frames)
        if len(frames) > max_frames:
            while self._server.getsockopt(zmq.RCVMORE):
                self.count([frames[0], self._server.recv(copy=False)])
        return frames

    def count(self, frames: list[zmq.Frame]) -> None:
        """Notes that a message was read. Its first frame, the sender, has not travelled."""
        self._num_read += 1
        descriptor, sender = find_descriptor(frames[-1]), frames[0].bytes
        connection = self._open.get(descriptor)
        if (
            connection is None or connection.sender != sender
        ):  # a new one, perhaps with the descriptor of one that has ended
            self._notice()
            connection = self._open.get(descriptor)
        if connection is None or sender in self._gone:
            return
        connection.num_read += self._wire_bytes(frames)
        if connection.sender != sender:
            self._forget(connection)
            connection.sender = sender
            self._by_sender[sender] = connection

    def count_sent(self, frames: Sequence[Any]) -> None:
        """Notes that a message is on its way to the peer that its first frame names."""
        if (connection := self._by_sender.get(frames[0])) is not None:
            connection.num_sent += self._wire_bytes(frames)

    def _wire_bytes(self, frames: Sequence[Any]) -> int:
        sizes = [len(frame) + self._overhead for frame in itertools.islice(frames, 1, None)]
        return sum(size + (2 if size < 256 else 9) for size in sizes)

    def _remove(self, descriptor: int) -> Connection | None:
        connection = self._open.pop(descriptor, None)
        if connection is not None:
            self._forget(connection)
        return connection

    def _forget(self, connection: Connection) -> None:
        if connection.sender:
            self._by_sender.pop(connection.sender, None)
            self._gone[connection.sender] = (self._num_read, self._clock())

    def shut_down(self, descriptor: int) -> bool:
        """Ends a connection, as if the other side had; true if there was one."""
        connection = self._remove(descriptor)
        if connection is None:
            return False
        self._loan.shut_down(descriptor, connection)
        self._trims = TRIMS
        return True

    def shut_down_unfinished(self, *, drained: bool) -> list[int]:
        """Ends the connections that have sent too much of a message, or of messages that are unfinished together; returns the
        bytes of each. `drained`: all whole messages have been read, so that what is left is unfinished."""
        self._notice()
        self._give_back()
        unread = {fd: self._count_unfinished(fd, one, drained) for fd, one in self._open.items()}
        most_unfinished = self._max_message + SLACK_BYTES
        most = most_unfinished + self._max_message * self._max_waiting
        total, found = sum(one.unfinished for one in self._open.values()), []
        for descriptor, one in sorted(self._open.items(), key=lambda item: -item[1].unfinished):
            if unread[descriptor] > most or one.unfinished > most_unfinished or total > self._max_total:
                total -= one.unfinished
                self.shut_down(descriptor)
                found.append(unread[descriptor])
        return found

    def _count_unfinished(self, descriptor: int, connection: Connection, drained: bool) -> int:
        """Finds how much of a message that has not come whole there is; returns the bytes that were not read."""
        left = max(0, self._loan.ask_kernel(descriptor, connection)[1] - connection.num_read)
        look = connection.look
        if drained:
            connection.unfinished = left
        elif look is None or look.num_read != connection.num_read:
            connection.unfinished = 0
        elif self._num_read - look.at > self._round:
            connection.unfinished = look.unread
        else:
            return left
        connection.look = Look(self._num_read, connection.num_read, left)
        return left

    def shut_down_deaf(self) -> list[int]:
        """Ends the connections that do not take their answers: too many bytes of them, or none for long; returns the bytes that
        waited for each."""
        found, now = {}, self._clock()
        for descriptor, one in self._open.items():
            if one.num_sent:
                acked = self._loan.ask_kernel(descriptor, one)[0]
                if acked != one.num_acked or one.num_sent - acked < UNREAD_BYTES:
                    one.num_acked, one.acked_at = acked, now
                if one.num_sent - acked > self._max_unread or now - one.acked_at > UNREAD_S:
                    found[descriptor] = one.num_sent - acked
        return [left for descriptor, left in found.items() if self.shut_down(descriptor)]

    def shut_down_surplus(self) -> int:
        """Ends connections where there are too many: first those that have never said anything, the oldest of them first, then
        the newest. Returns how many."""
        surplus = len(self._open) - self._max_open
        if surplus <= 0:
            return 0
        silent = [descriptor for descriptor, one in self._open.items() if not one.sender]
        newest = [descriptor for descriptor, one in reversed(self._open.items()) if one.sender]
        return sum(self.shut_down(descriptor) for descriptor in (silent + newest)[:surplus])

    def take_gone(self, *, drained: bool, busy: Container[bytes] = ()) -> list[bytes]:
        """Senders whose connection has ended and of whom nothing more is to come: each once. `busy` have messages that were read
        and not dealt with."""
        most = 2 * (2 + self._max_waiting) * (len(self._open) + POLL_RATE)
        settled = (
            self._clock() - GONE_S
        )  # ZeroMQ's thread hands on the last messages a moment after it has told of the end
        over = [
            sender
            for sender, (num_read, at) in self._gone.items()
            if at < settled and sender not in busy and (drained or self._num_read - num_read > most)
        ]
        over += itertools.islice(self._gone, max(0, len(self._gone) - MAX_GONE))
        for sender in over:
            self._gone.pop(sender, None)
        return over

    @property
    def _round(self) -> int:
        """Messages after which every connection that has a whole one has been read from."""
        return 2 * (len(self._open) + len(self._gone) + POLL_RATE)

    def _give_back(self) -> None:
        """Frames of a message that had not come whole are freed one by one, by ZeroMQ's thread, a moment after its connection
        has ended. The C library would keep their pages."""
        if self._trims:
            self._trims -= 1
            give_back_freed_memory()

    def _notice(self) -> None:
        """Takes in which connections have come and gone."""
        while True:
            try:
                event = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            descriptor = int(event["value"])
            self._remove(descriptor)
            if event["event"] == zmq.EVENT_ACCEPTED and event["endpoint"].startswith(b"tcp"):
                with contextlib.suppress(OSError):  # it is gone already
                    self._open[descriptor] = Connection(os.fstat(descriptor).st_ino, acked_at=self._clock())


def find_descriptor(frame: zmq.Frame) -> int:
    """By which connection a frame came; -1 where its sender speaks a protocol of before 2013, which does not tell."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


class Loan:
    """A descriptor of one's own on ZeroMQ's connections, one at a time. It is always the same one, so that it is there when the
    process has no other left."""

    def __init__(self) -> None:
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._descriptor = os.dup(self._nothing)

    def close(self) -> None:
        os.close(self._nothing)
        os.close(self._descriptor)

    def ask_kernel(self, descriptor: int, connection: Connection) -> tuple[int, int]:
        """(bytes that the other side has taken, bytes that have come from it); where the connection is gone, those counted here."""
        with self._borrow(descriptor, connection) as borrowed, contextlib.suppress(OSError):
            if borrowed is not None:
                info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED + 8)
                if len(info) == BYTES_RECEIVED + 8:  # else a kernel older than 4.1
                    acked, received = struct.unpack_from("<QQ", info, BYTES_ACKED)
                    return int(acked), int(received)
        return connection.num_sent, connection.num_read

    def shut_down(self, descriptor: int, connection: Connection) -> None:
        with self._borrow(descriptor, connection) as borrowed, contextlib.suppress(OSError):
            if borrowed is not None:
                borrowed.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _borrow(self, descriptor: int, connection: Connection) -> Iterator[socket.socket | None]:
        """None where the descriptor is closed, or another's by now."""
        try:
            os.dup2(descriptor, self._descriptor, inheritable=False)
        except OSError:
            yield None
            return
        try:
            if os.fstat(self._descriptor).st_ino != connection.inode:
                yield None
                return
            borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, self._descriptor)
            try:
                yield borrowed
            finally:
                borrowed.detach()
        finally:
            os.dup2(self._nothing, self._descriptor, inheritable=False)  # else ZeroMQ could not close it


def watch_small_requests(server: "zmq.Socket[bytes]", *, encrypted: bool, max_unread: int) -> Connections:
    """Watches a server whose requests are of a few frames of a few kB: one that serves weights."""
    return Connections(
        server, encrypted=encrypted, max_message=64 << 10, max_waiting=int(server.getsockopt(zmq.RCVHWM)), max_total=256 << 20,
        max_unread=max_unread,
    )  # fmt: skip
