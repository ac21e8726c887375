"""A patch: what differs between two versions, as overwrites. Most bfloat16 weights do not change in a step of reinforcement
learning (the update is smaller than their last bit), so a patch is often a small part of a snapshot.

A stock safetensors file: for each tensor that has changed `<name>.indices` (uint32, into the tensor laid out flat) and
`<name>.values`; its metadata names base and version by their digests. Applying it twice is as applying it once. It loses nothing:
what comes out has the digests of the published version, or is refused.
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
WORTH = 0.5
"""Largest size of a patch, or of all patches on the way from one version to another, as a share of the snapshot's, that is worth
its while."""
BACKLOG = 2
"""Patches under way or waiting, each of which keeps two versions in memory; further ones are not made."""
KEEP = 8
"""Patches that are kept, so that a generator may skip versions."""
INTEREST = 8
"""Publications for which patches are made after somebody has fetched one."""


def patch_name(base: str, version: str) -> str:
    """Of the file of the patch between two snapshots, which are named by the stems of their files."""
    return f"{version}-from-{base}.patch"


class PatchMaker:
    """Makes the patch from each version to the next in a thread, beside training, as long as anybody fetches."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, "patches")
        self._links: dict[str, tuple[str, Future[int]]] = {}
        """By version: its base, and the bytes of the patch that leads from there (0: there is none)."""
        self._last: Manifest | None = None
        self._interest = 0
        self._lock = threading.Lock()

    def offer_version(self, manifest: Manifest) -> None:
        """A version has been published, and the one before is still there. Returns at once."""
        with self._lock:
            base, self._last = self._last, manifest
            self._interest -= 1
            busy = sum(not making.done() for _, making in self._links.values()) >= BACKLOG
            if base is not None and self._interest >= 0 and not busy:
                with contextlib.suppress(FileNotFoundError):  # somebody has removed it
                    making = self._thread.submit(self._write_patch, Snapshot(base), Snapshot(manifest))
                    self._links[_file_stem(manifest)] = (_file_stem(base), making)
                while len(self._links) > KEEP:
                    version = next(iter(self._links))
                    self._thread.submit(self._remove_patch, version, self._links.pop(version)[0])

    def note_interest(self) -> None:
        """There are hosts that fetch."""
        self._interest = INTEREST

    def find_route(self, base: str, version: str) -> list[tuple[str, int]] | None:
        """(file, bytes) of the patches that lead from one version to another, in order; none where there is no way. None: a
        patch on the way is being made."""
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

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _write_patch(self, base: Snapshot, new: Snapshot) -> int:
        path = self._folder / patch_name(_file_stem(base.manifest), _file_stem(new.manifest))
        try:
            return path.stat().st_size if make_patch(base, new, path) else 0
        except (OSError, SafetensorError) as error:  # no room, or the folder has gone meanwhile
            log.warning("%s could not be made: %s", path.name, error)
            path.with_suffix(".unfinished").unlink(missing_ok=True)
            return 0

    def _remove_patch(self, version: str, base: str) -> None:
        (self._folder / patch_name(base, version)).unlink(missing_ok=True)


def _file_stem(manifest: Manifest) -> str:
    return Path(manifest.path).stem


def make_patch(base: Snapshot, new: Snapshot, path: Path) -> bool:
    """Writes the patch that leads from `base` to `new`; false, and nothing, where that is not worth it or not possible."""
    if {(e.name, e.dtype, e.shape) for e in base.manifest.tensors} != {
        (e.name, e.dtype, e.shape) for e in new.manifest.tensors
    }:
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
        for begin in range(0, len(after), PIECE):  # in pieces that a core's own cache holds
            found = np.flatnonzero(before[begin : begin + PIECE] != after[begin : begin + PIECE])
            indices.append((found + begin).astype(np.uint32))
            left -= len(found) * (4 + after.itemsize)
            if left < 0:
                return False
        places = np.concatenate(indices)
        parts[f"{entry.name}.indices"], parts[f"{entry.name}.values"] = places, after[places]
    unfinished = path.with_suffix(".unfinished")
    save_file(parts, unfinished, metadata={"base": base.manifest.digest, "version": new.manifest.digest})
    unfinished.rename(path)
    return True


def apply_patches(
    base: Manifest, patches: Sequence[Path], progress: Callable[[], None] = lambda: None
) -> None:
    """Writes over the file of `base` what the patches say, one after the other. The caller verifies what comes out. `progress` is
    called now and then.

    Raises DigestMismatch, the file in an unknown state, when a patch is damaged or is for another base.
    """
    snapshot, held = Snapshot(base), base.digest
    with open(
        base.path, "r+b"
    ) as file:  # all pages at once: one by one they take three times as long as the patch itself
        memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    data = np.frombuffer(memory, np.uint8)
    for patch in patches:
        try:
            with safe_open(patch, framework="numpy") as parts:
                names = parts.metadata() or {}
                if names.get("base") != held:
                    raise DigestMismatch(f"{patch.name} is for the base {names.get('base')}, this is {held}")
                for name in {key.rpartition(".")[0] for key in parts.keys()}:  # noqa: SIM118
                    _overwrite_tensor(
                        data,
                        snapshot,
                        name,
                        *(parts.get_tensor(f"{name}.{part}") for part in ("indices", "values")),
                    )
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
    """[n] the elements as unsigned integers: bits are compared, not numbers, so that -0 and NaN count as what they are."""
    kinds = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
    return tensor.reshape(-1).view(kinds[tensor.element_size()]).numpy()
