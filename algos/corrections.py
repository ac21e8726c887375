"""Off-policy corrections: the weight of each token for having been sampled by another policy.

All are functions of log_ratio = log π_p − log μ [T]. They are constants to the gradient, and a weight of 0
drops the token. A correction by sequence gives each token the weight of its sequence. Log-ratios are clamped
within ±20, so ±inf gives a finite weight.

Shapes everywhere: log_ratio [T], mask [T] bool (the tokens that are trained), sequence [T] int64 (index of
each token's episode) -> [T]. None divides by anything: the denominators count dropped tokens too
(`algos.aggregation`).
"""

import torch
from torch import Tensor

from algos.kl import ESTIMATORS
from algos.ratios import average_by_sequence, clamp_log_ratio, count_sequences, sum_by_sequence
from configs.corrections import Correction, Level
from configs.kl import Estimator


def token_tis(log_ratio: Tensor, cap: float) -> Tensor:
    """Truncated importance sampling by token (Munos et al., 2016, arXiv 1606.02647; Yao et al., 2025).

    w_t = min(π_p / μ, cap)
    """
    return clamp_log_ratio(log_ratio).exp().clamp(max=cap)


def icepop(log_ratio: Tensor, floor: float, cap: float) -> Tensor:
    """IcePop (Ling team, 2025, arXiv 2510.18855): w_t = π_p / μ where floor ≤ π_p / μ ≤ cap, else 0."""
    weight = clamp_log_ratio(log_ratio).exp()
    return torch.where((weight >= floor) & (weight <= cap), weight, 0.0)


def sequence_tis(log_ratio: Tensor, mask: Tensor, sequence: Tensor, cap: float) -> Tensor:
    """Truncated importance sampling by sequence: w_i = min(Π_t π_p / μ, cap). It is unbiased without the
    truncation."""
    product = sum_by_sequence(clamp_log_ratio(log_ratio), mask, sequence)
    return clamp_log_ratio(product).exp().clamp(max=cap)


def sequence_mask(log_ratio: Tensor, mask: Tensor, sequence: Tensor, floor: float, cap: float) -> Tensor:
    """Drops the sequences whose Π_t π_p / μ is outside floor .. cap; the others weigh 1."""
    product = sum_by_sequence(clamp_log_ratio(log_ratio), mask, sequence)
    return _keep_within(clamp_log_ratio(product).exp(), floor, cap)


def geometric_mask(log_ratio: Tensor, mask: Tensor, sequence: Tensor, floor: float, cap: float) -> Tensor:
    """Drops the sequences whose geometric mean of π_p / μ is outside floor .. cap; the others weigh 1."""
    mean = average_by_sequence(clamp_log_ratio(log_ratio), mask, sequence)
    return _keep_within(mean.exp(), floor, cap)


def _keep_within(ratio: Tensor, floor: float, cap: float) -> Tensor:
    return ((ratio >= floor) & (ratio <= cap)).to(ratio.dtype)


def correct_off_policy(
    correction: Correction, log_ratio: Tensor, mask: Tensor, sequence: Tensor, floor: float, cap: float
) -> Tensor:
    """Returns the weights of the correction of this name. Its range is floor .. cap, as far as it has such
    ends."""
    match correction:
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


def mask_rejected(
    estimator: Estimator,
    level: Level,
    threshold: float,
    log_ratio: Tensor,
    mask: Tensor,
    sequence: Tensor,
) -> Tensor:
    """Drops tokens, or sequences, whose estimate of KL(μ ‖ π_p) is above the threshold; the others weigh 1.

    The estimate is k1, k2 or k3 (`algos.kl`) of the token itself, or its sum, mean or maximum over the
    sequence.
    """
    # KL(μ ‖ π_p) has μ in front, so its log-ratio is −log_ratio.
    estimate = ESTIMATORS[estimator](-log_ratio, torch.zeros_like(log_ratio))
    match level:
        case Level.sequence_sum:
            estimate = sum_by_sequence(estimate, mask, sequence)
        case Level.sequence_mean:
            estimate = average_by_sequence(estimate, mask, sequence)
        case Level.sequence_max:
            num_sequences = count_sequences(sequence)
            lowest = torch.full((num_sequences,), float("-inf"), dtype=estimate.dtype, device=estimate.device)
            trained = torch.where(mask, estimate, float("-inf"))
            estimate = lowest.scatter_reduce(0, sequence, trained, "amax")[sequence]
        case Level.token:
            pass
    return (estimate <= threshold).to(log_ratio.dtype)


def normalize_weights(weights: Tensor, mask: Tensor) -> Tensor:
    """Divides the weights [T] of a whole minibatch by their mean over the trained tokens; unchanged where
    that is 0."""
    mean = torch.where(mask, weights, 0.0).sum() / mask.sum().clamp(min=1)
    return torch.where(mean > 0, weights / mean, weights)
