"""One step's gradients, token by token in Python floats, from trajectories of several branches: the reference
for the learner's arithmetic.

An episode is a list of turns, each a list of places of sampled tokens in the batch. Nothing here knows where
a branch begins.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from branched_episodes import ModelColumns
from surrogate_equations import EQUATIONS, TokenRow
from training_steps import GROUP_WEIGHTS, STEP

from buffers.trajectory import GREEDY, Trajectory
from configs.advantages import Advantage, Span
from configs.algo import Aggregation, AlgoConfig
from configs.corrections import Correction, Level, Proximal
from configs.kl import Estimator
from configs.schema import Config

Column = dict[int, float]
"""Values by place in the batch"""


@dataclass
class EpisodeFacts:
    """One sample of a group."""

    group: int
    reward: float
    greedy_reward: float
    is_cut: bool
    turns: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Places of the sampled tokens, by turn"""
    paid: Column = field(default_factory=dict)
    """Rewards at sampled tokens"""

    @property
    def actions(self) -> list[int]:
        return [place for turn in sorted(self.turns) for place in self.turns[turn]]


def read_episodes(rows: list[Trajectory]) -> list[EpisodeFacts]:
    episodes: dict[tuple[int, int], EpisodeFacts] = {}
    place = 0
    for row in rows:
        facts = EpisodeFacts(row.group, row.reward, row.rewards[GREEDY], False)
        episode = episodes.setdefault((row.group, row.sample), facts)
        last_turn = max(max(one.turn) for one in rows if (one.group, one.sample) == (row.group, row.sample))
        episode.is_cut |= row.finish_reason == "length" and max(row.turn) == last_turn
        episode.is_cut |= row.stop in ("max_tokens", "context_overflow")
        for t in range(len(row.tokens)):
            if row.sampled[t]:
                episode.turns[row.turn[t]].append(place)
                episode.paid[place] = row.token_rewards[t] if row.token_rewards else 0.0
            place += 1
    return list(episodes.values())


def estimate_divergence(estimator: Estimator, log_ratio: float) -> float:
    """KL(p ‖ q) from log p − log q."""
    return {
        Estimator.k1: log_ratio,
        Estimator.k2: 0.5 * log_ratio**2,
        Estimator.k3: math.exp(-log_ratio) - 1 + log_ratio,
    }[estimator]


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def whiten(values: Column, trained: set[int]) -> Column:
    kept = [values[t] for t in trained]
    center = mean(kept)
    std = math.sqrt(mean([(value - center) ** 2 for value in kept]))
    return {t: (values[t] - center) / std for t in trained}


def differentiate(function: Callable[[float], float], at: float) -> float:
    return (function(at + 1e-6) - function(at - 1e-6)) / 2e-6


class StepEquations:
    """The step of a configuration on these rows and the models' answers."""

    def __init__(self, config: Config, rows: list[Trajectory], columns: ModelColumns) -> None:
        self.config, self.algo = config, config.algo
        self.episodes = read_episodes(rows)
        self.behavior = dict(enumerate(value for row in rows for value in row.logprobs))
        self.versions = dict(enumerate(version for row in rows for version in row.versions))
        self.columns = {
            name: dict(enumerate(getattr(columns, name).double().tolist()))
            for name in columns.__dataclass_fields__
        }
        self.trained = {
            t
            for episode in self.episodes
            for t in episode.actions
            if STEP - self.versions[t] <= config.max_versions
            and not (config.algo.reward.overlong_filter and episode.is_cut)
        }
        self.proximal = self.columns["proximal_logprobs"]
        if self.algo.proximal is Proximal.loglinear:
            self.proximal = {
                t: (self.behavior[t] + max(STEP - v, 0) * self.columns["logprobs"][t])
                / (max(STEP - v, 0) + 1)
                for t, v in self.versions.items()
            }
        groups = sorted({episode.group for episode in self.episodes})
        size = -(-len(groups) // config.learner.minibatches)
        self.minibatches = [
            [e for e in self.episodes if e.group in groups[start : start + size]]
            for start in range(0, len(groups), size)
        ]

    # ---- rewards and advantages

    def shape_rewards(self) -> list[float]:
        shaping, rewards = self.algo.reward, [episode.reward for episode in self.episodes]
        if shaping.overlong_share is not None:
            longest = self.config.sampling.max_tokens
            cache = shaping.overlong_share * longest
            for i, episode in enumerate(self.episodes):
                excess = max(len(tokens) for tokens in episode.turns.values()) - (longest - cache)
                rewards[i] -= min(1.0, max(0.0, excess / cache))
        if shaping.normalize:
            center = mean(rewards)
            std = math.sqrt(mean([(reward - center) ** 2 for reward in rewards]))
            rewards = [(reward - center) / std for reward in rewards]
        if shaping.clip is not None:
            rewards = [min(shaping.clip, max(-shaping.clip, reward)) for reward in rewards]
        return rewards

    def charge(self, t: int) -> float:
        """−β KL of a token, in the reward."""
        if not self.algo.kl.reward_coef:
            return 0.0
        log_ratio = self.proximal[t] - self.columns["reference_logprobs"][t]
        return -self.algo.kl.reward_coef * estimate_divergence(self.algo.kl.estimator, log_ratio)

    def pay_tokens(self) -> list[Column]:
        """Each episode's rewards by token: the charge, what was paid there, and at the end what shaping has
        added."""
        found = []
        for episode, shaped in zip(self.episodes, self.shape_rewards(), strict=True):
            paid = {t: self.charge(t) + episode.paid[t] for t in episode.actions}
            paid[episode.actions[-1]] += shaped - sum(episode.paid.values())
            found.append(paid)
        return found

    def compare_episodes(self) -> list[float]:
        """The advantage of each episode, from the rewards of its group."""
        rewards = [sum(paid.values()) for paid in self.pay_tokens()]
        kind, found = self.algo.advantage, []
        for i, episode in enumerate(self.episodes):
            peers = [rewards[j] for j, other in enumerate(self.episodes) if other.group == episode.group]
            centered = rewards[i] - mean(peers)
            if kind is Advantage.remax:
                centered = rewards[i] - episode.greedy_reward
            elif kind is Advantage.grpo:
                variance = sum((reward - mean(peers)) ** 2 for reward in peers) / (len(peers) - 1)
                centered /= math.sqrt(variance) + 1e-6
            elif kind in (Advantage.rloo, Advantage.prime):
                centered *= len(peers) / (len(peers) - 1)
            elif kind is Advantage.opmd:
                tau = self.algo.opmd.tau
                centered = rewards[i] - tau * math.log(mean([math.exp(reward / tau) for reward in peers]))
            found.append(centered)
        return found

    def list_advantages(self) -> Column:
        kind, paid = self.algo.advantage, self.pay_tokens()
        found: Column = {}
        if kind is Advantage.reinforce_pp:
            for episode, rewards in zip(self.episodes, paid, strict=True):
                for i, t in enumerate(episode.actions):
                    found[t] = sum(rewards[u] for u in episode.actions[i:])
            return whiten(found, self.trained)
        if kind is Advantage.gae:
            lam = self.algo.gae.lam
            for episode, rewards in zip(self.episodes, paid, strict=True):
                if self.algo.gae.length_alpha is not None:
                    lam = 1 - 1 / (self.algo.gae.length_alpha * len(episode.actions))
                found |= self.estimate_gae(episode, rewards, min(1.0, max(0.0, lam)))[0]
            return whiten(found, self.trained) if self.algo.gae.whiten else found
        if kind is Advantage.vtrace:
            for episode, rewards in zip(self.episodes, paid, strict=True):
                found |= self.estimate_vtrace(episode, rewards)[0]
            return found
        if kind is Advantage.prime:
            return whiten(self.estimate_prime(), self.trained)
        for episode, advantage in zip(self.episodes, self.compare_episodes(), strict=True):
            found |= dict.fromkeys(episode.actions, advantage)
        return whiten(found, self.trained) if kind is Advantage.reinforce_pp_baseline else found

    def list_value_targets(self) -> Column:
        found: Column = {}
        for episode, rewards in zip(self.episodes, self.pay_tokens(), strict=True):
            if self.algo.advantage is Advantage.vtrace:
                found |= self.estimate_vtrace(episode, rewards)[1]
            else:
                found |= self.estimate_gae(episode, rewards, self.algo.gae.critic_lam)[1]
        return found

    def estimate_gae(self, episode: EpisodeFacts, rewards: Column, lam: float) -> tuple[Column, Column]:
        """Advantages and returns; an action is a token or a turn."""
        actions = [[t] for t in episode.actions]
        if self.algo.gae.span is Span.turn:
            actions = [episode.turns[turn] for turn in sorted(episode.turns)]
        value = [self.columns["old_values"][tokens[0]] for tokens in actions] + [0.0]
        advantages, returns, following = {}, {}, 0.0
        for i in reversed(range(len(actions))):
            reward = sum(rewards[t] for t in actions[i])
            delta = reward + self.algo.gae.gamma * value[i + 1] - value[i]
            following = delta + self.algo.gae.gamma * lam * following
            advantages |= dict.fromkeys(actions[i], following)
            returns |= dict.fromkeys(actions[i], following + value[i])
        return advantages, returns

    def estimate_vtrace(self, episode: EpisodeFacts, rewards: Column) -> tuple[Column, Column]:
        section, value = self.algo.vtrace, self.columns["old_values"]
        advantages, targets, next_value, next_target = {}, {}, 0.0, 0.0
        for t in reversed(episode.actions):
            ratio = math.exp(self.proximal[t] - self.behavior[t])
            rho, c = min(section.rho_bar, ratio), section.lam * min(section.c_bar, ratio)
            delta = rho * (rewards[t] + section.gamma * next_value - value[t])
            advantages[t] = rho * (rewards[t] + section.gamma * next_target - value[t])
            targets[t] = value[t] + delta + section.gamma * c * (next_target - next_value)
            next_value, next_target = value[t], targets[t]
        return advantages, targets

    def reward_tokens(self, episode: EpisodeFacts) -> Column:
        """PRIME's implicit rewards."""
        given, reference = self.columns["reward_logprobs"], self.columns["reference_logprobs"]
        return {t: self.algo.prime.beta * (given[t] - reference[t]) for t in episode.actions}

    def estimate_prime(self) -> Column:
        process = [self.reward_tokens(episode) for episode in self.episodes]
        means = [mean(list(rewards.values())) for rewards in process]
        found: Column = {}
        for i, (episode, outcome) in enumerate(zip(self.episodes, self.compare_episodes(), strict=True)):
            others = [
                means[j]
                for j, other in enumerate(self.episodes)
                if other.group == episode.group and other is not episode
            ]
            for place, t in enumerate(episode.actions):
                later = episode.actions[place:]
                found[t] = outcome + sum(
                    self.algo.prime.gamma**distance * (process[i][u] - mean(others))
                    for distance, u in enumerate(later)
                )
        return found

    # ---- weights

    def count_episode(self, episode: EpisodeFacts) -> float:
        return GROUP_WEIGHTS[episode.group]

    def list_trained(self, episode: EpisodeFacts) -> list[int]:
        return [t for t in episode.actions if t in self.trained]

    def weigh_token_mean(self, minibatch: list[EpisodeFacts]) -> Column:
        counts = {t: self.count_episode(e) for e in minibatch for t in self.list_trained(e)}
        return {t: count / sum(counts.values()) for t, count in counts.items()}

    def weigh_tokens(self, minibatch: list[EpisodeFacts]) -> Column:
        kind = self.algo.aggregation
        if kind is Aggregation.token_mean:
            return self.weigh_token_mean(minibatch)
        found: Column = {}
        scale = len(self.minibatches) / len(self.episodes)
        for episode in minibatch:
            tokens, divisor = self.list_trained(episode), 1.0
            if kind is Aggregation.sequence_mean_token_mean:
                divisor = float(len(tokens))
            elif kind is Aggregation.constant_horizon:
                divisor = self.algo.horizon or self.config.sampling.max_tokens
            found |= {t: scale * self.count_episode(episode) / divisor for t in tokens}
        return found

    def correct_tokens(self, minibatch: list[EpisodeFacts], advantages: Column) -> Column:
        """The off-policy weight of each token: correction, rejection, second moment, normalization."""
        algo, found = self.algo, {}
        floor, cap = algo.correction_range
        for episode in minibatch:
            tokens = self.list_trained(episode)
            ell = {t: self.proximal[t] - self.behavior[t] for t in tokens}
            for t in tokens:
                by_token, product = math.exp(ell[t]), math.exp(sum(ell.values()))
                weight = {
                    Correction.none: lambda: 1.0,
                    Correction.token_tis: lambda ratio=by_token: min(ratio, cap),
                    Correction.icepop: lambda ratio=by_token: ratio if floor <= ratio <= cap else 0.0,
                    Correction.sequence_tis: lambda ratio=product: min(ratio, cap),
                    Correction.sequence_mask: lambda ratio=product: float(floor <= ratio <= cap),
                    Correction.geometric_mask: lambda ell=ell: float(
                        floor <= math.exp(mean(list(ell.values()))) <= cap
                    ),
                }[algo.correction]()
                found[t] = weight * self.is_kept(t, ell)
        if algo.surrogate_section.second_moment_threshold is not None:
            for t in self.list_dropped(minibatch, advantages, algo.surrogate_section.second_moment_threshold):
                found[t] = 0.0
        if algo.normalize_weights:
            center = mean(list(found.values()))
            found = {t: weight / center for t, weight in found.items()}
        return found

    def is_kept(self, t: int, ell: Column) -> bool:
        rejection = self.algo.rejection
        if rejection.estimator is None:
            return True
        estimates = {u: estimate_divergence(rejection.estimator, -value) for u, value in ell.items()}
        estimate = {
            Level.token: estimates[t],
            Level.sequence_sum: sum(estimates.values()),
            Level.sequence_mean: mean(list(estimates.values())),
            Level.sequence_max: max(estimates.values()),
        }[rejection.level]
        return estimate <= rejection.threshold

    def list_dropped(self, minibatch: list[EpisodeFacts], advantages: Column, threshold: float) -> list[int]:
        """M2PO's mask over the minibatch."""
        squares = {}
        for episode in minibatch:
            for t in self.list_trained(episode):
                ell = self.proximal[t] - self.behavior[t]
                if advantages[t] * ell > 0:
                    squares[t] = ell**2
        ordered = sorted(squares, key=lambda t: squares[t])
        kept = len(ordered)
        while kept and mean([squares[t] for t in ordered[:kept]]) > threshold:
            kept -= 1
        return ordered[kept:]

    # ---- losses

    def differentiate_policy(self) -> tuple[float, Column]:
        """The loss of all minibatches, and its derivative by each log-probability."""
        advantages, total, gradient = self.list_advantages(), 0.0, Column()
        for minibatch in self.minibatches:
            weights = self.weigh_tokens(minibatch)
            corrections = self.correct_tokens(minibatch, advantages)
            good = [e for e in minibatch if e.reward > self.algo.imitation_above]
            imitation = self.weigh_token_mean(good) if self.algo.imitation_coef else {}
            for episode in minibatch:
                tokens = self.list_trained(episode)
                apart = [self.columns["logprobs"][t] - self.proximal[t] for t in tokens]
                for t in tokens:
                    row = TokenRow(
                        logprob=self.columns["logprobs"][t],
                        proximal_logprob=self.proximal[t],
                        behavior_logprob=self.behavior[t],
                        advantage=advantages[t],
                        sequence_ratio=math.exp(mean(apart)),
                    )
                    loss, slope = self.differentiate_token(row, self.columns["reference_logprobs"][t])
                    share = weights[t] * corrections[t]
                    total += share * loss - self.algo.entropy_coef * weights[t] * 0.5
                    total -= self.algo.imitation_coef * imitation.get(t, 0.0) * row.logprob
                    gradient[t] = share * slope - self.algo.imitation_coef * imitation.get(t, 0.0)
        return total, gradient

    def differentiate_token(self, row: TokenRow, reference: float) -> tuple[float, float]:
        """L + β KL of a token, and its derivative."""
        equation, kl = EQUATIONS[str(self.algo.surrogate)], self.algo.kl

        def compute_loss(logprob: float) -> float:
            return equation.loss(replace_logprob(row, logprob))

        def compute_penalty(logprob: float) -> float:
            return kl.loss_coef * estimate_divergence(kl.estimator, logprob - reference)

        slope = (
            differentiate(compute_loss, row.logprob)
            if equation.derivative is None
            else equation.derivative(row)
        )
        loss = compute_loss(row.logprob)
        if kl.loss_coef:
            loss += compute_penalty(row.logprob)
            slope += differentiate(compute_penalty, row.logprob)
        return loss, slope

    def differentiate_critic(self) -> Column:
        targets, gradient, clip = self.list_value_targets(), Column(), self.algo.critic.clip
        for minibatch in self.minibatches:
            for t, weight in self.weigh_token_mean(minibatch).items():
                value, old = self.columns["values"][t], self.columns["old_values"][t]
                near = value if clip is None else min(old + clip, max(old - clip, value))
                plain, clipped = (value - targets[t]) ** 2, (near - targets[t]) ** 2
                # A value beyond the clip has no gradient where the clipped error is the larger one.
                gradient[t] = 0.0 if clipped > plain else weight * (value - targets[t])
        return gradient

    def differentiate_reward_model(self) -> Column:
        gradient = Column()
        for episode in self.episodes:
            total = sum(self.reward_tokens(episode).values())
            apart = 1 / (1 + math.exp(-total)) - min(1.0, max(0.0, episode.reward))
            gradient |= dict.fromkeys(episode.actions, self.algo.prime.beta * apart / len(self.episodes))
        return gradient


def replace_logprob(row: TokenRow, logprob: float) -> TokenRow:
    return TokenRow(logprob, row.proximal_logprob, row.behavior_logprob, row.advantage, row.sequence_ratio)


def set_equations(algo: AlgoConfig) -> None:
    """Gives the surrogate the parameters for which its equation is written."""
    setattr(algo, str(algo.surrogate), EQUATIONS[str(algo.surrogate)].config)
