"""Episodes of several turns and branches, engines that answer from given columns, and the step that is
trained on them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from training_steps import GROUP_WEIGHTS, GROUPS, SAMPLES, STEP, make_step_batch

from buffers.trajectory import GREEDY, Trajectory
from configs.schema import Config
from learners.checkpoint import StateWriter
from learners.divided import DividedEpisodes
from learners.engine import Engine, LossFn, Share
from learners.models import Models
from learners.packing import Batch, Packed
from learners.step import Trainer
from learners.world import World
from sync.stream import TensorPart


def draw_episodes(seed: int) -> list[Trajectory]:
    """Returns six groups of four episodes: one to three branches, up to five turns, in an order that
    interleaves the branches. Some have rewards by turn."""
    rng, rows = np.random.default_rng(seed), []
    for group in range(GROUPS):
        greedy = float(rng.integers(2))
        for sample in range(SAMPLES):
            rows += draw_episode(rng, group, sample, greedy)
    return rows


def draw_episode(rng: np.random.Generator, group: int, sample: int, greedy: float) -> list[Trajectory]:
    num_branches = int(rng.integers(1, 4))
    order = rng.permutation([*range(num_branches), *rng.integers(0, num_branches, rng.integers(0, 3))])
    is_paid, is_cut = bool(rng.integers(4)), bool(rng.integers(6) == 0)
    cut_branch = int(rng.integers(num_branches)) if is_cut else -1
    # Sums of fourths are exact in float32.
    paid = rng.integers(-2, 5, len(order)) / 4
    rows = []
    for branch in range(num_branches):
        columns: dict[str, list[float]] = {
            name: [] for name in ("tokens", "sampled", "logprobs", "versions", "turn", "token_rewards")
        }
        add_tokens(columns, rng, int(rng.integers(1, 4)))
        for turn in np.flatnonzero(order == branch):
            add_tokens(columns, rng, int(rng.integers(1, 5)), int(turn))
            columns["token_rewards"][-1] = float(paid[turn])
            add_tokens(columns, rng, int(rng.integers(0, 3)))
        columns["token_rewards"] = columns["token_rewards"] if is_paid else []
        rows.append(
            Trajectory(
                group=group, sample=sample, branch=branch, due=STEP, prompt_id=group, task="t",
                reward=float(paid.sum()), rewards={GREEDY: greedy}, generator="g",
                finish_reason="length" if branch == cut_branch else "stop",
                stop="completed" if not is_cut else "context_overflow" if sample % 2 else "max_turns",
                started_at=0.0, finished_at=1.0, **columns,  # type: ignore[arg-type]
            )
        )  # fmt: skip
    return rows


def add_tokens(columns: dict[str, list[float]], rng: np.random.Generator, count: int, turn: int = -1) -> None:
    """Adds tokens that were sampled in this turn; without a turn, tokens of the environment."""
    is_sampled = turn >= 0
    columns["tokens"] += rng.integers(3, 40, count).tolist()
    columns["sampled"] += [is_sampled] * count
    columns["logprobs"] += (-rng.uniform(0.1, 2.0, count) * is_sampled).tolist()
    versions = STEP - rng.choice(4, count, p=[0.4, 0.3, 0.2, 0.1])
    columns["versions"] += versions.tolist() if is_sampled else [-1] * count
    columns["turn"] += [turn] * count
    columns["token_rewards"] += [0.0] * count


@dataclass(frozen=True)
class ModelColumns:
    """The answers of all models, by place in the batch: columns [T]."""

    logprobs: Tensor
    """log π_θ, in updates"""
    proximal_logprobs: Tensor
    """log π_p, which the policy answers when it is asked before"""
    reference_logprobs: Tensor
    values: Tensor
    """the critic's, in updates"""
    old_values: Tensor
    reward_logprobs: Tensor
    """log π_φ of PRIME's reward model"""

    @classmethod
    def draw(cls, rows: list[Trajectory], seed: int) -> "ModelColumns":
        """Draws log-probabilities near those of the behavior policy, and values; 0 where no token was
        sampled, as an engine gives."""
        rng = torch.Generator().manual_seed(seed)
        behavior = torch.tensor([value for row in rows for value in row.logprobs])
        sampled = torch.tensor([flag for row in rows for flag in row.sampled])

        def draw_near(center: Tensor, width: float) -> Tensor:
            drawn = center + width * (2 * torch.rand(len(center), generator=rng) - 1)
            return torch.where(sampled, drawn, 0.0)

        proximal = draw_near(behavior, 0.4)
        old_values = draw_near(torch.zeros_like(behavior), 1.0)
        return cls(
            logprobs=draw_near(proximal, 0.5),
            proximal_logprobs=proximal,
            reference_logprobs=draw_near(behavior, 0.5),
            values=draw_near(old_values, 0.6),
            old_values=old_values,
            reward_logprobs=draw_near(behavior, 0.5),
        )

    def pick_places(self, index: Tensor) -> "ModelColumns":
        return ModelColumns(**{name: getattr(self, name)[index] for name in self.__dataclass_fields__})


@dataclass
class ScriptedModel:
    """An engine that gives the columns it was made with, and notes the gradients that it gets."""

    before: Tensor
    """[T] what `infer` gives"""
    after: Tensor
    """[T] what updates see"""
    share: Share = Share()
    gradient: Tensor = field(init=False)
    """[T] sum over the updates"""
    microbatches: list[Packed] = field(default_factory=list)
    routing_metrics: dict[str, float] = field(default_factory=dict)
    is_updated: bool = False
    """True while `infer` gives what updates see: the weights that an update begins with"""

    def __post_init__(self) -> None:
        self.gradient = torch.zeros_like(self.after)

    def infer(self, microbatches: Sequence[Packed]) -> list[Tensor]:
        column = self.after if self.is_updated else self.before
        return [column[packed.index] for packed in microbatches]

    def update(self, microbatches: Sequence[Packed], loss_fn: LossFn, lr: float) -> float:
        for packed in microbatches:
            leaf = self.after[packed.index].requires_grad_()
            loss_fn(leaf, torch.full_like(leaf, 0.5), packed).backward()
            assert leaf.grad is not None
            self.gradient[packed.index] += leaf.grad
            self.microbatches.append(packed)
        return 1.0

    def stream_weights(self) -> Iterator[TensorPart]:
        return iter(())

    def copy_state(self) -> StateWriter:
        return lambda folder: None

    def load_state(self, folder: Path) -> None:
        pass


@dataclass(frozen=True)
class ScriptedStep:
    """The outcome of a step with scripted models."""

    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    """[T] of each trained model, by its name in a checkpoint"""


class ScriptedTrainer(Trainer):
    """Asks the losses of divided episodes at what updates see, as a trainer of real models does."""

    def _ask_divided(
        self, engine: Engine, batch: Batch, rows: list[int], loss_fn: LossFn
    ) -> DividedEpisodes | None:
        assert isinstance(engine, ScriptedModel)
        engine.is_updated = True
        divided = super()._ask_divided(engine, batch, rows, loss_fn)
        engine.is_updated = False
        return divided


def run_scripted_step(
    config: Config, batch: Batch, columns: ModelColumns, world: World | None = None
) -> ScriptedStep:
    """Trains one step. With several ranks, gradients are those of this rank's share."""
    world, algo = world or World(), config.algo
    share = Share(index=world.rank, count=world.size)
    models = Models(
        policy=ScriptedModel(columns.proximal_logprobs, columns.logprobs, share),
        critic=ScriptedModel(columns.old_values, columns.values, share) if algo.needs_critic else None,
        reward_model=(
            ScriptedModel(columns.reward_logprobs, columns.reward_logprobs, share)
            if algo.needs_reward_model
            else None
        ),
        reference=(
            ScriptedModel(columns.reference_logprobs, columns.reference_logprobs, share)
            if algo.needs_reference
            else None
        ),
    )
    metrics, _ = ScriptedTrainer(config, models, world).train(batch, STEP)
    kept = {name: value for name, value in metrics.items() if not name.startswith(("time/", "packing/"))}
    trained: dict[str, ScriptedModel] = models.trained_engines  # type: ignore[assignment]
    return ScriptedStep(kept, {name: engine.gradient for name, engine in trained.items()})


def make_branched_batch(rows: list[Trajectory]) -> Batch:
    return make_step_batch(rows, GROUP_WEIGHTS)


def move_branches(rows: list[Trajectory], seed: int) -> tuple[list[Trajectory], Tensor]:
    """Returns the rows with the branches of each episode in another order, numbered anew, and the old places
    [T] of their tokens."""
    rng, starts = np.random.default_rng(seed), np.cumsum([0, *(len(row.tokens) for row in rows)])
    numbers: list[int] = []
    for group in range(GROUPS):
        for sample in range(SAMPLES):
            own = [i for i, row in enumerate(rows) if (row.group, row.sample) == (group, sample)]
            numbers += rng.permutation(own).tolist()
    moved, count = [], 0
    for place, number in enumerate(numbers):
        is_first = place == 0 or rows[number].sample != moved[-1].sample
        count = 0 if is_first else count + 1
        moved.append(replace(rows[number], branch=count))
    places = [torch.arange(int(starts[number]), int(starts[number + 1])) for number in numbers]
    return moved, torch.cat(places)
