"""Losses and figures of the models beside the policy: the critic and the implicit reward model."""

import torch
import torch.nn.functional as F
from torch import Tensor

from algos.ratios import clamp_log_ratio, sum_by_sequence


def value_loss(
    values: Tensor,
    old_values: Tensor,
    targets: Tensor,
    mask: Tensor,
    aggregation_weights: Tensor,
    clip: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped squared error of the critic (as in PPO's code; Schulman et al., 2017, arXiv 1707.06347).

    L = ½ Σ_t a_t max((V − R)², (V' − R)²), V' = clip(V, V_old ± ε); `clip` = None: no clip.

    a are the aggregation weights, whose denominator counts the trained tokens of the whole minibatch. V_old
    are the values at the start of the step.

    Shapes: all [T] -> (scalar, sums for `summarize_values`, detached). Values where mask is false cannot
    matter, NaN included.
    """
    values, old_values, targets = (torch.where(mask, column, 0.0) for column in (values, old_values, targets))
    plain = clipped = (values - targets).square()
    if clip is not None:
        clipped = (torch.clamp(values, old_values - clip, old_values + clip) - targets).square()
    loss = 0.5 * (torch.where(mask, aggregation_weights, 0.0) * torch.maximum(plain, clipped)).sum()
    with torch.no_grad():
        columns = {
            "value_tokens": mask,
            "value_error": plain,
            "value_clipped": clipped > plain,
            "value": values,
            "target": targets,
            "target_squared": targets.square(),
        }
        sums = {name: torch.where(mask, column.double(), 0.0).sum() for name, column in columns.items()}
        sums["value_loss"] = loss.detach().double()
    return loss, sums


def summarize_values(sums: dict[str, Tensor]) -> dict[str, float]:
    """Returns the critic's figures of a step from the sums over all its tokens: `docs/metrics.md`.

    The explained variance is 1 − E(V − R)² / Var R; 0 where all targets are equal.
    """
    num_tokens = max(float(sums["value_tokens"]), 1.0)
    names = ("value_error", "value_clipped", "value", "target", "target_squared")
    mean = {name: float(sums[name]) / num_tokens for name in names}
    variance = mean["target_squared"] - mean["target"] ** 2
    return {
        "critic/loss": float(sums["value_loss"]),
        "critic/value_mean": mean["value"],
        "critic/target_mean": mean["target"],
        "critic/clip_fraction": mean["value_clipped"],
        "critic/explained_variance": 1 - mean["value_error"] / variance if variance > 1e-12 else 0.0,
    }


def implicit_rewards(logprobs: Tensor, reference_logprobs: Tensor, beta: float) -> Tensor:
    """Implicit rewards of tokens (PRIME; Cui et al., 2025, arXiv 2502.01456).

    r_t = β (log π_φ − log π_ref). Shapes: [T], [T] -> [T].
    """
    return beta * clamp_log_ratio(logprobs - reference_logprobs)


def implicit_reward_loss(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    outcomes: Tensor,
    sampled: Tensor,
    sequence: Tensor,
    num_sequences: int,
    beta: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of σ(Σ_t r_t) against the outcome of the sequence (PRIME; Cui et al., 2025).

    Source: arXiv 2502.01456. The denominator is `num_sequences`, all sequences of the minibatch; those
    without a sampled token add nothing.

    Shapes: logprobs, reference_logprobs, sampled (bool), sequence [T]; outcomes [T], of each token's
    sequence, within [0, 1] -> (scalar, sums for `summarize_rewards`, detached).
    """
    rewards = torch.where(sampled, implicit_rewards(logprobs, reference_logprobs, beta), 0.0)
    length = sum_by_sequence(torch.ones_like(rewards), sampled, sequence)
    # Each token carries its share of its sequence, so that each sequence counts once.
    share = torch.where(sampled, 1 / length.clamp(min=1), 0.0)
    logits = sum_by_sequence(rewards, sampled, sequence)
    outcomes = torch.where(sampled, outcomes, 0.0).to(logits.dtype)
    cross_entropy = F.binary_cross_entropy_with_logits(logits, outcomes, reduction="none")
    loss = (share * cross_entropy).sum() / num_sequences
    with torch.no_grad():
        is_right = (logits > 0) == (outcomes > 0.5)
        sums = {
            "outcomes": share.double().sum(),
            "outcomes_right": (share * is_right).double().sum(),
            "reward_model_loss": loss.detach().double(),
        }
    return loss, sums


def summarize_rewards(sums: dict[str, Tensor]) -> dict[str, float]:
    """Returns the reward model's figures of a step from the sums over all its tokens: `docs/metrics.md`."""
    return {
        "reward_model/loss": float(sums["reward_model_loss"]),
        "reward_model/accuracy": float(sums["outcomes_right"]) / max(1.0, float(sums["outcomes"])),
    }
