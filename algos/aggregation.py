"""Aggregation: from the losses of tokens to one number, as a weighted sum whose weights are known beforehand.

The weights come from the whole minibatch, so sums over microbatches and ranks equal one big batch.
"""

import torch
from torch import Tensor

from configs.algo import Aggregation


def compute_aggregation_weights(
    aggregation: Aggregation,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    horizon: int = 1,
    sequence_counts: Tensor | None = None,
) -> Tensor:
    """Returns the weight of each token's loss.

    With c_i how often sequence i counts (1 without `sequence_counts`):

    - token_mean (DAPO): c_i / Σ over the trained tokens of the c of their sequences
    - sequence_mean_token_mean (GRPO as first published): c_i / (sequences · trained tokens of the token's
      sequence)
    - sequence_mean_token_sum: c_i / sequences
    - constant_horizon (Dr. GRPO): c_i / (sequences · horizon); the horizon is the longest response that may
      be sampled

    Shapes: mask [T] bool, sequence [T] int64 (index of each token's episode), sequence_counts [N] -> [T]
    float32, 0 for untrained tokens. `num_sequences` counts all sequences of the minibatch, also those without
    a trained token. An empty mask gives zeros.
    """
    lengths = torch.zeros(num_sequences).index_add_(0, sequence, mask.float())
    counts = torch.ones(num_sequences) if sequence_counts is None else sequence_counts
    match aggregation:
        case Aggregation.token_mean:
            total = (counts * lengths).sum()
            weights = torch.full_like(mask, 1.0, dtype=torch.float32) / torch.where(total > 0, total, 1.0)
        case Aggregation.sequence_mean_token_mean:
            weights = 1.0 / (num_sequences * lengths.clamp(min=1))[sequence]
        case Aggregation.sequence_mean_token_sum:
            weights = torch.full_like(mask, 1.0 / num_sequences, dtype=torch.float32)
        case Aggregation.constant_horizon:
            weights = torch.full_like(mask, 1.0 / (num_sequences * horizon), dtype=torch.float32)
    return torch.where(mask, weights * counts[sequence], 0.0)
