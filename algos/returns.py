"""Advantages along a sequence: returns, generalised advantage estimation, V-trace.

Sequences are packed: T tokens in all, `offsets` [N + 1] where each begins. Only sampled tokens are actions; what an environment
has written between them (a tool's answer, the next turn) is passed over, and what comes after counts as if it followed at once.
Loops run over positions within a sequence, all sequences at a time, from the last to the first.
"""

import torch
from torch import Tensor

from algos.ratios import clamped


def _actions(mask: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """([N, L] index of each sequence's j-th sampled token, [N, L] is there one)."""
    sequence = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=mask.device), offsets.diff())
    index = mask.nonzero()[:, 0]
    owner = sequence[index]
    counts = torch.bincount(owner, minlength=len(offsets) - 1)
    starts = counts.cumsum(0) - counts
    length = int(counts.max()) if len(counts) else 0
    place = starts[:, None] + torch.arange(length, device=mask.device)
    there = torch.arange(length, device=mask.device) < counts[:, None]
    return index[place.clamp(max=max(0, len(index) - 1))] if len(index) else place, there


def _spread(found: Tensor, index: Tensor, there: Tensor, like: Tensor) -> Tensor:
    """[T] what was found, at its tokens; 0 elsewhere."""
    out = torch.zeros(len(like), dtype=found.dtype, device=found.device)
    return out.index_copy(0, index[there], found[there]).to(like.dtype)


def discounted(rewards: Tensor, mask: Tensor, offsets: Tensor, gamma: float = 1.0) -> Tensor:
    """The return from each sampled token on: G_t = r_t + γ G_{t+1}. rewards [T] (0 where none is given), mask [T] -> [T]."""
    return gae(rewards, torch.zeros_like(rewards), mask, offsets, gamma, 1.0)[1]


def _targets(
    reward: Tensor, value: Tensor, there: Tensor, rho: Tensor, c: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """([N, L] targets v_t, [N, L] the target after each, 0 after the last), from the last action to the first:

    v_t = V_t + ρ_t (r_t + γ V_{t+1} − V_t) + γ c_t (v_{t+1} − V_{t+1})
    """
    targets, following = torch.zeros_like(value), torch.zeros_like(value)
    next_value = next_target = value.new_zeros(len(value))
    for step in reversed(range(value.shape[1])):
        here = there[:, step]
        delta = rho[:, step] * (reward[:, step] + gamma * next_value - value[:, step])
        target = value[:, step] + delta + gamma * c[:, step] * (next_target - next_value)
        targets[:, step], following[:, step] = target, next_target
        next_value = torch.where(here, value[:, step], next_value)
        next_target = torch.where(here, target, next_target)
    return targets, following


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, offsets: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., 2016).

    δ_t = r_t + γ V_{t+1} − V_t;  A_t = δ_t + γ λ A_{t+1};  the value after the last sampled token is 0. Returns (advantages, returns
    A + V), both [T], 0 where not sampled. `lam`: one number, or one a sequence [N] (`length_adaptive_lambda`).
    """
    index, there = _actions(mask, offsets)
    reward, value = (torch.where(there, column.double()[index], 0.0) for column in (rewards, values))
    lam = torch.as_tensor(lam, dtype=torch.float64, device=values.device).reshape(-1, 1)
    ones = torch.ones_like(value)
    targets, _ = _targets(reward, value, there, ones, ones * lam, gamma)
    return _spread(targets - value, index, there, values), _spread(targets, index, there, values)


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
    advantages, returns = (torch.where(mask, column[first][turn], 0.0) if len(total) else column for column in found)
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
    index, there = _actions(mask, offsets)
    reward, value = (torch.where(there, column.double()[index], 0.0) for column in (rewards, values))
    ratio = torch.where(there, clamped(log_ratio.double()[index]).exp(), 1.0)
    rho, c = ratio.clamp(max=rho_bar), lam * ratio.clamp(max=c_bar)
    targets, following = _targets(reward, value, there, rho, c, gamma)
    advantages = rho * (reward + gamma * following - value)
    return _spread(advantages, index, there, values), _spread(targets, index, there, values)
