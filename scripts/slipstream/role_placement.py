"""Divides nodes and their GPUs between the ranks of the learner and the engines. This is arithmetic alone;
`role_places.py` asks Ray for the result.

    4 GPUs, 1 rank, 2 engines      │ rank 0 │ engine 0          │ engine 1 │        │
    2 GPUs, 1 rank, 2 engines      │ rank 0 │ engine 0 engine 1 │
    1 GPU,  1 rank, 1 engine       │ rank 0 engine 0 │

All ranks are on one node where one has room for them, the driver's before others that leave the engines as
much room as they need; else on as few as can be.
A rank has a GPU of its own as long as the engines fit on the others; else engines join the ranks. Two ranks
never share a GPU: NCCL refuses that. Engines go where the fewest processes share a GPU; among equal places
`placement.strategy` decides. A process without a GPU takes a processor, whose order is the nodes'.
`turn_placement.py` divides GPUs that ranks and engines have by turns.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from configs.placement import PlacementStrategy
from configs.rules import LEAST_GPU_SHARE
from slipstream.role_division import Bundle, NodeRoom, RoleDivision, RolePlace, RoleWishes

SHARED_MEMORY = 0.9
"""Memory of a shared GPU that is divided when the configuration does not say; CUDA itself takes some for each
process."""
RANK_MEMORY, ENGINE_MEMORY = 1.0, 0.9
"""Memory that a rank or an engine may take of a GPU of its own."""
RESOLUTION = 10_000
"""Parts of a GPU in which Ray counts."""


def divide_roles(nodes: Sequence[NodeRoom], wanted: RoleWishes) -> RoleDivision:
    """Gives every process its place. The driver's node comes first.

    Raises ValueError, with the arithmetic, for wishes that do not fit.
    """
    for_ranks = _select_nodes(nodes, wanted.placement.learner, "learner", wanted.ranks)
    for_engines = _select_nodes(nodes, wanted.placement.generators, "generators", wanted.engines)
    any_gpu = any(node.num_gpus for node in nodes)
    ranks_on_gpus = _takes_gpus(for_ranks, wanted.ranks, wanted.rank_gpus, any_gpu, "learner")
    engines_on_gpus = _takes_gpus(for_engines, wanted.engines, wanted.engine_gpus, any_gpu, "generators")
    refusals = []
    for homes in _list_homes(for_ranks, for_engines, wanted, ranks_on_gpus):
        places = _Division(nodes, wanted)
        places.place_ranks(homes, ranks_on_gpus)
        try:
            if not engines_on_gpus:
                places.place_engines_on_cpus(for_engines)
            elif wanted.engine_ranks > 1:
                places.place_engines_on_whole_gpus(for_engines)
            else:
                places.place_engines_on_shared_gpus(for_engines)
            return places.finish()
        except ValueError as refusal:
            refusals.append(refusal)
    raise refusals[0]


def _list_homes(
    nodes: Sequence[NodeRoom], for_engines: Sequence[NodeRoom], wanted: RoleWishes, on_gpus: bool
) -> list[list[NodeRoom]]:
    """Returns where the ranks may be, the best first: each node that has room for all, or else those that
    they fill one after the other. Of nodes that are alike, the first stands for all.

    Raises ValueError where the nodes have no room for them.
    """
    room = {node.name: _count_ranks(node, on_gpus) for node in nodes}
    if wanted.ranks > sum(room.values()):
        raise ValueError(_describe_lack_for_ranks(wanted, nodes, sum(room.values()), on_gpus))
    if not wanted.ranks:
        return [[]]
    kinds: dict[tuple[int, int, bool], list[NodeRoom]] = {}
    for node in nodes:
        if room[node.name] >= wanted.ranks:
            kinds.setdefault((node.num_cpus, node.num_gpus, node in for_engines), [node])
    return list(kinds.values()) or [sorted(nodes, key=lambda one: -room[one.name])]


def _count_ranks(node: NodeRoom, on_gpus: bool) -> int:
    """Counts the ranks that a node has room for."""
    return min(node.num_cpus, node.num_gpus) if on_gpus else node.num_cpus


def _select_nodes(
    nodes: Sequence[NodeRoom], labels: Mapping[str, str], section: str, number: int
) -> list[NodeRoom]:
    """Returns the nodes with these labels. Raises ValueError where there is none for `number` processes."""
    found = [node for node in nodes if node.has_labels(labels)]
    if number and not found:
        seen = sorted({f"{key}={value}" for node in nodes for key, value in node.labels.items()})
        raise ValueError(
            f"placement.{section} must be labels that a node of the cluster has (`ray start "
            f"--labels=KEY=VALUE`), got {dict(labels)} with {', '.join(seen) or 'no label'} on "
            f"{len(nodes)} nodes"
        )
    return found


def _takes_gpus(
    nodes: Sequence[NodeRoom], number: int, gpus: float | None, any_gpu: bool, section: str
) -> bool:
    """Tells whether processes run on GPUs. Without a GPU anywhere, whoever does not ask for one runs on the
    CPU. Raises ValueError where only nodes that these processes may not use have one."""
    if not number or gpus == 0:
        return False
    if any(node.num_gpus for node in nodes):
        return True
    if any_gpu or gpus:
        elsewhere = "others have some" if any_gpu else "no node of the cluster has one"
        raise ValueError(
            f"{section}.gpus must be 0{'' if any_gpu else ' or null'} where the nodes of "
            f"placement.{section} have no GPU, got {gpus} ({elsewhere})"
        )
    return False


Gpu = tuple[NodeRoom, int]
"""A GPU by its node and its number there."""


class _Division:
    """Places processes one after the other, and keeps what is left of each node."""

    def __init__(self, nodes: Sequence[NodeRoom], wanted: RoleWishes) -> None:
        self._order, self._wanted = {node.name: number for number, node in enumerate(nodes)}, wanted
        self._free_cpus = {node.name: node.num_cpus for node in nodes}
        self._num_engines = dict.fromkeys(self._free_cpus, 0)
        self._ranks: list[RolePlace] = []
        self._engines: list[RolePlace] = []
        self._members: dict[Bundle, tuple[list[int], list[int]]] = {}
        """GPUs -> numbers of the ranks and of the engines on them."""

    # ---- ranks

    def place_ranks(self, nodes: Sequence[NodeRoom], on_gpus: bool) -> None:
        """Fills one node after the other, until all ranks have a place."""
        left = self._wanted.ranks
        for node in nodes:
            for number in range(min(left, _count_ranks(node, on_gpus))):
                gpus = (number,) if on_gpus else ()
                if on_gpus:
                    self._members[(node.name, gpus)] = ([len(self._ranks)], [])
                self._ranks.append(RolePlace(node.name, gpus))
                self._free_cpus[node.name] -= 1
                left -= 1

    # ---- engines

    def place_engines_on_cpus(self, nodes: Sequence[NodeRoom]) -> None:
        self._check_cpus(nodes)
        for _ in range(self._wanted.engines):
            free = [node for node in nodes if self._has_cpus(node)]
            self._add_engine(min(free, key=self._prefer_node), ())

    def place_engines_on_whole_gpus(self, nodes: Sequence[NodeRoom]) -> None:
        """Places engines of several GPUs each. They share none."""
        wanted, each = self._wanted, self._wanted.engine_ranks
        free = {node.name: self._list_gpus_without_rank(node) for node in nodes}
        if wanted.engines > sum(len(gpus) // each for gpus in free.values()):
            most = sum(len(gpus) // each * each for gpus in free.values())
            raise ValueError(
                f"generators.count × generators.tensor_parallel must be at most {most} (GPUs of nodes that "
                f"may hold engines, in parts of {each} of one node, less {len(self._members)} for the ranks: "
                f"an engine of several GPUs shares none), got {_count_engines(wanted)} × {each}"
            )
        self._check_cpus(nodes)
        for _ in range(wanted.engines):
            able = [one for one in nodes if len(free[one.name]) >= each and self._has_cpus(one)]
            if not able:
                raise ValueError(_describe_lack_of_cpus(wanted, nodes, len(self._engines)))
            node = min(able, key=self._prefer_node)
            gpus, free[node.name] = tuple(free[node.name][:each]), free[node.name][each:]
            self._add_engine(node, gpus)

    def place_engines_on_shared_gpus(self, nodes: Sequence[NodeRoom]) -> None:
        """Places engines of at most one GPU: each where the fewest are. A GPU with a rank comes last, unless
        the configuration leaves room beside the ranks on purpose."""
        wanted = self._wanted
        gpus: list[Gpu] = [(node, number) for node in nodes for number in range(node.num_gpus)]
        beside, alone = _count_room(wanted, has_rank=True), _count_room(wanted, has_rank=False)
        num_beside = sum(self._has_rank(gpu) for gpu in gpus)
        most = num_beside * beside + (len(gpus) - num_beside) * alone
        if wanted.engines > most:
            raise ValueError(
                f"generators.count must be at most {most} = {num_beside} × {beside} (GPUs with a rank of the "
                f"learner, each with room for {beside} engines) + {len(gpus) - num_beside} × {alone} (GPUs "
                f"without), got {_count_engines(wanted)}: {_describe_rule(wanted)}"
            )
        self._check_cpus(nodes)
        leaves_room = (wanted.rank_gpus or 1) < 1
        held = [0] * len(gpus)

        def measure_burden(number: int) -> tuple[bool, int, bool, tuple[int, int], int]:
            node, gpu = gpus[number]
            has_rank = self._has_rank(gpus[number])
            return (
                has_rank and not leaves_room,
                has_rank + held[number],
                has_rank,
                self._prefer_node(node),
                gpu,
            )

        for _ in range(wanted.engines):
            free = [
                number
                for number, gpu in enumerate(gpus)
                if held[number] < (beside if self._has_rank(gpu) else alone) and self._has_cpus(gpu[0])
            ]
            if not free:
                raise ValueError(_describe_lack_of_cpus(wanted, nodes, len(self._engines)))
            best = min(free, key=measure_burden)
            held[best] += 1
            self._add_engine(gpus[best][0], (gpus[best][1],))

    def _add_engine(self, node: NodeRoom, gpus: tuple[int, ...]) -> None:
        if gpus:
            self._members.setdefault((node.name, gpus), ([], []))[1].append(len(self._engines))
        self._engines.append(RolePlace(node.name, gpus, processors=self._wanted.engine_ranks))
        self._free_cpus[node.name] -= self._wanted.engine_ranks
        self._num_engines[node.name] += 1

    def _prefer_node(self, node: NodeRoom) -> tuple[int, int]:
        """Orders nodes that are equal otherwise: the least comes first."""
        spreads = self._wanted.placement.strategy is PlacementStrategy.spread
        return (self._num_engines[node.name] if spreads else 0, self._order[node.name])

    def _has_rank(self, gpu: Gpu) -> bool:
        return bool(self._members.get((gpu[0].name, (gpu[1],)), ([], []))[0])

    def _list_gpus_without_rank(self, node: NodeRoom) -> list[int]:
        return [number for number in range(node.num_gpus) if not self._has_rank((node, number))]

    def _has_cpus(self, node: NodeRoom) -> bool:
        """True where one more engine finds processors."""
        return self._free_cpus[node.name] >= self._wanted.engine_ranks

    def _check_cpus(self, nodes: Sequence[NodeRoom]) -> None:
        """Raises ValueError where nodes have fewer processors than processes: Ray would leave the others
        waiting for ever."""
        room = sum(self._free_cpus[node.name] // self._wanted.engine_ranks for node in nodes)
        if self._wanted.engines > room:
            raise ValueError(_describe_lack_of_cpus(self._wanted, nodes, room))

    # ---- shares

    def finish(self) -> RoleDivision:
        """Divides each GPU between those on it."""
        ranks, engines, wanted = self._ranks, self._engines, self._wanted
        for (_, gpus), (some_ranks, some_engines) in self._members.items():
            num_ranks, num_engines = len(some_ranks), len(some_engines)
            is_alone = num_ranks + num_engines == 1
            memory = [wanted.rank_memory] * num_ranks + [wanted.engine_memory] * num_engines
            engine_share = wanted.engine_gpus if len(gpus) == 1 else 1.0
            shares = _fill_shares([wanted.rank_gpus] * num_ranks + [engine_share] * num_engines, 1.0)
            own = RANK_MEMORY if some_ranks else ENGINE_MEMORY
            memories = _fill_shares(memory, own if is_alone else SHARED_MEMORY)
            both = list(zip(shares, memories, strict=True))
            for rank, (share, part) in zip(some_ranks, both, strict=False):
                ranks[rank] = replace(ranks[rank], share=share, memory=part, is_shared=not is_alone)
            for engine, (share, part) in zip(some_engines, both[num_ranks:], strict=True):
                engines[engine] = replace(
                    engines[engine], share=share, memory=part, is_shared=not is_alone,
                    beside_rank=num_ranks > 0,
                )  # fmt: skip
        # All ranks need the same memory, so the tightest place decides for all.
        tightest = min((place.memory for place in ranks if place.memory is not None), default=None)
        limited = tuple(replace(place, memory=tightest) for place in ranks)
        return RoleDivision(limited, tuple(engines), wanted.evaluators)


def _count_room(wanted: RoleWishes, *, has_rank: bool) -> int:
    """Counts the engines that fit on one GPU: shares of compute, and of memory, add up to at most 1 each."""
    rooms = []
    for rank, engine in ((wanted.rank_gpus, wanted.engine_gpus), (wanted.rank_memory, wanted.engine_memory)):
        left = 1 - (_or_least(rank) if has_rank else 0)
        rooms.append(math.floor(left / _or_least(engine) + 1e-9))
    return max(0, min(rooms))


def _or_least(share: float | None) -> float:
    return LEAST_GPU_SHARE if share is None else share


def _fill_shares(shares: Sequence[float | None], total: float) -> list[float]:
    """Returns the shares, rounded down, with an even part of what is left of `total` for each None."""
    said = [share for share in shares if share is not None]
    even = (total - sum(said)) / max(1, len(shares) - len(said))
    return [_round_down(max(LEAST_GPU_SHARE, even) if share is None else share) for share in shares]


def _round_down(share: float) -> float:
    """Rounds as Ray counts, and never up: many shares that are rounded up together no longer fit."""
    return math.floor(share * RESOLUTION + 1e-6) / RESOLUTION


# ---- what does not fit


def _describe_lack_for_ranks(wanted: RoleWishes, nodes: Sequence[NodeRoom], most: int, on_gpus: bool) -> str:
    kind = "GPUs" if on_gpus else "CPUs"
    reason = "NCCL refuses two ranks on one GPU" if on_gpus else "of which each rank takes one"
    return (
        f"learner.ranks and placement.critic_ranks must be together at most {most} (the {kind} of "
        f"{_count_nodes(nodes)} that may hold ranks; {reason}), got {wanted.ranks}"
    )


def _describe_lack_of_cpus(wanted: RoleWishes, nodes: Sequence[NodeRoom], most: int) -> str:
    beside = f" beside {wanted.ranks} of the learner" if wanted.ranks else ""
    each = f"{wanted.engine_ranks} of one node" if wanted.engine_ranks > 1 else "one"
    return (
        f"generators.count and eval.generators must be together at most {most} (the CPUs for "
        f"engines{beside} of {_count_nodes(nodes)} in the Ray cluster, of which each takes {each}), got "
        f"{wanted.engines}"
    )


def _count_nodes(nodes: Sequence[NodeRoom]) -> str:
    return "the node" if len(nodes) == 1 else f"the {len(nodes)} nodes"


def _count_engines(wanted: RoleWishes) -> str:
    """Returns the number of engines, and says how many of them evaluate alone."""
    return (
        f"{wanted.engines} with eval.generators={wanted.evaluators}"
        if wanted.evaluators
        else str(wanted.engines)
    )


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
