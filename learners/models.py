"""The models of one rank of the learner: the policy, and those that an algorithm asks or trains beside it."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from configs.learner import LearnerKind
from configs.parallel import LoraConfig
from configs.schema import Config
from learners import flops
from learners import lora as adapters
from learners.checkpoint import StateWriter
from learners.engine import AbsentEngine, Engine, ModelKind
from learners.packing import Cost
from learners.world import TIMEOUT, World, open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    policy: Engine
    critic: Engine | None = None
    """Values (`algo.advantage=gae` or `vtrace`)."""
    reward_model: Engine | None = None
    """PRIME's implicit reward model φ."""
    reference: Engine | None = None
    """The model that the run began with, frozen: for KL penalties, and for PRIME."""
    cost: Cost = Cost()
    """What a sequence costs the policy"""

    def copy_state(self) -> StateWriter:
        """A copy of each model that is trained; what it returns writes them, each into a subfolder. Collective."""
        writes = {name: engine.copy_state() for name, engine in self._trained().items()}

        def write(folder: Path) -> None:
            for name, part in writes.items():
                part(folder / name)

        return write

    def load_state(self, folder: Path) -> None:
        """Collective. Raises ValueError, and loads nothing, where a model is missing."""
        trained = self._trained()
        if missing := [name for name in trained if not (folder / name).is_dir()]:
            raise ValueError(
                f"the checkpoint must hold a {missing[0]} for this algorithm, got {folder} without one"
            )
        for name, engine in trained.items():
            engine.load_state(folder / name)

    def _trained(self) -> dict[str, Engine]:
        named = {"engine": self.policy, "critic": self.critic, "reward_model": self.reward_model}
        return {name: engine for name, engine in named.items() if engine is not None}


def make_models(config: Config, rank: int, rendezvous: str) -> tuple[Models, World, World]:
    """Joins all ranks at `rendezvous`, and loads what the algorithm needs.

    Returns the models, the world of all ranks, and another one for the thread that writes checkpoints. Raises ValueError for what
    cannot be loaded here.
    """
    if config.learner.engine is LearnerKind.simulated:
        from learners.simulated import SimulatedTrainingEngine

        policy = SimulatedTrainingEngine(config.generators.simulated.train_tokens_per_s)
        return Models(policy=policy), World(), World()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_per_process_memory_fraction(config.learner.gpu_memory_fraction or 1.0)
    ranks, total = config.learner.ranks, config.num_learner_ranks
    pool, own_rank, size = (
        (Pool.policy, rank, ranks) if rank < ranks else (Pool.critic, rank - ranks, total - ranks)
    )
    if total == ranks:
        pool = Pool.all
    store = open_store(rendezvous, rank, total)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", store=dist.PrefixStore(str(pool), store), rank=own_rank,
        world_size=size, timeout=TIMEOUT,
    )  # fmt: skip
    world, writers = (World(rank, total, dist.PrefixStore(name, store)) for name in ("world", "writers"))
    return load_models(config, pool), world, writers


class Pool(StrEnum):
    """Ranks that hold the same engines."""

    all = "all"
    policy = "policy"
    critic = "critic"


def load_models(config: Config, pool: Pool = Pool.all) -> Models:
    """In a process group of the pool that is there already."""
    algo, learner = config.algo, config.learner

    def when(needed: bool, home: Pool, make: Callable[[], Engine]) -> Engine | None:
        return None if not needed else make() if pool in (home, Pool.all) else AbsentEngine()

    def reference() -> Engine:
        assert policy is not None
        return (
            make_engine(config, ModelKind.frozen)
            if learner.lora.rank is None
            else adapters.BaseModelEngine(policy)
        )

    policy = when(
        True,
        Pool.policy,
        lambda: make_engine(
            config,
            ModelKind.policy,
            lora=learner.lora,
            entropy_gradient=algo.entropy_coef > 0,
            aux_loss_coefficient=learner.moe.aux_loss_coefficient,
            router_replay=learner.moe.router_replay,
        ),
    )
    assert policy is not None
    return Models(
        policy=policy,
        critic=when(
            algo.needs_critic,
            Pool.critic,
            lambda: make_engine(config, ModelKind.critic, algo.critic.path),
        ),
        reward_model=when(
            algo.needs_reward_model, Pool.policy, lambda: make_engine(config, ModelKind.policy)
        ),
        reference=when(algo.needs_reference, Pool.policy, reference),
        cost=cost_of(config.model.path),
    )


def make_engine(
    config: Config, kind: ModelKind, path: str | None = None, *, lora: LoraConfig | None = None, **more: Any
) -> Engine:
    """The run's engine over a model (by default, the run's own), in the process group that is there."""
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


def cost_of(path: str) -> Cost:
    """In FLOPs of forward and backward where the model's kind is known, else by tokens alone."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    try:
        return Cost(6.0 * flops.count_matrix_parameters(config), flops.count_attention_flops(config, [1]))
    except ValueError:
        return Cost()
