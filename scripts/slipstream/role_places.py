"""Where Ray puts the roles: one reservation a node for all of them, as `role_placement.py` has divided the
nodes."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from configs.schema import Config
from slipstream.cluster import stage_options
from slipstream.cluster_nodes import ClusterNode, list_nodes
from slipstream.node_agents import LISTENING_S, READ_S, STARTED_S, NodeAgent, NodeAgents, NodeUnfit
from slipstream.ray_waits import wait_for_results
from slipstream.role_division import Bundle, NodeRoom, RoleDivision, RolePlace, RoleWishes, read_wishes
from slipstream.role_failures import RoleFailed, get_result
from slipstream.role_placement import divide_roles
from slipstream.roles import BufferRole, GeneratorRole, LearnerRole
from slipstream.stop_signals import StopSignals
from slipstream.turn_placement import divide_turns, takes_turns

PLACED_S, EXTRA_S = 60.0, 5.0
"""Seconds that Ray may take to set aside what a run needs, because another run may hold it; and what one more
engine needs, which is free."""
GONE_S = 15.0
"""Seconds that roles may take to be gone at the end."""
NAMED_S = 3.0
"""Seconds after which the console says what the roles wait for."""
LOOK_S = 1.0
"""Seconds after which those who wait look again whether the nodes are there."""


class NodeGone(RoleFailed):
    """A node has gone that roles wait for."""


@dataclass(frozen=True, slots=True)
class EngineSeat:
    """The reservation of one engine."""

    place: RolePlace
    group: PlacementGroup
    bundle: int
    """Number of the bundle in the reservation `group`."""
    is_extra: bool = False
    """True where the seat was added while the run went on: it is given back when its engine leaves."""


class RolePlaces:
    """Starts the roles' actors, each at the place that the division has given it."""

    def __init__(
        self,
        config: Config,
        logs: Path,
        signals: StopSignals,
        say: Callable[[str], None] = print,
        prefix: str = "",
        patience_s: float = PLACED_S,
    ) -> None:
        """Sets aside the processors and GPUs of all roles at once: no role can stay pending, and one that
        starts again finds its place free. `logs` is the folder of the roles' logs on every node; `say` prints
        a line about what they wait for; `prefix` begins the names of this command's roles.

        Raises ValueError when the configuration asks for more than the nodes have, RoleFailed when it is not
        free within `patience_s`, and Interrupted.
        """
        self._config, self._logs, self._signals, self.say = config, logs, signals, say
        nodes = list_nodes() if config.cluster.address is not None else list_nodes()[:1]
        self.driver_node = nodes[0].name
        wanted = read_wishes(config)
        if takes_turns(wanted):
            self.division = divide_turns([node.room for node in nodes], wanted)
        else:
            self.division = divide_nodes(nodes, wanted)
        self._has_gpus = {node.name: node.room.num_gpus > 0 for node in nodes}
        self._actors: list[Any] = []
        """All that were started. Ray ends an actor whose last handle is gone."""
        self._generators: dict[str, Any] = {}
        """Those of them that generate, by name."""
        self._devices: dict[int, Any] = {}
        """Results of `RoleProcess.get_devices`, by rank: of those that share several GPUs with an engine."""
        self._groups = self._reserve(self.division, patience_s)
        """The reservation that holds a bundle, and the bundle's number in it."""
        self._groups_of_ranks = [self._groups[place.bundle] for place in self.division.ranks]
        """The same by rank: one that has moved to a node has a reservation beside those that are there."""
        engines = self.division.names[len(self.division.ranks) :]
        self._seats = {
            f"{prefix}{name}": EngineSeat(place, *self._groups[place.bundle])
            for name, place in zip(engines, self.division.engines, strict=True)
        }
        """By name of the engine."""
        self._free_seats: list[EngineSeat] = []
        """Those whose engine has left, set aside for another."""
        self._out_of_reach: set[str] = set()
        """Nodes that are lost, whether Ray still counts on them or not, or where no role can be."""
        used = {self.driver_node, *self.division.nodes}
        self.agents = NodeAgents(
            [node for node in nodes if node.name in used],
            self.driver_node,
            signals,
            own_cluster=config.cluster.address is None,
        )

    def _reserve(
        self, division: RoleDivision, patience_s: float = PLACED_S
    ) -> dict[Bundle, tuple[PlacementGroup, int]]:
        """Sets aside the bundles of a division: a reservation for each node, so that the loss of one node
        touches no other's. Returns the reservation that holds each bundle, and the bundle's number in it.
        Raises RoleFailed when that is not free within `patience_s`, NodeGone, and Interrupted."""
        names = {node.name: str(node) for node in list_nodes()}
        groups: list[PlacementGroup] = []
        found: dict[Bundle, tuple[PlacementGroup, int]] = {}
        for node in division.nodes:
            # Bundles hold whole GPUs: of two bundles with fractions, Ray may put both on one GPU.
            held = {bundle: number for bundle, number in division.bundles.items() if bundle[0] == node}
            wants = [
                {"CPU": processors} | ({"GPU": len(gpus)} if gpus else {})
                for (_, gpus), processors in held.items()
            ]
            group = placement_group(wants, bundle_label_selector=[{"ray.io/node-id": node}] * len(wants))
            groups.append(group)
            found |= {bundle: (group, number) for number, bundle in enumerate(held)}
        ready = [group.ready() for group in groups]
        began, is_named = time.monotonic(), False
        try:
            while len(wait_for_results(ready, len(ready), LOOK_S, self._signals)) < len(groups):
                waited_s = time.monotonic() - began
                if gone := set(division.nodes).difference(node.name for node in list_nodes()):
                    raise NodeGone(f"{' and '.join(names.get(one, one) for one in gone)} is gone")
                if waited_s > min(NAMED_S, patience_s) and not is_named:
                    is_named = True
                    self.say(f"{describe_wait(division)} (for {patience_s:g} s at most)")
                if waited_s > patience_s:
                    waits = describe_wait(division)
                    raise RoleFailed(f"{waits}; they must be placed within {patience_s:g} s")
        except BaseException:
            for group in groups:
                remove_placement_group(group)
            raise
        return found

    # ---- actors

    def start_buffer(self) -> Any:
        here = NodeAffinitySchedulingStrategy(self.driver_node, soft=False)
        buffer = ray.remote(max_concurrency=2, num_cpus=0)(BufferRole).options(scheduling_strategy=here)
        return self._keep(buffer.remote("buffer", *self._process_arguments(self.driver_node)))

    def start_rank(self, rank: int) -> Any:
        place = self.division.ranks[rank]
        options = self._seat_options("learner", place, *self._groups_of_ranks[rank])
        learner = ray.remote(LearnerRole).options(**options)
        actor = self._keep(learner.remote(f"learner-{rank}", *self._process_arguments(place.node)))
        if len(place.reserved) > 1:
            self._devices[rank] = actor.get_devices.remote()
        return actor

    def start_generator(self, name: str) -> Any:
        seat, max_restarts = self._seats[name], self._config.generators.max_restarts
        generator = ray.remote(GeneratorRole).options(
            max_restarts=max_restarts,
            max_task_retries=max_restarts,
            **self._seat_options("generator", seat.place, seat.group, seat.bundle),
        )
        grace_s, patience_s = self._config.generators.grace_s, self._config.buffer.reconnect_s
        process = self._process_arguments(seat.place.node)
        actor = self._keep(generator.remote(name, *process, grace_s, patience_s))
        self._generators[name] = actor
        return actor

    def is_beside_rank(self, name: str) -> bool:
        """True for an engine on a GPU of a rank."""
        return self._seats[name].place.beside_rank

    def find_place(self, name: str) -> RolePlace:
        """Returns the place of an engine. Raises RoleFailed where a rank whose GPU it shares does not name
        it, and Interrupted."""
        place = self._seats[name].place
        if place.share or not place.gpus:
            return place
        # Ray gives these GPUs to ranks, which know their names.
        ranks = [rank for rank, one in enumerate(self.division.ranks) if one.bundle == place.bundle]
        return dataclasses.replace(place, devices=",".join(map(self._read_devices, ranks)))

    def _read_devices(self, rank: int) -> str:
        """Returns Ray's names of the GPUs that a rank has."""
        name, found = f"learner-{rank}", self._devices[rank]
        if not wait_for_results([found], 1, STARTED_S, self._signals):
            raise RoleFailed(f"{name} has not named its GPUs within {STARTED_S:g} s")
        devices: str = get_result(found, name, self.read_log_end)
        return devices

    def ask_to_leave(self, name: str) -> None:
        """Sends SIGTERM to a generator's process. One that has no process yet is ended: it holds nothing."""
        actor = self._generators[name]
        found = ray._private.state.actors(actor._actor_id.hex())
        if found.get("State") != "ALIVE":
            ray.kill(actor)
            return
        with contextlib.suppress(RoleFailed):  # the node does not answer
            node, pid = found["Address"]["NodeID"], found["Pid"]
            self.agents.ask(node, NodeAgent.terminate_process, pid, answered_s=LISTENING_S)

    def end_generator(self, name: str) -> None:
        """Ends the process of a generator that has left. Ray starts none in its place."""
        actor = self._generators.pop(name)
        self._actors.remove(actor)
        ray.kill(actor)
        self.give_back_seat(name)

    def give_back_seat(self, name: str) -> None:
        """Frees what is set aside for an engine without a process."""
        seat = self._seats.pop(name)
        if not seat.is_extra:
            self._free_seats.append(seat)
        elif all(seat.group != other.group for other in self._seats.values()):
            remove_placement_group(seat.group)

    def _keep(self, actor: Any) -> Any:
        self._actors.append(actor)
        return actor

    def end_roles(self) -> None:
        """Ends what is left of the roles in a cluster that others have started: the next run finds their GPUs
        free. Waits for that up to `GONE_S`. Raises Interrupted."""
        if self._config.cluster.address is None:
            return
        known = [ray._private.state.actors(actor._actor_id.hex()) for actor in self._actors]
        for actor in self._actors:
            ray.kill(actor)
        alive = [(found["Address"]["NodeID"], found["Pid"]) for found in known if found["State"] == "ALIVE"]
        self.agents.wait_until_gone(alive, GONE_S)
        self.agents.sweep()

    def _process_arguments(self, node: str) -> tuple[Path, int | None, bool]:
        """Returns what a role's process has to know besides its name: see `RoleProcess`."""
        driver = os.getpid() if node == self.driver_node else None
        return self._logs, driver, self._config.cluster.address is None

    def actor_options(self, stage: str, place: RolePlace) -> dict[str, Any]:
        """Returns Ray's options for an actor at this place, forked from this stage of the nursery."""
        return self._seat_options(stage, place, *self._groups[place.bundle])

    def _seat_options(
        self, stage: str, place: RolePlace, group: PlacementGroup, bundle: int
    ) -> dict[str, Any]:
        options = stage_options(stage)
        # Ray hides no GPU from an actor that has asked for none.
        if self._has_gpus.get(place.node) and not place.gpus:
            variables = options.get("runtime_env", {}).get("env_vars", {})
            options = {"runtime_env": {"env_vars": variables | {"CUDA_VISIBLE_DEVICES": ""}}}
        return options | {
            "num_cpus": place.processors,
            "num_gpus": len(place.gpus) * place.share,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle
            ),
        }

    # ---- nodes

    def find_node(self, name: str) -> ClusterNode:
        """Returns the node of a role."""
        if name == "buffer":
            return self.agents.nodes[self.driver_node]
        if name in self._seats:
            return self.agents.nodes[self._seats[name].place.node]
        places = dict(zip(self.division.names, self.division.places, strict=True))
        return self.agents.nodes[places[name].node]

    def is_on_driver_node(self, name: str) -> bool:
        return self.find_node(name).name == self.driver_node

    @property
    def spans_nodes(self) -> bool:
        """True when a role is on another node than the driver, and than the buffer with it."""
        return len(self.agents.nodes) > 1

    def read_log_end(self, name: str) -> str:
        """Returns the last lines of a role's log, or where to find it."""
        node = self.find_node(name)
        try:
            return self.agents.ask(node.name, NodeAgent.read_log_end, name, self._logs, answered_s=READ_S)
        except RoleFailed as error:
            return f"{self._logs}/{name}.log on {node}, which cannot be read from here ({error})\n"

    def is_out_of_reach(self, name: str) -> bool:
        """True where the node of a role is not the driver's, and Ray has ended there or nobody answers."""
        node = self.find_node(name)
        if node.name == self.driver_node:
            return False
        with contextlib.suppress(RoleFailed):
            if self.agents.ask(node.name, NodeAgent.has_raylet, answered_s=LISTENING_S):
                return False
        self._out_of_reach.add(node.name)
        return True

    def find_lost_engines(self) -> list[str]:
        """Returns the names of engines on nodes that Ray has given up."""
        if not self.spans_nodes:
            return []
        alive = {node.name for node in list_nodes()}
        return [name for name, seat in self._seats.items() if seat.place.node not in alive]

    def find_lost_nodes(self) -> list[ClusterNode]:
        """Returns the nodes of ranks that Ray has given up."""
        alive = {node.name for node in list_nodes()}
        of_ranks = dict.fromkeys(place.node for place in self.division.ranks)
        return [self.agents.nodes[name] for name in of_ranks if name not in alive]

    def replace_lost_ranks(self, given_up: Collection[str] = ()) -> list[str]:
        """Gives the ranks of lost nodes places on the nodes that are left; the others stay where they are.
        `given_up`: names of nodes that are lost although Ray still counts on them.

        Returns a line about each rank that moves. Raises RoleFailed where what is left is not enough, and
        Interrupted.
        """
        gone = {node.name for node in self.find_lost_nodes()} | set(given_up)
        numbers = [rank for rank, place in enumerate(self.division.ranks) if place.node in gone]
        if not numbers:
            return []
        while True:
            with contextlib.suppress(NodeGone, NodeUnfit):
                return self._move_ranks(numbers, gone)

    def _move_ranks(self, numbers: Sequence[int], gone: Collection[str]) -> list[str]:
        """Does what `replace_lost_ranks` does, for these ranks. Raises NodeGone and NodeUnfit too."""
        lost = [self.agents.nodes[name] for name in gone]
        nodes = [node for node in list_nodes() if node.name not in {*gone, *self._out_of_reach}]
        wanted = dataclasses.replace(read_wishes(self._config), ranks=len(numbers), engines=0, evaluators=0)
        found = self._find_free_places(nodes, wanted, f"{' and '.join(map(str, lost))} is gone")
        self._add_nodes([node for node in nodes if node.name in found.nodes])
        groups = self._reserve(found)
        before = {self._groups_of_ranks[number][0] for number in numbers}
        ranks = list(self.division.ranks)
        for number, place in zip(numbers, found.ranks, strict=True):
            self._groups_of_ranks[number] = groups[place.bundle]
            ranks[number] = dataclasses.replace(place, memory=ranks[number].memory)
        self.division = dataclasses.replace(self.division, ranks=tuple(ranks))
        # A node that was out of reach comes back: nothing is to be held there, nor a rank to live on.
        of_engines = {seat.group for seat in (*self._seats.values(), *self._free_seats)}
        for group in before - {group for group, _ in self._groups_of_ranks} - of_engines:
            remove_placement_group(group)
        return [f"learner-{number} moves to {self.find_node(f'learner-{number}')}" for number in numbers]

    def _find_free_places(self, nodes: list[ClusterNode], wanted: RoleWishes, why: str) -> RoleDivision:
        try:
            return divide_roles(read_free_rooms(nodes), wanted)
        except ValueError as error:
            raise RoleFailed(f"{why}, and what is free on the others is not enough: {error}") from None

    def _add_nodes(self, nodes: Sequence[ClusterNode]) -> None:
        """Takes nodes that may be new. Raises NodeUnfit for one where no role can be, which is left out from
        then on, and Interrupted."""
        new = [node for node in nodes if node.name not in self.agents.nodes]
        self._has_gpus |= {node.name: node.room.num_gpus > 0 for node in new}
        try:
            self.agents.add_nodes(new)
        except NodeUnfit as unfit:
            self._out_of_reach.add(unfit.node)
            self.say(str(unfit))
            raise

    # ---- more generators

    def add_seats(self, names: Sequence[str], *, on_all_nodes: bool) -> None:
        """Sets aside what more engines need: first what others have left, then what is free.
        `on_all_nodes`: other nodes than the driver's may be among those.

        Raises ValueError, with the arithmetic, or RoleFailed where not all of them have room, and
        Interrupted.
        """
        alive = {node.name for node in list_nodes()} - self._out_of_reach
        kept = [seat for seat in self._free_seats if seat.place.node in alive][: len(names)]
        more: list[EngineSeat] | None = None
        while more is None:
            with contextlib.suppress(NodeUnfit):
                more = self._reserve_extra_seats(len(names) - len(kept), on_all_nodes)
        self._free_seats = [seat for seat in self._free_seats if seat not in kept]
        self._seats |= dict(zip(names, [*kept, *more], strict=True))

    def _reserve_extra_seats(self, number: int, on_all_nodes: bool) -> list[EngineSeat]:
        """Sets aside what is free for so many engines. Raises NodeUnfit besides what `add_seats` raises."""
        if not number:
            return []
        nodes = [
            node
            for node in list_nodes()
            if node.name == self.driver_node or (on_all_nodes and node.name not in self._out_of_reach)
        ]
        wanted = dataclasses.replace(read_wishes(self._config), ranks=0, engines=number, evaluators=0)
        rooms = read_free_rooms(nodes)
        # Where there are GPUs, an engine that finds all of them taken would else run on a CPU.
        if wanted.engine_gpus is None and any(node.room.num_gpus for node in nodes):
            rooms = [room for room in rooms if room.num_gpus]
            if not rooms:
                raise ValueError("no GPU is free")
        found = divide_roles(rooms, wanted)
        self._add_nodes([node for node in nodes if node.name in found.nodes])
        seats: list[EngineSeat] = []
        groups: dict[Bundle, PlacementGroup] = {}
        try:
            for place in found.engines:
                # A reservation for the engines that share GPUs, and for each without one: each is given back
                # by itself.
                if not place.gpus or place.bundle not in groups:
                    sharing = [one for one in found.engines if one.bundle == place.bundle]
                    part = dataclasses.replace(found, engines=tuple(sharing if place.gpus else [place]))
                    groups[place.bundle] = self._reserve(part, EXTRA_S)[place.bundle][0]
                seats.append(EngineSeat(place, groups[place.bundle], 0, is_extra=True))
        except BaseException:
            for seat in seats:
                remove_placement_group(seat.group)
            raise
        return seats


def divide_nodes(nodes: Sequence[ClusterNode], wanted: RoleWishes) -> RoleDivision:
    """Divides the nodes, but for what others hold, where that leaves as many GPUs for the roles. Else the
    roles have to wait for it. Raises ValueError when the nodes do not have what is wanted."""
    division = divide_roles([node.room for node in nodes], wanted)
    free = {room.name: room for room in read_free_rooms(nodes)}
    if all(division.count_processors(name) <= free[name].num_cpus for name in division.nodes) and all(
        division.count_gpus(name) <= free[name].num_gpus for name in division.nodes
    ):
        return division
    with contextlib.suppress(ValueError):
        other = divide_roles(list(free.values()), wanted)
        if sum(map(other.count_gpus, other.nodes)) == sum(map(division.count_gpus, division.nodes)):
            return other
    return division


def read_free_rooms(nodes: Sequence[ClusterNode]) -> list[NodeRoom]:
    """Returns what nobody has set aside of each node."""
    free = ray._private.state.available_resources_per_node()
    return [
        dataclasses.replace(
            node.room,
            num_cpus=int(free.get(node.name, {}).get("CPU", 0)),
            num_gpus=int(free.get(node.name, {}).get("GPU", 0)),
        )
        for node in nodes
    ]


def describe_wait(division: RoleDivision) -> str:
    """Names the roles, the resources that they wait for, and how much of those is free on each node."""
    free = ray._private.state.available_resources_per_node()
    addresses = {node.name: str(node) for node in list_nodes()}
    parts = []
    for node in division.nodes:
        bundles = {bundle: number for bundle, number in division.bundles.items() if bundle[0] == node}
        needs = {
            "CPU": sum(bundles.values()),
            "GPU": sum(len(gpus) for _, gpus in bundles),
        }
        waits = " and ".join(
            f"{number} {kind}s ({_count_free(free, node, kind):g} free)"
            for kind, number in needs.items()
            if number
        )
        names = ", ".join(name for name, _ in division.list_roles(node))
        parts.append(f"{names} wait for {waits} on node {addresses.get(node, node)}")
    return f"{'; '.join(parts)}: something else in the Ray cluster holds what is not free"


def _count_free(free: Mapping[str, Mapping[str, float]], node: str, kind: str) -> float:
    return free.get(node, {}).get(kind, 0)
