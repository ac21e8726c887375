"""A patch: what differs between two versions, as overwrites. Most bfloat16 weights do not change in a step of reinforcement
learning (the update is smaller than their last bit), so a patch is often a small part of a snapshot.

A stock safetensors file: for each tensor that has changed `<name>.indices` (uint32, into the tensor laid out flat) and
`<name>.values`; its metadata names base and version by their digests. Applying it twice is as applying it once. It loses nothing:
what comes out has the digests of the published version, or is refused.
"""

import os
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sync.manifest import DigestMismatch
from sync.snapshot import Snapshot

PIECE = 1 << 17
WORTH = 0.5
"""Largest size of a patch, as a share of the snapshot's, that is worth its making."""


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
        before, after = _bits(base.tensor(entry.name)), _bits(new.tensor(entry.name))
        indices = _changed(before, after)
        left -= len(indices) * (4 + after.itemsize)
        if left < 0 or len(after) > 1 << 32:
            return False
        parts[f"{entry.name}.indices"], parts[f"{entry.name}.values"] = indices.astype(np.uint32), after[indices]
    unfinished = path.with_suffix(".unfinished")
    save_file(parts, unfinished, metadata={"base": base.manifest.digest, "version": new.manifest.digest})
    unfinished.rename(path)
    return True


def _changed(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Where they differ, in order; in pieces that a core's own cache holds."""
    pieces = [np.empty(0, np.int64)]
    for begin in range(0, len(after), PIECE):
        piece = slice(begin, begin + PIECE)
        pieces.append(np.flatnonzero(before[piece] != after[piece]) + begin)
    return np.concatenate(pieces)


def apply_patch(base: Snapshot, patch: Path, into: Path) -> None:
    """Writes the version that `patch` leads to from `base`, as a snapshot file. The caller verifies it.

    Raises DigestMismatch, and leaves nothing, when the patch is damaged or is for another base.
    """
    unfinished = into.with_suffix(".patched")
    try:
        with safe_open(patch, framework="numpy") as parts:
            wanted = (parts.metadata() or {}).get("base")
            if wanted != base.manifest.digest:
                raise DigestMismatch(f"{patch.name} is for the base {wanted}, this is {base.manifest.digest}")
            shutil.copyfile(base.manifest.path, unfinished)
            data = np.memmap(unfinished, np.uint8, "r+")
            for name in {key.rpartition(".")[0] for key in parts.keys()}:  # noqa: SIM118
                _overwrite(data, base, name, parts.get_tensor(f"{name}.indices"), parts.get_tensor(f"{name}.values"))
        os.replace(unfinished, into)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise DigestMismatch(f"{patch.name} is not a patch: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _overwrite(data: np.ndarray, base: Snapshot, name: str, indices: np.ndarray, values: np.ndarray) -> None:
    entry, begin = base.place(name)
    held = _bits(base.tensor(name))
    if indices.dtype != np.uint32 or values.dtype != held.dtype or len(indices) != len(values):
        raise ValueError(
            f"{name} has {len(indices)} indices of {indices.dtype} and {len(values)} values of {values.dtype}"
        )
    if len(indices) and int(indices.max()) >= len(held):
        raise ValueError(f"{name} has {len(held)} elements of {entry.dtype}, got index {int(indices.max())}")
    data[begin : begin + held.nbytes].view(held.dtype)[indices] = values


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """[n] the elements as unsigned integers: bits are compared, not numbers, so that -0 and NaN count as what they are."""
    kinds = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
    return tensor.reshape(-1).view(kinds[tensor.element_size()]).numpy()
