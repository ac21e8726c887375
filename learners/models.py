"""The models of one rank of the learner: the policy, and those that an algorithm asks or trains beside it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from configs.algorithms import Advantage
from configs.learner import LearnerKind
from configs.schema import Config
from learners.engine import Engine, Kind, Write
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

    def snapshot(self) -> Write:
        """A copy of each model that is trained; what it returns writes them, each into a subfolder. Collective."""
        writes = {name: engine.snapshot() for name, engine in self._trained().items()}

        def write(folder: Path) -> None:
            for name, part in writes.items():
                part(folder / name)

        return write

    def load(self, folder: Path) -> None:
        """Collective. Raises ValueError, and loads nothing, where a model is missing."""
        trained = self._trained()
        if missing := [name for name in trained if not (folder / name).is_dir()]:
            raise ValueError(f"the checkpoint must hold a {missing[0]} for this algorithm, got {folder} without one")
        for name, engine in trained.items():
            engine.load(folder / name)

    def _trained(self) -> dict[str, Engine]:
        named = {"engine": self.policy, "critic": self.critic, "reward_model": self.reward_model}
        return {name: engine for name, engine in named.items() if engine is not None}


def make_models(config: Config, rank: int, rendezvous: str) -> tuple[Models, World, World]:
    """Joins all ranks at `rendezvous`, and loads what the algorithm needs.

    Returns the models, the world of all ranks, and another one for the thread that writes checkpoints.
    """
    if config.learner.engine is LearnerKind.simulated:
        from learners.simulated import SimulatedTrainingEngine

        policy = SimulatedTrainingEngine(config.generators.simulated.train_tokens_per_s)
        return Models(policy=policy), World(), World()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_per_process_memory_fraction(config.learner.gpu_memory_fraction)
    store, ranks = open_store(rendezvous, rank), config.learner.ranks
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", store=dist.PrefixStore("engine", store), rank=rank, world_size=ranks,
        timeout=TIMEOUT,
    )  # fmt: skip
    world, writers = (World(rank, ranks, dist.PrefixStore(name, store)) for name in ("world", "writers"))
    return load_models(config), world, writers


def load_models(config: Config) -> Models:
    """In a process group that is there already."""
    from learners.fsdp import FsdpEngine

    def engine(kind: Kind, path: str | None = None, **more: Any) -> FsdpEngine:
        return FsdpEngine(
            path or config.model.path,
            kind=kind,
            dtype=config.model.dtype,
            temperature=config.sampling.temperature,
            attention=config.learner.attention,
            betas=(config.learner.betas[0], config.learner.betas[1]),
            weight_decay=config.learner.weight_decay,
            max_grad_norm=config.learner.max_grad_norm,
            activation_checkpointing=config.learner.activation_checkpointing,
            **more,
        )

    def when(needed: bool, make: Callable[[], Engine]) -> Engine | None:
        return make() if needed else None

    algo = config.algo
    return Models(
        policy=engine(Kind.policy, bucket_bytes=config.sync.bucket_mb << 20, entropy_gradient=algo.entropy_coef > 0),
        critic=when(algo.advantage.needs_critic, lambda: engine(Kind.critic, algo.critic.path)),
        reward_model=when(algo.advantage is Advantage.prime, lambda: engine(Kind.policy)),
        reference=when(algo.needs_reference, lambda: engine(Kind.frozen)),
    )
