"""The division of a host's GPUs between the ranks of the learner and the engines: arithmetic alone, which Ray is then asked for.

    4 GPUs, 1 rank, 2 engines      │ rank 0 │ engine 0          │ engine 1 │        │
    2 GPUs, 1 rank, 2 engines      │ rank 0 │ engine 0 engine 1 │
    1 GPU,  1 rank, 1 engine       │ rank 0 engine 0 │

A rank has a GPU of its own as long as the engines fit on the others; else engines join the ranks. Two ranks never share a GPU:
NCCL refuses that. All roles of a run stay on the driver's host, so the GPUs of other hosts do not count.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from configs.generators import EngineKind
from configs.learner import LearnerKind
from configs.rules import LEAST_GPU_SHARE
from configs.schema import Config, Role

SHARED_MEMORY = 0.9
"""Memory of a shared GPU that is divided when the configuration does not say; CUDA itself takes some for each process."""
RANK_MEMORY, ENGINE_MEMORY = 1.0, 0.9
"""Memory that a rank or an engine may take of a GPU of its own."""
RESOLUTION = 10_000
"""Ray counts in parts of this many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleWishes:
    """The processes that a command starts. None: whatever there is."""

    ranks: int
    """Ranks of the policy, and of a critic of its own."""
    engines: int
    rank_gpus: float | None = None
    engine_gpus: float | None = None
    rank_memory: float | None = None
    engine_memory: float | None = None


@dataclass(frozen=True, slots=True)
class RolePlace:
    """The place of one process. Without GPUs it runs on the CPU, and sees none."""

    gpus: tuple[int, ...] = ()
    """Numbers from 0; which device a number is, Ray decides."""
    share: float = 0.0
    """The part of each of these GPUs that Ray counts as taken."""
    memory: float | None = None
    """The part of each GPU's memory that the process may take."""
    is_shared: bool = False
    """Whether other processes are on these GPUs"""
    beside_rank: bool = False
    """Whether a rank of the learner is one of them"""


@dataclass(frozen=True, slots=True)
class GpuDivision:
    """A placement for every process, on one node."""

    node: str
    ranks: tuple[RolePlace, ...]
    engines: tuple[RolePlace, ...]

    @property
    def bundles(self) -> dict[tuple[int, ...], int]:
        """The GPUs that are taken together, and the number of processes on them. `()`: those without a GPU."""
        return {gpus: sum(p.gpus == gpus for p in self.all) for gpus in sorted({p.gpus for p in self.all})}

    @property
    def all(self) -> tuple[RolePlace, ...]:
        return self.ranks + self.engines

    @property
    def rank_memory(self) -> float | None:
        """The part of its GPU's memory that each rank may take; None on the CPU."""
        return self.ranks[0].memory if self.ranks else None

    def __str__(self) -> str:
        """A line for people; empty where there is no GPU."""
        named = [(f"learner-{n}", p) for n, p in enumerate(self.ranks)]
        named += [(f"generator-{n}", p) for n, p in enumerate(self.engines)]
        return "; ".join(
            f"GPU {' and '.join(map(str, gpus))}: "
            + ", ".join(
                f"{name} ({100 * (p.memory or 0):.0f} % of memory)" for name, p in named if p.gpus == gpus
            )
            for gpus in self.bundles
            if gpus
        )


def read_wishes(config: Config) -> RoleWishes:
    """What the configuration asks for. A command that starts generators only leaves no GPU for a learner; what is simulated needs none."""
    learner, generators = config.learner, config.generators
    return RoleWishes(
        ranks=config.num_learner_ranks if config.role is Role.all else 0,
        engines=generators.count,
        rank_gpus=0.0 if learner.gpus is None and learner.engine is LearnerKind.simulated else learner.gpus,
        engine_gpus=0.0
        if generators.gpus is None and generators.engine is EngineKind.simulated
        else generators.gpus,
        rank_memory=learner.gpu_memory_fraction,
        engine_memory=generators.gpu_memory_fraction,
    )


def divide_gpus(gpus: Mapping[str, int], here: str, wanted: RoleWishes) -> GpuDivision:
    """`gpus`: the number of GPUs by node; `here`: the driver's node. Raises ValueError, with the arithmetic, for what does not fit."""
    num_gpus = gpus.get(here, 0)
    ranks = wanted.ranks if wanted.rank_gpus != 0 else 0
    engines = wanted.engines if wanted.engine_gpus != 0 else 0
    elsewhere = {node: number for node, number in sorted(gpus.items()) if number and node != here}
    if (
        not num_gpus
        and not elsewhere
        and not (ranks and wanted.rank_gpus)
        and not (engines and wanted.engine_gpus)
    ):
        ranks = engines = 0
    if not ranks and not engines:
        return GpuDivision(here, (RolePlace(),) * wanted.ranks, (RolePlace(),) * wanted.engines)
    if not num_gpus:
        found = (
            ", ".join(f"{number} on node {node}" for node, number in elsewhere.items()) or "none elsewhere"
        )
        raise ValueError(
            "learner.gpus and generators.gpus must be 0 or null where the driver's node has no GPU, and 0 where only others have "
            f"(all roles of a run stay on its node), got {wanted.rank_gpus} and {wanted.engine_gpus} with 0 GPUs here and {found}"
        )
    if ranks > num_gpus:
        raise ValueError(
            f"learner.ranks and placement.critic_ranks must be together at most {num_gpus} (the GPUs of the driver's node; NCCL "
            f"refuses two ranks on one GPU), got {ranks}"
        )
    if (wanted.engine_gpus or 0) > 1:
        members = _whole(num_gpus, ranks, engines, round(wanted.engine_gpus or 0))
    else:
        members = _shared(num_gpus, ranks, engines, wanted)
    return _placements(here, members, wanted)


Members = dict[tuple[int, ...], tuple[list[int], list[int]]]
"""Ranks and engines, by their GPUs."""


def _whole(num_gpus: int, ranks: int, engines: int, each: int) -> Members:
    """Engines of several GPUs: they share none."""
    if engines * each > num_gpus - ranks:
        raise ValueError(
            f"generators.count × generators.gpus must be at most {num_gpus - ranks} ({num_gpus} GPUs of the driver's node less "
            f"{ranks} for the learner's ranks: an engine with more than one GPU shares none), got {engines} × {each}"
        )
    members: Members = {(rank,): ([rank], []) for rank in range(ranks)}
    for engine in range(engines):
        first = ranks + engine * each
        members[tuple(range(first, first + each))] = ([], [engine])
    return members


def _shared(num_gpus: int, ranks: int, engines: int, wanted: RoleWishes) -> Members:
    """Engines of at most one GPU: each goes where the fewest are, and beside a rank last, unless the ranks leave room on purpose."""
    room = [_room(wanted, has_rank=gpu < ranks) if engines else 0 for gpu in range(num_gpus)]
    if engines > sum(room):
        beside, alone = _room(wanted, has_rank=True), _room(wanted, has_rank=False)
        raise ValueError(
            f"generators.count must be at most {sum(room)} = {ranks} × {beside} (GPUs with a rank of the learner, each with room for "
            f"{beside} engines) + {num_gpus - ranks} × {alone} (GPUs without), got {engines}: {_arithmetic(wanted)}"
        )
    leaves_room = (wanted.rank_gpus or 1) < 1
    held: list[list[int]] = [[] for _ in range(num_gpus)]

    def burden(gpu: int) -> tuple[bool, int, bool]:
        has_rank = gpu < ranks
        return has_rank and not leaves_room, has_rank + len(held[gpu]), has_rank

    for engine in range(engines):
        held[min((gpu for gpu in range(num_gpus) if len(held[gpu]) < room[gpu]), key=burden)].append(engine)
    return {
        (gpu,): ([gpu] if gpu < ranks else [], held[gpu])
        for gpu in range(num_gpus)
        if gpu < ranks or held[gpu]
    }


def _room(wanted: RoleWishes, *, has_rank: bool) -> int:
    """Engines that fit on one GPU: the shares of each kind add up to at most 1."""
    rooms = []
    for rank, engine in ((wanted.rank_gpus, wanted.engine_gpus), (wanted.rank_memory, wanted.engine_memory)):
        left = 1 - (_or_least(rank) if has_rank else 0)
        rooms.append(math.floor(left / _or_least(engine) + 1e-9))
    return max(0, min(rooms))


def _or_least(share: float | None) -> float:
    return LEAST_GPU_SHARE if share is None else share


def _arithmetic(wanted: RoleWishes) -> str:
    """The rule that an engine did not satisfy, with its values."""
    shares = {
        "learner.gpus": wanted.rank_gpus,
        "generators.gpus": wanted.engine_gpus,
        "learner.gpu_memory_fraction": wanted.rank_memory,
        "generators.gpu_memory_fraction": wanted.engine_memory,
    }
    values = ", ".join(
        f"{name} {f'≥ {LEAST_GPU_SHARE}' if share is None else f'= {share}'}"
        for name, share in shares.items()
    )
    return f"shares of a GPU, and of its memory, add up to at most 1 where {values}"


def _placements(node: str, members: Members, wanted: RoleWishes) -> GpuDivision:
    ranks, engines = [RolePlace()] * wanted.ranks, [RolePlace()] * wanted.engines
    for gpus, (some_ranks, some_engines) in members.items():
        num_ranks, num_engines = len(some_ranks), len(some_engines)
        is_alone = num_ranks + num_engines == 1
        memory = [wanted.rank_memory] * num_ranks + [wanted.engine_memory] * num_engines
        share = [wanted.rank_gpus] * num_ranks + [wanted.engine_gpus if len(gpus) == 1 else 1.0] * num_engines
        shares = _fill(share, 1.0)
        memories = _fill(
            memory, (RANK_MEMORY if some_ranks else ENGINE_MEMORY) if is_alone else SHARED_MEMORY
        )
        places = [
            RolePlace(gpus, *both, is_shared=not is_alone) for both in zip(shares, memories, strict=True)
        ]
        for rank in some_ranks:
            ranks[rank] = places[0]
        for engine, place in zip(some_engines, places[num_ranks:], strict=True):
            engines[engine] = replace(place, beside_rank=num_ranks > 0)
    tightest = min(
        (place.memory for place in ranks if place.memory is not None), default=None
    )  # ranks need alike
    return GpuDivision(node, tuple(replace(place, memory=tightest) for place in ranks), tuple(engines))


def _fill(shares: Sequence[float | None], total: float) -> list[float]:
    """What is not said is an even part of what is left."""
    said = [share for share in shares if share is not None]
    even = (total - sum(said)) / max(1, len(shares) - len(said))
    return [_down(max(LEAST_GPU_SHARE, even) if share is None else share) for share in shares]


def _down(share: float) -> float:
    """Rounded as Ray counts, and never up: many that are rounded up together no longer fit."""
    return math.floor(share * RESOLUTION + 1e-6) / RESOLUTION
