"""Versions enter a folder and leave it. The file of a version that has gone becomes the spare, and the next
version is written over it: this memory need not be allocated again.

A spare keeps its name's stem and its manifest (`.was`), so a host that has patches that lead from it writes
only what differs.
"""

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from configs.disk import DiskFull, disk_full, is_disk_full, write_all
from sync.manifest import AdapterRecipe, Manifest, whole_digest
from sync.snapshot import read_manifest
from sync.snapshot_writer import SnapshotWriter
from sync.stream import TensorPart

SPARE, WAS = ".spare", ".was"
COPIED_BYTES = 1 << 28
"""Bytes that are copied at a time."""


def put_version(
    folder: Path,
    writer: SnapshotWriter,
    version: int,
    incarnation: str,
    parts: Iterable[TensorPart],
    adapter: AdapterRecipe | None = None,
) -> Manifest:
    """Writes a version, over the spare if there is one. Its files appear whole, the manifest last.

    Raises DiskFull, and leaves nothing of this version there, when there is no room for it.
    """
    unfinished = begin_version(folder, version, incarnation)
    entries = writer.write_snapshot(unfinished, parts)
    path = unfinished.with_suffix(".safetensors")
    manifest = Manifest(
        version,
        incarnation,
        str(path),
        unfinished.stat().st_size,
        entries,
        whole_digest(entries, adapter),
        adapter,
    )
    complete_version(folder, manifest)
    return manifest


def begin_version(folder: Path, version: int, incarnation: str) -> Path:
    """Returns the path at which to write a version's file: that of the spare, renamed, if there is one."""
    unfinished = folder / f"v{version}-{incarnation}.unfinished"
    if (spare := find_spare(folder)) is not None:
        Path(spare.path).rename(unfinished)
    return unfinished


def complete_version(folder: Path, manifest: Manifest) -> None:
    """Gives a version's file, which is written, its name, and then its manifest.

    Raises DiskFull, and leaves nothing of this version there, when there is no room for that.
    """
    path = folder / Path(manifest.path).name
    path.with_suffix(".unfinished").rename(path)
    try:
        put_manifest(manifest, path.with_suffix(".json"))
    except DiskFull:
        path.unlink()
        raise


def put_manifest(manifest: Manifest, locator: Path) -> None:
    """Writes a manifest, which appears whole, and later than all others of its folder: their times are their
    order (`find_complete_versions`), and a clock may be set back. Raises DiskFull."""
    unfinished, data = locator.with_suffix(".unfinished"), msgspec.json.encode(manifest)
    try:
        unfinished.write_bytes(data)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        if is_disk_full(error):
            raise disk_full(locator, len(data)) from error
        raise
    others = (path.stat().st_mtime_ns for path in locator.parent.glob("v*.json"))
    if (last := max(others, default=0)) >= unfinished.stat().st_mtime_ns:
        os.utime(unfinished, ns=(last + 1, last + 1))
    unfinished.rename(locator)


def find_complete_versions(folder: Path) -> list[Path]:
    """Returns the manifests of the versions that are whole, newest last."""
    return sorted(folder.glob("v*.json"), key=lambda path: path.stat().st_mtime_ns)


def retire_version(locator: Path) -> None:
    """Takes a version out of its folder; its file becomes the folder's only spare.

    The manifest goes first, so that a reader a moment later finds nothing, rather than a name without a file.
    The file loses its name before `find_spare` asks whether anyone uses it, so that no new user can come in
    between.
    """
    drop_spares(locator.parent)
    # Somebody else may have removed it.
    with contextlib.suppress(FileNotFoundError):
        locator.rename(locator.with_suffix(WAS))
        locator.with_suffix(".safetensors").rename(locator.with_suffix(SPARE))
    for seal in locator.parent.glob(f"{locator.stem}.*"):
        if seal.suffix not in (WAS, SPARE):
            seal.unlink(missing_ok=True)


def find_spare(folder: Path) -> Manifest | None:
    """Returns the manifest of the spare, with the spare's path, if there is one that no process has open or
    mapped."""
    for path in folder.glob(f"*{SPARE}"):
        with contextlib.suppress(FileNotFoundError):
            if is_unused(path):
                return msgspec.structs.replace(read_manifest(path.with_suffix(WAS)), path=str(path))
    return None


def drop_spares(folder: Path) -> None:
    """Removes the spare and its manifest."""
    for path in (*folder.glob(f"*{SPARE}"), *folder.glob(f"*{WAS}")):
        path.unlink(missing_ok=True)


def copy_over(source: Path, target: Path, progress: Callable[[], None]) -> None:
    """Copies a file into the memory that the target has already, which is several times as fast as
    `shutil.copyfile`.

    `progress` is called after each `COPIED_BYTES`.
    """
    with source.open("rb") as old, target.open("r+b" if target.exists() else "w+b", buffering=0) as new:
        data = memoryview(mmap.mmap(old.fileno(), 0, access=mmap.ACCESS_READ))
        for begin in range(0, len(data), COPIED_BYTES):
            write_all(new.fileno(), data[begin : begin + COPIED_BYTES])
            progress()
        new.truncate()


def is_unused(path: Path) -> bool:
    """True when no process has this file open or mapped.

    The kernel grants a write lease on such files only (`fcntl(2)`, F_SETLEASE). False also on a file system
    without leases.
    """
    try:
        with path.open("r+b") as file:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return True
    except OSError:
        return False
