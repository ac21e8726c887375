"""The learner's side of the weights: a folder of immutable snapshots, newest last, that subscribers pull from.

    owner                       locked as long as the publisher lives
    v<k>-<life>.safetensors     the tensors
    v<k>-<life>.json            the manifest: appears last, so what it names is complete
    v<k>-<life>.<host>          a subscriber's seal: the bytes have been verified on that host

A learner that goes back and publishes version k again does so in another life: no name ever stands for two contents.

Both transports are such a folder: in /dev/shm for one host, on a shared file system for many.
"""

import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from sync.adapter import merge_adapters
from sync.folders import (
    OWNER,
    in_shared_memory,
    leave_folder,
    make_private,
    note_used_folder,
    release_folder,
    sweep_folders,
)
from sync.locks import HeldLock, LockTimedOut, acquire_lock
from sync.manifest import AdapterRecipe, Manifest
from sync.snapshot import Snapshot, SnapshotWriter
from sync.spares import put_version, retire_version
from sync.stream import TensorPart
from sync.subscriber import announce_version
from sync.transports.cuda_ipc import DeviceCopy
from sync.transports.server import SnapshotServer

log = logging.getLogger("slipstream.weights")

SWEPT_S = 1.0
"""A process that sweeps away what the dead have left has the folder's lock for a moment."""
SNAPSHOT = re.compile(r"v\d+-[\w-]+\.[\w-]+")
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
        server: SnapshotServer | None = None,
        device: DeviceCopy | None = None,
        model: Path | None = None,
        adapter: AdapterRecipe | None = None,
    ) -> None:
        """`keep`: versions that stay; a subscriber has that many publications' time to map one. `server` serves the folder
        to other hosts; it is closed with the publisher. `device` offers the newest version to engines on the same GPU. `model`:
        a Hugging Face folder; at the end the folder becomes one too, with the newest version and that one's configuration.

        `adapter`: what is published are low-rank adapters (`sync.adapter.describe_adapters`), of which hosts make whole models, and never
        devices; in the end so does the publisher, if there is a `model`.

        Raises ValueError when a living publisher has the folder, and in shared memory when it is not private (`sync.folders`).
        """
        if keep < 1:
            raise ValueError(f"keep must be >= 1, got {keep}")
        if not re.fullmatch(r"\w+", incarnation):
            raise ValueError(f"incarnation must be letters and digits, got {incarnation!r}")
        self.folder = Path(folder).absolute()
        self.incarnation = incarnation
        self.seconds = 0.0
        """What the last publication took: as long did training wait."""
        self._keep, self._server, self._model, self._adapter = keep, server, model, adapter
        self._device = device if adapter is None else None
        self._writer = SnapshotWriter()
        self._published: list[Manifest] = []
        sweep_folders(self.folder.parent)
        self._lock = note_used_folder(self.folder, _claim_folder(self.folder))
        for left in self.folder.iterdir():
            if SNAPSHOT.fullmatch(left.name):
                left.unlink()

    def publish_version(self, version: int, parts: Iterable[TensorPart]) -> Manifest:
        """Writes one version, then deletes those that are older than the newest `keep`. The versions must rise.

        Whoever pays for the time waits for the copy and the digests of `parts` and for nobody else: generators that are slow,
        transfers under way and patches in the making are not waited for.

        Raises DiskFull, the versions before whole and in service, when there is no room; RuntimeError when the server has died.
        """
        assert not self._published or version > self._published[-1].version, "versions must rise"
        began = time.perf_counter()
        parts = parts if self._device is None else self._device.tee_parts(parts)
        manifest = put_version(self.folder, self._writer, version, self.incarnation, parts, self._adapter)
        if self._device is not None:
            self._device.offer_version(manifest)
        if self._server is not None:
            self._server.offer_version(manifest)
        self._published.append(manifest)
        while len(self._published) > self._keep:
            retire_version(Path(self._published.pop(0).locator))
        self.seconds = time.perf_counter() - began
        if len(self._published) == 1:
            log.info(
                "version %d published: %d tensors, %.1f MB, at most %.1f MB of them gathered at a time, in %.3f s",
                version, len(manifest.tensors), manifest.num_bytes / 1e6, self._writer.largest_part / 1e6, self.seconds,
            )  # fmt: skip
        return manifest

    def check_alive(self) -> None:
        """Raises RuntimeError, with the traceback, when the thread that serves weights to other hosts has died."""
        if self._server is not None:
            self._server.check_alive()

    def metrics(self) -> dict[str, float]:
        """Of the last publication: how long training waited for it, how long the copy alone took, GB/s, and the largest part
        gathered."""
        return {
            "weights/publish_s": self.seconds,
            "weights/publish_copy_s": self._writer.copy_s,
            "weights/publish_gb_per_s": self._published[-1].num_bytes / self.seconds / 1e9,
            "weights/publish_peak_bytes": float(self._writer.largest_part),
        }

    def announce_version(self, manifest: Manifest) -> str:
        """What `Subscriber.prepare_version` takes, on this host or another."""
        return announce_version(manifest, "" if self._server is None else self._server.address)

    def close(self) -> None:
        """Removes the folder, or makes a model of it. A subscriber that has a snapshot mapped keeps what it has."""
        if self._server is not None:
            self._server.close()
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
            if SNAPSHOT.fullmatch(left.name) or left.name == OWNER:
                left.unlink()
        for file in (
            *model.glob("*.json"),
            *model.glob("*.jinja"),
            *model.glob("*.txt"),
            *model.glob("*.model"),
        ):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, self.folder)


def _claim_folder(folder: Path) -> int:
    """Makes the folder ours for as long as the returned descriptor is open."""
    owner, claim = folder / OWNER, folder / f"{OWNER}.{os.getpid()}"
    while True:
        if in_shared_memory(folder):
            make_private(folder)
        else:  # of a file system that hosts share: who may write there is for its user to say
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
        # Locked before it bears its name: a sweep never sees an owner that is about to be locked.
        try:
            lock = os.open(claim, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            HeldLock(lock).write_claim("publishes weights")
            claim.rename(owner)
            return lock
        except FileNotFoundError:  # swept meanwhile, by one who had the lock before
            continue
