"""A host's side of weights over ZeroMQ: brings what a publisher serves into a folder of this host."""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from configs.disk import disk_full, is_disk_full
from sync.extents import ENTRY, Extents
from sync.folders import SharedFolder
from sync.manifest import MAX_MANIFEST_BYTES, DigestMismatch, Manifest, parse_manifest
from sync.patch import WORTH, apply_patches
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
from sync.transports.puller import Puller, Range, SilentServer, TransferFailed
from sync.transports.tcp import NAME, EnlistRelay, GetPatchRoute, PatchRoute, RelayParent, Secure

log = logging.getLogger("slipstream.weights")

PASSING = (".part", ".chunks", ".patch", ".patching", ".settled", ".unfinished")
RELAYED_S = 3600.0
"""A relay that would take longer than so for what is missing of a file is passed over."""
MAX_PARENTS = 4
"""Relays that are asked for a file before the publisher itself is."""
SILENT_S = 600.0
"""A relay that has not answered is not asked for so long."""


class Fetcher:
    """Brings versions into a folder of this host, once for all of the host's processes.

        v<k>-<life>.part, .chunks               a snapshot on its way, and which chunks of it have come
        v<k>-<life>-from-v<j>-<life>.patch      a patch that has come
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
        secure: Secure | None = None,
        timeout_s: float = 10.0,
        patience_s: float = 5.0,
    ) -> None:
        """`serve_at`: where this host serves what it has fetched, if it does. The publisher is given up after a silence of
        `timeout_s`; a relay after one of `patience_s`, or when no byte has come from it for `timeout_s`."""
        self.serve_at, self.secure = serve_at, secure
        self._shared = SharedFolder(folder)
        self._puller = Puller(secure)
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self._silent: dict[str, float] = {}
        """Relays that have not answered, and when that was."""
        self.bytes_received = self.patches = 0

    def close(self) -> None:
        self._puller.close()
        self._shared.close()

    @property
    def folder(self) -> Path:
        """Another one after a process of this host was stuck with the lock of the first."""
        return self._shared.path

    def open_folder(self) -> Path:
        """Makes it, where it is missing: it is there as long as a fetcher of this host uses it."""
        return self._shared.open_folder()

    def fetch_version(self, address: str, name: str, *, digest: str = "", direct: bool = False) -> Path:
        """The local manifest `name` (`v<k>-<life>.json`) of the publisher at `address`, its snapshot beside it, not verified yet.

        `digest`: what was announced. `direct`: anew, whole and from the publisher itself, because what is here, or what a relay
        has, is not what was published. Raises TransferFailed, DigestMismatch, LockTimedOut, and DiskFull.
        """
        with self._shared.hold_alone(f"fetches {name}") as folder:
            local = folder / name
            if direct:
                for path in folder.glob(f"{local.stem}.*"):
                    path.unlink(missing_ok=True)
            if not local.exists():
                manifest = self.fetch_manifest(address, name, digest)
                self._remove_leftovers(local)
                if (
                    direct
                    or local.with_suffix(".part").exists()
                    or not self._fetch_by_patches(address, local)
                ):
                    self._fetch_snapshot(address, local, manifest, direct)
                put_manifest(manifest, local)
        return local

    def refresh_spare(self) -> None:
        """Between two fetches: brings the spare up to the newest version, so that the next patch is the only one to apply."""
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
        """The publisher's. Raises TransferFailed, and DigestMismatch when it is not what was announced."""
        data = self._puller.read_file(address, name, MAX_MANIFEST_BYTES, self._timeout_s)
        return parse_manifest(data, f"{name} at {address}", Path(name).stem, digest)

    def _ask_for_parent(self, address: str, name: str, lost: str = "") -> str:
        """Whom to ask for a file; empty: the publisher at `address`. `lost`: who was asked in vain."""
        for _ in range(MAX_PARENTS):
            reply = self._puller.ask_server(address, EnlistRelay(name, self.serve_at, lost), self._timeout_s)
            if not isinstance(reply, RelayParent):
                return ""
            if time.monotonic() - self._silent.get(reply.address, float("-inf")) > SILENT_S:
                return reply.address
            lost = reply.address
        return ""

    def _newest_manifest(self) -> Manifest | None:
        found = find_complete_versions(self.folder)
        return read_manifest(found[-1]) if found else None

    def _find_patches(self, base: Manifest, version: Manifest) -> list[Path] | None:
        """The patches here that lead from one version to another; None where they do not."""
        way: list[Path] = []
        at, start = Path(version.path).stem, Path(base.path).stem
        while at != start:
            patch = next(self.folder.glob(f"{at}-from-*.patch"), None)
            if patch is None or patch in way:
                return None
            way.insert(0, patch)
            at = patch.stem.partition("-from-")[2]
        return way

    def _remove_leftovers(self, coming: Path | None) -> None:
        """Keeps the newest version, the spare and its way to the newest version, and what has come of the one that is `coming`.
        Who has an older version mapped keeps it."""
        for locator in find_complete_versions(self.folder)[:-1]:
            retire_version(locator)
        spare, newest = find_spare(self.folder), self._newest_manifest()
        way = spare and newest and self._find_patches(spare, newest)
        for path in self.folder.glob("v*"):
            if (
                path.suffix in PASSING
                and path not in (way or ())
                and not (coming and path.stem.startswith(coming.stem))
            ):
                path.unlink(missing_ok=True)

    def _fetch_snapshot(self, address: str, local: Path, manifest: Manifest, direct: bool) -> None:
        part, snapshot = local.with_suffix(".part"), local.with_suffix(".safetensors")
        if not part.exists():
            local.with_suffix(".chunks").unlink(
                missing_ok=True
            )  # of a fetcher that was killed when it was done
            if (spare := find_spare(self.folder)) is not None:
                Path(spare.path).rename(part)
        self._fetch_file(address, snapshot.name, manifest.num_bytes, direct=direct)

    def _fetch_by_patches(self, address: str, local: Path) -> bool:
        """Makes the snapshot from the newest version here and patches; false where there are none, or they do not fit."""
        base = self._newest_manifest()
        if base is None:
            return False
        route = self._puller.ask_server(
            address, GetPatchRoute(local.stem, Path(base.path).stem), self._timeout_s
        )
        if (
            not isinstance(route, PatchRoute)
            or not 0 < sum(size for _, size in route.files) <= WORTH * base.num_bytes
        ):
            return False
        for name, num_bytes in route.files:
            if not NAME.fullmatch(name):
                return False
            try:
                self._fetch_file(address, name, num_bytes)
            except SilentServer:
                raise
            except TransferFailed as error:
                log.info("%s; the whole snapshot is fetched", error)
                return False
        spare, patches = find_spare(self.folder), [self.folder / name for name, _ in route.files]
        if spare is not None and (way := self._find_patches(spare, base)) is not None:
            base, patches = spare, way + patches
        done = self._apply_patches(base, patches, local.with_suffix(".safetensors"))
        self.patches += done
        return done

    def _apply_patches(self, base: Manifest, patches: list[Path], into: Path) -> bool:
        """Makes the file `into` of a version here and patches: over the spare, if there is one; a `base` that is not the spare
        is copied first."""
        patching = into.with_suffix(".patching")
        try:
            if (spare := find_spare(self.folder)) is not None:
                Path(spare.path).rename(patching)
            if Path(base.path).suffix != SPARE:
                copy_over(Path(base.path), patching, self._shared.note_progress)
            apply_patches(
                msgspec.structs.replace(base, path=str(patching)), patches, self._shared.note_progress
            )
            patching.rename(into)
        except (DigestMismatch, OSError) as error:
            if not isinstance(error, DigestMismatch | FileNotFoundError) and not is_disk_full(error):
                raise
            log.warning("%s; the whole snapshot is fetched", error)
            return False
        finally:
            patching.unlink(missing_ok=True)
        return True

    def _fetch_file(self, address: str, name: str, num_bytes: int, *, direct: bool = False) -> None:
        """Brings a file, or what is missing of it, and lets others have what has come. Raises TransferFailed, and DiskFull."""
        part, chunks = ((self.folder / name).with_suffix(suffix) for suffix in (".part", ".chunks"))
        come = Extents()
        if not part.exists():
            chunks.unlink(missing_ok=True)
        try:
            with (
                open(part, "ab"),
                open(part, "r+b", buffering=0) as file,
                open(chunks, "a+b", buffering=0) as record,
            ):
                record.truncate(come.read_record(record.fileno(), 0))
                file.truncate(num_bytes)

                def keep(offset: int, data: memoryview) -> None:
                    _write_at(file.fileno(), data, offset)
                    record.write(ENTRY.pack(offset, offset + len(data)))
                    come.add_range(offset, offset + len(data))
                    self.bytes_received += len(data)
                    self._shared.note_progress()

                if self.serve_at and not direct:
                    self._pull_from_relays(address, name, lambda: come.missing_ranges(num_bytes), keep)
                patience = {"silence_s": self._timeout_s, "stall_s": self._timeout_s}
                self._puller.pull_ranges(address, name, come.missing_ranges(num_bytes), keep, **patience)
        except OSError as error:
            if is_disk_full(error):
                raise disk_full(
                    part, sum(end - begin for begin, end in come.missing_ranges(num_bytes))
                ) from error
            raise
        part.rename(
            self.folder / name
        )  # before its record goes: a relay that looks in between finds it whole
        chunks.unlink()

    def _pull_from_relays(
        self,
        address: str,
        name: str,
        missing: Callable[[], list[Range]],
        keep: Callable[[int, memoryview], None],
    ) -> None:
        """Brings what is missing from the relays that the publisher names, one after the other: all of it or, where they fail or
        there are none, less."""
        parent = self._ask_for_parent(address, name)
        for _ in range(MAX_PARENTS):
            if not parent or not missing():
                return
            try:
                left = missing()
                least = sum(end - begin for begin, end in left) * self._timeout_s / RELAYED_S
                patience = {"silence_s": self._patience_s, "stall_s": self._timeout_s, "least_bytes": least}
                self._puller.pull_ranges(parent, name, left, keep, **patience)
            except TransferFailed as error:
                log.info("%s; another one is asked", error)
                if isinstance(error, SilentServer):
                    self._silent[parent] = time.monotonic()
                parent = self._ask_for_parent(address, name, parent)


def _write_at(file: int, data: memoryview, offset: int) -> None:
    """All of it, however little the kernel takes at a time."""
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written
