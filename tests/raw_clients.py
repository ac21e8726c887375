"""Connections that speak ZeroMQ's protocol by hand, so that a test may break it."""

import socket


def open_raw_client(port: int, room: int | None = None) -> socket.socket:
    """Opens a connection that has greeted as a DEALER without keys (ZMTP 3.0).

    `room`: bytes of the kernel's receive buffer.
    """
    connection = socket.socket()
    if room is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    connection.settimeout(5.0)
    connection.connect(("127.0.0.1", port))
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
    connection.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
    while b"READY" not in connection.recv(4096):
        pass
    return connection
