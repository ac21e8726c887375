"""Checkpoints: `step_<k>/`, complete or absent. The manifest is written last, then the folder gets its name."""

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash

from configs.disk import DiskFull, disk_full

if TYPE_CHECKING:  # the driver looks for checkpoints, and importing torch would take it seconds
    from learners.world import World

StateWriter = Callable[[Path], None]
"""Writes a copy of an engine's state into a folder."""

CHUNK_BYTES = 1 << 24
LOOK_S, HEAR_S = 1.0, 10.0
"""How often a wait looks whether it gets on."""


class LedgerTotals(msgspec.Struct, frozen=True):
    """The ledger, in tokens, when the step was trained."""

    generated: int
    trained: int
    masked: int


class FileDigest(msgspec.Struct, frozen=True):
    num_bytes: int
    xxh3: str
    """xxh3-128 of its bytes, hex"""


class CheckpointManifest(msgspec.Struct, frozen=True):
    step: int
    """Steps trained: also the version held, where the schedule of the learning rate is, and where the buffer goes on."""
    incarnation: str
    """The life of the learner that wrote it."""
    seed: int
    kl_coef: float = 0.0
    """Where the coefficient of the KL penalty has come to."""
    ledger: LedgerTotals | None = None
    """None: trained from a recording, which has none"""
    engine: str = "fsdp"
    """`learner.engine`: no other one reads its files."""
    files: dict[str, FileDigest] = {}
    """All that the checkpoint consists of, but for this manifest: models, optimizers and the ranks' random states."""


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint is not what was written."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    manifest: CheckpointManifest


class CheckpointWriter:
    """Writes checkpoints into `folder/step_<k>` in a thread, one at a time, and keeps the newest `keep`. One on each rank."""

    def __init__(self, folder: Path, keep: int, world: "World") -> None:
        """`world`: of all ranks, which nothing else uses."""
        self._folder, self._keep, self._world = folder, keep, world
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[CheckpointManifest] | None = None
        self._temporary = folder
        """Where the one under way is written."""
        self._num_digested = self._num_told = 0
        self.last_write_s: float | None = None
        """Seconds that the last one took to be written; None before there is one."""

    def begin_checkpoint(
        self, manifest: CheckpointManifest, write: StateWriter, moved: Callable[[], None] = lambda: None
    ) -> CheckpointManifest | None:
        """Collective. `write` makes its part of the folder that it is given. Waits for what is being written: see `take_written`."""
        before = self.take_written(wait=True, moved=moved)
        self._under_way = self._thread.submit(self._write, manifest, write)
        return before

    def take_written(
        self, *, wait: bool = False, moved: Callable[[], None] = lambda: None
    ) -> CheckpointManifest | None:
        """The manifest of a checkpoint that has become complete, once. Raises what has gone wrong while it was written: DiskFull where
        there was no room. What had been written of it is removed, and the checkpoints before stay as they were.

        `moved` is called now and then while the wait gets on."""
        if self._under_way is None or not (wait or self._under_way.done()):
            return None
        before = -1
        while not self._under_way.done():
            if (now := self._num_bytes()) != before:
                before = now
                moved()
            futures.wait([self._under_way], LOOK_S)
        done, self._under_way = self._under_way, None
        return done.result()

    def _num_bytes(self) -> int:
        """Written and read again so far of the checkpoint under way."""
        sizes = 0
        with contextlib.suppress(OSError):  # the folder is renamed or removed meanwhile
            for path in self._temporary.rglob("*"):
                sizes += path.stat().st_size
        return sizes + self._num_digested

    def close(self) -> None:
        """Does not wait."""
        self._thread.shutdown(wait=False)

    def _write(self, manifest: CheckpointManifest, write: StateWriter) -> CheckpointManifest:
        self._temporary = temporary = self._folder / f".step_{manifest.step}.tmp"
        first, began = self._world.rank == 0, time.monotonic()

        def begin() -> None:
            if first:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
                _sync_folder(self._folder.parent)

        try:
            self._together(begin)
            self._together(lambda: write(temporary))
            manifest = self._completed(manifest)
        except BaseException as error:  # torch's CheckpointException is no Exception
            if first:
                shutil.rmtree(temporary, ignore_errors=True)
            if _says_disk_full(str(error)):
                raise _no_room(self._folder) from error
            raise
        self.last_write_s = time.monotonic() - began
        return manifest

    def _completed(self, manifest: CheckpointManifest) -> CheckpointManifest:
        """The first rank reads all that was written again, and completes the checkpoint. The others wait for that outside of collectives,
        whose time-out a large one would outlast."""
        before, self._num_told = f"checkpoint {self._num_told}", self._num_told + 1
        name, said = f"checkpoint {self._num_told}", b"complete"
        if self._world.rank == 0:
            try:
                manifest = msgspec.structs.replace(
                    manifest, files=digest_files(self._temporary, self._digested)
                )
                finish_checkpoint(self._folder, self._temporary, manifest, self._keep)
            except BaseException as error:
                said = f"{type(error).__name__}: {error}".encode()
                raise
            finally:
                self._world.tell(name, said, instead_of=before)
            return manifest
        while (told := self._world.hear(name, HEAR_S)) is None:
            pass
        if told != said:
            raise RuntimeError(f"rank 0 could not complete the checkpoint: {told.decode()}")
        return manifest

    def _digested(self, num_bytes: int) -> None:
        self._num_digested += num_bytes

    def _together(self, action: Callable[[], None]) -> None:
        """Each rank does its part. When one fails all of them raise, so that nobody waits for it: its own error there, RuntimeError
        with the error's text elsewhere."""
        failed = None
        try:
            action()
        except BaseException as error:
            failed = error
        told = self._world.gather_messages(
            f"{type(failed).__name__}: {failed}".encode() if failed is not None else b""
        )
        if failed is not None:
            raise failed
        for rank, text in enumerate(told):
            if text:
                raise RuntimeError(f"rank {rank} could not write its part of the checkpoint: {text.decode()}")


def _says_disk_full(text: str) -> bool:
    """Libraries wrap what the system has said, but quote it."""
    return any(os.strerror(number) in text for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def _no_room(folder: Path) -> DiskFull:
    """The remains have been removed, and what is free now was not enough; the checkpoint before may tell how much is."""
    before = find_latest(folder)
    needed = sum(file.num_bytes for file in before.manifest.files.values()) if before is not None else 0
    return disk_full(folder, max(needed, shutil.disk_usage(folder).free + 1))


def finish_checkpoint(folder: Path, temporary: Path, manifest: CheckpointManifest, keep: int) -> None:
    """Gives a folder that holds all but the manifest its manifest and its name; deletes all but the newest `keep`."""
    final = folder / f"step_{manifest.step}"
    with open(temporary / "manifest.json", "wb") as file:
        file.write(msgspec.json.encode(manifest))
        file.flush()
        os.fsync(file.fileno())
    for made in (*(path for path in temporary.rglob("*") if path.is_dir()), temporary):
        _sync_folder(made)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    _sync_folder(folder)
    for old in find_checkpoints(folder)[:-keep]:
        shutil.rmtree(old.folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest_files(
    folder: Path, digested: Callable[[int], None] = lambda num_bytes: None
) -> dict[str, FileDigest]:
    """Of all files in the folder, which are on the disk afterwards. `digested` is told of each piece that was read."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest = xxhash.xxh3_128()
        with path.open("rb") as file:
            os.fsync(file.fileno())
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                digested(len(chunk))
        found[str(path.relative_to(folder))] = FileDigest(path.stat().st_size, digest.hexdigest())
    return found


def verify_checkpoint(
    folder: Path, digested: Callable[[int], None] = lambda num_bytes: None
) -> CheckpointManifest:
    """The manifest of the checkpoint in `folder`, whose files are what was written. Raises DamagedCheckpoint, naming the first that is not.
    `digested` is told of each piece that was read."""
    manifest = read_manifest(folder)
    found = digest_files(folder, digested)
    for name, wanted in manifest.files.items():
        if found.get(name) != wanted:
            raise DamagedCheckpoint(
                f"{folder / name} must be the file that was written ({wanted.num_bytes} bytes, xxh3 {wanted.xxh3}), got "
                f"{found.get(name) or 'none'}; without the folder {folder} the run goes on from an older checkpoint, if there is one"
            )
    return manifest


def read_manifest(folder: Path) -> CheckpointManifest:
    """The manifest of the checkpoint in `folder`. Raises OSError or msgspec.DecodeError."""
    return msgspec.json.decode((folder / "manifest.json").read_bytes(), type=CheckpointManifest)


def find_checkpoints(folder: Path) -> list[Checkpoint]:
    """Whole checkpoints, oldest first. What has no readable manifest of its own step is passed over."""
    found = []
    for path in folder.glob("step_*"):
        try:
            manifest = read_manifest(path)
        except (OSError, msgspec.DecodeError):
            continue
        if path.name == f"step_{manifest.step}" and (path / "engine").is_dir():
            found.append(Checkpoint(path, manifest))
    return sorted(found, key=lambda checkpoint: checkpoint.manifest.step)


def find_latest(folder: Path) -> Checkpoint | None:
    return next(reversed(find_checkpoints(folder)), None)
