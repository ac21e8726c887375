"""Checkpoints: `step_<k>/` is complete or absent. The manifest is written last, then the folder gets its
name."""

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash

from buffers.timeline import Timeline, Track
from configs.disk import DiskFull, disk_full

if TYPE_CHECKING:  # the driver looks for checkpoints, and importing torch would take it seconds
    from learners.world import World

StateWriter = Callable[[Path], list[Path]]
"""Writes a rank's part of a copy of an engine's state into a folder; returns the files that it wrote."""

CHUNK_BYTES = 1 << 24
LOOK_S = 1.0
"""How often a wait looks whether the checkpoint under way has grown."""


class LedgerTotals(msgspec.Struct, frozen=True):
    """Totals of the ledger, in tokens, when the step was trained."""

    generated: int
    trained: int
    masked: int


class FileDigest(msgspec.Struct, frozen=True):
    num_bytes: int
    xxh3: str
    """xxh3-128 of the file's bytes, hex."""
    rank: int = 0
    """The rank that wrote it."""


Digests = dict[str, FileDigest]
"""Files of a checkpoint by their path in its folder."""


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
    files: Digests = {}
    """All files of the checkpoint but this manifest: models, optimizers and the ranks' random states."""
    ranks: int = 0
    """Number of ranks that wrote it; 0 where an older learner did, whose first rank digested all files."""


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint differs from what was written."""


class PartOutcome(msgspec.Struct, frozen=True):
    """Message of each rank to all: how its part of the work on a checkpoint has ended."""

    host: str
    files: Digests
    """The files that it has written."""
    error: str
    """Empty where it has ended well."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    manifest: CheckpointManifest


class CheckpointWriter:
    """Writes checkpoints into `folder/step_<k>` in a thread, one at a time, and keeps the newest `keep`.

    Each rank has one.
    """

    def __init__(self, folder: Path, keep: int, world: "World", timeline: Timeline | None = None) -> None:
        """`world`: all ranks, in a world that only this writer uses, because the thread's collectives must
        not mix with training's."""
        self._folder, self._keep, self._world = folder, keep, world
        self._timeline = timeline or Timeline()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[CheckpointManifest] | None = None
        self._temporary = folder
        """Folder of the checkpoint under way."""
        self._num_digested = 0
        """Bytes that were read again to be digested, over all checkpoints."""
        self.last_write_s: float | None = None
        """Seconds that the last checkpoint took to be written; None before there is one."""

    @property
    def is_under_way(self) -> bool:
        """True while a checkpoint is being written: its copy is in memory."""
        return self._under_way is not None and not self._under_way.done()

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
        writing = self._timeline.span(Track.checkpoint, f"writing the checkpoint of step {manifest.step}")
        self._under_way = self._thread.submit(writing(self._write_checkpoint), manifest, write)
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
        self._temporary = temporary = _hide(self._folder / f"step_{manifest.step}")
        is_first, began = self._world.rank == 0, time.monotonic()

        def make_folder() -> Digests:
            if is_first:
                # Also what a learner has left that was killed at another step.
                for leftover in self._folder.glob(_hide(self._folder / "step_*").name):
                    shutil.rmtree(leftover, ignore_errors=True)
                temporary.mkdir(parents=True)
                _sync_folder(self._folder.parent)
            return {}

        def write_part() -> Digests:
            """The rank that wrote a file reads it again: its host has the bytes still in memory."""
            return digest_files(temporary, write(temporary), self._count_digested, self._world.rank)

        def complete() -> Digests:
            if is_first:
                finish_checkpoint(self._folder, temporary, manifest, self._keep)
            return {}

        try:
            self._run_on_all_ranks(make_folder)
            files = self._run_on_all_ranks(write_part)
            manifest = msgspec.structs.replace(manifest, files=files, ranks=self._world.size)
            self._run_on_all_ranks(complete)
        except BaseException:  # torch's CheckpointException is no Exception
            if is_first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        self.last_write_s = time.monotonic() - began
        return manifest

    def _count_digested(self, num_bytes: int) -> None:
        self._num_digested += num_bytes

    def _run_on_all_ranks(self, action: Callable[[], Digests]) -> Digests:
        """Runs each rank's action, and returns what they return together. When one fails all ranks raise, so
        that nobody waits for it.

        A rank that failed raises its own error, the others RuntimeError with the text of that error; all
        raise DiskFull where a rank found no room.
        """
        failed, digests = None, {}
        try:
            digests = action()
        except BaseException as error:
            failed = error
        host = os.uname().nodename
        own = PartOutcome(host, digests, "" if failed is None else f"{type(failed).__name__}: {failed}")
        outcomes = [
            msgspec.json.decode(one, type=PartOutcome)
            for one in self._world.gather_messages(msgspec.json.encode(own))
        ]
        for rank, outcome in enumerate(outcomes):
            if _says_disk_full(outcome.error):
                raise self._describe_full_disk(rank) from failed
        if failed is not None:
            raise failed
        for rank, outcome in enumerate(outcomes):
            if outcome.error:
                raise RuntimeError(
                    f"rank {rank} on {outcome.host} could not write its part of the checkpoint: "
                    f"{outcome.error}"
                )
        return {name: digest for outcome in outcomes for name, digest in outcome.files.items()}

    def _describe_full_disk(self, rank: int) -> DiskFull:
        """Returns on all ranks the error that says how much room a checkpoint needs, as the rank that found
        none sees the disk.

        The remains are removed before, so what is free then was not enough. The checkpoint before tells more,
        if there is one.
        """
        if self._world.rank == 0:
            shutil.rmtree(self._temporary, ignore_errors=True)
        self._world.barrier()
        text = ""
        if self._world.rank == rank:
            before = find_latest(self._folder)
            needed = sum(file.num_bytes for file in before.manifest.files.values()) if before else 0
            place = self._folder if self._folder.exists() else self._folder.parent
            text = str(disk_full(self._folder, max(needed, shutil.disk_usage(place).free + 1)))
            if self._world.size > 1:
                text = f"on {os.uname().nodename}, {text}"
        return DiskFull(self._world.gather_messages(text.encode())[rank].decode())


def _says_disk_full(text: str) -> bool:
    """Returns whether an error's text says so. Libraries wrap the system's error, but quote its words."""
    return any(os.strerror(number) in text for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


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
        # What a killed learner leaves of it is removed with the next one.
        os.replace(old.folder, hidden := _hide(old.folder))
        shutil.rmtree(hidden)


def _hide(checkpoint: Path) -> Path:
    """Returns the name of a checkpoint's folder while it is not whole, or not any more."""
    return checkpoint.with_name(f".{checkpoint.name}.tmp")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest_files(
    folder: Path,
    paths: Iterable[Path],
    on_read: Callable[[int], None] = lambda num_bytes: None,
    rank: int = 0,
) -> Digests:
    """Returns size and digest of files in the folder, by relative path. The files are on the disk (fsync)
    afterwards.

    `on_read` receives the size of each piece that was read. `rank` wrote the files.
    """
    digests = {}
    for path in paths:
        digest = xxhash.xxh3_128()
        with path.open("rb") as file:
            os.fsync(file.fileno())
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                on_read(len(chunk))
        digests[str(path.relative_to(folder))] = FileDigest(path.stat().st_size, digest.hexdigest(), rank)
    return digests


def verify_checkpoint(
    folder: Path,
    world: "World | None" = None,
    on_read: Callable[[int], None] = lambda num_bytes: None,
    while_waiting: Callable[[], None] | None = None,
) -> CheckpointManifest:
    """Returns the manifest of the checkpoint in `folder`, after all its files were compared with it.

    Collective: each rank of `world`, whose collectives must have time for it, reads a part of the files. All
    raise DamagedCheckpoint, which names the first file that differs. `on_read` receives the size of each
    piece that this rank has read; `while_waiting` is called now and then while it waits for the others.
    """
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    manifest, damage = None, ""
    try:
        manifest = read_manifest(folder)
        for name in choose_files(manifest, rank, size):
            damage = damage or _find_damage(folder, name, manifest.files[name], on_read)
    except (OSError, msgspec.DecodeError) as error:
        damage = f"{folder} must be a whole checkpoint, got {error}"
    damages = [damage]
    if world is not None and size > 1:
        told = f"{damage} (on {os.uname().nodename})" if damage else ""
        damages = [one.decode() for one in world.gather_messages(told.encode(), while_waiting)]
    for one in damages:
        if one:
            raise DamagedCheckpoint(
                f"{one}; without the folder {folder} the run goes on from an older checkpoint, "
                "if there is one"
            )
    assert manifest is not None, "it was read, or there is a damage"
    return manifest


def choose_files(manifest: CheckpointManifest, rank: int, size: int) -> list[str]:
    """Returns the names of the files that one of `size` ranks verifies: where as many wrote the checkpoint,
    those that it wrote, which it will load; else an even part."""
    if manifest.ranks == size:
        return [name for name, file in manifest.files.items() if file.rank % size == rank]
    chosen, loads = [], [0] * size
    for name, file in sorted(manifest.files.items(), key=lambda item: (-item[1].num_bytes, item[0])):
        least = loads.index(min(loads))
        loads[least] += file.num_bytes + 1  # a file without bytes counts too
        if least == rank:
            chosen.append(name)
    return chosen


def _find_damage(folder: Path, name: str, wanted: FileDigest, on_read: Callable[[int], None]) -> str:
    """Returns how a file differs from what was written; empty where it does not."""
    found = None
    with contextlib.suppress(FileNotFoundError):
        found = digest_files(folder, [folder / name], on_read)[name]
    if found is not None and (found.num_bytes, found.xxh3) == (wanted.num_bytes, wanted.xxh3):
        return ""
    got = "none" if found is None else f"{found.num_bytes} bytes, xxh3 {found.xxh3}"
    return (
        f"{folder / name} must be the file that was written ({wanted.num_bytes} bytes, xxh3 {wanted.xxh3}), "
        f"got {got}"
    )


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
