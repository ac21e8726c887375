"""A model's tensors as a stream of parts, none larger than a bucket, however the model is sharded.

Rank 0 publishes. A tensor that is sharded over ranks (a DTensor) is never gathered whole: each rank sends its
rows, a bucket at a time, and rank 0 passes them on.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

BUCKET_BYTES = 64 << 20
"""Most bytes of one part, unless a caller says otherwise."""


class TensorPart(NamedTuple):
    """Consecutive elements of a tensor, on any device. A tensor's parts follow each other, in order and
    without a gap."""

    name: str
    """Hugging Face parameter name."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    elements: torch.Tensor
    """The elements. They may only be read, and only before the next part is asked for."""


def whole_parts(tensors: Mapping[str, torch.Tensor]) -> Iterator[TensorPart]:
    """Yields each tensor as one part."""
    return (TensorPart(name, tuple(tensor.shape), tensor) for name, tensor in tensors.items())


def collect_tensors(parts: Iterable[TensorPart]) -> dict[str, torch.Tensor]:
    """Returns copies of the whole tensors, for exports and tests of models that fit into memory."""
    pieces: dict[str, list[torch.Tensor]] = {}
    shapes = {}
    for part in parts:
        shapes[part.name] = part.shape
        pieces.setdefault(part.name, []).append(part.elements.reshape(-1).clone())
    return {name: torch.cat(pieces[name]).view(shape) for name, shape in shapes.items()}


def stream_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[TensorPart]:
    """Yields the tensor in `dtype`, in parts of at most `bucket_bytes`, on rank 0, and nothing on other
    ranks.

    For a DTensor it is a collective of the ranks of its mesh. Extra memory: one part.
    """
    if not isinstance(tensor, DTensor):
        yield from (
            TensorPart(name, tuple(tensor.shape), piece)
            for piece in _split_pieces(tensor, dtype, bucket_bytes)
        )
        return
    mesh = tensor.device_mesh
    sharded = [
        dim
        for dim, place in enumerate(tensor.placements)
        if not isinstance(place, Replicate) and mesh.size(dim) > 1
    ]
    if [tensor.placements[dim] for dim in sharded] == [Shard(0)]:
        group = mesh.get_group(sharded[0])
        # Groups without rank 0 hold replicas of the same rows.
        if 0 in dist.get_process_group_ranks(group):
            yield from _stream_rows(name, tensor, group, dtype, bucket_bytes)
        return
    # Sharded in a way that leaves no rows together, a tensor is gathered whole.
    whole = tensor.full_tensor() if sharded else tensor.to_local()
    if dist.get_rank() == 0:
        yield from stream_tensor(name, whole, dtype, bucket_bytes)


def _stream_rows(
    name: str, tensor: DTensor, group: dist.ProcessGroup, dtype: torch.dtype, bucket_bytes: int
) -> Iterator[TensorPart]:
    """Yields each rank's rows in turn, on rank 0; the other ranks send theirs a piece at a time."""
    shape, local = tuple(tensor.shape), tensor.to_local()
    if dist.get_rank() != 0:
        for piece in _split_pieces(local, dtype, bucket_bytes):
            if len(piece):
                dist.send(piece, group_dst=0, group=group)
        return
    yield from (TensorPart(name, shape, piece) for piece in _split_pieces(local, dtype, bucket_bytes))
    # As torch deals rows out: as many to each rank, and the last ranks get the rest.
    rows = -(-shape[0] // dist.get_world_size(group))
    size = max(1, bucket_bytes // dtype.itemsize)
    for owner in range(1, dist.get_world_size(group)):
        left = max(0, min(rows, shape[0] - owner * rows)) * math.prod(shape[1:])
        while left:
            piece = torch.empty(min(left, size), dtype=dtype, device=local.device)
            dist.recv(piece, group_src=owner, group=group)
            yield TensorPart(name, shape, piece)
            left -= len(piece)


def _split_pieces(tensor: torch.Tensor, dtype: torch.dtype, bucket_bytes: int) -> Iterator[torch.Tensor]:
    """Yields pieces [n] of the flat tensor in `dtype`; one empty piece of an empty tensor."""
    return (
        piece.to(dtype) for piece in tensor.detach().reshape(-1).split(max(1, bucket_bytes // dtype.itemsize))
    )
