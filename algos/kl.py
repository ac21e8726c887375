"""Estimators of KL(p ‖ q) from tokens that p has sampled (Schulman, 2020, "Approximating KL divergence"), and a coefficient for it.

With ℓ = log p − log q of a sampled token:

| | value | as an estimate of the KL | its gradient by p, as a loss |
|---|---|---|---|
| k1 | ℓ | unbiased, noisy, may be negative | zero in expectation: of use in the reward only |
| k2 | ½ ℓ² | biased, small where p and q are close | that of KL(p ‖ q), unbiased |
| k3 | e^−ℓ − 1 + ℓ | unbiased, never negative | that of KL(q ‖ p) instead |

All are for tokens sampled from the very p; where they were sampled from μ, they are to be weighed with p / μ. The entropy of p is
exact, over the whole vocabulary (`learners/heads.py`).
"""

from collections.abc import Callable

from torch import Tensor

from algos.ratios import clamped
from configs.kl import Estimator


def k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """[T] ℓ"""
    return clamped(logprobs - other)


def k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """[T] ½ ℓ²"""
    return 0.5 * clamped(logprobs - other).square()


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """[T] e^−ℓ − 1 + ℓ"""
    log_ratio = clamped(logprobs - other)
    return (-log_ratio).expm1() + log_ratio  # expm1: near 0 the difference is far below the rounding of 1


ESTIMATORS: dict[Estimator, Callable[[Tensor, Tensor], Tensor]] = {
    Estimator.k1: k1,
    Estimator.k2: k2,
    Estimator.k3: k3,
}


def adapted_coefficient(
    coefficient: float, kl: float, target: float, num_samples: int, horizon: int = 10_000
) -> float:
    """The KL's coefficient for the next step (Ziegler et al., 2019): β · (1 + clip(KL / target − 1, ± 0.2) · samples / horizon)."""
    error = min(0.2, max(-0.2, kl / target - 1))
    return coefficient * (1 + error * num_samples / horizon)
