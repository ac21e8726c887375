"""Measures a link between two hosts over plain TCP: latency, clock offset, and bytes a second each way.

One host runs `LinkServer`, the other calls `measure_link`. The receiver times both directions, from the first
byte on: what a sender's buffers swallow does not count.
"""

import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

NUM_PINGS = 40
RECEIVED_S, SLOW_S = 0.5, 3.0
"""Seconds that a direction is measured for, and most of them for a link that is slow."""
STEADY_BYTES = 512 << 10
"""Bytes below which a lost packet decides the rate."""
SILENCE_S = 5.0
"""Seconds after which a peer that says nothing is given up."""
CHUNK_BYTES = 1 << 20
COOKIE_BYTES = 16
PING, SEND, RECEIVE = b"p", b"s", b"r"
"""Orders to a server: answer pings, send until the peer has enough, receive until there is enough."""
CLOCK = struct.Struct("!d")
RATE = struct.Struct("!Qd")


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    latency_s: float
    """Median time from a ping to its answer, there and back."""
    clock_offset_s: float
    """The other host's clock less this one's."""
    sent_bytes_per_s: float
    """From this host to the other."""
    received_bytes_per_s: float


class LinkServer:
    """Answers `measure_link` of hosts that know the cookie, until it is closed."""

    def __init__(self, host: str, cookie: bytes, ports: Iterable[int] = (0,)) -> None:
        """Listens on the first of `ports` that is free. Raises OSError when none is."""
        self._cookie = cookie
        self._listener = listen_on_first(host, ports)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept_peers, daemon=True, name="link-server").start()

    def close(self) -> None:
        # The thread that accepts does not wake up when the socket is only closed.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept_peers(self) -> None:
        with suppress(OSError):  # closed
            while True:
                peer, _ = self._listener.accept()
                threading.Thread(target=self._serve_peer, args=(peer,), daemon=True).start()

    def _serve_peer(self, peer: socket.socket) -> None:
        peer.settimeout(SILENCE_S)
        with peer, suppress(OSError):
            if not hmac.compare_digest(receive_exactly(peer, COOKIE_BYTES), self._cookie):
                return
            order = receive_exactly(peer, 1)
            if order == PING:
                answer_pings(peer)
            elif order == SEND:
                send_until_closed(peer)
            elif order == RECEIVE:
                peer.sendall(RATE.pack(*receive_a_while(peer)))
                receive_until_closed(peer)  # a reset would overtake the answer


def listen_on_first(host: str, ports: Iterable[int]) -> socket.socket:
    refusal: OSError | None = None
    for port in ports:
        try:
            return socket.create_server((host, port), backlog=64)
        except OSError as error:
            refusal = error
    raise refusal or OSError("no port is given")


def measure_link(
    address: tuple[str, int], cookie: bytes, now: Callable[[], float] = time.time
) -> MeasuredLink:
    """Measures the link to the server at `address`, in about a second. Raises OSError.

    `now` is this host's clock.
    """
    latency_s, offset_s = ping_server(address, cookie, now)
    with open_connection(address, cookie, RECEIVE) as peer:
        # What is not sent yet is dropped at the end: it would fill a slow link for seconds.
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        threading.Thread(target=send_until_closed, args=(peer,), daemon=True).start()
        num_bytes, seconds = RATE.unpack(receive_exactly(peer, RATE.size))
        sent = num_bytes / seconds
    with open_connection(address, cookie, SEND) as peer:
        num_bytes, seconds = receive_a_while(peer)
    return MeasuredLink(latency_s, offset_s, sent, num_bytes / seconds)


def open_connection(address: tuple[str, int], cookie: bytes, order: bytes) -> socket.socket:
    peer = socket.create_connection(address, SILENCE_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.sendall(cookie + order)
    return peer


def ping_server(address: tuple[str, int], cookie: bytes, now: Callable[[], float]) -> tuple[float, float]:
    """Returns the median round trip in seconds, and the offset of the server's clock as the fastest of them
    shows it."""
    trips = []
    with open_connection(address, cookie, PING) as peer:
        for _ in range(NUM_PINGS):
            began, clock = time.perf_counter(), now()
            peer.sendall(b"?")
            (there,) = CLOCK.unpack(receive_exactly(peer, CLOCK.size))
            taken = time.perf_counter() - began
            trips.append((taken, there - clock - taken / 2))
    return median(taken for taken, _ in trips), min(trips)[1]


def answer_pings(peer: socket.socket) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while peer.recv(1):
        peer.sendall(CLOCK.pack(time.time()))


def send_until_closed(peer: socket.socket) -> None:
    chunk = memoryview(bytes(CHUNK_BYTES))
    with suppress(OSError):
        while True:
            peer.sendall(chunk)


def receive_a_while(peer: socket.socket) -> tuple[int, float]:
    """Returns the number of bytes that came after the first ones, and their seconds. Raises OSError when
    nothing comes."""
    space = memoryview(bytearray(CHUNK_BYTES))
    if not peer.recv_into(space):
        raise ConnectionError("it has closed the connection")
    began, num_bytes, taken = time.perf_counter(), 0, 0.0
    while taken < RECEIVED_S or (num_bytes < STEADY_BYTES and taken < SLOW_S):
        if not (more := peer.recv_into(space)):
            raise ConnectionError("it has closed the connection")
        num_bytes += more
        taken = time.perf_counter() - began
    return num_bytes, taken


def receive_until_closed(peer: socket.socket) -> None:
    space = bytearray(CHUNK_BYTES)
    while peer.recv_into(space):
        pass


def receive_exactly(peer: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        if not (more := peer.recv(num_bytes - len(found))):
            raise ConnectionError("it has closed the connection")
        found += more
    return found


def pair_up(names: list[str]) -> list[list[tuple[str, str]]]:
    """Returns rounds of pairs in which each meets each other once, and nobody is in two pairs of a round."""
    circle: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(one, other) for one, other in pairs if one is not None and other is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds
