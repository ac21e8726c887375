"""The models of one rank of the learner: the policy, and the models that an algorithm asks or trains beside
it."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from configs.learner import LearnerKind
from configs.parallel import LoraConfig
from configs.schema import Config
from learners import flops
from learners import lora as adapters
from learners.checkpoint import StateWriter
from learners.engine import AbsentEngine, Engine, ModelKind
from learners.packing import PackingCost
from learners.rendezvous import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    policy: Engine
    critic: Engine | None = None
    """Gives values (`algo.advantage=gae` or `vtrace`)."""
    reward_model: Engine | None = None
    """PRIME's implicit reward model φ."""
    reference: Engine | None = None
    """The model that the run began with, frozen: for KL penalties, and for PRIME."""
    cost: PackingCost = PackingCost()
    """Cost of training the policy on a sequence."""

    def copy_state(self) -> StateWriter:
        """Copies each trained model; returns the function that writes the copies, each into a subfolder.

        Collective.
        """
        writes = {name: engine.copy_state() for name, engine in self.trained_engines.items()}

        def write(folder: Path) -> list[Path]:
            return [path for name, write_engine in writes.items() for path in write_engine(folder / name)]

        return write

    def load_state(self, folder: Path) -> None:
        """Loads each trained model from its subfolder.

        Collective. Raises ValueError, and loads nothing, where a model is missing.
        """
        trained = self.trained_engines
        if missing := [name for name in trained if not (folder / name).is_dir()]:
            raise ValueError(
                f"the checkpoint must hold a {missing[0]} for this algorithm, got {folder} without one"
            )
        for name, engine in trained.items():
            engine.load_state(folder / name)

    def offload(self) -> None:
        """Gives the memory of this rank's GPU away; nothing but `onload` may be called then."""
        for engine in self._all_engines:
            engine.offload()

    def onload(self) -> None:
        for engine in self._all_engines:
            engine.onload()

    @property
    def _all_engines(self) -> list[Engine]:
        return [*self.trained_engines.values(), *([] if self.reference is None else [self.reference])]

    @property
    def trained_engines(self) -> dict[str, Engine]:
        """The engines that are trained, by the name of their folder in a checkpoint."""
        named = {"engine": self.policy, "critic": self.critic, "reward_model": self.reward_model}
        return {name: engine for name, engine in named.items() if engine is not None}


def load_models(
    config: Config, pool: Pool = Pool.all, on_progress: Callable[[], None] = lambda: None
) -> Models:
    """Loads the models that the algorithm needs, in the pool's process group, which exists already.

    Ranks of another pool get an `AbsentEngine` in the place of a model. `on_progress` is called whenever some
    of a model has been read. Raises ValueError for a model or a setting that this machine cannot have.
    """
    algo, learner = config.algo, config.learner
    if learner.engine is LearnerKind.simulated:
        from learners.simulated import SimulatedTrainingEngine

        return Models(policy=SimulatedTrainingEngine(config.generators.simulated.train_tokens_per_s))
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(learner.gpu_memory_fraction or 1.0)

    def make_where_held(home: Pool, make_held: Callable[[], Engine]) -> Engine:
        return make_held() if pool in (home, Pool.all) else AbsentEngine()

    make = partial(make_engine, config, on_progress=on_progress)

    def make_policy() -> Engine:
        return make(
            ModelKind.policy,
            lora=learner.lora,
            entropy_gradient=algo.entropy_coef > 0,
            aux_loss_coefficient=learner.moe.aux_loss_coefficient,
            router_replay=learner.moe.router_replay,
        )

    def make_reference() -> Engine:
        # With adapters the policy holds its reference already, as its frozen part.
        return make(ModelKind.frozen) if learner.lora.rank is None else adapters.BaseModelEngine(policy)

    policy = make_where_held(Pool.policy, make_policy)
    critic = reward_model = reference = None
    if algo.needs_critic:
        path = algo.critic.path
        with _name_field("model.path" if path is None else "algo.critic.path"):
            critic = make_where_held(Pool.critic, lambda: make(ModelKind.critic, path))
    if algo.needs_reward_model:
        reward_model = make_where_held(Pool.policy, lambda: make(ModelKind.policy))
    if algo.needs_reference:
        reference = make_where_held(Pool.policy, make_reference)
    return Models(
        policy=policy,
        critic=critic,
        reward_model=reward_model,
        reference=reference,
        cost=estimate_cost(config.model.path),
    )


@contextmanager
def _name_field(field: str) -> Iterator[None]:
    """Lets an engine's errors name the field that its folder comes from; an engine says `model.path`."""
    try:
        yield
    except ValueError as error:
        if field == "model.path":
            raise
        raise ValueError(str(error).replace("model.path", field)) from error


def make_engine(
    config: Config, kind: ModelKind, path: str | None = None, *, lora: LoraConfig | None = None, **more: Any
) -> Engine:
    """Makes the run's engine over a model (by default the run's own), in torch's default process group, which
    exists already."""
    learner = config.learner
    common: dict[str, Any] = {
        "kind": kind,
        "dtype": config.model.dtype,
        "temperature": config.sampling.temperature,
        "betas": (learner.betas[0], learner.betas[1]),
        "weight_decay": learner.weight_decay,
        "max_grad_norm": learner.max_grad_norm,
        "activation_checkpointing": learner.activation_checkpointing,
        "bucket_bytes": config.sync.bucket_mb << 20,
        **more,
    }
    if learner.engine is LearnerKind.megatron:
        from learners.megatron.engine import MegatronEngine

        return MegatronEngine(path or config.model.path, **common, **dataclasses.asdict(learner.megatron))
    from learners.fsdp import FsdpEngine

    return FsdpEngine(
        path or config.model.path, **common, attention=learner.attention, layout=learner.fsdp, lora=lora
    )


def estimate_cost(path: str) -> PackingCost:
    """Returns what a sequence costs, in FLOPs of forward and backward where the model's kind is known, else
    by tokens alone."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    try:
        return PackingCost(
            6.0 * flops.count_matrix_parameters(config), flops.count_attention_flops(config, [1])
        )
    except ValueError:
        return PackingCost()
