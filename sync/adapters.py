"""Versions that hold low-rank adapters only (LoRA), and the whole model that a host makes of them.

The whole model's matrices are W + B A · scaling. A and B travel, under peft's names, and are verified against
the learner's digests. The base model lies in a folder of each host; its digest is in the manifest, and is
compared each time the folder is read.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sync.digest import tensor_digest
from sync.manifest import AdapterRecipe, TensorEntry, dtype_name, whole_digest
from sync.snapshot import Snapshot
from sync.snapshot_writer import file_order
from sync.stream import TensorPart, stream_tensor

PEFT_PREFIX = "base_model.model."
"""Prefix of a model's own names in peft's files."""
OWN_DTYPE = "e_score_correction_bias"
"""Ending of the names of tensors that keep the dtype of their file: engines hold a router's correction bias
in float32."""


def merge_into(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Returns W [out, in] + B [out, r] A [r, in] · scaling, in the dtype of W."""
    return torch.addmm(weight, b.to(weight.dtype), a.to(weight.dtype), alpha=scaling)


def describe_adapters(
    base: Path, dtype: str, scaling: float, on_progress: Callable[[int], None] = lambda num_bytes: None
) -> AdapterRecipe:
    """Returns the recipe for adapters to the model in the folder `base`, which is served in `dtype`. Reads
    the whole model, and calls `on_progress` with the bytes read so far after each tensor.

    Raises ValueError where the folder holds no safetensors.
    """
    entries, num_bytes = [], 0
    for name, tensor in _read_base_tensors(base):
        entries.append(_describe_tensor(name, tensor))
        num_bytes += tensor.nbytes
        on_progress(num_bytes)
    return AdapterRecipe(
        base=str(base.absolute()), base_digest=whole_digest(entries), scaling=scaling, dtype=dtype
    )


def merge_adapters(adapters: Snapshot) -> Iterator[TensorPart]:
    """Yields the whole model's weights, in the order of a snapshot. One tensor of the base is in memory at a
    time, and is multiplied in float32.

    Raises ValueError, at the latest after the last part, unless the base is the model that the learner has.
    """
    adapter, found, used = adapters.manifest.adapter, [], set()
    assert adapter is not None
    dtype, matrices = getattr(torch, adapter.dtype), dict(adapters.named_tensors())
    for name, weight in _read_base_tensors(Path(adapter.base)):
        found.append(_describe_tensor(name, weight))
        a, b = (f"{PEFT_PREFIX}{name.removesuffix('.weight')}.lora_{matrix}.weight" for matrix in "AB")
        if a in matrices:
            used |= {a, b}
            if tuple(weight.shape) != (len(matrices[b]), matrices[a].shape[1]):
                raise _base_mismatch(adapter, f"{name} of shape {list(weight.shape)}")
            weight = merge_into(weight.float(), matrices[a], matrices[b], adapter.scaling)
        yield from stream_tensor(name, weight, weight.dtype if name.endswith(OWN_DTYPE) else dtype)
    if (digest := whole_digest(found)) != adapter.base_digest:
        raise _base_mismatch(adapter, f"one with the digest {digest}")
    assert used == matrices.keys(), f"no matrix of the base takes {sorted(matrices.keys() - used)[:3]}"


def _base_mismatch(adapter: AdapterRecipe, got: str) -> ValueError:
    return ValueError(
        f"{adapter.base} must hold, on every host, the base model of the learner's adapters, with the digest "
        f"{adapter.base_digest}; got {got}"
    )


def _describe_tensor(name: str, tensor: Tensor) -> TensorEntry:
    return TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), tensor_digest(tensor))


def _read_base_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of the model in a Hugging Face folder, each read when it is asked for; a tied
    head only once."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        paths = [folder / "model.safetensors"]
        if not paths[0].exists():
            index = json.loads((folder / "model.safetensors.index.json").read_bytes())
            paths = [folder / name for name in sorted(set(index["weight_map"].values()))]
        with ExitStack() as stack:
            files: dict[str, Any] = {}
            for path in paths:
                file = stack.enter_context(safe_open(path, framework="pt"))
                files |= dict.fromkeys(file.keys(), file)
            if config.get("tie_word_embeddings"):
                files.pop("lm_head.weight", None)
            for name in file_order(sorted(files)):
                yield name, files[name].get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"model.path must be a folder with the base model's safetensors, got {folder}: {error}"
        ) from error
