"""The learner's side of the weights: a folder of immutable snapshots, newest last, that subscribers pull
from.

    owner                       locked as long as the publisher lives
    v<k>-<life>.safetensors     the tensors
    v<k>-<life>.json            the manifest: appears last, so what it names is complete
    v<k>-<life>.<host>          a subscriber's seal: the bytes have been verified on that host

A learner that goes back and publishes version k again does so in another life: no name ever stands for two
contents.

Every transport starts from such a folder: in /dev/shm for one host and for hosts that fetch, on a shared file
system for many.
"""

import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import xxhash

from configs.disk import DiskFull, write_all
from configs.parallel import LoraPublish
from configs.schema import Config
from sync.adapters import describe_adapters, merge_adapters
from sync.announcement import announce_version
from sync.file_layout import FileLayout
from sync.folders import (
    OWNER,
    in_shared_memory,
    leave_folder,
    make_private,
    note_used_folder,
    release_folder,
    shared_memory_folder,
    sweep_folders,
)
from sync.locks import HeldLock, LockTimedOut, acquire_lock
from sync.manifest import AdapterRecipe, FileParts, Manifest, TensorEntry, whole_digest
from sync.model_files import copy_model_files
from sync.patch import WORTH
from sync.snapshot import Snapshot
from sync.snapshot_writer import SnapshotWriter
from sync.spares import (
    begin_version,
    complete_version,
    drop_spares,
    find_spare,
    put_version,
    retire_version,
)
from sync.stream import TensorPart
from sync.transports.ends import LearnerEnd, SocketGuards, load_transport
from sync.transports.relay import find_own_address, open_at_free_port
from sync.transports.server import SnapshotServer

log = logging.getLogger("slipstream.weights")

SWEPT_S = 1.0
"""Seconds to wait for the folder's lock: a process that sweeps away the folders of the dead holds it for a
moment."""
VERSION_FILE = re.compile(r"v\d+-[\w-]+\.[\w-]+")
"""Names of files that belong to some version."""


class Publisher:
    """Owns its folder: makes it, empties it of an earlier life's versions, removes it in `close`.

    At start it also sweeps away the folders beside its own (`slipstream-*`) whose publisher has died.
    """

    def __init__(
        self,
        folder: str | Path,
        incarnation: str,
        keep: int = 2,
        *,
        ends: Sequence[LearnerEnd] = (),
        model: Path | None = None,
        adapter: AdapterRecipe | None = None,
    ) -> None:
        """`keep`: number of versions that stay; a subscriber has that many publications' time to map one.
        `ends` offer each version to generators that need more than the folder, and are closed with the
        publisher. `model`: a Hugging Face folder; at the end the folder becomes one too, with the newest
        version and that one's configuration.

        `adapter`: low-rank adapters are published (`sync.adapters.describe_adapters`), which hosts merge into
        whole models; the publisher does so at the end, if there is a `model`. Ends that carry no adapters are
        left out.

        Raises ValueError when a living publisher has the folder, and in shared memory when it is not private
        (`sync.folders`).
        """
        if keep < 1:
            raise ValueError(f"keep must be >= 1, got {keep}")
        if not re.fullmatch(r"\w+", incarnation):
            raise ValueError(f"incarnation must be letters and digits, got {incarnation!r}")
        self.folder = Path(folder).absolute()
        self.incarnation = incarnation
        self.ends = [end for end in ends if adapter is None or end.carries_adapters]
        self.seconds = 0.0
        """Seconds that `publish_version` took."""
        self._keep, self._model, self._adapter = keep, model, adapter
        self._writer = SnapshotWriter()
        self.needed_versions: frozenset[int] = frozenset()
        """Versions that stay beyond the newest `keep`, because they are evaluated later."""
        self._published: list[Manifest] = []
        sweep_folders(self.folder.parent)
        self._lock = note_used_folder(self.folder, _claim_folder(self.folder))
        for left in self.folder.iterdir():
            if VERSION_FILE.fullmatch(left.name):
                left.unlink()

    def publish_version(self, version: int, parts: Iterable[TensorPart]) -> Manifest:
        """Writes one version, then deletes those that are older than the newest `keep` and not needed. The
        versions must rise.

        The caller waits for the copy and the digests of `parts` and for nobody else: not for slow generators,
        transfers under way or patches in the making.

        Raises DiskFull, the versions before whole and in service, when there is no room; RuntimeError when a
        thread of an end has died.
        """
        self._expect_later(version)
        began = time.perf_counter()
        self._make_room()
        manifest = put_version(self.folder, self._writer, version, self.incarnation, parts, self._adapter)
        self._offer_version(manifest)
        self.seconds = time.perf_counter() - began
        if len(self._published) == 1:
            log.info(
                "version %d published: %d tensors, %.1f MB, at most %.1f MB of them at a time, in %.3f s",
                version,
                len(manifest.tensors),
                manifest.num_bytes / 1e6,
                self._writer.largest_part / 1e6,
                self.seconds,
            )
        return manifest

    # ---- versions that several ranks write together (`learners.publication`)

    def begin_version(self, version: int, layout: FileLayout, num_bytes: int) -> Path:
        """Makes a version's file, with its header and without rows; returns its path.

        `num_bytes`: those that ranks will write to it here. Raises as `publish_version`.
        """
        self._expect_later(version)
        self.check_alive()
        self._make_room(num_bytes)
        path = begin_version(self.folder, version, self.incarnation)
        try:
            with path.open("r+b" if path.exists() else "w+b", buffering=0) as file:
                write_all(file.fileno(), layout.header, path)
                file.truncate(layout.num_bytes)
        except DiskFull:
            path.unlink()
            raise
        return path

    def describe_version(
        self, version: int, layout: FileLayout, entries: tuple[TensorEntry, ...], parts: FileParts | None
    ) -> Manifest:
        """Returns the manifest of a version whose rows are written. `parts`: where they are, when they are on
        several hosts."""
        path = str(self.folder / f"v{version}-{self.incarnation}.safetensors")
        digest = whole_digest(entries, self._adapter)
        return Manifest(
            version, self.incarnation, path, layout.num_bytes, entries, digest, self._adapter, parts
        )

    def complete_version(self, manifest: Manifest) -> None:
        """Makes a version whose rows are written one that subscribers may read, and deletes older ones, as
        `publish_version` does. Raises DiskFull, and what `LearnerEnd.offer_version` raises."""
        manifest = msgspec.structs.replace(manifest, path=str(self.folder / Path(manifest.path).name))
        complete_version(self.folder, manifest)
        self._offer_version(manifest)

    def drop_version(self, version: int) -> None:
        """Removes what there is of a version that could not be completed."""
        (self.folder / f"v{version}-{self.incarnation}.unfinished").unlink(missing_ok=True)

    def _expect_later(self, version: int) -> None:
        assert not self._published or version > self._published[-1].version, "versions must rise"

    def _offer_version(self, manifest: Manifest) -> None:
        for end in self.ends:
            end.offer_version(manifest)
        self._published.append(manifest)
        for old in self._published[: -self._keep]:
            if old.version not in self.needed_versions:
                retire_version(Path(old.locator))
                self._published.remove(old)
        if self._model is not None:
            # On a file system of several hosts: this kernel does not know who else has the file mapped, so
            # nothing is written over it.
            drop_spares(self.folder)

    def _make_room(self, num_bytes: int | None = None) -> None:
        """Lets the ends give back what they can spare where the next version, of `num_bytes` or as large as
        the one before, might have no room: patches, and old versions that slow hosts are still at."""
        if not self._published:
            return
        # A patch that is being written may take half as much as a version meanwhile.
        shares = WORTH if find_spare(self.folder) is not None else 1 + WORTH
        size = self._published[-1].num_bytes if num_bytes is None else num_bytes
        needed, free = int(shares * size), shutil.disk_usage(self.folder).free
        if free < needed:
            log.info("%s has %d bytes free, and the next version may need %d", self.folder, free, needed)
            for end in self.ends:
                end.make_room()

    def check_alive(self) -> None:
        """Raises RuntimeError, with the traceback, when a thread that serves weights has died."""
        for end in self.ends:
            end.check_alive()

    @property
    def address(self) -> str:
        """Address at which other hosts may fetch versions; empty: nowhere."""
        return next((end.address for end in self.ends if end.address), "")

    def announce_version(self, manifest: Manifest) -> str:
        """Returns the announcement that `Subscriber.prepare_version` takes, on this host or another."""
        return announce_version(manifest, self.address)

    def close(self) -> None:
        """Removes the folder, or makes a model of it. A subscriber that has a snapshot mapped keeps what it
        has."""
        for end in self.ends:
            end.close()
        if self._model is not None and self._published:
            self._export_model(self._model, self._published[-1])
            release_folder(self._lock)
        else:
            leave_folder(self.folder, self._lock)

    def _export_model(self, model: Path, newest: Manifest) -> None:
        file = Path(newest.path)
        if newest.adapter is not None:
            file = self.folder / "model.unfinished"
            SnapshotWriter().write_snapshot(file, merge_adapters(Snapshot(newest)))
        file.replace(self.folder / "model.safetensors")
        for left in self.folder.iterdir():
            if VERSION_FILE.fullmatch(left.name) or left.name == OWNER:
                left.unlink()
        copy_model_files(model, self.folder)


def open_publisher(
    config: Config,
    run: Path,
    incarnation: str,
    guards: SocketGuards,
    on_progress: Callable[[int], None] = lambda num_bytes: None,
) -> Publisher:
    """Opens the publisher of a run, with the learner's ends of the transport that the configuration names.
    `run`: the run's folder. `on_progress` receives the bytes read so far of the base of adapters.

    Raises as `Publisher`, and ValueError when `sync.address` is taken.
    """
    folder, lora, adapter = weights_folder(config, run), config.learner.lora, None
    ends = load_transport(config.sync.transport).open_learner_ends(config, folder, guards)
    for end in ends:
        if end.address:
            log.info("weights are served at %s", end.address)
    model = Path(config.model.path)
    if lora.rank is not None and lora.publish is LoraPublish.adapter:
        adapter = describe_adapters(model, str(config.model.dtype), lora.alpha / lora.rank, on_progress)
    is_model = config.sync.transport.row.shares_folder
    return Publisher(folder, incarnation, ends=ends, model=model if is_model else None, adapter=adapter)


def open_host_publisher(config: Config, run: Path, incarnation: str, guards: SocketGuards) -> Publisher:
    """Opens the publisher of a host with ranks of the learner other than the first one's: it serves the rows
    of this host.

    Raises as `Publisher`, ValueError where no port is free, TransferFailed where there is no way to the first
    rank's host.
    """
    folder, first = weights_folder(config, run), config.weights_address
    assert first is not None, "the first rank's host serves too"

    def open_server(served: Path, address: str) -> SnapshotServer:
        return SnapshotServer(served, address, secure=guards.secure_server, watch=guards.watch)

    server = open_at_free_port(open_server, folder, find_own_address(first), config.cluster.port_range)
    log.info("the rows of this host's ranks are served at %s", server.address)
    return Publisher(folder, incarnation, ends=[server])


def weights_folder(config: Config, run: Path) -> Path:
    """Returns the folder of a run's snapshots: in shared memory, or where the transport needs it on a file
    system of all hosts."""
    if config.sync.transport.row.shares_folder:
        return Path(config.sync.folder) if config.sync.folder else run / "weights"
    return shared_memory_folder(f"{run.name}-{xxhash.xxh32_hexdigest(str(run).encode())}")


def _claim_folder(folder: Path) -> int:
    """Makes the folder this process's own for as long as the returned descriptor is open."""
    owner, claim = folder / OWNER, folder / f"{OWNER}.{os.getpid()}"
    while True:
        if in_shared_memory(folder):
            make_private(folder)
        else:
            # On a file system that hosts share, the user decides who may write there.
            folder.mkdir(parents=True, exist_ok=True)
        try:
            with owner.open("rb") as previous:
                acquire_lock(previous.fileno(), owner, fcntl.LOCK_EX, SWEPT_S)
        except LockTimedOut as error:
            raise ValueError(
                f"sync.folder must not be in use by another run, got {folder}: {error}"
            ) from None
        except FileNotFoundError:
            pass
        # The file is locked before it bears its name: so a sweep never sees an owner that is about to be
        # locked.
        try:
            lock = os.open(claim, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            HeldLock(lock).write_claim("publishes weights")
            claim.rename(owner)
            return lock
        except FileNotFoundError:
            # A process that had the lock before has swept the folder away meanwhile.
            continue
