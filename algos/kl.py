"""Estimators of KL(p ‖ q) from tokens that p sampled (Schulman, 2020, "Approximating KL Divergence").

With ℓ = log p − log q of a sampled token:

| | value | as an estimate of the KL | its gradient by p, as a loss |
|---|---|---|---|
| k1 | ℓ | unbiased, noisy, may be negative | zero in expectation: of use in the reward only |
| k2 | ½ ℓ² | biased, small where p and q are close | that of KL(p ‖ q), unbiased |
| k3 | e^−ℓ − 1 + ℓ | unbiased, never negative | that of KL(q ‖ p) instead |

All hold for tokens that p itself sampled. Tokens that μ sampled must be weighted by p / μ. The entropy of p
is exact, over the whole vocabulary (`learners/heads.py`).

Shapes everywhere: log p [T], log q [T] -> [T].
"""

from torch import Tensor

from algos.inputs import Divergence
from algos.ratios import clamp_log_ratio
from configs.kl import Estimator


def k1(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """ℓ"""
    return clamp_log_ratio(logprobs - other_logprobs)


def k2(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """½ ℓ²"""
    return 0.5 * clamp_log_ratio(logprobs - other_logprobs).square()


def k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """e^−ℓ − 1 + ℓ"""
    log_ratio = clamp_log_ratio(logprobs - other_logprobs)
    # expm1, because near 0 the difference is far below the rounding of 1.
    return (-log_ratio).expm1() + log_ratio


ESTIMATORS: dict[Estimator, Divergence] = {
    Estimator.k1: k1,
    Estimator.k2: k2,
    Estimator.k3: k3,
}


def adapt_coefficient(
    coefficient: float, kl: float, target: float, num_samples: int, horizon: int = 10_000
) -> float:
    """Returns the KL's coefficient for the next step (Ziegler et al., 2019, arXiv 1909.08593).

    β ← β · (1 + clip(KL / target − 1, ± 0.2) · samples / horizon), with the KL measured a token.
    """
    error = min(0.2, max(-0.2, kl / target - 1))
    return coefficient * (1 + error * num_samples / horizon)
