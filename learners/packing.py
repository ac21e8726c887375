"""From Arrow to packed tensors: whole sequences side by side, no padding, no Python loop over tokens.

Arrow's list offsets are the `cu_seqlens` of variable-length attention. Alignment: everything at index t speaks of token t;
the log-probability of token t comes from the model's output at t − 1 of the same sequence.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.nn.functional as F
from torch import Tensor

from buffers.trajectory import GREEDY, flat


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step's trajectories: N sequences with T tokens in all, flat."""

    tokens: Tensor
    """[T] int64"""
    sampled: Tensor
    """[T] bool"""
    behavior_logprobs: Tensor
    """[T] float32"""
    versions: Tensor
    """[T] int32, -1 where not sampled"""
    offsets: np.ndarray
    """[N + 1] int64: sequence i is tokens[offsets[i] : offsets[i + 1]]"""
    rewards: Tensor
    """[N] float32"""
    groups: Tensor
    """[N] int64: group numbers, ascending"""
    weights: Tensor
    """[N] float32: importance weight of each sequence's group; 1 where the sampler gives none"""
    truncated: Tensor
    """[N] bool: cut off at the longest response that may be sampled"""
    greedy: Tensor
    """[N] float32: reward of the greedy response to the same prompt; NaN where none was made"""

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def sequence(self) -> Tensor:
        """[T] int64: index of each token's sequence."""
        return torch.from_numpy(np.repeat(np.arange(self.num_sequences), np.diff(self.offsets)))


def from_arrow(table: pa.Table, group_weights: Sequence[float] = ()) -> Batch:
    """The batch of a table with the columns of `buffers.trajectory`; `group_weights` has one of each group, or none."""
    lengths = table.column("tokens").combine_chunks().value_lengths().to_numpy()

    def tensor(column: str, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.array(flat(table, column))).to(dtype)

    return Batch(
        tokens=tensor("tokens", torch.int64),
        sampled=tensor("sampled", torch.bool),
        behavior_logprobs=tensor("logprobs", torch.float32),
        versions=tensor("versions", torch.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        rewards=torch.from_numpy(np.array(table.column("reward").to_numpy())).float(),
        groups=torch.from_numpy(np.array(table.column("group").to_numpy())),
        weights=_by_row(table, group_weights),
        truncated=torch.from_numpy(pc.equal(table.column("finish_reason"), "length").to_numpy()),
        greedy=_component(table, GREEDY),
    )


def _component(table: pa.Table, name: str) -> Tensor:
    """[N] a component of the reward; NaN where a row has none of the name."""
    found = pc.map_lookup(table.column("rewards").combine_chunks(), name, "first")
    return torch.from_numpy(pc.fill_null(found, float("nan")).to_numpy(zero_copy_only=False).copy())


def _by_row(table: pa.Table, group_weights: Sequence[float]) -> Tensor:
    if not len(group_weights):
        return torch.ones(table.num_rows)
    _, row_group = np.unique(table.column("group").to_numpy(), return_inverse=True)
    return torch.tensor(group_weights, dtype=torch.float32)[torch.from_numpy(row_group)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A microbatch: n whole sequences with T tokens in all, as one row for variable-length attention."""

    tokens: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64, from 0 in each sequence"""
    cu_seqlens: Tensor
    """[n + 1] int32"""
    max_seqlen: int
    index: Tensor
    """[T] int64: where each token stands in its batch; `column[index]` packs any [T] column of the batch"""
    num_sampled: int
    behavior_logprobs: Tensor
    """[T] float32"""

    @property
    def sequence(self) -> Tensor:
        """[T] int64: index of each token's sequence, within the microbatch."""
        return torch.repeat_interleave(torch.arange(len(self.cu_seqlens) - 1), self.cu_seqlens.diff())


def pack(batch: Batch, rows: Sequence[int]) -> Packed:
    starts, lengths = batch.offsets[rows], np.diff(batch.offsets)[rows]
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], lengths)
    index = torch.from_numpy(np.repeat(starts, lengths) + positions)
    return Packed(
        tokens=batch.tokens[index],
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        max_seqlen=int(lengths.max()),
        index=index,
        num_sampled=int(batch.sampled[index].sum()),
        behavior_logprobs=batch.behavior_logprobs[index],
    )


def padded_to(packed: Packed, multiple: int) -> Packed:
    """With another sequence, of zeros, at the end where the number of tokens is not a multiple. Only for an engine's own forward
    pass: `index` and what else speaks of the batch stays without it."""
    missing = -len(packed.tokens) % multiple
    if not missing:
        return packed
    return replace(
        packed,
        tokens=F.pad(packed.tokens, (0, missing)),
        positions=torch.cat([packed.positions, torch.arange(missing)]),
        cu_seqlens=torch.cat([packed.cu_seqlens, packed.cu_seqlens[-1:] + missing]),
        max_seqlen=max(packed.max_seqlen, missing),
    )


def plan(lengths: np.ndarray, budget: int, num_ranks: int) -> list[list[list[int]]]:
    """Divides sequences into microbatches: [rank][microbatch] -> rows, ascending.

    Each microbatch holds at most `budget` tokens, or one longer sequence alone; every rank has equally many, none is
    empty. Longest first, always to the microbatch with the fewest tokens (Graham, 1969). Where the ranks do not divide the
    number of rows, there may be too few rows to keep all of that: then, and only then, the budget gives way.
    Raises ValueError for fewer rows than ranks.
    """
    if len(lengths) < num_ranks:
        raise ValueError(f"a minibatch must hold at least a sequence a rank, got {len(lengths)} for {num_ranks} ranks")
    most = len(lengths) // num_ranks
    per_rank = min(most, -(-int(lengths.sum()) // (budget * num_ranks)))
    while True:
        bins = _fill(lengths, per_rank * num_ranks)
        if per_rank == most or all(len(rows) == 1 or lengths[rows].sum() <= budget for rows in bins):
            return [bins[rank::num_ranks] for rank in range(num_ranks)]
        per_rank += 1


def _fill(lengths: np.ndarray, num_bins: int) -> list[list[int]]:
    heap = [(0, number) for number in range(num_bins)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for row in np.argsort(-lengths, kind="stable"):
        tokens, number = heapq.heappop(heap)
        bins[number].append(int(row))
        heapq.heappush(heap, (tokens + int(lengths[row]), number))
    return [sorted(rows) for rows in bins]


def microbatches(batch: Batch, rows: Sequence[int], budget: int, num_ranks: int, rank: int) -> list[Packed]:
    """One rank's share of the sequences `rows` of a batch."""
    rows_array = np.asarray(rows)
    shares = plan(np.diff(batch.offsets)[rows_array], budget, num_ranks)
    return [pack(batch, rows_array[local].tolist()) for local in shares[rank]]


def minibatch_rows(batch: Batch, num_minibatches: int) -> list[list[int]]:
    """Rows of each minibatch: the groups, in order, in equal contiguous parts."""
    numbers = torch.unique(batch.groups)
    return [
        torch.isin(batch.groups, part).nonzero()[:, 0].tolist() for part in numbers.chunk(num_minibatches)
    ]  # fmt: skip
