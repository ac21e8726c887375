"""Patches: the elements that differ between two versions, as overwrites.

Most bfloat16 weights do not change in a step of reinforcement learning, because the update is smaller than
their last bit. So a patch is often a small part of a snapshot.

A patch is a stock safetensors file. For each tensor that has changed it holds `<name>.indices` (uint32, into
the tensor laid out flat) and `<name>.values`; its metadata names base and version by their digests. Applying
it twice is as applying it once. It loses nothing: the result has the digests of the published version, or is
refused.
"""

import contextlib
import logging
import mmap
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sync.manifest import DigestMismatch, Manifest
from sync.snapshot import Snapshot, unmap_gradually

log = logging.getLogger("slipstream.weights")

PIECE = 1 << 17
"""Elements that are compared at a time: what a core's own cache holds."""
WORTH = 0.5
"""Largest size of a patch, or of all patches on the way from one version to another, that is worth its while,
as a share of the snapshot's size."""
BACKLOG = 2
"""Most patches under way or waiting, each of which keeps two versions in memory; further ones are not made.
"""
KEEP = 8
"""Number of patches that are kept, so that a generator may skip versions."""
INTEREST = 8
"""Number of publications for which patches are made after a host has fetched something."""


def patch_name(base: str, version: str) -> str:
    """Returns the name of a patch's file. Both snapshots are named by the stems of their files."""
    return f"{version}-from-{base}.patch"


class PatchMaker:
    """Makes the patch from each version to the next, in a thread of its own, as long as anybody fetches."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, "patches")
        self._links: dict[str, tuple[str, Future[int]]] = {}
        """By version, its base and the bytes of the patch that leads from there (0: there is none)."""
        self._last: Manifest | None = None
        self._interest = 0
        self._lacks_room = False
        """True after `drop_patches`, until the next version has been published."""
        self._lock = threading.Lock()

    def offer_version(self, manifest: Manifest) -> None:
        """Starts a patch to a version that has just been published, while the one before is still there.
        Returns at once."""
        with self._lock:
            base, self._last, self._lacks_room = self._last, manifest, False
            self._interest -= 1
            busy = sum(not making.done() for _, making in self._links.values()) >= BACKLOG
            if base is not None and self._interest >= 0 and not busy:
                # Somebody may have removed the base.
                with contextlib.suppress(FileNotFoundError):
                    making = self._thread.submit(self._write_patch, Snapshot(base), Snapshot(manifest))
                    self._links[_file_stem(manifest)] = (_file_stem(base), making)
                while len(self._links) > KEEP:
                    version = next(iter(self._links))
                    self._thread.submit(self._remove_patch, version, self._links.pop(version)[0])

    def note_interest(self) -> None:
        """Notes that there are hosts that fetch."""
        self._interest = INTEREST

    def find_route(self, base: str, version: str) -> list[tuple[str, int]] | None:
        """Returns (file, bytes) of the patches that lead from one version to another, in order; an empty list
        where they do not.

        None: a patch on the way is being made.
        """
        with self._lock:
            way: list[tuple[str, int]] = []
            while version != base:
                before, making = self._links.get(version, ("", None))
                if making is None:
                    return []
                if not making.done():
                    return None
                if not (num_bytes := making.result()):
                    return []
                way.insert(0, (patch_name(before, version), num_bytes))
                version = before
            return way

    def drop_patches(self) -> None:
        """Removes all patches, and lets none that is being made be written before the next version is
        there."""
        with self._lock:
            self._lacks_room, links, self._links = True, self._links, {}
        for version, (base, making) in links.items():
            making.cancel()
            self._remove_patch(version, base)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _write_patch(self, base: Snapshot, new: Snapshot) -> int:
        path = self._folder / patch_name(_file_stem(base.manifest), _file_stem(new.manifest))
        try:
            if not make_patch(base, new, path, self._has_room):
                return 0
            with self._lock:
                is_kept = _file_stem(new.manifest) in self._links
            if is_kept:
                return path.stat().st_size
            path.unlink()  # room was made while it was written
            return 0
        except (OSError, SafetensorError, MemoryError) as error:
            # There is no room, or the folder has gone meanwhile.
            log.warning("%s could not be made: %s", path.name, str(error) or type(error).__name__)
            path.with_suffix(".unfinished").unlink(missing_ok=True)
            return 0

    def _has_room(self) -> bool:
        return not self._lacks_room

    def _remove_patch(self, version: str, base: str) -> None:
        (self._folder / patch_name(base, version)).unlink(missing_ok=True)


def _file_stem(manifest: Manifest) -> str:
    return Path(manifest.path).stem


def make_patch(
    base: Snapshot, new: Snapshot, path: Path, is_wanted: Callable[[], bool] = lambda: True
) -> bool:
    """Writes the patch that leads from `base` to `new`. Returns false, and writes nothing, where it would be
    too large, is not possible, or is not wanted any more."""
    forms = [
        {(entry.name, entry.dtype, entry.shape) for entry in one.manifest.tensors} for one in (base, new)
    ]
    if forms[0] != forms[1]:
        return False
    parts: dict[str, np.ndarray] = {}
    left = int(WORTH * new.manifest.num_bytes)
    unchanged = {entry.name: entry.digest for entry in base.manifest.tensors}
    for entry in new.manifest.tensors:
        if unchanged[entry.name] == entry.digest:
            continue
        before, after = _view_bits(base.view_tensor(entry.name)), _view_bits(new.view_tensor(entry.name))
        if len(after) > 1 << 32:
            return False
        indices = []
        for begin in range(0, len(after), PIECE):
            found = np.flatnonzero(before[begin : begin + PIECE] != after[begin : begin + PIECE])
            indices.append((found + begin).astype(np.uint32))
            left -= len(found) * (4 + after.itemsize)
            if left < 0:
                return False
        places = np.concatenate(indices)
        parts[f"{entry.name}.indices"], parts[f"{entry.name}.values"] = places, after[places]
    if not is_wanted():
        return False
    unfinished = path.with_suffix(".unfinished")
    save_file(parts, unfinished, metadata={"base": base.manifest.digest, "version": new.manifest.digest})
    unfinished.rename(path)
    return True


def apply_patches(
    base: Manifest, patches: Sequence[Path], progress: Callable[[], None] = lambda: None
) -> None:
    """Writes the patches over the file of `base`, one after the other. The caller verifies the result.

    `progress` is called after each tensor. Raises DigestMismatch, the file in an unknown state, when a patch
    is damaged or is for another base.
    """
    snapshot, held = Snapshot(base), base.digest
    # All pages are mapped at once: one by one they take three times as long as the patch itself.
    with open(base.path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    data = np.frombuffer(memory, np.uint8)
    for patch in patches:
        try:
            with safe_open(patch, framework="numpy") as parts:
                names = parts.metadata() or {}
                if names.get("base") != held:
                    raise DigestMismatch(f"{patch.name} is for the base {names.get('base')}, this is {held}")
                for name in {key.rpartition(".")[0] for key in parts.keys()}:  # noqa: SIM118
                    indices, values = (parts.get_tensor(f"{name}.{part}") for part in ("indices", "values"))
                    _overwrite_tensor(data, snapshot, name, indices, values)
                    progress()
                held = names.get("version", "")
        except (SafetensorError, KeyError, ValueError, TypeError) as error:
            raise DigestMismatch(f"{patch.name} is not a patch: {error}") from error
    del data
    unmap_gradually(memory)


def _overwrite_tensor(
    data: np.ndarray, base: Snapshot, name: str, indices: np.ndarray, values: np.ndarray
) -> None:
    entry, begin = base.find_place(name)
    held = _view_bits(base.view_tensor(name))
    if indices.dtype != np.uint32 or values.dtype != held.dtype or len(indices) != len(values):
        raise ValueError(
            f"{name} has {len(indices)} indices of {indices.dtype} and {len(values)} values of {values.dtype}"
        )
    if len(indices) and int(indices.max()) >= len(held):
        raise ValueError(f"{name} has {len(held)} elements of {entry.dtype}, got index {int(indices.max())}")
    data[begin : begin + held.nbytes].view(held.dtype)[indices] = values


def _view_bits(tensor: torch.Tensor) -> np.ndarray:
    """Returns the elements as unsigned integers [n]. Bits are compared, not numbers, because -0 equals 0 and
    NaN differs from itself."""
    kinds = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
    return tensor.reshape(-1).view(kinds[tensor.element_size()]).numpy()
