"""One training step: from a batch to updated models and the step's metrics.

rewards ─▶ shaped ─┐                                       ┌─▶ minibatch: weights ─▶ policy loss ─▶ update
                   ├─▶ advantages, targets ─▶ minibatches ─┤
models' columns ───┘                                       └─▶ critic loss ─▶ update

The models' columns are proximal and reference log-probabilities, values and process rewards. The records and
the pure functions stand in `learners/prepared.py`; here models are asked and updated. A step knows of no
buffer, no file and no publication.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from algos.advantages import ADVANTAGES, compute_value_targets
from algos.loss import policy_loss
from algos.metrics import sum_by_staleness, summarize_policy
from algos.objective import compute_off_policy_weights, make_loss_inputs
from algos.values import (
    implicit_reward_loss,
    implicit_rewards,
    summarize_rewards,
    summarize_values,
    value_loss,
)
from buffers.staleness import mask_trainable
from configs.corrections import Proximal
from configs.schema import Config
from learners.divided import DividedEpisodes
from learners.engine import Engine, LossFn
from learners.models import Models
from learners.packing import (
    Batch,
    Packed,
    PackingPlan,
    ReportedMicrobatches,
    divide_rows,
    find_divided,
    split_minibatches,
)
from learners.parity import ParityWatch
from learners.prepared import (
    PreparedBatch,
    adapt_kl_coefficient,
    draw_sequence_counts,
    interpolate_proximal,
    make_advantage_inputs,
)
from learners.world import Sums, World


class Trainer:
    """One rank's part in the steps. Every method is collective: all ranks call it in step."""

    def __init__(
        self, config: Config, models: Models, world: World | None = None, kl_coef: float | None = None
    ) -> None:
        """`kl_coef` is the adapted KL coefficient of the checkpoint that the run goes on from; None: a new
        run."""
        self._config, self._algo, self.models, self._world = config, config.algo, models, world or World()
        self.report_progress: Callable[[], None] = lambda: None
        """Called at each microbatch, so that a long step is not taken for a hang"""
        self.watch: ParityWatch | None = None
        """Compares, at every step, the log-probabilities of generators and learner; None: nobody does"""
        self.kl_coef = max(self._algo.kl.loss_coef, self._algo.kl.reward_coef) if kl_coef is None else kl_coef
        """Coefficient of the KL penalty in the next step, which `algo.kl.target` adapts"""

    def train(self, batch: Batch, step: int) -> tuple[dict[str, float], int]:
        """Trains the models, which hold version `step`, on a batch, one update for each minibatch.

        Returns the step's metrics, and the number of sampled tokens within `max_versions`. Raises ParityError
        where generators and learner disagree, FloatingPointError where a gradient is not finite.
        """
        began = time.monotonic()
        algo, learner = self._algo, self._config.learner
        given = self._prepare_batch(batch, step)
        # The policy waits until its critic has been trained ahead; its learning rate counts its own steps.
        pretrain_steps = algo.critic.pretrain_steps if given.values is not None else 0
        policy_step = step - pretrain_steps
        policy_sums: Sums = {}
        critic_sums: Sums = {}
        plans: list[PackingPlan] = []
        minibatches = split_minibatches(batch, learner.minibatches)

        def add_entropy(divided: DividedEpisodes) -> None:
            entropy = {"entropy": divided.entropy}
            _add_sums(policy_sums, sum_by_staleness(entropy, given.mask, step - batch.versions))
            _add_sums(policy_sums, {"loss": (divided.slopes[1] * divided.entropy).sum().double()})

        noted_logprobs, noted_rows = torch.zeros(len(batch.tokens)), list[int]()
        for rows in minibatches:
            if not given.has_trained_tokens(rows):
                continue
            if self.models.critic is not None:
                loss = self._make_critic_loss(given, rows, critic_sums)
                self._update_model(self.models.critic, batch, rows, loss, algo.critic.lr, step, critic_sums)
            if policy_step >= 0:
                loss = self._make_policy_loss(given, rows, len(minibatches), policy_sums)
                if self.watch is not None and not plans:
                    # Before the first update, the weights are still those of the version held.
                    loss, noted_rows = _note_logprobs(loss, noted_logprobs), rows
                plans.append(
                    self._update_model(
                        self.models.policy,
                        batch,
                        rows,
                        loss,
                        learner.lr,
                        policy_step,
                        policy_sums,
                        add_entropy,
                    )
                )
        metrics = given.describe_batch() | self._summarize_updates(policy_sums, critic_sums, plans)
        metrics |= {"optimizer/lr": self._schedule_rate(learner.lr, policy_step) if plans else 0.0}
        metrics |= given.metrics | self._check_parity(given, noted_logprobs, noted_rows)
        if plans:
            measured = metrics["policy/kl_reference"]
            self.kl_coef = adapt_kl_coefficient(algo, self.kl_coef, measured, batch.num_sequences)
        if algo.needs_reference and self.kl_coef:
            metrics["policy/kl_coef"] = self.kl_coef
        took = time.monotonic() - began
        if self.models.cost.per_square:
            metrics["throughput/train_tflops_per_s"] = sum(plan.cost for plan in plans) / took / 1e12
        return metrics | {"time/train_s": took}, int(given.admissible.sum())

    def infer_logprobs(self, batch: Batch) -> Tensor:
        """Returns [T] the log-probabilities of the whole batch under the weights held; 0 where not
        sampled."""
        return self._infer_column(self.models.policy, batch)

    def _summarize_updates(
        self, policy_sums: Sums, critic_sums: Sums, plans: list[PackingPlan]
    ) -> dict[str, float]:
        """Returns the figures of the step's updates. Models that were not updated have none."""
        metrics: dict[str, float] = {}
        if plans:
            policy = self.models.policy
            totals = self._add_shares(policy, policy_sums)
            metrics["optimizer/grad_norm"] = _pop_mean(totals, "grad_norm")
            metrics |= {name: _pop_mean(totals, name) for name in list(totals) if name.startswith("moe/")}
            metrics |= summarize_policy(totals)
            metrics |= _average_metrics([plan.metrics(policy.share.pad_multiple) for plan in plans])
        if self.models.critic is not None and critic_sums:
            totals = self._add_shares(self.models.critic, critic_sums)
            metrics["critic/grad_norm"] = _pop_mean(totals, "grad_norm")
            metrics |= summarize_values(totals)
        return metrics

    def _check_parity(
        self, given: PreparedBatch, noted_logprobs: Tensor, noted_rows: list[int]
    ) -> dict[str, float]:
        """Returns the step's figures of parity. Raises ParityError, on all ranks or on none.

        `noted_logprobs` [T] are those that the policy gave the sequences `noted_rows` before its first
        update. They are not needed where the proximal policy is the version held: its log-probabilities are
        known for all sequences.
        """
        if self.watch is None:
            return {}
        since = torch.tensor([self.watch.published_at if self._world.rank == 0 else 0.0], dtype=torch.float64)
        since = self._world.add_tensor(since)
        if self._algo.proximal is Proximal.recompute and given.proximal_logprobs is not None:
            logprobs, known = given.proximal_logprobs, given.batch.sampled
        else:
            holds_results = self.models.policy.share.holds_results
            logprobs = self._world.add_tensor(
                noted_logprobs if holds_results else torch.zeros_like(noted_logprobs)
            )
            known = given.mark_rows(noted_rows)
        return self.watch.check_step(given.batch, logprobs, known, given.step, float(since))

    # ---- what is given before any update

    def _prepare_batch(self, batch: Batch, step: int) -> PreparedBatch:
        """Asks the models for all that the losses take as given. A reward model is trained on the batch
        before."""
        algo, models, sequence = self._algo, self.models, batch.sequence
        admissible = torch.from_numpy(
            mask_trainable(batch.versions.numpy(), batch.sampled.numpy(), step, self._config.max_versions)
        )
        mask = admissible & ~batch.truncated[sequence] if algo.reward.overlong_filter else admissible
        proximal_logprobs = self._infer_proximal(batch)
        reference_logprobs = None if models.reference is None else self._infer_column(models.reference, batch)
        values = None if models.critic is None else self._infer_column(models.critic, batch)
        process_rewards, metrics = self._train_reward_model(batch, reference_logprobs, step)
        inputs = make_advantage_inputs(
            self._config,
            batch,
            self.kl_coef,
            mask=mask,
            proximal_logprobs=proximal_logprobs,
            reference_logprobs=reference_logprobs,
            values=values,
            process_rewards=process_rewards,
        )
        return PreparedBatch(
            batch=batch,
            step=step,
            sequence=sequence,
            admissible=admissible,
            mask=mask,
            sequence_counts=draw_sequence_counts(self._config, batch, step),
            proximal_logprobs=proximal_logprobs,
            reference_logprobs=reference_logprobs,
            advantages=ADVANTAGES[algo.advantage](inputs, algo),
            values=values,
            value_targets=None if values is None else compute_value_targets(inputs, algo),
            metrics=metrics,
        )

    def _infer_proximal(self, batch: Batch) -> Tensor | None:
        """Returns [T] log π_p where it must be known before the first update; None: the loss makes it as
        it goes."""
        match self._algo.proximal:
            case Proximal.behavior:
                return batch.behavior_logprobs
            case Proximal.loglinear:
                return None
        is_needed = self._algo.needs_proximal_beforehand or self._config.learner.minibatches > 1
        return self.infer_logprobs(batch) if is_needed else None

    def _train_reward_model(
        self, batch: Batch, reference_logprobs: Tensor | None, step: int
    ) -> tuple[Tensor | None, dict[str, float]]:
        """Trains the implicit reward model on the batch's outcomes (PRIME), and asks it afterwards.

        Returns its rewards [T] of tokens, and its figures; None and none without such a model.
        """
        if self.models.reward_model is None:
            return None, {}
        assert reference_logprobs is not None
        prime, outcomes = self._algo.prime, batch.rewards.clamp(0, 1)[batch.sequence]
        sums: Sums = {}

        def loss_fn(logprobs: Tensor, entropy: Tensor, packed: Packed) -> Tensor:
            at = packed.index
            loss, added = implicit_reward_loss(
                logprobs,
                reference_logprobs[at],
                outcomes[at],
                batch.sampled[at],
                packed.sequence,
                batch.num_sequences,
                prime.beta,
            )
            _add_sums(sums, added)
            return loss

        rows = list(range(batch.num_sequences))
        self._update_model(self.models.reward_model, batch, rows, loss_fn, prime.lr, step, sums)
        totals = self._add_shares(self.models.reward_model, sums)
        metrics = {"reward_model/grad_norm": _pop_mean(totals, "grad_norm")} | summarize_rewards(totals)
        logprobs = self._infer_column(self.models.reward_model, batch)
        return implicit_rewards(logprobs, reference_logprobs, prime.beta), metrics

    # ---- losses

    def _make_policy_loss(
        self, given: PreparedBatch, rows: list[int], num_minibatches: int, sums: Sums
    ) -> LossFn:
        """Returns the policy's loss on microbatches of the minibatch `rows`; it adds its metrics to
        `sums`."""
        algo = self._algo
        aggregation_weights = given.weigh_minibatch(self._config, rows, num_minibatches)
        off_policy_weights = self._weigh_off_policy(given, rows) if algo.needs_whole_minibatch else None
        imitation_weights = given.weigh_imitation(algo, rows)
        staleness = given.step - given.batch.versions

        def loss_fn(logprobs: Tensor, entropy: Tensor, packed: Packed) -> Tensor:
            at = packed.index
            if given.proximal_logprobs is not None:
                proximal_logprobs = given.proximal_logprobs[at]
            elif algo.proximal is Proximal.loglinear:
                proximal_logprobs = interpolate_proximal(
                    logprobs.detach(), packed.behavior_logprobs, staleness[at]
                )
            else:
                # The one update begins at the proximal policy, so this forward pass is the proximal policy's.
                proximal_logprobs = logprobs.detach()
            inputs = make_loss_inputs(
                algo,
                logprobs=logprobs,
                proximal_logprobs=proximal_logprobs,
                behavior_logprobs=packed.behavior_logprobs,
                advantages=given.advantages[at],
                mask=given.mask[at],
                sequence=packed.sequence,
                entropy=entropy,
                aggregation_weights=aggregation_weights[at],
                off_policy_weights=_pick_tokens(off_policy_weights, at),
                reference_logprobs=_pick_tokens(given.reference_logprobs, at),
                kl_coef=self.kl_coef if algo.kl.loss_coef > 0 else 0.0,
                imitation_weights=_pick_tokens(imitation_weights, at),
                staleness=staleness[at],
            )
            loss, added = policy_loss(inputs)
            _add_sums(sums, added)
            return loss

        return loss_fn

    def _weigh_off_policy(self, given: PreparedBatch, rows: list[int]) -> Tensor:
        """Returns [T] the off-policy weights of a minibatch.

        A second-moment mask speaks of the policy as it is now, so that one is asked again for each minibatch.
        """
        logprobs = given.proximal_logprobs
        if self._algo.masks_second_moment and self._config.learner.minibatches > 1:
            logprobs = self._infer_column(self.models.policy, given.batch, rows)
        assert logprobs is not None
        log_ratio, mask = logprobs - given.batch.behavior_logprobs, given.mask & given.mark_rows(rows)
        return compute_off_policy_weights(self._algo, log_ratio, given.advantages, mask, given.sequence)

    def _make_critic_loss(self, given: PreparedBatch, rows: list[int], sums: Sums) -> LossFn:
        """Returns the critic's loss on microbatches of the minibatch `rows`; it adds its metrics to
        `sums`."""
        mask = given.mask & given.mark_rows(rows)
        aggregation_weights = given.weigh_token_mean(mask)
        old_values, targets, clip = given.values, given.value_targets, self._algo.critic.clip
        assert old_values is not None and targets is not None

        def loss_fn(values: Tensor, entropy: Tensor, packed: Packed) -> Tensor:
            at = packed.index
            loss, added = value_loss(
                values, old_values[at], targets[at], mask[at], aggregation_weights[at], clip
            )
            _add_sums(sums, added)
            return loss

        return loss_fn

    # ---- engines

    def _update_model(
        self,
        engine: Engine,
        batch: Batch,
        rows: list[int],
        loss_fn: LossFn,
        lr: float,
        step: int,
        sums: Sums,
        add_entropy: Callable[[DividedEpisodes], None] = lambda divided: None,
    ) -> PackingPlan:
        """Makes one optimizer update on the sequences `rows`, and adds gradient norm and routing to `sums`.

        `lr` is the peak rate; `step` counts the steps of this model, for its schedule. `add_entropy` is told
        of episodes whose loss was asked before their entropies were known.
        """
        packed, plan = self._pack_share(engine, batch, rows)
        divided = self._ask_divided(engine, batch, rows, loss_fn)
        if divided is not None:
            loss_fn = divided.replace_loss(loss_fn)
        grad_norm = engine.update(packed, loss_fn, self._schedule_rate(lr, step))
        if divided is not None:
            add_entropy(divided)
        for name, value in {"grad_norm": grad_norm, **engine.routing_metrics}.items():
            # The 1 counts updates: `_pop_mean` divides by it.
            _add_sums(sums, {name: torch.tensor([value, 1.0], dtype=torch.float64)})
        return plan

    def _ask_divided(
        self, engine: Engine, batch: Batch, rows: list[int], loss_fn: LossFn
    ) -> DividedEpisodes | None:
        """Returns the episodes of `rows` that lie in several microbatches, with their losses asked; None
        where there are none. Each share asks some of them."""
        numbers = find_divided(batch, rows, self._config.learner.tokens_per_microbatch)
        if not numbers:
            return None
        share, divided = engine.share, DividedEpisodes(batch, numbers)
        # Each share needs an episode of its own to infer.
        others = sorted(set(rows) - set(numbers))[: max(0, share.count - len(numbers))]
        outputs = self._infer_column(engine, batch, numbers + others)
        if share.holds_results:
            divided.ask_loss(loss_fn, outputs, slice(share.index, None, share.count))
        self._world.add_tensor(divided.slopes)
        return divided

    def _schedule_rate(self, lr: float, step: int) -> float:
        """Returns the learning rate: it rises over `warmup_steps`, then falls linearly to the end of
        `decay_steps`."""
        learner = self._config.learner
        warmup_steps, decay_steps = learner.warmup_steps, learner.decay_steps or self._config.run.steps
        if step + 1 < warmup_steps:
            return lr * (step + 1) / warmup_steps
        fallen = min(1.0, (step + 1 - warmup_steps) / max(1, decay_steps - warmup_steps))
        return lr * (1.0 - (1.0 - learner.lr_end) * fallen)

    def _pack_share(
        self, engine: Engine, batch: Batch, rows: list[int]
    ) -> tuple[Sequence[Packed], PackingPlan]:
        """Returns the microbatches of this rank's share of the sequences `rows`, and the plan of all
        shares."""
        share, budget = engine.share, self._config.learner.tokens_per_microbatch
        packed, plan = divide_rows(batch, rows, budget, share.count, share.index, self.models.cost)
        return ReportedMicrobatches(packed, self.report_progress), plan

    def _infer_column(self, engine: Engine, batch: Batch, rows: list[int] | None = None) -> Tensor:
        """Returns [T] log-probabilities, or values, of the sequences `rows` (None: all); 0 elsewhere."""
        column = torch.zeros(len(batch.tokens))
        packed, _ = self._pack_share(
            engine, batch, list(range(batch.num_sequences)) if rows is None else rows
        )
        for part, inferred in zip(packed, engine.infer(packed), strict=True):
            if engine.share.holds_results:
                column[part.index] = inferred
        return self._world.add_tensor(column)

    def _add_shares(self, engine: Engine, sums: Sums) -> Sums:
        """Returns the sums over all shares of the engine."""
        return self._world.add_named_tensors(sums if engine.share.holds_results else {})


def _note_logprobs(loss_fn: LossFn, noted_logprobs: Tensor) -> LossFn:
    """Returns the same loss, which also writes the log-probabilities that it is given into
    `noted_logprobs` [T]."""

    def loss(logprobs: Tensor, entropy: Tensor, packed: Packed) -> Tensor:
        noted_logprobs[packed.index] = logprobs.detach()
        return loss_fn(logprobs, entropy, packed)

    return loss


def _pick_tokens(column: Tensor | None, index: Tensor) -> Tensor | None:
    return None if column is None else column[index]


def _pop_mean(totals: Sums, name: str) -> float:
    """Removes a sum that was added as [value, 1] at each update, and returns its mean over the updates."""
    total, count = totals.pop(name).tolist()
    return total / count


def _average_metrics(metrics: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(one[name] for one in metrics) / len(metrics) for name in metrics[0]}


def _add_sums(sums: Sums, added: Sums) -> None:
    for name, value in added.items():
        sums[name] = sums[name] + value if name in sums else value
