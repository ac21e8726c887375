"""Weights on the learner's own host: generators read the files of its folder in shared memory, where they
are."""

from pathlib import Path

from configs.host import boot_id
from configs.schema import Config
from sync.announcement import Announcement, TransferFailed
from sync.folders import check_private, in_shared_memory, is_private
from sync.snapshot import Snapshot, read_manifest
from sync.transports.ends import GeneratorEnd, LearnerEnd, SocketGuards


class FolderEnd:
    """Reads versions in the learner's own folder."""

    fetched_bytes = 0

    def bring_version(self, announcement: Announcement, *, again: bool = False) -> Snapshot:
        """Raises also ValueError when a folder in shared memory is not private (`sync.folders`)."""
        return Snapshot(read_manifest(self.locate_manifest(announcement, again=again), announcement.digest))

    def locate_manifest(self, announcement: Announcement, *, again: bool = False) -> Path:
        """Returns the path of the manifest on this host. Raises as `bring_version`."""
        path = find_at_hand(announcement)
        if path is None:
            raise TransferFailed(
                f"{announcement.path} is on another host, and this generator fetches from none"
            )
        return path

    def refresh_spare(self) -> None: ...

    def close(self) -> None: ...


def find_at_hand(announcement: Announcement) -> Path | None:
    """Returns the learner's own manifest where this process can read it, else None.

    A container on the learner's host may have a /dev/shm of its own: there the boot id is the learner's, but
    the folder is missing. Raises ValueError when the learner serves no other hosts and its folder in shared
    memory is not private (`sync.folders`).
    """
    path = Path(announcement.path)
    folder = path.parent
    if not announcement.address:
        if in_shared_memory(folder):
            check_private(folder)
        return path
    is_usable = folder.exists() and (is_private(folder) or not in_shared_memory(folder))
    return path if announcement.host == boot_id() and is_usable else None


def open_learner_ends(config: Config, folder: Path, guards: SocketGuards) -> list[LearnerEnd]:
    return []


def open_generator_end(config: Config, folder: Path, guards: SocketGuards) -> GeneratorEnd:
    return FolderEnd()
