"""The attacker of `scripts/bench/fuzz.py`, and the messages that it sends to a buffer."""

import itertools
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

from buffers import messages as m
from buffers.trajectory import SCHEMA_VERSION, Trajectory, encode_batch, to_batch
from slipstream_bench.forge import Forge, damage_bytes, make_wrong_frames

STALLED_S = 2.0
"""When a connection takes no more bytes for so long, the attacker looks whether the server has ended it."""
PATIENCE_S = 30.0
"""Within this time the server takes in a request, and answers an honest one, however busy the machine is."""
ENDED, ENDLESS = "unfinished messages ended by the server", "messages that do not end"
PRIVILEGED_REQUESTS = (
    m.PublishVersion
    | m.ReportTrainedStep
    | m.ReportCheckpoint
    | m.RewindToStep
    | m.ScaleGenerators
    | m.ReportScaling
    | m.StopRun
    | m.AwaitEvaluations
    | m.RequestBatch
)
"""Requests that only keys can forbid. A forged message that happens to be a valid one of these is sent
only to a server with keys."""


PresentKey = Callable[["zmq.Socket[bytes]"], None]
"""Gives a socket the keys that it presents to the server."""


class Attacker:
    """Sends to one server through a few connections and reads the answers.

    It closes a connection now and then, and opens another one.
    """

    def __init__(self, address: str, rng: random.Random, present_key: PresentKey | None = None) -> None:
        self.address, self._rng, self._present_key = address, rng, present_key
        self._sockets = [self._connect_socket() for _ in range(6)]
        self.sent, self.answered = Counter[str](), Counter[str]()
        self._raw: list[socket.socket] = []

    def _connect_socket(self) -> "zmq.Socket[bytes]":
        connection: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        connection.setsockopt(zmq.LINGER, 0)
        connection.setsockopt(zmq.SNDHWM, 200)
        connection.setsockopt(zmq.SNDTIMEO, int(PATIENCE_S * 1000))
        if self._present_key is not None:
            self._present_key(connection)
        connection.connect(self.address)
        return connection

    def send_frames(self, kind: str, frames: list[bytes]) -> None:
        self.sent[kind] += 1
        self._rng.choice(self._sockets).send_multipart(frames)

    def read_replies(self, decode: Callable[[bytes], Any] | None = None) -> Iterator[Any]:
        """Counts the answers that have come, and yields each of them decoded where `decode` is given."""
        for connection in self._sockets:
            while connection.poll(0):
                frames = connection.recv_multipart()
                self.answered["answers"] += 1
                if decode is not None:
                    yield decode(frames[1])
        if self._rng.random() < 0.02:
            place = self._rng.randrange(len(self._sockets))
            self._sockets[place].close()
            self._sockets[place] = self._connect_socket()

    def send_non_zeromq_bytes(self) -> None:
        """Opens a TCP connection with a broken greeting, or with a right one and garbage after it.

        The last 50 such connections stay open.
        """
        self.sent["bytes that are no ZeroMQ"] += 1
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        data = self._rng.choice(
            [
                self._rng.randbytes(self._rng.randrange(1, 300)),
                greeting[: self._rng.randrange(64)],
                greeting,
                greeting + self._rng.randbytes(100),
                damage_bytes(greeting, self._rng, [greeting]),
                greeting + make_ready_command() + damage_bytes(make_ready_command(), self._rng, [greeting]),
                b"GET / HTTP/1.1\r\n\r\n",
                greeting + make_ready_command() + b"\x02" + b"\x7f" + b"\xff" * 7,
            ]
        )
        self._raw.append(self.open_connection(data))
        while len(self._raw) > 50:
            self._raw.pop(0).close()

    def send_endless_message(self, num_bytes: int, size: int = 65_536) -> None:
        """Sends frames of one message that each announce another one, and counts whether the server ends it.

        It stops after `num_bytes` bytes, or when the server closes the connection. `size` is the number of
        bytes of a frame.
        """
        self.sent[ENDLESS] += 1
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        connection = self.open_connection(greeting + make_ready_command())
        # The flags of ZMTP say: a long frame, and more frames follow.
        header = b"\x03" + size.to_bytes(8, "big")
        frame = (header + bytes(size)) * max(1, 65_536 // size)
        connection.settimeout(STALLED_S)
        try:
            data = b""
            while b"READY" not in data and (more := connection.recv(4096)):
                data += more
            for _ in range(num_bytes // len(frame) + 1):
                connection.sendall(frame)
        except OSError:
            # Also a timeout, because not every kernel wakes a sender whose connection was reset.
            pass
        self.answered[ENDED if self._is_ended(connection) else "unfinished messages taken in"] += 1
        connection.close()

    def _is_ended(self, connection: socket.socket) -> bool:
        """True when the server's side of a connection is closed, or closes within `PATIENCE_S`."""
        host, port = connection.getsockname()
        # How /proc/net/tcp lists the server's end of an established connection (state 01).
        there = f"{int.from_bytes(socket.inet_aton(host), 'little'):08X}:{port:04X} 01 "
        deadline = time.monotonic() + PATIENCE_S
        while there in Path("/proc/net/tcp").read_text():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def open_connection(self, data: bytes) -> socket.socket:
        """Returns a TCP connection to the server over which `data` was sent."""
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


def make_ready_command() -> bytes:
    """Returns the READY command of ZMTP from a DEALER socket."""
    properties = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
    return b"\x04" + bytes([len(properties)]) + properties


class BufferAttack:
    """Sends every kind of attack to a buffer."""

    def __init__(self, address: str, rng: random.Random, present_key: PresentKey | None = None) -> None:
        self.attacker, self._rng, self._has_key = (
            Attacker(address, rng, present_key),
            rng,
            present_key is not None,
        )
        self._forge = Forge(m.Request, rng, ["x", "stranger", "y" * 200])
        self._frames, self._numbers = make_wrong_frames(rng), itertools.count()
        self._leases: list[m.Lease] = [
            m.Lease(
                id=1, split="train", task="t", index=0, seed=0, group=0, due=0, min_version=0, num_samples=2
            )
        ]
        rows = make_rows(self._leases[0], 0)
        self._payloads = [
            encode_batch(to_batch(one)).to_pybytes() for one in (rows, rows * 3, branch_off(rows))
        ]
        self._corpus = [self._forge.make_right_request() for _ in range(300)]

    def send_one(self) -> None:
        """Sends one message of a random kind."""
        rng, number = self._rng, next(self._numbers).to_bytes(8, "little")
        match rng.choices(
            ("forged", "damaged", "arrow", "leases", "frames", "bytes"), (45, 25, 18, 4, 7, 0.4)
        )[0]:
            case "forged":
                kind, body = self._forge.make_wrong_request()
                self._send_body(kind, number, body)
            case "damaged":
                self._send_body(
                    "real traffic, damaged", number, damage_bytes(rng.choice(self._corpus), rng, self._corpus)
                )
            case "arrow":
                self._submit_damaged_groups(number)
            case "leases":
                body = m.encoder.encode(
                    m.RequestLeases(
                        generator="stranger", count=rng.randrange(3), wait_s=rng.choice([0.0, 0.05])
                    )
                )
                self.attacker.send_frames("leases asked for", [number, body])
            case "frames":
                self.attacker.send_frames("wrong frames", next(self._frames))
            case "bytes":
                self.attacker.send_non_zeromq_bytes()

    def send_endless_message(self) -> None:
        self.attacker.send_endless_message(400 << 20)

    def read_answers(self) -> None:
        for reply in self.attacker.read_replies(m.reply_decoder.decode):
            if isinstance(reply, m.LeaseGrant):
                self._leases = (self._leases + reply.leases)[-50:]

    def _send_body(self, kind: str, number: bytes, body: bytes) -> None:
        try:
            request = m.decode_request(body)
        except m.UndecodableRequest:
            request = None
        forbidden = isinstance(request, PRIVILEGED_REQUESTS)
        if (forbidden and not self._has_key) or (isinstance(request, m.RequestLeases) and request.count > 3):
            # The forged request is valid, and would disturb the run of the honest roles: send another one.
            return self.send_one()
        kind = "valid requests of a learner or an operator" if forbidden else kind
        self.attacker.send_frames(kind, [number, body])

    def make_allowed_message(self) -> list[bytes]:
        """Returns a message that the owner of any key may send."""
        return [b"n", m.encoder.encode(m.WatchRun(after=2**63 - 1, wait_s=0.0))]

    def _submit_damaged_groups(self, number: bytes) -> None:
        """Submits a group with a wrong value, or an Arrow payload with damaged bytes, under a real lease."""
        rng, lease = self._rng, self._rng.choice(self._leases)
        request = m.SubmitGroups(
            generator="stranger",
            leases=[lease.id],
            rows=rng.choice([[2]] * 6 + [[3], [1], [2, 2], [2**20]]),
            schema=rng.choice([SCHEMA_VERSION] * 9 + [0]),
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
                    {"branch": 1},
                    {"turn": [-1, 1, 0]},
                    {"turn": [-1, 2**14, 2**14]},
                    {"turn": [0]},
                    {"token_rewards": [0.0, 0.0, float("nan")]},
                    {"token_rewards": [0.0, 3e38, 3e38]},
                    {"token_rewards": [1.0]},
                    {"stop": "x" * 10_000},
                    {"renderer": "x" * 10_000},
                ]
            )
            rows = make_rows(lease, 0, **wrong)
            payload = encode_batch(to_batch(branch_off(rows) if rng.random() < 0.3 else rows)).to_pybytes()
        else:
            payload = damage_bytes(rng.choice(self._payloads), rng, self._payloads)
        self.attacker.send_frames("Arrow payloads, damaged", [number, m.encoder.encode(request), payload])


def make_rows(lease: m.Lease, version: int, **changes: Any) -> list[Trajectory]:
    """Returns the trajectories of a valid group for the lease, with the fields in `changes` replaced."""
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


def branch_off(rows: list[Trajectory]) -> list[Trajectory]:
    """Returns the rows with a second branch of the first one's episode, on which its next turn stands."""
    first, *others = rows
    turns = [turn + 1 if turn >= 0 else -1 for turn in first.turn or [flag - 1 for flag in first.sampled]]
    return [first, replace(first, branch=1, turn=turns), *others]
