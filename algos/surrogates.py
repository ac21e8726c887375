"""Surrogate objectives: the loss of each token as a function of the current policy, before weighting.

Each takes `Tokens` and the parameters of its section, and returns [T]. None divides by anything: the
denominators stand in the aggregation weights (`algos.aggregation`). π_θ is the current policy, π_p the
proximal one (the learner at the start of the step), μ the behavior policy, A the advantage. Ratios are
e^(clip(Δ log π, ±20)); sg stops the gradient.

CONTRIBUTING.md, "Add a loss", shows how to add one.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from algos.inputs import Tokens
from algos.ratios import average_by_sequence, clamp_log_ratio
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
    ToprConfig,
)

MAX_LOG_SEQUENCE_RATIO = 10.0
MAX_DPPO_WEIGHT = 20.0

Surrogate = TypeVar("Surrogate", bound=Callable[[Tokens, Any], Tensor])
SURROGATES: dict[str, Callable[..., Tensor]] = {}
"""Surrogate of each name of `algo.surrogate`: (tokens, config) -> [T]."""


def surrogate(name: str) -> Callable[[Surrogate], Surrogate]:
    """Registers the function as `algo.surrogate=NAME`; its parameters are the section `algo.NAME`."""

    def register(function: Surrogate) -> Surrogate:
        SURROGATES[name] = function
        return function

    return register


@surrogate("ppo")
def ppo_loss(tokens: Tokens, config: PpoConfig) -> Tensor:
    """Clipped surrogate (PPO; Schulman et al., 2017, arXiv 1707.06347), with asymmetric and dual clip.

    r = π_θ / π_p;  L = max(−A r, −A clip(r, 1 − ε_low, 1 + ε_high));  where A < 0: L = min(L, −A c).

    The asymmetric clip is of DAPO (Yu et al., 2025, arXiv 2503.14476), the dual clip of Ye et al. (2020,
    arXiv 1912.09729). With a correction π_p / μ before it this is decoupled PPO (Hilton et al., 2022, arXiv
    2110.00641); with π_p = μ it is PPO on stale data.
    """
    ratio = clamp_log_ratio(tokens.logprobs - tokens.proximal_logprobs).exp()
    return _clip_loss(ratio, tokens.advantages, config.clip_low, config.clip_high, config.dual_clip)


@surrogate("gspo")
def gspo_loss(tokens: Tokens, config: GspoConfig) -> Tensor:
    """Group sequence policy optimization (GSPO; Zheng et al., 2025, arXiv 2507.18071), its token form.

    s_i = e^(mean over the sequence of log π_θ / π_p);  s_it = min(sg(s_i) π_θ / sg(π_θ), e^10);
    L = max(−A s, −A clip(s, 1 − ε_low, 1 + ε_high)). Where s_it is cut at e^10 it has no gradient.

    The ranges bound sequences: 3e-4 and 4e-4 in the paper.
    """
    log_ratio = clamp_log_ratio(tokens.logprobs - tokens.proximal_logprobs).detach()
    log_sequence_ratio = average_by_sequence(log_ratio, tokens.mask, tokens.sequence)
    # This is 0 and carries the gradient of the token's own log-probability.
    own = tokens.logprobs - tokens.logprobs.detach()
    ratio = (log_sequence_ratio + own).clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
    return _clip_loss(ratio, tokens.advantages, config.clip_low, config.clip_high, None)


@surrogate("cispo")
def cispo_loss(tokens: Tokens, config: CispoConfig) -> Tensor:
    """Clipped importance sampling (CISPO; MiniMax-M1, 2025, arXiv 2506.13585).

    r = π_θ / π_p;  L = −sg(clip(r, 1 − ε_low, 1 + ε_high)) A log π_θ.

    No token is dropped: the clip acts on its weight.
    """
    ratio = clamp_log_ratio(tokens.logprobs - tokens.proximal_logprobs).detach().exp()
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -weight * tokens.advantages * tokens.logprobs


@surrogate("sapo")
def sapo_loss(tokens: Tokens, config: SapoConfig) -> Tensor:
    """Soft adaptive policy optimization (SAPO; Qwen, 2025, arXiv 2511.20347).

    r = π_θ / π_p;  L = −A (4 / τ) σ(τ (r − 1)), with one τ where A > 0 and another elsewhere.

    At r = 1 its gradient is that of −A r.
    """
    ratio = clamp_log_ratio(tokens.logprobs - tokens.proximal_logprobs).exp()
    tau = torch.where(tokens.advantages > 0, config.tau_positive, config.tau_negative)
    return -tokens.advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1))


@surrogate("topr")
def topr_loss(tokens: Tokens, config: ToprConfig) -> Tensor:
    """Tapered off-policy REINFORCE (TOPR; Le Roux et al., 2025, arXiv 2503.14286), by token.

    A > 0: L = −A log π_θ;  else L = −sg(clip(π_θ / μ, 0, 1)) A log π_θ.

    It carries its own correction.
    """
    taper = clamp_log_ratio(tokens.logprobs - tokens.behavior_logprobs).detach().exp().clamp(max=1.0)
    return -torch.where(tokens.advantages > 0, 1.0, taper) * tokens.advantages * tokens.logprobs


@surrogate("dppo")
def dppo_loss(tokens: Tokens, config: DppoConfig) -> Tensor:
    """Divergence PPO with the binary total variation (DPPO; Qi et al., 2026).

    keep = π_θ − μ ≤ δ_high where A > 0, π_θ − μ ≥ −δ_low elsewhere;
    L = −keep sg(min(π_θ / μ, 20)) A log π_θ.

    A token counts as long as its probability has moved little from μ's. It carries its own correction.
    """
    moved = tokens.logprobs.detach().exp() - tokens.behavior_logprobs.exp()
    keep = torch.where(tokens.advantages > 0, moved <= config.high, moved >= -config.low)
    log_ratio = clamp_log_ratio(tokens.logprobs - tokens.behavior_logprobs)
    weight = log_ratio.detach().exp().clamp(max=MAX_DPPO_WEIGHT)
    return -torch.where(keep, weight, 0.0) * tokens.advantages * tokens.logprobs


@surrogate("aipo")
def aipo_loss(tokens: Tokens, config: AipoConfig) -> Tensor:
    """Asynchronous importance-weighted policy optimization (AIPO; LlamaRL, 2025, arXiv 2505.24034).

    L = −sg(min(π_θ / μ, ρ)) A log π_θ.

    It carries its own correction.
    """
    weight = clamp_log_ratio(tokens.logprobs - tokens.behavior_logprobs).detach().exp().clamp(max=config.cap)
    return -weight * tokens.advantages * tokens.logprobs


@surrogate("m2po")
def m2po_loss(tokens: Tokens, config: M2poConfig) -> Tensor:
    """Second-moment trust region (M2PO; Zheng et al., 2025, arXiv 2510.01161).

    r = π_θ / μ;  L = −r A for the tokens that `mask_second_moment` keeps.

    The mask is one of a whole minibatch, so it comes with the off-policy weights (`algos.objective`).
    """
    return -clamp_log_ratio(tokens.logprobs - tokens.behavior_logprobs).exp() * tokens.advantages


def mask_second_moment(log_ratio: Tensor, advantages: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Returns the tokens of a whole minibatch that M2PO trains. log_ratio is log π − log μ.

    A clip could act on tokens with A > 0 and r > 1, or A < 0 and r < 1. Of these, the ones with the largest
    (log r)² are dropped until the mean of the rest is at most the threshold (0.04 in the paper). All other
    tokens are kept.

    Shapes: log_ratio, advantages, mask (bool) [T] -> [T] bool.
    """
    acting = mask & (((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0)))
    squares = clamp_log_ratio(log_ratio[acting]).square()
    order = squares.argsort(stable=True)
    means = squares[order].double().cumsum(0) / torch.arange(1, len(order) + 1, device=order.device)
    # The mean of the n smallest rises with n, so the kept ones are the first in this order.
    num_kept = int((means <= threshold).sum())
    keep = mask.clone()
    keep[acting.nonzero()[:, 0][order[num_kept:]]] = False
    return keep


@surrogate("kimi")
def kimi_loss(tokens: Tokens, config: KimiConfig) -> Tensor:
    """Policy mirror descent (Kimi k1.5, 2025, arXiv 2501.12599): L = −A log π_θ + ½ τ (log π_θ / π_p)².

    A is the reward less the mean of its group.
    """
    log_ratio = clamp_log_ratio(tokens.logprobs - tokens.proximal_logprobs)
    return -tokens.advantages * tokens.logprobs + 0.5 * config.tau * log_ratio.square()


@surrogate("opmd")
def opmd_loss(tokens: Tokens, config: OpmdConfig) -> Tensor:
    """Online policy mirror descent, simplified (OPMD; Trinity-RFT, 2025, arXiv 2505.17826).

    L = −A log π_θ / (1 + τ).

    A is the reward less the mean of its group, as for `kimi`.
    """
    return -tokens.advantages * tokens.logprobs / (1 + config.tau)


def _clip_loss(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> Tensor:
    """Returns max(−A r, −A clip(r, 1 − ε_low, 1 + ε_high)), at most −A c where A < 0. [T], [T] -> [T]."""
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
