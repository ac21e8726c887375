"""A host's side of weights over ZeroMQ: brings a publisher's files into a folder of this host."""

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from configs.disk import disk_full, is_disk_full
from sync.announcement import TransferFailed
from sync.extents import ENTRY, Extents
from sync.manifest import MAX_MANIFEST_BYTES, DigestMismatch, Manifest, parse_manifest
from sync.patch import WORTH, apply_patches
from sync.shared_folder import SharedFolder
from sync.snapshot import read_manifest
from sync.spares import (
    SPARE,
    WAS,
    copy_over,
    drop_spares,
    find_complete_versions,
    find_spare,
    put_manifest,
    retire_version,
)
from sync.transports.ends import SecureSocket
from sync.transports.messages import (
    CHUNK_BYTES,
    FILE_NAME,
    EnlistRelay,
    GetPatchRoute,
    PatchPending,
    PatchRoute,
    RelayParent,
)
from sync.transports.part_sources import FileSources, OneSource, PartSources
from sync.transports.puller import FIRST_BYTES, ByteRange, KeepBytes, LackingServer, Puller, SilentServer

log = logging.getLogger("slipstream.weights")

PASSING = (".part", ".chunks", ".patch", ".patching", ".settled", ".unfinished")
"""Endings of files that are needed for a while only."""
OUTPACED = 4
"""A relay that would need long is passed over when the publisher sends so many times as fast at present."""
MAX_PARENTS = 4
"""Most relays that are asked for a file before the publisher itself is."""
MAX_SOURCES_AT_A_TIME = 16
"""Most hosts of a learner's ranks that parts of a file are fetched from at the same time."""
SILENT_S = 600.0
"""Seconds in which a relay that has not answered is not asked again."""

FileIdentity = tuple[int, int] | None
"""Inode and time of change of a file; None: there is none."""


class Fetcher:
    """Brings versions into a folder of this host, once for all of the host's processes.

        v<k>-<life>.part, .chunks               a snapshot on its way, and the record of its chunks
        v<k>-<life>-from-v<j>-<life>.patch      a patch that has arrived
        v<k>-<life>.patching                    a file that patches are being applied to
        v<k>-<life>.safetensors, .json          as the publisher's
        v<k>-<life>.spare, .was                 a version that has gone: the next one is written over it

    Not thread-safe; several processes may share a folder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        serve_at: str = "",
        secure: SecureSocket | None = None,
        timeout_s: float = 10.0,
        patience_s: float = 5.0,
    ) -> None:
        """`serve_at`: address at which this host serves what it has fetched; empty: it does not. The
        publisher is given up after a silence of `timeout_s`; a relay after one of `patience_s`, or when no
        byte has come from it for `timeout_s`."""
        self.serve_at, self.secure = serve_at, secure
        self._shared = SharedFolder(folder)
        self._puller = Puller(secure)
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self.silent_relays: dict[str, float] = {}
        """Relays that have not answered, and the monotonic time of that."""
        self.bytes_received = 0
        self.patches = 0
        """Number of versions that were made with patches."""
        self._returned: tuple[Path, FileIdentity] | None = None
        """The manifest that was returned last, and which snapshot was beside it."""

    def close(self) -> None:
        self._puller.close()
        self._shared.close()

    @property
    def folder(self) -> Path:
        """Folder of the fetched files; it changes after a process of this host was stuck with the lock of the
        first one."""
        return self._shared.path

    def open_folder(self) -> Path:
        """Makes the folder where it is missing. It exists as long as a fetcher of this host uses it."""
        return self._shared.open_folder()

    def fetch_version(self, address: str, name: str, *, digest: str = "", direct: bool = False) -> Path:
        """Fetches the version of the manifest `name` (`v<k>-<life>.json`) from the publisher at `address`,
        unless it is here.

        Returns the local manifest, whose snapshot lies beside it and is not verified yet. `digest`: that of
        the announcement. `direct`: fetches anew, whole and from the publisher itself, because what is here,
        or what a relay has, is not what was published. Raises TransferFailed, DigestMismatch, LockTimedOut,
        and DiskFull.
        """
        with self._shared.hold_alone(f"fetches {name}") as folder:
            local = folder / name
            if direct and not self._is_there_anew(local):
                for path in folder.glob(f"{local.stem}.*"):
                    path.unlink(missing_ok=True)
            if not local.exists():
                manifest = self.fetch_manifest(address, name, digest)
                self._remove_leftovers(local)
                is_begun = local.with_suffix(".part").exists()
                is_divided = manifest.parts is not None
                if direct or is_begun or is_divided or not self._fetch_by_patches(address, local):
                    self._fetch_snapshot(address, local, manifest, direct)
                put_manifest(manifest, local)
            self._returned = local, _identify_snapshot(local)
        return local

    def _is_there_anew(self, local: Path) -> bool:
        """True when another process of this host has fetched a version again since this one has returned
        it."""
        if self._returned is None or self._returned[0] != local:
            return False
        return _identify_snapshot(local) not in (None, self._returned[1])

    def refresh_spare(self) -> None:
        """Brings the spare up to the newest version, between two fetches, so that the next patch is the only
        one to apply."""
        if not self._shared.is_open:
            return
        with self._shared.hold_alone("makes ready for the next version"):
            self._remove_leftovers(None)
            spare, newest = find_spare(self.folder), self._newest_manifest()
            if spare is None or newest is None or not (patches := self._find_patches(spare, newest)):
                return
            stem = self.folder / Path(newest.path).stem
            if self._apply_patches(spare, patches, stem.with_suffix(".settled")):
                drop_spares(self.folder)
                stem.with_suffix(WAS).write_bytes(msgspec.json.encode(newest))
                stem.with_suffix(".settled").rename(stem.with_suffix(SPARE))

    def fetch_manifest(self, address: str, name: str, digest: str = "") -> Manifest:
        """Returns the publisher's manifest. Raises TransferFailed, and DigestMismatch when it is not the
        announced one."""
        data = self._puller.read_file(address, name, MAX_MANIFEST_BYTES, self._timeout_s)
        return parse_manifest(data, f"{name} at {address}", Path(name).stem, digest)

    def _ask_for_parent(self, address: str, name: str, lost: str = "", is_at_fault: bool = True) -> str:
        """Returns the relay to ask for a file; empty: the publisher at `address`. `lost`: the relay that was
        asked in vain, and `is_at_fault` unless it only had not the bytes."""
        for _ in range(MAX_PARENTS):
            question = EnlistRelay(name, self.serve_at, lost, is_at_fault)
            reply = self._puller.ask_server(address, question, self._timeout_s)
            if not isinstance(reply, RelayParent):
                return ""
            silent_since = self.silent_relays.get(reply.address, float("-inf"))
            if time.monotonic() - silent_since > SILENT_S:
                return reply.address
            lost, is_at_fault = reply.address, True
        return ""

    def _newest_manifest(self) -> Manifest | None:
        locators = find_complete_versions(self.folder)
        return read_manifest(locators[-1]) if locators else None

    def _find_patches(self, base: Manifest, version: Manifest) -> list[Path] | None:
        """Returns the patches here that lead from one version to another; None where they do not."""
        patches: list[Path] = []
        stem, first = Path(version.path).stem, Path(base.path).stem
        while stem != first:
            patch = next(self.folder.glob(f"{stem}-from-*.patch"), None)
            if patch is None or patch in patches:
                return None
            patches.insert(0, patch)
            stem = patch.stem.partition("-from-")[2]
        return patches

    def _remove_leftovers(self, coming: Path | None) -> None:
        """Removes old versions and passing files. A process that has an older version mapped keeps it.

        What stays: the newest version, the spare, the patches that lead from the spare to the newest version,
        and what has arrived of the version that is `coming`.
        """
        for locator in find_complete_versions(self.folder)[:-1]:
            retire_version(locator)
        spare, newest = find_spare(self.folder), self._newest_manifest()
        patches = spare and newest and self._find_patches(spare, newest)
        for path in self.folder.glob("v*"):
            is_coming = coming is not None and path.stem.startswith(coming.stem)
            if path.suffix in PASSING and path not in (patches or ()) and not is_coming:
                path.unlink(missing_ok=True)

    def _fetch_snapshot(self, address: str, local: Path, manifest: Manifest, direct: bool) -> None:
        part, snapshot = local.with_suffix(".part"), local.with_suffix(".safetensors")
        if not part.exists():
            # A fetcher that was killed just before it was done may have left the record.
            local.with_suffix(".chunks").unlink(missing_ok=True)
            if (spare := find_spare(self.folder)) is not None:
                Path(spare.path).rename(part)
        sources = None if manifest.parts is None else PartSources(manifest.parts)
        self._fetch_file(address, snapshot.name, manifest.num_bytes, direct=direct, sources=sources)

    def _fetch_by_patches(self, address: str, local: Path) -> bool:
        """Makes the snapshot from the newest version here and patches; false where there are none, or they do
        not fit."""
        base = self._newest_manifest()
        if base is None:
            return False
        question = GetPatchRoute(local.stem, Path(base.path).stem)
        route = self._puller.ask_server(address, question, self._timeout_s)
        while isinstance(route, PatchPending):
            # A patch of a large model takes minutes, and a link rarely brings the whole model sooner.
            self._shared.note_progress()
            route = self._puller.ask_server(address, question, self._timeout_s)
        if not isinstance(route, PatchRoute):
            return False
        if not 0 < sum(size for _, size in route.files) <= WORTH * base.num_bytes:
            return False
        for name, num_bytes in route.files:
            if not FILE_NAME.fullmatch(name):
                return False
            try:
                self._fetch_file(address, name, num_bytes)
            except SilentServer:
                raise
            except TransferFailed as error:
                log.info("%s; the whole snapshot is fetched", error)
                return False
        spare, patches = find_spare(self.folder), [self.folder / name for name, _ in route.files]
        if spare is not None and (leading := self._find_patches(spare, base)) is not None:
            base, patches = spare, leading + patches
        is_done = self._apply_patches(base, patches, local.with_suffix(".safetensors"))
        self.patches += is_done
        return is_done

    def _apply_patches(self, base: Manifest, patches: list[Path], into: Path) -> bool:
        """Makes the file `into` of the version `base` and patches; false where the patches do not fit or
        there is no room.

        It is written over the spare, if there is one. A `base` that is not the spare is copied first.
        """
        patching = into.with_suffix(".patching")
        try:
            if (spare := find_spare(self.folder)) is not None:
                Path(spare.path).rename(patching)
            if Path(base.path).suffix != SPARE:
                copy_over(Path(base.path), patching, self._shared.note_progress)
            copied = msgspec.structs.replace(base, path=str(patching))
            apply_patches(copied, patches, self._shared.note_progress)
            patching.rename(into)
        except (DigestMismatch, OSError) as error:
            if not isinstance(error, DigestMismatch | FileNotFoundError) and not is_disk_full(error):
                raise
            log.warning("%s; the whole snapshot is fetched", error)
            return False
        finally:
            patching.unlink(missing_ok=True)
        return True

    def _fetch_file(
        self,
        address: str,
        name: str,
        num_bytes: int,
        *,
        direct: bool = False,
        sources: PartSources | None = None,
    ) -> None:
        """Fetches a file, or what is missing of it, and lets other hosts have what has arrived.

        `sources`: where its parts are, when the publisher at `address` has not the whole file. Raises
        TransferFailed, and DiskFull.
        """
        where: FileSources = OneSource(address) if sources is None else sources
        part, chunks = ((self.folder / name).with_suffix(suffix) for suffix in (".part", ".chunks"))
        arrived = Extents()
        if not part.exists():
            chunks.unlink(missing_ok=True)
        try:
            with (
                open(part, "ab"),  # makes the file where it is missing
                open(part, "r+b", buffering=0) as file,
                open(chunks, "a+b", buffering=0) as record,
            ):
                record.truncate(arrived.read_record(record.fileno(), 0))
                file.truncate(num_bytes)

                def keep_bytes(offset: int, data: memoryview) -> None:
                    _write_at(file.fileno(), data, offset)
                    record.write(ENTRY.pack(offset, offset + len(data)))
                    arrived.add_range(offset, offset + len(data))
                    self.bytes_received += len(data)
                    self._shared.note_progress()

                if self.serve_at and not direct:
                    self._pull_from_relays(
                        address, where, name, lambda: arrived.missing_ranges(num_bytes), keep_bytes
                    )
                missing = where.divide_ranges(arrived.missing_ranges(num_bytes))
                self._pull_from_sources(name, missing, keep_bytes)
        except OSError as error:
            if is_disk_full(error):
                num_missing = sum(end - begin for begin, end in arrived.missing_ranges(num_bytes))
                raise disk_full(part, num_missing) from error
            raise
        # Renamed before its record goes: a relay that looks in between finds the file whole.
        part.rename(self.folder / name)
        chunks.unlink()

    def _pull_from_sources(self, name: str, missing: dict[str, list[ByteRange]], keep: KeepBytes) -> None:
        """Brings ranges of a file from the addresses that have them, from all at the same time.

        Raises TransferFailed, which names the address, when one of them fails; what the others have sent is
        kept.
        """
        limit_s = self._timeout_s
        if len(missing) < 2:
            for address, ranges in missing.items():
                self._puller.pull_ranges(address, name, ranges, keep, silence_s=limit_s, stall_s=limit_s)
            return
        lock = threading.Lock()

        def keep_alone(offset: int, data: memoryview) -> None:
            with lock:
                keep(offset, data)

        def pull_from(address: str) -> None:
            puller = Puller(self.secure)  # one for each thread: a socket is one thread's
            try:
                puller.pull_ranges(
                    address, name, missing[address], keep_alone, silence_s=limit_s, stall_s=limit_s
                )
            finally:
                puller.close()

        with ThreadPoolExecutor(min(len(missing), MAX_SOURCES_AT_A_TIME)) as pool:
            pulls = [pool.submit(pull_from, address) for address in missing]
        for pull in pulls:
            pull.result()

    def _pull_from_relays(
        self,
        address: str,
        sources: FileSources,
        name: str,
        find_missing: Callable[[], list[ByteRange]],
        keep: KeepBytes,
    ) -> None:
        """Brings what is missing from the relays that the publisher names, one after the other: all of it, or
        less where they fail or there are none."""
        parent = self._ask_for_parent(address, name)
        for _ in range(MAX_PARENTS):
            if not parent or not find_missing():
                return
            try:
                self._puller.pull_ranges(
                    parent,
                    name,
                    find_missing(),
                    keep,
                    silence_s=self._patience_s,
                    stall_s=self._timeout_s,
                    is_outpaced=lambda rate: self._is_outpaced(rate, sources, name, find_missing(), keep),
                )
            except TransferFailed as error:
                log.info("%s; another one is asked", error)
                if isinstance(error, SilentServer):
                    self.silent_relays[parent] = time.monotonic()
                parent = self._ask_for_parent(
                    address, name, parent, is_at_fault=not isinstance(error, LackingServer)
                )

    def _is_outpaced(
        self, rate: float, sources: FileSources, name: str, missing: list[ByteRange], keep: KeepBytes
    ) -> bool:
        """True for a relay that sends `rate` bytes a second and would need long for the rest, when a piece of
        that comes from the publisher in less than the `OUTPACED`th part of the time."""
        if sum(end - begin for begin, end in missing) < rate * self._timeout_s:
            return False
        address, ranges = list(sources.divide_ranges(missing[-1:]).items())[-1]
        begin, end = ranges[-1]
        piece = max(begin, end - int(min(CHUNK_BYTES, max(FIRST_BYTES, rate)))), end
        patience_s = min(self._timeout_s, (piece[1] - piece[0]) / rate / OUTPACED)
        began = time.monotonic()
        try:
            self._puller.pull_ranges(
                address,
                name,
                [piece],
                keep,
                silence_s=patience_s,
                stall_s=patience_s,
                is_outpaced=lambda _: True,
            )
        except TransferFailed:
            return False  # the publisher is slow, too, or has the file no more
        return time.monotonic() - began < patience_s


def _identify_snapshot(locator: Path) -> FileIdentity:
    """Returns what tells the snapshot of a manifest from others of its name; None where there is none."""
    try:
        found = locator.with_suffix(".safetensors").stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_ctime_ns


def _write_at(file: int, data: memoryview, offset: int) -> None:
    """Writes all of it, however little the kernel takes at a time."""
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written
