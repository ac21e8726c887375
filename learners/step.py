"""One training step: from a batch to updated models, and what is to be known of it. No buffer, no files, no publication.

rewards ─▶ shaped ─┐                                            ┌─▶ minibatch: weights ─▶ policy loss ─▶ update
                   ├─▶ advantages, value targets ─▶ minibatches ┤
proximal, reference, values, process rewards ─┘                 └─▶ critic loss ─▶ update
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from algos import kl
from algos.advantages import ADVANTAGES, Samples, value_targets
from algos.aggregation import token_weights
from algos.corrections import off_policy_weights
from algos.loss import policy_loss
from algos.metrics import summarize
from algos.rewards import filtered, normalised, soft_overlong_penalty, with_kl
from algos.values import (
    implicit_reward_loss,
    implicit_rewards,
    summarize_rewards,
    summarize_values,
    value_loss,
)
from buffers.staleness import mask_trainable
from configs.algo import Aggregation
from configs.corrections import Proximal
from configs.schema import Config
from learners.engine import Engine, LossFn
from learners.models import Models
from learners.packing import Batch, Counted, Packed, Plan, divide, minibatch_rows
from learners.parity import ParityWatch
from learners.world import Sums, World


@dataclass(slots=True, kw_only=True)
class Prepared:
    """A step's batch with all that its losses take as given. Columns [T], flat, of the whole batch."""

    batch: Batch
    step: int
    sequence: Tensor
    within: Tensor
    """bool: sampled, and within the bound"""
    mask: Tensor
    """bool: those of them that are learned from"""
    counts: Tensor
    """[N] how often each sequence counts: the sampler's importance weights, and PF-PPO's draws"""
    proximal: Tensor | None
    """None: those of the one update's own forward pass"""
    reference: Tensor | None
    advantages: Tensor
    values: Tensor | None
    targets: Tensor | None
    metrics: dict[str, float]
    """Of the reward model, which has been trained by now"""


class Trainer:
    """One rank's part in the steps. Every method is collective."""

    def __init__(
        self, config: Config, models: Models, world: World | None = None, kl_coef: float | None = None
    ) -> None:
        """`kl_coef`: where an adapted coefficient had come to, if the run goes on from a checkpoint."""
        self._config, self._algo, self.models, self._world = config, config.algo, models, world or World()
        self.moved: Callable[[], None] = lambda: None
        """Called at each microbatch: a step of any length gets on."""
        self.watch: ParityWatch | None = None
        """Compares, at every step, what generators and learner say of the same tokens; None: nobody does."""
        self.kl_coef = max(self._algo.kl.loss_coef, self._algo.kl.reward_coef) if kl_coef is None else kl_coef

    def train(self, batch: Batch, step: int) -> tuple[dict[str, float], int]:
        """Trains on a batch with version `step`; returns the step's metrics and the number of tokens within the bound."""
        began = time.monotonic()
        algo, learner = self._algo, self._config.learner
        given = self._prepare(batch, step)
        pretraining = algo.critic.pretrain_steps if given.values is not None else 0
        pretrains, own_step = step < pretraining, step - pretraining  # steps of the policy alone
        of_policy: Sums = {}
        of_critic: Sums = {}
        plans: list[Plan] = []
        parts = minibatch_rows(batch, learner.minibatches)
        noted, noted_rows = torch.zeros(len(batch.tokens)), list[int]()
        for rows in parts:
            if not _is_learned_from(given, rows):
                continue  # an optimizer's momentum would move the weights all the same
            if self.models.critic is not None:
                loss = self._critic_loss(given, rows, of_critic)
                self._update(self.models.critic, batch, rows, loss, algo.critic.lr, step, of_critic)
            if not pretrains:
                loss = self._policy_loss(given, rows, len(parts), of_policy)
                if self.watch is not None and not plans:  # the weights are those of the version held, as yet
                    loss, noted_rows = _noting(loss, noted), rows
                plans.append(
                    self._update(self.models.policy, batch, rows, loss, learner.lr, own_step, of_policy)
                )
        metrics = _describe(batch, given.within, step)
        metrics |= {"optimizer/lr": self._rate(learner.lr, own_step) if plans else 0.0}
        if plans:
            totals = self._total(self.models.policy, of_policy)
            metrics |= {"optimizer/grad_norm": _taken_mean(totals, "grad_norm")}
            metrics |= {name: _taken_mean(totals, name) for name in list(totals) if name.startswith("moe/")}
            metrics |= summarize(totals)
            metrics |= _mean([plan.metrics(self.models.policy.share.pad_multiple) for plan in plans])
        if self.models.critic is not None and of_critic:
            totals = self._total(self.models.critic, of_critic)
            metrics |= {"critic/grad_norm": _taken_mean(totals, "grad_norm")} | summarize_values(totals)
        metrics |= given.metrics | self._compare(given, noted, noted_rows)
        if algo.kl.target is not None and plans:
            self._adapt(metrics["policy/kl_reference"], batch.num_sequences)
        if algo.needs_reference and self.kl_coef:
            metrics["policy/kl_coef"] = self.kl_coef
        took = time.monotonic() - began
        if self.models.cost.per_square:
            metrics["throughput/train_tflops_per_s"] = sum(plan.cost for plan in plans) / took / 1e12
        return metrics | {"time/train_s": took}, int(given.within.sum())

    def logprobs(self, batch: Batch) -> Tensor:
        """[T] log-probabilities of the whole batch under the weights held."""
        return self._infer(self.models.policy, batch)

    def _compare(self, given: Prepared, noted: Tensor, noted_rows: list[int]) -> dict[str, float]:
        """The step's figures of parity. `noted` [T]: what the policy has said of the sequences `noted_rows` before its first update; it
        is not needed where the proximal policy is the version held. Raises ParityError, on all ranks or on none."""
        if self.watch is None:
            return {}
        since = torch.tensor([self.watch.published_at if self._world.rank == 0 else 0.0], dtype=torch.float64)
        since = self._world.add_tensor(since)
        if self._algo.proximal is Proximal.recompute and given.proximal is not None:
            held, known = given.proximal, given.batch.sampled
        else:
            held = self._world.add_tensor(
                noted if self.models.policy.share.holds_results else torch.zeros_like(noted)
            )
            known = _inside(given, noted_rows)
        return self.watch.see(given.batch, held, known, given.step, float(since))

    # ---- what is given before any update

    def _prepare(self, batch: Batch, step: int) -> Prepared:
        algo, sequence = self._algo, batch.sequence
        within = torch.from_numpy(
            mask_trainable(batch.versions.numpy(), batch.sampled.numpy(), step, self._config.max_versions)
        )
        mask = within & ~batch.truncated[sequence] if algo.reward.overlong_filter else within
        proximal = self._proximal(batch)
        reference = self._infer(self.models.reference, batch) if self.models.reference is not None else None
        values = self._infer(self.models.critic, batch) if self.models.critic is not None else None
        process, metrics = self._process_rewards(batch, sequence, reference, step)
        samples = self._samples(batch, sequence, mask, proximal, reference, values, process)
        counts = batch.weights
        if algo.reward.filter_power is not None:
            rng = torch.Generator().manual_seed(self._config.run.seed * 1_000_003 + step)
            counts = counts * filtered(batch.rewards, algo.reward.filter_power, rng)
        return Prepared(
            batch=batch, step=step, sequence=sequence, within=within, mask=mask, counts=counts, proximal=proximal,
            reference=reference, advantages=ADVANTAGES[algo.advantage](samples, algo), values=values,
            targets=None if values is None else value_targets(samples, algo), metrics=metrics,
        )  # fmt: skip

    def _proximal(self, batch: Batch) -> Tensor | None:
        """[T] log π_p. None: those of the one update's own forward pass, or made there from the behaviour's (`loglinear`)."""
        algo = self._algo
        match algo.proximal:
            case Proximal.behavior:
                return batch.behavior_logprobs
            case Proximal.loglinear:
                return None
        return (
            self.logprobs(batch)
            if algo.needs_proximal_beforehand or self._config.learner.minibatches > 1
            else None
        )

    def _samples(
        self, batch: Batch, sequence: Tensor, mask: Tensor, proximal: Tensor | None, reference: Tensor | None,
        values: Tensor | None, process: Tensor | None,
    ) -> Samples:  # fmt: skip
        algo = self._algo
        rewards, greedy = self._shaped(batch, sequence), batch.greedy
        if algo.needs_greedy_response:
            if greedy.isnan().any():
                first = int(batch.groups[greedy.isnan()][0])
                raise ValueError(
                    f"algo.advantage={algo.advantage} needs the reward of a greedy response with every group (generators make one when the run "
                    f"is started with it), got none with group {first}"
                )
            greedy = greedy if algo.reward.clip is None else greedy.clamp(-algo.reward.clip, algo.reward.clip)
        penalty = torch.zeros(len(sequence))
        if algo.kl.reward_coef > 0:
            assert reference is not None
            sampler = batch.behavior_logprobs if proximal is None else proximal
            penalty = kl.ESTIMATORS[algo.kl.estimator](sampler, reference)
        last = torch.from_numpy(batch.offsets[:-1].copy()).scatter_reduce_(
            0, sequence[batch.sampled], batch.sampled.nonzero()[:, 0], "amax"
        )
        token_rewards = with_kl(rewards, penalty, self.kl_coef, batch.sampled, last)
        return Samples(
            rewards=torch.zeros(batch.num_sequences).index_add_(0, sequence, token_rewards),
            token_rewards=token_rewards,
            groups=batch.groups,
            offsets=torch.from_numpy(batch.offsets),
            sequence=sequence,
            sampled=batch.sampled,
            mask=mask,
            greedy=greedy,
            values=values,
            log_ratio=None if proximal is None else proximal - batch.behavior_logprobs,
            process_rewards=process,
        )

    def _shaped(self, batch: Batch, sequence: Tensor) -> Tensor:
        """[N]"""
        shaping, rewards = self._algo.reward, batch.rewards
        if shaping.overlong_share is not None:
            lengths = torch.zeros(batch.num_sequences).index_add_(0, sequence, batch.sampled.float())
            most = self._config.sampling.max_tokens
            rewards = rewards + soft_overlong_penalty(lengths, most, shaping.overlong_share * most)
        if shaping.normalize:
            rewards = normalised(rewards)
        return rewards if shaping.clip is None else rewards.clamp(-shaping.clip, shaping.clip)

    def _process_rewards(
        self, batch: Batch, sequence: Tensor, reference: Tensor | None, step: int
    ) -> tuple[Tensor | None, dict[str, float]]:
        """[T] of the implicit reward model, which first learns from the batch's outcomes (PRIME); and its metrics."""
        if self.models.reward_model is None:
            return None, {}
        assert reference is not None
        prime, outcomes = self._algo.prime, batch.rewards.clamp(0, 1)[sequence]
        sums: Sums = {}

        def loss_fn(logprobs: Tensor, entropy: Tensor, packed: Packed) -> Tensor:
            at = packed.index
            loss, found = implicit_reward_loss(
                logprobs,
                reference[at],
                outcomes[at],
                batch.sampled[at],
                packed.sequence,
                batch.num_sequences,
                prime.beta,
            )
            _add(sums, found)
            return loss

        rows = list(range(batch.num_sequences))
        self._update(self.models.reward_model, batch, rows, loss_fn, prime.lr, step, sums)
        totals = self._total(self.models.reward_model, sums)
        metrics = {"reward_model/grad_norm": _taken_mean(totals, "grad_norm")} | summarize_rewards(totals)
        return implicit_rewards(self._infer(self.models.reward_model, batch), reference, prime.beta), metrics

    # ---- losses

    def _policy_loss(
        self, given: Prepared, rows: list[int], num_parts: int, sums: Sums
    ) -> Callable[[Tensor, Tensor, Packed], Tensor]:
        algo, batch = self._algo, given.batch
        inside = _inside(given, rows)
        weights = self._token_weights(given, inside, num_parts)
        correction = self._correction(given, inside, rows) if algo.needs_whole_minibatch else None
        imitation = self._imitation(given, inside) if algo.imitation_coef else None
        staleness = given.step - batch.versions
        penalized = algo.kl.loss_coef > 0

        def loss_fn(logprobs: Tensor, entropy: Tensor, packed: Packed) -> Tensor:
            at = packed.index
            if given.proximal is not None:
                proximal = given.proximal[at]
            elif algo.proximal is Proximal.loglinear:
                proximal = loglinear(logprobs.detach(), packed.behavior_logprobs, staleness[at])
            else:
                proximal = logprobs.detach()
            loss, found = policy_loss(
                algo,
                logprobs=logprobs,
                proximal_logprobs=proximal,
                behavior_logprobs=packed.behavior_logprobs,
                advantages=given.advantages[at],
                mask=given.mask[at],
                weights=weights[at],
                entropy=entropy,
                sequence=packed.sequence,
                staleness=staleness[at],
                correction=None if correction is None else correction[at],
                reference_logprobs=given.reference[at] if given.reference is not None else None,
                kl_coef=self.kl_coef if penalized else 0.0,
                imitation=None if imitation is None else imitation[at],
            )
            _add(sums, found)
            return loss

        return loss_fn

    def _token_weights(self, given: Prepared, inside: Tensor, num_parts: int) -> Tensor:
        """[T] of the aggregation over a minibatch, which holds the sequences `inside` [T]."""
        algo = self._algo
        horizon = self._config.sampling.max_tokens if algo.horizon is None else algo.horizon
        weights = token_weights(
            algo.aggregation,
            given.mask & inside,
            given.sequence,
            given.batch.num_sequences,
            horizon,
            given.counts,
        )
        per_sequence = algo.aggregation is not Aggregation.token_mean
        return weights * (num_parts if per_sequence else 1)

    def _correction(self, given: Prepared, inside: Tensor, rows: list[int]) -> Tensor:
        """[T] the off-policy weights of a minibatch, from the policy as it is now where M2PO's mask speaks of it."""
        now = given.proximal
        if self._algo.masks_second_moment and self._config.learner.minibatches > 1:
            now = self._infer(self.models.policy, given.batch, rows)
        assert now is not None
        log_ratio = now - given.batch.behavior_logprobs
        return off_policy_weights(
            self._algo, log_ratio, given.advantages, given.mask & inside, given.sequence
        )

    def _imitation(self, given: Prepared, inside: Tensor) -> Tensor:
        """[T] 1 / their number for the tokens of a minibatch's good samples, 0 for others."""
        good = given.mask & inside & (given.batch.rewards > self._algo.imitation_above)[given.sequence]
        return _token_mean(given, good)

    def _critic_loss(
        self, given: Prepared, rows: list[int], sums: Sums
    ) -> Callable[[Tensor, Tensor, Packed], Tensor]:
        mask = given.mask & _inside(given, rows)
        weights = _token_mean(given, mask)
        before, targets = given.values, given.targets
        assert before is not None and targets is not None

        def loss_fn(values: Tensor, entropy: Tensor, packed: Packed) -> Tensor:
            at = packed.index
            loss, found = value_loss(
                values, before[at], targets[at], mask[at], weights[at], self._algo.critic.clip
            )
            _add(sums, found)
            return loss

        return loss_fn

    def _adapt(self, measured: float, num_sequences: int) -> None:
        target, horizon = self._algo.kl.target, self._algo.kl.horizon
        assert target is not None
        if math.isfinite(measured):
            self.kl_coef = kl.adapted_coefficient(self.kl_coef, measured, target, num_sequences, horizon)

    # ---- engines

    def _update(
        self, engine: Engine, batch: Batch, rows: list[int], loss_fn: Callable[[Tensor, Tensor, Packed], Tensor],
        lr: float, step: int, sums: Sums,
    ) -> Plan:  # fmt: skip
        packed, plan = self._divide(engine, batch, rows)
        found = {"grad_norm": engine.update(packed, loss_fn, self._rate(lr, step))} | engine.routing_metrics
        _add(sums, {name: torch.tensor([value, 1.0], dtype=torch.float64) for name, value in found.items()})
        return plan

    def _rate(self, lr: float, step: int) -> float:
        """Rises over `warmup_steps`, and falls from there to the end of `decay_steps`."""
        learner = self._config.learner
        warmup, decay = learner.warmup_steps, learner.decay_steps or self._config.run.steps
        if step + 1 < warmup:
            return lr * (step + 1) / warmup
        fallen = min(1.0, (step + 1 - warmup) / max(1, decay - warmup))
        return lr * (1.0 - (1.0 - learner.lr_end) * fallen)

    def _divide(self, engine: Engine, batch: Batch, rows: list[int]) -> tuple[Sequence[Packed], Plan]:
        share, budget = engine.share, self._config.learner.tokens_per_microbatch
        packed, made = divide(batch, rows, budget, share.count, share.index, self.models.cost)
        return Counted(packed, self.moved), made

    def _infer(self, engine: Engine, batch: Batch, rows: list[int] | None = None) -> Tensor:
        """[T] log-probabilities, or values, of the batch, or of some of its sequences (0 elsewhere)."""
        found = torch.zeros(len(batch.tokens))
        packed, _ = self._divide(engine, batch, list(range(batch.num_sequences)) if rows is None else rows)
        for part, inferred in zip(packed, engine.infer(packed), strict=True):
            if engine.share.holds_results:
                found[part.index] = inferred
        return self._world.add_tensor(found)

    def _total(self, engine: Engine, sums: Sums) -> Sums:
        """The sums over all shares of the engine."""
        return self._world.add_named_tensors(sums if engine.share.holds_results else {})


def _noting(loss_fn: LossFn, noted: Tensor) -> LossFn:
    """The same loss, which leaves the log-probabilities that it is given in `noted` [T]."""

    def loss(logprobs: Tensor, entropy: Tensor, packed: Packed) -> Tensor:
        noted[packed.index] = logprobs.detach()
        return loss_fn(logprobs, entropy, packed)

    return loss


def _taken_mean(totals: Sums, name: str) -> float:
    """The mean over a step's updates of what was added as [value, 1]; it is taken out of the sums."""
    total, count = totals.pop(name).tolist()
    return total / count


def _mean(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(one[name] for one in found) / len(found) for name in found[0]}


def loglinear(current: Tensor, behavior: Tensor, staleness: Tensor) -> Tensor:
    """[T] log π_p between behaviour and current policy (A-3PO, 2025; AReaL's `loglinear`): (log μ + s log π_θ) / (s + 1).

    s is the token's staleness: the update at hand makes version k + 1 of π_θ, π_p is version k, and μ version k − s. At s = 0 it is μ.
    """
    s = staleness.clamp(min=0)
    return (behavior + s * current) / (s + 1)


def _token_mean(given: Prepared, mask: Tensor) -> Tensor:
    """[T] the weights of a mean over the tokens of the mask, each as often as its sequence counts."""
    sequences = given.batch.num_sequences
    return token_weights(Aggregation.token_mean, mask, given.sequence, sequences, counts=given.counts)


def _is_learned_from(given: Prepared, rows: list[int]) -> bool:
    """True when a token of these sequences is trained."""
    return bool((given.mask & _inside(given, rows) & (given.counts > 0)[given.sequence]).any())


def _inside(given: Prepared, rows: list[int]) -> Tensor:
    """[T] bool: the tokens of these sequences."""
    chosen = torch.zeros(given.batch.num_sequences, dtype=torch.bool)
    chosen[rows] = True
    return chosen[given.sequence]


def _add(sums: Sums, found: Sums) -> None:
    for name, value in found.items():
        sums[name] = sums[name] + value if name in sums else value


def _describe(batch: Batch, mask: Tensor, step: int) -> dict[str, float]:
    """What the batch is like: rewards, lengths, staleness."""
    staleness = (step - batch.versions[mask]).double()
    sampled = np.add.reduceat(batch.sampled.numpy().astype(np.int64), batch.offsets[:-1])
    return {
        "reward/mean": float(batch.rewards.mean()),
        "reward/std": float(batch.rewards.std()) if batch.num_sequences > 1 else 0.0,
        "length/mean": float(sampled.mean()),
        "length/max": float(sampled.max()),
        "length/truncated_fraction": float(batch.truncated.float().mean()),
        "staleness/mean": float(staleness.mean()) if len(staleness) else 0.0,
        "staleness/max": float(staleness.max()) if len(staleness) else 0.0,
        "staleness/masked_fraction": 1.0 - float(mask.sum()) / max(1, int(batch.sampled.sum())),
    }
