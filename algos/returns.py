"""Advantages along a sequence: returns, generalised advantage estimation, V-trace.

Sequences are packed: T tokens in all, `offsets` [N + 1] where each begins. Only sampled tokens are actions; what an environment
has written between them (a tool's answer, the next turn) is passed over, and what comes after counts as if it followed at once.
Loops run over positions within a sequence, all sequences at a time, from the last to the first.
"""

import torch
from torch import Tensor


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


def _spread(values: Tensor, index: Tensor, there: Tensor, num_tokens: int) -> Tensor:
    """[T] the values at their tokens, 0 elsewhere."""
    out = torch.zeros(num_tokens, dtype=values.dtype, device=values.device)
    return out.index_copy(0, index[there], values[there])


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
    index, there = _actions(mask, offsets)
    reward, value = (torch.where(there, column.double()[index], 0.0) for column in (rewards, values))
    lam = torch.as_tensor(lam, dtype=torch.float64, device=values.device)
    following, carried = torch.zeros_like(value[:, 0]) if value.shape[1] else value.sum(1), value.new_zeros(len(value))
    advantages = torch.zeros_like(value)
    for step in reversed(range(value.shape[1])):
        delta = reward[:, step] + gamma * following - value[:, step]
        found = delta + gamma * lam * carried
        here = there[:, step]
        advantages[:, step] = torch.where(here, found, 0.0)
        following, carried = torch.where(here, value[:, step], following), torch.where(here, found, carried)
    spread = _spread(advantages, index, there, len(values))
    return spread.to(values.dtype), torch.where(mask, spread + values.double(), 0.0).to(values.dtype)


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
    ratio = torch.where(there, log_ratio.double()[index].clamp(-20, 20).exp(), 1.0)
    rho, c = ratio.clamp(max=rho_bar), lam * ratio.clamp(max=c_bar)
    advantages, targets = torch.zeros_like(value), torch.zeros_like(value)
    next_value = next_target = value.new_zeros(len(value))
    for step in reversed(range(value.shape[1])):
        here = there[:, step]
        delta = rho[:, step] * (reward[:, step] + gamma * next_value - value[:, step])
        target = value[:, step] + delta + gamma * c[:, step] * (next_target - next_value)
        advantages[:, step] = torch.where(
            here, rho[:, step] * (reward[:, step] + gamma * next_target - value[:, step]), 0.0
        )
        targets[:, step] = torch.where(here, target, 0.0)
        next_value = torch.where(here, value[:, step], next_value)
        next_target = torch.where(here, target, next_target)
    return tuple(_spread(found, index, there, len(values)).to(values.dtype) for found in (advantages, targets))
