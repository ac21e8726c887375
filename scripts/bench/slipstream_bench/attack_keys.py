"""What `scripts/bench/fuzz.py` does to servers with keys: strangers without a key or with a wrong one,
keys that say what is not theirs to say, handshakes that are damaged on their way, keys that come and go,
and files that hold none."""

import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from buffers.keys import KeyRole, make_keys, show_key
from slipstream_bench.attacks import Attacker, BufferAttack
from slipstream_bench.forge import damage

STEP_S = 0.5
"""For so long the next part of a handshake is waited for."""
FLAG_LONG = 2
GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


def make_all_keys(folder: Path) -> None:
    """A pair of each role for the honest, one of a generator for the attackers, and one that comes and
    goes."""
    make_keys(folder, [*KeyRole, "generator:greedy", "generator:unsteady"])


def show(folder: Path, name: str) -> Callable[["zmq.Socket[bytes]"], None]:
    return lambda socket: show_key(socket, folder, name)  # type: ignore[arg-type]


class KeysAttack:
    """Everything that is sent to a server with keys; `attack` is what the owner of a key sends."""

    def __init__(self, attack: Any, folder: Path, rng: random.Random) -> None:
        self._attack, self._folder, self._rng = attack, folder, rng
        self.attacker: Attacker = attack.attacker
        self._strangers: list[zmq.Socket[bytes]] = []
        self._unsteady = folder / "allowed" / "generator" / "unsteady.key"
        self._key, self._num_garbage = self._unsteady.read_bytes(), 0

    def strike(self) -> None:
        kinds = (
            "owner",
            "none",
            "wrong",
            "watcher",
            "unsteady",
            "handshake",
            "come and go",
            "garbage",
            "bytes",
        )
        match self._rng.choices(kinds, (900, 20, 20, 10, 20, 20, 2, 2, 2))[0]:
            case "owner":
                self._attack.strike()
            case "none":
                self._knock("without a key", lambda _: None)
            case "wrong":
                self._knock("with a key that nobody knows", self._show_wrong_key)
            case "watcher":
                self._knock("with a watcher's key", show(self._folder, "watcher"))
            case "unsteady":
                self._knock("with a key that comes and goes", show(self._folder, "unsteady"))
            case "handshake":
                self._meddle()
            case "come and go":
                self.attacker.sent["keys revoked or allowed again"] += 1
                if self._unsteady.exists():
                    self._unsteady.unlink()
                else:
                    self._unsteady.write_bytes(self._key)
            case "garbage":
                self._leave_garbage()
            case _:
                self.attacker.speak_no_zeromq()

    def never_end_a_message(self) -> None:
        """Nobody gets so far without a key."""

    def listen(self) -> None:
        self._attack.listen()
        for stranger in self._strangers:
            while stranger.poll(0):
                stranger.recv_multipart()
                self.attacker.answered["answers"] += 1

    def _show_wrong_key(self, stranger: "zmq.Socket[bytes]") -> None:
        show(self._folder, "generator")(stranger)
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()

    def _knock(self, kind: str, present: Callable[["zmq.Socket[bytes]"], None]) -> None:
        """Its message waits in the client for a handshake that may never succeed."""
        self.attacker.sent[f"messages {kind}"] += 1
        stranger: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        present(stranger)
        stranger.connect(self.attacker.address)
        stranger.send_multipart(self._attack.right())
        self._strangers.append(stranger)
        while len(self._strangers) > 20:
            self._strangers.pop(0).close(linger=0)

    def _leave_garbage(self) -> None:
        """In the folders of allowed keys, one file at a time."""
        self.attacker.sent["files that hold no key"] += 1
        paths = [self._folder / "allowed" / role / "garbage.key" for role in KeyRole]
        for path in paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path = self._rng.choice(paths)
        match self._rng.randrange(4):
            case 0:
                path.mkdir()
            case 1:
                path.symlink_to("nowhere")
            case 2:
                path.write_bytes(self._rng.randbytes(self._rng.randrange(3000)))
            case _:
                path.write_bytes(damage(self._key, self._rng, [self._key]))

    # ---- handshakes

    def _meddle(self) -> None:
        """Stands between a client with a good key and the server, and does something to one step of the
        client's: its greeting, HELLO, INITIATE, or the first message."""
        stage, how = self._rng.randrange(4), self._rng.choice(["damaged", "cut", "repeated", "left out"])
        self.attacker.sent[f"{('greeting', 'HELLO', 'INITIATE', 'message')[stage]} {how}"] += 1
        listener = socket.create_server(("127.0.0.1", 0))
        client: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        show(self._folder, "generator")(client)
        client.setsockopt(zmq.RECONNECT_IVL, -1)
        client.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        client.send_multipart(self._attack.right())
        listener.settimeout(STEP_S * 10)
        near, _ = listener.accept()
        far = self.attacker.open(b"")
        for end in (near, far):
            end.settimeout(STEP_S)
        try:
            far.sendall(GREETING if stage else self._change(GREETING, how))
            near.sendall(read_bytes(far, len(GREETING)))
            read_bytes(near, len(GREETING))  # the same as has been sent
            for number in range(1, stage + 1):
                step = read_step(near)
                far.sendall(step if number < stage else self._change(step, how))
                if number < stage:
                    near.sendall(read_step(far))
            far.recv(1000)
        except OSError:  # one of the two has had enough
            self.attacker.answered["handshakes ended"] += 1
        for end in (near, far, listener):
            end.close()
        client.close(linger=0)

    def _change(self, step: bytes, how: str) -> bytes:
        match how:
            case "damaged":
                return damage(step, self._rng, [step])
            case "cut":
                return step[: self._rng.randrange(len(step))]
            case "repeated":
                return step * 2
        return b"\x04\x26\x05READY" + bytes(32)  # what comes after it, and before its time


def read_step(connection: socket.socket) -> bytes:
    """A frame of ZMTP. Raises OSError when the other side ends, or says nothing."""
    head = read_bytes(connection, 1)
    size = read_bytes(connection, 8 if head[0] & FLAG_LONG else 1)
    return head + size + read_bytes(connection, int.from_bytes(size, "big"))


def read_bytes(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            raise ConnectionResetError("the other side has ended it")
        data += more
    return data


def attack_with_keys(name: str, address: str, rng: random.Random, folder: Path) -> KeysAttack:
    """Of the buffer or the server of weights: the owner of a generator's key says all that others may,
    too."""
    if name == "buffer":
        return KeysAttack(BufferAttack(address, rng, show(folder, "greedy")), folder, rng)
    from slipstream_bench.attack_weights import WeightsAttack

    return KeysAttack(WeightsAttack(address, rng, show(folder, "greedy")), folder, rng)
