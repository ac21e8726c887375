"""Ranks that share the tokens of each microbatch (Ulysses, context parallelism): which tokens a rank has, and
what the ranks send each other."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """The tokens from `start` up to `end` of a padded microbatch, which one rank computes."""

    start: int
    end: int

    @classmethod
    def of_rank(cls, num_tokens: int, rank: int, num_ranks: int) -> "OwnTokens":
        """`num_tokens`: of the padded microbatch; the number of ranks divides it."""
        size = num_tokens // num_ranks
        return cls(rank * size, (rank + 1) * size)

    @property
    def slice(self) -> slice:
        return slice(self.start, self.end)

    def find_targets(self, targets: Tensor) -> Tensor:
        """Returns the places within `targets` [K] of those that this rank predicts.

        The output at token t - 1 predicts token t, so its targets lie one further than its tokens.
        """
        return ((targets > self.start) & (targets <= self.end)).nonzero()[:, 0]


class _AllToAll(torch.autograd.Function):
    """Each rank gives away all but its part of dimension `scatter`, and gets the other ranks' parts of
    dimension `gather`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scatter: int, gather: int, group: dist.ProcessGroup) -> Tensor:
        ctx.back = gather, scatter, group
        parts = torch.stack(x.chunk(group.size(), scatter))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        # Of a long sequence each of these is large, and no more than two need exist at the same time.
        del parts
        return torch.cat(received.unbind(), gather)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(grad, *ctx.back), None, None, None


def exchange_parts(x: Tensor, scatter: int, gather: int, group: dist.ProcessGroup) -> Tensor:
    """Returns `x` divided along dimension `scatter` over the group's ranks, and whole along `gather`."""
    exchanged: Tensor = _AllToAll.apply(x, scatter, gather, group)
    return exchanged


class _SumOverRanks(torch.autograd.Function):
    """All ranks go on with the same loss of the whole, so the gradient of a rank's own part is the whole's
    gradient, unsummed."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = mine.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def join_outputs(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums the ranks' outputs, each of which is zero but for the rank's own tokens. All ranks must go on with
    the same loss."""
    whole: Tensor = _SumOverRanks.apply(mine, group)
    return whole
