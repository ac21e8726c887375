"""CURVE keys for the buffer's sockets: making them, showing them, and checking them. CURVE also encrypts all
that travels.

    FOLDER/server.key_secret     for the buffer alone (and for whoever serves weights)
    FOLDER/server.key            for everyone: it tells the true buffer from another
    FOLDER/ROLE.key_secret       for a run's own processes: `learner`, `generator`, `watcher`,
                                 and `operator` for its driver
    FOLDER/allowed/ROLE/*.key    public keys that are let in; ROLE says what the owner of a key may send

A machine that joins needs `server.key` and a generator's pair, named `generator.key` and
`generator.key_secret`, in its folder. A key that is deleted from `allowed` is refused within a second, on
open connections too. A key that is added is let in as soon.
"""

import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import zmq
from zmq import auth
from zmq.utils import z85

from buffers import messages as m
from buffers.files import replace_file
from buffers.message_fields import WireRecord

log = logging.getLogger("slipstream.keys")

ZAP_ADDRESS = "inproc://zeromq.zap.01"
"""The address at which ZeroMQ looks for its context's authenticator (ZAP, RFC 27)."""
ZAP_DOMAIN = b"slipstream"
RELOAD_S = 0.25
"""Seconds between two looks at the folder `allowed`."""


class KeyRole(StrEnum):
    generator = "generator"
    learner = "learner"
    watcher = "watcher"
    operator = "operator"


_GENERATOR, _LEARNER = frozenset({KeyRole.generator}), frozenset({KeyRole.learner})
_OPERATOR, _ANYBODY = frozenset({KeyRole.operator}), frozenset(KeyRole)
REQUEST_ROLES: dict[type[WireRecord], frozenset[KeyRole]] = {
    m.JoinRun: _GENERATOR,
    m.LeaveRun: _GENERATOR | _OPERATOR,
    m.RequestLeases: _GENERATOR,
    m.GeneratorHeartbeat: _GENERATOR,
    m.SubmitGroups: _GENERATOR,
    m.SubmitParityProbe: _GENERATOR,
    m.SubmitEvaluation: _GENERATOR,
    m.FailLease: _GENERATOR,
    m.ListParcels: _GENERATOR | _LEARNER,
    m.ReadParcelPart: _GENERATOR | _LEARNER,
    m.RoleHeartbeat: _LEARNER,
    m.LocateJournal: _LEARNER,
    m.RequestBatch: _LEARNER,
    m.RequestParityProbe: _LEARNER,
    m.ReadBatchPart: _LEARNER,
    m.ReportDamagedGroups: _LEARNER,
    m.PublishVersion: _LEARNER,
    m.ReportTrainedStep: _LEARNER,
    m.ReportCheckpoint: _LEARNER,
    m.AwaitEvaluations: _LEARNER,
    m.RewindToStep: _LEARNER | _OPERATOR,
    m.ScaleGenerators: _OPERATOR,
    m.ReportScaling: _OPERATOR,
    m.StopRun: _OPERATOR,
    m.WatchRun: _ANYBODY,
    m.WatchGenerators: _ANYBODY,
}
"""Roles whose keys may send a request to a buffer that has keys. Nobody may send a request that is not
here."""


WEIGHT_REQUEST_ROLES: dict[str, frozenset[KeyRole]] = dict.fromkeys(
    ("GetChunk", "GetPatchRoute", "EnlistRelay", "RequestBroadcast"), _GENERATOR
)
"""Roles whose keys may send a request to a server of weights, by the name of the request: hosts that generate
fetch weights and pass them on."""


def may_send(roles: frozenset[KeyRole], request: m.Request) -> bool:
    """True when one of the roles may send the request to the buffer."""
    return bool(roles & REQUEST_ROLES.get(type(request), frozenset()))


# ---- the folder


def make_keys(folder: Path, clients: list[str]) -> list[Path]:
    """Makes the keys of the server and of the clients that are missing; returns the secret files made.

    A client is `ROLE` or `ROLE:NAME`. Raises ValueError for another role.
    """
    pairs: list[tuple[str, str]] = [("", "server"), *(_split_client(client) for client in clients)]
    for known in KeyRole:
        (folder / "allowed" / known).mkdir(parents=True, exist_ok=True)
    os.chmod(folder, 0o700)
    made = []
    for role, name in pairs:
        if (folder / f"{name}.key_secret").exists():
            continue
        # The secret comes last: a pair whose secret is there is whole, whenever its maker was killed.
        with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as unfinished:
            public, secret = map(Path, auth.create_certificates(unfinished, name))
            if role:
                replace_file(folder / "allowed" / role / public.name, public.read_bytes())
            for path in (public, secret):
                # The umask keeps the secret unreadable to others from its first byte on.
                before = os.umask(0o077)
                try:
                    replace_file(folder / path.name, path.read_bytes())
                finally:
                    os.umask(before)
        made.append(folder / secret.name)
    return made


def _split_client(client: str) -> tuple[str, str]:
    """Returns (role, name) of a client that reads ROLE or ROLE:NAME."""
    role, _, name = client.partition(":")
    name = name or role
    if role not in list(KeyRole) or "/" in name or name == "server":
        raise ValueError(
            f"a client must read ROLE or ROLE:NAME with one of {', '.join(KeyRole)}, got {client!r}"
        )
    return role, name


def has_server_key(folder: Path) -> bool:
    """True when the folder holds the secret that a server needs."""
    return (folder / "server.key_secret").exists()


def show_key(socket: "zmq.Socket[bytes]", folder: Path, role: KeyRole = KeyRole.generator) -> None:
    """Makes a socket that is not connected yet a CURVE client of the folder's server.

    Raises ValueError when the keys are missing or readable by others.
    """
    socket.curve_publickey, socket.curve_secretkey = _load_pair(folder, role)
    socket.curve_serverkey = _load_key(folder / "server.key")[0]


def _load_pair(folder: Path, name: str) -> tuple[bytes, bytes]:
    """Returns (public key, secret key). Raises ValueError where they are missing or readable by others."""
    path = folder / f"{name}.key_secret"
    public, secret = _load_key(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ValueError(
            f"buffer.keys must hold secrets that only their owner can read (chmod 600), "
            f"got {path} with {mode:o}"
        )
    if secret is None:
        raise ValueError(
            f"buffer.keys must hold a secret key in {path.name}, got a file without one in {folder}"
        )
    return public, secret


def _load_key(path: Path) -> tuple[bytes, bytes | None]:
    """Returns (public key, secret key or None). Raises ValueError where the file holds no key."""
    try:
        return auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"buffer.keys must be a folder with {path.name} (`scripts/keys.sh {path.parent}` makes one), "
            f"got {path.parent}: {error}"
        ) from error


# ---- who is let in


class AllowedKeys:
    """The public keys in a folder and the roles of their owners, as they are on disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: tuple[tuple[str, int, int, int], ...] = ()
        self.roles: Mapping[str, frozenset[KeyRole]] = {}
        """Roles by public key (Z85). The mapping is replaced as a whole, so another thread may read it at any
        time."""
        self.reload_changed()

    def reload_changed(self) -> None:
        """Reads the keys if a file has changed. A file that holds no key lets nobody in."""
        paths = [path for role in KeyRole for path in sorted((self._folder / role).glob("*.key"))]
        seen = tuple((str(path), *_identify_file(path)) for path in paths)
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


def _identify_file(path: Path) -> tuple[int, int, int]:
    """Returns numbers that change with the file: its time, its inode and its size."""
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)  # deleted a moment ago
    return (found.st_mtime_ns, found.st_ino, found.st_size)


class Authenticator:
    """Decides which clients ZeroMQ lets in through a server's socket. It works in a thread until it is
    closed.

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
        self._thread = threading.Thread(target=self._run, name="authenticator", daemon=True)
        self._thread.start()

    def find_roles(self, user: str) -> frozenset[KeyRole]:
        """Returns the roles of a key's owner; none when the key is not allowed (any more).

        `user` is the public key, which ZeroMQ attaches to each message as its `User-Id`.
        """
        return self._allowed.roles.get(user, frozenset())

    def objection(self, user: str, kind: str) -> str:
        """Says why the owner of a key may not send a request of this name to a server of weights; empty when
        it may."""
        roles = self.find_roles(user)
        if not roles:
            return f"{kind} with key {user}, which is not allowed any more"
        if not roles & WEIGHT_REQUEST_ROLES.get(kind, frozenset()):
            return f"{kind} must not be sent with the key of a {' and '.join(sorted(roles))}"
        return ""

    def check(self) -> None:
        """Raises RuntimeError, from its cause, when the thread has died. The owner of the socket calls it
        again and again."""
        if self._error is not None:
            raise RuntimeError(
                "the thread that lets clients in has died: nobody can connect"
            ) from self._error

    def close(self) -> None:
        self._running = False
        self._thread.join()

    def _run(self) -> None:
        """Consumes ZeroMQ's questions, produces answers. Waits at most `RELOAD_S`. Ends when it is closed."""
        reloaded_at = time.monotonic()
        try:
            while self._running:
                asked = self._socket.poll(int(RELOAD_S * 1000) if self._running else 0)
                # The keys are read before each answer, so that a deleted key is refused at its next
                # handshake.
                if asked or time.monotonic() - reloaded_at >= RELOAD_S:
                    self._allowed.reload_changed()
                    reloaded_at = time.monotonic()
                if asked:
                    self._socket.send_multipart(self._answer_question(self._socket.recv_multipart()))
        except BaseException as error:  # `check` raises it in the thread of the socket's owner
            self._error = error
        finally:
            self._socket.close()

    def _answer_question(self, question: list[bytes]) -> list[bytes]:
        """Returns the frames of a ZAP answer: 200 with the key as user id, or 400."""
        version, number, _, address, _, mechanism, *credentials = question
        user = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" and len(credentials) == 1 else ""
        if self.find_roles(user):
            return [version, number, b"200", b"OK", user.encode(), b""]
        self._num_refused += 1
        # The 1st, 2nd, 4th, 8th refusal is logged, so that a flood of them does not fill the log.
        if self._num_refused & (self._num_refused - 1) == 0:
            log.warning(
                "refused keys that are not allowed (%d times by now), the last one from %s",
                self._num_refused,
                address.decode(errors="replace"),
            )
        return [version, number, b"400", b"this key is not allowed", b"", b""]


def start_authenticator(socket: "zmq.Socket[bytes]", folder: Path) -> Authenticator:
    """Makes a socket that is not bound yet a CURVE server, open to the keys in `allowed` only.

    Raises ValueError when keys are missing or readable by others. The socket's context must have no other
    server with keys, because a context has one authenticator only.
    """
    socket.curve_publickey, socket.curve_secretkey = _load_pair(folder, "server")
    socket.curve_server = True
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    # Enforced: while no authenticator answers, the socket lets nobody in. Otherwise it would let in
    # everybody.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    allowed = folder / "allowed"
    if not any(allowed.glob("*/*.key")):
        raise ValueError(
            "buffer.keys must hold the public key of at least one client in `allowed/ROLE` "
            f"(`scripts/keys.sh {folder}` makes them), got none in {allowed}"
        )
    return Authenticator(socket.context, allowed)
