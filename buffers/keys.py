"""CURVE keys: who may talk to the buffer, and the encryption of what they say. Made by `scripts/keys.sh FOLDER [CLIENT ...]`.

    FOLDER/server.key_secret   for the buffer alone
    FOLDER/server.key          for everyone: by it they know the buffer
    FOLDER/client.key_secret   for the roles of a run; a machine of its own may get a key of its own (CLIENT.key_secret)
    FOLDER/allowed/*.key       public keys of those who are let in

A machine that joins needs `server.key` and a client's pair, named `client.key` and `client.key_secret`, in its folder.
"""

import os
import stat
from pathlib import Path

import zmq
from zmq import auth
from zmq.auth.thread import ThreadAuthenticator


def make_keys(folder: Path, clients: list[str]) -> list[Path]:
    """Makes what is missing of the server's and the clients' keys; returns the secret files made."""
    (folder / "allowed").mkdir(parents=True, exist_ok=True)
    os.chmod(folder, 0o700)
    made = []
    for name in ["server", *clients]:
        if (folder / f"{name}.key_secret").exists():
            continue
        before = os.umask(0o077)
        try:
            public, secret = auth.create_certificates(folder, name)
        finally:
            os.umask(before)
        if name != "server":
            (folder / "allowed" / f"{name}.key").write_bytes(Path(public).read_bytes())
        made.append(Path(secret))
    return made


class Door:
    """What stands between a server's socket and strangers, until it is closed."""

    def __init__(self, authenticator: ThreadAuthenticator) -> None:
        self._authenticator = authenticator

    def close(self) -> None:
        self._authenticator.stop()


def open_door(socket: "zmq.Socket[bytes]", folder: Path) -> Door:
    """Makes a socket that is not bound yet a CURVE server, open to the keys in `allowed` only.

    Raises ValueError when keys are missing or readable by others. The socket's context must have no other server with keys.
    """
    socket.curve_publickey, socket.curve_secretkey = _pair(folder, "server")
    socket.curve_server = True
    allowed = folder / "allowed"
    if not any(allowed.glob("*.key")):
        raise ValueError(
            f"buffer.keys must hold the public key of at least one client in `allowed`, got none in {allowed}"
        )
    authenticator = ThreadAuthenticator(socket.context)
    authenticator.start()
    authenticator.configure_curve(domain="*", location=allowed)
    return Door(authenticator)


def has_door(folder: Path) -> bool:
    """Can a server be opened with what is in the folder?"""
    return (folder / "server.key_secret").exists()


def show_key(socket: "zmq.Socket[bytes]", folder: Path) -> None:
    """Makes a socket that is not connected yet a CURVE client of the folder's server. Raises ValueError as `open_door`."""
    socket.curve_publickey, socket.curve_secretkey = _pair(folder, "client")
    socket.curve_serverkey = _load(folder / "server.key")[0]


def _pair(folder: Path, name: str) -> tuple[bytes, bytes]:
    path = folder / f"{name}.key_secret"
    public, secret = _load(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ValueError(
            f"buffer.keys must hold secrets that only their owner can read (chmod 600), got {path} with {mode:o}"
        )
    if secret is None:
        raise ValueError(f"buffer.keys must hold a secret key in {path.name}, got a file without one in {folder}")
    return public, secret


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"buffer.keys must be a folder with {path.name} (`scripts/keys.sh {path.parent}` makes one), got {path.parent}: {error}"
        ) from error
