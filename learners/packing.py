"""From Arrow to packed tensors: episodes side by side, no padding, no Python loop over tokens.

An episode is one or more branches, each a token sequence of its own; its branches lie side by side. An
episode that is longer than a microbatch is cut into *pieces* between its branches; any other is one piece.
Arrow's list offsets are the ends of branches, and so the `cu_seqlens` of variable-length attention. Every
value at index t belongs to token t; the log-probability of token t comes from the model's output at t − 1 of
the same branch. Losses know episodes only: `sequence` is the index of a token's episode.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.nn.functional as F
from torch import Tensor

from buffers.trajectory import GREEDY, fill_turns, flatten_column, flatten_lists

CUT_OFF = ("max_tokens", "context_overflow")
"""Ends of an episode that was not over when it was cut off."""
MAX_COMPONENTS = 64
"""Components of the reward that a batch has a mean of."""


class ReportedMicrobatches(Sequence["Packed"]):
    """Microbatches that call `report_progress` whenever an engine takes one: an engine that comes for it
    has not hung."""

    def __init__(self, microbatches: Sequence["Packed"], report_progress: Callable[[], None]) -> None:
        self._microbatches, self._report_progress = microbatches, report_progress

    def __len__(self) -> int:
        return len(self._microbatches)

    def __getitem__(self, place: Any) -> Any:
        self._report_progress()
        return self._microbatches[place]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step's trajectories: N episodes in B branches with T tokens in all, flat."""

    tokens: Tensor
    """[T] int32"""
    sampled: Tensor
    """[T] bool: the tokens that the engine sampled"""
    behavior_logprobs: Tensor
    """[T] float32 log μ; 0 where not sampled"""
    versions: Tensor
    """[T] int32: version that sampled each token; -1 where not sampled"""
    offsets: np.ndarray
    """[N + 1] int64: episode i is tokens[offsets[i] : offsets[i + 1]], branch after branch"""
    rewards: Tensor
    """[N] float32: as the task gives them"""
    groups: Tensor
    """[N] int64: group numbers, ascending"""
    group_weights: Tensor
    """[N] float32: importance weight of each episode's group; 1 where the sampler gives none"""
    truncated: Tensor
    """[N] bool: cut off, at the longest response that may be sampled or because the context was full"""
    greedy_rewards: Tensor
    """[N] float32: reward of the greedy response to the same prompt; NaN where none was made"""
    started_at: Tensor | None = None
    """[N] float64: Unix time in seconds, by the generator's clock, when it asked for the first token;
    None: not known"""
    generators: Sequence[str] = ()
    """[N] names of the generators that sampled the episodes; empty: not known"""
    stops: Sequence[str] = ()
    """[N] ends of the episodes (`buffers.trajectory.EPISODE_STOPS`); empty: not known"""
    turns: Tensor | None = None
    """[T] int16: the episode's turn in which each token was sampled, -1 where not sampled; None: not known,
    so a run of sampled tokens counts as a turn"""
    token_rewards: Tensor | None = None
    """[T] float32: the part of the episode's reward that was paid at each token; None: all was paid at the
    end"""
    experts: Tensor | None = None
    """[T, layers · k] int16: experts that the engine sent each token to, -1 where it recorded none; None:
    no recording"""
    component_means: Mapping[str, float] = field(default_factory=dict)
    """Mean of each component of the reward over the episodes that have it, by name"""
    branch_offsets: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """[B + 1] int64: the same as `offsets` for branches, each of which lies within one episode. Attention and
    positions are by branch. By default every episode is one branch"""

    def __post_init__(self) -> None:
        if not len(self.branch_offsets):
            object.__setattr__(self, "branch_offsets", self.offsets)

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_branches(self) -> int:
        return len(self.branch_offsets) - 1

    @property
    def sequence(self) -> Tensor:
        """[T] int64: index of each token's episode."""
        return _number_tokens(self.offsets)

    @property
    def branch(self) -> Tensor:
        """[T] int64: index of each token's branch, within the batch."""
        return _number_tokens(self.branch_offsets)

    @property
    def first_branches(self) -> np.ndarray:
        """[N + 1] int64: branches first_branches[i] : first_branches[i + 1] are those of episode i."""
        return np.searchsorted(self.branch_offsets, self.offsets)


def _number_tokens(offsets: np.ndarray) -> Tensor:
    """Returns [T] int64 the index of each token's part, from the parts' ends [n + 1]."""
    return torch.from_numpy(np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)))


def batch_from_arrow(table: pa.Table, group_weights: Sequence[float] = ()) -> Batch:
    """Returns the batch of a table with the columns of `buffers.trajectory`.

    `group_weights` has one weight for each group; empty: all weigh 1. Where the table is one chunk, tokens,
    log-probabilities and versions are not copied: the tensors lie in the table's memory, which ranks may
    share, so they are for reading only.
    """
    lengths = pc.list_value_length(table.column("tokens")).to_numpy()
    branch_offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    first = np.flatnonzero(table.column("branch").to_numpy() == 0)
    assert not table.num_rows or (len(first) and first[0] == 0), "the branches of an episode count from 0"
    sampled, own_turns = np.array(flatten_column(table, "sampled")), table.column("turn")
    turns = fill_turns(
        flatten_column(table, "turn"), pc.list_value_length(own_turns).to_numpy(), lengths, sampled
    )
    return Batch(
        tokens=_read_column(table, "tokens"),
        sampled=torch.from_numpy(sampled),
        behavior_logprobs=_read_column(table, "logprobs"),
        versions=_read_column(table, "versions"),
        offsets=branch_offsets[np.append(first, table.num_rows)],
        branch_offsets=branch_offsets,
        rewards=torch.from_numpy(table.column("reward").to_numpy()[first]).float(),
        groups=torch.from_numpy(table.column("group").to_numpy()[first]),
        group_weights=_spread_group_weights(table, group_weights)[first],
        truncated=torch.from_numpy(_find_cut_off(table, first, branch_offsets, turns)),
        greedy_rewards=_read_reward_component(table, GREEDY)[first],
        started_at=torch.from_numpy(np.minimum.reduceat(table.column("started_at").to_numpy(), first)),
        generators=table.column("generator").take(first).to_pylist(),
        stops=table.column("stop").take(first).to_pylist(),
        turns=torch.from_numpy(np.array(turns)),
        token_rewards=_read_token_rewards(table, branch_offsets),
        experts=_read_experts(table, int(lengths.sum())),
        component_means=_average_components(table, first),
    )


def _find_cut_off(
    table: pa.Table, first: np.ndarray, branch_offsets: np.ndarray, turns: np.ndarray
) -> np.ndarray:
    """Returns [N] bool: the episodes whose last reply was cut off, or whose context was full. A short reply
    that an agent asked for before, on another branch, cuts nothing off. `first` [N] are the episodes' first
    rows, and `turns` [T] the turns of all tokens."""
    is_cut = pc.equal(table.column("finish_reason"), "length").to_numpy()
    if len(first) < table.num_rows:
        last_turns = np.maximum.reduceat(turns, branch_offsets[:-1])
        num_rows = np.diff(np.append(first, table.num_rows))
        is_cut = is_cut & (last_turns == np.maximum.reduceat(last_turns, first).repeat(num_rows))
    is_cut = is_cut | pc.is_in(table.column("stop"), value_set=pa.array(CUT_OFF)).to_numpy()
    return np.logical_or.reduceat(is_cut, first)


def _average_components(table: pa.Table, first: np.ndarray) -> dict[str, float]:
    """Returns the mean of each component over the episodes that have it; of more than `MAX_COMPONENTS` names
    those that most episodes have. `first` [N] are the episodes' first rows."""
    components = table.column("rewards").take(first).combine_chunks()
    keys = components.keys.dictionary_encode()
    names, numbers = keys.dictionary.to_pylist(), keys.indices.to_numpy()
    counts = np.bincount(numbers, minlength=len(names))
    sums = np.bincount(numbers, components.items.to_numpy(), len(names))
    most = sorted(range(len(names)), key=lambda i: (-counts[i], names[i]))[:MAX_COMPONENTS]
    return {name: mean for name, mean in sorted((names[i], float(sums[i] / counts[i])) for i in most)}


def _read_experts(table: pa.Table, num_tokens: int) -> Tensor | None:
    experts = _read_column(table, "experts")
    return experts.view(num_tokens, -1) if len(experts) else None


def _read_column(table: pa.Table, name: str) -> Tensor:
    """Returns [T] all values of a list column, in the table's memory if that is one piece."""
    return torch.from_dlpack(flatten_lists(table.column(name)))


def _read_token_rewards(table: pa.Table, branch_offsets: np.ndarray) -> Tensor | None:
    """Returns [T] the rewards that were paid at tokens, 0 in rows without them; None where no row has
    them."""
    lengths = pc.list_value_length(table.column("token_rewards")).to_numpy()
    if not lengths.any():
        return None
    token_rewards = torch.zeros(int(branch_offsets[-1]))
    token_rewards[_chain_ranges(branch_offsets[:-1], lengths)] = _read_column(table, "token_rewards")
    return token_rewards


def _chain_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the numbers of the ranges starts[i] : starts[i] + lengths[i], range after range."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + lengths, lengths)


def _read_reward_component(table: pa.Table, name: str) -> Tensor:
    """Returns [N] the component of the reward with this name; NaN where a row has none."""
    component = pc.map_lookup(table.column("rewards").combine_chunks(), name, "first")
    return torch.from_numpy(pc.fill_null(component, float("nan")).to_numpy(zero_copy_only=False).copy())


def _spread_group_weights(table: pa.Table, group_weights: Sequence[float]) -> Tensor:
    """Returns [N] the weight of each row's group; 1 everywhere where there are none."""
    if not len(group_weights):
        return torch.ones(table.num_rows)
    _, row_group = np.unique(table.column("group").to_numpy(), return_inverse=True)
    return torch.tensor(group_weights, dtype=torch.float32)[torch.from_numpy(row_group)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A microbatch: n pieces in b branches with T tokens in all, as one row for variable-length attention.

    A piece is a whole episode, or some branches of one that is longer than a microbatch
    (`learners.divided`)."""

    tokens: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64, from 0 in each branch"""
    cu_seqlens: Tensor
    """[b + 1] int32: ends of the branches"""
    max_seqlen: int
    """Length of the longest branch"""
    offsets: Tensor
    """[n + 1] int64: ends of the pieces"""
    index: Tensor
    """[T] int64: place of each token in its batch; `column[index]` packs any [T] column of the batch"""
    targets: Tensor
    """[K] int64: places of the sampled tokens that have a token before them in their branch: all that a
    model's head is asked for"""
    num_sampled: int
    behavior_logprobs: Tensor
    """[T] float32"""
    experts: Tensor | None = None
    """[T, layers · k] int16, as `Batch.experts`"""

    @property
    def sequence(self) -> Tensor:
        """[T] int64: index of each token's piece, within the microbatch."""
        return torch.repeat_interleave(torch.arange(len(self.offsets) - 1), self.offsets.diff())


@dataclass(frozen=True, slots=True)
class Pieces:
    """Parts of episodes that are not divided any further."""

    begins: np.ndarray
    """[n] int64: first branch of each piece, within the batch"""
    ends: np.ndarray
    """[n] int64: the branch behind its last one"""

    def count_tokens(self, batch: Batch) -> np.ndarray:
        """Returns [n] int64 the tokens of each piece."""
        return batch.branch_offsets[self.ends] - batch.branch_offsets[self.begins]


def take_episodes(batch: Batch, rows: Sequence[int] | np.ndarray) -> Pieces:
    """Returns the episodes `rows` of a batch, each whole."""
    numbers, first_branches = np.asarray(rows, dtype=np.int64), batch.first_branches
    return Pieces(first_branches[numbers], first_branches[numbers + 1])


def cut_episodes(batch: Batch, rows: Sequence[int] | np.ndarray, budget: int) -> Pieces:
    """Returns the episodes `rows` of a batch in pieces of at most `budget` tokens, or of one longer branch.

    An episode within the budget is one piece.
    """
    whole = take_episodes(batch, rows)
    if int(whole.count_tokens(batch).max(initial=0)) <= budget:
        return whole
    begins, ends = [], []
    for first, end in zip(whole.begins.tolist(), whole.ends.tolist(), strict=True):
        while first < end:
            # The last branch that ends within the budget, and one at least.
            last = np.searchsorted(batch.branch_offsets, batch.branch_offsets[first] + budget, "right") - 1
            begins.append(first)
            first = min(end, max(first + 1, int(last)))
            ends.append(first)
    return Pieces(np.array(begins), np.array(ends))


def find_divided(batch: Batch, rows: Sequence[int], budget: int) -> list[int]:
    """Returns those of the episodes `rows` that `cut_episodes` cuts into several pieces."""
    lengths, num_branches = np.diff(batch.offsets), np.diff(batch.first_branches)
    return [row for row in rows if lengths[row] > budget and num_branches[row] > 1]


def pack_rows(batch: Batch, rows: Sequence[int]) -> Packed:
    """Returns the episodes `rows` of a batch as one microbatch."""
    return pack_pieces(batch, take_episodes(batch, rows))


def pack_pieces(batch: Batch, pieces: Pieces) -> Packed:
    """Returns some pieces of a batch as one microbatch."""
    lengths = pieces.count_tokens(batch)
    branches = _chain_ranges(pieces.begins, pieces.ends - pieces.begins)
    branch_lengths = np.diff(batch.branch_offsets)[branches]
    cu_seqlens = np.concatenate([[0], np.cumsum(branch_lengths)])
    positions = _chain_ranges(np.zeros_like(branch_lengths), branch_lengths)
    index = torch.from_numpy(_chain_ranges(batch.branch_offsets[pieces.begins], lengths))
    sampled = batch.sampled[index]
    return Packed(
        tokens=batch.tokens[index].long(),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        max_seqlen=int(branch_lengths.max()),
        offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])),
        index=index,
        targets=(sampled & (torch.from_numpy(positions) > 0)).nonzero()[:, 0],
        num_sampled=int(sampled.sum()),
        behavior_logprobs=batch.behavior_logprobs[index],
        experts=None if batch.experts is None else batch.experts[index],
    )


def pad_packed(packed: Packed, multiple: int) -> Packed:
    """Returns the microbatch with one more branch, of zeros, where the number of tokens is not a multiple.

    It is for an engine's own forward pass only: `index`, `offsets` and all that refers to the batch stay
    without the padding.
    """
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
class PackingCost:
    """Cost of training a branch: a part by token, and attention by the square of its length.

    It is in FLOPs where the model's kind is known, else in tokens.
    """

    per_token: float = 1.0
    per_square: float = 0.0

    def of_lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Returns [B] float64 the costs of branches of these lengths [B]."""
        return self.per_token * lengths + self.per_square * np.square(lengths, dtype=np.float64)

    def of_pieces(self, batch: Batch, pieces: Pieces) -> np.ndarray:
        """Returns [n] float64 the cost of each piece: the sum over its branches."""
        costs = np.append(self.of_lengths(np.diff(batch.branch_offsets)), 0.0)
        # Every second sum is one between two pieces.
        return np.add.reduceat(costs, np.stack([pieces.begins, pieces.ends], 1).reshape(-1))[::2]


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """The division of pieces over shares and microbatches."""

    shares: list[list[list[int]]]
    """Pieces, ascending, by share and microbatch; equally many microbatches for each share, none empty"""
    fill: float
    """Tokens over what the microbatches may hold: above 1 where a branch is longer than that"""
    balance: float
    """Share of the time in which no rank waits: cost over (cost of each round's dearest microbatch ×
    shares)"""
    cost: float
    """Cost of all pieces"""
    tokens: np.ndarray
    """[microbatches of all shares] number of tokens"""

    def metrics(self, multiple: int = 1) -> dict[str, float]:
        """Returns the figures of the plan. The engine pads each microbatch to a multiple of `multiple`
        tokens."""
        return {
            "packing/microbatches": float(len(self.shares[0])),
            "packing/fill": self.fill,
            "packing/balance": self.balance,
            "packing/padding": float(1 - self.tokens.sum() / (-(-self.tokens // multiple) * multiple).sum()),
        }


def plan_packing(
    lengths: np.ndarray, budget: int, num_shares: int, costs: np.ndarray | None = None
) -> PackingPlan:
    """Divides pieces of these lengths [n] into microbatches of at most `budget` tokens, or one longer piece
    alone. `costs` [n]: by default their lengths.

    The dearest piece goes first, always to the cheapest microbatch so far that has room (Graham, 1969).
    Then the microbatches, sorted by cost, are dealt out to the shares in rounds, because in each round all
    shares wait for the dearest one. Where the shares do not divide the number of pieces, there may be too few
    to keep all of that: then, and only then, the budget gives way. Raises ValueError for fewer pieces than
    shares.
    """
    if len(lengths) < num_shares:
        raise ValueError(
            f"a minibatch must hold at least an episode a share, got {len(lengths)} for {num_shares} shares"
        )
    costs = lengths.astype(np.float64) if costs is None else costs
    most = len(lengths) // num_shares
    # A piece beyond the budget fills one microbatch, however long it is.
    per_share = min(most, -(-int(lengths.clip(max=budget).sum()) // (budget * num_shares)))
    while (bins := _fill_bins(lengths, costs, budget, per_share * num_shares, per_share == most)) is None:
        per_share += 1
    totals = np.array([costs[rows].sum() for rows in bins])
    rounds = np.argsort(-totals, kind="stable").reshape(per_share, num_shares)
    return PackingPlan(
        shares=[[sorted(bins[number]) for number in rounds[:, share]] for share in range(num_shares)],
        fill=float(lengths.sum() / (budget * len(bins))),
        balance=float(totals.sum() / (totals[rounds[:, 0]].sum() * num_shares)),
        cost=float(totals.sum()),
        tokens=np.array([lengths[rows].sum() for rows in bins]),
    )


def _fill_bins(
    lengths: np.ndarray, costs: np.ndarray, budget: int, num_bins: int, ignores_budget: bool
) -> list[list[int]] | None:
    """Returns the pieces in each bin; None where not all have room, unless the budget may be ignored."""
    spent, used = np.zeros(num_bins), np.zeros(num_bins, dtype=np.int64)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for row in np.argsort(-costs, kind="stable"):
        room = (used == 0) | (used + lengths[row] <= budget)
        if not (has_room := room.any()) and not ignores_budget:
            return None
        number = int(np.where(room, spent, np.inf).argmin() if has_room else spent.argmin())
        bins[number].append(int(row))
        spent[number] += costs[row]
        used[number] += lengths[row]
    return bins


def pack_share(
    batch: Batch,
    rows: Sequence[int],
    budget: int,
    num_shares: int,
    share: int,
    cost: PackingCost | None = None,
) -> list[Packed]:
    """Returns the microbatches of one share of the episodes `rows` of a batch."""
    return divide_rows(batch, rows, budget, num_shares, share, cost)[0]


def divide_rows(
    batch: Batch,
    rows: Sequence[int],
    budget: int,
    num_shares: int,
    share: int,
    cost: PackingCost | None = None,
) -> tuple[list[Packed], PackingPlan]:
    """Returns what `pack_share` returns, and the plan of all shares."""
    pieces = cut_episodes(batch, rows, budget)
    costs = (cost or PackingCost()).of_pieces(batch, pieces)
    plan = plan_packing(pieces.count_tokens(batch), budget, num_shares, costs)
    chosen = [Pieces(pieces.begins[local], pieces.ends[local]) for local in plan.shares[share]]
    return [pack_pieces(batch, some) for some in chosen], plan


def split_minibatches(batch: Batch, num_minibatches: int) -> list[list[int]]:
    """Returns the rows of each minibatch: the groups, in order, in equal contiguous parts."""
    parts = torch.unique(batch.groups).chunk(num_minibatches)
    return [torch.isin(batch.groups, part).nonzero()[:, 0].tolist() for part in parts]
