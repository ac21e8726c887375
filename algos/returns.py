"""Advantages along a sequence: returns, generalised advantage estimation, V-trace.

Sequences are packed: T tokens in all, `offsets` [N + 1] where each begins. Only sampled tokens are actions; what an environment
has written between them (a tool's answer, the next turn) is passed over, and what comes after counts as if it followed at once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from algos.ratios import clamped

LARGEST = 1e100
"""Of a product of trace coefficients, and of a target, so that both stay finite where coefficients are above 1."""


@dataclass(frozen=True, slots=True)
class Actions:
    """The sampled tokens alone, n of them, sequence after sequence."""

    index: Tensor
    """[n] where each stands"""
    owner: Tensor
    """[n] its sequence"""
    last: Tensor
    """[n] bool: the last of its sequence"""
    longest: int
    """Actions of the longest sequence"""

    @classmethod
    def of(cls, mask: Tensor, offsets: Tensor) -> "Actions":
        sequence = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=mask.device), offsets.diff())
        index = mask.nonzero()[:, 0]
        owner = sequence[index]
        last = torch.ones_like(index, dtype=torch.bool)
        last[:-1] = owner[1:] != owner[:-1]
        return cls(index, owner, last, int(torch.bincount(owner).max()) if len(owner) else 0)

    def take(self, column: Tensor) -> Tensor:
        """[n] in float64"""
        return column[self.index].double()

    def next(self, column: Tensor) -> Tensor:
        """[n] what stands at the action after each; 0 after the last."""
        return torch.where(self.last, 0.0, column.roll(-1))

    def spread(self, found: Tensor, like: Tensor) -> Tensor:
        """[T] what was found, at its tokens; 0 elsewhere."""
        return torch.zeros_like(like).index_copy(0, self.index, found.to(like.dtype))


def _targets(actions: Actions, reward: Tensor, value: Tensor, rho: Tensor, c: Tensor, gamma: float) -> Tensor:
    """[n] v_t = V_t + x_t,  x_t = δ_t + γ c_t x_{t+1},  δ_t = ρ_t (r_t + γ V_{t+1} − V_t).

    The recurrence is solved for all actions at once: after k rounds x holds the terms of the next 2^k actions.
    """
    x = rho * (reward + gamma * actions.next(value) - value)
    a = torch.where(actions.last, 0.0, gamma * c)
    step = 1
    while step < actions.longest:
        linked = a[:-step] != 0  # asked for, because 0 × NaN would leave its own sequence
        x[:-step] = (x[:-step] + torch.where(linked, a[:-step] * x[step:], 0.0)).clamp(-LARGEST, LARGEST)
        a[:-step] = torch.where(linked, a[:-step] * a[step:], 0.0).clamp(max=LARGEST)
        a[-step:] = 0.0
        step *= 2
    return value + x


def discounted(rewards: Tensor, mask: Tensor, offsets: Tensor, gamma: float = 1.0) -> Tensor:
    """The return from each sampled token on: G_t = r_t + γ G_{t+1}. rewards [T] (0 where none is given), mask [T] -> [T]."""
    return gae(rewards, torch.zeros_like(rewards), mask, offsets, gamma, 1.0)[1]


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, offsets: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., 2016).

    δ_t = r_t + γ V_{t+1} − V_t;  A_t = δ_t + γ λ A_{t+1};  the value after the last sampled token is 0. Returns (advantages, returns
    A + V), both [T], 0 where not sampled. `lam`: one number, or one a sequence [N] (`length_adaptive_lambda`).
    """
    actions = Actions.of(mask, offsets)
    value = actions.take(values)
    lam = torch.as_tensor(lam, dtype=torch.float64, device=values.device)
    c = lam[actions.owner] if lam.ndim else lam.expand_as(value)
    targets = _targets(actions, actions.take(rewards), value, torch.ones_like(value), c, gamma)
    return actions.spread(targets - value, values), actions.spread(targets, values)


def turns(mask: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """([T] number of the turn that each sampled token belongs to, [T] is it its turn's first). A turn is what a sequence has sampled
    without a break; numbers count up from 0 over all sequences and mean nothing where not sampled."""
    before = torch.cat([mask.new_zeros(1), mask[:-1]])
    before[offsets[:-1][offsets[:-1] < len(mask)]] = False
    first = mask & ~before
    return (first.cumsum(0) - 1).clamp(min=0), first


def turn_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, offsets: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """GAE whose actions are turns: the reward of a turn is the sum of its tokens', its value that of its first token, and all its tokens
    have its advantage and its return. Arguments and results as `gae`."""
    turn, first = turns(mask, offsets)
    total = torch.zeros(int(first.sum()), dtype=torch.float64, device=mask.device)
    total = total.index_add(0, turn[mask], rewards[mask].double())
    summed = torch.zeros_like(values, dtype=torch.float64).masked_scatter(first, total)
    found = gae(summed, values.double(), first, offsets, gamma, lam)
    advantages, returns = (
        torch.where(mask, column[first][turn], 0.0) if len(total) else column for column in found
    )
    return advantages.to(values.dtype), returns.to(values.dtype)


def length_adaptive_lambda(lengths: Tensor, alpha: float = 0.05) -> Tensor:
    """λ = 1 − 1 / (α · length), by sequence [N] (VAPO; Yue et al., 2025): a reward at the end reaches the first token of a long
    sequence too. Within [0, 1]."""
    return (1 - 1 / (alpha * lengths.double().clamp(min=1))).clamp(0, 1)


def vtrace(
    rewards: Tensor,
    values: Tensor,
    log_ratio: Tensor,
    mask: Tensor,
    offsets: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """V-trace (Espeholt et al., 2018), log_ratio = log π − log μ.

    ρ_t = min(ρ̄, π/μ), c_t = λ min(c̄, π/μ);  δ_t = ρ_t (r_t + γ V_{t+1} − V_t);  v_t = V_t + δ_t + γ c_t (v_{t+1} − V_{t+1}).
    Returns (advantages ρ_t (r_t + γ v_{t+1} − V_t), targets v_t), both [T], 0 where not sampled.
    """
    actions = Actions.of(mask, offsets)
    reward, value = actions.take(rewards), actions.take(values)
    ratio = clamped(actions.take(log_ratio)).exp()
    rho, c = ratio.clamp(max=rho_bar), lam * ratio.clamp(max=c_bar)
    targets = _targets(actions, reward, value, rho, c, gamma)
    advantages = rho * (reward + gamma * actions.next(targets) - value)
    return actions.spread(advantages, values), actions.spread(targets, values)
