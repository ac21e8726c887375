"""One training step, from a batch to updated models.

The step of every preset is the same however it is divided over microbatches and ranks. Its parts keep their
promises.
"""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import on_ranks
from torch import Tensor
from training_steps import (
    GROUP_WEIGHTS,
    SAMPLES,
    STEP,
    StepOutcome,
    assert_equal,
    assert_same,
    change_learner,
    configure_step,
    copy_state,
    copy_states,
    draw_responses,
    make_step_batch,
)
from transformers import AutoModelForCausalLM

from algos.advantages import dr_grpo_advantages, grpo_advantages
from buffers.trajectory import Trajectory
from configs.algo import Aggregation
from configs.load import FOLDER
from configs.schema import Config
from learners.engine import Engine, ModelKind
from learners.fsdp import FsdpEngine
from learners.models import Models, load_models
from learners.packing import Batch, split_minibatches
from learners.prepared import interpolate_proximal
from learners.step import Trainer
from learners.world import World

COMPOSITIONS = {path.stem: [f"algo={path.stem}"] for path in sorted(FOLDER.glob("algo/*.yaml"))} | {
    "m2po_strict": ["algo=m2po", "algo.m2po.threshold=0.003"],
    "dapo_loglinear": ["algo=dapo", "algo.proximal=loglinear"],
    "grpo_with_everything": [
        "algo=grpo",
        "algo.kl.loss_coef=0.04",
        "algo.entropy_coef=0.01",
        "algo.normalize_weights=true",
        "algo.imitation_coef=0.1",
        "algo.rejection.estimator=k3",
        "algo.rejection.level=sequence_max",
        "algo.rejection.threshold=0.02",
        "algo.reward.overlong_filter=true",
        "algo.reward.normalize=true",
        "algo.reward.clip=1",
        "algo.reward.filter_power=1",
    ],
}
IN_TWO = {
    "gspo",
    "kimi",
    "m2po",
    "m2po_strict",
    "ppo",
    "prime",
    "rloo",
    "vtrace",
    "dapo_loglinear",
    "grpo_with_everything",
}
"""Compositions that are tried with two updates in the step."""


@cache
def configure_composition(model: Path, name: str) -> Config:
    critic = ["algo.critic.lr=1e-4"] if name in ("ppo", "vapo", "vtrace") else []
    return configure_step(model, *COMPOSITIONS[name], *critic, f"learner.minibatches={1 + (name in IN_TWO)}")


class ModelStock:
    """Models as they were when loaded, set back and not made again: that would take longer than their
    step."""

    def __init__(self, origin: Path) -> None:
        """`origin`: the reference, from which the policy has drifted."""
        self._origin = origin
        self._made: dict[tuple[bool, ...], tuple[Models, list[tuple[Tensor, Tensor]]]] = {}

    def reset_models(self, config: Config) -> Models:
        algo = config.algo
        key = (
            algo.needs_critic,
            algo.needs_reward_model,
            algo.needs_reference,
            algo.entropy_coef > 0,
        )
        if key not in self._made:
            models = load_models(config)
            if models.reference is not None:
                models = replace(models, reference=FsdpEngine(self._origin, kind=ModelKind.frozen))
            live = [
                value
                for engine in models.trained_engines.values()
                for value in engine._collect_state().values()
            ]  # type: ignore[attr-defined]
            self._made[key] = models, [(value, value.clone()) for value in live]
        models, states = self._made[key]
        for value, before in states:
            value.copy_(before)
        return models

    def run_step(self, config: Config, batch: Batch, world: World | None = None) -> StepOutcome:
        trainer = Trainer(config, self.reset_models(config), world)
        metrics, num_trained = trainer.train(batch, STEP)
        metrics = {
            name: value
            for name, value in metrics.items()
            if not name.startswith(("time/", "throughput/", "packing/"))
        }
        return (
            metrics,
            num_trained,
            {name: copy_state(engine) for name, engine in trainer.models.trained_engines.items()},
        )


pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def drifted(fixed_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fixed model, moved a little: so that a policy differs from its reference."""
    folder, rng = tmp_path_factory.mktemp("models") / "drifted", torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(fixed_model)
    for parameter in model.parameters():
        parameter.data += 0.003 * torch.randn(parameter.shape, generator=rng)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(drifted: Path) -> list[Trajectory]:
    return draw_responses(drifted)


@pytest.fixture(scope="module")
def batch(rows: list[Trajectory]) -> Batch:
    return make_step_batch(rows, GROUP_WEIGHTS)


@pytest.fixture(scope="module")
def stock(fixed_model: Path) -> ModelStock:
    return ModelStock(fixed_model)


@pytest.fixture(scope="module")
def whole(stock: ModelStock, drifted: Path, batch: Batch) -> dict[str, StepOutcome]:
    """The outcome of every composition, on one rank in one microbatch."""
    return {name: stock.run_step(configure_composition(drifted, name), batch) for name in COMPOSITIONS}


# ---- every composition


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_step_has_finite_metrics_and_moves_every_model(
    name: str, whole: dict[str, StepOutcome], stock: ModelStock, drifted: Path, batch: Batch
) -> None:
    metrics, num_trained, states = whole[name]
    assert [key for key, value in metrics.items() if not math.isfinite(value)] == []
    assert num_trained == int(batch.sampled.sum()) and metrics["optimizer/grad_norm"] > 0
    assert (metrics["offpolicy/dropped_fraction"] > 0) == (name in ("m2po_strict", "grpo_with_everything"))
    for model, engine in stock.reset_models(configure_composition(drifted, name)).trained_engines.items():
        before = copy_state(engine)
        moved = [key for key in before if not torch.equal(before[key], states[model][key])]
        assert any(key.startswith("model.") for key in moved), model


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_step_in_many_microbatches_is_the_same_as_in_one(
    name: str, whole: dict[str, StepOutcome], stock: ModelStock, drifted: Path, batch: Batch
) -> None:
    assert len(batch.tokens) > 4 * 80
    assert_same(
        stock.run_step(change_learner(configure_composition(drifted, name), tokens_per_microbatch=80), batch),
        whole[name],
    )


@pytest.mark.parametrize("name", ["ppo", "vapo"])
def test_a_step_without_a_trained_token_changes_nothing(
    name: str, stock: ModelStock, drifted: Path, batch: Batch
) -> None:
    config = configure_step(
        drifted,
        *COMPOSITIONS[name],
        "algo.kl.reward_coef=0.02",
        "algo.kl.target=0.5",
        "staleness.on_late=mask",
    )
    models = stock.reset_models(config)
    trainer = Trainer(config, models)
    trainer.train(batch, STEP)  # the optimizers have momentum now
    before = copy_states(models)
    kl_coef = trainer.kl_coef
    stale = replace(batch, versions=torch.where(batch.sampled, 0, -1).int())
    metrics, num_trained = trainer.train(stale, 1000)
    assert num_trained == 0 and metrics["optimizer/lr"] == 0.0 and metrics["staleness/masked_fraction"] == 1.0
    assert trainer.kl_coef == kl_coef
    after = copy_states(models)
    assert [key for key, value in before.items() if not torch.equal(after[key], value)] == []


def test_the_policys_warmup_begins_when_its_critic_has_been_trained_ahead(
    stock: ModelStock, drifted: Path, batch: Batch
) -> None:
    config = configure_step(
        drifted,
        *COMPOSITIONS["vapo"],
        "algo.critic.pretrain_steps=10",
        "learner.warmup_steps=4",
        "staleness.on_late=mask",
    )
    trainer = Trainer(config, stock.reset_models(config))
    rates = []
    for step in (9, 10, 11, 13, 14):
        fresh = replace(batch, versions=torch.where(batch.sampled, step, -1).int())
        rates.append(trainer.train(fresh, step)[0]["optimizer/lr"])
    assert rates == pytest.approx([0.0, 0.25e-4, 0.5e-4, 1e-4, 1e-4])


def test_the_learning_rate_rises_then_falls_linearly_to_its_end_and_stays_there(
    stock: ModelStock, drifted: Path, batch: Batch
) -> None:
    for decay, steps in (("learner.decay_steps=14", "run.steps=240"), ("run.steps=14", "run.steps=14")):
        config = configure_step(
            drifted, "algo=grpo", "learner.warmup_steps=4", "learner.lr_end=0.2", decay, steps
        )
        trainer = Trainer(config, stock.reset_models(config))
        rates = [trainer._schedule_rate(1e-4, step) for step in (0, 2, 3, 8, 13, 14, 500)]
        assert rates == pytest.approx([0.25e-4, 0.75e-4, 1e-4, 0.6e-4, 0.2e-4, 0.2e-4, 0.2e-4])
    short = configure_step(
        drifted, "algo=grpo", "learner.warmup_steps=4", "learner.lr_end=0.2", "run.steps=2"
    )
    assert [
        Trainer(short, stock.reset_models(short))._schedule_rate(1e-4, step) for step in (0, 2, 3, 4)
    ] == pytest.approx([0.25e-4, 0.75e-4, 1e-4, 0.2e-4])
    metrics, _ = trainer.train(batch, STEP)
    assert metrics["optimizer/lr"] == trainer._schedule_rate(1e-4, STEP)


def test_the_critic_learns_from_a_sequence_as_often_as_it_counts(
    stock: ModelStock, drifted: Path, batch: Batch
) -> None:
    config = configure_step(drifted, *COMPOSITIONS["ppo"])
    weights = (torch.arange(batch.num_sequences) % 3 > 0).float()
    critic = stock.run_step(config, replace(batch, group_weights=weights))[2]["critic"]
    rescaled = stock.run_step(config, replace(batch, group_weights=4 * weights))[2]["critic"]
    assert all(torch.equal(rescaled[name], value) for name, value in critic.items()), (
        "a mean knows what it divides by"
    )
    unweighted = stock.run_step(config, batch)[2]["critic"]
    assert not all(torch.equal(unweighted[name], value) for name, value in critic.items())


def test_a_step_shows_at_each_microbatch_that_it_gets_on(
    stock: ModelStock, drifted: Path, batch: Batch
) -> None:
    config = change_learner(configure_composition(drifted, "ppo"), tokens_per_microbatch=80)
    trainer, shown = Trainer(config, stock.reset_models(config)), []
    trainer.report_progress = lambda: shown.append("microbatch")
    metrics, _ = trainer.train(batch, STEP)
    of_all = config.learner.minibatches * metrics["packing/microbatches"]
    assert len(shown) >= 3 * of_all > 9, "values, the critic's update and the policy's"


@pytest.mark.parametrize(
    "name", [name for name in COMPOSITIONS if name != "grpo_with_everything"]
)  # it draws by place
def test_the_order_of_groups_and_of_samples_within_a_minibatch_does_not_matter(
    name: str, whole: dict[str, StepOutcome], stock: ModelStock, drifted: Path, rows: list[Trajectory]
) -> None:
    order, rng = (2, 0, 1, 5, 3, 4), np.random.default_rng(1)
    shuffled = [
        replace(rows[SAMPLES * old + sample], group=new)
        for new, old in enumerate(order)
        for sample in rng.permutation(SAMPLES)
    ]
    batch = make_step_batch(shuffled, [GROUP_WEIGHTS[old] for old in order])
    assert_same(stock.run_step(configure_composition(drifted, name), batch), whole[name])


def run_compositions(
    world: World, origin: Path, batch: Batch, configs: dict[str, Config]
) -> dict[str, StepOutcome]:
    torch.manual_seed(world.rank)
    stock = ModelStock(origin)
    return {name: stock.run_step(config, batch, world) for name, config in configs.items()}


@pytest.fixture(scope="module")
def of_two_ranks(
    fixed_model: Path, drifted: Path, batch: Batch, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, StepOutcome]]:
    configs = {name: change_learner(configure_composition(drifted, name), ranks=2) for name in COMPOSITIONS}
    return on_ranks(2, run_compositions, tmp_path_factory.mktemp("ranks"), fixed_model, batch, configs)


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_step_on_two_ranks_is_the_same_as_on_one(
    name: str, whole: dict[str, StepOutcome], of_two_ranks: list[dict[str, StepOutcome]]
) -> None:
    (metrics, num_trained, first), (*told, second) = (found[name] for found in of_two_ranks)
    assert told == [metrics, num_trained], "every rank knows all of the step"
    states = {
        model: {key: torch.cat([part, second[model][key]]) for key, part in state.items()}
        for model, state in first.items()
    }
    assert_same((metrics, num_trained, states), whole[name])


def test_rejection_drops_the_responses_that_are_apart_and_no_others(
    whole: dict[str, StepOutcome], batch: Batch
) -> None:
    """`draw_responses` puts a ratio of e^0.3 into the last response of each group: k3 is 0.05 there, and
    at most 0.012 elsewhere."""
    sample = torch.arange(batch.num_sequences)[batch.sequence] % SAMPLES
    learned = batch.sampled & ~batch.truncated[batch.sequence]
    share = float((learned & (sample == SAMPLES - 1)).sum() / learned.sum())
    assert (
        whole["grpo_with_everything"][0]["offpolicy/dropped_fraction"] == pytest.approx(share)
        and 0.1 < share < 0.5
    )


# ---- what the parts promise


def test_rewards_are_shaped_before_they_become_advantages(
    stock: ModelStock, drifted: Path, batch: Batch
) -> None:
    lengths = torch.zeros(batch.num_sequences).index_add_(0, batch.sequence, batch.sampled.float())
    rewards = batch.rewards + (-(lengths - 6) / 6).clamp(-1, 0)
    rewards = ((rewards - rewards.mean()) / rewards.std(correction=0)).clamp(-0.9, 0.9)
    config = configure_step(
        drifted,
        "algo=dr_grpo",
        "algo.reward.overlong_share=0.5",
        "algo.reward.normalize=true",
        "algo.reward.clip=0.9",
    )
    given = Trainer(config, stock.reset_models(config))._prepare_batch(batch, STEP)
    torch.testing.assert_close(given.advantages, dr_grpo_advantages(rewards, batch.groups)[batch.sequence])


def test_the_loss_is_that_of_the_advantages_the_corrections_and_what_was_good(
    stock: ModelStock, drifted: Path, batch: Batch
) -> None:
    """With one update π_θ is π_p: the ratio is 1, the weight is π_p / μ up to 2, and each token is one of
    its sequence's."""
    config = configure_step(drifted, "algo=grpo", "algo.imitation_coef=0.1", "algo.imitation_above=0.5")
    trainer = Trainer(config, stock.reset_models(config))
    logprobs, expected = trainer.infer_logprobs(batch), 0.0
    advantages = grpo_advantages(batch.rewards, batch.groups)
    for i, (start, end) in enumerate(zip(batch.offsets, batch.offsets[1:], strict=False)):
        at = torch.arange(start, end)[batch.sampled[start:end]]
        weight = (logprobs - batch.behavior_logprobs)[at].exp().clamp(max=2)
        expected -= float(batch.group_weights[i] * advantages[i] * weight.mean()) / batch.num_sequences
    good = batch.sampled & (batch.rewards == 1)[batch.sequence]
    counts = batch.group_weights[batch.sequence[good]]
    expected -= 0.1 * float((counts * logprobs[good]).sum() / counts.sum())
    assert trainer.train(batch, STEP)[0]["loss/policy"] == pytest.approx(expected, rel=1e-4)


def test_a_penalty_in_the_reward_is_what_the_policy_likes_a_token_more_than_its_reference_does(
    stock: ModelStock, drifted: Path, batch: Batch
) -> None:
    config = configure_step(drifted, "algo=reinforce_pp")
    trainer = Trainer(config, stock.reset_models(config))
    assert trainer.models.reference is not None
    given = trainer._prepare_batch(replace(batch, rewards=torch.zeros(batch.num_sequences)), STEP)
    charged = 0.01 * (trainer._infer_column(trainer.models.reference, batch) - trainer.infer_logprobs(batch))
    returns = torch.zeros(len(batch.tokens))
    for start, end in zip(batch.offsets, batch.offsets[1:], strict=False):
        returns[start:end] = torch.where(batch.sampled, charged, 0)[start:end].flip(0).cumsum(0).flip(0)
    returns = returns[batch.sampled]
    expected = (returns - returns.mean()) / returns.std(correction=0)
    torch.testing.assert_close(given.advantages[batch.sampled], expected, atol=1e-3, rtol=1e-3)


def test_the_reward_of_a_sequence_in_which_nothing_was_sampled_counts_for_its_own_group(
    stock: ModelStock, drifted: Path, batch: Batch
) -> None:
    config, silent = configure_step(drifted, "algo=dr_grpo"), torch.arange(batch.num_sequences) == SAMPLES + 2
    given = replace(
        batch,
        sampled=batch.sampled & ~silent[batch.sequence],
        versions=batch.versions.masked_fill(silent[batch.sequence], -1),
        rewards=batch.rewards + 5 * silent,
    )
    found = Trainer(config, stock.reset_models(config))._prepare_batch(given, STEP).advantages
    torch.testing.assert_close(found, dr_grpo_advantages(given.rewards, given.groups)[given.sequence])


@pytest.mark.parametrize("name", ["m2po_strict", "ppo", "vtrace", "grpo_with_everything"])
def test_a_step_of_tokens_that_are_all_beyond_the_bound_changes_nothing_and_has_finite_metrics(
    name: str, stock: ModelStock, drifted: Path, batch: Batch
) -> None:
    config = configure_composition(drifted, name)
    before = {
        model: copy_state(engine) for model, engine in stock.reset_models(config).trained_engines.items()
    }
    old = replace(batch, versions=torch.where(batch.sampled, STEP - 3, -1).int())
    metrics, num_trained, states = stock.run_step(config, old)
    assert num_trained == 0 and metrics["staleness/masked_fraction"] == 1
    assert [key for key, value in metrics.items() if not math.isfinite(value)] == []
    assert_equal((metrics, num_trained, states), (metrics, num_trained, before))


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean_token_mean"])
@pytest.mark.parametrize("num_minibatches", [1, 2, 3])
def test_the_weights_of_the_tokens_of_a_minibatch_add_up_to_one(
    kind: Aggregation, num_minibatches: int, stock: ModelStock, drifted: Path, rows: list[Trajectory]
) -> None:
    config = configure_step(drifted, f"algo.aggregation={kind}")
    trainer = Trainer(config, stock.reset_models(config))
    given = trainer._prepare_batch(make_step_batch(rows), STEP)
    for rows_of_part in split_minibatches(given.batch, num_minibatches):
        weights = given.weigh_minibatch(config, rows_of_part, num_minibatches)
        assert float(weights.sum()) == pytest.approx(1) and not weights[~given.mark_rows(rows_of_part)].any()


def test_the_entropy_bonus_raises_the_entropy_and_without_it_equal_rewards_teach_nothing(
    stock: ModelStock, drifted: Path, batch: Batch
) -> None:
    alike, entropies = replace(batch, rewards=torch.ones(batch.num_sequences)), {}
    for coef in (0.0, 1.0):
        config = configure_step(drifted, "algo=grpo", f"algo.entropy_coef={coef}", "learner.lr=3e-4")
        trainer = Trainer(config, stock.reset_models(config))
        steps = [trainer.train(alike, STEP)[0] for _ in range(5)]
        entropies[coef] = [metrics["policy/entropy"] for metrics in steps]
        assert all((metrics["optimizer/grad_norm"] > 0) == (coef > 0) for metrics in steps)
    rising = entropies[1.0]
    assert rising == sorted(rising) and rising[-1] > rising[0] + 0.05
    assert set(entropies[0.0]) == {rising[0]}


def poison_sequences(batch: Batch, sequences: Tensor, behavior: float) -> Batch:
    """Other tokens, and other behaviour log-probabilities, in some of the sequences [N]."""
    where = sequences[batch.sequence] & batch.sampled
    assert where.any() and (batch.sampled & ~where).any()
    return replace(
        batch,
        tokens=torch.where(where, (batch.tokens + 7) % 300, batch.tokens),
        behavior_logprobs=batch.behavior_logprobs.masked_fill(where, behavior),
    )


def test_a_sequence_counts_as_often_as_it_was_drawn_and_not_at_all_if_it_was_not(
    stock: ModelStock, drifted: Path, batch: Batch
) -> None:
    config = configure_step(drifted, "algo=grpo", "algo.reward.filter_power=1", "run.seed=3")
    counts = Trainer(config, stock.reset_models(config))._prepare_batch(batch, STEP).sequence_counts
    drawn = counts / batch.group_weights
    assert float(drawn.sum()) == pytest.approx(batch.num_sequences) and float(drawn.max()) > 1.5
    assert not counts[batch.rewards == 0].any() and (counts[batch.rewards > 0] == 0).any()
    found = stock.run_step(config, batch)
    assert_equal(stock.run_step(config, poison_sequences(batch, counts == 0, behavior=-2.0)), found)
    assert_equal(
        stock.run_step(configure_step(drifted, "algo=grpo"), replace(batch, group_weights=counts)), found
    )


def test_all_ranks_and_all_repetitions_of_a_step_draw_the_same(
    stock: ModelStock, drifted: Path, batch: Batch
) -> None:
    def draw(step: int, *overrides: str, rank: int = 0) -> list[float]:
        torch.manual_seed(rank + 1)
        config = configure_step(drifted, "algo=grpo", "algo.reward.filter_power=1", *overrides)
        return (
            Trainer(config, stock.reset_models(config), World(rank, 1))
            ._prepare_batch(batch, step)
            .sequence_counts.tolist()
        )

    first = draw(STEP)
    assert draw(STEP) == draw(STEP, "learner.ranks=2", rank=1) == first
    assert draw(STEP + 1) != first and draw(STEP, "run.seed=1") != first


@pytest.mark.parametrize("name", ["grpo", "ppo", "vtrace"])
def test_what_was_cut_off_does_not_matter_to_the_update_and_is_still_counted(
    name: str, whole: dict[str, StepOutcome], stock: ModelStock, drifted: Path, batch: Batch
) -> None:
    algo = configure_composition(drifted, name).algo
    config = replace(
        configure_composition(drifted, name),
        algo=replace(algo, reward=replace(algo.reward, overlong_filter=True)),
    )
    found = stock.run_step(config, batch)
    poison = stock.run_step(config, poison_sequences(batch, batch.truncated, behavior=math.nan))
    assert_equal(poison, found)
    assert poison[:2] == found[:2], "not even the metrics see it"
    assert found[1] == int(batch.sampled.sum())
    assert found[0]["loss/policy"] != whole[name][0]["loss/policy"]


def count_passes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each forward pass without an update."""
    calls, infer = [], engine.infer
    monkeypatch.setattr(engine, "infer", lambda packed: (calls.append(1), infer(packed))[1])
    return calls


@pytest.mark.parametrize(
    ("composition", "passes"),
    [
        ("algo=grpo algo.proximal=loglinear", 0),
        ("algo=grpo", 1),
        ("algo=m2po", 3),
    ],  # m2po's mask: of each minibatch
)
def test_loglinear_trains_minibatches_without_a_forward_pass_before(
    composition: str,
    passes: int,
    stock: ModelStock,
    drifted: Path,
    batch: Batch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = configure_step(drifted, *composition.split(), "learner.minibatches=2")
    trainer = Trainer(config, stock.reset_models(config))
    calls = count_passes(trainer.models.policy, monkeypatch)
    trainer.train(batch, STEP)
    assert len(calls) == passes


def test_loglinear_lies_between_behaviour_and_current_policy_by_staleness(
    stock: ModelStock, drifted: Path, batch: Batch
) -> None:
    behavior, current = torch.full((5,), -3.0), torch.full((5,), -1.0)
    between = interpolate_proximal(current, behavior, torch.tensor([-1, 0, 1, 3, 10_000]))
    assert between.tolist() == pytest.approx([-3.0, -3.0, -2.0, -1.5, -1.0], abs=1e-3)
    fresh = replace(batch, versions=torch.where(batch.sampled, STEP, -1).int())
    loglinear_step, behavior_step = (
        stock.run_step(
            configure_step(
                drifted, "algo=grpo", "mode=on_policy", f"algo.proximal={kind}", "learner.minibatches=2"
            ),
            fresh,
        )
        for kind in ("loglinear", "behavior")
    )
    assert_equal(loglinear_step, behavior_step)


def test_remax_without_the_reward_of_a_greedy_response_is_refused_with_the_group(
    stock: ModelStock, drifted: Path, batch: Batch
) -> None:
    config = configure_step(drifted, "algo=remax")
    missing = replace(batch, greedy_rewards=batch.greedy_rewards.masked_fill(batch.groups >= 3, math.nan))
    with pytest.raises(
        ValueError, match="algo.advantage=remax needs the reward of a greedy response .* group 3$"
    ):
        Trainer(config, stock.reset_models(config)).train(missing, STEP)
