"""The asking side of weights over ZeroMQ: questions to a publisher or a relay, and bytes of files as fast as they come.

How much is asked for at a time follows the link: it is doubled while chunks come quickly and halved while they come slowly, so that
a chunk comes every now and then on any link, and a silence means that nobody is there.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable

import zmq

from sync.transports import tcp
from sync.transports.tcp import (
    MAX_REPLY_BYTES,
    UNREADABLE,
    Chunk,
    ChunkPending,
    FileGone,
    GetChunk,
    Reply,
    Request,
    Secure,
    TransferRefused,
    encode,
    replies,
)

WINDOW = 8
"""Chunks asked for and not come yet: enough to fill a link of 10 GB/s and 3 ms."""
FIRST_BYTES, LEAST_BYTES = 1 << 16, 1 << 12
"""Asked for at a time: of a server that is new, and at least."""
FAST_S, SLOW_S = 0.05, 0.5
"""Chunks that come closer together are made larger, those that come further apart smaller."""

Range = tuple[int, int]
"""Where bytes of a file begin and end."""


class TransferFailed(FileNotFoundError):
    """The snapshot could not be brought here: nobody answers, or it is gone. What has come is kept, and a later try goes on."""


class SilentServer(TransferFailed):
    """Nobody answers."""


class ChunkPace:
    """How much is asked of one server: one small chunk at first, then as much as comes in good time."""

    def __init__(self) -> None:
        self._size, self.window = FIRST_BYTES, 1

    @property
    def chunk_bytes(self) -> int:
        """Bytes to be asked for at a time."""
        return min(tcp.CHUNK_BYTES, self._size)

    def note_chunk(self, took_s: float) -> None:
        """A chunk has come, so long after the one before."""
        self.window = WINDOW
        if took_s < FAST_S:
            self._size = 2 * self.chunk_bytes
        elif took_s > SLOW_S:
            self._size = max(LEAST_BYTES, self.chunk_bytes // 2)

    def note_silence(self) -> None:
        self._size, self.window = max(LEAST_BYTES, self.chunk_bytes // 4), 1


class Puller:
    """Not thread-safe."""

    def __init__(self, secure: Secure | None = None) -> None:
        self._secure = secure
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._paces: dict[str, ChunkPace] = {}
        """By address."""

    def close(self) -> None:
        for socket in self._sockets.values():
            socket.close(linger=0)
        self._context.term()

    def ask_server(self, address: str, question: Request, timeout_s: float) -> Reply:
        """The answer. Raises TransferFailed after a silence, or when it is refused."""
        self._connect_to(address).send(encode(question))
        return self._receive_reply(address, question.name, timeout_s)[0]

    def pull_ranges(
        self,
        address: str,
        name: str,
        missing: list[Range],
        keep: Callable[[int, memoryview], None],
        *,
        silence_s: float,
        stall_s: float,
        least_bytes: float = 0,
    ) -> None:
        """Asks for ranges of a file in order, a window of chunks at a time, and hands to `keep` what comes: (offset, bytes).

        Raises TransferFailed when the file is gone, when nothing at all has been heard for `silence_s`, or when no byte has come
        for `stall_s` from a relay that says that it is still fetching; SilentServer when fewer than `least_bytes` come in `stall_s`. What was
        handed to `keep` counts as come.
        """
        socket, pace = self._connect_to(address), self._pace_of(address)
        left, asked = deque(each for each in missing if each[0] < each[1]), dict[int, int]()
        came = judged_at = time.monotonic()
        num_bytes = 0
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
                pace.note_chunk(time.monotonic() - came)
                came = time.monotonic()
                if came - judged_at > stall_s:
                    if num_bytes < least_bytes and (left or len(asked) > 1):
                        self.drop_connection(address)
                        raise SilentServer(
                            f"only {num_bytes:,} bytes of {name} have come from {address} in {stall_s} s"
                        )
                    judged_at, num_bytes = came, 0
                end, come = asked.pop(reply.offset), reply.offset + len(data)
                if come < end:
                    left.appendleft((come, end))
            elif (
                isinstance(reply, ChunkPending)
                and reply.offset in asked
                and time.monotonic() - came < stall_s
            ):
                left.appendleft((reply.offset, asked.pop(reply.offset)))
            else:
                self.drop_connection(address)
                raise TransferFailed(_describe_problem(address, name, reply, len(data)))

    def read_file(self, address: str, name: str, most: int, timeout_s: float) -> bytearray:
        """A whole file of at most so many bytes. Raises TransferFailed."""
        self._connect_to(address).send(encode(GetChunk(name, 0, self._pace_of(address).chunk_bytes)))
        reply, first = self._receive_reply(address, name, timeout_s)
        if not isinstance(reply, Chunk) or reply.offset or not 0 < len(first) <= reply.total <= most:
            self.drop_connection(address)
            raise TransferFailed(_describe_problem(address, name, reply, len(first)))
        data = bytearray(reply.total)

        def keep(offset: int, piece: memoryview) -> None:
            data[offset : offset + len(piece)] = piece

        keep(0, first)
        self.pull_ranges(
            address, name, [(len(first), len(data))], keep, silence_s=timeout_s, stall_s=timeout_s
        )
        return data

    def drop_connection(self, address: str) -> None:
        """Answers that are still on their way must not be taken for those to a later question."""
        if address in self._sockets:
            self._sockets.pop(address).close(linger=0)

    def _pace_of(self, address: str) -> ChunkPace:
        return self._paces.setdefault(address, ChunkPace())

    def _receive_reply(self, address: str, name: str, timeout_s: float) -> tuple[Reply, memoryview]:
        """The next answer about `name`. Raises TransferFailed after a silence, or when the question was refused."""
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
        if address not in self._sockets:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
            if self._secure is not None:
                self._secure(socket)
            socket.connect(address)
            self._sockets[address] = socket
        return self._sockets[address]


def _describe_problem(address: str, name: str, reply: Reply, num_bytes: int) -> str:
    match reply:
        case FileGone():
            return f"{name} is gone at {address}"
        case ChunkPending():
            return f"nothing more of {name} has come to {address}, which is fetching it itself"
        case Chunk():
            return f"{address} sent {num_bytes} bytes at {reply.offset} of {name}, which were not asked for"
    return f"{address} answered something else when it was asked for {name}"
