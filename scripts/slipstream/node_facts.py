"""Facts about a node of a cluster, and the rules that hold between the nodes of one."""

import importlib.util
import platform
import shutil
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import psutil
import xxhash

from configs.addresses import is_loopback
from slipstream.check import describe_machine
from slipstream.check_machine import GIB, ROOT

PARTS = ("algos", "buffers", "configs", "generators", "learners", "slipstream", "sync")
"""Packages of this project."""
CLOCK_OFFSET_S = 1.0
"""Seconds by which clocks may differ: the times of a run's records come from all its hosts."""
MAX_NAMED_PACKAGES = 5


@dataclass(frozen=True, slots=True)
class NodeFacts:
    words: dict[str, str]
    """Lines of a table: the name of a fact, and the fact."""
    python: str
    code_digest: str
    """Digest of this project's code, as the node imports it."""
    packages: dict[str, str]
    """Version of each installed package."""
    address: str
    gpus: str
    busy_ports: list[int]


def collect_facts(address: str, ports: Iterable[int] = ()) -> NodeFacts:
    """Looks at the host that runs this. `address` is its own in the cluster; `ports` should be free there."""
    words = describe_machine() | {
        "disk": f"{shutil.disk_usage(ROOT).free / GIB:.0f} GiB free at {ROOT}",
        "network": f"{address} ({describe_interface(address)})",
    }
    return NodeFacts(
        words, platform.python_version(), digest_code(),
        {one.name: one.version for one in distributions()}, address, words["GPUs"],
        [port for port in ports if not is_free(address, port)],
    )  # fmt: skip


def digest_code() -> str:
    """Returns a digest of the project's files, which does not depend on where they are."""
    digest = xxhash.xxh3_64()
    for part in PARTS:
        spec = importlib.util.find_spec(part)
        for place in map(Path, spec.submodule_search_locations or [] if spec else []):
            for path in sorted(one for one in place.rglob("*") if one.suffix in (".py", ".yaml")):
                digest.update(f"{part}/{path.relative_to(place)}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def describe_interface(address: str) -> str:
    for name, places in psutil.net_if_addrs().items():
        if any(place.address == address for place in places):
            state = psutil.net_if_stats()[name]
            speed = f"{state.speed} Mbit/s" if state.speed else "speed unknown"
            return f"{name}, {speed}, MTU {state.mtu}"
    return "no interface has this address"


def is_free(address: str, port: int) -> bool:
    try:
        socket.create_server((address, port)).close()
    except OSError:
        return False
    return True


# ---- rules


def find_problems(facts: Mapping[str, NodeFacts]) -> list[str]:
    """Returns a sentence for each rule that the nodes break together. The keys are the nodes' names."""
    problems = [
        *compare_nodes("Python", {name: one.python for name, one in facts.items()}),
        *compare_nodes("the code of Slipstream", {name: one.code_digest for name, one in facts.items()}),
        *compare_packages({name: one.packages for name, one in facts.items()}),
    ]
    for name, one in facts.items():
        if one.busy_ports:
            problems.append(
                f"cluster.ports must be free on every node, got {len(one.busy_ports)} in use on {name}: "
                f"{', '.join(map(str, one.busy_ports[:MAX_NAMED_PACKAGES]))}"
            )
        if len(facts) > 1 and is_loopback(one.address):
            problems.append(
                f"a node's address must be one that other hosts reach (`ray start --node-ip-address`), got "
                f"{one.address} of {name}"
            )
    return problems


def find_late_clocks(offsets: Mapping[str, float]) -> list[str]:
    return [
        f"clocks must differ by less than {CLOCK_OFFSET_S:g} s between nodes, got {offset:+.1f} s on {name}"
        for name, offset in offsets.items()
        if abs(offset) >= CLOCK_OFFSET_S
    ]


def compare_nodes(what: str, values: Mapping[str, str]) -> list[str]:
    """Returns the sentence that says who has which value, where not all have the same."""
    if len(set(values.values())) <= 1:
        return []
    return [f"{what} must be the same on every node, got {describe_holders(values)}"]


def compare_packages(packages: Mapping[str, Mapping[str, str]]) -> list[str]:
    everything = sorted({package for those in packages.values() for package in those})
    found = [
        problem
        for package in everything
        for problem in compare_nodes(
            package, {name: those.get(package, "none") for name, those in packages.items()}
        )
    ]
    more = len(found) - MAX_NAMED_PACKAGES
    return found[:MAX_NAMED_PACKAGES] + ([f"{more} more packages differ between nodes"] if more > 0 else [])


def describe_holders(values: Mapping[str, str]) -> str:
    """Returns each value with the names of those that have it, the most frequent first."""
    holders: dict[str, list[str]] = {}
    for name, value in values.items():
        holders.setdefault(value, []).append(name)
    ordered = sorted(holders.items(), key=lambda item: -len(item[1]))
    return " and ".join(f"{value} on {', '.join(names)}" for value, names in ordered)
