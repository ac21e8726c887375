"""The models of one rank of the learner: the policy, and those that an algorithm asks or trains beside it."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from configs.algorithms import Advantage
from configs.schema import Config, LearnerKind
from learners.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    policy: Engine
    critic: Engine | None = None
    """Values (`algo.advantage=gae` or `vtrace`)."""
    reward_model: Engine | None = None
    """PRIME's implicit reward model φ."""
    reference: Engine | None = None
    """The model that the run began with, frozen: for KL penalties, and for PRIME."""

    def save(self, folder: Path) -> None:
        """A subfolder for each model that is trained. Collective."""
        for name, engine in self._trained().items():
            engine.save(folder / name)

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


def make_models(config: Config, rank: int, rendezvous: str) -> Models:
    """Joins the process group of all ranks at `rendezvous`, and loads what the algorithm needs."""
    if config.learner.engine is LearnerKind.simulated:
        from learners.simulated import SimulatedTrainingEngine

        return Models(policy=SimulatedTrainingEngine(config.generators.simulated.train_tokens_per_s))
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_per_process_memory_fraction(config.learner.gpu_memory_fraction)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", init_method=rendezvous, rank=rank, world_size=config.learner.ranks,
        timeout=timedelta(minutes=10),
    )  # fmt: skip
    return load_models(config)


def load_models(config: Config) -> Models:
    """In a process group that is there already."""
    from learners.fsdp import FsdpEngine, Kind

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
