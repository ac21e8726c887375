"""The learner's side of the weights: a folder of immutable snapshots, newest last, that subscribers pull from.

    owner                locked as long as the publisher lives
    v<k>.safetensors     the tensors
    v<k>.json            the manifest: appears last, so what it names is complete

Both transports are such a folder: in /dev/shm for one host, on a shared file system for many.
"""

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch

from sync.manifest import Manifest, whole_digest
from sync.snapshot import SnapshotWriter

PREFIX = "slipstream-"
OWNER = "owner"


def shared_memory_folder(run: str) -> Path:
    """Where a run's snapshots lie when all its roles share one host."""
    return Path("/dev/shm") / f"{PREFIX}{run}"


class Publisher:
    """Owns its folder: makes it, empties it of an earlier life's versions, removes it in `close`.

    At start it also sweeps away the folders beside its own (`slipstream-*`) whose publisher has died.
    """

    def __init__(self, folder: str | Path, incarnation: str, keep: int = 2) -> None:
        """`keep`: versions that stay; a subscriber has that many publications' time to map one.

        Raises ValueError when a living publisher has the folder.
        """
        if keep < 1:
            raise ValueError(f"keep must be >= 1, got {keep}")
        self.folder = Path(folder).absolute()
        self.incarnation = incarnation
        self.seconds = 0.0
        """What the last publication took."""
        self._keep = keep
        self._writer = SnapshotWriter()
        self._published: list[Manifest] = []
        sweep(self.folder.parent)
        self._lock = _own(self.folder)
        for left in self.folder.iterdir():
            if re.fullmatch(r"v\d+\.\w+", left.name):
                left.unlink()

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """Writes one version, then deletes those that are older than the newest `keep`.

        `tensors`: (Hugging Face name, whole tensor), consumed one at a time. The versions must rise.
        """
        assert not self._published or version > self._published[-1].version, "versions must rise"
        began = time.perf_counter()
        path = self.folder / f"v{version}.safetensors"
        unfinished = path.with_suffix(".unfinished")
        entries = self._writer.write(unfinished, tensors)
        num_bytes = unfinished.stat().st_size
        unfinished.rename(path)
        manifest = Manifest(version, self.incarnation, str(path), num_bytes, entries, whole_digest(entries))
        unfinished.write_bytes(msgspec.json.encode(manifest))
        unfinished.rename(manifest.locator)
        self._published.append(manifest)
        while len(self._published) > self._keep:
            _delete(self._published.pop(0))
        self.seconds = time.perf_counter() - began
        return manifest

    def close(self) -> None:
        """Removes the folder. A subscriber that has a snapshot mapped keeps what it has."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def sweep(parent: Path) -> list[Path]:
    """Removes the folders of publishers that no longer live; returns them.

    A living publisher holds a lock on its folder's `owner` file, which the kernel drops at its death, however it dies.
    Unlike a process id it is never used again, and it holds across containers that share /dev/shm.
    """
    swept = []
    for owner in parent.glob(f"{PREFIX}*/{OWNER}"):
        folder = owner.parent
        if folder.is_symlink() or owner.is_symlink() or folder.stat().st_uid != os.geteuid():
            continue
        try:
            lock = os.open(owner, os.O_RDWR)
        except FileNotFoundError:  # another publisher is sweeping too
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            swept.append(folder)
        except BlockingIOError:
            pass  # its publisher lives
        finally:
            os.close(lock)
    return swept


def _own(folder: Path) -> int:
    """Makes the folder ours for as long as the returned descriptor is open."""
    folder.mkdir(parents=True, exist_ok=True)
    owner = folder / OWNER
    try:
        with owner.open("rb") as previous:
            fcntl.flock(previous, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        pass
    except BlockingIOError:
        raise ValueError(f"sync.folder must not be in use by another run, got {folder}") from None
    # Locked before it bears its name: a sweep never sees an owner that is about to be locked.
    claim = folder / f"{OWNER}.{os.getpid()}"
    lock = os.open(claim, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(lock, f"{os.getpid()}\n".encode())
    claim.rename(owner)
    return lock


def _delete(manifest: Manifest) -> None:
    """The manifest first: whoever finds it a moment later finds nothing, rather than a name without a file."""
    Path(manifest.locator).unlink(missing_ok=True)
    Path(manifest.path).unlink(missing_ok=True)
