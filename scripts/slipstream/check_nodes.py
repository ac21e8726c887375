"""Checks all nodes of a Ray cluster at once, and the links between them.

    scripts/check.sh cluster.address=auto                    everything that each node allows
    scripts/check.sh cluster.address=auto limits disk        only the checks whose names begin so

It compares the nodes' code, packages and clocks, measures the links, and runs the checks on every node. A
node that does not answer is named, and the others go on. The exit status is 1 when something is wrong, 130
after Ctrl-C. No process stays behind.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from configs.load import load_config
from slipstream.check import MAX_WIDTH, CheckOutcome, CheckResult, run_check
from slipstream.check_machine import Check
from slipstream.checks import CHECKS
from slipstream.cluster import run_cluster
from slipstream.cluster_check import check_cluster
from slipstream.links import COOKIE_BYTES, LinkServer, MeasuredLink, measure_link, pair_up, ping_server
from slipstream.node_facts import NodeFacts, collect_facts, find_late_clocks, find_problems
from slipstream.node_tables import escape_markup, print_links, print_node
from slipstream.stop_signals import KILLED, Interrupted, StopSignals

ANSWERED_S = 60.0
"""Seconds that a node may take for anything, beside the deadline of what it does."""
MAX_ROUNDS = 8
"""Most links of a node that are measured: each takes one second, and seven where it is slow."""
NUM_CONNECTIONS = 32
"""Most nodes that are pinged at once."""
SLICE_S = 0.2
"""Seconds of a call of Ray, after which Ctrl-C acts."""


class NodeProbe:
    """Looks at its node. An actor of Ray on each."""

    def collect_facts(self, address: str, ports: Sequence[int]) -> NodeFacts:
        return collect_facts(address, ports)

    def run_check(self, name: str, catalog: str) -> CheckResult:
        (found,) = [check for check in importlib.import_module(catalog).CHECKS if check.name == name]
        return run_check(found, catalog)

    def serve_links(self, address: str, cookie: bytes, ports: Sequence[int]) -> tuple[str, int]:
        """Listens for other nodes until the process ends; returns where."""
        self._server = LinkServer(address, cookie, ports or [0])
        return self._server.address

    def ping_nodes(
        self, servers: Sequence[tuple[str, int]], cookie: bytes
    ) -> list[tuple[float, float] | str]:
        """Returns the latency and the clock offset of each, or why it cannot be reached."""

        def ping(server: tuple[str, int]) -> tuple[float, float] | str:
            try:
                return ping_server(server, cookie, time.time)
            except OSError as error:
                return str(error)

        with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
            return list(pool.map(ping, servers))

    def measure_link(self, server: tuple[str, int], cookie: bytes) -> MeasuredLink | str:
        """Returns why it cannot be measured where it cannot."""
        try:
            return measure_link(server, cookie)
        except OSError as error:
            return str(error)


@dataclass(slots=True)
class CheckedNode:
    """A node as the driver knows it."""

    name: str
    address: str
    probe: Any
    facts: NodeFacts | None = None
    server: tuple[str, int] | None = None
    """Where it listens for other nodes."""
    is_silent: bool = False
    """True once it has missed a deadline, or has failed: it is asked no more."""
    results: list[CheckResult] = field(default_factory=list)


class ClusterCheck:
    """One look at all nodes of the cluster that this process has joined."""

    def __init__(
        self, ports: Sequence[int], signals: StopSignals, say: Callable[[str], None],
        answered_s: float = ANSWERED_S,
    ) -> None:  # fmt: skip
        """`say` tells what is looked at now."""
        self._ports, self._signals, self._say, self._answered_s = ports, signals, say, answered_s
        self.nodes = start_probes()
        self.links: dict[tuple[str, str], MeasuredLink] = {}
        """By the names of the host that has measured it and of the other."""
        self.problems: list[str] = []

    def compare_nodes(self) -> None:
        """Looks at each node, and for rules that they break together."""
        asked = {node.name: node.probe.collect_facts.remote(node.address, self._ports) for node in self.nodes}
        for node, facts in self._collect_answers("code, packages and hardware", asked):
            node.facts = facts
        self.problems += find_problems({node.name: node.facts for node in self.nodes if node.facts})

    def measure_links(self) -> None:
        """Compares the clocks with the first node's, then measures links in rounds: no node has two at a
        time."""
        cookie = os.urandom(COOKIE_BYTES)
        asked = {
            node.name: node.probe.serve_links.remote(node.address, cookie, self._ports)
            for node in self._list_answering()
        }
        for node, server in self._collect_answers("addresses", asked):
            node.server = server
        serving = [node for node in self._list_answering() if node.server]
        if len(serving) < 2:
            return
        first, *others = serving
        pings = {first.name: first.probe.ping_nodes.remote([node.server for node in others], cookie)}
        for _, found in self._collect_answers("clocks", pings):
            pinged = dict(zip([node.name for node in others], found, strict=True))
            self._name_unreached(
                {other: one for other, one in pinged.items() if isinstance(one, str)}, first.name
            )
            self.problems += find_late_clocks(
                {name: one[1] for name, one in pinged.items() if not isinstance(one, str)}
            )
        by_name = {node.name: node for node in serving}
        rounds = pair_up(list(by_name))[:MAX_ROUNDS]
        for number, pairs in enumerate(rounds, 1):
            asked = {
                one: by_name[one].probe.measure_link.remote(by_name[other].server, cookie)
                for one, other in pairs
                if not (by_name[one].is_silent or by_name[other].is_silent)
            }
            measured = self._collect_answers(f"links, {number} of {len(rounds)}", asked)
            self._take_links(measured, dict(pairs))

    def _take_links(self, measured: Sequence[tuple[CheckedNode, Any]], peers: Mapping[str, str]) -> None:
        for node, link in measured:
            other = peers[node.name]
            if isinstance(link, str):
                self._name_unreached({other: link}, node.name)
            else:
                self.links[node.name, other] = link

    def _name_unreached(self, reasons: Mapping[str, str], name: str) -> None:
        """Notes nodes that the node of this name cannot reach, once each, and why."""
        for other, reason in reasons.items():
            said = f"{other} must be reached from {name}, got: "
            if not any(problem.startswith(said) for problem in self.problems):
                self.problems.append(f"{said}{reason}")

    def run_checks(self, chosen: Sequence[Check], catalog: str = "slipstream.checks") -> None:
        for number, check in enumerate(chosen, 1):
            asked = {
                node.name: node.probe.run_check.remote(check.name, catalog) for node in self._list_answering()
            }
            what = f"{check.name} ({number} of {len(chosen)} checks)"
            for node, result in self._collect_answers(what, asked, check.deadline_s):
                node.results.append(result)
                if result.outcome is CheckOutcome.failed:
                    self.problems.append(f"{check.name} on {node.name}: {result.words}")

    def _list_answering(self) -> list[CheckedNode]:
        return [node for node in self.nodes if not node.is_silent]

    def _collect_answers(
        self, what: str, asked: Mapping[str, Any], deadline_s: float = 0.0
    ) -> list[tuple[CheckedNode, Any]]:
        """Waits for the answers of nodes, by name; those that do not answer in time become problems. Raises
        Interrupted."""
        self._say(f"{what}: {len(asked)} nodes")
        limit_s = deadline_s + self._answered_s
        deadline = time.monotonic() + limit_s
        waiting = list(asked.values())
        while waiting and time.monotonic() < deadline:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=SLICE_S)
            self._signals.raise_if_received()
        answers = []
        for node in [node for node in self.nodes if node.name in asked]:
            if asked[node.name] in waiting:
                node.is_silent = True
                self.problems.append(f"{node.name} must answer within {limit_s:g} s, got nothing ({what})")
                continue
            try:
                answers.append((node, ray.get(asked[node.name])))
            except ray.exceptions.RayError as error:
                node.is_silent = True
                self.problems.append(f"{node.name} must answer, got {explain_failure(error)} ({what})")
        return answers


def start_probes() -> list[CheckedNode]:
    """Starts a probe on each node that lives, on this host's first."""
    here = ray.get_runtime_context().get_node_id()
    found = sorted(
        (node for node in ray.nodes() if node["Alive"]),
        key=lambda node: (node["NodeID"] != here, node["NodeManagerHostname"], node["NodeManagerAddress"]),
    )
    names = [node["NodeManagerHostname"] for node in found]
    return [
        CheckedNode(
            name if names.count(name) == 1 else f"{name} ({node['NodeManagerAddress']})",
            node["NodeManagerAddress"],
            ray.remote(num_cpus=0)(NodeProbe)
            .options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
                # Ray hides all GPUs from an actor that has asked for none.
                runtime_env={"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}},
            )
            .remote(),
        )
        for name, node in zip(names, found, strict=True)
    ]


def explain_failure(error: Exception) -> str:
    """Returns the reason of an error of Ray in one line."""
    text = str(error)
    if "No module named 'slipstream'" in text:
        return "a Python without this project: install it on every node (`. scripts/env.sh && prepare`)"
    return " ".join((text.strip().splitlines() or [type(error).__name__])[-1].split())


def check_cluster_nodes(
    overrides: Sequence[str], names: Sequence[str], signals: StopSignals, console: Console
) -> int:
    """Prints what is found; returns the exit status. Raises ValueError for what cannot be checked."""
    config = load_config(overrides)
    if config.cluster.address is None:
        raise ValueError("cluster.address must be said to check a cluster (auto or HOST:PORT), got none")
    chosen = [check for check in CHECKS if not names or check.name.startswith(tuple(names))]
    if not chosen:
        known = ", ".join(f"'{check.name}'" for check in CHECKS)
        raise ValueError(f"a check's name must begin with one of the names, got {' '.join(names)}: {known}")
    check_cluster(config.cluster.address, signals)
    progress = Console(stderr=True, highlight=False)
    with run_cluster(config):
        look = ClusterCheck(
            config.cluster.port_range or [], signals, lambda line: progress.print(line, markup=False)
        )
        stopped = False
        try:
            look.compare_nodes()
            look.measure_links()
            look.run_checks(chosen)
        except Interrupted:
            stopped = True
    for node in look.nodes:
        print_node(console, node.name, node.facts, node.results)
    print_links(console, [node.name for node in look.nodes], look.links)
    for problem in look.problems:
        console.print(f"[bold red]wrong:[/] {escape_markup(problem)}", soft_wrap=True)
    if stopped:
        console.print("stopped")
        return KILLED
    console.print(f"{len(look.nodes)} nodes, {len(chosen)} checks on each, {len(look.problems)} wrong")
    return int(bool(look.problems))


def main(arguments: Sequence[str]) -> int:
    if any(argument in ("-h", "--help") for argument in arguments):
        print(__doc__)
        return 0
    signals = StopSignals()
    signals.install_handlers()
    width = Console().width if sys.stdout.isatty() else MAX_WIDTH
    console = Console(width=min(width, MAX_WIDTH), highlight=False)
    try:
        return check_cluster_nodes(
            [argument for argument in arguments if "=" in argument],
            [argument for argument in arguments if "=" not in argument],
            signals,
            console,
        )
    except Interrupted:
        return KILLED
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        signals.ignore_further_signals()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
