"""The messages between generator, guard and template: orders to start and kill processes, and the answers.

They travel over sockets that keep messages whole. File descriptors travel with them.
"""

import socket
from collections.abc import Sequence
from typing import Any

import msgspec

MAX_ORDER = 128 << 10
"""Bytes in one message. The kernel takes no larger ones than 200 KB by default."""
MAX_DESCRIPTORS = 4


class StartTemplate(msgspec.Struct, tag=True):
    """Imports the task in a new process. One descriptor travels with it: where output goes."""

    target: str
    """`task.name`."""
    args: dict[str, Any]
    memory_mb: int


class KillTemplate(msgspec.Struct, tag=True):
    """Kills the template. Workers that it has started live on."""


class StartWorker(msgspec.Struct, tag=True):
    """Forks a worker. Two descriptors travel with it: the worker's socket, and where output goes."""

    number: int
    """The answer carries it too."""


class KillWorker(msgspec.Struct, tag=True):
    """Kills a worker and all its descendants. `ProcessEnded` answers when they are gone."""

    pid: int


class GuardStarted(msgspec.Struct, tag=True):
    pid: int


class TemplateStarted(msgspec.Struct, tag=True):
    """The task is imported and made, so workers can be started."""


class TemplateFailed(msgspec.Struct, tag=True):
    """The task could not be imported or made."""

    error: str
    """It names `task.name` or `task.args`, the rule and the value."""
    detail: str


class WorkerStarted(msgspec.Struct, tag=True):
    number: int
    pid: int


class WorkerNotStarted(msgspec.Struct, tag=True):
    number: int
    error: str
    needs_template: bool = False
    """True when the template has ended, so that another one can do it."""


class TemplateEnded(msgspec.Struct, tag=True):
    status: int
    """Exit code, or the negative number of the signal."""


class ProcessEnded(msgspec.Struct, tag=True):
    """A worker is gone, with all its descendants."""

    pid: int
    status: int
    """Exit code, or the negative number of the signal."""


Order = StartTemplate | KillTemplate | StartWorker | KillWorker
Notice = (
    GuardStarted
    | TemplateStarted
    | TemplateFailed
    | WorkerStarted
    | WorkerNotStarted
    | TemplateEnded
    | ProcessEnded
)
_decoder = msgspec.msgpack.Decoder(Order | Notice)


def encode_order(message: Order | Notice) -> bytes:
    """Raises ValueError for a message of more than `MAX_ORDER` bytes."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_ORDER:
        raise ValueError(f"an order must be at most {MAX_ORDER} bytes, got {len(body)}")
    return body


def decode_order(body: bytes) -> Order | Notice:
    return _decoder.decode(body)


def send_order(link: socket.socket, message: Order | Notice, descriptors: Sequence[int] = ()) -> None:
    socket.send_fds(link, [encode_order(message)], list(descriptors))


def receive_order(link: socket.socket) -> tuple[Order | Notice | None, list[int]]:
    """Returns a message and the descriptors that came with it; no message when the other end is closed."""
    body, descriptors, _, _ = socket.recv_fds(link, MAX_ORDER, MAX_DESCRIPTORS)
    return (decode_order(body) if body else None), descriptors
