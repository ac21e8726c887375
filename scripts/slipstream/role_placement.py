"""Divides a host's GPUs between the ranks of the learner and the engines. This is arithmetic alone;
`role_places.py` asks Ray for the result.

    4 GPUs, 1 rank, 2 engines      │ rank 0 │ engine 0          │ engine 1 │        │
    2 GPUs, 1 rank, 2 engines      │ rank 0 │ engine 0 engine 1 │
    1 GPU,  1 rank, 1 engine       │ rank 0 engine 0 │

A rank has a GPU of its own as long as the engines fit on the others; else engines join the ranks. Two ranks
never share a GPU: NCCL refuses that. All roles of a run stay on the driver's host, so the GPUs of other hosts
do not count.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from configs.generators import EngineKind
from configs.learner import LearnerKind
from configs.rules import LEAST_GPU_SHARE
from configs.schema import Config, Role

SHARED_MEMORY = 0.9
"""Memory of a shared GPU that is divided when the configuration does not say; CUDA itself takes some for each
process."""
RANK_MEMORY, ENGINE_MEMORY = 1.0, 0.9
"""Memory that a rank or an engine may take of a GPU of its own."""
RESOLUTION = 10_000
"""Parts of a GPU in which Ray counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleWishes:
    """The processes that a command starts, and their shares. A share of None means an even part of what is
    left."""

    ranks: int
    """Ranks of the policy, and of a critic of its own."""
    engines: int
    rank_gpus: float | None = None
    """GPUs of each rank: a part of one, or 1; 0 runs it on the CPU."""
    engine_gpus: float | None = None
    """GPUs of each engine: a part of one, or a whole number; 0 runs it on the CPU."""
    rank_memory: float | None = None
    """Part of its GPU's memory, from 0 to 1."""
    engine_memory: float | None = None


@dataclass(frozen=True, slots=True)
class RolePlace:
    """The place of one process. Without GPUs it runs on the CPU, and sees none."""

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


@dataclass(frozen=True, slots=True)
class GpuDivision:
    """A place for every process, all on one node."""

    node: str
    ranks: tuple[RolePlace, ...]
    engines: tuple[RolePlace, ...]

    @property
    def bundles(self) -> dict[tuple[int, ...], int]:
        """GPUs that are taken together -> number of processes on them. `()` has the processes without a
        GPU."""
        return {
            gpus: sum(p.gpus == gpus for p in self.places) for gpus in sorted({p.gpus for p in self.places})
        }

    @property
    def places(self) -> tuple[RolePlace, ...]:
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
    """Reads how many processes the configuration asks for, with which shares.

    A command that starts generators only leaves no GPU for a learner. A simulated engine needs no GPU.
    """
    learner, generators = config.learner, config.generators
    is_learner_simulated = learner.engine is LearnerKind.simulated
    is_engine_simulated = generators.engine is EngineKind.simulated
    return RoleWishes(
        ranks=config.num_learner_ranks if config.role is Role.all else 0,
        engines=generators.count,
        rank_gpus=0.0 if learner.gpus is None and is_learner_simulated else learner.gpus,
        engine_gpus=0.0 if generators.gpus is None and is_engine_simulated else generators.gpus,
        rank_memory=learner.gpu_memory_fraction,
        engine_memory=generators.gpu_memory_fraction,
    )


def divide_gpus(gpus: Mapping[str, int], here: str, wanted: RoleWishes) -> GpuDivision:
    """Gives every process its place. `gpus` is the number of GPUs by node, `here` the driver's node.

    Raises ValueError, with the arithmetic, for wishes that do not fit.
    """
    num_gpus = gpus.get(here, 0)
    ranks = wanted.ranks if wanted.rank_gpus != 0 else 0
    engines = wanted.engines if wanted.engine_gpus != 0 else 0
    elsewhere = {node: number for node, number in sorted(gpus.items()) if number and node != here}
    asks_for_gpus = bool((ranks and wanted.rank_gpus) or (engines and wanted.engine_gpus))
    # Without a GPU anywhere, whoever does not ask for one runs on the CPU. With GPUs elsewhere, that would
    # surprise.
    if not num_gpus and not elsewhere and not asks_for_gpus:
        ranks = engines = 0
    if not ranks and not engines:
        return GpuDivision(here, (RolePlace(),) * wanted.ranks, (RolePlace(),) * wanted.engines)
    if not num_gpus:
        found = (
            ", ".join(f"{number} on node {node}" for node, number in elsewhere.items()) or "none elsewhere"
        )
        raise ValueError(
            "learner.gpus and generators.gpus must be 0 or null where the driver's node has no GPU, and 0 "
            "where only "
            "others have (all roles of a run stay on its node), got "
            f"{wanted.rank_gpus} and {wanted.engine_gpus} with 0 GPUs here and {found}"
        )
    if ranks > num_gpus:
        raise ValueError(
            f"learner.ranks and placement.critic_ranks must be together at most {num_gpus} (the GPUs of the "
            "driver's "
            f"node; NCCL refuses two ranks on one GPU), got {ranks}"
        )
    if (wanted.engine_gpus or 0) > 1:
        members = _place_on_whole_gpus(num_gpus, ranks, engines, round(wanted.engine_gpus or 0))
    else:
        members = _place_on_shared_gpus(num_gpus, ranks, engines, wanted)
    return _make_division(here, members, wanted)


Members = dict[tuple[int, ...], tuple[list[int], list[int]]]
"""GPUs -> numbers of the ranks and of the engines on them."""


def _place_on_whole_gpus(num_gpus: int, ranks: int, engines: int, each: int) -> Members:
    """Places engines of several GPUs each. They share none."""
    if engines * each > num_gpus - ranks:
        raise ValueError(
            f"generators.count × generators.gpus must be at most {num_gpus - ranks} ({num_gpus} GPUs of the "
            "driver's node "
            f"less {ranks} for the learner's ranks: an engine with more than one GPU shares none), got "
            f"{engines} × {each}"
        )
    members: Members = {(rank,): ([rank], []) for rank in range(ranks)}
    for engine in range(engines):
        first = ranks + engine * each
        members[tuple(range(first, first + each))] = ([], [engine])
    return members


def _place_on_shared_gpus(num_gpus: int, ranks: int, engines: int, wanted: RoleWishes) -> Members:
    """Places engines of at most one GPU: each where the fewest are. A GPU with a rank comes last, unless the
    configuration leaves room beside the ranks on purpose."""
    room = [_count_room(wanted, has_rank=gpu < ranks) if engines else 0 for gpu in range(num_gpus)]
    if engines > sum(room):
        beside, alone = _count_room(wanted, has_rank=True), _count_room(wanted, has_rank=False)
        raise ValueError(
            f"generators.count must be at most {sum(room)} = {ranks} × {beside} (GPUs with a rank of the "
            "learner, each "
            f"with room for {beside} engines) + {num_gpus - ranks} × {alone} (GPUs without), got {engines}: "
            f"{_describe_rule(wanted)}"
        )
    leaves_room = (wanted.rank_gpus or 1) < 1
    held: list[list[int]] = [[] for _ in range(num_gpus)]

    def measure_burden(gpu: int) -> tuple[bool, int, bool]:
        has_rank = gpu < ranks
        return has_rank and not leaves_room, has_rank + len(held[gpu]), has_rank

    for engine in range(engines):
        free = [gpu for gpu in range(num_gpus) if len(held[gpu]) < room[gpu]]
        held[min(free, key=measure_burden)].append(engine)
    return {
        (gpu,): ([gpu] if gpu < ranks else [], held[gpu])
        for gpu in range(num_gpus)
        if gpu < ranks or held[gpu]
    }


def _count_room(wanted: RoleWishes, *, has_rank: bool) -> int:
    """Counts the engines that fit on one GPU: shares of compute, and of memory, add up to at most 1 each."""
    rooms = []
    for rank, engine in ((wanted.rank_gpus, wanted.engine_gpus), (wanted.rank_memory, wanted.engine_memory)):
        left = 1 - (_or_least(rank) if has_rank else 0)
        rooms.append(math.floor(left / _or_least(engine) + 1e-9))
    return max(0, min(rooms))


def _or_least(share: float | None) -> float:
    return LEAST_GPU_SHARE if share is None else share


def _describe_rule(wanted: RoleWishes) -> str:
    """States the rule that an engine did not satisfy, with its values."""
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


def _make_division(node: str, members: Members, wanted: RoleWishes) -> GpuDivision:
    ranks, engines = [RolePlace()] * wanted.ranks, [RolePlace()] * wanted.engines
    for gpus, (some_ranks, some_engines) in members.items():
        num_ranks, num_engines = len(some_ranks), len(some_engines)
        is_alone = num_ranks + num_engines == 1
        memory = [wanted.rank_memory] * num_ranks + [wanted.engine_memory] * num_engines
        share = [wanted.rank_gpus] * num_ranks + [wanted.engine_gpus if len(gpus) == 1 else 1.0] * num_engines
        shares = _fill_shares(share, 1.0)
        memories = _fill_shares(
            memory, (RANK_MEMORY if some_ranks else ENGINE_MEMORY) if is_alone else SHARED_MEMORY
        )
        places = [
            RolePlace(gpus, *both, is_shared=not is_alone) for both in zip(shares, memories, strict=True)
        ]
        for rank in some_ranks:
            ranks[rank] = places[0]
        for engine, place in zip(some_engines, places[num_ranks:], strict=True):
            engines[engine] = replace(place, beside_rank=num_ranks > 0)
    # All ranks need the same memory, so the tightest place decides for all.
    tightest = min((place.memory for place in ranks if place.memory is not None), default=None)
    return GpuDivision(node, tuple(replace(place, memory=tightest) for place in ranks), tuple(engines))


def _fill_shares(shares: Sequence[float | None], total: float) -> list[float]:
    """Returns the shares, rounded down, with an even part of what is left of `total` for each None."""
    said = [share for share in shares if share is not None]
    even = (total - sum(said)) / max(1, len(shares) - len(said))
    return [_round_down(max(LEAST_GPU_SHARE, even) if share is None else share) for share in shares]


def _round_down(share: float) -> float:
    """Rounds as Ray counts, and never up: many shares that are rounded up together no longer fit."""
    return math.floor(share * RESOLUTION + 1e-6) / RESOLUTION
