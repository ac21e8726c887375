"""The messages between a server of weights and those that fetch from it, over ZeroMQ.

    Fetcher ── GetChunk(name, offset, size) ──▶ SnapshotServer       a few chunks under way at once
            ◀── Chunk, the bytes ──────────────                      straight out of the mapped file

The fetched files make a folder of snapshots again: all engines of that host map them, one process verifies
them, and a relay serves them on to others while they still arrive. So the publisher's own link carries one
copy, or two where there are many hosts. The publisher says which host asks which (`EnlistRelay`): the hosts
that fetch a file are a chain, in the order in which they have begun. A manifest always comes from the
publisher itself, so everything that a relay hands on is compared with the publisher's digests.

A server answers every request: with what was asked for, with `ChunkPending` (a relay is still fetching it) or
`PatchPending`, `FileGone`, or `TransferRefused`.

A host that has an earlier version asks the publisher for patches that lead from it (`GetPatchRoute`,
`sync.patch`) and writes them over a file that no engine of the host uses any more. Whatever does not work
out, or would not be much smaller, is answered by the whole snapshot.

A served file is not written to before ZeroMQ has let go of it: every chunk under way keeps its file mapped,
and a file is used again only when nobody has it mapped. (ZeroMQ's own tracker of a multipart send covers the
last frame only, and reports small frames as done at once.)
"""

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from sync.announcement import VERSION_NAME
from sync.manifest import ADDRESS

CHUNK_BYTES = 4 << 20
"""Most bytes that are asked for at a time."""
MAX_REQUEST_BYTES = 1 << 12
"""Most bytes of one frame of a request."""
MAX_FRAMES = 4
"""Most frames of a request; the server throws a longer one away."""
MAX_UNREAD_BYTES = 128 << 20
"""Most bytes of answers that a host may leave unread: four times what a `Puller` asks for at a time, on
however slow a link."""
MAX_REPLY_BYTES = 64 << 20
"""Most bytes of one frame of a reply."""
MAX_PATCHES = 64
"""Most patches on the way from one version to another."""
FILE_NAME = re.compile(rf"{VERSION_NAME}(\.json|\.safetensors|-from-{VERSION_NAME}\.patch)")
"""Names of the files that a server serves."""

Name = Annotated[str, Meta(max_length=255)]
NumBytes = Annotated[int, Meta(ge=0, le=1 << 50)]
"""An offset or a size."""
OptionalAddress = Annotated[str, Meta(pattern=rf"\A({ADDRESS})?\Z")]
"""Empty: none."""


class TransferMessage(msgspec.Struct, tag=True, array_like=True, forbid_unknown_fields=True):
    """A request or a reply. The decoder refuses unknown fields unread: they may be nested as deep as a sender
    likes."""


class GetChunk(TransferMessage):
    name: Name
    offset: NumBytes
    size: Annotated[int, Meta(ge=1, le=64 << 20)]


class GetPatchRoute(TransferMessage):
    """A host that has the version `base` asks for the patches that lead to the version `name` (both are stems
    of files)."""

    name: Name
    base: Name


class EnlistRelay(TransferMessage):
    """A host begins to fetch the file `name`, hands it on at `address`, and asks which relay it may fetch
    from itself."""

    name: Name
    address: Annotated[str, Meta(pattern=rf"\A{ADDRESS}\Z")]
    lost: OptionalAddress = ""
    """The relay that the host was told to ask before, in vain."""
    is_at_fault: bool = True
    """False when that relay answers, but has the file no more, or waits for its bytes itself."""


class RequestBroadcast(TransferMessage):
    """A generator asks the learner to send the snapshot `name` (the stem of its file) to a group that the
    answer names."""

    name: Name
    receiver: Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    """Name of one life of the generator."""


class Chunk(TransferMessage):
    """The header of bytes: those that were asked for, from the first on, as many as there are."""

    name: Name
    offset: NumBytes
    total: NumBytes
    """Bytes of the whole file."""


class ChunkPending(TransferMessage):
    """The relay is still fetching these bytes itself; the receiver asks again."""

    name: Name
    offset: NumBytes


class FileGone(TransferMessage):
    """The file is not here: not yet, or not any more."""

    name: Name


class TransferRefused(TransferMessage):
    reason: Annotated[str, Meta(max_length=500)]


class PatchRoute(TransferMessage):
    """The patches that lead to the version `name`, in order; none: the host fetches the whole snapshot."""

    name: Name
    files: Annotated[list[tuple[Name, NumBytes]], Meta(max_length=MAX_PATCHES)]
    """Name and bytes of each patch."""


class PatchPending(TransferMessage):
    """A patch on the way to the version `name` is still being made; the receiver asks again."""

    name: Name


class RelayParent(TransferMessage):
    """The relay to fetch the file from; an empty address: this server."""

    name: Name
    address: OptionalAddress


class Rendezvous(TransferMessage):
    """The group of two in which a generator receives the snapshot `name`."""

    name: Name
    host: Annotated[str, Meta(min_length=1, max_length=255)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    packed: bool
    """The learner sends many tensors in one buffer."""
    fresh: bool
    """The group is new: the generator must join it first."""


Request = GetChunk | GetPatchRoute | EnlistRelay | RequestBroadcast
Reply = (
    Chunk | ChunkPending | FileGone | TransferRefused | PatchRoute | PatchPending | RelayParent | Rendezvous
)
requests = msgspec.msgpack.Decoder(Request)
replies = msgspec.msgpack.Decoder(Reply)
encode = msgspec.msgpack.Encoder().encode

UNREADABLE = (ValueError, RecursionError)
"""Errors that decoding raises, whatever the bytes: msgspec's errors are ValueErrors, and so is the error for
text that is not UTF-8."""
