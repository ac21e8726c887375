"""Advantages along an episode: returns, generalized advantage estimation, V-trace.

Episodes are packed: T tokens in all, and episode i begins at `offsets[i]` (offsets [N + 1]). Only sampled
tokens are actions. Tokens that an environment wrote between them (a tool's answer, the next turn) are passed
over: the action after them counts as if it followed at once. With `turns`, the number of each sampled token's
turn within its episode, actions follow one another by turn, and within a turn by place: the branches of an
episode may interleave. Without, by place.

Shapes everywhere: columns [T], sampled [T] bool, offsets [N + 1] int64, turns [T] int. Results are [T], 0
where not sampled.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from algos.ratios import clamp_log_ratio

LARGEST = 1e100
"""Bound on products of trace coefficients and on targets, so that both stay finite where coefficients are
above 1."""
MOST_TURNS = 1 << 16
"""More than an episode can have turns, which are counted in 16 bits."""


@dataclass(frozen=True, slots=True)
class Actions:
    """The sampled tokens alone, n of them, episode after episode, in the order in which they count."""

    index: Tensor
    """[n] int64: place of each action among the T tokens"""
    owner: Tensor
    """[n] int64: index of its episode"""
    last: Tensor
    """[n] bool: the last action of its episode"""
    begins_turn: Tensor
    """[n] bool: the first action of its turn"""
    longest: int
    """Number of actions of the longest episode"""

    @classmethod
    def find(cls, sampled: Tensor, offsets: Tensor, turns: Tensor | None = None) -> "Actions":
        """Returns the actions of packed episodes. Without `turns`, a turn is a run of sampled tokens."""
        numbers = torch.arange(len(offsets) - 1, device=sampled.device)
        index = sampled.nonzero()[:, 0]
        owner = torch.repeat_interleave(numbers, offsets.diff())[index]
        if turns is None:
            # The number of the tokens before a run that were not sampled is the run's own.
            turn = index - torch.arange(len(index), device=index.device)
        else:
            turn = turns[index].long()
            key = owner * MOST_TURNS + turn
            if bool((key[1:] < key[:-1]).any()):
                order = torch.argsort(key, stable=True)
                index, turn = index[order], turn[order]
        last = _find_last(owner)
        begins_turn = torch.ones_like(last)
        begins_turn[1:] = last[:-1] | (turn[1:] != turn[:-1])
        return cls(index, owner, last, begins_turn, _find_longest(owner))

    @property
    def turn(self) -> Tensor:
        """[n] int64: number of each action's turn, from 0 over all episodes."""
        return self.begins_turn.cumsum(0) - 1

    @property
    def turn_owners(self) -> Tensor:
        """[m] int64: index of each turn's episode."""
        return self.owner[self.begins_turn]

    def count_turns(self, num_episodes: int) -> Tensor:
        """Returns [N] int64 the number of turns of each episode."""
        return torch.bincount(self.turn_owners, minlength=num_episodes)

    def find_longest_turns(self, num_episodes: int) -> Tensor:
        """Returns [N] int64 the number of actions of each episode's longest turn; 0 where it has none."""
        lengths = torch.bincount(self.turn)
        none = torch.zeros(num_episodes, dtype=torch.int64, device=lengths.device)
        return none.scatter_reduce(0, self.turn_owners, lengths, "amax")

    def keep_first(self) -> "Actions":
        """Returns the first action of each turn alone, as if it were the whole turn."""
        index, owner = self.index[self.begins_turn], self.turn_owners
        every = torch.ones_like(owner, dtype=torch.bool)
        return Actions(index, owner, _find_last(owner), every, _find_longest(owner))

    def take_column(self, column: Tensor) -> Tensor:
        """Returns the values [n] of a column [T] at the actions, in float64."""
        return column[self.index].double()

    def take_next(self, values: Tensor) -> Tensor:
        """Returns at each action the value [n] of the action after it; 0 after the last."""
        return torch.where(self.last, 0.0, values.roll(-1))

    def spread_values(self, values: Tensor, like: Tensor) -> Tensor:
        """Returns a column [T] in the dtype of `like` with the values [n] at their tokens, 0 elsewhere."""
        return torch.zeros_like(like).index_copy(0, self.index, values.to(like.dtype))


def _find_last(owner: Tensor) -> Tensor:
    """Returns [n] bool: the last action of its episode, from the index [n] of each action's episode."""
    last = torch.ones_like(owner, dtype=torch.bool)
    last[:-1] = owner[1:] != owner[:-1]
    return last


def _find_longest(owner: Tensor) -> int:
    """Returns the number of actions of the longest episode."""
    return int(torch.bincount(owner).max()) if len(owner) else 0


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
        # Multiplying by a = 0 would not do: 0 × NaN would carry another episode's NaN into this one.
        linked = a[:-step] != 0
        x[:-step] = (x[:-step] + torch.where(linked, a[:-step] * x[step:], 0.0)).clamp(-LARGEST, LARGEST)
        a[:-step] = torch.where(linked, a[:-step] * a[step:], 0.0).clamp(max=LARGEST)
        a[-step:] = 0.0
        step *= 2
    return value + x


def discount_returns(
    rewards: Tensor, sampled: Tensor, offsets: Tensor, gamma: float = 1.0, turns: Tensor | None = None
) -> Tensor:
    """Return from each sampled token on: G_t = r_t + γ G_{t+1}. `rewards` is 0 where none is given."""
    return gae(rewards, torch.zeros_like(rewards), sampled, offsets, gamma, 1.0, turns)[1]


def gae(
    rewards: Tensor,
    values: Tensor,
    sampled: Tensor,
    offsets: Tensor,
    gamma: float,
    lam: float | Tensor,
    turns: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (GAE; Schulman et al., 2016, arXiv 1506.02438).

    δ_t = r_t + γ V_{t+1} − V_t;  A_t = δ_t + γ λ A_{t+1};  the value after the last sampled token is 0.

    Returns (advantages A, returns A + V). `lam` is one number, or one for each episode [N]
    (`length_adaptive_lambda`).
    """
    actions = Actions.find(sampled, offsets, turns)
    value = actions.take_column(values)
    targets = _estimate_targets(actions, actions.take_column(rewards), value, gamma, lam)
    return actions.spread_values(targets - value, values), actions.spread_values(targets, values)


def _estimate_targets(
    actions: Actions, reward: Tensor, value: Tensor, gamma: float, lam: float | Tensor
) -> Tensor:
    """Returns [n] the returns A + V of `gae`."""
    lam = torch.as_tensor(lam, dtype=torch.float64, device=value.device)
    c = lam[actions.owner] if lam.ndim else lam.expand_as(value)
    return _solve_targets(actions, reward, value, torch.ones_like(value), c, gamma)


def turn_gae(
    rewards: Tensor,
    values: Tensor,
    sampled: Tensor,
    offsets: Tensor,
    gamma: float,
    lam: float | Tensor,
    turns: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GAE whose actions are turns. Arguments and results as `gae`.

    The reward of a turn is the sum of the rewards of its tokens, and its value is that of its first token.
    All tokens of a turn get its advantage and its return.
    """
    actions = Actions.find(sampled, offsets, turns)
    whole, turn = actions.keep_first(), actions.turn
    value = whole.take_column(values)
    reward = torch.zeros_like(value).index_add(0, turn, actions.take_column(rewards))
    targets = _estimate_targets(whole, reward, value, gamma, lam)
    return (
        actions.spread_values((targets - value)[turn], values),
        actions.spread_values(targets[turn], values),
    )


def length_adaptive_lambda(lengths: Tensor, alpha: float = 0.05) -> Tensor:
    """λ = 1 − 1 / (α · length) of each episode (VAPO; Yue et al., 2025, arXiv 2504.05118), within [0, 1].

    A reward at the end of a long episode reaches its first token too. Shapes: lengths [N] in sampled tokens
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
    turns: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """V-trace (Espeholt et al., 2018, arXiv 1802.01561). log_ratio is log π − log μ.

    ρ_t = min(ρ̄, π/μ);  c_t = λ min(c̄, π/μ);  δ_t = ρ_t (r_t + γ V_{t+1} − V_t);
    v_t = V_t + δ_t + γ c_t (v_{t+1} − V_{t+1}).

    Returns (advantages ρ_t (r_t + γ v_{t+1} − V_t), targets v_t of the critic).
    """
    actions = Actions.find(sampled, offsets, turns)
    reward, value = actions.take_column(rewards), actions.take_column(values)
    ratio = clamp_log_ratio(actions.take_column(log_ratio)).exp()
    rho, c = ratio.clamp(max=rho_bar), lam * ratio.clamp(max=c_bar)
    targets = _solve_targets(actions, reward, value, rho, c, gamma)
    advantages = rho * (reward + gamma * actions.take_next(targets) - value)
    return actions.spread_values(advantages, values), actions.spread_values(targets, values)
