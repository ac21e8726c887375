"""A step's batch with all that its losses take as given, and the pure functions that make it. No model is
asked here."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from algos import kl
from algos.advantages import AdvantageInputs
from algos.aggregation import compute_aggregation_weights
from algos.returns import Actions
from algos.rewards import charge_kl, draw_by_score, normalize_rewards, pay_by_turn, soft_overlong_penalty
from configs.algo import Aggregation, AlgoConfig
from configs.schema import Config
from learners.packing import Batch

MAX_FIGURE = 200
"""Characters in a figure's name; the buffer refuses longer ones."""


@dataclass(slots=True, kw_only=True)
class PreparedBatch:
    """A step's batch before its first update. Columns [T], flat, of the whole batch of N episodes."""

    batch: Batch
    step: int
    """Version of the weights that are held, which is the number of the step"""
    sequence: Tensor
    """[T] int64: index of each token's episode"""
    admissible: Tensor
    """[T] bool: sampled tokens whose staleness is within `max_versions`"""
    mask: Tensor
    """[T] bool: the admissible tokens that are trained"""
    sequence_counts: Tensor
    """[N] how often each episode counts: its group's weight times the draws of PF-PPO"""
    proximal_logprobs: Tensor | None
    """[T] log π_p; None: those of the one update's own forward pass"""
    reference_logprobs: Tensor | None
    """[T] log π_ref; None where nothing needs a reference"""
    advantages: Tensor
    """[T]"""
    values: Tensor | None
    """[T] the critic's values before its first update; None without a critic"""
    value_targets: Tensor | None
    """[T] what the critic learns; None without a critic"""
    metrics: dict[str, float]
    """Figures of the reward model, which is trained before the advantages are known; empty without one"""

    def mark_rows(self, rows: list[int]) -> Tensor:
        """Returns [T] bool: the tokens of these episodes."""
        chosen = torch.zeros(self.batch.num_sequences, dtype=torch.bool)
        chosen[rows] = True
        return chosen[self.sequence]

    def has_trained_tokens(self, rows: list[int]) -> bool:
        """True when a token of these episodes is trained: without one, an optimizer's momentum would
        still move weights."""
        trained = self.mask & self.mark_rows(rows) & (self.sequence_counts > 0)[self.sequence]
        return bool(trained.any())

    def weigh_token_mean(self, mask: Tensor) -> Tensor:
        """Returns [T] the weights of a mean over the tokens of the mask, each as often as its episode
        counts."""
        return compute_aggregation_weights(
            Aggregation.token_mean, mask, self.sequence, self.batch.num_sequences,
            sequence_counts=self.sequence_counts,
        )  # fmt: skip

    def weigh_minibatch(self, config: Config, rows: list[int], num_minibatches: int) -> Tensor:
        """Returns [T] the aggregation weights of the minibatch that holds these episodes.

        Means over sequences divide by all episodes of the batch; the factor makes it those of a minibatch.
        """
        algo = config.algo
        weights = compute_aggregation_weights(
            algo.aggregation,
            self.mask & self.mark_rows(rows),
            self.sequence,
            self.batch.num_sequences,
            config.sampling.max_tokens if algo.horizon is None else algo.horizon,
            self.sequence_counts,
        )
        return weights if algo.aggregation is Aggregation.token_mean else weights * num_minibatches

    def weigh_imitation(self, algo: AlgoConfig, rows: list[int]) -> Tensor | None:
        """Returns [T] the weights of the tokens of a minibatch's good samples, 0 elsewhere; None without
        imitation."""
        if not algo.imitation_coef:
            return None
        is_good = (self.batch.rewards > algo.imitation_above)[self.sequence]
        return self.weigh_token_mean(self.mask & self.mark_rows(rows) & is_good)

    def describe_batch(self) -> dict[str, float]:
        """Returns the batch's figures: rewards, lengths, staleness."""
        batch, admissible = self.batch, self.admissible
        staleness = (self.step - batch.versions[admissible]).double()
        sampled = np.add.reduceat(batch.sampled.numpy().astype(np.int64), batch.offsets[:-1])
        components = {f"reward/{name}"[:MAX_FIGURE]: mean for name, mean in batch.component_means.items()}
        # The reward's own figures come later, so a component of such a name does not hide them.
        return (
            components
            | {
                "reward/mean": float(batch.rewards.mean()),
                "reward/std": float(batch.rewards.std()) if batch.num_sequences > 1 else 0.0,
                "length/mean": float(sampled.mean()),
                "length/max": float(sampled.max()),
                "length/truncated_fraction": float(batch.truncated.float().mean()),
                "staleness/mean": float(staleness.mean()) if len(staleness) else 0.0,
                "staleness/max": float(staleness.max()) if len(staleness) else 0.0,
                "staleness/masked_fraction": 1.0 - float(admissible.sum()) / max(1, int(batch.sampled.sum())),
            }
            | describe_episodes(batch)
        )


def find_actions(batch: Batch) -> Actions:
    """Returns the batch's sampled tokens in the order in which they count."""
    return Actions.find(batch.sampled, torch.from_numpy(batch.offsets), batch.turns)


def describe_episodes(batch: Batch) -> dict[str, float]:
    """Returns turns, branches and ends of the episodes; nothing where all have one turn and one branch."""
    is_plain = batch.turns is None or not len(batch.turns) or int(batch.turns.max()) <= 0
    if is_plain and batch.num_branches == batch.num_sequences:
        return {}
    num_turns = find_actions(batch).count_turns(batch.num_sequences)
    ends = {f"episode/stop/{word}": batch.stops.count(word) for word in sorted(set(batch.stops))}
    return {
        "episode/turns_mean": float(num_turns.double().mean()),
        "episode/branches_mean": batch.num_branches / batch.num_sequences,
        "episode/branched_share": float((np.diff(batch.first_branches) > 1).mean()),
    } | {name: count / batch.num_sequences for name, count in ends.items()}


def shape_rewards(config: Config, batch: Batch) -> Tensor:
    """Returns [N] the rewards after the overlong penalty, normalization and clip of `algo.reward`."""
    shaping, rewards = config.algo.reward, batch.rewards
    if shaping.overlong_share is not None:
        lengths = find_actions(batch).find_longest_turns(batch.num_sequences).float()
        longest = config.sampling.max_tokens
        rewards = rewards + soft_overlong_penalty(lengths, longest, shaping.overlong_share * longest)
    if shaping.normalize:
        rewards = normalize_rewards(rewards)
    return rewards if shaping.clip is None else rewards.clamp(-shaping.clip, shaping.clip)


def require_greedy_rewards(algo: AlgoConfig, batch: Batch) -> Tensor:
    """Returns [N] the rewards of the greedy responses, clipped like the others. Raises ValueError where
    one is missing."""
    missing = batch.greedy_rewards.isnan()
    if missing.any():
        raise ValueError(
            f"algo.advantage={algo.advantage} needs the reward of a greedy response with every group "
            "(generators make one when the run is started with it), got none with group "
            f"{int(batch.groups[missing][0])}"
        )
    clip = algo.reward.clip
    return batch.greedy_rewards if clip is None else batch.greedy_rewards.clamp(-clip, clip)


def make_advantage_inputs(
    config: Config,
    batch: Batch,
    kl_coef: float,
    *,
    mask: Tensor,
    proximal_logprobs: Tensor | None,
    reference_logprobs: Tensor | None,
    values: Tensor | None,
    process_rewards: Tensor | None,
) -> AdvantageInputs:
    """Returns what an advantage is computed from. `kl_coef` is the coefficient of the penalty in the reward.

    Columns [T] as in `PreparedBatch`; `process_rewards` [T] are those of the implicit reward model. Raises
    ValueError where a greedy response is needed and missing.
    """
    algo, sequence = config.algo, batch.sequence
    greedy_rewards = batch.greedy_rewards
    if algo.advantage.needs_greedy_response:
        greedy_rewards = require_greedy_rewards(algo, batch)
    penalty = torch.zeros(len(sequence))
    if algo.kl.reward_coef > 0:
        assert reference_logprobs is not None
        sampler_logprobs = batch.behavior_logprobs if proximal_logprobs is None else proximal_logprobs
        penalty = kl.ESTIMATORS[algo.kl.estimator](sampler_logprobs, reference_logprobs)
    # Episodes in which nothing was sampled get their reward at their first token, which belongs to them
    # alone.
    actions, last = find_actions(batch), torch.from_numpy(batch.offsets[:-1].copy())
    last[actions.owner[actions.last]] = actions.index[actions.last]
    token_rewards = charge_kl(shape_rewards(config, batch), penalty, kl_coef, batch.sampled, last)
    rewards = torch.zeros(batch.num_sequences).index_add_(0, sequence, token_rewards)
    if batch.token_rewards is not None:
        token_rewards = pay_by_turn(token_rewards, batch.token_rewards, batch.sampled, sequence, last)
    return AdvantageInputs(
        rewards=rewards,
        token_rewards=token_rewards,
        groups=batch.groups,
        offsets=torch.from_numpy(batch.offsets),
        sequence=sequence,
        sampled=batch.sampled,
        mask=mask,
        greedy_rewards=greedy_rewards,
        values=values,
        log_ratio=None if proximal_logprobs is None else proximal_logprobs - batch.behavior_logprobs,
        process_rewards=process_rewards,
        turns=batch.turns,
    )


def draw_sequence_counts(config: Config, batch: Batch, step: int) -> Tensor:
    """Returns [N] how often each episode counts. All ranks, and all repetitions of a step, draw the same."""
    power = config.algo.reward.filter_power
    if power is None:
        return batch.group_weights
    generator = torch.Generator().manual_seed(config.run.seed * 1_000_003 + step)
    return batch.group_weights * draw_by_score(batch.rewards, power, generator)


def interpolate_proximal(current_logprobs: Tensor, behavior_logprobs: Tensor, staleness: Tensor) -> Tensor:
    """Returns [T] log π_p between behavior and current policy (A-3PO, 2025; AReaL's `loglinear`).

    log π_p = (log μ + s log π_θ) / (s + 1), with s the staleness of the token. The update at hand makes
    version k + 1 of π_θ, π_p is version k, and μ version k − s. At s = 0 it is μ.
    """
    s = staleness.clamp(min=0)
    return (behavior_logprobs + s * current_logprobs) / (s + 1)


def adapt_kl_coefficient(algo: AlgoConfig, coefficient: float, measured: float, num_sequences: int) -> float:
    """Returns the KL coefficient of the next step; the same where it is constant, or where no KL could be
    measured."""
    target = algo.kl.target
    if target is None or not math.isfinite(measured):
        return coefficient
    return kl.adapt_coefficient(coefficient, measured, target, num_sequences, algo.kl.horizon)
