"""A model's tensors as a stream of parts, none larger than a bucket.

Each rank of a learner yields the rows that it publishes; together they are every row once. A process that
holds a model alone yields all of it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

BUCKET_BYTES = 64 << 20
"""Most bytes of one part, as it is published, unless a caller says otherwise."""
SHARED_BYTES = 1 << 16
"""Bytes a holder below which rows are not divided among their holders."""


class TensorPart(NamedTuple):
    """Consecutive elements of a tensor, on any device. The parts of a tensor that one process yields follow
    each other in order."""

    name: str
    """Hugging Face parameter name."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    elements: torch.Tensor
    """The elements. They may only be read, and only before the next part is asked for."""
    begin: int = 0
    """Place of the first of them in the tensor laid out flat."""
    dtype: torch.dtype | None = None
    """Dtype that they are published in; None: their own."""

    @property
    def published_dtype(self) -> torch.dtype:
        return self.elements.dtype if self.dtype is None else self.dtype

    def cast_elements(self) -> torch.Tensor:
        """Returns the elements in the dtype that they are published in."""
        return self.elements.to(self.published_dtype)


def whole_parts(tensors: Mapping[str, torch.Tensor]) -> Iterator[TensorPart]:
    """Yields each tensor as one part."""
    return (TensorPart(name, tuple(tensor.shape), tensor) for name, tensor in tensors.items())


def list_saved_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the buffers that a model's file holds, by name, and not those that are computed from its
    config."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def collect_tensors(parts: Iterable[TensorPart]) -> dict[str, torch.Tensor]:
    """Returns copies of the whole tensors, for exports and tests of models that fit into memory. The parts of
    several ranks may come in any order.

    Raises RuntimeError, from torch, where the parts are not whole tensors.
    """
    pieces: dict[str, dict[int, torch.Tensor]] = {}
    shapes = {}
    for part in parts:
        shapes[part.name] = part.shape
        pieces.setdefault(part.name, {})[part.begin] = part.cast_elements().reshape(-1).clone()
    return {
        name: torch.cat([piece for _, piece in sorted(pieces[name].items())]).view(shape)
        for name, shape in shapes.items()
    }


def stream_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[TensorPart]:
    """Yields a whole tensor in parts that have at most `bucket_bytes` in `dtype`."""
    return stream_rows(name, tuple(tensor.shape), 0, tensor, dtype, bucket_bytes)


def stream_rows(
    name: str,
    shape: tuple[int, ...],
    first: int,
    rows: torch.Tensor,
    dtype: torch.dtype,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[TensorPart]:
    """Yields the rows [n, ...] of a tensor of this shape, from its row `first` on, as `stream_tensor` does.

    Nothing where there are none; one empty part where the tensor itself has no elements.
    """
    row_elements = math.prod(shape[1:])
    if not rows.numel() and row_elements and (not shape or shape[0]):
        return
    begin, flat = first * row_elements, rows.detach().reshape(-1)
    for piece in flat.split(max(1, bucket_bytes // dtype.itemsize)):
        yield TensorPart(name, shape, piece, begin, dtype)
        begin += len(piece)


def absent_part(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> TensorPart:
    """Returns a part without elements. It tells where a tensor that other ranks yield stands in the model's
    order."""
    return TensorPart(name, shape, torch.empty(0, dtype=dtype))


def choose_rows(num_rows: int, row_bytes: int, index: int, count: int) -> tuple[int, int]:
    """Returns which rows one of `count` holders of the same rows publishes: an even share, from one row to
    another; the first holder publishes few bytes alone."""
    if num_rows * row_bytes < count * SHARED_BYTES:
        return (0, num_rows) if index == 0 else (num_rows, num_rows)
    return num_rows * index // count, num_rows * (index + 1) // count
