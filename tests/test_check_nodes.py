"""`scripts/check.sh cluster.address=...`: all nodes of a cluster at once, over hosts of their own."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from runs import ROOT

from slipstream.check_nodes import CheckedNode, ClusterCheck
from slipstream.links import MeasuredLink
from slipstream.node_facts import NodeFacts, digest_code, find_late_clocks, find_problems
from slipstream.nursery import FOLDER
from slipstream_bench.network_hosts import HostProcess, NetworkHost, NetworkHosts, find_obstacle

needs_hosts = pytest.mark.skipif(bool(find_obstacle()), reason=find_obstacle())
ALIKE = NodeFacts(
    words={},
    python="3.11.7",
    code_digest="a1",
    packages={"torch": "2.13.0"},
    address="10.0.0.1",
    gpus="none",
    busy_ports=[],
)
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "scripts", ROOT / "scripts/bench"))),
    "PYTHONUNBUFFERED": "1",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "ab" * 20,
    "RAY_ADDRESS": "10.77.0.1:6379",
}
ENVIRONMENT.pop(FOLDER, None)
FAST, SLOW = 40_000_000, 4_000_000
"""Bits a second of the links of the second host and of the third."""
SILENT = """
from configs.load import load_config
from slipstream.check_nodes import ClusterCheck
from slipstream.cluster import run_cluster
from slipstream.stop_signals import StopSignals
import os, time
with run_cluster(load_config(["cluster.address=auto"])):
    look = ClusterCheck([], StopSignals(), print)
    look.compare_nodes()
    print("frozen now?")
    while not os.path.exists("FLAG"):
        time.sleep(0.1)
    look._answered_s = 5.0
    look.measure_links()
    print("silent:", [node.name for node in look.nodes if node.is_silent], look.problems, len(look.links))
"""


# ---- rules


def test_nodes_that_are_alike_break_no_rule() -> None:
    assert find_problems({"a": ALIKE, "b": replace(ALIKE, address="10.0.0.2")}) == []
    assert find_problems({"a": replace(ALIKE, address="127.0.0.1")}) == [], "one node alone needs no other"


@pytest.mark.parametrize(
    ("change", "rule", "got"),
    [
        ({"python": "3.12.1"}, "Python must be the same on every node", "3.11.7 on a, c and 3.12.1 on b"),
        (
            {"code_digest": "b"},
            "the code of Slipstream must be the same on every node",
            "a1 on a, c and b on b",
        ),
        ({"packages": {"torch": "2"}}, "torch must be the same on every node", "2.13.0 on a, c and 2 on b"),
        ({"packages": {}}, "torch must be the same on every node", "2.13.0 on a, c and none on b"),
        (
            {"busy_ports": [7000, 7003]},
            "cluster.ports must be free on every node",
            "2 in use on b: 7000, 7003",
        ),
        ({"address": "127.0.0.1"}, "a node's address must be one that other hosts reach", "127.0.0.1 of b"),
    ],
)
def test_a_node_that_differs_is_named_with_rule_and_value(
    change: dict[str, object], rule: str, got: str
) -> None:
    changed = replace(ALIKE, **change)  # type: ignore[arg-type]
    (problem,) = find_problems({"a": ALIKE, "b": changed, "c": ALIKE})
    assert problem.startswith(rule) and problem.endswith(f", got {got}")


def test_many_packages_that_differ_are_counted() -> None:
    many = replace(ALIKE, packages={f"package-{number}": "1" for number in range(9)})
    problems = find_problems({"a": ALIKE, "b": many})
    assert len(problems) == 6 and problems[-1] == "5 more packages differ between nodes"


def test_a_clock_that_is_a_second_off_is_named() -> None:
    assert find_late_clocks({"a": 0.9, "b": -1.5}) == [
        "clocks must differ by less than 1 s between nodes, got -1.5 s on b"
    ]


def test_the_digest_of_the_code_follows_its_files_and_not_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "one" / "odd_part"
    monkeypatch.setattr("slipstream.node_facts.PARTS", ("odd_part",))
    digests = []
    for folder, text in (("one", "x = 1"), ("two", "x = 1"), ("two", "x = 2")):
        package = tmp_path / folder / "odd_part"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path / folder))
        digests.append(digest_code())
    assert digests[0] == digests[1] != digests[2]


class TwelveNodes(ClusterCheck):
    """A look at nodes of which the first cannot reach the second; others can."""

    def __init__(self) -> None:
        self._ports, self._say, self.links, self.problems = [], print, {}, []
        probes: Any = SimpleNamespace(
            serve_links=SimpleNamespace(remote=lambda *_: ("127.0.0.1", 1)),
            ping_nodes=SimpleNamespace(remote=lambda servers, _: ["no route"] + [(0.1, 0.0)] * 10),
            measure_link=SimpleNamespace(remote=lambda *_: MeasuredLink(0.1, 0.0, 1e9, 1e9)),
        )
        self.nodes = [CheckedNode(f"host-{number}", "127.0.0.1", probes) for number in range(12)]

    def _collect_answers(
        self, what: str, asked: Mapping[str, Any], deadline_s: float = 0.0
    ) -> list[tuple[CheckedNode, Any]]:
        return [(node, asked[node.name]) for node in self.nodes if node.name in asked]


def test_a_node_that_the_first_cannot_reach_is_named_although_their_link_is_not_measured() -> None:
    look = TwelveNodes()
    look.measure_links()
    assert ("host-0", "host-1") not in look.links and ("host-1", "host-0") not in look.links
    assert look.problems == ["host-1 must be reached from host-0, got: no route"]


# ---- over three hosts


class SmallCluster:
    """Three hosts with a node of Ray each; the links of the second and third have limits."""

    def __init__(self, hosts: NetworkHosts, folder: Path) -> None:
        self.hosts, self._folder = hosts, folder
        hosts.limit_link(hosts[1], FAST)
        hosts.limit_link(hosts[2], SLOW)
        ready = folder / "ready"
        lead = ["head", "--nodes=3", "--peer=10.77.0.2", "sh", "-c", f"touch {ready}; exec sleep 1000"]
        self.nodes = [
            self.start(host, "slipstream.ray_node", *arguments)[0]
            for host, arguments in zip(hosts, [lead, *[["join", "10.77.0.1:6379"]] * 2], strict=True)
        ]
        wait_until(ready.exists, "three nodes", self.read_output)

    def start(self, host: NetworkHost, module: str, *arguments: str) -> tuple[HostProcess, Path]:
        """Starts a program; returns the file of its output, too."""
        said = self._folder / f"{len(list(self._folder.iterdir()))}.txt"
        command = [sys.executable, "-P", "-m", module, *arguments]
        with open(said, "w") as output:
            return host.start_program(
                *command, environment=ENVIRONMENT, output=output, folder=self._folder
            ), said

    def read_output(self) -> str:
        return "".join(path.read_text() for path in sorted(self._folder.glob("*.txt")))

    def find_probes(self) -> list[psutil.Process]:
        found = []
        for process in [process for host in self.hosts for process in host.list_processes()]:
            try:
                found += [process] if "NodeProbe" in "".join(process.cmdline()) else []
            except psutil.NoSuchProcess:
                continue
        return found


def wait_until(holds: Callable[[], object], what: str, said: Callable[[], str]) -> None:
    deadline = time.monotonic() + 240
    while not holds():
        assert time.monotonic() < deadline, f"no {what}:\n{said()}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallCluster]:
    with NetworkHosts(3) as hosts:
        cluster = SmallCluster(hosts, tmp_path_factory.mktemp("cluster"))
        yield cluster
        # Told to stop as a scheduler does it: the signal goes to every process at once.
        for process in [process for host in hosts for process in host.list_processes()]:
            process.send_signal(signal.SIGTERM)
        assert [node.popen.wait(60) for node in cluster.nodes] == [143, 0, 0], cluster.read_output()
        wait_until(lambda: not any(host.list_processes() for host in hosts), "end", cluster.read_output)


def read_rate(cell: str) -> float:
    number, unit = cell.split(",")[0].split()
    return float(number) * {"kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9}[unit]


@needs_hosts
@pytest.mark.whole_run
def test_every_node_is_checked_and_the_rates_of_links_follow_their_limits(cluster: SmallCluster) -> None:
    names = ["limits", "disk"]
    check, output = cluster.start(cluster.hosts[0], "slipstream.check_nodes", "cluster.address=auto", *names)
    assert check.popen.wait(240) == 0, cluster.read_output()
    said = output.read_text()
    assert "3 nodes, 2 checks on each, 0 wrong" in said and said.count("pidfd") == 3
    rows = {
        cells[0]: cells[1:]
        for line in re.split(r"^Links *$", said, flags=re.M)[1].splitlines()
        if line.startswith("│") and (cells := [cell.strip() for cell in line.strip("│").split("│")])
    }
    rates = {
        (one, other): read_rate(cell)
        for one, cells in rows.items()
        for other, cell in zip(rows, cells, strict=True)
        if one != other
    }
    assert len(rates) == 6
    for pair, rate in rates.items():
        limit = SLOW if "host-3" in pair else FAST
        assert 0.3 * limit < rate < 1.3 * limit, (pair, rate, said)


@needs_hosts
@pytest.mark.whole_run
def test_ctrl_c_ends_a_check_and_leaves_no_process_on_any_node(cluster: SmallCluster) -> None:
    check, output = cluster.start(cluster.hosts[0], "slipstream.check_nodes", "cluster.address=auto")
    wait_until(lambda: "clocks" in output.read_text(), "look", cluster.read_output)
    assert len(cluster.find_probes()) == 3
    check.send_signal(signal.SIGINT)
    assert check.popen.wait(60) == 130
    wait_until(lambda: not cluster.find_probes(), "end of the probes", cluster.read_output)


@needs_hosts
@pytest.mark.whole_run
def test_a_node_that_does_not_answer_is_named_and_the_others_are_measured(
    cluster: SmallCluster, tmp_path: Path
) -> None:
    flag, output = tmp_path / "flag", tmp_path / "said"
    code = SILENT.replace("FLAG", str(flag))
    with open(output, "w") as file:
        look = cluster.hosts[0].start_program(
            sys.executable, "-c", code, environment=ENVIRONMENT, output=file, folder=ROOT
        )
    wait_until(lambda: "frozen now?" in output.read_text(), "first look", output.read_text)
    frozen = cluster.hosts[2].list_processes()
    for process in frozen:
        process.suspend()
    # The program that has sent a process to its host stops with it.
    frozen.append(psutil.Process(cluster.nodes[2].popen.pid))
    flag.touch()
    try:
        assert look.popen.wait(120) == 0, output.read_text()
    finally:
        for process in frozen:
            process.resume()
    said = output.read_text()
    assert "silent: ['host-3']" in said and "host-3 must answer within 5 s, got nothing (addresses)" in said
    assert said.splitlines()[-1].endswith(" 1"), "the link between the other two is measured"
