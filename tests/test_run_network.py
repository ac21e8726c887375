"""Roles on several nodes: sockets are where other nodes reach them, behind keys; ranks out of reach are
lost."""

import os
import random
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
import zmq
from runs import SIMULATED
from zmq import auth

from buffers.keys import make_keys, start_authenticator
from buffers.run_status import RoleState
from configs.load import load_config
from slipstream import node_agents, preparation, run_network, supervisor
from slipstream.cluster_nodes import ClusterNode
from slipstream.node_agents import NodeAgent, NodeAgents
from slipstream.role_division import NodeRoom, RoleDivision, RolePlace
from slipstream.role_failures import RoleFailed
from slipstream.run_network import KEYS, RunNetwork
from slipstream.stop_signals import StopSignals
from slipstream.supervisor import LearnerRanks, RankProcess

HERE, THERE = "127.0.0.2", "127.0.0.3"
"""Addresses of two nodes, which these tests take for addresses of a network: they open nothing to others."""


class TwoNodes:
    """The places of a learner and a generator, on the driver's node or another."""

    def __init__(self, learner: str = "here", generator: str = "here") -> None:
        self.driver_node = "here"
        self.division = RoleDivision((RolePlace(learner),), (RolePlace(generator),))
        nodes = [("here", HERE), ("there", THERE)]
        self.nodes = {
            name: ClusterNode(name, address, f"host-{name}", NodeRoom(name, 4)) for name, address in nodes
        }
        self.spans_nodes = "there" in (learner, generator)
        self.agents = self
        self.agent = NodeAgent(sweeps=False)
        self.asked: list[tuple[str, str]] = []
        self.lost: list[str] = []

    def find_lost_nodes(self) -> list[ClusterNode]:
        return [self.nodes[name] for name in self.lost]

    def find_node(self, name: str) -> ClusterNode:
        if name == "buffer":
            return self.nodes["here"]
        return self.nodes[dict(zip(self.division.names, self.division.places, strict=True))[name].node]

    def is_on_driver_node(self, name: str) -> bool:
        return self.find_node(name).name == "here"

    def ask(self, node: str, method: Any, *arguments: Any, answered_s: float = 0.0) -> Any:
        self.asked.append((node, method.__name__))
        return method(self.agent, *arguments)


@pytest.fixture(autouse=True)
def _treat_two_nodes_as_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        run_network, "is_beyond_loopback", lambda address: HERE in address or THERE in address
    )


def make_network(folder: Path, places: TwoNodes, *overrides: str) -> RunNetwork:
    config = load_config(list(overrides))
    given: Any = places
    return RunNetwork(config, folder, given)


def test_sockets_are_at_their_own_nodes_within_the_ports_and_behind_new_keys(tmp_path: Path) -> None:
    places = TwoNodes(learner="there")
    with socket.socket() as taken:
        taken.bind((HERE, 7990))
        network = make_network(tmp_path, places, "cluster.ports=7990-7999", f"run.outputs={tmp_path}")
    buffer = network.config.buffer
    assert buffer.address == f"tcp://{HERE}:7991" and buffer.keys == str(tmp_path / KEYS)
    placed, meeting = network.place_learner(network.config)
    assert placed.sync.address == f"tcp://{THERE}:7990" and meeting.startswith("tcp://127.0.0.1:")
    assert ("there", "keep_port") in places.asked
    assert network.reach_buffer("tcp://0.0.0.0:7991") == f"tcp://{HERE}:7991"
    for path in (tmp_path / KEYS).rglob("*_secret"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / KEYS).stat().st_mode) == 0o700


def test_other_nodes_get_the_keys_of_their_roles_and_those_of_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_keys(tmp_path / "own", ["generator", "learner", "operator", "watcher", "generator:machine7"])
    places = TwoNodes(generator="there")
    monkeypatch.chdir(tmp_path)
    network = make_network(tmp_path / "run", places, "buffer.keys=own")
    monkeypatch.chdir("/")  # a role's process works where the node's Ray was started
    assert network.config.buffer.keys == str(tmp_path / "own")
    assert network.keys.find_folder("learner-0") == str(tmp_path / "own")
    (tmp_path / "run" / KEYS).mkdir(parents=True, mode=0o755)
    stale = tmp_path / "run" / KEYS / "generator.key_secret"
    stale.write_text("of another run")
    os.chmod(stale, 0o644)
    found = network.keys.find_folder("generator-0")
    assert found == str(tmp_path / "run" / KEYS)
    names = {path.name for path in Path(found).iterdir()}
    assert names == {
        "allowed", "generator.key", "generator.key_secret", "learner.key", "learner.key_secret",
        "server.key", "server.key_secret",
    }  # fmt: skip
    assert stale.read_bytes() == (tmp_path / "own" / "generator.key_secret").read_bytes()
    assert stat.S_IMODE(stale.stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(found).stat().st_mode) == 0o700
    revoked = Path(found) / "allowed/generator/machine7.key"
    assert revoked.exists(), "a relay lets in whom the buffer does"
    (tmp_path / "own/allowed/generator/machine7.key").unlink()
    again = make_network(tmp_path / "run", places, f"buffer.keys={tmp_path / 'own'}")
    assert again.keys.find_folder("generator-0") == found and not revoked.exists(), "and no one else"
    places.asked.clear()
    assert network.keys.find_folder("generator-0") == found and not places.asked, "once a node"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        start_authenticator(server, Path(found)).close()
    assert auth.load_certificate(Path(found) / "server.key_secret")[1] is not None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["buffer.address=ipc:///tmp/x"],
            r"^buffer.address must be left alone, .* generator-0 on host-there",
        ),
        (["cluster.ports=7970-7973"], r"^cluster.ports must have a free port on .* got 7970-7973, which are"),
        (
            ["sync.address=tcp://127.0.0.1:7979"],
            r"^sync.address must be left alone, or be an address of host-here .* with generator-0 on host-th",
        ),
    ],
)
def test_an_address_that_other_nodes_do_not_reach_and_ports_that_are_taken_are_refused(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    taken = [socket.socket() for _ in range(4)]
    try:
        for number, one in enumerate(taken):
            one.bind((HERE, 7970 + number))
        with pytest.raises(ValueError, match=message):
            make_network(tmp_path, TwoNodes(generator="there"), *overrides)
    finally:
        for one in taken:
            one.close()


def test_all_lives_of_a_learner_find_ports_in_the_smallest_range_and_no_other_run_takes_them(
    tmp_path: Path,
) -> None:
    places, others = TwoNodes(generator="there"), TwoNodes(generator="there")
    places.division = RoleDivision((RolePlace("here"), RolePlace("there")), (RolePlace("there"),))
    # Not what this test has used a moment ago: pytest seeds the other generator of random numbers.
    first = random.SystemRandom().randrange(10_000, 30_000)
    ports = [f"cluster.ports={first}-{first + 3}", f"run.outputs={tmp_path}"]
    network = make_network(tmp_path, places, *ports)
    assert network.config.buffer.address == f"tcp://{HERE}:{first}"
    placed, meeting = network.place_learner(network.config)
    # The other run comes before anything listens at the ports of the first.
    with pytest.raises(ValueError, match=r"^cluster.ports must have a free port on "):
        other = make_network(tmp_path / "other", others, *ports)
        assert other.config.buffer.address == f"tcp://{HERE}:{first + 3}"
        other.place_learner(other.config)
    for kept in others.agent._kept.values():
        kept.close()
    seen = [meeting]
    for _ in range(3):
        # A server listens where its port is kept; its death leaves connections that fade away.
        with zmq.Context() as context, context.socket(zmq.ROUTER) as weights:
            weights.bind(placed.sync.address)
        with socket.create_server((HERE, int(meeting.rpartition(":")[2]))) as listener:
            client = socket.create_connection(listener.getsockname())
            server, _ = listener.accept()
            server.close()
            assert client.recv(1) == b""
            client.close()
        placed, meeting = network.place_learner(network.config)
        assert placed.sync.address == f"tcp://{HERE}:{first + 1}", "the same in all lives"
        seen.append(meeting)
    assert seen == [f"tcp://{HERE}:{first + number}" for number in (2, 3, 2, 3)]


def test_folders_are_where_the_command_was_given_on_nodes_whose_roles_work_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = ["sync.transport=disk", "sync.folder=weights"]
    config, _, _ = preparation.prepare_run(load_config([*SIMULATED, *folders, "run.name=run"]))
    placed = preparation._place_folders(load_config(["algo=ppo", "algo.critic.path=critic"]))
    assert config.sync.folder == f"{tmp_path}/weights" and placed.algo.critic.path == f"{tmp_path}/critic"


def test_on_one_node_nothing_changes(tmp_path: Path) -> None:
    config, places = load_config([]), TwoNodes()
    network = make_network(tmp_path, places)
    placed, meeting = network.place_learner(network.config)
    assert network.config == placed == config and meeting.startswith("tcp://127.0.0.1:")
    assert network.keys.find_folder("generator-0") is None and list(tmp_path.iterdir()) == []


def test_on_one_node_that_others_reach_all_lives_of_the_learner_serve_at_one_port(tmp_path: Path) -> None:
    network = make_network(tmp_path, TwoNodes(), f"buffer.address=tcp://{HERE}:7980", "sync.transport=tcp")
    addresses = set[str | None]()
    for _ in range(2):
        placed, _ = network.place_learner(network.config)
        addresses.add(placed.weights_address)
        with zmq.Context() as context, context.socket(zmq.ROUTER) as weights:
            weights.bind(placed.weights_address or "")
    (address,) = addresses
    assert address is not None and address.startswith(f"tcp://{HERE}:") and not address.endswith(":0")


# ---- ranks out of reach


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(supervisor, "time", clock)
    monkeypatch.setattr(supervisor, "is_ready", lambda ref: False)
    return clock


def make_ranks(places: TwoNodes, clock: Clock) -> LearnerRanks:
    given: Any = places
    ranks = LearnerRanks(load_config([]), Path("run"), "nowhere", given, given, StopSignals())
    ranks._ranks = [RankProcess("learner-0", None, None, None, is_near=False)]
    ranks._started_at, ranks.num_restarts = clock.now, 0
    return ranks


def hear(ranks: LearnerRanks, last_heard_s: float) -> None:
    state = RoleState(last_heard_s=last_heard_s, activity="training", activity_s=1.0)
    ranks.note_heartbeats({"learner-0": state})


def test_a_far_rank_is_lost_once_it_was_silent_for_long_in_this_life(clock: Clock) -> None:
    places = TwoNodes(learner="there")
    ranks = make_ranks(places, clock)
    for _ in range(100):  # the heartbeats of its last life; this one still imports
        clock.now += 1
        hear(ranks, last_heard_s=50 + clock.now - 1000)
        assert ranks.find_lost_rank() is None
    hear(ranks, last_heard_s=0.5)
    for silent_s in range(1, 31):
        clock.now += 1
        hear(ranks, last_heard_s=silent_s)
        assert ranks.find_lost_rank() is None
    clock.now += 1
    hear(ranks, last_heard_s=31.6)
    assert ranks.find_lost_rank() is None, "the buffer may have stood still itself"
    for silent_s in (34.6, 37.6):
        assert ranks.find_lost_rank() is None
        clock.now += 3
        hear(ranks, last_heard_s=silent_s)
    lost = ranks.find_lost_rank()
    assert lost is not None and str(lost) == "learner-0 has not been heard of for 38 s"


def test_a_far_rank_that_is_heard_again_is_not_lost(clock: Clock) -> None:
    ranks = make_ranks(TwoNodes(learner="there"), clock)
    clock.now += 10
    hear(ranks, last_heard_s=0.1)
    clock.now += 40
    hear(ranks, last_heard_s=40.0)
    clock.now += 1
    hear(ranks, last_heard_s=0.2)
    clock.now += 30
    assert ranks.find_lost_rank() is None


def test_a_far_rank_is_not_lost_while_the_buffer_says_nothing(clock: Clock) -> None:
    """A buffer that stood still and answers once has not read the heartbeats yet that have come meanwhile."""
    ranks = make_ranks(TwoNodes(learner="there"), clock)
    clock.now += 10
    hear(ranks, last_heard_s=0.1)
    clock.now += 40
    hear(ranks, last_heard_s=40.0)
    clock.now += 20
    assert ranks.find_lost_rank() is None, "nothing was heard of the buffer since"
    hear(ranks, last_heard_s=60.0)
    assert ranks.find_lost_rank() is None, "it has stood still again"
    for silent_s in (63.0, 66.0):
        clock.now += 3
        hear(ranks, last_heard_s=silent_s)
    assert ranks.find_lost_rank() is not None
    ranks.note_heartbeats({})  # a buffer that was started again has not heard of it yet
    assert ranks.find_lost_rank() is None


def test_a_rank_whose_node_is_lost_before_it_has_a_process_is_lost(clock: Clock) -> None:
    """Ray lets it wait for the node for ever, and nobody has heard of it."""
    places = TwoNodes(learner="there")
    ranks = make_ranks(places, clock)
    assert ranks.find_lost_rank() is None
    places.lost = ["there"]
    lost = ranks.find_lost_rank()
    assert lost is not None and str(lost) == "learner-0 has died"
    assert ranks._is_gone(ranks._ranks[0]), "nobody waits for it"


def test_checkpoints_that_are_gone_with_their_host_end_the_run_in_a_sentence(
    clock: Clock, tmp_path: Path
) -> None:
    places = TwoNodes(learner="there")
    places.replace_lost_ranks = lambda lost: []  # type: ignore[attr-defined]
    ranks = make_ranks(places, clock)
    ranks._folder = tmp_path
    assert ranks.find_newest_step(0) is None
    with pytest.raises(
        RoleFailed, match=r"^the learner's checkpoints \(of step 8 .* on host-there .* got none"
    ):
        ranks.find_newest_step(8)


class OneSilentNode(NodeAgents):
    """Agents of two nodes, of which one does not answer; on the other lives a process that listens to
    nobody."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int]] = []

    def ask(self, node: str, method: Any, *arguments: Any, answered_s: float = 0.0) -> Any:
        self.asked.append((node, method.__name__, *arguments))
        if node == "silent":
            raise RoleFailed("it has not answered")
        return method is NodeAgent.is_alive


def test_a_node_that_does_not_answer_keeps_no_process_of_another_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_agents, "LISTENING_S", 0.0)
    agents = OneSilentNode()
    agents.wait_until_gone([("silent", 1), ("silent", 2), ("near", 3)], limit_s=0.2)
    assert ("near", "kill_process", 3) in agents.asked
    assert ("silent", "kill_process", 2) not in agents.asked, "one question in each round"
