"""Log-ratios of two policies, kept finite, and their sums and means over sequences."""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Returns the log-ratio within ±20, so that its exponential stays finite. NaN stays NaN."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def count_sequences(sequence: Tensor) -> int:
    """Returns the number of sequences, from the index [T] of each token's sequence; 0 without a token."""
    return int(sequence.max()) + 1 if len(sequence) else 0


def sum_by_sequence(values: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    """Returns at each token the sum over the trained tokens of its sequence.

    Shapes: values [T], mask [T] bool, sequence [T] int64 (index of each token's episode) -> [T].
    """
    totals = torch.zeros(count_sequences(sequence), dtype=values.dtype, device=values.device)
    return totals.index_add(0, sequence, torch.where(mask, values, 0.0))[sequence]


def average_by_sequence(values: Tensor, mask: Tensor, sequence: Tensor) -> Tensor:
    """Returns at each token the mean over the trained tokens of its sequence; 0 where the sequence has none.

    Shapes as `sum_by_sequence`.
    """
    counts = sum_by_sequence(torch.ones_like(values), mask, sequence)
    return sum_by_sequence(values, mask, sequence) / counts.clamp(min=1)
