"""Linear layers and activations in which no row's result depends on the number of the other rows."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

LEAST_ROWS = 16


def steady_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Computes a linear layer, [..., T, K] -> [..., T, N], in which no row's result depends on the number of
    the other rows.

    In float32 MKL sums in another order below 16 rows than above (found for K from 64 to 4096 and up to 2048
    rows). Padding to 16 rows makes a sample the same, to the last bit, alone and in a crowd.
    """
    num_rows = x.shape[-2]
    if num_rows >= LEAST_ROWS:
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, LEAST_ROWS - num_rows)), weight, bias)[..., :num_rows, :]


def steady_activation(activation: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Computes an activation of each element, [..., T, K] -> [..., T, K], in which no row's result depends on
    the number of the other rows.

    What remains after the last whole vector of the processor is computed by other instructions. Padding to a
    multiple of 16 rows leaves nothing over.
    """
    num_rows = x.shape[-2]
    return activation(F.pad(x, (0, 0, 0, -num_rows % LEAST_ROWS)))[..., :num_rows, :]
