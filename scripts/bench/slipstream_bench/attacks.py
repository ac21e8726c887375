"""The attackers of `scripts/bench/fuzz.py`, and all that they send to a buffer."""

import itertools
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq

from buffers import messages as m
from buffers.trajectory import SCHEMA_VERSION, Trajectory, encode_batch, to_batch
from slipstream_bench.forge import Forge, damage, hand_made

STALLED_S = 2.0
"""A connection that takes nothing more for so long is looked at: has it been ended?"""
PATIENCE_S = 30.0
"""A request is taken in, and an honest one answered, within this time, however busy the machine is."""
ENDED, ENDLESS = "unfinished messages ended by the server", "messages that do not end"
LEARNERS_OWN = (
    m.PublishVersion
    | m.ReportTrainedStep
    | m.ReportCheckpoint
    | m.RewindToStep
    | m.StopRun
    | m.AwaitEvaluations
    | m.RequestBatch
)
"""Requests that only keys can forbid: where there are none, an attack that came out as a right one is not
sent."""


Show = Callable[["zmq.Socket[bytes]"], None]
"""Gives a socket its keys."""


class Attacker:
    """Sends to one server through a few connections, which it gives up and opens again, and reads the
    answers."""

    def __init__(self, address: str, rng: random.Random, show_key: Show | None = None) -> None:
        self.address, self._rng, self._show_key = address, rng, show_key
        self._sockets = [self._connect() for _ in range(6)]
        self.sent, self.answered = Counter[str](), Counter[str]()
        self._raw: list[socket.socket] = []

    def _connect(self) -> "zmq.Socket[bytes]":
        connection: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        connection.setsockopt(zmq.LINGER, 0)
        connection.setsockopt(zmq.SNDHWM, 200)
        connection.setsockopt(zmq.SNDTIMEO, int(PATIENCE_S * 1000))
        if self._show_key is not None:
            self._show_key(connection)
        connection.connect(self.address)
        return connection

    def send(self, kind: str, frames: list[bytes]) -> None:
        self.sent[kind] += 1
        self._rng.choice(self._sockets).send_multipart(frames)

    def read(self, decode: Callable[[bytes], Any] | None = None) -> Iterator[Any]:
        for connection in self._sockets:
            while connection.poll(0):
                frames = connection.recv_multipart()
                self.answered["answers"] += 1
                if decode is not None:
                    yield decode(frames[1])
        if self._rng.random() < 0.02:
            place = self._rng.randrange(len(self._sockets))
            self._sockets[place].close()
            self._sockets[place] = self._connect()

    def speak_no_zeromq(self) -> None:
        """A TCP connection with a broken greeting, or a right one and garbage after it; some stay open for
        a while."""
        self.sent["bytes that are no ZeroMQ"] += 1
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        data = self._rng.choice(
            [
                self._rng.randbytes(self._rng.randrange(1, 300)),
                greeting[: self._rng.randrange(64)],
                greeting,
                greeting + self._rng.randbytes(100),
                damage(greeting, self._rng, [greeting]),
                greeting + ready() + damage(ready(), self._rng, [greeting]),
                b"GET / HTTP/1.1\r\n\r\n",
                greeting + ready() + b"\x02" + b"\x7f" + b"\xff" * 7,
            ]
        )
        self._raw.append(self.open(data))
        while len(self._raw) > 50:
            self._raw.pop(0).close()

    def never_end_a_message(self, num_bytes: int, size: int = 65_536) -> None:
        """Frames of one message, each of which says that more follow, until enough is sent or the server
        has had enough."""
        self.sent[ENDLESS] += 1
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        connection = self.open(greeting + ready())
        header = b"\x03" + size.to_bytes(8, "big")  # long, and more follow
        frame = (header + bytes(size)) * max(1, 65_536 // size)
        connection.settimeout(STALLED_S)
        try:
            data = b""
            while b"READY" not in data and (more := connection.recv(4096)):
                data += more
            for _ in range(num_bytes // len(frame) + 1):
                connection.sendall(frame)
        except OSError:  # also a timeout: not every kernel wakes a sender whose connection has been reset
            pass
        self.answered[ENDED if self._is_ended(connection) else "unfinished messages taken in"] += 1
        connection.close()

    def _is_ended(self, connection: socket.socket) -> bool:
        """Whether the server's side of a connection is gone, or goes within `PATIENCE_S`."""
        host, port = connection.getsockname()
        there = f"{int.from_bytes(socket.inet_aton(host), 'little'):08X}:{port:04X} 01 "  # established
        deadline = time.monotonic() + PATIENCE_S
        while there in Path("/proc/net/tcp").read_text():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def open(self, data: bytes) -> socket.socket:
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        try:
            connection.sendall(data)
        except OSError:
            self.answered["connections ended by the server"] += 1
        return connection

    def close(self) -> None:
        for connection in self._sockets:
            connection.close()
        for raw in self._raw:
            raw.close()


def ready() -> bytes:
    properties = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
    return b"\x04" + bytes([len(properties)]) + properties


class BufferAttack:
    """Everything that is sent to the buffer."""

    def __init__(self, address: str, rng: random.Random, show_key: Show | None = None) -> None:
        self.attacker, self._rng, self._has_key = Attacker(address, rng, show_key), rng, show_key is not None
        self._forge = Forge(m.Request, rng, ["x", "stranger", "y" * 200])
        self._frames, self._numbers = hand_made(rng), itertools.count()
        self._leases: list[m.Lease] = [
            m.Lease(
                id=1, split="train", task="t", index=0, seed=0, group=0, due=0, min_version=0, num_samples=2
            )
        ]
        self._payloads = [
            encode_batch(to_batch(rows_of(self._leases[0], 0) * n)).to_pybytes() for n in (1, 3)
        ]
        self._corpus = [self._forge.right() for _ in range(300)]

    def strike(self) -> None:
        """One message."""
        rng, number = self._rng, next(self._numbers).to_bytes(8, "little")
        match rng.choices(
            ("forged", "damaged", "arrow", "leases", "frames", "bytes"), (45, 25, 18, 4, 7, 0.4)
        )[0]:
            case "forged":
                kind, body = self._forge.wrong()
                self._send(kind, number, body)
            case "damaged":
                self._send(
                    "real traffic, damaged", number, damage(rng.choice(self._corpus), rng, self._corpus)
                )
            case "arrow":
                self._hand_in(number)
            case "leases":
                body = m.encoder.encode(
                    m.RequestLeases(
                        generator="stranger", count=rng.randrange(3), wait_s=rng.choice([0.0, 0.05])
                    )
                )
                self.attacker.send("leases asked for", [number, body])
            case "frames":
                self.attacker.send("wrong frames", next(self._frames))
            case "bytes":
                self.attacker.speak_no_zeromq()

    def never_end_a_message(self) -> None:
        self.attacker.never_end_a_message(400 << 20)

    def listen(self) -> None:
        for reply in self.attacker.read(m.reply_decoder.decode):
            if isinstance(reply, m.LeaseGrant):
                self._leases = (self._leases + reply.leases)[-50:]

    def _send(self, kind: str, number: bytes, body: bytes) -> None:
        try:
            request = m.decode_request(body)
        except m.UndecodableRequest:
            request = None
        forbidden = isinstance(request, LEARNERS_OWN)
        if (forbidden and not self._has_key) or (isinstance(request, m.RequestLeases) and request.count > 3):
            return self.strike()  # it came out right, and would take the run from those whose it is
        kind = "right ones that are a learner's or an operator's" if forbidden else kind
        self.attacker.send(kind, [number, body])

    def right(self) -> list[bytes]:
        """A message that nobody forbids to the owner of any key."""
        return [b"n", m.encoder.encode(m.WatchRun(after=2**63 - 1, wait_s=0.0))]

    def _hand_in(self, number: bytes) -> None:
        rng, lease = self._rng, self._rng.choice(self._leases)
        request = m.SubmitGroups(
            generator="stranger", leases=[lease.id], schema=rng.choice([SCHEMA_VERSION] * 9 + [0])
        )
        if rng.random() < 0.3:
            wrong: dict[str, Any] = rng.choice(
                [
                    {"reward": float("nan")},
                    {"reward": 3e38},
                    {"logprobs": [0.0, 1e30, -1e38]},
                    {"versions": [-1, 2**31 - 1, 0]},
                    {"tokens": [], "sampled": [], "logprobs": [], "versions": []},
                    {"rewards": {"x" * 1000: float("inf")}},
                    {"started_at": float("nan"), "finished_at": 1e308},
                    {"extra": "x" * 10_000},
                    {"prompt_id": -1},
                    {"group": 2**62},
                ]
            )
            payload = encode_batch(to_batch(rows_of(lease, 0, **wrong))).to_pybytes()
        else:
            payload = damage(rng.choice(self._payloads), rng, self._payloads)
        self.attacker.send("Arrow payloads, damaged", [number, m.encoder.encode(request), payload])


def rows_of(lease: m.Lease, version: int, **changes: Any) -> list[Trajectory]:
    fields: dict[str, Any] = {
        "group": lease.group,
        "due": lease.due,
        "prompt_id": lease.index,
        "task": lease.task,
        "tokens": [5, 6, 7],
        "sampled": [False, True, True],
        "logprobs": [0.0, -0.5, -1.0],
        "versions": [-1, version, version],
        "reward": 1.0,
        "finish_reason": "stop",
        "generator": "g",
        "started_at": 1.0,
        "finished_at": 2.0,
    }
    return [Trajectory(sample=sample, **{**fields, **changes}) for sample in range(lease.num_samples)]
