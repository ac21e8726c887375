"""`cluster`: the Ray cluster that runs the roles."""

import re
from dataclasses import dataclass

from configs.rules import Rule
from configs.setting import Section, setting

LEAST_PORTS = 4
"""Ports that one host may need: the buffer, weights, the ranks' meeting point, and one more for a life of the
learner that follows."""


def is_cluster_address(text: str) -> bool:
    return text == "auto" or re.fullmatch(r"[^\s:/]+:\d{1,5}", text) is not None


CLUSTER_ADDRESS = Rule("auto, or HOST:PORT (HOST: a name or an IPv4 address)", is_cluster_address)


def is_port_range(text: str) -> bool:
    if (found := re.fullmatch(r"(\d{4,5})-(\d{4,5})", text)) is None:
        return False
    first, last = int(found[1]), int(found[2])
    return first >= 1024 and last <= 65535 and last - first + 1 >= LEAST_PORTS


PORT_RANGE = Rule(f"FIRST-LAST, at least {LEAST_PORTS} ports from 1024 to 65535", is_port_range)


@dataclass(kw_only=True, slots=True)
class ClusterConfig(Section):
    """The Ray cluster that runs the roles."""

    address: str | None = setting(None, CLUSTER_ADDRESS)
    """Ray cluster to join. Null starts one inside this run and stops it with the run."""
    ports: str | None = setting(None, PORT_RANGE)
    """Ports, as FIRST-LAST, at which roles listen for other hosts, on each host: the buffer, the server of
    weights, relays and the meeting point of the ranks. Null: any free ones."""

    @property
    def port_range(self) -> range | None:
        if self.ports is None:
            return None
        first, _, last = self.ports.partition("-")
        return range(int(first), int(last) + 1)
