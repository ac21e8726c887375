"""One training step, from a batch to updated models: of every preset the same however it is divided, and what its parts promise."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from ranks import on_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from algos.advantages import dr_grpo, grpo
from buffers.trajectory import GREEDY, Trajectory, to_batch
from configs.algorithms import Aggregation
from configs.load import FOLDER, load
from configs.schema import Config
from learners.engine import Engine, Kind
from learners.fsdp import FsdpEngine
from learners.models import Models, load_models
from learners.packing import Batch, from_arrow
from learners.step import Trainer, loglinear
from learners.world import World

STEP = 12
"""Past VAPO's pre-training."""
GROUPS, SAMPLES, LONGEST = 6, 4, 12
COMPOSITIONS = {path.stem: [f"algo={path.stem}"] for path in sorted(FOLDER.glob("algo/*.yaml"))} | {
    "m2po_strict": ["algo=m2po", "algo.m2po.threshold=0.003"],
    "dapo_loglinear": ["algo=dapo", "algo.proximal=loglinear"],
    "grpo_with_everything": [
        "algo=grpo", "algo.kl.loss_coef=0.04", "algo.entropy_coef=0.01", "algo.normalise_weights=true", "algo.imitation_coef=0.1",
        "algo.rejection.estimator=k3", "algo.rejection.level=sequence_max", "algo.rejection.threshold=0.02",
        "algo.reward.overlong_filter=true", "algo.reward.normalise=true", "algo.reward.clip=1", "algo.reward.filter_power=1",
    ],
}  # fmt: skip
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
"""Those that are tried with two updates in the step."""

WEIGHTS = [0.5, 1.5, 1.0, 0.8, 1.2, 0.7]
"""Of the groups, as a sampler may give them."""

Outcome = tuple[dict[str, float], int, dict[str, dict[str, Tensor]]]
"""Metrics, tokens within the bound, and by name the state of each model that is trained."""


def log_ratios(rng: np.random.Generator, length: int, apart: bool) -> np.ndarray:
    """log π / μ of a response's tokens, all of other sizes: 0.03 to 0.15 either way, and 0.3 for the first if the response is `apart`."""
    found = rng.uniform(0.03, 0.15, length) * rng.choice([-1, 1], length)
    return np.concatenate([[0.3], found[1:]]) if apart else found


def responses(folder: Path, step: int = STEP) -> list[Trajectory]:
    """Six groups of four, of staleness 0 to 2. Tokens and ratios are drawn here, so that they are the same on every machine; the
    log-probabilities are the model's, less those ratios. The last response of a group, which is never cut off, is `apart`."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    rng, rows = np.random.default_rng(0), []
    for group in range(GROUPS):
        prompt, greedy = rng.integers(3, 300, rng.integers(3, 9)).tolist(), float(rng.integers(2))
        for sample in range(SAMPLES):
            length = LONGEST if sample == group % 3 else int(rng.integers(1, LONGEST))
            tokens = [*prompt, *rng.integers(3, 300, length).tolist()]
            with torch.no_grad():
                scores = model(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            logprobs = scores.gather(-1, torch.tensor(tokens)[len(prompt) :, None])[:, 0].numpy()
            behavior = logprobs - log_ratios(rng, length, apart=sample == SAMPLES - 1)
            assert (behavior < 0).all(), "a log-probability that is cut at 0 has another ratio"
            versions = (step - np.sort(rng.integers(0, 3, length))[::-1]).clip(0)
            rows.append(
                Trajectory(
                    group=group, sample=sample, due=step, prompt_id=group, task="t", generator="g", started_at=0.0, finished_at=1.0,
                    tokens=tokens, sampled=[False] * len(prompt) + [True] * length,
                    logprobs=[0.0] * len(prompt) + behavior.tolist(), versions=[-1] * len(prompt) + versions.tolist(),
                    reward=float(group == 1 or rng.integers(2)), rewards={GREEDY: greedy},
                    finish_reason="length" if length == LONGEST else "stop",
                )
            )  # fmt: skip
    return rows


def batch_of(rows: list[Trajectory], weights: list[float] | None = None) -> Batch:
    return from_arrow(pa.Table.from_batches([to_batch(rows)]), weights or [1.0] * GROUPS)


@cache
def configured(model: Path, *overrides: str) -> Config:
    """Gradients are not clipped, so that their scale shows."""
    return load([
        f"model.path={model}", f"learner.groups_per_step={GROUPS}", f"learner.samples_per_prompt={SAMPLES}",
        f"sampling.max_tokens={LONGEST}", "learner.lr=1e-4", "learner.warmup_steps=0", "learner.lr_end=1", "learner.max_grad_norm=1e6",
        "algo=grpo", "learner.minibatches=1", *overrides,
    ])  # fmt: skip


@cache
def composed(model: Path, name: str) -> Config:
    critic = ["algo.critic.lr=1e-4"] if name in ("ppo", "vapo", "vtrace") else []
    return configured(model, *COMPOSITIONS[name], *critic, f"learner.minibatches={1 + (name in IN_TWO)}")


def changed(config: Config, **learner: int) -> Config:
    return replace(config, learner=replace(config.learner, **learner))


def state_of(engine: Engine) -> dict[str, Tensor]:
    """This rank's part of the weights and of AdamW's first moment, by name."""
    assert isinstance(engine, FsdpEngine)
    return {
        name: value.to_local().clone()
        for name, value in engine._state().items()
        if name.startswith(("model.", "exp_avg.")) and isinstance(value, DTensor)
    }


class Stock:
    """Models as they were when loaded, set back and not made again: that would take longer than their step."""

    def __init__(self, origin: Path) -> None:
        """`origin`: the reference, from which the policy has drifted."""
        self._origin = origin
        self._made: dict[tuple[bool, ...], tuple[Models, list[tuple[Tensor, Tensor]]]] = {}

    def models(self, config: Config) -> Models:
        algo = config.algo
        key = (
            algo.advantage.needs_critic,
            algo.advantage == "prime",
            algo.needs_reference,
            algo.entropy_coef > 0,
        )
        if key not in self._made:
            models = load_models(config)
            if models.reference is not None:
                models = replace(models, reference=FsdpEngine(self._origin, kind=Kind.frozen))
            live = [value for engine in models._trained().values() for value in engine._state().values()]  # type: ignore[attr-defined]
            self._made[key] = models, [(value, value.clone()) for value in live]
        models, states = self._made[key]
        for value, before in states:
            value.copy_(before)
        return models

    def outcome(self, config: Config, batch: Batch, world: World | None = None) -> Outcome:
        trainer = Trainer(config, self.models(config), world)
        metrics, num_trained = trainer.train(batch, STEP)
        metrics = {
            name: value
            for name, value in metrics.items()
            if not name.startswith(("time/", "throughput/", "packing/"))
        }
        return (
            metrics,
            num_trained,
            {name: state_of(engine) for name, engine in trainer.models._trained().items()},
        )


def assert_same(found: Outcome, expected: Outcome) -> None:
    """Gradients within 2e-5 of the largest; weights within 1e-6, a hundredth of a step; metrics within 2e-4.

    AdamW's first step is all but the sign of the gradient: it hides its size, and where that is zero but for rounding it may go either
    way. So its first moment is compared as well, which after one update is the gradient times 1 − β, and weights where that is
    above a thousandth of the largest. After two updates one of the two gradients may still have been rounding: so may one weight in a
    thousand be up to two whole steps apart.
    """
    assert found[0] == pytest.approx(expected[0], rel=2e-4, abs=2e-6) and found[1] == expected[1]
    for model, state in expected[2].items():
        other = found[2][model]
        moments = {
            name.removeprefix("exp_avg."): value
            for name, value in state.items()
            if name.startswith("exp_avg.")
        }
        largest = max(float(value.abs().max()) for value in moments.values())
        assert largest > 0
        apart = []
        for name, value in moments.items():
            torch.testing.assert_close(other[f"exp_avg.{name}"], value, atol=2e-5 * largest, rtol=0)
            clear = value.abs() > 1e-3 * largest
            apart.append((other[f"model.{name}"] - state[f"model.{name}"])[clear].abs())
        weights_apart = torch.cat(apart)
        assert (weights_apart <= 1e-6).float().mean() >= 0.999 and weights_apart.max() <= 4e-4


def assert_equal(found: Outcome, expected: Outcome) -> None:
    """To the bit."""
    for model, state in expected[2].items():
        assert [name for name, value in state.items() if not torch.equal(value, found[2][model][name])] == []


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
    return responses(drifted)


@pytest.fixture(scope="module")
def batch(rows: list[Trajectory]) -> Batch:
    return batch_of(rows, WEIGHTS)


@pytest.fixture(scope="module")
def stock(fixed_model: Path) -> Stock:
    return Stock(fixed_model)


@pytest.fixture(scope="module")
def whole(stock: Stock, drifted: Path, batch: Batch) -> dict[str, Outcome]:
    """Of every composition, on one rank in one microbatch."""
    return {name: stock.outcome(composed(drifted, name), batch) for name in COMPOSITIONS}


# ---- every composition


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_step_has_finite_metrics_and_moves_every_model(
    name: str, whole: dict[str, Outcome], stock: Stock, drifted: Path, batch: Batch
) -> None:
    metrics, num_trained, states = whole[name]
    assert [key for key, value in metrics.items() if not math.isfinite(value)] == []
    assert num_trained == int(batch.sampled.sum()) and metrics["optimizer/grad_norm"] > 0
    assert (metrics["offpolicy/dropped_fraction"] > 0) == (name in ("m2po_strict", "grpo_with_everything"))
    for model, engine in stock.models(composed(drifted, name))._trained().items():
        before = state_of(engine)
        moved = [key for key in before if not torch.equal(before[key], states[model][key])]
        assert any(key.startswith("model.") for key in moved), model


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_step_in_many_microbatches_is_the_same_as_in_one(
    name: str, whole: dict[str, Outcome], stock: Stock, drifted: Path, batch: Batch
) -> None:
    assert len(batch.tokens) > 4 * 80
    assert_same(stock.outcome(changed(composed(drifted, name), tokens_per_microbatch=80), batch), whole[name])


@pytest.mark.parametrize("name", ["ppo", "vapo"])
def test_a_step_without_a_trained_token_changes_nothing(
    name: str, stock: Stock, drifted: Path, batch: Batch
) -> None:
    config = configured(
        drifted,
        *COMPOSITIONS[name],
        "algo.kl.reward_coef=0.02",
        "algo.kl.target=0.5",
        "staleness.on_late=mask",
    )
    models = stock.models(config)
    trainer = Trainer(config, models)
    trainer.train(batch, STEP)  # the optimizers have momentum now
    before = copied(models)
    kl_coef = trainer.kl_coef
    stale = replace(batch, versions=torch.where(batch.sampled, 0, -1).int())
    metrics, num_trained = trainer.train(stale, 1000)
    assert num_trained == 0 and metrics["optimizer/lr"] == 0.0 and metrics["staleness/masked_fraction"] == 1.0
    assert trainer.kl_coef == kl_coef
    after = copied(models)
    assert [key for key, value in before.items() if not torch.equal(after[key], value)] == []


def copied(models: Models) -> dict[tuple[str, str], Tensor]:
    """The state of every trained model, optimizers included."""
    engines = models._trained().items()
    return {
        (model, key): value.clone() for model, engine in engines for key, value in state_of(engine).items()
    }


def test_the_policys_warmup_begins_when_its_critic_has_been_trained_ahead(
    stock: Stock, drifted: Path, batch: Batch
) -> None:
    config = configured(
        drifted,
        *COMPOSITIONS["vapo"],
        "algo.critic.pretrain_steps=10",
        "learner.warmup_steps=4",
        "staleness.on_late=mask",
    )
    trainer = Trainer(config, stock.models(config))
    rates = [trainer.train(replace(batch, versions=torch.where(batch.sampled, step, -1).int()), step)[0]["optimizer/lr"]
             for step in (9, 10, 11, 13, 14)]  # fmt: skip
    assert rates == pytest.approx([0.0, 0.25e-4, 0.5e-4, 1e-4, 1e-4])


def test_the_learning_rate_rises_then_falls_linearly_to_its_end_and_stays_there(
    stock: Stock, drifted: Path, batch: Batch
) -> None:
    for decay, steps in (("learner.decay_steps=14", "run.steps=240"), ("run.steps=14", "run.steps=14")):
        config = configured(
            drifted, "algo=grpo", "learner.warmup_steps=4", "learner.lr_end=0.2", decay, steps
        )
        trainer = Trainer(config, stock.models(config))
        rates = [trainer._rate(1e-4, step) for step in (0, 2, 3, 8, 13, 14, 500)]
        assert rates == pytest.approx([0.25e-4, 0.75e-4, 1e-4, 0.6e-4, 0.2e-4, 0.2e-4, 0.2e-4])
    short = configured(drifted, "algo=grpo", "learner.warmup_steps=4", "learner.lr_end=0.2", "run.steps=2")
    assert [Trainer(short, stock.models(short))._rate(1e-4, step) for step in (0, 2, 3, 4)] == pytest.approx(
        [0.25e-4, 0.75e-4, 1e-4, 0.2e-4]
    )
    metrics, _ = trainer.train(batch, STEP)
    assert metrics["optimizer/lr"] == trainer._rate(1e-4, STEP)


def test_the_critic_learns_from_a_sequence_as_often_as_it_counts(
    stock: Stock, drifted: Path, batch: Batch
) -> None:
    config = configured(drifted, *COMPOSITIONS["ppo"])
    weights = (torch.arange(batch.num_sequences) % 3 > 0).float()
    critic = stock.outcome(config, replace(batch, weights=weights))[2]["critic"]
    rescaled = stock.outcome(config, replace(batch, weights=4 * weights))[2]["critic"]
    assert all(torch.equal(rescaled[name], value) for name, value in critic.items()), (
        "a mean knows what it divides by"
    )
    unweighted = stock.outcome(config, batch)[2]["critic"]
    assert not all(torch.equal(unweighted[name], value) for name, value in critic.items())


def test_a_step_shows_at_each_microbatch_that_it_gets_on(stock: Stock, drifted: Path, batch: Batch) -> None:
    config = changed(composed(drifted, "ppo"), tokens_per_microbatch=80)
    trainer, shown = Trainer(config, stock.models(config)), []
    trainer.moved = lambda: shown.append("microbatch")
    metrics, _ = trainer.train(batch, STEP)
    of_all = config.learner.minibatches * metrics["packing/microbatches"]
    assert len(shown) >= 3 * of_all > 9, "values, the critic's update and the policy's"


@pytest.mark.parametrize(
    "name", [name for name in COMPOSITIONS if name != "grpo_with_everything"]
)  # it draws by place
def test_the_order_of_groups_and_of_samples_within_a_minibatch_does_not_matter(
    name: str, whole: dict[str, Outcome], stock: Stock, drifted: Path, rows: list[Trajectory]
) -> None:
    order, rng = (2, 0, 1, 5, 3, 4), np.random.default_rng(1)
    shuffled = [
        replace(rows[SAMPLES * old + sample], group=new)
        for new, old in enumerate(order)
        for sample in rng.permutation(SAMPLES)
    ]
    batch = batch_of(shuffled, [WEIGHTS[old] for old in order])
    assert_same(stock.outcome(composed(drifted, name), batch), whole[name])


def outcomes(world: World, origin: Path, batch: Batch, configs: dict[str, Config]) -> dict[str, Outcome]:
    torch.manual_seed(world.rank)
    stock = Stock(origin)
    return {name: stock.outcome(config, batch, world) for name, config in configs.items()}


@pytest.fixture(scope="module")
def of_two_ranks(
    fixed_model: Path, drifted: Path, batch: Batch, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Outcome]]:
    configs = {name: changed(composed(drifted, name), ranks=2) for name in COMPOSITIONS}
    return on_ranks(2, outcomes, tmp_path_factory.mktemp("ranks"), fixed_model, batch, configs)


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_step_on_two_ranks_is_the_same_as_on_one(
    name: str, whole: dict[str, Outcome], of_two_ranks: list[dict[str, Outcome]]
) -> None:
    (metrics, num_trained, first), (*told, second) = (found[name] for found in of_two_ranks)
    assert told == [metrics, num_trained], "every rank knows all of the step"
    states = {
        model: {key: torch.cat([part, second[model][key]]) for key, part in state.items()}
        for model, state in first.items()
    }
    assert_same((metrics, num_trained, states), whole[name])


def test_rejection_drops_the_responses_that_are_apart_and_no_others(
    whole: dict[str, Outcome], batch: Batch
) -> None:
    """`responses` puts a ratio of e^0.3 into the last response of each group: k3 is 0.05 there, and at most 0.012 elsewhere."""
    sample = torch.arange(batch.num_sequences)[batch.sequence] % SAMPLES
    learned = batch.sampled & ~batch.truncated[batch.sequence]
    share = float((learned & (sample == SAMPLES - 1)).sum() / learned.sum())
    assert (
        whole["grpo_with_everything"][0]["offpolicy/dropped_fraction"] == pytest.approx(share)
        and 0.1 < share < 0.5
    )


# ---- what the parts promise


def test_rewards_are_shaped_before_they_become_advantages(stock: Stock, drifted: Path, batch: Batch) -> None:
    lengths = torch.zeros(batch.num_sequences).index_add_(0, batch.sequence, batch.sampled.float())
    rewards = batch.rewards + (-(lengths - 6) / 6).clamp(-1, 0)
    rewards = ((rewards - rewards.mean()) / rewards.std(correction=0)).clamp(-0.9, 0.9)
    config = configured(
        drifted,
        "algo=dr_grpo",
        "algo.reward.overlong_share=0.5",
        "algo.reward.normalise=true",
        "algo.reward.clip=0.9",
    )
    given = Trainer(config, stock.models(config))._prepare(batch, STEP)
    torch.testing.assert_close(given.advantages, dr_grpo(rewards, batch.groups)[batch.sequence])


def test_the_loss_is_that_of_the_advantages_the_corrections_and_what_was_good(
    stock: Stock, drifted: Path, batch: Batch
) -> None:
    """With one update π_θ is π_p: the ratio is 1, the weight is π_p / μ up to 2, and each token is one of its sequence's."""
    config = configured(drifted, "algo=grpo", "algo.imitation_coef=0.1", "algo.imitation_above=0.5")
    trainer = Trainer(config, stock.models(config))
    logprobs, expected = trainer.logprobs(batch), 0.0
    advantages = grpo(batch.rewards, batch.groups)
    for i, (start, end) in enumerate(zip(batch.offsets, batch.offsets[1:], strict=False)):
        at = torch.arange(start, end)[batch.sampled[start:end]]
        weight = (logprobs - batch.behavior_logprobs)[at].exp().clamp(max=2)
        expected -= float(batch.weights[i] * advantages[i] * weight.mean()) / batch.num_sequences
    good = batch.sampled & (batch.rewards == 1)[batch.sequence]
    counts = batch.weights[batch.sequence[good]]
    expected -= 0.1 * float((counts * logprobs[good]).sum() / counts.sum())
    assert trainer.train(batch, STEP)[0]["loss/policy"] == pytest.approx(expected, rel=1e-4)


def test_a_penalty_in_the_reward_is_what_the_policy_likes_a_token_more_than_its_reference_does(
    stock: Stock, drifted: Path, batch: Batch
) -> None:
    config = configured(drifted, "algo=reinforce_pp")
    trainer = Trainer(config, stock.models(config))
    assert trainer.models.reference is not None
    given = trainer._prepare(replace(batch, rewards=torch.zeros(batch.num_sequences)), STEP)
    charged = 0.01 * (trainer._infer(trainer.models.reference, batch) - trainer.logprobs(batch))
    returns = torch.zeros(len(batch.tokens))
    for start, end in zip(batch.offsets, batch.offsets[1:], strict=False):
        returns[start:end] = torch.where(batch.sampled, charged, 0)[start:end].flip(0).cumsum(0).flip(0)
    returns = returns[batch.sampled]
    expected = (returns - returns.mean()) / returns.std(correction=0)
    torch.testing.assert_close(given.advantages[batch.sampled], expected, atol=1e-3, rtol=1e-3)


def test_the_reward_of_a_sequence_in_which_nothing_was_sampled_counts_for_its_own_group(
    stock: Stock, drifted: Path, batch: Batch
) -> None:
    config, silent = configured(drifted, "algo=dr_grpo"), torch.arange(batch.num_sequences) == SAMPLES + 2
    given = replace(
        batch,
        sampled=batch.sampled & ~silent[batch.sequence],
        versions=batch.versions.masked_fill(silent[batch.sequence], -1),
        rewards=batch.rewards + 5 * silent,
    )
    found = Trainer(config, stock.models(config))._prepare(given, STEP).advantages
    torch.testing.assert_close(found, dr_grpo(given.rewards, given.groups)[given.sequence])


@pytest.mark.parametrize("name", ["m2po_strict", "ppo", "vtrace", "grpo_with_everything"])
def test_a_step_of_tokens_that_are_all_beyond_the_bound_changes_nothing_and_has_finite_metrics(
    name: str, stock: Stock, drifted: Path, batch: Batch
) -> None:
    config = composed(drifted, name)
    before = {model: state_of(engine) for model, engine in stock.models(config)._trained().items()}
    old = replace(batch, versions=torch.where(batch.sampled, STEP - 3, -1).int())
    metrics, num_trained, states = stock.outcome(config, old)
    assert num_trained == 0 and metrics["staleness/masked_fraction"] == 1
    assert [key for key, value in metrics.items() if not math.isfinite(value)] == []
    assert_equal((metrics, num_trained, states), (metrics, num_trained, before))


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean_token_mean"])
@pytest.mark.parametrize("num_minibatches", [1, 2, 3])
def test_the_weights_of_the_tokens_of_a_minibatch_add_up_to_one(
    kind: Aggregation, num_minibatches: int, stock: Stock, drifted: Path, rows: list[Trajectory]
) -> None:
    config = configured(drifted, f"algo.aggregation={kind}")
    trainer = Trainer(config, stock.models(config))
    given = trainer._prepare(batch_of(rows), STEP)
    for part in given.batch.groups.unique().chunk(num_minibatches):
        inside = torch.isin(given.batch.groups, part)[given.sequence]
        weights = trainer._token_weights(given, inside, num_minibatches)
        assert float(weights.sum()) == pytest.approx(1) and not weights[~inside].any()


def test_the_entropy_bonus_raises_the_entropy_and_without_it_equal_rewards_teach_nothing(
    stock: Stock, drifted: Path, batch: Batch
) -> None:
    alike, entropies = replace(batch, rewards=torch.ones(batch.num_sequences)), {}
    for coef in (0.0, 1.0):
        config = configured(drifted, "algo=grpo", f"algo.entropy_coef={coef}", "learner.lr=3e-4")
        trainer = Trainer(config, stock.models(config))
        steps = [trainer.train(alike, STEP)[0] for _ in range(5)]
        entropies[coef] = [metrics["policy/entropy"] for metrics in steps]
        assert all((metrics["optimizer/grad_norm"] > 0) == (coef > 0) for metrics in steps)
    rising = entropies[1.0]
    assert rising == sorted(rising) and rising[-1] > rising[0] + 0.05
    assert set(entropies[0.0]) == {rising[0]}


def poisoned(batch: Batch, sequences: Tensor, behavior: float) -> Batch:
    """Other tokens, and other behaviour log-probabilities, in some of the sequences [N]."""
    where = sequences[batch.sequence] & batch.sampled
    assert where.any() and (batch.sampled & ~where).any()
    return replace(
        batch,
        tokens=torch.where(where, (batch.tokens + 7) % 300, batch.tokens),
        behavior_logprobs=batch.behavior_logprobs.masked_fill(where, behavior),
    )


def test_a_sequence_counts_as_often_as_it_was_drawn_and_not_at_all_if_it_was_not(
    stock: Stock, drifted: Path, batch: Batch
) -> None:
    config = configured(drifted, "algo=grpo", "algo.reward.filter_power=1", "run.seed=3")
    counts = Trainer(config, stock.models(config))._prepare(batch, STEP).counts
    drawn = counts / batch.weights
    assert float(drawn.sum()) == pytest.approx(batch.num_sequences) and float(drawn.max()) > 1.5
    assert not counts[batch.rewards == 0].any() and (counts[batch.rewards > 0] == 0).any()
    found = stock.outcome(config, batch)
    assert_equal(stock.outcome(config, poisoned(batch, counts == 0, behavior=-2.0)), found)
    assert_equal(stock.outcome(configured(drifted, "algo=grpo"), replace(batch, weights=counts)), found)


def test_all_ranks_and_all_repetitions_of_a_step_draw_the_same(
    stock: Stock, drifted: Path, batch: Batch
) -> None:
    def draw(step: int, *overrides: str, rank: int = 0) -> list[float]:
        torch.manual_seed(rank + 1)
        config = configured(drifted, "algo=grpo", "algo.reward.filter_power=1", *overrides)
        return Trainer(config, stock.models(config), World(rank, 1))._prepare(batch, step).counts.tolist()

    first = draw(STEP)
    assert draw(STEP) == draw(STEP, "learner.ranks=2", rank=1) == first
    assert draw(STEP + 1) != first and draw(STEP, "run.seed=1") != first


@pytest.mark.parametrize("name", ["grpo", "ppo", "vtrace"])
def test_what_was_cut_off_does_not_matter_to_the_update_and_is_still_counted(
    name: str, whole: dict[str, Outcome], stock: Stock, drifted: Path, batch: Batch
) -> None:
    algo = composed(drifted, name).algo
    config = replace(
        composed(drifted, name), algo=replace(algo, reward=replace(algo.reward, overlong_filter=True))
    )
    found = stock.outcome(config, batch)
    poison = stock.outcome(config, poisoned(batch, batch.truncated, behavior=math.nan))
    assert_equal(poison, found)
    assert poison[:2] == found[:2], "not even the metrics see it"
    assert found[1] == int(batch.sampled.sum())
    assert found[0]["loss/policy"] != whole[name][0]["loss/policy"]


def asked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
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
    composition: str, passes: int, stock: Stock, drifted: Path, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(drifted, *composition.split(), "learner.minibatches=2")
    trainer = Trainer(config, stock.models(config))
    calls = asked(trainer.models.policy, monkeypatch)
    trainer.train(batch, STEP)
    assert len(calls) == passes


def test_loglinear_lies_between_behaviour_and_current_policy_by_staleness(
    stock: Stock, drifted: Path, batch: Batch
) -> None:
    behavior, current = torch.full((5,), -3.0), torch.full((5,), -1.0)
    between = loglinear(current, behavior, torch.tensor([-1, 0, 1, 3, 10_000]))
    assert between.tolist() == pytest.approx([-3.0, -3.0, -2.0, -1.5, -1.0], abs=1e-3)
    fresh = replace(batch, versions=torch.where(batch.sampled, STEP, -1).int())
    loglinear_step, behavior_step = (
        stock.outcome(
            configured(
                drifted, "algo=grpo", "mode=on_policy", f"algo.proximal={kind}", "learner.minibatches=2"
            ),
            fresh,
        )
        for kind in ("loglinear", "behavior")
    )
    assert_equal(loglinear_step, behavior_step)


def test_remax_without_the_reward_of_a_greedy_response_is_refused_with_the_group(
    stock: Stock, drifted: Path, batch: Batch
) -> None:
    config = configured(drifted, "algo=remax")
    missing = replace(batch, greedy=batch.greedy.masked_fill(batch.groups >= 3, math.nan))
    with pytest.raises(
        ValueError, match="algo.advantage=remax needs the reward of a greedy response .* group 3$"
    ):
        Trainer(config, stock.models(config)).train(missing, STEP)
