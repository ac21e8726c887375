"""Advantages from the rewards of samples: how much better one is than others, of its prompt or of the batch."""

from collections.abc import Callable

import torch
from torch import Tensor

from configs.schema import Advantage


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


def reinforce_pp(rewards: Tensor, lengths: Tensor) -> Tensor:
    """REINFORCE++ (Hu et al., 2025) for a reward at the end: A = (R − mean) / std over all trained tokens of the batch.

    Each token counts once, so a sample weighs as much as it is long. Shapes: rewards [N], lengths [N] in trained tokens -> [N].
    Equal rewards, or nothing trained, give 0.
    """
    weights = lengths.double() / lengths.sum().clamp(min=1)
    centred = rewards.double() - (weights * rewards.double()).sum()
    std = (weights * centred.square()).sum().sqrt()
    return torch.where(std > 1e-8, centred / std.clamp(min=1e-8), 0.0).float()


def reinforce_pp_baseline(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """REINFORCE++ with baseline: the same of the rewards less their group's mean. Shapes as `grpo` and `reinforce_pp`."""
    return reinforce_pp(dr_grpo(rewards, groups), lengths)


ADVANTAGES: dict[Advantage, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    Advantage.grpo: lambda rewards, groups, lengths: grpo(rewards, groups),
    Advantage.dr_grpo: lambda rewards, groups, lengths: dr_grpo(rewards, groups),
    Advantage.rloo: lambda rewards, groups, lengths: rloo(rewards, groups),
    Advantage.reinforce_pp: lambda rewards, groups, lengths: reinforce_pp(rewards, lengths),
    Advantage.reinforce_pp_baseline: reinforce_pp_baseline,
}
"""(rewards [N], groups [N], trained tokens [N]) -> [N], by name."""
