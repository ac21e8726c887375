"""A host's folder of whole models, made of the adapters that a learner publishes."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

from sync.adapter import merge_adapters
from sync.folders import SharedFolder, shared_memory_folder
from sync.snapshot import Snapshot, SnapshotWriter, read_manifest
from sync.spares import find_complete_versions, put_version, retire_version
from sync.stream import TensorPart

PASSING = (".unfinished", ".moving")


class MergedFolder:
    """Makes each version whole once for all processes of the host. What lies there is like any folder of snapshots:

        v<k>-<life>.safetensors, .json      the whole model, and its own manifest and digests
        v<k>-<life>.spare, .was             a version that has gone: the next one is written over it

    It is there as long as a process of this host uses it. Not thread-safe; several processes may share it.
    """

    def __init__(self, source: Path) -> None:
        """`source`: the folder that the adapters are in."""
        name = f"merged-{xxhash.xxh64_hexdigest(str(source.absolute()).encode())}"
        self._shared = SharedFolder(shared_memory_folder(name))
        self._writer = SnapshotWriter()

    def merge_version(self, adapters: Snapshot, *, again: bool = False) -> Snapshot:
        """The same version as a whole model, attested. `again`: what was made before is not what was written.

        Raises ValueError as `sync.adapter.merge_adapters` does, LockTimedOut, and DiskFull.
        """
        manifest = adapters.manifest
        with self._shared.hold_alone(f"makes version {manifest.version} whole") as folder:
            local = folder / Path(manifest.locator).name
            if again:
                _remove_files(folder, f"{local.stem}.*")
            if not local.exists():
                for older in find_complete_versions(folder)[:-1]:  # who has one mapped keeps it
                    retire_version(older)
                for suffix in PASSING:  # of a process that was killed
                    _remove_files(folder, f"*{suffix}")
                put_version(
                    folder,
                    self._writer,
                    manifest.version,
                    manifest.incarnation,
                    self._note_parts(merge_adapters(adapters)),
                )
            made = Snapshot(read_manifest(local))
        made.attest()
        made.checks += adapters.checks
        return made

    def close(self) -> None:
        self._shared.close()

    def _note_parts(self, parts: Iterable[TensorPart]) -> Iterator[TensorPart]:
        """Hands the parts on, and tells those who wait of each."""
        for part in parts:
            self._shared.note_progress()
            yield part


def _remove_files(folder: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        path.unlink()
