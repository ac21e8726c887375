"""Checkpoints: `step_<k>/` is complete or absent. The manifest is written last, then the folder gets its
name."""

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
LOOK_S = 1.0
"""How often a wait looks whether the checkpoint under way has grown."""
COMPLETE = b"complete"


class LedgerTotals(msgspec.Struct, frozen=True):
    """Totals of the ledger, in tokens, when the step was trained."""

    generated: int
    trained: int
    masked: int


class FileDigest(msgspec.Struct, frozen=True):
    num_bytes: int
    xxh3: str
    """xxh3-128 of the file's bytes, hex."""


class CheckpointManifest(msgspec.Struct, frozen=True):
    step: int
    """Steps trained: the version held, the place in the learning rate's schedule, and the step that the
    buffer goes on from."""
    incarnation: str
    """Names the life of the learner that wrote the checkpoint."""
    seed: int
    kl_coef: float = 0.0
    """The KL penalty's coefficient, which may have been adapted."""
    ledger: LedgerTotals | None = None
    """None for a learner that was trained from a recording, which has no ledger."""
    engine: str = "fsdp"
    """`learner.engine`: no other one reads its files."""
    files: dict[str, FileDigest] = {}
    """All files of the checkpoint but this manifest: models, optimizers and the ranks' random states."""


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint differs from what was written."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    manifest: CheckpointManifest


class CheckpointWriter:
    """Writes checkpoints into `folder/step_<k>` in a thread, one at a time, and keeps the newest `keep`.

    Each rank has one.
    """

    def __init__(self, folder: Path, keep: int, world: "World") -> None:
        """`world`: all ranks, in a world that only this writer uses, because the thread's collectives must
        not mix with training's."""
        self._folder, self._keep, self._world = folder, keep, world
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[CheckpointManifest] | None = None
        self._temporary = folder
        """Folder of the checkpoint under way."""
        self._num_digested = 0
        """Bytes that were read again to be digested, over all checkpoints."""
        self.last_write_s: float | None = None
        """Seconds that the last checkpoint took to be written; None before there is one."""

    def begin_checkpoint(
        self,
        manifest: CheckpointManifest,
        write: StateWriter,
        on_progress: Callable[[], None] = lambda: None,
    ) -> CheckpointManifest | None:
        """Begins to write a checkpoint, once the one under way is complete; returns that one's manifest, as
        `take_written` does.

        Collective. `write` writes this rank's part into the folder that it gets.
        """
        before = self.take_written(wait=True, on_progress=on_progress)
        self._under_way = self._thread.submit(self._write_checkpoint, manifest, write)
        return before

    def take_written(
        self, *, wait: bool = False, on_progress: Callable[[], None] = lambda: None
    ) -> CheckpointManifest | None:
        """Returns the manifest of a checkpoint that has become complete, once; else None.

        With `wait` it waits for the checkpoint under way, and calls `on_progress` while that one grows.
        Raises the error that its writing ended with: DiskFull where there was no room. Its remains are
        removed then, and older checkpoints stay as they were.
        """
        if self._under_way is None or not (wait or self._under_way.done()):
            return None
        before = -1
        while not self._under_way.done():
            if (now := self._count_bytes()) != before:
                before = now
                on_progress()
            futures.wait([self._under_way], LOOK_S)
        done, self._under_way = self._under_way, None
        return done.result()

    def _count_bytes(self) -> int:
        """Returns how many bytes of the checkpoint under way were written, plus all bytes read again."""
        sizes = 0
        with contextlib.suppress(OSError):  # the folder is renamed or removed meanwhile
            for path in self._temporary.rglob("*"):
                sizes += path.stat().st_size
        return sizes + self._num_digested

    def close(self) -> None:
        """Lets the thread end after what it is writing; does not wait for it."""
        self._thread.shutdown(wait=False)

    # ---- in the thread

    def _write_checkpoint(self, manifest: CheckpointManifest, write: StateWriter) -> CheckpointManifest:
        self._temporary = temporary = self._folder / f".step_{manifest.step}.tmp"
        is_first, began = self._world.rank == 0, time.monotonic()

        def make_folder() -> None:
            if is_first:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
                _sync_folder(self._folder.parent)

        try:
            self._run_on_all_ranks(make_folder)
            self._run_on_all_ranks(lambda: write(temporary))
            manifest = self._complete_checkpoint(manifest)
        except BaseException as error:  # torch's CheckpointException is no Exception
            if is_first:
                shutil.rmtree(temporary, ignore_errors=True)
            if _says_disk_full(str(error)):
                raise _describe_full_disk(self._folder) from error
            raise
        self.last_write_s = time.monotonic() - began
        return manifest

    def _complete_checkpoint(self, manifest: CheckpointManifest) -> CheckpointManifest:
        """The first rank reads all files again for their digests, and completes the checkpoint; the others
        wait for it.

        That may take longer than a collective waits. When it fails all ranks raise: the first one its error,
        the others RuntimeError.
        """
        failed: BaseException | None = None

        def complete() -> bytes:
            nonlocal failed, manifest
            try:
                files = digest_files(self._temporary, self._count_digested)
                manifest = msgspec.structs.replace(manifest, files=files)
                finish_checkpoint(self._folder, self._temporary, manifest, self._keep)
            except BaseException as error:
                failed = error
                return f"{type(error).__name__}: {error}".encode()
            return COMPLETE

        outcome = self._world.broadcast_message("checkpoint", complete)
        if failed is not None:
            raise failed
        if outcome != COMPLETE:
            raise RuntimeError(f"rank 0 could not complete the checkpoint: {outcome.decode()}")
        return manifest

    def _count_digested(self, num_bytes: int) -> None:
        self._num_digested += num_bytes

    def _run_on_all_ranks(self, action: Callable[[], None]) -> None:
        """Runs each rank's action. When one fails all ranks raise, so that nobody waits for it.

        A rank that failed raises its own error, the others RuntimeError with the text of that error.
        """
        failed = None
        try:
            action()
        except BaseException as error:
            failed = error
        errors = self._world.gather_messages(
            f"{type(failed).__name__}: {failed}".encode() if failed is not None else b""
        )
        if failed is not None:
            raise failed
        for rank, text in enumerate(errors):
            if text:
                raise RuntimeError(f"rank {rank} could not write its part of the checkpoint: {text.decode()}")


def _says_disk_full(text: str) -> bool:
    """Returns whether an error's text says so. Libraries wrap the system's error, but quote its words."""
    return any(os.strerror(number) in text for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def _describe_full_disk(folder: Path) -> DiskFull:
    """Returns the error that says how much room a checkpoint needs.

    The remains are removed already, so what is free now was not enough. The checkpoint before tells more, if
    there is one.
    """
    before = find_latest(folder)
    needed = sum(file.num_bytes for file in before.manifest.files.values()) if before is not None else 0
    return disk_full(folder, max(needed, shutil.disk_usage(folder).free + 1))


def finish_checkpoint(folder: Path, temporary: Path, manifest: CheckpointManifest, keep: int) -> None:
    """Gives a folder that lacks only its manifest the manifest and its name; deletes all checkpoints but the
    newest `keep`."""
    final = folder / f"step_{manifest.step}"
    with open(temporary / "manifest.json", "wb") as file:
        file.write(msgspec.json.encode(manifest))
        file.flush()
        os.fsync(file.fileno())
    # The names must be on the disk before the rename is, or a loss of power leaves a complete name over an
    # empty folder.
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
    folder: Path, on_read: Callable[[int], None] = lambda num_bytes: None
) -> dict[str, FileDigest]:
    """Returns size and digest of each file in the folder, by relative path. The files are on the disk (fsync)
    afterwards.

    `on_read` receives the size of each piece that was read.
    """
    digests = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest = xxhash.xxh3_128()
        with path.open("rb") as file:
            os.fsync(file.fileno())
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                on_read(len(chunk))
        digests[str(path.relative_to(folder))] = FileDigest(path.stat().st_size, digest.hexdigest())
    return digests


def verify_checkpoint(
    folder: Path, on_read: Callable[[int], None] = lambda num_bytes: None
) -> CheckpointManifest:
    """Returns the manifest of the checkpoint in `folder`, after all its files were compared with it.

    Raises DamagedCheckpoint, which names the first file that differs. `on_read` receives the size of each
    piece that was read.
    """
    manifest = read_manifest(folder)
    digests = digest_files(folder, on_read)
    for name, wanted in manifest.files.items():
        if digests.get(name) != wanted:
            raise DamagedCheckpoint(
                f"{folder / name} must be the file that was written ({wanted.num_bytes} bytes, "
                f"xxh3 {wanted.xxh3}), got {digests.get(name) or 'none'}; without the folder {folder} "
                "the run goes on from an older checkpoint, if there is one"
            )
    return manifest


def read_manifest(folder: Path) -> CheckpointManifest:
    """Returns the manifest of the checkpoint in `folder`. Raises OSError or msgspec.DecodeError."""
    return msgspec.json.decode((folder / "manifest.json").read_bytes(), type=CheckpointManifest)


def find_checkpoints(folder: Path) -> list[Checkpoint]:
    """Returns the complete checkpoints, oldest first.

    It passes over a folder without a readable manifest of its own step.
    """
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
