"""The two ends of a transport. The learner's end offers each published version, the generators' end brings it
to their host.

    Publisher ── offer_version ──▶ LearnerEnd ∿∿∿∿ GeneratorEnd ── bring_version ──▶ WeightSource
                                                                                         │ load_into
                                                                                         ▼
                                                                                       engine

`configs.transports.Transport` is the table of all transports. Each has a module with two functions that make
its ends.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import zmq

from configs.schema import Config
from configs.transports import Transport
from sync.announcement import Announcement
from sync.manifest import Manifest
from sync.weight_source import WeightSource


class LearnerEnd:
    """The learner's end of a transport. A subclass overrides only what its transport needs; these methods do
    nothing."""

    carries_adapters: bool = True
    """False: the end is left out where a run publishes adapters alone."""
    address: str = ""
    """Address for the announcement, where other hosts ask for versions; empty: nowhere."""

    def offer_version(self, manifest: Manifest) -> None:
        """Makes a version available, whose files in the folder are complete, before it is announced. A thread
        calls it beside training."""

    def make_room(self) -> None:
        """Gives back what only saves time or bytes: the folder has no room for the next version."""

    def check_alive(self) -> None:
        """Raises RuntimeError, with the traceback, when a thread of this end has died."""

    def close(self) -> None:
        """Ends every transfer. The publisher removes the folder afterwards."""


class GeneratorEnd(Protocol):
    """A generator's end of a transport. Not thread-safe."""

    @property
    def fetched_bytes(self) -> int:
        """Bytes that have arrived from other hosts so far."""
        ...

    def bring_version(self, announcement: Announcement, *, again: bool = False) -> WeightSource:
        """Brings an announced version to this host, as far as that is possible before an engine takes it up.

        `again`: the bytes that were brought before are not those that were published; bring all of them anew.
        Where adapters are published, the source is a `Snapshot` of them. Raises TransferFailed, a
        FileNotFoundError, when the version is gone or nobody answers, and DigestMismatch when the manifest is
        not the announced one.
        """
        ...

    def refresh_spare(self) -> None:
        """Prepares for the next version, after an engine has taken one up."""
        ...

    def close(self) -> None: ...


class ConnectionWatch(Protocol):
    """Limits what a socket's connections may send and leave unread: `buffers.connections.Connections`."""

    def count(self, frames: list[zmq.Frame]) -> None: ...

    def count_sent(self, frames: Sequence[Any]) -> None: ...

    def shut_down_unfinished(self, *, drained: bool) -> list[int]: ...

    def shut_down_deaf(self) -> list[int]: ...

    def shut_down_surplus(self) -> int: ...

    def take_gone(self, *, drained: bool) -> list[bytes]: ...

    def close(self) -> None: ...


SecureSocket = Callable[["zmq.Socket[bytes]"], Any]
"""Gives a socket its keys, before it is bound or connected."""
WatchSocket = Callable[["zmq.Socket[bytes]"], ConnectionWatch]
"""Starts to watch the connections of a socket, before it is bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SocketGuards:
    """Keys and limits of the sockets of one process. `sync` may not import `buffers`, which has them, so its
    callers pass them in."""

    secure_server: SecureSocket | None = None
    secure_client: SecureSocket | None = None
    watch: WatchSocket | None = None
    may_serve: bool = True
    """False: this process has no key to serve other hosts with."""


class TransportModule(Protocol):
    """The functions that the module of a transport defines."""

    def open_learner_ends(self, config: Config, folder: Path, guards: SocketGuards) -> list[LearnerEnd]:
        """Opens the learner's ends; none where generators need no help to read the files. `folder` holds the
        snapshots."""
        ...

    def open_generator_end(self, config: Config, folder: Path, guards: SocketGuards) -> GeneratorEnd:
        """Opens a generator's end. `folder` is where this host may keep what it fetches; all its generators
        share it."""
        ...


def load_transport(transport: Transport) -> TransportModule:
    """Imports the module of one transport, and of no other: a run over TCP does not import NCCL."""
    return cast(TransportModule, importlib.import_module(transport.row.module))
