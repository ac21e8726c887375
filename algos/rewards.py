"""Rewards before they become advantages: shaped, normalized, paid by turn, and episodes drawn again."""

import torch
from torch import Tensor


def soft_overlong_penalty(lengths: Tensor, max_tokens: int, cache: float) -> Tensor:
    """DAPO's soft overlong punishment (Yu et al., 2025, arXiv 2503.14476), to be added to the rewards.

    0 up to max_tokens − cache, then falling linearly to −1 at max_tokens, at which a reply is cut off. An
    episode of several turns is judged by the longest of its replies. Shapes: lengths [N] in sampled tokens ->
    [N].
    """
    return (-(lengths - (max_tokens - cache)) / cache).clamp(min=-1.0, max=0.0)


def charge_kl(rewards: Tensor, kl: Tensor, coefficient: float, sampled: Tensor, last: Tensor) -> Tensor:
    """Rewards of tokens: −β KL_t at each sampled token, and the episode's reward at its last one.

    Source: Ziegler et al., 2019, arXiv 1909.08593. Shapes: rewards [N], kl [T] (an estimate of KL(π ‖ π_ref)
    at each token, `algos.kl`), sampled [T] bool, last [N] (index of each episode's last sampled token) ->
    [T].
    """
    token_rewards = torch.where(sampled, -coefficient * kl, 0.0)
    return token_rewards.index_add(0, last, rewards.to(token_rewards.dtype))


def pay_by_turn(
    token_rewards: Tensor, paid: Tensor, sampled: Tensor, sequence: Tensor, last: Tensor
) -> Tensor:
    """Rewards of tokens, with what the episode's turns were paid taken from its last sampled token to where
    it was paid.

    r_t + p_t, and at the last one r_t + p_t − Σ p over the episode: the sum over an episode stays the same,
    and what shaping added to its reward stays at its end.

    Shapes: token_rewards [T] (as `charge_kl` gives them), paid p [T], sampled [T] bool, sequence [T] int64
    (index of each token's episode), last [N] -> [T]. What was paid at a token that was not sampled stays at
    the end.
    """
    moved = torch.where(sampled, paid, 0.0).double()
    total = torch.zeros(len(last), dtype=torch.float64, device=moved.device).index_add_(0, sequence, moved)
    return (token_rewards + moved.index_add(0, last, -total)).to(token_rewards.dtype)


def normalize_rewards(rewards: Tensor, clip: float | None = None) -> Tensor:
    """(R − mean) / std over the batch, within ± `clip`. Shapes: [N] -> [N]. Equal rewards give 0."""
    centered = rewards.double() - rewards.double().mean()
    std = centered.square().mean().sqrt()
    scaled = torch.where(std > 0, centered / std.clamp(min=1e-12), 0.0).to(rewards.dtype)
    return scaled if clip is None else scaled.clamp(-clip, clip)


def draw_by_score(scores: Tensor, power: float, generator: torch.Generator) -> Tensor:
    """Policy filtration (PF-PPO; Shen et al., 2024, arXiv 2409.06957): how often each episode is drawn.

    N draws with replacement, in proportion to |score|^power + 1e-8. Shapes: scores [N] -> [N] float32.
    """
    shares = scores.abs().double().pow(power) + 1e-8
    drawn = torch.multinomial(shares, len(scores), replacement=True, generator=generator)
    return torch.bincount(drawn, minlength=len(scores)).float()
