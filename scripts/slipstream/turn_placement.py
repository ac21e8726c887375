"""Places engines on the GPUs of the learner's ranks, which they have by turns (`placement.mode=colocated`).

    2 GPUs, 2 ranks, 2 engines                    │ rank 0, engine 0 │ rank 1, engine 1 │
    2 GPUs, 2 ranks, 1 engine of tensor_parallel=2│ rank 0 │ rank 1 │, engine 0 on both

A rank has the whole memory of its GPU in its turn, and the engines of a GPU have it together in theirs.

Ray gives one GPU to its rank and engines in parts. It knows no parts of several GPUs: so it gives each rank
one of those that an engine of several has, and none to the engine, which hears from the ranks which ones they
are. This is arithmetic alone, as `role_placement.py` is.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from configs.placement import PlacementMode
from slipstream.role_division import NodeRoom, RoleDivision, RolePlace, RoleWishes
from slipstream.role_placement import ENGINE_MEMORY, RANK_MEMORY, RESOLUTION, divide_roles


def takes_turns(wanted: RoleWishes) -> bool:
    """True where engines and ranks have the same GPUs, or processors, by turns. Engines that come without
    ranks have places of their own."""
    return wanted.placement.mode is PlacementMode.colocated and wanted.ranks > 0


def divide_turns(nodes: Sequence[NodeRoom], wanted: RoleWishes) -> RoleDivision:
    """Gives every process its place.

    Raises ValueError, with the arithmetic, for wishes that do not fit.
    """
    if (wanted.rank_gpus == 0) != (wanted.engine_gpus == 0):
        raise ValueError(
            "learner.gpus and generators.gpus must both be null, or both 0, with placement.mode=colocated "
            f"(they have the same GPUs by turns), got {wanted.rank_gpus} and {wanted.engine_gpus}"
        )
    ranks = divide_roles(nodes, replace(wanted, engines=0, evaluators=0)).ranks
    if not ranks[0].gpus:
        division = divide_roles(nodes, wanted)
        return replace(division, engines=tuple(replace(one, takes_turns=True) for one in division.engines))
    groups = _group_ranks(ranks, wanted.engine_ranks)
    num_groups = len(groups)
    _check_processors(nodes, wanted, [group[0].node for group in groups])
    placed, homes = list[RolePlace](), list[RolePlace]()
    for number, group in enumerate(groups):
        num_engines = len(range(number, wanted.engines, num_groups))
        gpus = tuple(gpu for place in group for gpu in place.gpus)
        # Rounded down, as Ray counts.
        part = RESOLUTION // (1 + num_engines) / RESOLUTION
        rank_share, engine_share = (part, part) if wanted.engine_ranks == 1 else (1.0, 0.0)
        own = RANK_MEMORY if wanted.rank_memory is None else wanted.rank_memory
        placed += [replace(place, share=rank_share, memory=own, reserved=gpus) for place in group]
        memory = _divide_memory(wanted, num_engines)
        home = RolePlace(group[0].node, gpus, engine_share, memory, num_engines > 1, beside_rank=True)
        homes.append(replace(home, processors=wanted.engine_ranks, takes_turns=True, reserved=gpus))
    engines = tuple(homes[number % num_groups] for number in range(wanted.engines))
    return RoleDivision(tuple(placed), engines, wanted.evaluators)


def _group_ranks(ranks: Sequence[RolePlace], each: int) -> list[Sequence[RolePlace]]:
    """Returns the ranks whose GPUs an engine of `each` GPUs has, group by group. Raises ValueError where
    they cannot be grouped so on every node."""
    for node, number in Counter(place.node for place in ranks).items():
        if number % each:
            raise ValueError(
                "generators.tensor_parallel must divide the ranks of the learner on each node with "
                f"placement.mode=colocated (an engine has the GPUs of so many), got {each} and {number} on "
                f"node {node}"
            )
    # The ranks of a node follow one another.
    return [ranks[first : first + each] for first in range(0, len(ranks), each)]


def _check_processors(nodes: Sequence[NodeRoom], wanted: RoleWishes, homes: Sequence[str]) -> None:
    """Raises ValueError where a node has fewer processors than processes. `homes`: the node of each group of
    ranks; engines join one group after the other."""
    room = {node.name: node.num_cpus for node in nodes}
    for home in homes:
        room[home] -= wanted.engine_ranks
    most = 0
    while most < wanted.engines and room[homes[most % len(homes)]] >= wanted.engine_ranks:
        room[homes[most % len(homes)]] -= wanted.engine_ranks
        most += 1
    if most < wanted.engines:
        raise ValueError(
            f"generators.count and eval.generators must be together at most {most} (the CPUs beside "
            f"{wanted.ranks} ranks of the learner, of which each takes {wanted.engine_ranks}), got "
            f"{wanted.engines}"
        )


def _divide_memory(wanted: RoleWishes, num_engines: int) -> float:
    """Returns the part of a GPU's memory that each of its engines may take."""
    even = ENGINE_MEMORY / max(1, num_engines)
    memory = even if wanted.engine_memory is None else wanted.engine_memory
    if memory * num_engines > 1:
        raise ValueError(
            f"generators.gpu_memory_fraction must be at most {1 / num_engines:.2f} for {num_engines} engines "
            f"on one GPU, got {memory}"
        )
    return memory
