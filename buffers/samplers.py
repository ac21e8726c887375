"""Samplers choose which complete groups a step trains, where there is a choice.

A sampler chooses among candidates: complete groups that have been trained fewer than `buffer.max_uses` times
and are within the staleness bound at this step. The bound therefore holds for every sampler. `buffer.sampler`
names one of those below, or `module:Class` from a file of your own; `buffer.sampler_args` are its keyword
arguments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from buffers.events import Accepted
from configs.plugins import make_plugin


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Columns [N] of the groups to choose from, ordered by due step, then number."""

    group: np.ndarray
    """int64: number of the group."""
    due: np.ndarray
    """int64: step that the group is due at."""
    uses: np.ndarray
    """int64: steps that have trained the group."""
    oldest: np.ndarray
    """int64: oldest version that sampled one of its tokens."""
    newest: np.ndarray
    """int64: newest version that sampled one of its tokens."""
    tokens: np.ndarray
    """int64: sampled tokens."""
    reward_mean: np.ndarray
    """float64: mean reward of its samples."""
    reward_std: np.ndarray
    """float64: standard deviation (population) of the rewards of its samples."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The groups that a sampler chooses."""

    rows: np.ndarray
    """[count] int64: distinct rows of the candidates."""
    group_weights: np.ndarray
    """[count] float64: importance weight of each group, a factor on its loss, at most 1; 1 where the
    choice is unbiased."""


class Sampler(Protocol):
    def choose(self, candidates: Candidates, count: int, rng: np.random.Generator) -> Choice:
        """Chooses `count` of at least as many candidates.

        `rng` is seeded by the run's seed and the step, so that a restart chooses the same.
        """
        ...


class Fifo:
    """Chooses the oldest groups: the due step decides, then the number."""

    def choose(self, candidates: Candidates, count: int, rng: np.random.Generator) -> Choice:
        return _choose_unweighted(np.arange(count))


class Freshest:
    """Chooses the groups with the newest tokens; among equals those that were trained least, then the
    latest due."""

    def choose(self, candidates: Candidates, count: int, rng: np.random.Generator) -> Choice:
        order = np.lexsort((-candidates.group, -candidates.due, candidates.uses, -candidates.newest))
        return _choose_unweighted(order[:count])


class Prioritized:
    """Draws groups in proportion to a column's power, without replacement, with importance weights.

    Prioritized experience replay (Schaul et al., 2016, arXiv:1511.05952):

    P(i) ∝ (|column_i| + epsilon)^alpha, weight_i = (N · P(i))^-beta, divided by the largest of the batch.
    Exponential keys draw without replacement (Efraimidis and Spirakis, 2006). The weights are those of
    drawing with replacement, which is exact for a batch that is small beside the pool.
    """

    def __init__(
        self, column: str = "reward_std", alpha: float = 0.6, beta: float = 0.4, epsilon: float = 1e-2
    ) -> None:
        known = [f.name for f in fields(Candidates)]
        if column not in known:
            raise ValueError(f"column must be one of {known}, got {column!r}")
        if not (alpha >= 0 and 0 <= beta <= 1 and epsilon > 0):
            raise ValueError(
                f"alpha must be >= 0, beta in [0, 1], epsilon > 0, got {alpha}, {beta}, {epsilon}"
            )
        self._column, self._alpha, self._beta, self._epsilon = column, alpha, beta, epsilon

    def choose(self, candidates: Candidates, count: int, rng: np.random.Generator) -> Choice:
        priority = (np.abs(getattr(candidates, self._column).astype(float)) + self._epsilon) ** self._alpha
        share = priority / priority.sum()
        rows = np.argsort(rng.exponential(size=len(share)) / share, kind="stable")[:count]
        group_weights = (len(share) * share[rows]) ** -self._beta
        return Choice(rows, group_weights / group_weights.max())


class RewardBalanced:
    """Chooses evenly over the range of rewards: `bins` of equal width divide the candidates by mean reward
    and take turns."""

    def __init__(self, bins: int = 4) -> None:
        if bins < 1:
            raise ValueError(f"bins must be at least 1, got {bins}")
        self._bins = bins

    def choose(self, candidates: Candidates, count: int, rng: np.random.Generator) -> Choice:
        low, high = candidates.reward_mean.min(), candidates.reward_mean.max()
        width = (high - low) / self._bins or 1.0
        bins = np.minimum((candidates.reward_mean - low) // width, self._bins - 1)
        turn = np.empty(len(bins), np.int64)
        for number in np.unique(bins):
            inside = np.flatnonzero(bins == number)
            turn[inside] = np.arange(len(inside))  # oldest first within a bin
        order = np.lexsort((rng.permutation(len(bins)), turn))
        return _choose_unweighted(order[:count])


SAMPLERS: Mapping[str, type[Sampler]] = {
    "fifo": Fifo,
    "freshest": Freshest,
    "prioritized": Prioritized,
    "reward_balanced": RewardBalanced,
}


def load_sampler(name: str, args: Mapping[str, Any]) -> Sampler:
    """Returns the sampler that `buffer.sampler` names.

    Raises ValueError that names `buffer.sampler` or `buffer.sampler_args`, the rule and the value.
    """
    known = {short: f"{one.__module__}:{one.__name__}" for short, one in SAMPLERS.items()}
    sampler: Sampler = make_plugin(name, args, known, "buffer.sampler", "buffer.sampler_args")
    return sampler


def draw_groups(
    sampler: Sampler, contents: Sequence[Accepted], uses: Sequence[int], count: int, rng: np.random.Generator
) -> tuple[list[int], list[float]]:
    """Returns (rows, group weights) that the sampler chooses among groups in order of due step and number.

    Raises ValueError when it chooses rows that are not `count` distinct ones, or weights that are not finite
    and >= 0.
    """
    columns = {
        name: np.array([getattr(content, name) for content in contents])
        for name in ("group", "due", "oldest", "newest", "tokens", "reward_mean", "reward_std")
    }
    choice = sampler.choose(Candidates(uses=np.array(uses), **columns), count, rng)
    rows, group_weights = np.asarray(choice.rows), np.asarray(choice.group_weights, dtype=float)
    distinct = (
        len(rows) == count == len(set(rows.tolist())) and rows.min() >= 0 and rows.max() < len(contents)
    )
    if not (
        distinct
        and len(group_weights) == count
        and np.isfinite(group_weights).all()
        and (group_weights >= 0).all()
    ):
        raise ValueError(
            f"buffer.sampler must choose {count} distinct rows of {len(contents)}, with finite weights >= 0, "
            f"got rows {rows.tolist()} and weights {group_weights.tolist()} from {type(sampler).__name__}"
        )
    return rows.tolist(), group_weights.tolist()


def _choose_unweighted(rows: np.ndarray) -> Choice:
    return Choice(rows, np.ones(len(rows)))
