"""Log-ratios of two policies, kept finite, and their sums and means over sequences."""

import torch
from torch import Tensor

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
