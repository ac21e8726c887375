"""From Arrow to packed tensors: whole sequences side by side, no padding, no Python loop over tokens.

Arrow's list offsets are the `cu_seqlens` of variable-length attention. Alignment: everything at index t speaks of token t;
the log-probability of token t comes from the model's output at t − 1 of the same sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.nn.functional as F
from torch import Tensor

from buffers.trajectory import GREEDY, flatten_column


class Counted(Sequence["Packed"]):
    """Microbatches that call `moved` whenever one of them is taken: an engine that comes for the next has not stopped."""

    def __init__(self, microbatches: Sequence["Packed"], moved: Callable[[], None]) -> None:
        self._microbatches, self._moved = microbatches, moved

    def __len__(self) -> int:
        return len(self._microbatches)

    def __getitem__(self, place: Any) -> Any:
        self._moved()
        return self._microbatches[place]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step's trajectories: N sequences with T tokens in all, flat."""

    tokens: Tensor
    """[T] int32"""
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
    started_at: Tensor | None = None
    """[N] float64: Unix time in seconds when the first token was asked for, by the generator's clock; None: not known"""
    generators: Sequence[str] = ()
    """[N] names; empty: not known"""
    experts: Tensor | None = None
    """[T, layers · k] int16: experts to send each token to, -1 where none were recorded; None: nowhere"""

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def sequence(self) -> Tensor:
        """[T] int64: index of each token's sequence."""
        return torch.from_numpy(np.repeat(np.arange(self.num_sequences), np.diff(self.offsets)))


def from_arrow(table: pa.Table, group_weights: Sequence[float] = ()) -> Batch:
    """The batch of a table with the columns of `buffers.trajectory`; `group_weights` has one of each group, or none.

    A table of one chunk is not copied where its types are the tensors' own (tokens, log-probabilities, versions): they lie in the table's
    memory, which ranks may share, and are only to be read.
    """
    lengths = table.column("tokens").combine_chunks().value_lengths().to_numpy()

    return Batch(
        tokens=_column(table, "tokens"),
        sampled=torch.from_numpy(np.array(flatten_column(table, "sampled"))),
        behavior_logprobs=_column(table, "logprobs"),
        versions=_column(table, "versions"),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        rewards=torch.from_numpy(np.array(table.column("reward").to_numpy())).float(),
        groups=torch.from_numpy(np.array(table.column("group").to_numpy())),
        weights=_by_row(table, group_weights),
        truncated=torch.from_numpy(pc.equal(table.column("finish_reason"), "length").to_numpy()),
        greedy=_component(table, GREEDY),
        started_at=torch.from_numpy(np.array(table.column("started_at").to_numpy())),
        generators=table.column("generator").to_pylist(),
        experts=_experts(table, int(lengths.sum())),
    )


def _experts(table: pa.Table, num_tokens: int) -> Tensor | None:
    experts = _column(table, "experts")
    return experts.view(num_tokens, -1) if len(experts) else None


def _column(table: pa.Table, name: str) -> Tensor:
    """[T] all values of a list column, in the table's memory if that is one piece."""
    column = table.column(name)
    return torch.from_dlpack(
        (column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()).flatten()
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
    targets: Tensor
    """[K] int64: the sampled tokens, as far as they have some before them in their sequence. Nothing else is asked of a model's head."""
    num_sampled: int
    behavior_logprobs: Tensor
    """[T] float32"""
    experts: Tensor | None = None
    """[T, layers · k] int16, as in `Batch`"""

    @property
    def sequence(self) -> Tensor:
        """[T] int64: index of each token's sequence, within the microbatch."""
        return torch.repeat_interleave(torch.arange(len(self.cu_seqlens) - 1), self.cu_seqlens.diff())


def pack(batch: Batch, rows: Sequence[int]) -> Packed:
    starts, lengths = batch.offsets[rows], np.diff(batch.offsets)[rows]
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], lengths)
    index = torch.from_numpy(np.repeat(starts, lengths) + positions)
    sampled = batch.sampled[index]
    return Packed(
        tokens=batch.tokens[index].long(),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        max_seqlen=int(lengths.max()),
        index=index,
        targets=(sampled & (torch.from_numpy(positions) > 0)).nonzero()[:, 0],
        num_sampled=int(sampled.sum()),
        behavior_logprobs=batch.behavior_logprobs[index],
        experts=None if batch.experts is None else batch.experts[index],
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
        experts=None if packed.experts is None else F.pad(packed.experts, (0, 0, 0, missing), value=-1),
    )


@dataclass(frozen=True, slots=True)
class Cost:
    """What a sequence costs to train: a part by token, and attention by the square of its length. In FLOPs, where they are known."""

    per_token: float = 1.0
    per_square: float = 0.0

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """[N] float64"""
        return self.per_token * lengths + self.per_square * np.square(lengths, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Plan:
    """How sequences are divided over shares and microbatches."""

    shares: list[list[list[int]]]
    """[share][microbatch] -> rows, ascending; equally many microbatches for each share, none empty"""
    fill: float
    """Tokens over what the microbatches may hold: above 1 where a sequence is longer than that."""
    balance: float
    """Cost over what it would be if in each round all shares had the dearest one's microbatch: the rest is waiting."""

    cost: float
    """Of all sequences"""
    tokens: np.ndarray
    """[microbatches of all shares]"""

    def metrics(self, multiple: int = 1) -> dict[str, float]:
        """`multiple`: what the engine pads each microbatch to."""
        return {
            "packing/microbatches": float(len(self.shares[0])),
            "packing/fill": self.fill,
            "packing/balance": self.balance,
            "packing/padding": float(1 - self.tokens.sum() / (-(-self.tokens // multiple) * multiple).sum()),
        }


def plan(lengths: np.ndarray, budget: int, num_shares: int, cost: Cost | None = None) -> Plan:
    """Divides sequences [N] into microbatches of at most `budget` tokens, or one longer sequence alone.

    Dearest first, always to the microbatch that has cost least so far and has room (Graham, 1969); then the shares' microbatches are
    paired by cost, for in each round all wait for the dearest. Where the shares do not divide the number of rows, there may be too
    few rows to keep all of that: then, and only then, the budget gives way. Raises ValueError for fewer rows than shares.
    """
    if len(lengths) < num_shares:
        raise ValueError(
            f"a minibatch must hold at least a sequence a share, got {len(lengths)} for {num_shares} shares"
        )
    costs = (cost or Cost()).of(lengths)
    most = len(lengths) // num_shares
    per_share = min(most, -(-int(lengths.sum()) // (budget * num_shares)))
    while (bins := _fill(lengths, costs, budget, per_share * num_shares, per_share == most)) is None:
        per_share += 1
    totals = np.array([costs[rows].sum() for rows in bins])
    rounds = np.argsort(-totals, kind="stable").reshape(per_share, num_shares)
    return Plan(
        shares=[[sorted(bins[number]) for number in rounds[:, share]] for share in range(num_shares)],
        fill=float(lengths.sum() / (budget * len(bins))),
        balance=float(totals.sum() / (totals[rounds[:, 0]].sum() * num_shares)),
        cost=float(totals.sum()),
        tokens=np.array([lengths[rows].sum() for rows in bins]),
    )


def _fill(
    lengths: np.ndarray, costs: np.ndarray, budget: int, num_bins: int, by_all_means: bool
) -> list[list[int]] | None:
    """Rows of each bin; None where not all find room, unless that is to be ignored."""
    spent, used = np.zeros(num_bins), np.zeros(num_bins, dtype=np.int64)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for row in np.argsort(-costs, kind="stable"):
        room = (used == 0) | (used + lengths[row] <= budget)
        if not (has_room := room.any()) and not by_all_means:
            return None
        number = int(np.where(room, spent, np.inf).argmin() if has_room else spent.argmin())
        bins[number].append(int(row))
        spent[number] += costs[row]
        used[number] += lengths[row]
    return bins


def microbatches(
    batch: Batch, rows: Sequence[int], budget: int, num_shares: int, share: int, cost: Cost | None = None
) -> list[Packed]:
    """One share of the sequences `rows` of a batch."""
    return divide(batch, rows, budget, num_shares, share, cost)[0]


def divide(
    batch: Batch, rows: Sequence[int], budget: int, num_shares: int, share: int, cost: Cost | None = None
) -> tuple[list[Packed], Plan]:
    """As `microbatches`, with the plan of all shares (whose rows count from 0 within `rows`)."""
    rows_array = np.asarray(rows)
    made = plan(np.diff(batch.offsets)[rows_array], budget, num_shares, cost)
    return [pack(batch, rows_array[local].tolist()) for local in made.shares[share]], made


def minibatch_rows(batch: Batch, num_minibatches: int) -> list[list[int]]:
    """Rows of each minibatch: the groups, in order, in equal contiguous parts."""
    numbers = torch.unique(batch.groups)
    return [
        torch.isin(batch.groups, part).nonzero()[:, 0].tolist() for part in numbers.chunk(num_minibatches)
    ]  # fmt: skip
