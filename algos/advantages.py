"""Advantages from the rewards of a group: how much better a sample is than others of its prompt."""

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


ADVANTAGES: dict[Advantage, Callable[[Tensor, Tensor], Tensor]] = {
    Advantage.grpo: grpo,
    Advantage.dr_grpo: dr_grpo,
    Advantage.rloo: rloo,
}
