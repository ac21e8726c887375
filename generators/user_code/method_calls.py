"""Calls of a task's methods, and their answers, as frames on the socket between generator and worker.

A frame is a header of four bytes, which is the body's length, and a body in msgpack. A worker encodes its
answer itself, so a value that cannot be encoded is the worker's error.
"""

import socket
from typing import Any

import msgspec

MAX_BODY = 16 << 20
"""Bytes in the body of a frame."""
HEADER_BYTES = 4


class MethodCall(msgspec.Struct, tag=True, array_like=True):
    number: int
    """The answer carries it too."""
    method: str
    arguments: list[Any]


class MethodValue(msgspec.Struct, tag=True, array_like=True):
    """The method has returned."""

    number: int
    value: Any
    is_spent: bool = False
    """True when the task's code has left so many processes in the worker that another takes its place."""


class MethodError(msgspec.Struct, tag=True, array_like=True):
    """The method has raised, or its value could not be encoded."""

    number: int
    error: str
    detail: str
    """The end of the traceback."""
    is_out_of_memory: bool


MethodAnswer = MethodValue | MethodError
_answer_decoder = msgspec.msgpack.Decoder(MethodAnswer)
_call_decoder = msgspec.msgpack.Decoder(MethodCall)


def encode_frame(message: MethodCall | MethodAnswer) -> bytes:
    """Raises ValueError for a message of more than `MAX_BODY` bytes, and what msgspec raises for a value that
    msgpack cannot hold."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_BODY:
        raise ValueError(f"a call's values must be at most {MAX_BODY} bytes, got {len(body)}")
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def parse_header(header: bytes) -> int:
    """Returns the length of the body. Raises ValueError when it is beyond `MAX_BODY`."""
    if (num_bytes := int.from_bytes(header, "big")) > MAX_BODY:
        raise ValueError(f"a frame must be at most {MAX_BODY} bytes, got {num_bytes}")
    return num_bytes


def decode_answer(body: bytes) -> MethodAnswer:
    """Raises ValueError for a body that is no answer."""
    try:
        return _answer_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"a worker's answer must be a frame of this protocol, got {error}") from error


def read_call(connection: socket.socket) -> MethodCall | None:
    """Waits for a call. Returns None when the other end is closed."""
    header = _read_bytes(connection, HEADER_BYTES)
    body = header and _read_bytes(connection, parse_header(header))
    return _call_decoder.decode(body) if body else None


def _read_bytes(connection: socket.socket, count: int) -> bytes:
    """Returns nothing when the other end closes before `count` bytes have come."""
    received = bytearray()
    while len(received) < count:
        if not (chunk := connection.recv(min(count - len(received), 1 << 20))):
            return b""
        received += chunk
    return bytes(received)
