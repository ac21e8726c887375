"""A host's folder of whole models, made of the adapters that a learner publishes."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

import xxhash

from sync.adapter import whole
from sync.folders import leave, share, shared_memory_folder, sweep
from sync.snapshot import Snapshot, SnapshotWriter, read_manifest
from sync.spares import complete, put, retire

PASSING = (".unfinished", ".moving")


class MergedFolder:
    """Makes each version whole once for all processes of the host. What lies there is like any folder of snapshots:

        v<k>-<life>.safetensors, .json      the whole model, and its own manifest and digests
        v<k>-<life>.spare, .was             a version that has gone: the next one is written over it

    It is there as long as a process of this host uses it. Not thread-safe; several processes may share it.
    """

    def __init__(self, source: Path) -> None:
        """`source`: the folder that the adapters are in."""
        self._folder = shared_memory_folder(f"merged-{xxhash.xxh64_hexdigest(str(source.absolute()).encode())}")
        self._writer = SnapshotWriter()
        self._lock: int | None = None

    def take(self, adapters: Snapshot, *, again: bool = False) -> Snapshot:
        """The same version as a whole model, attested. `again`: what was made before is not what was written.

        Raises ValueError as `sync.adapter.whole` does.
        """
        with self._alone():
            manifest = adapters.manifest
            local = self._folder / Path(manifest.locator).name
            if again:
                self._remove(f"{local.stem}.*")
            if not local.exists():
                for older in complete(self._folder)[:-1]:  # who has one mapped keeps it
                    retire(older)
                for suffix in PASSING:  # of a process that was killed
                    self._remove(f"*{suffix}")
                put(self._folder, self._writer, manifest.version, manifest.incarnation, whole(adapters))
            made = Snapshot(read_manifest(local))
            made.attest()
        made.checks += adapters.checks
        return made

    def close(self) -> None:
        if self._lock is not None:
            leave(self._folder, self._lock)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Other processes of this host wait."""
        if self._lock is None:
            sweep(self._folder.parent)
            self._lock = share(self._folder)
        with open(self._folder / "lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _remove(self, pattern: str) -> None:
        for path in self._folder.glob(pattern):
            path.unlink()
