"""The server of weights that `scripts/bench/fuzz.py` attacks, the host that fetches from it meanwhile, and
all that is sent to it."""

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
from slipstream_bench.attacks import PATIENCE_S, Attacker, Show
from slipstream_bench.forge import Forge, damage, hand_made
from sync.transports import tcp
from sync.transports.server import SnapshotServer

SNAPSHOT = "v0-fuzz"
LARGE = 4096
"""Bytes of a request from which on a server of weights ends the connection."""


def serve_weights(folder: Path, keys: Path | None) -> None:
    """A file by hand: the server looks at no more than names and bytes."""
    (folder / "weights").mkdir()
    for suffix in ("json", "safetensors"):
        (folder / "weights" / f"{SNAPSHOT}.{suffix}").write_bytes(random.Random(suffix).randbytes(3 << 20))
    watch = partial(watch_small_requests, encrypted=keys is not None, max_unread=tcp.MAX_UNREAD_BYTES)
    door = None if keys is None else (lambda socket: start_authenticator(socket, keys))
    server = SnapshotServer(folder / "weights", secure=door, watch=watch)
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
    """A host that fetches a file in parts, and compares each with the file."""
    asker: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    if keys is not None:
        show_key(asker, keys)
    asker.connect(address)
    name = f"{SNAPSHOT}.safetensors"
    whole, size = (folder / "weights" / name).read_bytes(), 1 << 16
    for offset in itertools.cycle(range(0, len(whole), size)):
        asker.send(tcp.encode(tcp.GetChunk(name, offset, size)))
        if not asker.poll(int(PATIENCE_S * 1000)):
            raise BufferGone(f"no answer from the server of weights in {PATIENCE_S} s")
        header, *parts = asker.recv_multipart()
        assert b"".join(parts) == whole[offset : offset + size], tcp.replies.decode(header)
        done["parts of weights"] += 1
        yield


class WeightsAttack:
    """Everything that is sent to a server of weights."""

    def __init__(self, address: str, rng: random.Random, show_key: Show | None = None) -> None:
        self.attacker, self._rng = Attacker(address, rng, show_key), rng
        names = [f"{SNAPSHOT}.json", f"{SNAPSHOT}.safetensors", "v7-gone.json", "../journal/log", "x"]
        self._forge = Forge(tcp.Request, rng, names)
        self._frames = hand_made(rng)
        self._corpus = [self._forge.right() for _ in range(300)]

    def strike(self) -> None:
        rng = self._rng
        match rng.choices(("forged", "damaged", "frames", "bytes"), (60, 30, 9, 0.4))[0]:
            case "forged":
                self._send(*self._forge.wrong())
            case "damaged":
                self._send("real traffic, damaged", damage(rng.choice(self._corpus), rng, self._corpus))
            case "frames":
                self.attacker.send("wrong frames", next(self._frames))
            case "bytes":
                self.attacker.speak_no_zeromq()

    def _send(self, kind: str, body: bytes) -> None:
        if len(body) > LARGE and self._rng.random() > 0.01:
            return self.strike()  # it would cost the connection, and all that is under way on it
        self.attacker.send(kind, [body])

    def right(self) -> list[bytes]:
        return [tcp.encode(tcp.GetChunk(f"{SNAPSHOT}.json", 0, 100))]

    def never_end_a_message(self) -> None:
        self.attacker.never_end_a_message(400 << 20, size=4000)

    def listen(self) -> None:
        for _ in self.attacker.read():
            pass
