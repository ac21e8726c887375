"""Aggregation: from the losses of tokens to one number, as a weighted sum whose weights are known beforehand.

The weights come from the whole minibatch, so sums over microbatches and ranks equal one big batch.
"""

import torch
from torch import Tensor

from configs.algorithms import Aggregation


def token_weights(kind: Aggregation, mask: Tensor, sequence: Tensor, num_sequences: int, horizon: int = 1) -> Tensor:
    """The weight of each token's loss.

    - token_mean (DAPO): 1 / trained tokens
    - sequence_mean_token_mean (GRPO as first published): 1 / (sequences · trained tokens of the token's sequence)
    - sequence_mean_token_sum: 1 / sequences
    - constant_horizon (Dr. GRPO): 1 / (sequences · horizon), the horizon being the longest response that may be sampled

    Shapes: mask [T] bool, sequence [T] int64 (index of the token's sequence) -> [T] float32, 0 where not masked in.
    `num_sequences` counts all sequences of the minibatch, also those without a trained token. An empty mask gives zeros.
    """
    counts = torch.zeros(num_sequences).index_add_(0, sequence, mask.float())
    match kind:
        case Aggregation.token_mean:
            weights = torch.full_like(mask, 1.0, dtype=torch.float32) / counts.sum().clamp(min=1)
        case Aggregation.sequence_mean_token_mean:
            weights = 1.0 / (num_sequences * counts.clamp(min=1))[sequence]
        case Aggregation.sequence_mean_token_sum:
            weights = torch.full_like(mask, 1.0 / num_sequences, dtype=torch.float32)
        case Aggregation.constant_horizon:
            weights = torch.full_like(mask, 1.0 / (num_sequences * horizon), dtype=torch.float32)
    return torch.where(mask, weights, 0.0)
