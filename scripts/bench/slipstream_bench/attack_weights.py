"""The server of weights that `scripts/bench/fuzz.py` attacks, the attack, and the host that fetches
meanwhile."""

import itertools
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import zmq

from buffers.client import BufferGone
from buffers.connections import watch_small_requests
from buffers.keys import show_key, start_authenticator
from slipstream_bench.attacks import PATIENCE_S, Attacker, PresentKey
from slipstream_bench.forge import Forge, damage_bytes, make_wrong_frames
from sync.transports import messages
from sync.transports.server import SnapshotServer

SNAPSHOT = "v0-fuzz"
LARGE = 4096
"""A server of weights ends a connection whose request has more than this many bytes."""


def serve_weights(folder: Path, keys: Path | None) -> None:
    """Serves two files of random bytes until SIGTERM: the server looks only at names and bytes."""
    (folder / "weights").mkdir()
    for suffix in ("json", "safetensors"):
        (folder / "weights" / f"{SNAPSHOT}.{suffix}").write_bytes(random.Random(suffix).randbytes(3 << 20))
    watch = partial(watch_small_requests, encrypted=keys is not None, max_unread=messages.MAX_UNREAD_BYTES)
    secure = None if keys is None else (lambda socket: start_authenticator(socket, keys))
    server = SnapshotServer(folder / "weights", secure=secure, watch=watch)
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    print(server.address, flush=True)
    while not stop and server._thread.is_alive():
        time.sleep(0.1)
    if not stop:
        raise SystemExit("the thread that serves weights has died")
    server.close()
    print(json.dumps({"refused": server.refused}), flush=True)


def fetch_weights(folder: Path, address: str, keys: Path | None, done: Counter[str]) -> Iterator[None]:
    """Fetches a file in parts, one at each step, and compares each part with the file.

    Raises BufferGone when a request has no answer within `PATIENCE_S`.
    """
    asker: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    if keys is not None:
        show_key(asker, keys)
    asker.connect(address)
    name = f"{SNAPSHOT}.safetensors"
    whole, size = (folder / "weights" / name).read_bytes(), 1 << 16
    for offset in itertools.cycle(range(0, len(whole), size)):
        asker.send(messages.encode(messages.GetChunk(name, offset, size)))
        if not asker.poll(int(PATIENCE_S * 1000)):
            raise BufferGone(f"no answer from the server of weights in {PATIENCE_S} s")
        header, *parts = asker.recv_multipart()
        assert b"".join(parts) == whole[offset : offset + size], messages.replies.decode(header)
        done["parts of weights"] += 1
        yield


class WeightsAttack:
    """Sends every kind of attack to a server of weights."""

    def __init__(self, address: str, rng: random.Random, present_key: PresentKey | None = None) -> None:
        self.attacker, self._rng = Attacker(address, rng, present_key), rng
        names = [f"{SNAPSHOT}.json", f"{SNAPSHOT}.safetensors", "v7-gone.json", "../journal/log", "x"]
        self._forge = Forge(messages.Request, rng, names)
        self._frames = make_wrong_frames(rng)
        self._corpus = [self._forge.make_right_request() for _ in range(300)]

    def send_one(self) -> None:
        rng = self._rng
        match rng.choices(("forged", "damaged", "frames", "bytes"), (60, 30, 9, 0.4))[0]:
            case "forged":
                self._send_body(*self._forge.make_wrong_request())
            case "damaged":
                self._send_body(
                    "real traffic, damaged", damage_bytes(rng.choice(self._corpus), rng, self._corpus)
                )
            case "frames":
                self.attacker.send_frames("wrong frames", next(self._frames))
            case "bytes":
                self.attacker.send_non_zeromq_bytes()

    def _send_body(self, kind: str, body: bytes) -> None:
        if len(body) > LARGE and self._rng.random() > 0.01:
            # A large request costs the connection and every message that is under way on it: send few of
            # them.
            return self.send_one()
        self.attacker.send_frames(kind, [body])

    def make_allowed_message(self) -> list[bytes]:
        return [messages.encode(messages.GetChunk(f"{SNAPSHOT}.json", 0, 100))]

    def send_endless_message(self) -> None:
        self.attacker.send_endless_message(400 << 20, size=4000)

    def read_answers(self) -> None:
        for _ in self.attacker.read_replies():
            pass
