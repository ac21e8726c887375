"""The publication of versions by all ranks, beside training.

    training  ── step ──▶ copy own rows ──▶ next step ─────────────────────────▶ copy ──▶
                               │                          ▲
    thread                     └─▶ write, digest ─▶ manifest, complete ─▶ the first rank announces it

Training waits for the copy alone, and for the publication before it where that still goes on. A version is
announced as soon as it is complete, whatever training is at: its file has all rows, and the manifest is
beside it.

The ranks of a host write one file. With ranks on several hosts each host has a file of the same layout, with
holes where others have rows, and the first rank of each host serves it.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from buffers import messages as m
from buffers.timeline import Timeline, Track
from configs.disk import DiskFull, disk_full, is_disk_full
from configs.host import boot_id
from learners.world import World
from sync.file_layout import FileLayout, RankForms, SpanDigests, note_forms
from sync.folders import SHARED_MEMORY
from sync.manifest import Manifest, PartSource
from sync.publisher import Publisher
from sync.staged_rows import StagedRows
from sync.stream import TensorPart

log = logging.getLogger("slipstream.weights")

LOOK_S = 1.0
"""How often a wait looks whether the publication under way has got on."""

PartStream = Callable[[], Iterable[TensorPart]]
"""Yields this rank's parts of the model held."""


class AnnouncedTo(Protocol):
    """Takes the announcements: a `BufferClient` that nobody else uses."""

    def call(self, request: m.Request, expect: type[Any]) -> Any: ...

    def close(self) -> None: ...


class RankPlace(msgspec.Struct, frozen=True):
    """Message of each rank to all: where it writes."""

    memory: str
    """Name that the ranks of one host have in common (`identify_memory`)."""
    host: str
    """Name of the host, for people."""
    boot: str
    """`boot_id` of the host: people may give two hosts one name."""
    address: str
    """Where it serves the host's file; empty: it does not."""


class RankOutcome(msgspec.Struct, frozen=True):
    """Message of each rank to all: how its part of the work on a version has ended."""

    host: str
    data: bytes
    error: str
    """Empty where it has ended well."""
    is_disk_full: bool


class AgreedVersion(msgspec.Struct, frozen=True):
    """Message of the first rank to the publishers of the other hosts."""

    manifest: Manifest
    needed_versions: frozenset[int]


def identify_memory() -> str:
    """Returns a name that processes have in common which see each other's files in shared memory."""
    return f"{boot_id()} {SHARED_MEMORY.stat().st_dev}"


class Publication:
    """One rank's part in it."""

    def __init__(
        self,
        world: World | None = None,
        publisher: Publisher | None = None,
        memory: str = "",
        buffer: AnnouncedTo | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """Collective. `world`: all ranks, in a world that only this uses, because the thread's collectives
        must not mix with training's. `publisher`: on the first rank of each host. `memory`: a name that the
        ranks of one host have in common; ranks that publish nothing may have any. `buffer`: on the first
        rank, hears of each version; None: nobody does."""
        self._world, self.publisher, self._buffer = world or World(), publisher, buffer
        self._timeline = timeline or Timeline()
        address = publisher.address if publisher is not None else ""
        own = RankPlace(memory, os.uname().nodename, boot_id(), address)
        told = self._world.gather_messages(msgspec.json.encode(own))
        places = [msgspec.json.decode(one, type=RankPlace) for one in told]
        memories = list(dict.fromkeys(place.memory for place in places))
        self._hosts = [memories.index(place.memory) for place in places]
        """By rank, the number of its host."""
        self._firsts = [self._hosts.index(number) for number in range(len(memories))]
        """By host, its first rank."""
        self._places = places
        own_host = self._hosts[self._world.rank]
        writing = zip(places, self._hosts, strict=True)
        writers = {(place.host, place.boot) for place, host in writing if host == own_host}
        self._shares_file = len(writers) > 1
        """True where other hosts write to the same file, on a file system of all."""
        self._layout: FileLayout | None = None
        self._rows: StagedRows | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publication")
        self._under_way: Future[Manifest] | None = None
        self._sources: list[PartSource] = []
        """The hosts that have rows, and the first rank's."""
        self._source_of: dict[int, int] = {}
        """By host, its number among them."""
        self._needed_versions: frozenset[int] = frozenset()
        """On the first rank, the versions that stay because they are evaluated later."""
        self.waited_s = 0.0
        """Seconds that training waited for the last publication: for its copy, and for the one before."""
        self.write_s: float | None = None
        """Seconds that the last version took to be written beside training; None before there is one."""

    @property
    def is_divided(self) -> bool:
        """True when no host has a whole file."""
        return len(self._sources) > 1

    @property
    def is_under_way(self) -> bool:
        """True until `finish_version` has returned the version that was begun last, or raised."""
        return self._under_way is not None

    @property
    def is_at_work(self) -> bool:
        """True while the thread has a version to write or to announce."""
        return self._under_way is not None and not self._under_way.done()

    @property
    def num_written(self) -> int:
        """Bytes that this rank has written so far, over all versions."""
        return 0 if self._rows is None else self._rows.num_done

    def check_alive(self) -> None:
        """Raises the error that the publication under way has ended with on this rank, and RuntimeError, with
        the traceback, when a thread that serves weights here has died."""
        if self._under_way is not None and self._under_way.done():
            self._under_way.result()
        if self.publisher is not None:
            self.publisher.check_alive()

    def begin_version(
        self, version: int, stream: PartStream, on_progress: Callable[[], None] = lambda: None
    ) -> None:
        """Copies this rank's rows; a thread publishes the copy. `finish_version` must have returned the
        version before.

        The first call is collective, and so is what `stream` calls for.
        """
        assert self._under_way is None, "the version before is complete first"
        if self._layout is None:
            self._agree_on_layout(stream())
        assert self._rows is not None
        self._rows.copy_parts(_watch_parts(stream(), on_progress))
        self._under_way = self._thread.submit(self._publish_version, version)

    def finish_version(self, on_progress: Callable[[], None] = lambda: None) -> Manifest | None:
        """Waits until the version under way is complete and announced, and returns its manifest; None when
        none is under way.

        Calls `on_progress` while it gets on. Raises the error that the publication ended with, on all ranks.
        """
        if self._under_way is None:
            return None
        assert self._rows is not None
        before = -1
        while not self._under_way.done():
            if (now := self._rows.num_done) != before:
                before = now
                on_progress()
            futures.wait([self._under_way], LOOK_S)
        done, self._under_way = self._under_way, None
        return done.result()

    def metrics(self) -> dict[str, float]:
        """Returns measurements of the last publication that training waited for, and the seconds that the
        last complete one took beside training."""
        assert self._rows is not None and self._layout is not None
        beside = {} if self.write_s is None else {"weights/write_s": self.write_s}
        return beside | {
            "weights/publish_s": self.waited_s,
            "weights/publish_copy_s": self._rows.copy_s,
            "weights/publish_gb_per_s": self._layout.num_bytes / max(self.waited_s, 1e-9) / 1e9,
            "weights/publish_peak_bytes": float(self._rows.largest_part),
            "weights/staged_bytes": float(self._rows.num_bytes),
        }

    def close(self) -> None:
        """Lets the thread end after what it is at, does not wait for it, and closes the publisher."""
        if self._buffer is not None:
            self._thread.submit(self._buffer.close)
        self._thread.shutdown(wait=False)
        if self.publisher is not None:
            self.publisher.close()

    def _agree_on_layout(self, parts: Iterable[TensorPart]) -> None:
        """Lets all ranks know what each publishes of every version, and makes the memory for this rank's
        rows."""
        told = self._world.gather_messages(msgspec.json.encode(note_forms(parts)))
        forms = [msgspec.json.decode(one, type=RankForms) for one in told]
        self._layout = layout = FileLayout(forms)
        self._rows = StagedRows(layout, self._world.rank)
        # The first rank's host has the header, whoever has rows.
        writing = {0} | {self._hosts[span.rank] for span in layout.spans}
        for host in sorted(writing):
            self._source_of[host] = len(self._sources)
            place = self._places[self._firsts[host]]
            self._sources.append(PartSource(place.host, place.address))
        sources = self._sources if self.is_divided else []
        layout.check_manifest(sources, [self._source_of.get(host, 0) for host in self._hosts])

    # ---- in the thread

    def _publish_version(self, version: int) -> Manifest:
        with self._timeline.span(Track.publication, f"writing and digesting version {version}"):
            manifest = self._write_version(version)
        # All ranks wait for it: one that has its GPU by turns gives it to engines that take the version up.
        self._run_together(partial(self._announce_version, manifest))
        return manifest

    def _write_version(self, version: int) -> Manifest:
        began = time.perf_counter()
        assert self._rows is not None
        try:
            paths = self._run_together(partial(self._begin_file, version))
            path = Path(paths[self._firsts[self._hosts[self._world.rank]]].decode())
            rests = self._rows.exchange_fragments(self._world.exchange_messages, self._world.size)
            digests = self._run_together(partial(self._write_rows, path, rests))
            told = self._run_together(partial(self._describe_version, version, digests))
            agreed = msgspec.json.decode(told[0], type=AgreedVersion)
            self._run_together(partial(self._complete_version, agreed))
        except BaseException:
            if self.publisher is not None:
                with contextlib.suppress(OSError):
                    self.publisher.drop_version(version)
            raise
        if self.write_s is None and self._world.rank == 0:
            self._log_first(agreed.manifest, time.perf_counter() - began)
        self.write_s = time.perf_counter() - began
        return agreed.manifest

    def _log_first(self, manifest: Manifest, write_s: float) -> None:
        assert self._layout is not None and self._rows is not None
        log.info(
            "version %d published: %d tensors, %.1f MB by %d ranks on %d hosts; this rank's %.1f MB were "
            "copied in %.3f s, and written in %.3f s beside training",
            manifest.version,
            len(manifest.tensors),
            manifest.num_bytes / 1e6,
            len({span.rank for span in self._layout.spans}),
            max(1, len(self._sources)),
            self._rows.num_bytes / 1e6,
            self._rows.copy_s,
            write_s,
        )

    def _begin_file(self, version: int) -> bytes:
        if self.publisher is None:
            return b""
        assert self._layout is not None
        host = self._hosts[self._world.rank]
        num_bytes = sum(
            span.end - span.begin for span in self._layout.spans if self._hosts[span.rank] == host
        )
        return os.fsencode(self.publisher.begin_version(version, self._layout, num_bytes))

    def _write_rows(self, path: Path, rests: dict[int, bytes]) -> bytes:
        assert self._rows is not None
        if not self._rows.num_bytes:
            return msgspec.msgpack.encode([])
        try:
            return msgspec.msgpack.encode(self._rows.write_rows(path, rests, synced=self._shares_file))
        except OSError as error:
            if is_disk_full(error):
                raise disk_full(path, self._rows.num_bytes) from error
            raise

    def _describe_version(self, version: int, digests: list[bytes]) -> bytes:
        if self._world.rank > 0:
            return b""
        assert self.publisher is not None and self._layout is not None
        told = [msgspec.msgpack.decode(one, type=list[SpanDigests]) for one in digests]
        entries, parts = self._layout.describe_tensors(told), None
        if self.is_divided:
            hosts = [self._source_of.get(host, 0) for host in self._hosts]
            parts = self._layout.describe_parts(told, self._sources, hosts)
        manifest = self.publisher.describe_version(version, self._layout, entries, parts)
        return msgspec.json.encode(AgreedVersion(manifest, self._needed_versions))

    def _complete_version(self, agreed: AgreedVersion) -> bytes:
        if self.publisher is not None:
            self.publisher.needed_versions = agreed.needed_versions
            self.publisher.complete_version(agreed.manifest)
        return b""

    def _announce_version(self, manifest: Manifest) -> bytes:
        """Tells the buffer where the version is. The announcement names no host where none has the whole
        file."""
        if self._buffer is not None:
            assert self.publisher is not None
            request = m.PublishVersion(
                version=manifest.version, manifest_locator=self.publisher.announce_version(manifest)
            )
            with self._timeline.span(Track.publication, f"announcing version {manifest.version}"):
                # A buffer that was started again must know the connection for one of this life of the
                # learner before: an announcement that comes when this life is over is refused by that.
                self._buffer.call(m.LocateJournal(), m.JournalLocation)
                reply = self._buffer.call(request, m.PublishedVersion)
            self._needed_versions = frozenset(reply.needed_versions)
        return b""

    def _run_together(self, action: Callable[[], bytes]) -> list[bytes]:
        """Runs each rank's action; returns what they return, by rank. When one fails all ranks raise, so that
        nobody waits for it.

        A rank that failed raises its own error, the others RuntimeError with the text of that error, or
        DiskFull where the failed rank found no room.
        """
        failed, data = None, b""
        try:
            data = action()
        except BaseException as error:
            failed = error
        text = "" if failed is None else f"{type(failed).__name__}: {failed}"
        own = RankOutcome(os.uname().nodename, data, text, isinstance(failed, DiskFull))
        told = self._world.gather_messages(msgspec.msgpack.encode(own))
        if failed is not None:
            raise failed
        outcomes = [msgspec.msgpack.decode(one, type=RankOutcome) for one in told]
        for rank, outcome in enumerate(outcomes):
            if outcome.error:
                kind = DiskFull if outcome.is_disk_full else RuntimeError
                raise kind(
                    f"rank {rank} on {outcome.host} could not publish its part of the weights: "
                    f"{outcome.error}"
                )
        return [outcome.data for outcome in outcomes]


def _watch_parts(parts: Iterable[TensorPart], on_progress: Callable[[], None]) -> Iterable[TensorPart]:
    """Passes the parts on; each shows that the publication gets on."""
    for part in parts:
        on_progress()
        yield part
