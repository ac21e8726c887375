"""The models of a learner: critic, reference and implicit reward model; what they learn, and that a
checkpoint holds all of them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from training_steps import STEP, assert_equal, configure_step, copy_state, draw_responses, make_step_batch

from algos.values import implicit_rewards
from buffers import messages as m
from buffers.run_status import LedgerAccount
from learners import checkpoint
from learners.engine import Engine
from learners.fsdp import FsdpEngine
from learners.learner import Learner
from learners.models import Models, load_models
from learners.packing import Batch, Packed, pack_rows
from learners.step import Trainer

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def batch(fixed_model: Path) -> Batch:
    return make_step_batch(draw_responses(fixed_model))


def at(batch: Batch, step: int) -> Batch:
    """The same, sampled for another step."""
    versions = (batch.versions + step - STEP).clamp(min=0)
    return replace(batch, versions=torch.where(batch.sampled, versions, -1).int())


def whole(batch: Batch) -> list[Packed]:
    return [pack_rows(batch, range(batch.num_sequences))]


def states(models: Models) -> dict[str, dict[str, Tensor]]:
    return {name: copy_state(engine) for name, engine in models.trained_engines.items()}


def differs(before: dict[str, Tensor], engine: Engine) -> bool:
    """Are the weights others than before?"""
    now = copy_state(engine)
    return not all(
        torch.equal(now[name], value) for name, value in before.items() if name.startswith("model.")
    )


# ---- the critic


def test_a_critic_learns_the_outcomes_of_a_batch(fixed_model: Path, batch: Batch) -> None:
    config = configure_step(
        fixed_model, "algo=vapo", "algo.critic.pretrain_steps=1000", "algo.critic.lr=3e-3"
    )
    trainer = Trainer(config, load_models(config))
    explained = [trainer.train(batch, STEP)[0]["critic/explained_variance"] for _ in range(30)]
    assert explained[0] < 0.1 and explained[-1] > 0.5


def test_the_critic_alone_is_trained_in_the_first_steps(fixed_model: Path, batch: Batch) -> None:
    config = configure_step(fixed_model, "algo=ppo", "algo.critic.pretrain_steps=1")
    trainer = Trainer(config, load_models(config))
    policy, critic = trainer.models.policy, trainer.models.critic
    assert critic is not None
    for step, trains in enumerate((False, True)):
        before = states(trainer.models)
        metrics, _ = trainer.train(at(batch, step), step)
        assert differs(before["critic"], critic) and differs(before["engine"], policy) == trains
        assert ("loss/policy" in metrics) == trains and (metrics["optimizer/lr"] > 0) == trains


def test_a_value_depends_on_the_tokens_before_it_only(fixed_model: Path, batch: Batch) -> None:
    config = configure_step(fixed_model, "algo=ppo")
    critic = load_models(config).critic
    assert critic is not None
    place = int(batch.offsets[1]) - 3
    other = replace(batch, tokens=batch.tokens.clone())
    other.tokens[place] = (other.tokens[place] + 1) % 300
    first, second = (critic.infer([pack_rows(b, [0])])[0] for b in (batch, other))
    assert torch.equal(first[: place + 1], second[: place + 1]) and (first != second)[place + 1 :].all()
    assert first[0] == 0 and len(first[1:].unique()) > 3


def test_vtrace_trusts_what_the_policy_would_do_more_often_and_mistrusts_what_it_would_not_do(
    fixed_model: Path, batch: Batch
) -> None:
    config = configure_step(fixed_model, "algo=vtrace")
    trainer = Trainer(config, load_models(config))

    def advantages(behavior: Tensor) -> Tensor:
        return trainer._prepare_batch(replace(batch, behavior_logprobs=behavior), STEP).advantages[
            batch.sampled
        ]

    own = advantages(trainer.infer_logprobs(batch))
    assert own.abs().min() > 0
    torch.testing.assert_close(advantages(trainer.infer_logprobs(batch) - 5), own)
    assert (advantages(trainer.infer_logprobs(batch) + 5).abs() < 0.05).all()


def test_the_critic_starts_from_a_model_of_its_own_when_it_is_given_one(
    fixed_model: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(fixed_model, num_labels=1)
    torch.nn.init.constant_(model.score.weight, 0.0)
    torch.nn.init.constant_(model.score.bias, 0.75)
    model.save_pretrained(tmp_path)
    config = configure_step(fixed_model, "algo=ppo", f"algo.critic.path={tmp_path}")
    critic = load_models(config).critic
    assert critic is not None and copy_state(critic)["model.score.bias"].tolist() == [0.75]
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"^algo.critic.path must hold model.safetensors or .* {tmp_path}$"):
        load_models(config)


# ---- checkpoints


RESUMED = {
    "ppo": ["algo=ppo", "algo.critic.pretrain_steps=1"],
    "vapo": ["algo=vapo", "algo.critic.pretrain_steps=3"],
    "prime": ["algo=prime"],
    "rloo": ["algo=rloo", "algo.kl.target=0.01"],
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_from_a_checkpoint_to_the_same_bits(
    name: str, fixed_model: Path, batch: Batch, tmp_path: Path
) -> None:
    config = configure_step(fixed_model, *RESUMED[name], "learner.minibatches=2")
    trainer = Trainer(config, load_models(config))
    for step in (0, 1):
        trainer.train(at(batch, step), step)
    trainer.models.copy_state()(tmp_path)
    held, kl_coef = states(trainer.models), trainer.kl_coef
    expected = [trainer.train(at(batch, step), step)[0] for step in (2, 3)]
    resumed = Trainer(config, load_models(config), kl_coef=kl_coef)
    begun = Trainer(config, resumed.models).kl_coef
    resumed.models.load_state(tmp_path)
    assert_equal(({}, 0, states(resumed.models)), ({}, 0, held))
    found = [resumed.train(at(batch, step), step)[0] for step in (2, 3)]
    assert_equal(({}, 0, states(resumed.models)), ({}, 0, states(trainer.models)))
    assert all(differs(held[model], engine) for model, engine in resumed.models.trained_engines.items())
    assert resumed.kl_coef == trainer.kl_coef and (resumed.kl_coef != kl_coef != begun) == (name == "rloo")
    for metrics in (*found, *expected):
        del metrics["time/train_s"], metrics["throughput/train_tflops_per_s"]
    assert found == expected


def test_a_checkpoint_without_a_critic_is_refused_by_an_algorithm_that_has_one(
    fixed_model: Path, tmp_path: Path
) -> None:
    load_models(configure_step(fixed_model, "algo=grpo")).copy_state()(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]
    for algo, missing in (("ppo", "critic"), ("prime", "reward_model")):
        with pytest.raises(
            ValueError, match=f"must hold a {missing} for this algorithm, got {tmp_path} without one"
        ):
            load_models(configure_step(fixed_model, f"algo={algo}")).load_state(tmp_path)


class Deaf:
    """A buffer that takes note of everything and says nothing."""

    def __init__(self) -> None:
        self.heard: list[m.Request] = []

    def call(self, request: m.Request, expect: type[Any]) -> Any:
        self.heard.append(request)

    def exchange(self, request: m.Request, *, wait_s: float = 0.0) -> tuple[m.Reply, list[memoryview]]:
        tokens = LedgerAccount(total=9, trained=5, masked=1, rejected={}, in_flight=3)
        status: Any = SimpleNamespace(tokens=tokens)
        return m.RunNews(records=[], evaluations=[], status=status), []


def test_a_checkpoint_holds_where_the_coefficient_has_come_to(fixed_model: Path, tmp_path: Path) -> None:
    config = configure_step(fixed_model, "algo=rloo", "algo.kl.target=0.01")
    buffer: Any = Deaf()
    trainer = Trainer(config, load_models(config), kl_coef=0.017)
    learner = Learner(config, tmp_path, buffer, trainer, None, first_step=3, incarnation="life")
    learner._begin_checkpoint()
    learner._report_checkpoint(wait=True)
    found = checkpoint.find_latest(tmp_path / "checkpoints")
    assert found is not None and found.manifest.files
    assert msgspec.structs.replace(found.manifest, files={}, ranks=0) == checkpoint.CheckpointManifest(
        3, "life", 0, 0.017, checkpoint.LedgerTotals(9, 5, 1), "fsdp"
    )
    assert buffer.heard == [m.ReportCheckpoint(step=3, oldest=3)]


# ---- the reference


def test_the_reference_stays_what_it_was_and_the_policy_leaves_it(fixed_model: Path, batch: Batch) -> None:
    config = configure_step(fixed_model, "algo=grpo", "algo.kl.loss_coef=0.04", "learner.lr=1e-3")
    trainer = Trainer(config, load_models(config))
    reference = trainer.models.reference
    assert isinstance(reference, FsdpEngine)
    before = reference.infer(whole(batch))[0]
    found = [trainer.train(batch, STEP)[0]["policy/kl_reference"] for _ in range(4)]
    assert found[0] == pytest.approx(0, abs=1e-6) and min(found[1:]) > 1e-4
    assert torch.equal(reference.infer(whole(batch))[0], before)
    assert all(not value.requires_grad and value.grad is None for value in reference._named.values())
    begun = load_models(config).policy
    assert isinstance(begun, FsdpEngine)
    assert all(torch.equal(reference._named[name], value) for name, value in begun._named.items())


@pytest.mark.parametrize(("target", "error"), [(1e-6, 0.2), (1e4, -0.2)])
@pytest.mark.parametrize("place", ["loss_coef", "reward_coef"])
def test_the_coefficient_rises_while_the_policy_is_further_off_than_its_target_and_falls_while_it_is_nearer(
    place: str, target: float, error: float, fixed_model: Path, batch: Batch
) -> None:
    """By the largest step that there is, for it is far off on either side."""
    kl = [f"algo.kl.{place}=0.05", f"algo.kl.target={target}", "algo.kl.horizon=240"]
    config = configure_step(fixed_model, "algo=grpo", *kl)
    trainer = Trainer(config, load_models(config))
    trainer.train(batch, STEP)
    before = trainer.kl_coef
    metrics, _ = trainer.train(batch, STEP)
    assert (
        trainer.kl_coef
        == metrics["policy/kl_coef"]
        == pytest.approx(before * (1 + error * batch.num_sequences / 240))
    )


# ---- the implicit reward model


def test_the_implicit_reward_model_learns_outcomes_and_says_nothing_before(
    fixed_model: Path, batch: Batch
) -> None:
    config = configure_step(fixed_model, "algo=prime", "algo.prime.lr=2e-3", "learner.lr=1e-5")
    trainer = Trainer(config, load_models(config))
    reward_model, reference = trainer.models.reward_model, trainer.models.reference
    assert reward_model is not None and reference is not None

    def process_rewards() -> Tensor:
        logprobs, before = (engine.infer(whole(batch))[0] for engine in (reward_model, reference))
        return implicit_rewards(logprobs, before, config.algo.prime.beta)

    assert not process_rewards().any()
    found = [trainer.train(batch, STEP)[0] for _ in range(30)]
    assert (
        found[-1]["reward_model/accuracy"] > 0.8
        and found[-1]["reward_model/loss"] < 0.8 * found[0]["reward_model/loss"]
    )
    total = torch.zeros(batch.num_sequences).index_add_(0, batch.sequence, process_rewards() * batch.sampled)
    assert ((total > 0) == (batch.rewards > 0)).float().mean() > 0.8
