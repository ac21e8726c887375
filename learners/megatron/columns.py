"""Matrices that tensor-parallel ranks divide by columns are published by rows: each rank gives the others the
columns that it holds of their rows, a bucket at a time."""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from sync.stream import TensorPart, choose_rows, stream_rows


def stream_columns(
    name: str,
    columns: Tensor,
    group: dist.ProcessGroup,
    replica: tuple[int, int],
    dtype: torch.dtype,
    bucket_bytes: int,
) -> Iterator[TensorPart]:
    """Yields this rank's part of the rows of a matrix [rows, columns] in `dtype`.

    Collective in `group`, whose ranks hold equally many columns [rows, n] each, in order. `replica`: number
    of this group among those that hold the same matrix, and how many these are. Extra memory: two parts.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    shape = (len(columns), columns.shape[1] * size)
    begin, end = choose_rows(shape[0], shape[1] * dtype.itemsize, *replica)
    step = size * max(1, bucket_bytes // (size * shape[1] * dtype.itemsize))
    for first in range(begin, end, step):
        num_rows = min(step, end - first)
        # Each rank publishes some consecutive rows of the bucket.
        edges = [num_rows * number // size for number in range(size + 1)]
        own = edges[rank + 1] - edges[rank]
        sent = columns[first : first + num_rows].to(dtype).contiguous()
        came = torch.empty(size * own * columns.shape[1], dtype=dtype, device=columns.device)
        dist.all_to_all_single(
            came,
            sent.view(-1),
            [own * columns.shape[1]] * size,
            [(stop - start) * columns.shape[1] for start, stop in zip(edges, edges[1:], strict=False)],
            group=group,
        )
        rows = came.view(size, own, columns.shape[1]).transpose(0, 1).reshape(own, math.prod(shape[1:]))
        yield from stream_rows(name, shape, first + edges[rank], rows, dtype, bucket_bytes)
