"""The losses of the models beside the policy: the critic's, and the implicit reward model's. With what is to be known of them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from algos.ratios import clamped, sequence_sum


def value_loss(
    values: Tensor, before: Tensor, targets: Tensor, mask: Tensor, weights: Tensor, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """½ Σ a max((V − R)², (V' − R)²), V' = clip(V, V_before ± ε) (Schulman's PPO, 2017), of a microbatch; and its sums.

    Shapes: all [T]; `before` the values at the start of the step, `weights` a the aggregation's. None: no clip. Values where mask is
    false cannot matter, NaN included.
    """
    values, before, targets = (torch.where(mask, column, 0.0) for column in (values, before, targets))
    plain = (values - targets).square()
    clipped = (
        plain if clip is None else (torch.clamp(values, before - clip, before + clip) - targets).square()
    )
    loss = 0.5 * (torch.where(mask, weights, 0.0) * torch.maximum(plain, clipped)).sum()
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
    """`docs/metrics.md`. The explained variance is 1 − E(V − R)² / Var R; 0 where all targets are equal."""
    names = (
        "value_tokens",
        "value_error",
        "value_clipped",
        "value",
        "target",
        "target_squared",
        "value_loss",
    )
    total = {name: float(sums[name]) for name in names}
    n = max(total["value_tokens"], 1.0)
    variance = total["target_squared"] / n - (total["target"] / n) ** 2
    return {
        "critic/loss": total["value_loss"],
        "critic/value_mean": total["value"] / n,
        "critic/target_mean": total["target"] / n,
        "critic/clip_fraction": total["value_clipped"] / n,
        "critic/explained_variance": 1 - total["value_error"] / n / variance if variance > 1e-12 else 0.0,
    }


def implicit_rewards(logprobs: Tensor, reference: Tensor, beta: float) -> Tensor:
    """[T] r_t = β (log π_φ − log π_ref) (PRIME; Cui et al., 2025)."""
    return beta * clamped(logprobs - reference)


def implicit_reward_loss(
    logprobs: Tensor,
    reference: Tensor,
    outcomes: Tensor,
    mask: Tensor,
    sequence: Tensor,
    num_sequences: int,
    beta: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of σ(Σ_t r_t) against the outcome, a mean over `num_sequences` of the minibatch; and its sums (PRIME).

    Shapes: logprobs, reference, mask, sequence [T]; outcomes [T], of each token's sequence, within [0, 1]. Sequences without a
    sampled token add nothing.
    """
    rewards = torch.where(mask, implicit_rewards(logprobs, reference, beta), 0.0)
    length = sequence_sum(torch.ones_like(rewards), mask, sequence)
    share = torch.where(mask, 1 / length.clamp(min=1), 0.0)  # so that each sequence counts once
    logits = sequence_sum(rewards, mask, sequence)
    outcomes = torch.where(mask, outcomes, 0.0).to(logits.dtype)
    loss = (
        share * F.binary_cross_entropy_with_logits(logits, outcomes, reduction="none")
    ).sum() / num_sequences
    with torch.no_grad():
        right = (logits > 0) == (outcomes > 0.5)
        sums = {
            "outcomes": share.double().sum(),
            "outcomes_right": (share * right).double().sum(),
            "reward_model_loss": loss.detach().double(),
        }
    return loss, sums


def summarize_rewards(sums: dict[str, Tensor]) -> dict[str, float]:
    return {
        "reward_model/loss": float(sums["reward_model_loss"]),
        "reward_model/accuracy": float(sums["outcomes_right"]) / max(1.0, float(sums["outcomes"])),
    }
