"""Off-policy corrections: the weight of each token for having been sampled by another policy than the one that learns.

All are functions of log_ratio = log π − log μ [T] and are constants to the gradient; a weight of 0 drops the token. Those of a
sequence give each of its tokens the sequence's weight; `mask` [T] says which tokens are trained, `sequence` [T] whose they are.
Log-ratios are taken within ±20, so ±inf gives a finite weight.
"""

import torch
from torch import Tensor

from configs.schema import Correction

MAX_LOG_RATIO = 20.0


def clamped(log_ratio: Tensor) -> Tensor:
    """Within ± 20, so that an exponential stays finite; ±inf included, NaN stays."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_sum(values: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    """[T] the sum over the trained tokens of each token's sequence."""
    count = int(sequence.max()) + 1 if len(sequence) else 0
    totals = torch.zeros(count, dtype=values.dtype, device=values.device)
    return totals.index_add(0, sequence, torch.where(mask, values, 0.0))[sequence]


def sequence_mean(values: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    """[T] the mean over the trained tokens of each token's sequence; 0 where it has none."""
    counts = sequence_sum(torch.ones_like(values), mask, sequence)
    return sequence_sum(values, mask, sequence) / counts.clamp(min=1)


def token_tis(log_ratio: Tensor, cap: float) -> Tensor:
    """Truncated importance sampling, by token (Munos et al., 2016; Yao et al., 2025): w_t = min(π_p / μ, cap). [T]"""
    return clamped(log_ratio).exp().clamp(max=cap)


def icepop(log_ratio: Tensor, floor: float, cap: float) -> Tensor:
    """IcePop (Ling team, 2025): w_t = π_p / μ where floor ≤ π_p / μ ≤ cap, else 0: the token is dropped. [T]"""
    weight = clamped(log_ratio).exp()
    return torch.where((weight >= floor) & (weight <= cap), weight, 0.0)


def sequence_tis(log_ratio: Tensor, mask: Tensor, sequence: Tensor, cap: float) -> Tensor:
    """Truncated importance sampling, by sequence: w_i = min(Π_t π / μ, cap). Unbiased before it is truncated. [T]"""
    return clamped(sequence_sum(clamped(log_ratio), mask, sequence)).exp().clamp(max=cap)


def sequence_mask(log_ratio: Tensor, mask: Tensor, sequence: Tensor, floor: float, cap: float) -> Tensor:
    """Drops the sequences whose Π_t π / μ is outside floor .. cap; the others weigh 1. [T]"""
    return _within(clamped(sequence_sum(clamped(log_ratio), mask, sequence)).exp(), floor, cap)


def geometric_mask(log_ratio: Tensor, mask: Tensor, sequence: Tensor, floor: float, cap: float) -> Tensor:
    """Drops the sequences whose geometric mean of π / μ is outside floor .. cap; the others weigh 1. [T]"""
    return _within(sequence_mean(clamped(log_ratio), mask, sequence).exp(), floor, cap)


def rejection(
    log_ratio: Tensor, mask: Tensor, sequence: Tensor, estimator: str, level: str, threshold: float
) -> Tensor:
    """Drops where an estimate of KL(μ ‖ π) is above the threshold; the others weigh 1. [T]

    `estimator`: k1 −ℓ, k2 ½ ℓ², k3 e^ℓ − 1 − ℓ, with ℓ = log π − log μ of a token. `level`: token, or the sum, mean or max over the
    sequence (sequence_sum, sequence_mean, sequence_max).
    """
    ell = clamped(log_ratio)
    estimate = {"k1": -ell, "k2": 0.5 * ell.square(), "k3": ell.exp() - 1 - ell}[estimator]
    match level:
        case "sequence_sum":
            estimate = sequence_sum(estimate, mask, sequence)
        case "sequence_mean":
            estimate = sequence_mean(estimate, mask, sequence)
        case "sequence_max":
            count = int(sequence.max()) + 1 if len(sequence) else 0
            lowest = torch.full((count,), float("-inf"), dtype=ell.dtype, device=ell.device)
            shown = torch.where(mask, estimate, float("-inf"))
            estimate = lowest.scatter_reduce(0, sequence, shown, "amax")[sequence]
        case "token":
            pass
        case _:
            raise ValueError(f"level must be token, sequence_sum, sequence_mean or sequence_max, got {level!r}")
    return (estimate <= threshold).to(log_ratio.dtype)


def normalised(weights: Tensor, mask: Tensor) -> Tensor:
    """Weights of a whole minibatch divided by their mean over the trained tokens, after truncation; unchanged where that is 0. [T]"""
    mean = torch.where(mask, weights, 0.0).sum() / mask.sum().clamp(min=1)
    return torch.where(mean > 0, weights / mean, weights)


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    """(Σ w)² / (n Σ w²) over the trained tokens: the share of them that would tell as much if none were off-policy (Kong, 1992).
    1 where all weights are alike, 0 where nothing is left."""
    kept = torch.where(mask, weights.double(), 0.0)
    squares = kept.square().sum()
    return torch.where(squares > 0, kept.sum().square() / (mask.sum().clamp(min=1) * squares), 0.0)


def _within(ratio: Tensor, floor: float, cap: float) -> Tensor:
    return ((ratio >= floor) & (ratio <= cap)).to(ratio.dtype)


def correction_weights(
    kind: Correction, log_ratio: Tensor, mask: Tensor, sequence: Tensor, floor: float, cap: float
) -> Tensor:
    """[T] weights, detached."""
    log_ratio = log_ratio.detach()
    match kind:
        case Correction.none:
            return torch.ones_like(log_ratio)
        case Correction.token_tis:
            return token_tis(log_ratio, cap)
        case Correction.icepop:
            return icepop(log_ratio, floor, cap)
        case Correction.sequence_tis:
            return sequence_tis(log_ratio, mask, sequence, cap)
        case Correction.sequence_mask:
            return sequence_mask(log_ratio, mask, sequence, floor, cap)
        case Correction.geometric_mask:
            return geometric_mask(log_ratio, mask, sequence, floor, cap)
