"""Rewards before they become advantages: shaped, filtered, resampled."""

import torch
from torch import Tensor


def soft_overlong_penalty(lengths: Tensor, max_tokens: int, cache: float) -> Tensor:
    """DAPO's soft overlong punishment (Yu et al., 2025): 0 up to max_tokens − cache, then falling linearly to −1 at max_tokens.

    lengths [N], in sampled tokens -> [N], to be added to the rewards.
    """
    return (-(lengths - (max_tokens - cache)) / cache).clamp(min=-1.0, max=0.0)


def with_kl(rewards: Tensor, kl: Tensor, coefficient: float, mask: Tensor, last: Tensor) -> Tensor:
    """[T] rewards of tokens: −β KL_t for each sampled one, and the sequence's reward at its last (Ziegler et al., 2019).

    rewards [N]; kl [T] an estimate of KL(π ‖ π_ref) at each token (`algos.kl`); last [N] index of each sequence's last sampled token.
    """
    shaped = torch.where(mask, -coefficient * kl, 0.0)
    return shaped.index_add(0, last, rewards.to(shaped.dtype))


def normalised(rewards: Tensor, clip: float | None = None) -> Tensor:
    """[N] (R − mean) / std over the batch, within ± `clip`. Equal rewards give 0."""
    centred = rewards.double() - rewards.double().mean()
    std = centred.square().mean().sqrt()
    scaled = torch.where(std > 0, centred / std.clamp(min=1e-12), 0.0).to(rewards.dtype)
    return scaled if clip is None else scaled.clamp(-clip, clip)


def filtered(scores: Tensor, power: float, generator: torch.Generator) -> Tensor:
    """PF-PPO (Shen et al., 2024): N draws with replacement, in proportion to |score|^power + 1e-8. [N] how often each came."""
    weights = scores.abs().double().pow(power) + 1e-8
    drawn = torch.multinomial(weights, len(scores), replacement=True, generator=generator)
    return torch.bincount(drawn, minlength=len(scores)).float()
