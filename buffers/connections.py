"""The TCP connections of a server's socket: how many there are, and how many bytes each leaves unread or
unfinished.

ZeroMQ bounds none of this. It hands out whole messages only, and keeps the frames of one that never ends
without any limit. It counts answers that wait for their reader, and not their bytes. It accepts connections
as long as there are file descriptors. So this file compares two numbers for each connection: the bytes that
have gone through it, which the kernel knows (TCP_INFO), and the bytes of the messages that the server has
read from it and sent to it. A connection with too many bytes between the two is shut down. The kernel's
keepalive ends connections whose other side is gone.

Which bytes belong to an unfinished message? When everything whole has been read (`drained`), all that are
left. In a flood that never happens. But ZeroMQ takes messages from all connections in turn. Once twice as
many messages have been read as there are connections (and as come between two looks for new ones), and none
of them came from this connection, it had no whole one. Then the bytes that had come from it by the look
before were unfinished.
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
"""Offsets of `tcpi_bytes_acked` and `tcpi_bytes_received`, a uint64 each, in Linux's struct tcp_info."""
CURVE_BYTES = 33
"""Bytes that encryption adds to a frame: name of the command, nonce, flags, authenticator."""
SLACK_BYTES = 16 << 20
"""Bytes allowed beyond a bound, for the handshake and for the kernel's buffers."""
POLL_RATE = 100
"""Messages that ZeroMQ hands out at most before it looks for connections with new ones (`inbound_poll_rate`
in its config.hpp)."""
MAX_GONE = 10_000
"""Senders remembered whose connection has ended, while a message of them may still come."""
GONE_S = 1.0
"""Seconds in which ZeroMQ's thread hands on the last messages of a connection after it has told of its
end."""
TRIMS = 20
"""Looks after the end of a connection at which freed memory is given back."""
MAX_LOOKS = 200
"""Connections that the kernel is asked about at a time. Where there are more, they take turns: asking about
two thousand of them at each tick takes a third of the thread."""
UNREAD_S, UNREAD_BYTES = 60.0, 1 << 20
"""A client that has taken nothing of more than so many bytes of answers for so many seconds loses its
connection."""
KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 15,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
"""The kernel asks a connection that is silent for 15 s, three times, whether there is another side."""
BACKLOG = 4096
"""Connections that the kernel keeps until they are accepted. ZeroMQ's own 100 are full when a thousand hosts
come at once, and those beyond try again after seconds."""

_numbers = itertools.count()


@dataclass(slots=True)
class Connection:
    """An open connection and the bytes counted for it."""

    inode: int
    """Tells the socket from a later one with the same descriptor."""
    sender: bytes = b""
    """Name of the client among the socket's peers; empty before its first message."""
    num_read: int = 0
    """Bytes on the wire of the messages read from it."""
    num_sent: int = 0
    """Bytes on the wire of the messages sent to it."""
    look: "Look | None" = None
    """The look that the next one is compared with."""
    unread: int = 0
    """Bytes that had come from it by the last look and were in no message that was read."""
    unfinished: int = 0
    """Bytes known to belong to a message that has not come whole."""
    num_acked: int = 0
    """Bytes that the other side had taken at the last look."""
    acked_at: float = 0.0
    """When it had taken them."""


@dataclass(frozen=True, slots=True)
class Look:
    """A connection at one moment."""

    at: int
    """Messages read from all connections by then."""
    num_read: int
    """Bytes of the messages read from this connection by then."""
    unread: int
    """Bytes that had come from it and were in no message that was read."""


class Connections:
    """Counts the bytes of each connection and ends those that cost too much.

    Not thread-safe: the thread that reads from the socket calls all methods.
    """

    def __init__(
        self,
        server: "zmq.Socket[bytes]",
        *,
        encrypted: bool,
        max_message: int,
        max_waiting: int,
        max_total: int,
        max_unread: int,
        max_total_unread: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watches a socket that is not bound yet.

        `max_message` bounds the bytes of a message, `max_waiting` the whole messages of one connection that
        ZeroMQ keeps for the server, `max_total` the bytes of all connections' unfinished messages, and
        `max_unread` the bytes of answers that a connection has not taken, and `max_total_unread` those of all
        connections together. At most half of the process's file descriptors are for connections.
        """
        self._max_message, self._max_waiting, self._max_total = max_message, max_waiting, max_total
        self._max_unread, self._max_total_unread, self._clock = max_unread, max_total_unread, clock
        allow_many_connections()
        self._max_open = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._by_sender: dict[bytes, Connection] = {}
        self._gone: dict[bytes, tuple[int, float]] = {}
        """Senders whose connection has ended: (messages read from all connections by then, time of the
        end)."""
        self._num_read = 0
        """Messages read from all connections."""
        self._trims = 0
        """Looks at which freed memory is still to be given back."""
        self._overhead = CURVE_BYTES if encrypted else 0
        self._open: dict[int, Connection] = {}
        """Open connections by file descriptor."""
        self._round: list[int] = []
        """Connections that are still to be looked at before it is the first one's turn again."""
        self._server = server
        self._borrowed = BorrowedDescriptor()
        for option, value in (KEEPALIVE | {zmq.BACKLOG: BACKLOG}).items():
            server.setsockopt(option, value)
        address = f"inproc://connections-{next(_numbers)}"
        server.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._events: zmq.Socket[bytes] = server.context.socket(zmq.PAIR)
        # The queue of events is unbounded, because ZeroMQ's own thread would wait for a full one.
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.connect(address)

    def close(self) -> None:
        self._server.disable_monitor()
        self._events.close()
        self._borrowed.close()

    def receive_message(self, max_frames: int) -> list[zmq.Frame] | None:
        """Reads and counts a message, if there is one.

        Of a message with more than `max_frames` frames, it reads all and returns one more than that.
        """
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
        """Notes that a message was read. Its first frame, the sender, has not traveled over the
        connection."""
        self._num_read += 1
        descriptor, sender = find_descriptor(frames[-1]), frames[0].bytes
        connection = self._open.get(descriptor)
        if connection is None or connection.sender != sender:
            # A new connection, perhaps with the descriptor of one that has ended.
            self._read_events()
            connection = self._open.get(descriptor)
        if connection is None or sender in self._gone:
            return
        connection.num_read += self._count_wire_bytes(frames)
        if connection.sender != sender:
            self._note_gone(connection)
            connection.sender = sender
            self._by_sender[sender] = connection

    def count_sent(self, frames: Sequence[Any]) -> None:
        """Notes that a message is on its way to the peer that its first frame names."""
        if (connection := self._by_sender.get(frames[0])) is not None:
            connection.num_sent += self._count_wire_bytes(frames)

    def _count_wire_bytes(self, frames: Sequence[Any]) -> int:
        """Returns the bytes of a message on the wire, without its first frame: ZeroMQ puts a flag and a
        length of 1 or 8 bytes before each frame."""
        sizes = [len(frame) + self._overhead for frame in itertools.islice(frames, 1, None)]
        return sum(size + (2 if size < 256 else 9) for size in sizes)

    def _remove_connection(self, descriptor: int) -> Connection | None:
        connection = self._open.pop(descriptor, None)
        if connection is not None:
            self._note_gone(connection)
        return connection

    def _note_gone(self, connection: Connection) -> None:
        if connection.sender:
            self._by_sender.pop(connection.sender, None)
            self._gone[connection.sender] = (self._num_read, self._clock())

    def shut_down(self, descriptor: int) -> bool:
        """Ends a connection, as if the other side had; true if there was one."""
        connection = self._remove_connection(descriptor)
        if connection is None:
            return False
        self._borrowed.shut_down(descriptor, connection)
        self._trims = TRIMS
        return True

    def shut_down_unfinished(self, *, drained: bool) -> list[int]:
        """Ends the connections that have sent too much of an unfinished message, or of too many; returns the
        bytes of each.

        `drained`: all whole messages have been read, so the bytes that are left are unfinished.
        """
        self._read_events()
        self._free_memory()
        self._round = self._round or list(self._open)
        turn, self._round = self._round[:MAX_LOOKS], self._round[MAX_LOOKS:]
        self._look_at(turn, drained)
        if self._num_unfinished > self._max_total and self._round:
            self._look_at(list(self._open), drained)  # some of them were looked at a while ago
        most_unfinished = self._max_message + SLACK_BYTES
        most = most_unfinished + self._max_message * self._max_waiting
        total, found = self._num_unfinished, []
        holding = [item for item in self._open.items() if item[1].unfinished or item[1].unread > most]
        # The largest go first, so that few go when all of them together hold too much.
        for descriptor, one in sorted(holding, key=lambda item: -item[1].unfinished):
            if one.unread > most or one.unfinished > most_unfinished or total > self._max_total:
                total -= one.unfinished
                self.shut_down(descriptor)
                found.append(one.unread)
        return found

    @property
    def _num_unfinished(self) -> int:
        """Bytes of all connections that are known to be unfinished."""
        return sum(one.unfinished for one in self._open.values())

    def _look_at(self, descriptors: Sequence[int], drained: bool) -> None:
        """Asks the kernel what connections have taken and sent. Those that have ended are passed over."""
        for descriptor in descriptors:
            if (one := self._open.get(descriptor)) is not None:
                self._count_unfinished(one, self._ask_kernel(descriptor, one), drained)

    def _ask_kernel(self, descriptor: int, connection: Connection) -> int:
        """Notes how many bytes a connection has taken; returns how many have come from it."""
        acked, received = self._borrowed.ask_kernel(descriptor, connection)
        if acked != connection.num_acked or connection.num_sent - acked < UNREAD_BYTES:
            connection.num_acked, connection.acked_at = acked, self._clock()
        return received

    def _count_unfinished(self, connection: Connection, num_received: int, drained: bool) -> None:
        """Updates the bytes of a connection that are not read, and those that are known to be unfinished."""
        connection.unread = left = max(0, num_received - connection.num_read)
        look = connection.look
        if drained:
            connection.unfinished = left
        # A message was read from it since the last look: what it holds now may be whole.
        elif look is None or look.num_read != connection.num_read:
            connection.unfinished = 0
        # All others have had their turn since the last look: what it held then was not whole.
        elif self._num_read - look.at > self._turn_length:
            connection.unfinished = look.unread
        else:
            return
        connection.look = Look(self._num_read, connection.num_read, left)

    def shut_down_deaf(self) -> list[int]:
        """Ends the connections that do not take their answers; returns the bytes that waited for each.

        That is: too many bytes wait for it, or it has taken nothing for long. Where too many wait for all
        connections together, those go for which most wait. Who seems to be deaf is asked about once more,
        because it may have taken much since `shut_down_unfinished` has looked.
        """
        is_over = sum(one.num_sent - one.num_acked for one in self._open.values()) > self._max_total_unread
        for descriptor, one in self._open.items():
            if is_over or self._is_deaf(one):
                self._ask_kernel(descriptor, one)
        waiting = {descriptor: one.num_sent - one.num_acked for descriptor, one in self._open.items()}
        found = {
            descriptor: waiting[descriptor] for descriptor, one in self._open.items() if self._is_deaf(one)
        }
        total = sum(waiting.values()) - sum(found.values())
        if total > self._max_total_unread:
            for descriptor in sorted(waiting.keys() - found.keys(), key=waiting.__getitem__, reverse=True):
                if total > self._max_total_unread:
                    total -= waiting[descriptor]
                    found[descriptor] = waiting[descriptor]
        return [left for descriptor, left in found.items() if self.shut_down(descriptor)]

    def _is_deaf(self, connection: Connection) -> bool:
        left = connection.num_sent - connection.num_acked
        return left > self._max_unread or (
            left >= UNREAD_BYTES and self._clock() - connection.acked_at > UNREAD_S
        )

    def shut_down_surplus(self) -> int:
        """Ends connections where there are too many; returns how many.

        First those go that have never sent a message, the oldest of them first, then the newest.
        """
        surplus = len(self._open) - self._max_open
        if surplus <= 0:
            return 0
        silent = [descriptor for descriptor, one in self._open.items() if not one.sender]
        newest = [descriptor for descriptor, one in reversed(self._open.items()) if one.sender]
        return sum(self.shut_down(descriptor) for descriptor in (silent + newest)[:surplus])

    def take_gone(self, *, drained: bool, busy: Container[bytes] = ()) -> list[bytes]:
        """Returns senders whose connection has ended and of whom nothing more is to come, each once.

        `busy` have messages that were read and are not handled.
        """
        most = 2 * (2 + self._max_waiting) * (len(self._open) + POLL_RATE)
        # ZeroMQ's thread hands on the last messages a moment after it has told of the end.
        settled = self._clock() - GONE_S
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
    def _turn_length(self) -> int:
        """Messages after which every connection that has a whole one has been read from."""
        return 2 * (len(self._open) + len(self._gone) + POLL_RATE)

    def _free_memory(self) -> None:
        """Gives the pages of ended connections back to the system.

        ZeroMQ's thread frees the frames of an unfinished message one by one, a moment after its connection
        has ended, and the C library would keep their pages. So this is done at several looks in a row.
        """
        if self._trims:
            self._trims -= 1
            give_back_freed_memory()

    def _read_events(self) -> None:
        """Reads from ZeroMQ which connections have come and gone."""
        while True:
            try:
                event = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            descriptor = int(event["value"])
            self._remove_connection(descriptor)
            if event["event"] == zmq.EVENT_ACCEPTED and event["endpoint"].startswith(b"tcp"):
                with contextlib.suppress(OSError):  # the connection is gone already
                    self._open[descriptor] = Connection(os.fstat(descriptor).st_ino, acked_at=self._clock())


def find_descriptor(frame: zmq.Frame) -> int:
    """Returns the file descriptor of the connection that a frame came by; -1 for a protocol from before 2013,
    which does not tell."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


class BorrowedDescriptor:
    """A descriptor of this process's own onto one of ZeroMQ's connections at a time.

    ZeroMQ may close its descriptor at any moment, and another file may get the number then. A duplicate stays
    with the connection, and its inode tells whether it is the right one. It has always the same number, so
    that it is there when the process has no other left.
    """

    def __init__(self) -> None:
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._descriptor = os.dup(self._nothing)

    def close(self) -> None:
        os.close(self._nothing)
        os.close(self._descriptor)

    def ask_kernel(self, descriptor: int, connection: Connection) -> tuple[int, int]:
        """Returns (bytes that the other side has taken, bytes that have come from it).

        Where the connection is gone, these are the bytes counted here, so that nothing seems to be missing.
        """
        with self._borrow_socket(descriptor, connection) as borrowed, contextlib.suppress(OSError):
            if borrowed is not None:
                info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED + 8)
                if len(info) == BYTES_RECEIVED + 8:  # a kernel older than 4.1 returns fewer bytes
                    acked, received = struct.unpack_from("<QQ", info, BYTES_ACKED)
                    return int(acked), int(received)
        return connection.num_sent, connection.num_read

    def shut_down(self, descriptor: int, connection: Connection) -> None:
        """Ends a connection. ZeroMQ notices, as if the other side had ended it."""
        with self._borrow_socket(descriptor, connection) as borrowed, contextlib.suppress(OSError):
            if borrowed is not None:
                borrowed.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _borrow_socket(self, descriptor: int, connection: Connection) -> Iterator[socket.socket | None]:
        """Yields the connection's socket; None where the descriptor is closed, or another's by now."""
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
            # Given back at once: while a duplicate is open, the connection would outlive ZeroMQ's closing of
            # it.
            os.dup2(self._nothing, self._descriptor, inheritable=False)


def watch_small_requests(server: "zmq.Socket[bytes]", *, encrypted: bool, max_unread: int) -> Connections:
    """Watches a server whose requests have a few frames of a few kB, such as a server of weights."""
    return Connections(
        server,
        encrypted=encrypted,
        max_message=64 << 10,
        max_waiting=int(server.getsockopt(zmq.RCVHWM)),
        max_total=256 << 20,
        max_unread=max_unread,
    )
