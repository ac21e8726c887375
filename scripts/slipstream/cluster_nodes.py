"""The nodes of a Ray cluster, as far as placement needs them."""

from dataclasses import dataclass

import ray

from slipstream.role_division import NodeRoom

OWN_LABELS = ("ray.io/node-id",)
"""Labels of Ray's that name one node each, and help nobody choose."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A living node."""

    name: str
    """Ray's id."""
    address: str
    """Address by which the other nodes reach it."""
    hostname: str
    room: NodeRoom
    """All that it has, free or not."""

    def __str__(self) -> str:
        return f"{self.hostname} ({self.address})" if self.hostname != self.address else self.address


def list_nodes() -> list[ClusterNode]:
    """Returns the living nodes: the driver's first, the others by address."""
    here = ray.get_runtime_context().get_node_id()
    nodes = [_read_node(found) for found in ray.nodes() if found["Alive"]]
    return sorted(nodes, key=lambda node: (node.name != here, node.address, node.name))


def _read_node(found: dict[str, object]) -> ClusterNode:
    name, resources, labels = str(found["NodeID"]), found["Resources"], found.get("Labels") or {}
    assert isinstance(resources, dict) and isinstance(labels, dict), found
    room = NodeRoom(
        name,
        int(resources.get("CPU", 0)),
        int(resources.get("GPU", 0)),
        {key: value for key, value in labels.items() if key not in OWN_LABELS},
    )
    return ClusterNode(name, str(found["NodeManagerAddress"]), str(found["NodeManagerHostname"]), room)
