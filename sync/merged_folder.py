"""A host's folder of whole models, made of the adapters that a learner publishes."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

from sync.adapters import merge_adapters
from sync.folders import shared_memory_folder
from sync.shared_folder import SharedFolder
from sync.snapshot import Snapshot, read_manifest
from sync.snapshot_writer import SnapshotWriter
from sync.spares import find_complete_versions, put_version, retire_version
from sync.stream import TensorPart

PASSING = (".unfinished", ".moving")
"""Endings of files that are needed for a while only."""


class MergedFolder:
    """Makes each version whole once for all processes of the host. Its files are those of any folder of
    snapshots:

        v<k>-<life>.safetensors, .json      the whole model, and its own manifest and digests
        v<k>-<life>.spare, .was             a version that has gone: the next one is written over it

    The folder exists as long as a process of this host uses it. Not thread-safe; several processes may share
    it.
    """

    def __init__(self, source: Path) -> None:
        """`source`: the folder of the adapters, whose path names this folder."""
        name = f"merged-{xxhash.xxh64_hexdigest(str(source.absolute()).encode())}"
        self._shared = SharedFolder(shared_memory_folder(name))
        self._writer = SnapshotWriter()

    def merge_version(self, adapters: Snapshot, *, again: bool = False) -> Snapshot:
        """Returns the same version as a whole model, attested. `again`: makes it anew, because the file that
        was made before has changed.

        Raises ValueError as `sync.adapters.merge_adapters` does, LockTimedOut, and DiskFull.
        """
        manifest = adapters.manifest
        with self._shared.hold_alone(f"makes version {manifest.version} whole") as folder:
            local = folder / Path(manifest.locator).name
            if again:
                _remove_files(folder, f"{local.stem}.*")
            if not local.exists():
                # A process that has an older version mapped keeps it.
                for older in find_complete_versions(folder)[:-1]:
                    retire_version(older)
                # A process that was killed may have left unfinished files.
                for suffix in PASSING:
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
        """Passes the parts on, and tells waiting processes of each."""
        for part in parts:
            self._shared.note_progress()
            yield part


def _remove_files(folder: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        path.unlink()
