"""Surrogate objectives: the loss of a token as a function of the current policy, before weighting and aggregation."""

import torch
from torch import Tensor

from algos.corrections import clamped


def ppo_clip(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> Tensor:
    """Clipped surrogate (PPO; Schulman et al., 2017), with asymmetric clip (DAPO) and dual clip (Ye et al., 2020).

    r = π_θ / π_p;  L = max(−A r, −A clip(r, 1 − ε_low, 1 + ε_high));  where A < 0: L = min(L, −A c).

    Shapes: all [T] -> [T]. No denominator: see `algos.aggregation`.
    """
    ratio = clamped(logprobs - proximal_logprobs).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
