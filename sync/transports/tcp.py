"""Weights to other hosts, over ZeroMQ: a server beside a folder of snapshots, and a fetcher that fills such a folder elsewhere.

    Fetcher ── GetChunk(name, offset, size) ──▶ SnapshotServer        a few chunks under way at once
            ◀── Chunk, the bytes ─────────                       straight out of the mapped file

What has been fetched is a folder of snapshots again: mapped by all engines of that host, verified once, and served on to others
while it still comes, so that the publisher's own link carries one copy, two where there are many hosts. The publisher says who asks
whom (`EnlistRelay`): the hosts that fetch a file are a chain, in the order in which they have begun. A manifest always comes from the
publisher itself, so that whatever a relay hands on is held against the publisher's digests.

A server answers every request: with what was asked for, with `ChunkPending` (a relay that is still fetching it), `FileGone`, or `TransferRefused`.

Who has an earlier version asks the publisher for patches that lead from it (`GetPatchRoute`, `sync.patch`) and writes them over a file that no
engine of the host uses any more; whatever does not work out, or would not be much smaller, is answered by the whole snapshot.

A file that is served is not written to before ZeroMQ has let go of it: every chunk under way keeps its file mapped, and a file is
used again only when nobody has it mapped. (A multipart send's own tracker speaks for its last frame only, and small frames count
as done at once.)
"""

import re
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import zmq
from msgspec import Meta

from sync.transports.nccl import Rendezvous, RequestBroadcast

CHUNK_BYTES = 4 << 20
"""Most bytes that are asked for at a time."""
MAX_REQUEST_BYTES = 1 << 12
"""Of one frame of a request."""
MAX_FRAMES = 4
"""Of a request; what is beyond is thrown away."""
MAX_UNREAD_BYTES = 128 << 20
"""Of answers that a host has asked for and not taken: four times what a `puller` asks for at a time, on however slow a link."""
MAX_REPLY_BYTES = 64 << 20
"""Of one frame of a reply."""
MAX_PATCHES = 64
"""On the way from one version to another."""
SNAPSHOT = r"v\d+-\w+"
NAME = re.compile(rf"{SNAPSHOT}(\.json|\.safetensors|-from-{SNAPSHOT}\.patch)")

ADDRESS = r"tcp://[\w.:\[\]-]{1,255}:\d{1,5}"

Secure = Callable[["zmq.Socket[bytes]"], Any]
"""Gives a socket its keys, before it is bound or connected."""

Name = Annotated[str, Meta(max_length=255)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 50)]
"""An offset or a size."""
Address = Annotated[str, Meta(pattern=rf"\A({ADDRESS})?\Z")]
"""Empty: none."""


class Message(msgspec.Struct, tag=True, array_like=True, forbid_unknown_fields=True):
    """A request or a reply. Unknown fields are not even looked at: they may be nested as deep as a sender likes."""


class GetChunk(Message):
    name: Name
    offset: Bytes
    size: Annotated[int, Meta(ge=1, le=64 << 20)]


class GetPatchRoute(Message):
    """Who has `base` wants `name` (stems of their files)."""

    name: Name
    base: Name


class EnlistRelay(Message):
    """A host has begun to fetch the file `name`, and hands on what comes at `address`. Whom may it ask?"""

    name: Name
    address: Annotated[str, Meta(pattern=rf"\A{ADDRESS}\Z")]
    lost: Address = ""
    """It has been told before to ask here, in vain."""


class Chunk(Message):
    """Comes with the bytes: of those that were asked for, from the first on, as many as there are."""

    name: Name
    offset: Bytes
    total: Bytes
    """Bytes of the whole file."""


class ChunkPending(Message):
    """The relay is fetching this itself: to be asked for again."""

    name: Name
    offset: Bytes


class FileGone(Message):
    """The file is not here: not yet, or not any more."""

    name: Name


class TransferRefused(Message):
    reason: Annotated[str, Meta(max_length=500)]


class PatchRoute(Message):
    """How to come to `name`, in order; nothing: by the whole snapshot."""

    name: Name
    files: Annotated[list[tuple[Name, Bytes]], Meta(max_length=MAX_PATCHES)]
    """Names and bytes."""


class RelayParent(Message):
    """Where to ask for the file; empty: here."""

    name: Name
    address: Address


Request = GetChunk | GetPatchRoute | EnlistRelay | RequestBroadcast
Reply = Chunk | ChunkPending | FileGone | TransferRefused | PatchRoute | RelayParent | Rendezvous
requests = msgspec.msgpack.Decoder(Request)
replies = msgspec.msgpack.Decoder(Reply)
encode = msgspec.msgpack.Encoder().encode

UNREADABLE = (ValueError, RecursionError)
"""What decoding raises, whatever the bytes: msgspec's errors are ValueErrors, and so is text that is not UTF-8."""
