"""A policy loss: surrogate × off-policy correction, summed with given weights; and what to know about it.

L = Σ_t a_t · w_t · L_t,  a from `aggregation.token_weights`, w from `corrections`, L_t from `surrogates`.

Metrics come as sums over tokens, so that microbatches and ranks add up; `summarize` turns the sums into figures.
"""

import torch
from torch import Tensor

from algos.corrections import clamped, correction_weights, sequence_mean
from algos.surrogates import Tokens, aipo, cispo, dppo, gspo, kimi, opmd, ppo, sapo, topr
from configs.schema import AlgoConfig, Correction, Surrogate


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
    sequence: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one microbatch and its sums, detached.

    Shapes: all [T]; mask is bool; `weights` are the aggregation's; `sequence` int64, the index of each token's sequence, all of whose
    tokens are here. Values where mask is false cannot matter, NaN included.
    """

    def kept(values: Tensor) -> Tensor:
        return torch.where(mask, values, 0.0)

    logprobs, proximal, behavior = kept(logprobs), kept(proximal_logprobs), kept(behavior_logprobs)
    advantages, entropy = kept(advantages), kept(entropy.detach())
    floor, cap = algo.correction_floor, algo.correction_cap
    correction = correction_weights(algo.correction, proximal - behavior, mask, sequence, floor, cap)
    tokens = Tokens(
        logprobs=logprobs, proximal=proximal, behavior=behavior, advantages=advantages, mask=mask, sequence=sequence
    )
    loss = (torch.where(mask, weights, 0.0) * correction * surrogate(algo, tokens)).sum()
    with torch.no_grad():
        sums = _sums(algo, tokens, correction, entropy)
        sums["loss"] = loss.detach().double()
    return loss, sums


def surrogate(algo: AlgoConfig, tokens: Tokens) -> Tensor:
    """[T] the loss of each token."""
    tau, tau_negative = algo.temperatures
    match algo.surrogate:
        case Surrogate.ppo:
            return ppo(tokens, algo.clip_low, algo.clip_high, algo.dual_clip)
        case Surrogate.gspo:
            return gspo(tokens, algo.clip_low, algo.clip_high)
        case Surrogate.cispo:
            return cispo(tokens, algo.clip_low, algo.clip_high)
        case Surrogate.sapo:
            return sapo(tokens, tau, tau_negative)
        case Surrogate.topr:
            return topr(tokens)
        case Surrogate.dppo:
            return dppo(tokens, algo.clip_low, algo.clip_high)
        case Surrogate.aipo:
            return aipo(tokens, algo.surrogate_cap)
        case Surrogate.kimi:
            return kimi(tokens, tau)
        case Surrogate.opmd:
            return opmd(tokens, tau)


def _sums(algo: AlgoConfig, tokens: Tokens, correction: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    log_ratio = clamped(tokens.logprobs - tokens.proximal)
    if algo.surrogate is Surrogate.gspo:
        log_ratio = sequence_mean(log_ratio, tokens.mask, tokens.sequence)
    ratio = log_ratio.exp()
    delta = clamped(tokens.logprobs - tokens.behavior)
    rho = delta.exp()
    truncates = algo.correction in (Correction.token_tis, Correction.sequence_tis)
    columns = {
        "tokens": torch.ones_like(ratio),
        "entropy": entropy,
        "clipped": _clipped(algo, ratio, tokens.advantages),
        "truncated": (correction >= algo.correction_cap) & truncates,
        "dropped": correction == 0,
        "weight": correction,
        "weight_squared": correction.square(),
        "ratio": ratio,
        "k1": -delta,
        "k3": rho - 1 - delta,
        "rho_squared": rho.square(),
    }
    return {name: torch.where(tokens.mask, values.double(), 0.0).sum() for name, values in columns.items()}


def _clipped(algo: AlgoConfig, ratio: Tensor, advantages: Tensor) -> Tensor:
    """[T] Where the clip takes effect: the gradient is 0, or for `cispo` the weight is that of the bound."""
    above, below = ratio > 1 + algo.clip_high, ratio < 1 - algo.clip_low
    match algo.surrogate:
        case Surrogate.ppo | Surrogate.gspo:
            return ((advantages > 0) & above) | ((advantages < 0) & below)
        case Surrogate.cispo:
            return above | below
        case _:
            return torch.zeros_like(above)


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
