"""The weights in a Hugging Face folder: safetensors, whole or divided over files with an index.

Tensors are views of mapped files, so that reading some rows of one takes no memory of a process, and the
ranks of a host read each page of a file once.
"""

from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SAMPLED_TENSORS, SAMPLED_ELEMENTS = 256, 16
"""Tensors, and elements of each, that a fingerprint looks at."""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
"""Dtypes of tensors that a model may be loaded from, by their names in a file."""


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor of a file, without its elements."""

    shape: tuple[int, ...]
    dtype: str
    """One of `DTYPES`."""
    file: str
    """Name of its file in the folder."""

    @property
    def num_rows(self) -> int:
        """Length of the first dimension; 1 for a tensor without dimensions."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return torch.Size(self.shape[1:]).numel() * DTYPES[self.dtype].itemsize

    def make_rows(self, num_rows: int, device: str = "cpu") -> Tensor:
        """Returns an empty tensor for some rows of this one."""
        shape = (num_rows, *self.shape[1:]) if self.shape else ()
        return torch.empty(shape, dtype=DTYPES[self.dtype], device=device)


class ModelFiles:
    """The files of one folder, open."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError where the folder has no safetensors, or a file of them is missing or damaged."""
        self._folder = folder
        names: list[str] | None = None
        if (folder / WHOLE).is_file():  # transformers prefers it to an index too
            files = [WHOLE]
        elif (folder / INDEX).is_file():
            where = _read_index(folder / INDEX)
            names, files = list(where), sorted(set(where.values()))
        else:
            raise ValueError(f"model.path must hold {WHOLE} or {INDEX}, got {folder}{_explain_bin(folder)}")
        self._open = {file: _open_file(folder / file) for file in files}
        self.entries: dict[str, StoredTensor] = {}
        for file, opened in self._open.items():
            for name in list(opened.keys()):
                part = opened.get_slice(name)
                if (dtype := part.get_dtype()) not in DTYPES:
                    raise ValueError(
                        f"tensors of model.path must be of one of {', '.join(DTYPES)}, got {name} of {dtype} "
                        f"in {folder / file}"
                    )
                self.entries[name] = StoredTensor(tuple(part.get_shape()), dtype, file)
        if absent := sorted(set(names or ()) - self.entries.keys()):
            raise ValueError(
                f"the files of {folder / INDEX} must hold all its tensors, got none called {absent[0]}"
            )

    def read_slice(self, name: str, *places: slice) -> Tensor:
        """Returns a part of a tensor, which may only be read: it is a view of the file."""
        part = self._open[self.entries[name].file].get_slice(name)
        tensor: Tensor = part[places] if places else part[...]
        return tensor

    def take_fingerprint(self) -> str:
        """Returns what tells this model from another one: all names, shapes and dtypes, and some elements of
        some tensors."""
        names = sorted(self.entries)
        told = {name: (self.entries[name].dtype, self.entries[name].shape) for name in names}
        digest = xxhash.xxh3_128(msgspec.json.encode(told))
        for name in names[:: -(-len(names) // SAMPLED_TENSORS)]:
            middle = self.entries[name].num_rows // 2
            row = self.read_slice(name, *([slice(middle, middle + 1)] if self.entries[name].shape else []))
            sample = row.reshape(-1)[:SAMPLED_ELEMENTS].contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _read_index(path: Path) -> dict[str, str]:
    """Returns the file of each tensor. Raises ValueError for another thing than an index."""
    try:
        told = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        return msgspec.convert(told["weight_map"], dict[str, str])
    except (OSError, KeyError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path} must be an index of safetensors files, got {error!r}") from error


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} must be a whole safetensors file, got: {error}") from error


def _explain_bin(folder: Path) -> str:
    """Returns what to do about a folder whose weights are pickled."""
    if not any(folder.glob("pytorch_model*.bin")):
        return ""
    return (
        " with pytorch_model.bin alone, which is a pickle: "
        f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(FOLDER) writes safetensors"
    )
