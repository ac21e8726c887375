"""Off-policy corrections: the weight of each token for having been sampled by another policy than the one that learns.

All are functions of log_ratio = log π − log μ [T] and are constants to the gradient; a weight of 0 drops the token. Those of a
sequence give each of its tokens the sequence's weight; `mask` [T] says which tokens are trained, `sequence` [T] whose they are.
Log-ratios are taken within ±20, so ±inf gives a finite weight.
"""

import torch
from torch import Tensor

from algos import kl
from algos.ratios import clamped, sequence_mean, sequence_sum
from algos.surrogates import second_moment_mask
from configs.algo import AlgoConfig
from configs.corrections import Correction, Level, RejectionConfig


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


def rejection(log_ratio: Tensor, mask: Tensor, sequence: Tensor, config: RejectionConfig) -> Tensor:
    """Drops where an estimate of KL(μ ‖ π) is above the threshold; the others weigh 1. [T]

    `estimator`: k1, k2, k3 of a token (`algos.kl`). `level`: that of the token itself, or the sum, mean or max over its sequence.
    """
    if config.estimator is None:
        return torch.ones_like(log_ratio)
    estimate = kl.ESTIMATORS[config.estimator](-log_ratio, torch.zeros_like(log_ratio))
    match config.level:
        case Level.sequence_sum:
            estimate = sequence_sum(estimate, mask, sequence)
        case Level.sequence_mean:
            estimate = sequence_mean(estimate, mask, sequence)
        case Level.sequence_max:
            count = int(sequence.max()) + 1 if len(sequence) else 0
            lowest = torch.full((count,), float("-inf"), dtype=estimate.dtype, device=estimate.device)
            shown = torch.where(mask, estimate, float("-inf"))
            estimate = lowest.scatter_reduce(0, sequence, shown, "amax")[sequence]
        case Level.token:
            pass
    return (estimate <= config.threshold).to(log_ratio.dtype)


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


def off_policy_weights(
    algo: AlgoConfig, log_ratio: Tensor, advantages: Tensor, mask: Tensor, sequence: Tensor
) -> Tensor:
    """[T] what the composition weighs each token by: correction × rejection × M2PO's mask, normalised where that is asked for.

    `log_ratio` [T] is log π_p − log μ, 0 where not trained. Where `algo.needs_whole_minibatch`, all columns must be of the whole minibatch.
    """
    log_ratio = torch.where(mask, log_ratio.detach(), 0.0)
    weights = correction_weights(algo, log_ratio, mask, sequence) * rejection(
        log_ratio, mask, sequence, algo.rejection
    )
    threshold = algo.surrogate_section.second_moment_threshold
    if threshold is not None:
        weights = weights * second_moment_mask(log_ratio, advantages, mask, threshold)
    return normalised(weights, mask) if algo.normalize_weights else weights


def correction_weights(algo: AlgoConfig, log_ratio: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    """[T]"""
    floor, cap = algo.correction_range
    match algo.correction:
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
