"""The attacks of `scripts/bench/fuzz.py` on servers with keys.

Strangers come without a key or with a wrong one, owners of a key send requests that their role may not send,
handshakes are damaged on their way, keys come and go, and some files in the folder of keys hold no key.
"""

import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from buffers.keys import KeyRole, make_keys, show_key
from slipstream_bench.attacks import Attacker, BufferAttack
from slipstream_bench.forge import damage_bytes

STEP_S = 0.5
"""Seconds that the next part of a handshake may take."""
FLAG_LONG = 2
"""The flag of ZMTP for a frame whose size takes 8 bytes."""
GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


def make_all_keys(folder: Path) -> None:
    """Makes one pair of keys for each honest role and two for attackers.

    The attackers' keys are generators' keys; the server's folder loses and regains the second one,
    `unsteady`.
    """
    make_keys(folder, [*KeyRole, "generator:greedy", "generator:unsteady"])


def make_key_presenter(folder: Path, name: str) -> Callable[["zmq.Socket[bytes]"], None]:
    """Returns a function that gives a socket the keys of `name`."""
    return lambda socket: show_key(socket, folder, name)  # type: ignore[arg-type]


class KeysAttack:
    """Sends every kind of attack to a server with keys; `attack` sends for the owner of a generator's key."""

    def __init__(self, attack: Any, folder: Path, rng: random.Random) -> None:
        self._attack, self._folder, self._rng = attack, folder, rng
        self.attacker: Attacker = attack.attacker
        self._strangers: list[zmq.Socket[bytes]] = []
        self._unsteady = folder / "allowed" / "generator" / "unsteady.key"
        self._key, self._num_garbage = self._unsteady.read_bytes(), 0

    def send_one(self) -> None:
        """Sends one message or makes one change of keys, of a random kind."""
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
                self._attack.send_one()
            case "none":
                self._send_as_stranger("without a key", lambda _: None)
            case "wrong":
                self._send_as_stranger("with a key that nobody knows", self._present_wrong_key)
            case "watcher":
                self._send_as_stranger("with a watcher's key", make_key_presenter(self._folder, "watcher"))
            case "unsteady":
                self._send_as_stranger(
                    "with a key that comes and goes", make_key_presenter(self._folder, "unsteady")
                )
            case "handshake":
                self._tamper_with_handshake()
            case "come and go":
                self.attacker.sent["keys revoked or allowed again"] += 1
                if self._unsteady.exists():
                    self._unsteady.unlink()
                else:
                    self._unsteady.write_bytes(self._key)
            case "garbage":
                self._leave_garbage()
            case _:
                self.attacker.send_non_zeromq_bytes()

    def send_endless_message(self) -> None:
        """Does nothing: nobody gets so far without a key."""

    def read_answers(self) -> None:
        self._attack.read_answers()
        for stranger in self._strangers:
            while stranger.poll(0):
                stranger.recv_multipart()
                self.attacker.answered["answers"] += 1

    def _present_wrong_key(self, stranger: "zmq.Socket[bytes]") -> None:
        make_key_presenter(self._folder, "generator")(stranger)
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()

    def _send_as_stranger(self, kind: str, present: Callable[["zmq.Socket[bytes]"], None]) -> None:
        """Sends a message from a new socket whose keys `present` sets.

        The message waits in the client for a handshake that may never succeed.
        """
        self.attacker.sent[f"messages {kind}"] += 1
        stranger: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        present(stranger)
        stranger.connect(self.attacker.address)
        stranger.send_multipart(self._attack.make_allowed_message())
        self._strangers.append(stranger)
        while len(self._strangers) > 20:
            self._strangers.pop(0).close(linger=0)

    def _leave_garbage(self) -> None:
        """Leaves a file that holds no key in one of the folders of allowed keys, and removes the last one."""
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
                path.write_bytes(damage_bytes(self._key, self._rng, [self._key]))

    # ---- handshakes

    def _tamper_with_handshake(self) -> None:
        """Stands between a client with a good key and the server, and damages one step of the client.

        The step is its greeting, HELLO, INITIATE, or the first message.
        """
        stage, how = self._rng.randrange(4), self._rng.choice(["damaged", "cut", "repeated", "left out"])
        self.attacker.sent[f"{('greeting', 'HELLO', 'INITIATE', 'message')[stage]} {how}"] += 1
        listener = socket.create_server(("127.0.0.1", 0))
        client: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        make_key_presenter(self._folder, "generator")(client)
        client.setsockopt(zmq.RECONNECT_IVL, -1)
        client.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        client.send_multipart(self._attack.make_allowed_message())
        listener.settimeout(STEP_S * 10)
        near, _ = listener.accept()
        far = self.attacker.open_connection(b"")
        for end in (near, far):
            end.settimeout(STEP_S)
        try:
            far.sendall(GREETING if stage else self._tamper_with_step(GREETING, how))
            near.sendall(read_bytes(far, len(GREETING)))
            # The client's own greeting equals the one that was sent in its place.
            read_bytes(near, len(GREETING))
            for number in range(1, stage + 1):
                step = read_step(near)
                far.sendall(step if number < stage else self._tamper_with_step(step, how))
                if number < stage:
                    near.sendall(read_step(far))
            far.recv(1000)
        except OSError:
            # The client or the server has ended the handshake.
            self.attacker.answered["handshakes ended"] += 1
        for end in (near, far, listener):
            end.close()
        client.close(linger=0)

    def _tamper_with_step(self, step: bytes, how: str) -> bytes:
        match how:
            case "damaged":
                return damage_bytes(step, self._rng, [step])
            case "cut":
                return step[: self._rng.randrange(len(step))]
            case "repeated":
                return step * 2
        # "left out": READY comes at once instead of the step before it.
        return b"\x04\x26\x05READY" + bytes(32)


def read_step(connection: socket.socket) -> bytes:
    """Reads a frame of ZMTP. Raises OSError when the other side closes the connection or is silent."""
    head = read_bytes(connection, 1)
    size = read_bytes(connection, 8 if head[0] & FLAG_LONG else 1)
    return head + size + read_bytes(connection, int.from_bytes(size, "big"))


def read_bytes(connection: socket.socket, size: int) -> bytes:
    """Reads `size` bytes. Raises OSError when the other side closes the connection or is silent."""
    data = b""
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            raise ConnectionResetError("the other side has closed the connection")
        data += more
    return data


def attack_with_keys(name: str, address: str, rng: random.Random, folder: Path) -> KeysAttack:
    """Returns the attack on the server `name`: "buffer" or "weights".

    The owner of a generator's key also sends the requests that only other roles may send.
    """
    if name == "buffer":
        return KeysAttack(BufferAttack(address, rng, make_key_presenter(folder, "greedy")), folder, rng)
    from slipstream_bench.attack_weights import WeightsAttack

    return KeysAttack(WeightsAttack(address, rng, make_key_presenter(folder, "greedy")), folder, rng)
