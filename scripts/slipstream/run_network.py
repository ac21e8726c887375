"""Addresses, ports and keys of a command's roles, as their nodes require.

On one node nothing changes: sockets stay where the configuration puts them, on the loopback interface unless
it says otherwise. With roles on several nodes, the buffer and the server of weights listen at their own
nodes' addresses, behind keys. Keys that the configuration does not name are made in the run's folder; each
other node that holds roles gets a copy of what its roles need.
"""

import dataclasses
import socket
from pathlib import Path

from buffers.keys import KeyRole, make_keys
from configs.addresses import host_of, is_beyond_loopback, names_no_host
from configs.buffer import BufferConfig
from configs.schema import Config
from slipstream.buffer_keeper import reserve_port
from slipstream.cluster_nodes import ClusterNode
from slipstream.node_agents import NodeAgent
from slipstream.role_places import RolePlaces

KEYS = "keys"
"""The folder of keys in a command's folder."""
LOOPBACK = "127.0.0.1"
HANDED_OUT = ("server.key*", "generator.key*", "learner.key*", "allowed/*/*.key")
"""Keys that roles of other nodes need: their own, and the server's, with which they serve weights."""


class NodeKeys:
    """The folder of keys on each node that holds roles of a command."""

    def __init__(self, keys: str | None, folder: Path, places: RolePlaces) -> None:
        """`keys`: the folder on the driver's node; None where sockets have no keys. `folder`: the command's
        own, on every node."""
        # Processes that another has started than this one work in another folder.
        self._keys = None if keys is None else str(Path(keys).absolute())
        self._folder, self._places = folder, places
        self._brought: dict[str, str] = {}

    def find_folder(self, name: str) -> str | None:
        """Returns the folder of keys on the node of a role, which has them from then on. Raises RoleFailed
        where the node does not answer."""
        node = self._places.find_node(name).name
        if self._keys is None or node == self._places.driver_node:
            return self._keys
        if node not in self._brought:
            source = Path(self._keys)
            found = sorted(path for pattern in HANDED_OUT for path in source.glob(pattern))
            files = {str(path.relative_to(source)): path.read_bytes() for path in found}
            self._brought[node] = self._places.agents.ask(
                node, NodeAgent.bring_keys, self._folder / KEYS, files
            )
        return self._brought[node]


class RunNetwork:
    """Finds ports, hands out keys, and says where each role listens."""

    def __init__(self, config: Config, folder: Path, places: RolePlaces) -> None:
        """`folder` is the run's, on every node. Raises ValueError for an address that other nodes cannot
        reach, or ports that are not free; RoleFailed where a node does not answer."""
        self._places, buffer = places, config.buffer
        if places.spans_nodes and not is_beyond_loopback(buffer.address):
            buffer = dataclasses.replace(buffer, address=self._choose_buffer_address(config))
        self._check_weights_address(config)
        addresses = (buffer.address, config.sync.address)
        self._is_open = any(one is not None and is_beyond_loopback(one) for one in addresses)
        if self._is_open and buffer.keys is None:
            make_keys(folder / KEYS, list(KeyRole))
            buffer = dataclasses.replace(buffer, keys=str(folder / KEYS))
        self.keys = NodeKeys(buffer.keys, folder, places)
        buffer = dataclasses.replace(buffer, keys=self.keys.find_folder("buffer"))
        self.config = dataclasses.replace(config, buffer=buffer)
        """The configuration of the buffer, and of all who join by it."""
        self._weights: tuple[str, socket.socket | None] | None = None
        """Where the weights are served for all lives of a learner beside the driver, and what keeps the
        port."""

    def _choose_buffer_address(self, config: Config) -> str:
        places = self._places
        if config.buffer.address != BufferConfig().address:
            far = next(name for name in places.division.names if not places.is_on_driver_node(name))
            raise ValueError(
                "buffer.address must be left alone, or be an address of the driver's node that other nodes "
                f"reach, got {config.buffer.address} with {far} on {places.find_node(far)}"
            )
        node = places.find_node("buffer")
        return f"tcp://{node.address}:{self._keep_port(node, 'buffer', config.cluster.port_range)}"

    def _check_weights_address(self, config: Config) -> None:
        places, address = self._places, config.sync.address
        if address is None or is_beyond_loopback(address) or not places.division.ranks:
            return
        node = places.find_node("learner-0")
        for name in places.division.names:
            if (other := places.find_node(name)) != node and not name.startswith("learner"):
                raise ValueError(
                    f"sync.address must be left alone, or be an address of {node}, the learner's node, that "
                    f"other nodes reach, got {address} with {name} on {other}"
                )

    def _keep_port(
        self, node: ClusterNode, what: str, ports: range | None, host: str | None = None, anew: bool = False
    ) -> int:
        """Returns a port that is kept for `what`, at the node's own address or at `host`."""
        asked = (host or node.address, ports, what, anew)
        return self._places.agents.ask(node.name, NodeAgent.keep_port, *asked)

    @property
    def reaches_all_nodes(self) -> bool:
        """True where the buffer listens for other nodes than the driver's."""
        return self._is_open or self._places.spans_nodes

    def reach_buffer(self, bound: str) -> str:
        """Returns the address at which all roles reach the buffer, which listens at `bound`."""
        if not names_no_host(bound) or not self._places.spans_nodes:
            return bound
        return f"tcp://{self._places.find_node('buffer').address}:{bound.rpartition(':')[2]}"

    def place_learner(self, config: Config) -> tuple[Config, str]:
        """Returns the learner's configuration, with the address of the weights, and the URL at which its
        ranks meet, for the places that they have now."""
        places, node = self._places, self._places.find_node("learner-0")
        sync, address, ports = config.sync, config.buffer.address, config.cluster.port_range
        if self._is_open and sync.address is None and (places.spans_nodes or ports is not None):
            is_named = node.name == places.driver_node and not names_no_host(address)
            at = host_of(address) if is_named else node.address
            sync = dataclasses.replace(sync, address=f"tcp://{at}:{self._keep_port(node, 'weights', ports)}")
        elif self._is_open and not places.spans_nodes and config.weights_address is not None:
            # Fetches that are under way when the learner dies go on with its next life.
            self._weights = self._weights or reserve_port(config.weights_address)
            sync = dataclasses.replace(sync, address=self._weights[0])
        # A rank of the life before that is out of reach must not meet those of this one.
        if len({place.node for place in places.division.ranks}) > 1:
            meeting = f"{node.address}:{self._keep_port(node, 'ranks', ports, anew=True)}"
        else:
            meeting = f"{LOOPBACK}:{self._keep_port(node, 'ranks', None, LOOPBACK, anew=True)}"
        return dataclasses.replace(config, sync=sync), f"tcp://{meeting}"

    def configure_rank(self, config: Config, rank: int) -> Config:
        """Returns the learner's configuration with the folder of keys on the node of a rank."""
        keys = self.keys.find_folder(f"learner-{rank}")
        return dataclasses.replace(config, buffer=dataclasses.replace(config.buffer, keys=keys))


def describe_learner(placed: Config, meeting: str) -> str:
    """Returns a line that says where a learner listens that `RunNetwork.place_learner` has placed."""
    parts = [] if placed.weights_address is None else [f"weights at {placed.weights_address}"]
    if placed.num_learner_ranks > 1:
        parts.append(f"the ranks meet at {meeting}")
    return f"learner-0: {', '.join(parts)}"


def describe_places(places: RolePlaces, network: RunNetwork) -> list[str]:
    """Returns lines that say what each node holds. On the driver's node alone, they are about GPUs."""
    division = places.division
    if not places.spans_nodes and network.config.cluster.address is None:
        line = division.describe_gpus(places.driver_node)
        return [line] if line else []
    lines = []
    for node in places.agents.nodes.values():
        roles = [name for name, place in division.list_roles(node.name) if not place.gpus]
        parts = [division.describe_gpus(node.name), ", ".join(roles)]
        if node.name == places.driver_node:
            parts.insert(0, f"driver, buffer at {network.config.buffer.address}")
        lines.append(f"{node}: {'; '.join(filter(None, parts))}")
    return lines
