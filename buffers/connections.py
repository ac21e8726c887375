"""The TCP connections of a server's socket: how much of what they have sent is not part of a whole message yet, and how much of
what they were sent they have not taken.

ZeroMQ hands out whole messages only, and keeps the frames of one that never ends without any limit; it counts answers that wait
for their reader, and not their bytes. So what the kernel says has gone through a connection (TCP_INFO) is compared with what was
read from it and given to it here. A connection that has too much between the two is shut down.
"""

import contextlib
import itertools
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

BYTES_ACKED, BYTES_RECEIVED = 120, 128
"""The places of `tcpi_bytes_acked` and `tcpi_bytes_received`, a uint64 each, in Linux's struct tcp_info."""
CURVE_BYTES = 33
"""Of a frame that travels encrypted: name of the command, nonce, flags, authenticator."""
SLACK_BYTES = 16 << 20
"""For the handshake, and for what is in the kernel's buffers."""

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


class Connections:
    def __init__(
        self, server: "zmq.Socket[bytes]", *, encrypted: bool, max_message: int, max_waiting: int, max_total: int,
        max_unread: int,
    ) -> None:  # fmt: skip
        """Watches a socket that is not bound yet. `max_message` bounds a message, `max_waiting` the whole messages of a
        connection that ZeroMQ keeps for the server, `max_total` the bytes of all connections' unfinished messages, and
        `max_unread` the bytes of answers that a connection has not taken."""
        self._max_message, self._max_waiting, self._max_total = max_message, max_waiting, max_total
        self._max_unread = max_unread
        self._by_sender: dict[bytes, Connection] = {}
        self._overhead = CURVE_BYTES if encrypted else 0
        self._open: dict[int, Connection] = {}
        self._server = server
        address = f"inproc://connections-{next(_numbers)}"
        server.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._events: zmq.Socket[bytes] = server.context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.RCVHWM, 0)  # ZeroMQ's own thread would wait for a full queue
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.connect(address)

    def close(self) -> None:
        self._server.disable_monitor()
        self._events.close()

    def count(self, frames: list[zmq.Frame]) -> None:
        """Notes that a message was read. Its first frame, the sender, has not travelled."""
        descriptor = descriptor_of(frames[-1])
        connection = self._open.get(descriptor)
        if connection is None:
            self._notice()
            connection = self._open.get(descriptor)
        if connection is not None:
            connection.num_read += self._wire_bytes(frames)
            if not connection.sender:
                connection.sender = frames[0].bytes
                self._by_sender[connection.sender] = connection

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
            self._by_sender.pop(connection.sender, None)
        return connection

    def shut_down(self, descriptor: int) -> bool:
        """Ends a connection, as if the other side had; true if there was one."""
        connection = self._remove(descriptor)
        if connection is None:
            return False
        if (borrowed := _borrow(descriptor, connection.inode)) is not None:
            with borrowed, contextlib.suppress(OSError):
                borrowed.shutdown(socket.SHUT_RDWR)
        return True

    def shut_down_unfinished(self, *, drained: bool) -> list[int]:
        """Ends the connections that have sent too much of a message, or of messages that are unfinished together; returns the
        bytes of each. `drained`: all whole messages have been read, so that what is left is unfinished."""
        self._notice()
        unread = {fd: left for fd, connection in self._open.items() if (left := _count_unread(fd, connection)) > 0}
        most = self._max_message * (1 if drained else 1 + self._max_waiting) + SLACK_BYTES
        total, found = sum(unread.values()), []
        for descriptor, left in sorted(unread.items(), key=lambda item: -item[1]):
            if left <= most and not (drained and total > self._max_total):
                break
            total -= left
            self.shut_down(descriptor)
            found.append(left)
        return found

    def shut_down_deaf(self) -> list[int]:
        """Ends the connections that do not take their answers; returns the bytes that waited for each."""
        waiting = {fd: one.num_sent - _ask_kernel(fd, one)[0] for fd, one in self._open.items() if one.num_sent}
        found = {fd: left for fd, left in waiting.items() if left > self._max_unread}
        return [left for fd, left in found.items() if self.shut_down(fd)]

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
                    self._open[descriptor] = Connection(os.fstat(descriptor).st_ino)


def descriptor_of(frame: zmq.Frame) -> int:
    """By which connection a frame came; -1 where its sender speaks a protocol of before 2013, which does not tell."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def _count_unread(descriptor: int, connection: Connection) -> int:
    """Bytes that have come by a connection and were not read."""
    return _ask_kernel(descriptor, connection)[1] - connection.num_read


def _ask_kernel(descriptor: int, connection: Connection) -> tuple[int, int]:
    """(bytes that the other side has taken, bytes that have come from it); where the connection is gone, those counted here."""
    if (borrowed := _borrow(descriptor, connection.inode)) is not None:
        with borrowed, contextlib.suppress(OSError):
            info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED + 8)
            if len(info) == BYTES_RECEIVED + 8:  # else a kernel older than 4.1
                acked, received = struct.unpack_from("<QQ", info, BYTES_ACKED)
                return int(acked), int(received)
    return connection.num_sent, connection.num_read


def _borrow(descriptor: int, inode: int) -> socket.socket | None:
    """A socket of one's own on ZeroMQ's connection; None where the descriptor is another's by now."""
    try:
        borrowed = socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return None
    if os.fstat(borrowed.fileno()).st_ino == inode:
        return borrowed
    borrowed.close()
    return None


def watch_small_requests(server: "zmq.Socket[bytes]", *, encrypted: bool) -> Connections:
    """Watches a server whose requests are of a few frames of a few kB: one that serves weights."""
    return Connections(
        server, encrypted=encrypted, max_message=64 << 10, max_waiting=int(server.getsockopt(zmq.RCVHWM)), max_total=256 << 20,
        max_unread=1 << 62,
    )  # fmt: skip
