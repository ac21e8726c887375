"""Surrogate objectives: the loss of each token as a function of the current policy, before weighting and aggregation.

All take `Tokens` and their parameters and give [T]; none divides by anything (`algos.aggregation` does). Ratios are e^(clip(Δ log π, ±20));
sg is stop-gradient. π_θ is the current policy, π_p the proximal one (the learner at the start of the step), μ the behaviour.

To add one: write it here under `@surrogate`, its parameters as a dataclass in `configs/surrogates.py`, and a field of its name in `AlgoConfig`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from algos.ratios import clamped, sequence_mean
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

MAX_LOG_SEQUENCE_RATIO = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What a surrogate may look at: whole sequences, T tokens in all, flat. Where `mask` is false the values are 0."""

    logprobs: Tensor
    """[T] log π_θ; the only one with a gradient"""
    proximal: Tensor
    """[T] log π_p"""
    behavior: Tensor
    """[T] log μ"""
    advantages: Tensor
    """[T]"""
    mask: Tensor
    """[T] bool: the tokens that are trained"""
    sequence: Tensor
    """[T] int64: index of each token's sequence"""


Function = TypeVar("Function", bound=Callable[[Tokens, Any], Tensor])
SURROGATES: dict[str, Callable[[Tokens, SurrogateConfig], Tensor]] = {}
"""By name."""


def surrogate(function: Function) -> Function:
    SURROGATES[function.__name__] = function
    return function


@surrogate
def ppo(tokens: Tokens, config: PpoConfig) -> Tensor:
    """Clipped surrogate (PPO; Schulman et al., 2017), with asymmetric clip (DAPO) and dual clip (Ye et al., 2020).

    r = π_θ / π_p;  L = max(−A r, −A clip(r, 1 − ε_low, 1 + ε_high));  where A < 0: L = min(L, −A c).
    With a correction π_p / μ before it this is decoupled PPO (Hilton et al., 2022), with π_p = μ it is PPO on stale data.
    """
    ratio = clamped(tokens.logprobs - tokens.proximal).exp()
    return _clipped(ratio, tokens.advantages, config.clip_low, config.clip_high, config.dual_clip)


@surrogate
def gspo(tokens: Tokens, config: GspoConfig) -> Tensor:
    """Group sequence policy optimisation (GSPO; Zheng et al., 2025), its token form.

    s_i = e^(mean over the sequence of log π_θ / π_p);  s_it = min(sg(s_i) π_θ / sg(π_θ), e^10), without a gradient where it is cut;
    L = max(−A s, −A clip(s, 1 − ε_low, 1 + ε_high)). The ranges are of sequences: 3e-4 and 4e-4 in the paper.
    """
    log_ratio = sequence_mean(
        clamped(tokens.logprobs - tokens.proximal).detach(), tokens.mask, tokens.sequence
    )
    own = tokens.logprobs - tokens.logprobs.detach()
    ratio = (log_ratio + own).clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
    return _clipped(ratio, tokens.advantages, config.clip_low, config.clip_high, None)


@surrogate
def cispo(tokens: Tokens, config: CispoConfig) -> Tensor:
    """Clipped importance sampling (CISPO; MiniMax-M1, 2025): L = −sg(clip(r, 1 − ε_low, 1 + ε_high)) A log π_θ, r = π_θ / π_p.

    No token is dropped: what is clipped is its weight.
    """
    weight = (
        clamped(tokens.logprobs - tokens.proximal)
        .detach()
        .exp()
        .clamp(1 - config.clip_low, 1 + config.clip_high)
    )
    return -weight * tokens.advantages * tokens.logprobs


@surrogate
def sapo(tokens: Tokens, config: SapoConfig) -> Tensor:
    """Soft adaptive policy optimisation (SAPO; Qwen, 2025): L = −A (4 / τ) σ(τ (r − 1)), r = π_θ / π_p.

    τ is one number where A > 0, another elsewhere. At r = 1 its gradient is that of −A r.
    """
    ratio = clamped(tokens.logprobs - tokens.proximal).exp()
    tau = torch.where(tokens.advantages > 0, config.tau_positive, config.tau_negative)
    return -tokens.advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1))


@surrogate
def topr(tokens: Tokens, config: ToprConfig) -> Tensor:
    """Tapered off-policy REINFORCE (TOPR; Le Roux et al., 2025), by token.

    A > 0: L = −A log π_θ;  else L = −sg(clip(π_θ / μ, 0, 1)) A log π_θ. It carries its own correction.
    """
    taper = clamped(tokens.logprobs - tokens.behavior).detach().exp().clamp(max=1.0)
    return -torch.where(tokens.advantages > 0, 1.0, taper) * tokens.advantages * tokens.logprobs


@surrogate
def dppo(tokens: Tokens, config: DppoConfig) -> Tensor:
    """Divergence PPO with the binary total variation (DPPO; Qi et al., 2026).

    A token counts as long as its probability has moved little:

    keep = π_θ − μ ≤ δ_high where A > 0, π_θ − μ ≥ −δ_low elsewhere;  L = −keep sg(min(π_θ / μ, 20)) A log π_θ. It carries its
    own correction.
    """
    moved = tokens.logprobs.detach().exp() - tokens.behavior.exp()
    keep = torch.where(tokens.advantages > 0, moved <= config.high, moved >= -config.low)
    weight = clamped(tokens.logprobs - tokens.behavior).detach().exp().clamp(max=20.0)
    return -torch.where(keep, weight, 0.0) * tokens.advantages * tokens.logprobs


@surrogate
def aipo(tokens: Tokens, config: AipoConfig) -> Tensor:
    """Asynchronous importance-weighted policy optimisation (AIPO; LlamaRL, 2025): L = −sg(min(π_θ / μ, ρ)) A log π_θ.

    It carries its own correction.
    """
    weight = clamped(tokens.logprobs - tokens.behavior).detach().exp().clamp(max=config.cap)
    return -weight * tokens.advantages * tokens.logprobs


@surrogate
def m2po(tokens: Tokens, config: M2poConfig) -> Tensor:
    """Second-moment trust region (M2PO; Zheng et al., 2025): L = −r A, r = π_θ / μ, where `second_moment_mask` keeps the token.

    The mask is one of a whole minibatch and comes with the other weights (`algos.corrections.off_policy_weights`).
    """
    return -clamped(tokens.logprobs - tokens.behavior).exp() * tokens.advantages


def second_moment_mask(log_ratio: Tensor, advantages: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Which tokens M2PO trains, of a whole minibatch [T]: log_ratio = log π − log μ.

    Of the tokens where a clip could act (A > 0 and r > 1, or A < 0 and r < 1) those with the largest (log r)² are dropped, until the
    mean of the others is at most the threshold (0.04 in the paper). All others are kept.
    """
    acting = mask & (((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0)))
    squares = clamped(log_ratio[acting]).square()
    order = squares.argsort(stable=True)
    means = squares[order].double().cumsum(0) / torch.arange(1, len(order) + 1, device=order.device)
    num_kept = int((means <= threshold).sum())  # the mean of the smallest n rises with n
    keep = mask.clone()
    keep[acting.nonzero()[:, 0][order[num_kept:]]] = False
    return keep


@surrogate
def kimi(tokens: Tokens, config: KimiConfig) -> Tensor:
    """Kimi k1.5 (2025), policy mirror descent: L = −A log π_θ + ½ τ (log π_θ / π_p)², A the reward less its group's mean."""
    log_ratio = clamped(tokens.logprobs - tokens.proximal)
    return -tokens.advantages * tokens.logprobs + 0.5 * config.tau * log_ratio.square()


@surrogate
def opmd(tokens: Tokens, config: OpmdConfig) -> Tensor:
    """Online policy mirror descent, simplified (OPMD; Trinity-RFT, 2025): L = −A log π_θ / (1 + τ), A as Kimi's."""
    return -tokens.advantages * tokens.logprobs / (1 + config.tau)


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None) -> Tensor:
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    return (
        loss if dual is None else torch.where(advantages < 0, torch.minimum(loss, -advantages * dual), loss)
    )
