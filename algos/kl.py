"""Estimators of KL(π ‖ π_ref) from tokens that π has sampled (Schulman, 2020, "Approximating KL divergence"), and its coefficient.

With ℓ = log π − log π_ref of a sampled token:

| | value | as an estimate of the KL | its gradient, as a loss |
|---|---|---|---|
| k1 | ℓ | unbiased, noisy, may be negative | zero in expectation: of use in the reward only |
| k2 | ½ ℓ² | biased, small where the policies are close | that of the KL, unbiased |
| k3 | e^−ℓ − 1 + ℓ | unbiased, never negative | that of KL(π_ref ‖ π) instead |

All are for tokens sampled from the very π; where they were sampled from μ, weight them with π / μ.
"""

from torch import Tensor

from algos.corrections import clamped


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """[T] ℓ"""
    return clamped(logprobs - reference)


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """[T] ½ ℓ²"""
    return 0.5 * clamped(logprobs - reference).square()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """[T] e^−ℓ − 1 + ℓ"""
    log_ratio = clamped(logprobs - reference)
    return (-log_ratio).exp() - 1 + log_ratio


def adapted_coefficient(coefficient: float, kl: float, target: float, num_samples: int, horizon: int = 10_000) -> float:
    """The KL's coefficient for the next step (Ziegler et al., 2019): β · (1 + clip(KL / target − 1, ± 0.2) · samples / horizon)."""
    error = min(0.2, max(-0.2, kl / target - 1))
    return coefficient * (1 + error * num_samples / horizon)
