"""CURVE keys for the buffer's sockets: making them, showing them, and asking for them. CURVE encrypts all that travels, too.

    FOLDER/server.key_secret     for the buffer alone (and for whoever serves weights)
    FOLDER/server.key            for everyone: it tells the true buffer from another
    FOLDER/ROLE.key_secret       for a run's own processes: `operator` for its driver, `learner`, `generator`, `watcher`
    FOLDER/allowed/ROLE/*.key    public keys that are let in. The folder that holds a key says what its owner may do

A machine that joins needs `server.key` and a generator's pair, named `generator.key` and `generator.key_secret`, in its folder.
A key that is deleted from `allowed` is refused within a second, on open connections too; one that is added is let in as soon.
"""

import logging
import os
import stat
import threading
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import zmq
from zmq import auth
from zmq.utils import z85

from buffers import messages as m
from buffers.message_fields import WireRecord

log = logging.getLogger("slipstream.keys")

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"slipstream"
LOOK_S = 0.25
"""How often `allowed` is looked at."""


class KeyRole(StrEnum):
    generator = "generator"
    learner = "learner"
    watcher = "watcher"
    operator = "operator"


G, L, W, O = KeyRole.generator, KeyRole.learner, KeyRole.watcher, KeyRole.operator  # noqa: E741
SPEAKERS: dict[type[WireRecord], frozenset[KeyRole]] = {
    m.JoinRun: frozenset({G}),
    m.LeaveRun: frozenset({G, O}),
    m.RequestLeases: frozenset({G}),
    m.GeneratorHeartbeat: frozenset({G}),
    m.SubmitGroups: frozenset({G}),
    m.SubmitParityProbe: frozenset({G}),
    m.SubmitEvaluation: frozenset({G}),
    m.FailLease: frozenset({G}),
    m.RoleHeartbeat: frozenset({L}),
    m.LocateJournal: frozenset({L}),
    m.RequestBatch: frozenset({L}),
    m.RequestParityProbe: frozenset({L}),
    m.ReadBatchPart: frozenset({L}),
    m.ReportDamagedGroups: frozenset({L}),
    m.PublishVersion: frozenset({L}),
    m.ReportTrainedStep: frozenset({L}),
    m.ReportCheckpoint: frozenset({L}),
    m.AwaitEvaluations: frozenset({L}),
    m.RewindToStep: frozenset({L, O}),
    m.StopRun: frozenset({O}),
    m.WatchRun: frozenset(KeyRole),
}
"""Who may say what to a buffer that has keys. A message that is not here may be said by nobody."""


WEIGHTS_SPEAKERS: dict[str, frozenset[KeyRole]] = dict.fromkeys(
    ("GetChunk", "GetPatchRoute", "EnlistRelay", "RequestBroadcast"), frozenset({G})
)
"""Who may say what to a server of weights, by the name of the request: hosts that generate fetch them, and hand them on."""


def may_say(roles: frozenset[KeyRole], request: m.Request) -> bool:
    return bool(roles & SPEAKERS.get(type(request), frozenset()))


# ---- the folder


def make_keys(folder: Path, clients: list[str]) -> list[Path]:
    """Makes what is missing of the server's and the clients' keys; returns the secret files made.

    A client is `ROLE` or `ROLE:NAME`. Raises ValueError for another role.
    """
    pairs: list[tuple[str, str]] = [("", "server"), *(_role_and_name(client) for client in clients)]
    for known in KeyRole:
        (folder / "allowed" / known).mkdir(parents=True, exist_ok=True)
    os.chmod(folder, 0o700)
    made = []
    for role, name in pairs:
        if (folder / f"{name}.key_secret").exists():
            continue
        before = os.umask(0o077)
        try:
            public, secret = auth.create_certificates(folder, name)
        finally:
            os.umask(before)
        if role:
            (folder / "allowed" / role / f"{name}.key").write_bytes(Path(public).read_bytes())
        made.append(Path(secret))
    return made


def _role_and_name(client: str) -> tuple[str, str]:
    role, _, name = client.partition(":")
    name = name or role
    if role not in list(KeyRole) or "/" in name or name == "server":
        raise ValueError(
            f"a client must read ROLE or ROLE:NAME with one of {', '.join(KeyRole)}, got {client!r}"
        )
    return role, name


def has_door(folder: Path) -> bool:
    """Can a server be opened with what is in the folder?"""
    return (folder / "server.key_secret").exists()


def show_key(socket: "zmq.Socket[bytes]", folder: Path, role: KeyRole = KeyRole.generator) -> None:
    """Makes a socket that is not connected yet a CURVE client of the folder's server. Raises ValueError as `open_door`."""
    socket.curve_publickey, socket.curve_secretkey = _load_pair(folder, role)
    socket.curve_serverkey = _load_key(folder / "server.key")[0]


def _load_pair(folder: Path, name: str) -> tuple[bytes, bytes]:
    path = folder / f"{name}.key_secret"
    public, secret = _load_key(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ValueError(
            f"buffer.keys must hold secrets that only their owner can read (chmod 600), got {path} with {mode:o}"
        )
    if secret is None:
        raise ValueError(
            f"buffer.keys must hold a secret key in {path.name}, got a file without one in {folder}"
        )
    return public, secret


def _load_key(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"buffer.keys must be a folder with {path.name} (`scripts/keys.sh {path.parent}` makes one), "
            f"got {path.parent}: {error}"
        ) from error


# ---- the door


class AllowedKeys:
    """The public keys in a folder and their owners' roles, as they are on disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: tuple[tuple[str, int, int, int], ...] = ()
        self.roles: Mapping[str, frozenset[KeyRole]] = {}
        """By public key (Z85). It is replaced as a whole, so that another thread may read it at any time."""
        self.read_again()

    def read_again(self) -> None:
        """Reads the keys if a file has changed. A file that holds no key lets nobody in."""
        paths = [path for role in KeyRole for path in sorted((self._folder / role).glob("*.key"))]
        seen = tuple((str(path), *_identity(path)) for path in paths)
        if seen == self._seen:
            return
        roles: dict[str, frozenset[KeyRole]] = {}
        for path in paths:
            try:
                public = auth.load_certificate(path)[0].decode()
            except (OSError, ValueError) as error:
                log.warning("nobody is let in by %s: %s", path, error)
                continue
            roles[public] = roles.get(public, frozenset()) | {KeyRole(path.parent.name)}
        if self._seen:
            log.info("allowed keys: %d now, %d before", len(roles), len(self.roles))
        self._seen, self.roles = seen, roles


def _identity(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:  # deleted a moment ago
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_ino, found.st_size)


class Door:
    """Lets known keys in through a server's socket, in a thread, until it is closed.

    ZeroMQ asks it about every client that shows a key (ZAP, RFC 27). When the thread is dead nobody gets in.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", folder: Path) -> None:
        self._allowed = AllowedKeys(folder)
        self._error: BaseException | None = None
        self._num_refused = 0
        self._running = True
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ZAP_ADDRESS)
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)
        self._thread.start()

    def roles_of(self, user: str) -> frozenset[KeyRole]:
        """What the owner of a key may do; nothing, if it is not allowed (any more). `user` is a message's `User-Id`."""
        return self._allowed.roles.get(user, frozenset())

    def objection(self, user: str, kind: str) -> str:
        """Why the owner of a key may not say a request of this name to a server of weights; empty: it may."""
        roles = self.roles_of(user)
        if not roles:
            return f"{kind} with key {user}, which is not allowed any more"
        if not roles & WEIGHTS_SPEAKERS.get(kind, frozenset()):
            return f"{kind} must not be said with the key of a {' and '.join(sorted(roles))}"
        return ""

    def check(self) -> None:
        """Raises RuntimeError, from its cause, when the thread has died: to be asked again and again by whoever owns the socket."""
        if self._error is not None:
            raise RuntimeError(
                "the thread that lets clients in has died: nobody can connect"
            ) from self._error

    def close(self) -> None:
        self._running = False
        self._thread.join()

    def _run(self) -> None:
        """Waits for ZeroMQ's questions, at most `LOOK_S`."""
        looked_at = time.monotonic()
        try:
            while self._running:
                asked = self._socket.poll(int(LOOK_S * 1000) if self._running else 0)
                if asked or time.monotonic() - looked_at >= LOOK_S:
                    self._allowed.read_again()
                    looked_at = time.monotonic()
                if asked:
                    self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except BaseException as error:
            self._error = error
        finally:
            self._socket.close()

    def _answer(self, question: list[bytes]) -> list[bytes]:
        version, number, _, address, _, mechanism, *credentials = question
        user = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" and len(credentials) == 1 else ""
        if self.roles_of(user):
            return [version, number, b"200", b"OK", user.encode(), b""]
        self._num_refused += 1
        if (
            self._num_refused & (self._num_refused - 1) == 0
        ):  # the 1st, 2nd, 4th, 8th: a flood of them does not fill the log
            who = address.decode(errors="replace")
            log.warning(
                "refused keys that are not allowed (%d times by now), the last one from %s",
                self._num_refused,
                who,
            )
        return [version, number, b"400", b"this key is not allowed", b"", b""]


def open_door(socket: "zmq.Socket[bytes]", folder: Path) -> Door:
    """Makes a socket that is not bound yet a CURVE server, open to the keys in `allowed` only.

    Raises ValueError when keys are missing or readable by others. The socket's context must have no other server with keys.
    """
    socket.curve_publickey, socket.curve_secretkey = _load_pair(folder, "server")
    socket.curve_server = True
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a door behind it, the socket lets nobody in
    allowed = folder / "allowed"
    if not any(allowed.glob("*/*.key")):
        raise ValueError(
            f"buffer.keys must hold the public key of at least one client in `allowed/ROLE` (`scripts/keys.sh {folder}` "
            f"makes them), got none in {allowed}"
        )
    return Door(socket.context, allowed)
