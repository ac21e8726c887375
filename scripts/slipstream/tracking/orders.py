"""The messages between the driver and the process of a tracker: each order has one answer."""

import socket
import time
from typing import Any

import msgspec

from slipstream.tracking.tracker import SampleRow, TrackedRun

MAX_BYTES = 64 << 20
"""Bytes of a message."""
_HEAD = 4


class TrackerOrder(msgspec.Struct, tag=True, kw_only=True):
    """Base class of the orders."""


class OpenRun(TrackerOrder):
    """Make the tracker, and open the run. The first order."""

    target: str
    """The tracker's class."""
    args: dict[str, Any]
    """Keyword arguments of the class."""
    run: TrackedRun
    ledger: str
    """File that says what earlier lives of the run have given to this tracker."""

    @property
    def what(self) -> str:
        return "the beginning of the run"


class LogMetrics(TrackerOrder):
    step: int
    metrics: dict[str, float]
    is_evaluation: bool = False

    @property
    def what(self) -> str:
        if self.is_evaluation:
            return f"an evaluation of version {self.step}"
        return f"the metrics of step {self.step}"


class LogSamples(TrackerOrder):
    step: int
    samples: list[SampleRow]

    @property
    def what(self) -> str:
        return f"the samples of step {self.step}"


class CloseRun(TrackerOrder):
    """The last order."""

    status: str
    summary: dict[str, Any]
    files: list[str]

    @property
    def what(self) -> str:
        return "the end of the run"


AnyOrder = OpenRun | LogMetrics | LogSamples | CloseRun


class OrderTaken(msgspec.Struct, tag=True, kw_only=True):
    """The tracker has returned. `place` answers `OpenRun`."""

    place: str = ""
    was_known: bool = False
    """True where an earlier life of the run has given this record already; it was passed over."""


class OrderFailed(msgspec.Struct, tag=True, kw_only=True):
    """The tracker has raised."""

    error: str


Answer = OrderTaken | OrderFailed
_encoder = msgspec.msgpack.Encoder()
_order_decoder = msgspec.msgpack.Decoder(AnyOrder)
_answer_decoder = msgspec.msgpack.Decoder(Answer)


def send_message(link: socket.socket, message: AnyOrder | Answer) -> None:
    data = _encoder.encode(message)
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data):,} bytes, of {MAX_BYTES:,}")
    link.sendall(len(data).to_bytes(_HEAD, "little") + data)


def receive_order(link: socket.socket) -> AnyOrder | None:
    """Returns the next order; None when the driver is gone."""
    try:
        return _order_decoder.decode(_receive_message(link, None))
    except ConnectionError:
        return None


def receive_answer(link: socket.socket, deadline: float) -> Answer:
    """Raises TimeoutError at the deadline (of `time.monotonic`), ConnectionError when the process has ended,
    and msgspec.DecodeError for an answer that is none."""
    return _answer_decoder.decode(_receive_message(link, deadline))


def _receive_message(link: socket.socket, deadline: float | None) -> bytes:
    size = int.from_bytes(_receive_bytes(link, _HEAD, deadline), "little")
    if size > MAX_BYTES:
        raise msgspec.DecodeError(f"a message of {size} bytes")
    return _receive_bytes(link, size, deadline)


def _receive_bytes(link: socket.socket, size: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < size:
        if deadline is not None:
            link.settimeout(max(1e-3, deadline - time.monotonic()))
        if not (part := link.recv(min(size - len(data), 1 << 20))):
            raise ConnectionError("the other process has ended")
        data += part
        if deadline is not None and time.monotonic() > deadline and len(data) < size:
            raise TimeoutError
    return bytes(data)
