"""The equation of each surrogate, token by token in Python floats: the reference for `algos/surrogates.py`.

A new surrogate gets one row in `EQUATIONS`. Every test of surrogates then covers it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from configs.surrogates import (
    AipoConfig,
    CispoConfig,
    DppoConfig,
    GspoConfig,
    KimiConfig,
    M2poConfig,
    OpmdConfig,
    PpoConfig,
    SapoConfig,
    SurrogateConfig,
    ToprConfig,
)


@dataclass(frozen=True)
class TokenRow:
    """The numbers of one token."""

    logprob: float
    """log π_θ"""
    proximal_logprob: float
    """log π_p"""
    behavior_logprob: float
    """log μ"""
    advantage: float
    sequence_ratio: float = 1.0
    """e^(mean of log π_θ / π_p over the trained tokens of its sequence)"""

    @property
    def ratio(self) -> float:
        """π_θ / π_p"""
        return math.exp(self.logprob - self.proximal_logprob)

    @property
    def behavior_ratio(self) -> float:
        """π_θ / μ"""
        return math.exp(self.logprob - self.behavior_logprob)


TokenEquation = Callable[[TokenRow], float]


@dataclass(frozen=True)
class SurrogateEquation:
    config: SurrogateConfig
    """Parameters that make every branch of the equation act on ratios between 0.5 and 2"""
    loss: TokenEquation
    """Loss of a token"""
    derivative: TokenEquation | None = None
    """Derivative of the loss by log π_θ; only where a stop-gradient makes it another than that of `loss`"""
    on_policy_scale: float = 1.0
    """Where all policies are equal, the derivative is −A times this"""


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def clipped_loss(ratio: float, advantage: float, low: float, high: float, dual: float | None = None) -> float:
    """max(−A r, −A clip(r, 1 − low, 1 + high)), at most −A dual where A < 0"""
    loss = max(-advantage * ratio, -advantage * clip(ratio, 1 - low, 1 + high))
    return min(loss, -advantage * dual) if dual is not None and advantage < 0 else loss


def sapo_loss(t: TokenRow) -> float:
    tau = 1.0 if t.advantage > 0 else 1.05
    return -t.advantage * (4 / tau) / (1 + math.exp(-tau * (t.ratio - 1)))


def gspo_derivative(t: TokenRow) -> float:
    is_cut = t.sequence_ratio > 1.04 if t.advantage > 0 else t.sequence_ratio < 0.97
    return 0.0 if is_cut else -t.sequence_ratio * t.advantage


def topr_derivative(t: TokenRow) -> float:
    return -(1.0 if t.advantage > 0 else clip(t.behavior_ratio, 0, 1)) * t.advantage


def dppo_derivative(t: TokenRow) -> float:
    moved = math.exp(t.logprob) - math.exp(t.behavior_logprob)
    keep = moved <= 0.15 if t.advantage > 0 else moved >= -0.1
    return -keep * min(t.behavior_ratio, 20) * t.advantage


EQUATIONS: dict[str, SurrogateEquation] = {
    "ppo": SurrogateEquation(
        PpoConfig(clip_low=0.2, clip_high=0.28, dual_clip=1.4),
        loss=lambda t: clipped_loss(t.ratio, t.advantage, 0.2, 0.28, 1.4),
    ),
    "gspo": SurrogateEquation(
        GspoConfig(clip_low=0.03, clip_high=0.04),
        loss=lambda t: clipped_loss(t.sequence_ratio, t.advantage, 0.03, 0.04),
        derivative=gspo_derivative,
    ),
    "cispo": SurrogateEquation(
        CispoConfig(clip_low=0.2, clip_high=0.3),
        loss=lambda t: -clip(t.ratio, 0.8, 1.3) * t.advantage * t.logprob,
        derivative=lambda t: -clip(t.ratio, 0.8, 1.3) * t.advantage,
    ),
    "sapo": SurrogateEquation(SapoConfig(tau_positive=1.0, tau_negative=1.05), loss=sapo_loss),
    "topr": SurrogateEquation(
        ToprConfig(), loss=lambda t: topr_derivative(t) * t.logprob, derivative=topr_derivative
    ),
    "dppo": SurrogateEquation(
        DppoConfig(low=0.1, high=0.15),
        loss=lambda t: dppo_derivative(t) * t.logprob,
        derivative=dppo_derivative,
    ),
    "aipo": SurrogateEquation(
        AipoConfig(cap=1.5),
        loss=lambda t: -min(t.behavior_ratio, 1.5) * t.advantage * t.logprob,
        derivative=lambda t: -min(t.behavior_ratio, 1.5) * t.advantage,
    ),
    "m2po": SurrogateEquation(M2poConfig(), loss=lambda t: -t.behavior_ratio * t.advantage),
    "kimi": SurrogateEquation(
        KimiConfig(tau=0.1),
        loss=lambda t: -t.advantage * t.logprob + 0.05 * (t.logprob - t.proximal_logprob) ** 2,
    ),
    "opmd": SurrogateEquation(
        OpmdConfig(tau=1.0), loss=lambda t: -t.advantage * t.logprob / 2, on_policy_scale=0.5
    ),
}
"""Equation of each surrogate, by its name in `algo.surrogate`."""
