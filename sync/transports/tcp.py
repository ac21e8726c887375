"""Weights to other hosts, over ZeroMQ: a server beside a folder of snapshots, and a fetcher that fills such a folder elsewhere.

    Fetcher ── Get(name, offset, size) ──▶ SnapshotServer        a few chunks under way at once
            ◀── Chunk, the bytes ─────────                       straight out of the mapped file

What has been fetched is a folder of snapshots again: mapped by all engines of that host, verified once, and served on to others, so
that the publisher's own link carries a few copies whatever the number of hosts. The publisher says who asks whom (`Enlist`);
a manifest always comes from the publisher itself, so that whatever a relay hands on is held against the publisher's digests.

Who has an earlier version asks the publisher for patches that lead from it (`Route`, `sync.patch`) and writes them over a file that no
engine of the host uses any more; whatever does not work out, or would not be much smaller, is answered by the whole snapshot.

A file that is served is not written to before ZeroMQ has let go of it: every chunk under way keeps its file mapped, and a file is
used again only when nobody has it mapped. (A multipart send's own tracker speaks for its last frame only, and small frames count
as done at once.)
"""

import re
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from sync.transports.nccl import Rendezvous, Send

CHUNK_BYTES = 4 << 20
MAX_BYTES = 64 << 20
SNAPSHOT = r"v\d+-\w+"
NAME = re.compile(rf"{SNAPSHOT}(\.json|\.safetensors|-from-{SNAPSHOT}\.patch)")

ADDRESS = re.compile(r"tcp://[\w.:\[\]-]{1,255}:\d{1,5}")

Secure = Callable[["zmq.Socket[bytes]"], Any]
"""Gives a socket its keys, before it is bound or connected."""


class Get(msgspec.Struct, tag=True, array_like=True):
    name: str
    offset: int
    size: int


class Route(msgspec.Struct, tag=True, array_like=True):
    """Who has `base` wants `name` (stems of their files)."""

    name: str
    base: str


class Enlist(msgspec.Struct, tag=True, array_like=True):
    """A host will serve what it has fetched at this address."""

    address: str


class Chunk(msgspec.Struct, tag=True, array_like=True):
    """Comes with the bytes."""

    name: str
    offset: int
    total: int
    """Bytes of the whole file."""


class Gone(msgspec.Struct, tag=True, array_like=True):
    """The file is not here: not yet, or not any more."""

    name: str


class Patches(msgspec.Struct, tag=True, array_like=True):
    """How to come to `name`, in order; nothing: by the whole snapshot."""

    name: str
    files: list[tuple[str, int]]
    """Names and bytes."""


class Parent(msgspec.Struct, tag=True, array_like=True):
    """Where to ask for snapshots; empty: here."""

    address: str


Request = Get | Route | Enlist | Send
Reply = Chunk | Gone | Patches | Parent | Rendezvous
requests = msgspec.msgpack.Decoder(Request)
replies = msgspec.msgpack.Decoder(Reply)
encode = msgspec.msgpack.Encoder().encode
