"""Advantages: how much better a sample, or a token of it, is than was to be expected.

The functions above `Samples` are the equations; those below it compose them into what `algo.advantage` names.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from algos.returns import discounted, gae, length_adaptive_lambda, turn_gae, vtrace
from configs.advantages import Advantage, Span
from configs.algo import AlgoConfig


def _group_mean(values: Tensor, group: Tensor, size: Tensor) -> Tensor:
    return torch.zeros_like(size).index_add_(0, group, values)[group] / size[group]


def _enumerate(groups: Tensor) -> tuple[Tensor, Tensor]:
    """(index of each sample's group, size of each group as float)."""
    _, group, size = torch.unique(groups, return_inverse=True, return_counts=True)
    return group, size.double()


def grpo(rewards: Tensor, groups: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Group-normalised reward (GRPO; Shao et al., 2024).

    A_i = (R_i − mean(R)) / (std(R) + ε), over the group, std with n − 1 in the denominator.

    Shapes: rewards [N], groups [N] (equal numbers = same group) -> [N]. A group of one, or of equal rewards, gives 0.
    """
    group, size = _enumerate(groups)
    centred = rewards.double() - _group_mean(rewards.double(), group, size)
    variance = torch.zeros_like(size).index_add_(0, group, centred.square()) / (size - 1).clamp(min=1)
    return (centred / (variance.sqrt()[group] + epsilon)).float()


def dr_grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Centred reward (Dr. GRPO; Liu et al., 2025): A_i = R_i − mean(R). Shapes as `grpo`. A group of one gives 0."""
    group, size = _enumerate(groups)
    return (rewards.double() - _group_mean(rewards.double(), group, size)).float()


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Leave-one-out baseline (RLOO; Ahmadian et al., 2024).

    A_i = R_i − mean of the other rewards = (R_i − mean(R)) · n / (n − 1). Shapes as `grpo`. A group of one gives 0.
    """
    group, size = _enumerate(groups)
    centred = rewards.double() - _group_mean(rewards.double(), group, size)
    return (centred * (size / (size - 1).clamp(min=1))[group]).float()


def opmd(rewards: Tensor, groups: Tensor, tau: float) -> Tensor:
    """Online policy mirror descent (OPMD; Trinity-RFT, 2025): A_i = R_i − τ log mean e^(R / τ), over the group.

    Shapes as `grpo`. For a large τ the baseline is the mean, for a small one the best of the group. A group of one gives 0.
    """
    group, size = _enumerate(groups)
    scaled = rewards.double() / tau
    most = torch.full_like(size, float("-inf")).scatter_reduce(0, group, scaled, "amax")
    total = torch.zeros_like(size).index_add_(0, group, (scaled - most[group]).exp())
    return (rewards.double() - tau * (most + (total / size).log())[group]).float()


def remax(rewards: Tensor, greedy: Tensor) -> Tensor:
    """ReMax (Li et al., 2023): A_i = R_i − R of the greedy response to the same prompt. Shapes: [N], [N] -> [N]."""
    return rewards - greedy


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """[T] (A − mean) / std over the tokens of the mask, 0 elsewhere. Equal values, or an empty mask, give 0."""
    kept = torch.where(mask, values.double(), 0.0)
    count = mask.sum().clamp(min=1)
    centred = torch.where(mask, kept - kept.sum() / count, 0.0)
    std = (centred.square().sum() / count).sqrt()
    return torch.where(std > 1e-8, centred / std.clamp(min=1e-8), 0.0).float()


def reinforce_pp(returns: Tensor, mask: Tensor) -> Tensor:
    """REINFORCE++ (Hu et al., 2025): the return from each token on, whitened over all trained tokens of the batch. [T], [T] -> [T]."""
    return whitened(returns, mask)


def prime(
    rewards: Tensor, process: Tensor, groups: Tensor, mask: Tensor, offsets: Tensor, gamma: float = 1.0
) -> Tensor:
    """PRIME (Cui et al., 2025): leave-one-out outcome and process rewards, each against its own baseline.

    A_t = Σ_{s ≥ t} γ^(s − t) (r_s − mean over the other samples of their mean r) + R − mean of the other R.
    Shapes: rewards [N], process [T] the implicit rewards r of tokens, groups [N], mask [T], offsets [N + 1] -> [T].
    """
    sequence = torch.repeat_interleave(torch.arange(len(rewards), device=mask.device), offsets.diff())
    kept = torch.where(mask, process.double(), 0.0)
    counts = torch.zeros(len(rewards), dtype=torch.float64).index_add_(0, sequence, mask.double())
    means = torch.zeros_like(counts).index_add_(0, sequence, kept) / counts.clamp(min=1)
    group, size = _enumerate(groups)
    others = (_group_mean(means, group, size) * size[group] - means) / (size[group] - 1).clamp(min=1)
    returns = discounted(torch.where(mask, kept - others[sequence], 0.0), mask, offsets, gamma)
    return torch.where(mask, returns + rloo(rewards, groups).double()[sequence], 0.0).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """A step's batch as an advantage sees it: N sequences with T tokens in all, flat."""

    rewards: Tensor
    """[N] after shaping, the penalty for leaving the reference included"""
    token_rewards: Tensor
    """[T] the same by token: what is charged to a token itself, and at a sequence's last sampled token the rest"""
    groups: Tensor
    """[N]"""
    offsets: Tensor
    """[N + 1]"""
    sequence: Tensor
    """[T] index of each token's sequence"""
    sampled: Tensor
    """[T] bool: the actions"""
    mask: Tensor
    """[T] bool: those that are trained"""
    greedy: Tensor
    """[N] reward of the greedy response to the same prompt, clipped alike; NaN where none was made"""
    values: Tensor | None = None
    """[T] of the critic, before each token"""
    log_ratio: Tensor | None = None
    """[T] log π_p − log μ"""
    process_rewards: Tensor | None = None
    """[T] of the implicit reward model"""


Function = Callable[[Samples, AlgoConfig], Tensor]
ADVANTAGES: dict[Advantage, Function] = {
    Advantage.grpo: lambda s, algo: grpo(s.rewards, s.groups)[s.sequence],
    Advantage.dr_grpo: lambda s, algo: dr_grpo(s.rewards, s.groups)[s.sequence],
    Advantage.rloo: lambda s, algo: rloo(s.rewards, s.groups)[s.sequence],
    Advantage.opmd: lambda s, algo: opmd(s.rewards, s.groups, algo.opmd.tau)[s.sequence],
    Advantage.remax: lambda s, algo: remax(s.rewards, s.greedy)[s.sequence],
    Advantage.reinforce_pp: lambda s, algo: reinforce_pp(
        discounted(s.token_rewards, s.sampled, s.offsets), s.mask
    ),
    Advantage.reinforce_pp_baseline: lambda s, algo: reinforce_pp(
        dr_grpo(s.rewards, s.groups)[s.sequence], s.mask
    ),
    Advantage.prime: lambda s, algo: whitened(_prime(s, algo), s.mask),
    Advantage.gae: lambda s, algo: _gae_advantages(s, algo),
    Advantage.vtrace: lambda s, algo: _vtrace(s, algo)[0],
}
"""[T] by name."""


def value_targets(samples: Samples, algo: AlgoConfig) -> Tensor:
    """[T] what the critic learns: the returns of `gae` with λ = `critic_lam`, or V-trace's targets."""
    if algo.advantage.corrects_itself:
        return _vtrace(samples, algo)[1]
    return _gae(samples, algo, algo.gae.critic_lam)[1]


def _gae(s: Samples, algo: AlgoConfig, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    function = turn_gae if algo.gae.span is Span.turn else gae
    return function(s.token_rewards, _given(s.values), s.sampled, s.offsets, algo.gae.gamma, lam)


def _gae_advantages(s: Samples, algo: AlgoConfig) -> Tensor:
    advantages = _gae(s, algo, _lam(s, algo))[0]
    return whitened(advantages, s.mask) if algo.gae.whiten else advantages


def _prime(s: Samples, algo: AlgoConfig) -> Tensor:
    return prime(s.rewards, _given(s.process_rewards), s.groups, s.sampled, s.offsets, algo.prime.gamma)


def _lam(s: Samples, algo: AlgoConfig) -> float | Tensor:
    if algo.gae.length_alpha is None:
        return algo.gae.lam
    lengths = torch.zeros(len(s.rewards)).index_add_(0, s.sequence, s.sampled.float())
    return length_adaptive_lambda(lengths, algo.gae.length_alpha)


def _vtrace(s: Samples, algo: AlgoConfig) -> tuple[Tensor, Tensor]:
    v = algo.vtrace
    return vtrace(
        s.token_rewards,
        _given(s.values),
        _given(s.log_ratio),
        s.sampled,
        s.offsets,
        v.gamma,
        v.lam,
        v.rho_bar,
        v.c_bar,
    )


def _given(column: Tensor | None) -> Tensor:
    assert column is not None, "this advantage needs a model that was not asked"
    return column
