"""Advantages: how much better a sample, or one of its tokens, is than was to be expected.

The functions above `AdvantageInputs` are the equations. Those below it compose the equations into the choices
of `algo.advantage`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from algos.returns import discount_returns, gae, length_adaptive_lambda, turn_gae, vtrace
from configs.advantages import Advantage, Span
from configs.algo import AlgoConfig


def _number_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the index [N] of each sample's group, from 0, and the size of each group in float64."""
    _, group, size = torch.unique(groups, return_inverse=True, return_counts=True)
    return group, size.double()


def _average_by_group(values: Tensor, group: Tensor, size: Tensor) -> Tensor:
    """Returns at each sample the mean over its group: values [N], group [N], size [groups] -> [N]."""
    return torch.zeros_like(size).index_add_(0, group, values)[group] / size[group]


def grpo_advantages(rewards: Tensor, groups: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Reward normalized within its group (GRPO; Shao et al., 2024, arXiv 2402.03300).

    A_i = (R_i − mean(R)) / (std(R) + ε) over the group; std has n − 1 in the denominator.

    Shapes: rewards [N], groups [N] (equal numbers = same group) -> [N]. A group of one, or of equal rewards,
    gives 0.
    """
    group, size = _number_groups(groups)
    centered = rewards.double() - _average_by_group(rewards.double(), group, size)
    squares = torch.zeros_like(size).index_add_(0, group, centered.square())
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    return (centered / (std[group] + epsilon)).float()


def dr_grpo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Centered reward (Dr. GRPO; Liu et al., 2025, arXiv 2503.20783): A_i = R_i − mean(R) over the group.

    Shapes as `grpo_advantages`. A group of one gives 0.
    """
    group, size = _number_groups(groups)
    return (rewards.double() - _average_by_group(rewards.double(), group, size)).float()


def rloo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Leave-one-out baseline (RLOO; Ahmadian et al., 2024, arXiv 2402.14740).

    A_i = R_i − mean of the other rewards of the group = (R_i − mean(R)) · n / (n − 1).

    Shapes as `grpo_advantages`. A group of one gives 0.
    """
    group, size = _number_groups(groups)
    centered = rewards.double() - _average_by_group(rewards.double(), group, size)
    return (centered * (size / (size - 1).clamp(min=1))[group]).float()


def opmd_advantages(rewards: Tensor, groups: Tensor, tau: float) -> Tensor:
    """Soft baseline (OPMD; Trinity-RFT, 2025, arXiv 2505.17826).

    A_i = R_i − τ log mean e^(R / τ) over the group. For a large τ the baseline is the mean of the group, for
    a small one its best.

    Shapes as `grpo_advantages`. A group of one gives 0.
    """
    group, size = _number_groups(groups)
    scaled = rewards.double() / tau
    # The largest exponent is taken out of the sum, so that none overflows.
    largest = torch.full_like(size, float("-inf")).scatter_reduce(0, group, scaled, "amax")
    total = torch.zeros_like(size).index_add_(0, group, (scaled - largest[group]).exp())
    return (rewards.double() - tau * (largest + (total / size).log())[group]).float()


def remax_advantages(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """Greedy baseline (ReMax; Li et al., 2023, arXiv 2310.10505).

    A_i = R_i − R of the greedy response to the same prompt. Shapes: [N], [N] -> [N].
    """
    return rewards - greedy_rewards


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(A − mean) / std over the tokens of the mask, 0 elsewhere. Equal values, or an empty mask, give 0.

    Shapes: values [T], mask [T] bool -> [T].
    """
    kept = torch.where(mask, values.double(), 0.0)
    count = mask.sum().clamp(min=1)
    centered = torch.where(mask, kept - kept.sum() / count, 0.0)
    std = (centered.square().sum() / count).sqrt()
    return torch.where(std > 1e-8, centered / std.clamp(min=1e-8), 0.0).float()


def reinforce_pp_advantages(returns: Tensor, mask: Tensor) -> Tensor:
    """Return from each token on, whitened over the trained tokens (REINFORCE++; Hu et al., 2025).

    Source: arXiv 2501.03262. The tokens are those of the whole batch. Shapes: returns [T], mask [T] bool ->
    [T].
    """
    return whiten(returns, mask)


def prime_advantages(
    rewards: Tensor,
    process_rewards: Tensor,
    groups: Tensor,
    sampled: Tensor,
    offsets: Tensor,
    gamma: float = 1.0,
    turns: Tensor | None = None,
) -> Tensor:
    """Outcome and process rewards, each less a leave-one-out baseline (PRIME; Cui et al., 2025).

    Source: arXiv 2502.01456.
    A_t = Σ_{s ≥ t} γ^(s − t) (r_s − mean over the other samples of their mean r) + R − mean of the other R.

    Shapes: rewards R [N], process_rewards r [T] (implicit rewards of tokens), groups [N], sampled [T] bool,
    offsets [N + 1], turns [T] (as in `algos.returns`) -> [T].
    """
    sequence = torch.repeat_interleave(torch.arange(len(rewards), device=sampled.device), offsets.diff())
    kept = torch.where(sampled, process_rewards.double(), 0.0)
    counts = torch.zeros(len(rewards), dtype=torch.float64).index_add_(0, sequence, sampled.double())
    means = torch.zeros_like(counts).index_add_(0, sequence, kept) / counts.clamp(min=1)
    group, size = _number_groups(groups)
    sum_of_others = _average_by_group(means, group, size) * size[group] - means
    baseline = sum_of_others / (size[group] - 1).clamp(min=1)
    centered = torch.where(sampled, kept - baseline[sequence], 0.0)
    returns = discount_returns(centered, sampled, offsets, gamma, turns)
    outcomes = rloo_advantages(rewards, groups).double()[sequence]
    return torch.where(sampled, returns + outcomes, 0.0).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """A step's batch as an advantage sees it: N episodes with T tokens in all, flat. A sample is an
    episode."""

    rewards: Tensor
    """[N] rewards after shaping, the penalty for leaving the reference included"""
    token_rewards: Tensor
    """[T] the same by token: each token's own charge, what was paid at it, and the rest at an episode's last
    sampled token"""
    groups: Tensor
    """[N] group numbers"""
    offsets: Tensor
    """[N + 1] int64: episode i is tokens offsets[i] : offsets[i + 1]"""
    sequence: Tensor
    """[T] int64: index of each token's episode"""
    sampled: Tensor
    """[T] bool: the tokens that the engine sampled, which are the actions"""
    mask: Tensor
    """[T] bool: the tokens that are trained"""
    greedy_rewards: Tensor
    """[N] reward of the greedy response to the same prompt, clipped like the rewards; NaN where none was
    made"""
    values: Tensor | None = None
    """[T] the critic's value before each token; None without a critic"""
    log_ratio: Tensor | None = None
    """[T] log π_p − log μ; None where π_p is not known before the first update"""
    process_rewards: Tensor | None = None
    """[T] rewards of the implicit reward model; None without one"""
    turns: Tensor | None = None
    """[T] number of each sampled token's turn within its episode; None: tokens count by place, and a run of
    sampled ones is a turn"""


def _spread_samples(inputs: AdvantageInputs, advantages: Tensor) -> Tensor:
    """Returns at each token [T] the advantage [N] of its sample."""
    return advantages[inputs.sequence]


def _compose_reinforce_pp(inputs: AdvantageInputs, algo: AlgoConfig) -> Tensor:
    returns = discount_returns(inputs.token_rewards, inputs.sampled, inputs.offsets, turns=inputs.turns)
    return reinforce_pp_advantages(returns, inputs.mask)


def _compose_reinforce_pp_baseline(inputs: AdvantageInputs, algo: AlgoConfig) -> Tensor:
    centered = _spread_samples(inputs, dr_grpo_advantages(inputs.rewards, inputs.groups))
    return reinforce_pp_advantages(centered, inputs.mask)


def _compose_prime(inputs: AdvantageInputs, algo: AlgoConfig) -> Tensor:
    advantages = prime_advantages(
        inputs.rewards,
        _require_column(inputs.process_rewards),
        inputs.groups,
        inputs.sampled,
        inputs.offsets,
        algo.prime.gamma,
        inputs.turns,
    )
    return whiten(advantages, inputs.mask)


def _compose_gae(inputs: AdvantageInputs, algo: AlgoConfig) -> Tensor:
    lam: float | Tensor = algo.gae.lam
    if algo.gae.length_alpha is not None:
        lengths = torch.zeros(len(inputs.rewards)).index_add_(0, inputs.sequence, inputs.sampled.float())
        lam = length_adaptive_lambda(lengths, algo.gae.length_alpha)
    advantages = _estimate_gae(inputs, algo, lam)[0]
    return whiten(advantages, inputs.mask) if algo.gae.whiten else advantages


ADVANTAGES: dict[Advantage, Callable[[AdvantageInputs, AlgoConfig], Tensor]] = {
    Advantage.grpo: lambda s, algo: _spread_samples(s, grpo_advantages(s.rewards, s.groups)),
    Advantage.dr_grpo: lambda s, algo: _spread_samples(s, dr_grpo_advantages(s.rewards, s.groups)),
    Advantage.rloo: lambda s, algo: _spread_samples(s, rloo_advantages(s.rewards, s.groups)),
    Advantage.opmd: lambda s, algo: _spread_samples(s, opmd_advantages(s.rewards, s.groups, algo.opmd.tau)),
    Advantage.remax: lambda s, algo: _spread_samples(s, remax_advantages(s.rewards, s.greedy_rewards)),
    Advantage.reinforce_pp: _compose_reinforce_pp,
    Advantage.reinforce_pp_baseline: _compose_reinforce_pp_baseline,
    Advantage.prime: _compose_prime,
    Advantage.gae: _compose_gae,
    Advantage.vtrace: lambda s, algo: _estimate_vtrace(s, algo)[0],
}
"""Advantages [T] of each choice of `algo.advantage`. They are used where tokens are trained only."""


def compute_value_targets(inputs: AdvantageInputs, algo: AlgoConfig) -> Tensor:
    """Returns [T] the critic's targets: the returns of `gae` with λ = `critic_lam`, or V-trace's targets."""
    if algo.advantage is Advantage.vtrace:
        return _estimate_vtrace(inputs, algo)[1]
    return _estimate_gae(inputs, algo, algo.gae.critic_lam)[1]


def _estimate_gae(inputs: AdvantageInputs, algo: AlgoConfig, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    estimate = turn_gae if algo.gae.span is Span.turn else gae
    return estimate(
        inputs.token_rewards,
        _require_column(inputs.values),
        inputs.sampled,
        inputs.offsets,
        algo.gae.gamma,
        lam,
        inputs.turns,
    )


def _estimate_vtrace(inputs: AdvantageInputs, algo: AlgoConfig) -> tuple[Tensor, Tensor]:
    return vtrace(
        inputs.token_rewards,
        _require_column(inputs.values),
        _require_column(inputs.log_ratio),
        inputs.sampled,
        inputs.offsets,
        algo.vtrace.gamma,
        algo.vtrace.lam,
        algo.vtrace.rho_bar,
        algo.vtrace.c_bar,
        inputs.turns,
    )


def _require_column(column: Tensor | None) -> Tensor:
    assert column is not None, "this advantage needs a model that was not asked"
    return column
