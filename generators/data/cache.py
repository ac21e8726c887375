"""The cache of prepared data: folders that appear whole or not at all.

~/.cache/slipstream/data/       (`data` in SLIPSTREAM_CACHE)
  rows-<digest>/                the rows of some files
  kept-<digest>/                the numbers of the rows that a run takes of them
  files/<digest of path>.json   the digest of a file's bytes, as long as size and time are the same
"""

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from buffers.files import naming_full_disk, replace_file
from buffers.parcels import ParcelFile, describe_files
from configs import disk
from configs.disk import unwritable_cache
from generators.data.found_file import FoundFile
from generators.data.row_files import digest_file
from generators.data.row_store import OFFSETS, ROWS

log = logging.getLogger("slipstream.data")

META = "meta.json"
"""Written last, with sizes and digests of the other files: a folder is whole where all of them are there."""
FILES = frozenset({META, ROWS, OFFSETS, "taken.npy", "held_out.npy", "hashes.npy"})
"""Names of all files in folders of the cache."""
WAIT_S = 0.1
"""Seconds between two tries to lock a folder that another process makes."""
SAY_EVERY_S = 30.0
"""Seconds between two lines that name that process."""
YOUNG_S = 2.0
"""A file that has changed within so many seconds is read again: another change might not show in its time."""


def find_cache() -> Path:
    return disk.find_cache("data")


def digest_value(*values: Any) -> str:
    """Returns a digest of values of JSON's types."""
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode())


def wait_a_moment() -> None:
    time.sleep(WAIT_S)


def read_meta(folder: Path) -> dict[str, Any] | None:
    """Returns what a whole folder of the cache says of itself; None where there is none."""
    try:
        meta: dict[str, Any] = json.loads((folder / META).read_bytes())
        is_whole = all((folder / name).stat().st_size == size for name, size in meta.pop("files").items())
    except (OSError, ValueError, KeyError):
        return None
    meta.pop("digests", None)
    return meta if is_whole else None


def make_folder(
    name: str, write: Callable[[Path], dict[str, Any]], wait: Callable[[], None] = wait_a_moment
) -> tuple[Path, dict[str, Any]]:
    """Returns a folder of the cache, which `write` fills where it is missing, and what it says of itself.

    `write` gets an empty folder and returns what the folder says of itself. Otherwise as `fill_folder`.
    """
    folder = find_cache() / name

    def write_with_meta(unfinished: Path) -> None:
        meta = write(unfinished)
        files = describe_files(unfinished, [path.name for path in unfinished.iterdir()])
        meta |= {"files": {one.name: one.size for one in files}}
        meta |= {"digests": {one.name: one.digest for one in files}}
        replace_file(unfinished / META, json.dumps(meta).encode())

    fill_folder(folder, lambda: read_meta(folder) is not None, write_with_meta, wait)
    meta = read_meta(folder)
    assert meta is not None, f"{folder} is whole"
    return folder, meta


def list_cached_files(folder: Path) -> list[ParcelFile]:
    """Returns all files of a whole folder of the cache. Their digests were taken when it was made."""
    meta = json.loads((folder / META).read_bytes())
    if "digests" not in meta:  # of an earlier version: it is read once more
        meta["digests"] = {one.name: one.digest for one in describe_files(folder, meta["files"])}
        with contextlib.suppress(OSError, ValueError):  # the cache may be read-only, or its disk full
            replace_file(folder / META, json.dumps(meta).encode())
    digests = meta["digests"]
    files = [ParcelFile(name=name, size=size, digest=digests[name]) for name, size in meta["files"].items()]
    return files + describe_files(folder, [META])


def check_names(name: str, files: Iterable[str]) -> None:
    """Raises ValueError for names, of a folder and its files, that are none of the cache's."""
    if not re.fullmatch(r"(rows|kept)-[0-9a-f]{32}", name) or not FILES.issuperset(files):
        raise ValueError(f"a parcel of rows must be a folder of the cache of rows, got {name}")


def take_meta(folder: Path) -> dict[str, Any]:
    """Removes what a folder that was fetched says of itself, and returns it, for `make_folder`."""
    meta: dict[str, Any] = json.loads((folder / META).read_bytes())
    (folder / META).unlink()
    return {key: value for key, value in meta.items() if key not in ("files", "digests")}


def fill_folder(
    folder: Path,
    is_whole: Callable[[], bool],
    write: Callable[[Path], None],
    wait: Callable[[], None] = wait_a_moment,
) -> None:
    """Has `write` fill the folder unless it is whole: it appears whole or not at all.

    `write` gets an empty folder. Another process that makes the same folder is waited for, and `wait` is
    called meanwhile. A process that is killed leaves an unfinished folder, which the next one removes. Raises
    DiskFull, and ValueError for a cache that cannot be written.
    """
    # Another user of the same cache may have left one that this user may not remove.
    cache, unfinished = folder.parent, folder.with_name(f".{folder.name}.{os.geteuid()}.unfinished")
    if is_whole():
        return
    disk.make_cache(cache)
    with _hold_lock(folder.with_name(f".{folder.name}.lock"), wait):
        if is_whole():
            return
        for leftover in (unfinished, folder):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            with naming_full_disk(unfinished):
                unfinished.mkdir()
                write(unfinished)
                try:
                    os.rename(unfinished, folder)
                except OSError as error:  # another user's, and damaged
                    raise unwritable_cache(cache, error) from error
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise


@contextlib.contextmanager
def _hold_lock(path: Path, wait: Callable[[], None]) -> Iterator[None]:
    """Holds a lock file, which says who holds it. The kernel lets it go when this process ends."""
    with naming_full_disk(path):
        file = _open_lock(path)
    said_at = float("-inf")
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - said_at > SAY_EVERY_S:
                    said_at = time.monotonic()
                    holder = os.pread(file, 200, 0).decode(errors="replace") or "another process"
                    log.warning("%s prepares %s: waiting for it", holder, path.with_suffix(""))
                wait()
        with contextlib.suppress(OSError):  # the disk may be full
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} of {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(file)


def _open_lock(path: Path) -> int:
    """Opens a lock file, which all users of the cache may lock. Raises ValueError where this one may not."""
    try:
        with contextlib.suppress(FileNotFoundError):
            # Without O_CREAT, because Linux refuses that for another user's file in a folder like /tmp.
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError as error:
        raise unwritable_cache(path.parent, error) from error
    with contextlib.suppress(PermissionError):  # another user has made it in the meantime
        os.fchmod(file, 0o666)  # whatever the umask is
    return file


def find_digest(file: FoundFile) -> str:
    """Returns the digest of a file's bytes, which is kept until the file's size or time changes."""
    status, identity = file.path.stat(), _identify_file(file)
    path = str(file.path.resolve())
    kept = find_cache() / "files" / f"{xxhash.xxh3_64_hexdigest(os.fsencode(path))}.json"
    known = None
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(kept.read_bytes())
    if isinstance(known, dict) and known.get("path") == path and known.get("identity") == identity:
        return str(known["digest"])
    digest = digest_file(file)
    if time.time() - status.st_mtime > YOUNG_S and _identify_file(file) == identity:
        known = {"path": path, "identity": identity, "digest": digest}
        # It only spares a second reading: another process may have written the same, or the cache is
        # read-only.
        with contextlib.suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            replace_file(kept, json.dumps(known).encode(), sync=False)
    return digest


def _identify_file(file: FoundFile) -> list[Any]:
    status = file.path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino, str(file.kind)]
