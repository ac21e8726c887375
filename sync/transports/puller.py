"""The asking side of weights over ZeroMQ: questions to a publisher or a relay, and bytes of files as fast as
they arrive.

The size of the chunks follows the link: it is doubled while chunks arrive quickly and halved while they
arrive slowly. So a chunk arrives every now and then on any link, and a silence means that nobody is there.
"""

import contextlib
import random
import time
from collections import deque
from collections.abc import Callable

import zmq

from sync.announcement import TransferFailed
from sync.transports import messages
from sync.transports.ends import SecureSocket
from sync.transports.messages import (
    MAX_REPLY_BYTES,
    UNREADABLE,
    Chunk,
    ChunkPending,
    FileGone,
    GetChunk,
    Reply,
    Request,
    TransferRefused,
    encode,
    replies,
)

WINDOW = 8
"""Number of chunks that are asked for and have not arrived yet: enough to fill a link of 10 GB/s and 3 ms."""
FIRST_BYTES, LEAST_BYTES = 1 << 14, 1 << 12
"""Size of the first chunk that a server is asked for, and of the smallest. Over 80 kbit/s the first takes
less than two seconds: a relay is given up after five."""
MAX_CONNECTIONS = 16
"""Connections that a host keeps. In a large run it asks another relay for nearly every file."""
FAST_S, SLOW_S = 0.05, 0.5
"""Seconds between two chunks: below the first they are made larger, above the second smaller."""

ByteRange = tuple[int, int]
"""Where bytes of a file begin and end."""
KeepBytes = Callable[[int, memoryview], None]
"""Stores bytes of a file, given where they begin."""


class SilentServer(TransferFailed):
    """Nobody answers."""


class LackingServer(TransferFailed):
    """The server answers, but has the file no more, or waits for its bytes itself."""


class ChunkPace:
    """How much one server is asked for: one small chunk at first, then chunks of a size that arrives in good
    time."""

    def __init__(self) -> None:
        self._chunk_bytes, self.window = FIRST_BYTES, 1

    @property
    def chunk_bytes(self) -> int:
        """Bytes to ask for at a time."""
        return min(messages.CHUNK_BYTES, self._chunk_bytes)

    def note_chunk(self, took_s: float) -> None:
        """A chunk has arrived, so many seconds after the one before."""
        self.window = WINDOW
        if took_s < FAST_S:
            self._chunk_bytes = 2 * self.chunk_bytes
        elif took_s > SLOW_S:
            self._chunk_bytes = max(LEAST_BYTES, self.chunk_bytes // 2)

    def note_silence(self) -> None:
        self._chunk_bytes, self.window = max(LEAST_BYTES, self.chunk_bytes // 4), 1


class Puller:
    """Connections to a publisher and to relays. Not thread-safe."""

    def __init__(self, secure: SecureSocket | None = None) -> None:
        self._secure = secure
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        """By address, as `_paces`; the one that was used last at the end."""
        self._paces: dict[str, ChunkPace] = {}

    def close(self) -> None:
        for socket in self._sockets.values():
            socket.close(linger=0)
        self._context.term()

    def ask_server(self, address: str, question: Request, timeout_s: float) -> Reply:
        """Returns the answer. Raises TransferFailed after a silence, or when the question is refused."""
        self._connect_to(address).send(encode(question))
        return self._receive_reply(address, question.name, timeout_s)[0]

    def pull_ranges(
        self,
        address: str,
        name: str,
        missing: list[ByteRange],
        keep: KeepBytes,
        *,
        silence_s: float,
        stall_s: float,
        is_outpaced: Callable[[float], bool] | None = None,
    ) -> None:
        """Asks for ranges of a file in order, a window of chunks at a time, and hands what arrives to `keep`.

        Raises TransferFailed when the file is gone, when nothing at all has been heard for `silence_s`, or
        when no byte has arrived for `stall_s` from a relay that says that it is still fetching, or when
        `is_outpaced` is true of the bytes a second so far. It is asked after one to two `stall_s`, and again
        each time that four times as long has gone by. Whatever was handed to `keep` stays.
        """
        socket, pace = self._connect_to(address), self._pace_of(address)
        left, asked = deque(each for each in missing if each[0] < each[1]), dict[int, int]()
        began = arrived_at = time.monotonic()
        # By chance, so that of the hosts behind a slow relay few look for another before one has found it.
        num_bytes, judged_after_s = 0, stall_s * random.uniform(1, 2)
        while left or asked:
            while left and len(asked) < pace.window:
                begin, end = left.popleft()
                stop = min(end, begin + pace.chunk_bytes)
                socket.send(encode(GetChunk(name, begin, stop - begin)))
                asked[begin] = stop
                if stop < end:
                    left.appendleft((stop, end))
            reply, data = self._receive_reply(address, name, silence_s)
            if isinstance(reply, Chunk) and 0 < len(data) <= asked.get(reply.offset, 0) - reply.offset:
                keep(reply.offset, data)
                num_bytes += len(data)
                pace.note_chunk(time.monotonic() - arrived_at)
                arrived_at = time.monotonic()
                # A relay may send fewer bytes than asked for; the rest is asked for again.
                end, arrived = asked.pop(reply.offset), reply.offset + len(data)
                if arrived < end:
                    left.appendleft((arrived, end))
                took_s = arrived_at - began
                if is_outpaced is not None and took_s > judged_after_s:
                    judged_after_s = 4 * took_s
                    if is_outpaced(num_bytes / took_s):
                        self.drop_connection(address)
                        raise TransferFailed(
                            f"only {num_bytes:,} bytes of {name} have come from {address} in {took_s:.1f} s"
                        )
                    arrived_at = time.monotonic()
            elif (
                isinstance(reply, ChunkPending)
                and reply.offset in asked
                and time.monotonic() - arrived_at < stall_s
            ):
                left.appendleft((reply.offset, asked.pop(reply.offset)))
            else:
                self.drop_connection(address)
                is_lacking = isinstance(reply, FileGone | ChunkPending)
                failure = LackingServer if is_lacking else TransferFailed
                raise failure(_describe_problem(address, name, reply, len(data)))

    def read_file(self, address: str, name: str, most: int, timeout_s: float) -> bytearray:
        """Returns a whole file of at most so many bytes. Raises TransferFailed."""
        self._connect_to(address).send(encode(GetChunk(name, 0, self._pace_of(address).chunk_bytes)))
        reply, first = self._receive_reply(address, name, timeout_s)
        if not isinstance(reply, Chunk) or reply.offset or not 0 < len(first) <= reply.total <= most:
            self.drop_connection(address)
            raise TransferFailed(_describe_problem(address, name, reply, len(first)))
        data = bytearray(reply.total)

        def keep_piece(offset: int, piece: memoryview) -> None:
            data[offset : offset + len(piece)] = piece

        keep_piece(0, first)
        missing = [(len(first), len(data))]
        self.pull_ranges(address, name, missing, keep_piece, silence_s=timeout_s, stall_s=timeout_s)
        return data

    def drop_connection(self, address: str) -> None:
        """Closes the socket, so that an answer that is still on its way is not taken for the answer to a
        later question."""
        if address in self._sockets:
            self._sockets.pop(address).close(linger=0)

    def _pace_of(self, address: str) -> ChunkPace:
        return self._paces.setdefault(address, ChunkPace())

    def _receive_reply(self, address: str, name: str, timeout_s: float) -> tuple[Reply, memoryview]:
        """Returns the next answer about `name`, and its bytes. Raises TransferFailed after a silence, or when
        it was refused."""
        socket = self._connect_to(address)
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0 and socket.poll(int(1000 * left_s) + 1):
            header, *payload = socket.recv_multipart(copy=False)
            with contextlib.suppress(*UNREADABLE):
                reply = replies.decode(header.buffer)
                if isinstance(reply, TransferRefused):
                    self.drop_connection(address)
                    raise TransferFailed(f"{address} refuses {name}: {reply.reason}")
                if reply.name == name:
                    return reply, payload[0].buffer if payload else memoryview(b"")
        self.drop_connection(address)
        self._pace_of(address).note_silence()
        raise SilentServer(f"nobody has answered at {address} for {timeout_s} s")

    def _connect_to(self, address: str) -> "zmq.Socket[bytes]":
        """Raises SilentServer for an address to which there is no way, such as another host may name."""
        socket = self._sockets.pop(address, None)
        if socket is None:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
            if self._secure is not None:
                self._secure(socket)
            try:
                socket.connect(address)
            except zmq.ZMQError as error:
                socket.close()
                raise SilentServer(f"nobody can be asked at {address}: {error.strerror}") from error
        self._sockets[address] = socket
        while len(self._sockets) > MAX_CONNECTIONS:
            self.drop_connection(next(iter(self._sockets)))
        return socket


def _describe_problem(address: str, name: str, reply: Reply, num_bytes: int) -> str:
    match reply:
        case FileGone():
            return f"{name} is gone at {address}"
        case ChunkPending():
            return f"nothing more of {name} has come to {address}, which is fetching it itself"
        case Chunk():
            return f"{address} sent {num_bytes} bytes at {reply.offset} of {name}, which were not asked for"
    return f"{address} answered something else when it was asked for {name}"
