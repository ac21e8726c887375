"""The room of nodes, what a command wishes for, and the place of each of its processes.

`role_placement.py` and `turn_placement.py` divide nodes; `role_places.py` asks Ray for the result. This file
knows no Ray.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from configs.generators import EngineKind
from configs.learner import LearnerKind
from configs.placement import PlacementConfig
from configs.schema import Config, Role


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """A node of the cluster: its processors, GPUs and labels."""

    name: str
    """Ray's id of the node."""
    num_cpus: int
    num_gpus: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)

    def has_labels(self, wanted: Mapping[str, str]) -> bool:
        return all(self.labels.get(key) == value for key, value in wanted.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleWishes:
    """The processes that a command starts, and their shares. A share of None means an even part of what is
    left."""

    ranks: int
    """Ranks of the policy, and of a critic of its own."""
    engines: int
    """Those that train, then those that evaluate alone."""
    rank_gpus: float | None = None
    """GPUs of each rank: a part of one, or 1; 0 runs it on the CPU."""
    engine_gpus: float | None = None
    """GPUs of each engine: a part of one, or all of its ranks'; 0 runs it on the CPU."""
    engine_ranks: int = 1
    """Processes that compute together in each engine, on a GPU each where they have some."""
    rank_memory: float | None = None
    """Part of its GPU's memory, from 0 to 1."""
    engine_memory: float | None = None
    evaluators: int = 0
    """So many of the engines evaluate alone."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)


@dataclass(frozen=True, slots=True)
class RolePlace:
    """The place of one process. Without GPUs it runs on the CPU, and sees none."""

    node: str = ""
    """Ray's id of the node."""
    gpus: tuple[int, ...] = ()
    """Numbers from 0. Ray decides which device a number is."""
    share: float = 0.0
    """The part of each of these GPUs that Ray counts as taken."""
    memory: float | None = None
    """The part of each GPU's memory that the process may take."""
    is_shared: bool = False
    """True when other processes are on these GPUs."""
    beside_rank: bool = False
    """True when a rank of the learner is one of those."""
    processors: int = 1
    """Processors that Ray counts as taken."""
    takes_turns: bool = False
    """True for an engine that has its GPUs, or its processor, by turns with ranks (`turn_placement.py`)."""
    reserved: tuple[int, ...] = ()
    """GPUs that are set aside together for several processes; empty: its own."""
    devices: str = ""
    """Ray's names of the GPUs, for a process to which Ray gives none of them (`turn_placement.py`)."""

    @property
    def bundle(self) -> "Bundle":
        return (self.node, self.reserved or self.gpus)


Bundle = tuple[str, tuple[int, ...]]
"""A node, and GPUs of it that are taken together. `(node, ())` has the processes without a GPU."""


@dataclass(frozen=True, slots=True)
class RoleDivision:
    """A place for every process."""

    ranks: tuple[RolePlace, ...]
    engines: tuple[RolePlace, ...]
    num_evaluators: int = 0
    """So many of the engines, the last ones, evaluate alone."""

    @property
    def bundles(self) -> dict[Bundle, int]:
        """GPUs that are taken together -> number of processors of the processes on them."""
        taken = Counter(place.bundle for place in self.places for _ in range(place.processors))
        return dict(sorted(taken.items()))

    @property
    def places(self) -> tuple[RolePlace, ...]:
        return self.ranks + self.engines

    @property
    def nodes(self) -> list[str]:
        """Nodes that hold a process, in the order of `places`."""
        return list(dict.fromkeys(place.node for place in self.places))

    def count_processors(self, node: str) -> int:
        """Returns the number of processors that a node's processes take."""
        return sum(place.processors for place in self.places if place.node == node)

    def count_gpus(self, node: str) -> int:
        """Returns the number of a node's GPUs that processes are on."""
        return len({gpu for place in self.places if place.node == node for gpu in place.gpus})

    @property
    def names(self) -> list[str]:
        """Names of the roles, in the order of `places`."""
        num_training = len(self.engines) - self.num_evaluators
        return [
            *(f"learner-{rank}" for rank in range(len(self.ranks))),
            *(f"generator-{number}" for number in range(num_training)),
            *(f"evaluator-{number}" for number in range(self.num_evaluators)),
        ]

    @property
    def rank_memory(self) -> float | None:
        """The part of its GPU's memory that each rank may take; None on the CPU."""
        return self.ranks[0].memory if self.ranks else None

    def list_roles(self, node: str) -> list[tuple[str, RolePlace]]:
        """Returns name and place of each process on a node."""
        named = zip(self.names, self.places, strict=True)
        return [(name, place) for name, place in named if place.node == node]

    def describe_gpus(self, node: str) -> str:
        """Returns a line for people about the GPUs of a node; empty where nobody has one."""
        roles = self.list_roles(node)
        return "; ".join(
            f"GPU {' and '.join(map(str, gpus))}: "
            + ", ".join(
                f"{name} ({100 * (place.memory or 0):.0f} % of memory{place.takes_turns * ', by turns'})"
                for name, place in roles
                if place.gpus == gpus
            )
            for gpus in sorted({place.gpus for _, place in roles})
            if gpus
        )


def read_wishes(config: Config) -> RoleWishes:
    """Reads how many processes the configuration asks for, with which shares.

    A command that starts generators only leaves no GPU for a learner. A simulated engine needs no GPU.
    """
    learner, generators = config.learner, config.generators
    is_learner_simulated = learner.engine is LearnerKind.simulated
    is_engine_simulated = generators.engine is EngineKind.simulated
    return RoleWishes(
        ranks=config.num_learner_ranks if config.role is Role.all else 0,
        engines=len(config.engine_names),
        evaluators=config.eval.generators,
        rank_gpus=0.0 if learner.gpus is None and is_learner_simulated else learner.gpus,
        engine_gpus=0.0 if generators.gpus is None and is_engine_simulated else generators.gpus,
        engine_ranks=generators.tensor_parallel,
        rank_memory=learner.gpu_memory_fraction,
        engine_memory=generators.gpu_memory_fraction,
        placement=config.placement,
    )
