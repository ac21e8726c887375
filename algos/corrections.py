"""Off-policy corrections: the weight of each token for having been sampled by another policy than the one that learns.

All are functions of log_ratio = proximal_logprobs − behavior_logprobs, [T], and are constants to the gradient.
"""

import torch
from torch import Tensor

from configs.schema import Correction

MAX_LOG_RATIO = 20.0


def clamped(log_ratio: Tensor) -> Tensor:
    """Within ± 20, so that an exponential stays finite; ±inf included, NaN stays."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def token_tis(log_ratio: Tensor, cap: float) -> Tensor:
    """Truncated importance sampling, by token (Munos et al., 2016; Yao et al., 2025): w_t = min(π_p / μ, cap). [T]"""
    return clamped(log_ratio).exp().clamp(max=cap)


def icepop(log_ratio: Tensor, floor: float, cap: float) -> Tensor:
    """IcePop (Ling team, 2025): w_t = π_p / μ where floor ≤ π_p / μ ≤ cap, else 0: the token is dropped. [T]"""
    weight = clamped(log_ratio).exp()
    return torch.where((weight >= floor) & (weight <= cap), weight, 0.0)


def correction_weights(kind: Correction, log_ratio: Tensor, floor: float, cap: float) -> Tensor:
    """[T] weights, detached."""
    log_ratio = log_ratio.detach()
    match kind:
        case Correction.none:
            return torch.ones_like(log_ratio)
        case Correction.token_tis:
            return token_tis(log_ratio, cap)
        case Correction.icepop:
            return icepop(log_ratio, floor, cap)
