"""A policy loss: surrogate × off-policy correction, summed with given weights; and what to know about it.

L = Σ_t a_t · w_t · L_t,  a from `aggregation.token_weights`, w from `corrections`, L_t from `surrogates`.

Metrics come as sums over tokens, so that microbatches and ranks add up; `summarize` turns the sums into figures.
"""

import torch
from torch import Tensor

from algos.corrections import clamped, correction_weights
from algos.surrogates import ppo_clip
from configs.schema import AlgoConfig, Correction


def policy_loss(
    algo: AlgoConfig,
    *,
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    entropy: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one microbatch and its sums, detached.

    Shapes: all [T]; mask is bool; `weights` are the aggregation's. Values where mask is false cannot matter, NaN included.
    """

    def kept(values: Tensor) -> Tensor:
        return torch.where(mask, values, 0.0)

    logprobs, proximal, behavior = kept(logprobs), kept(proximal_logprobs), kept(behavior_logprobs)
    advantages, entropy = kept(advantages), kept(entropy.detach())
    correction = correction_weights(algo.correction, proximal - behavior, algo.correction_floor, algo.correction_cap)
    surrogate = ppo_clip(logprobs, proximal, advantages, algo.clip_low, algo.clip_high, algo.dual_clip)
    loss = (torch.where(mask, weights, 0.0) * correction * surrogate).sum()
    with torch.no_grad():
        sums = _sums(algo, logprobs, proximal, behavior, advantages, correction, entropy, mask)
        sums["loss"] = loss.detach().double()
    return loss, sums


def _sums(
    algo: AlgoConfig,
    logprobs: Tensor,
    proximal: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    correction: Tensor,
    entropy: Tensor,
    mask: Tensor,
) -> dict[str, Tensor]:
    ratio = clamped(logprobs - proximal).exp()
    clipped = ((advantages > 0) & (ratio > 1 + algo.clip_high)) | ((advantages < 0) & (ratio < 1 - algo.clip_low))
    delta = clamped(logprobs - behavior)
    rho = delta.exp()
    raw = clamped(proximal - behavior).exp()
    columns = {
        "tokens": torch.ones_like(ratio),
        "entropy": entropy,
        "clipped": clipped,
        "truncated": (raw > correction) & (correction > 0) & (algo.correction is not Correction.none),
        "dropped": correction == 0,
        "weight": correction,
        "weight_squared": correction.square(),
        "ratio": ratio,
        "k1": -delta,
        "k3": rho - 1 - delta,
        "rho_squared": rho.square(),
    }
    return {name: torch.where(mask, values.double(), 0.0).sum() for name, values in columns.items()}


def summarize(sums: dict[str, float]) -> dict[str, float]:
    """Figures of a step from the sums over all its tokens.

    `offpolicy/ess`: (Σw)² / (n Σw²) of the truncated weights, 1 = on-policy. `offpolicy/kl_k1` and `kl_k3` estimate
    KL(μ‖π_θ) (Schulman, 2020); `offpolicy/chi2` is mean((π_θ/μ)²) − 1. All zero when nothing was trained.
    """
    n = max(sums["tokens"], 1.0)
    return {
        "loss/policy": sums["loss"],
        "policy/entropy": sums["entropy"] / n,
        "policy/clip_fraction": sums["clipped"] / n,
        "policy/ratio_mean": sums["ratio"] / n,
        "offpolicy/ess": sums["weight"] ** 2 / (n * sums["weight_squared"]) if sums["weight_squared"] else 0.0,
        "offpolicy/kl_k1": sums["k1"] / n,
        "offpolicy/kl_k3": sums["k3"] / n,
        "offpolicy/chi2": sums["rho_squared"] / n - 1 if sums["tokens"] else 0.0,
        "offpolicy/weight_mean": sums["weight"] / n,
        "offpolicy/truncated_fraction": sums["truncated"] / n,
        "offpolicy/dropped_fraction": sums["dropped"] / n,
    }
