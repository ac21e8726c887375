"""Advantages along a sequence: returns, generalized advantage estimation, V-trace.

Sequences are packed: T tokens in all, and sequence i begins at `offsets[i]` (offsets [N + 1]). Only sampled
tokens are actions. Tokens that an environment wrote between them (a tool's answer, the next turn) are passed
over: the action after them counts as if it followed at once.

Shapes everywhere: columns [T], sampled [T] bool, offsets [N + 1] int64. Results are [T], 0 where not sampled.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from algos.ratios import clamp_log_ratio

LARGEST = 1e100
"""Bound on products of trace coefficients and on targets, so that both stay finite where coefficients are
above 1."""


@dataclass(frozen=True, slots=True)
class Actions:
    """The sampled tokens alone, n of them, sequence after sequence."""

    index: Tensor
    """[n] int64: place of each action among the T tokens"""
    owner: Tensor
    """[n] int64: index of its sequence"""
    last: Tensor
    """[n] bool: the last action of its sequence"""
    longest: int
    """Number of actions of the longest sequence"""

    @classmethod
    def find(cls, sampled: Tensor, offsets: Tensor) -> "Actions":
        numbers = torch.arange(len(offsets) - 1, device=sampled.device)
        sequence = torch.repeat_interleave(numbers, offsets.diff())
        index = sampled.nonzero()[:, 0]
        owner = sequence[index]
        last = torch.ones_like(index, dtype=torch.bool)
        last[:-1] = owner[1:] != owner[:-1]
        return cls(index, owner, last, int(torch.bincount(owner).max()) if len(owner) else 0)

    def take_column(self, column: Tensor) -> Tensor:
        """Returns the values [n] of a column [T] at the actions, in float64."""
        return column[self.index].double()

    def take_next(self, values: Tensor) -> Tensor:
        """Returns at each action the value [n] of the action after it; 0 after the last."""
        return torch.where(self.last, 0.0, values.roll(-1))

    def spread_values(self, values: Tensor, like: Tensor) -> Tensor:
        """Returns a column [T] in the dtype of `like` with the values [n] at their tokens, 0 elsewhere."""
        return torch.zeros_like(like).index_copy(0, self.index, values.to(like.dtype))


def _solve_targets(
    actions: Actions, reward: Tensor, value: Tensor, rho: Tensor, c: Tensor, gamma: float
) -> Tensor:
    """Returns [n] v_t = V_t + x_t, with x_t = δ_t + γ c_t x_{t+1} and δ_t = ρ_t (r_t + γ V_{t+1} − V_t).

    The recurrence is solved for all actions at once: after k rounds x holds the terms of the next 2^k
    actions.
    """
    x = rho * (reward + gamma * actions.take_next(value) - value)
    a = torch.where(actions.last, 0.0, gamma * c)
    step = 1
    while step < actions.longest:
        # Multiplying by a = 0 would not do: 0 × NaN would carry another sequence's NaN into this one.
        linked = a[:-step] != 0
        x[:-step] = (x[:-step] + torch.where(linked, a[:-step] * x[step:], 0.0)).clamp(-LARGEST, LARGEST)
        a[:-step] = torch.where(linked, a[:-step] * a[step:], 0.0).clamp(max=LARGEST)
        a[-step:] = 0.0
        step *= 2
    return value + x


def discount_returns(rewards: Tensor, sampled: Tensor, offsets: Tensor, gamma: float = 1.0) -> Tensor:
    """Return from each sampled token on: G_t = r_t + γ G_{t+1}. `rewards` is 0 where none is given."""
    return gae(rewards, torch.zeros_like(rewards), sampled, offsets, gamma, 1.0)[1]


def gae(
    rewards: Tensor, values: Tensor, sampled: Tensor, offsets: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (GAE; Schulman et al., 2016, arXiv 1506.02438).

    δ_t = r_t + γ V_{t+1} − V_t;  A_t = δ_t + γ λ A_{t+1};  the value after the last sampled token is 0.

    Returns (advantages A, returns A + V). `lam` is one number, or one for each sequence [N]
    (`length_adaptive_lambda`).
    """
    actions = Actions.find(sampled, offsets)
    value = actions.take_column(values)
    lam = torch.as_tensor(lam, dtype=torch.float64, device=values.device)
    c = lam[actions.owner] if lam.ndim else lam.expand_as(value)
    targets = _solve_targets(actions, actions.take_column(rewards), value, torch.ones_like(value), c, gamma)
    return actions.spread_values(targets - value, values), actions.spread_values(targets, values)


def find_turns(sampled: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of each sampled token's turn, and whether the token is its first (bool).

    A turn is a run of tokens that a sequence sampled without a break. Numbers count up from 0 over all
    sequences; they mean nothing where not sampled.
    """
    before = torch.cat([sampled.new_zeros(1), sampled[:-1]])
    before[offsets[:-1][offsets[:-1] < len(sampled)]] = False
    first = sampled & ~before
    return (first.cumsum(0) - 1).clamp(min=0), first


def turn_gae(
    rewards: Tensor, values: Tensor, sampled: Tensor, offsets: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """GAE whose actions are turns. Arguments and results as `gae`.

    The reward of a turn is the sum of the rewards of its tokens, and its value is that of its first token.
    All tokens of a turn get its advantage and its return.
    """
    turn, first = find_turns(sampled, offsets)
    total = torch.zeros(int(first.sum()), dtype=torch.float64, device=sampled.device)
    total = total.index_add(0, turn[sampled], rewards[sampled].double())
    turn_rewards = torch.zeros_like(values, dtype=torch.float64).masked_scatter(first, total)
    of_first_tokens = gae(turn_rewards, values.double(), first, offsets, gamma, lam)
    advantages, returns = (
        torch.where(sampled, column[first][turn], 0.0) if len(total) else column for column in of_first_tokens
    )
    return advantages.to(values.dtype), returns.to(values.dtype)


def length_adaptive_lambda(lengths: Tensor, alpha: float = 0.05) -> Tensor:
    """λ = 1 − 1 / (α · length) of each sequence (VAPO; Yue et al., 2025, arXiv 2504.05118), within [0, 1].

    A reward at the end of a long sequence reaches its first token too. Shapes: lengths [N] in sampled tokens
    -> [N].
    """
    return (1 - 1 / (alpha * lengths.double().clamp(min=1))).clamp(0, 1)


def vtrace(
    rewards: Tensor,
    values: Tensor,
    log_ratio: Tensor,
    sampled: Tensor,
    offsets: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """V-trace (Espeholt et al., 2018, arXiv 1802.01561). log_ratio is log π − log μ.

    ρ_t = min(ρ̄, π/μ);  c_t = λ min(c̄, π/μ);  δ_t = ρ_t (r_t + γ V_{t+1} − V_t);
    v_t = V_t + δ_t + γ c_t (v_{t+1} − V_{t+1}).

    Returns (advantages ρ_t (r_t + γ v_{t+1} − V_t), targets v_t of the critic).
    """
    actions = Actions.find(sampled, offsets)
    reward, value = actions.take_column(rewards), actions.take_column(values)
    ratio = clamp_log_ratio(actions.take_column(log_ratio)).exp()
    rho, c = ratio.clamp(max=rho_bar), lam * ratio.clamp(max=c_bar)
    targets = _solve_targets(actions, reward, value, rho, c, gamma)
    advantages = rho * (reward + gamma * actions.take_next(targets) - value)
    return actions.spread_values(advantages, values), actions.spread_values(targets, values)
