"""A role's end of the conversation with the buffer: numbered requests out, answers in, in any order."""

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import pyarrow as pa
import zmq

from buffers import messages as m

R = TypeVar("R", bound=m.Struct)


class BufferGone(RuntimeError):
    """The buffer has not answered in time."""


class RefusedByBuffer(RuntimeError):
    """The buffer would not do what was asked."""


@dataclass(frozen=True, slots=True)
class Answer:
    number: int
    reply: m.Reply
    payload: memoryview | None


class BufferClient:
    """Not thread-safe: one client a thread."""

    def __init__(self, address: str, *, timeout_s: float = 60.0) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._heard_at = time.monotonic()
        self._numbers = itertools.count()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.connect(address)

    def post(self, request: m.Request, payload: pa.Buffer | None = None) -> int:
        """Sends without waiting; `receive` gives the answer, under the number returned."""
        number = next(self._numbers)
        frames = [number.to_bytes(8, "little"), m.encoder.encode(request)]
        self._socket.send_multipart([*frames, payload] if payload is not None else frames, copy=payload is None)
        return number

    @property
    def silent_s(self) -> float:
        """Seconds since the buffer was last heard."""
        return time.monotonic() - self._heard_at

    def receive(self, wait_s: float) -> Iterable[Answer]:
        """Answers that are there; waits up to `wait_s` for the first."""
        if not self._socket.poll(int(wait_s * 1000)):
            return
        while True:
            try:
                number, body, *payload = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._heard_at = time.monotonic()
            yield Answer(
                int.from_bytes(number.bytes, "little"),
                m.reply_decoder.decode(body.buffer),
                payload[0].buffer if payload else None,
            )

    def call(self, request: m.Request, expect: type[R], *, wait_s: float = 0.0) -> R:
        """Sends and waits for the answer, `wait_s` longer than usual where the buffer may take that long to answer."""
        reply, _ = self.exchange(request, wait_s=wait_s)
        if isinstance(reply, m.Refused):
            raise RefusedByBuffer(reply.reason)
        assert isinstance(reply, expect), reply
        return reply

    def exchange(self, request: m.Request, *, wait_s: float = 0.0) -> tuple[m.Reply, memoryview | None]:
        number = self.post(request)
        deadline = time.monotonic() + self._timeout_s + wait_s
        while (left := deadline - time.monotonic()) > 0:
            for answer in self.receive(left):
                if answer.number == number:
                    return answer.reply, answer.payload
        raise BufferGone(
            f"no answer from the buffer at {self.address} to {type(request).__name__} in {self._timeout_s} s"
        )

    def close(self) -> None:
        self._socket.close()
