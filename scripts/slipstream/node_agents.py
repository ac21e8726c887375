"""The driver's hands on each node that holds a role: they find free ports, bring keys, look at
checkpoints and logs, and clean up.

    driver ── calls ──▶ NodeAgent (an actor, on each other node) ── pipe ──▶ slipstream.sweeper

On its own node the driver calls the same methods directly. An agent takes no processor from Ray. When the
driver dies Ray kills the agents and the roles, and the sweeper of each node removes what they have left in
shared memory.
"""

import contextlib
import errno
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from buffers.files import replace_file
from buffers.timeline import FOLDER as TIMELINES
from configs.disk import DiskFull
from learners import checkpoint
from slipstream.cluster_nodes import ClusterNode
from slipstream.ray_waits import wait_for_results
from slipstream.role_failures import RoleFailed, explain_lost_actor
from slipstream.role_logs import read_log_end
from slipstream.roles import end_with_driver
from slipstream.stop_signals import StopSignals
from slipstream.sweeper import start_sweeper
from sync.folders import SHARED_MEMORY, sweep_folders

P = ParamSpec("P")
T = TypeVar("T")
STARTED_S = 60.0
"""Seconds that an agent's process may take to answer for the first time."""
ANSWERED_S = 20.0
"""Seconds that an answer may take afterwards: a slow file system is looked at."""
READ_S = 5.0
"""Seconds that the end of a log may take to be read."""
LISTENING_S = 2.0
"""Seconds that a process may take to end when Ray has told it to, and a node to say whether it has."""
LOOK_S = 0.1
"""Seconds after which processes that are to end are looked at again."""


class NodeUnfit(RoleFailed):
    """A node does not answer, or has other code: no role can be there."""

    def __init__(self, node: str, why: str) -> None:
        """`node` is Ray's id."""
        super().__init__(why)
        self.node = node


class NodeAgent:
    """Does on its node what the driver cannot do from afar."""

    def __init__(self, *, sweeps: bool = True, is_actor: bool = False) -> None:
        """`sweeps`: a process of its own cleans up once this one has ended. `is_actor`: this process is a
        worker of Ray's, and ends with its node's raylet."""
        self._sweeper = start_sweeper() if sweeps else None
        self._raylet_pid = int(os.environ["RAY_RAYLET_PID"]) if is_actor else os.getpid()
        if is_actor:
            end_with_driver(None, psutil.Process(self._raylet_pid), own_cluster=False)
        self._kept: dict[tuple[str, str], socket.socket] = {}
        """Sockets that keep ports, by their host and what listens there."""

    def keep_port(self, host: str, ports: range | None, what: str, anew: bool = False) -> int:
        """Returns a port that is free, of `ports` if that is not None. Raises ValueError.

        It is kept for `what` as long as this agent lives, or until another one is asked for (`anew`): nobody
        else gets it before its server listens there, nor between two lives of the server.
        """
        before = self._kept.get((host, what))
        if before is None or anew:
            own = {kept.getsockname()[1] for kept in self._kept.values()}
            self._kept[host, what] = _bind_free_port(host, ports, own)
            if before is not None:
                before.close()
        return int(self._kept[host, what].getsockname()[1])

    def bring_keys(self, folder: Path, files: Mapping[str, bytes]) -> str:
        """Writes key files [relative path -> bytes] that only their owner can read; returns the folder.

        Keys that were let in and are not among the files are let in no more.
        """
        folder.mkdir(parents=True, exist_ok=True)
        os.chmod(folder, stat.S_IRWXU)
        for path in folder.glob("allowed/*/*.key"):
            if str(path.relative_to(folder)) not in files:
                path.unlink(missing_ok=True)
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.read_bytes() == text:
                os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
                continue
            before = os.umask(0o077)
            try:
                replace_file(path, text)
            finally:
                os.umask(before)
        return str(folder)

    def digest_code(self) -> str:
        """Returns a digest of this project's code, as the node imports it."""
        from slipstream.node_facts import digest_code  # a run on one host needs none of it

        return digest_code()

    def find_newest_step(self, checkpoints: Path) -> int | None:
        """Returns the step of the newest checkpoint in the folder, as this node sees it."""
        newest = checkpoint.find_latest(checkpoints)
        return None if newest is None else newest.manifest.step

    def read_log_end(self, name: str, logs: Path) -> str:
        return read_log_end(name, logs)

    def read_timelines(self, run: Path, mark: str | None = None) -> dict[str, bytes]:
        """Returns the timelines that roles have written here, by name of the file; none where the folder is
        the driver's own, on a file system that nodes share: the driver's has a file of the name `mark`."""
        folder = run / TIMELINES
        if mark is not None and (folder / mark).exists():
            return {}
        return {path.name: path.read_bytes() for path in folder.glob("*.json")}

    def is_alive(self, pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def terminate_process(self, pid: int) -> None:
        """Sends SIGTERM to a process, if it still is alive."""
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).terminate()

    def has_raylet(self) -> bool:
        """True as long as Ray lives on the node: Ray itself notices its end after some seconds."""
        return self.is_alive(self._raylet_pid)

    def kill_process(self, pid: int) -> bool:
        """Kills a process; returns whether it still was alive."""
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()
        return self.is_alive(pid)

    def sweep(self) -> None:
        """Removes what roles that have ended have left in shared memory."""
        sweep_folders(SHARED_MEMORY)


def _bind_free_port(host: str, ports: range | None, own: Collection[int]) -> socket.socket:
    """Returns a socket that is bound to a free port and does not listen: a server may listen beside it
    (`buffer_keeper.reserve_port`). `own`: ports that are kept already. Raises ValueError."""
    for port in [0] if ports is None else ports:
        if (found := _bind(host, port)) is not None:
            return found
    # The next best: connections of an ended server still fade away there, and hinder no server.
    fading = set() if ports is None else _list_fading_ports() - set(own)
    for port in sorted(fading.intersection(ports or ())):
        if (found := _bind(host, port, beside=True)) is not None:
            return found
    assert ports is not None, "the system has found a port otherwise"
    raise ValueError(
        f"cluster.ports must have a free port on {socket.gethostname()} for each role that listens there, "
        f"got {ports[0]}-{ports[-1]}, which are taken"
    )


def _bind(host: str, port: int, *, beside: bool = False) -> socket.socket | None:
    """Returns a socket at this port; None where it is taken. `beside`: other sockets may be bound to it."""
    bound = socket.socket()
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, beside)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise ValueError(
            f"cluster.address must name nodes by addresses that they have, got {host} for "
            f"{socket.gethostname()}: {error.strerror}"
        ) from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)
    return bound


def _list_fading_ports() -> set[int]:
    connections = psutil.net_connections("tcp4")
    return {one.laddr.port for one in connections if one.status == psutil.CONN_TIME_WAIT}


class NodeAgents:
    """The nodes of a command, by name, and what the driver asks of them."""

    def __init__(
        self, nodes: Sequence[ClusterNode], driver: str, signals: StopSignals, *, own_cluster: bool
    ) -> None:
        """As `add_nodes`. `driver` is the name of the driver's node, which needs no agent. `own_cluster`: the
        driver ends the cluster, and cleans up on its own node afterwards."""
        self._driver, self._signals = driver, signals
        self._here = NodeAgent(sweeps=not own_cluster)
        self._agents: dict[str, Any] = {}
        self.nodes: dict[str, ClusterNode] = {}
        self.add_nodes(nodes)

    def add_nodes(self, nodes: Sequence[ClusterNode]) -> None:
        """Starts an agent on each node but the driver's. Raises NodeUnfit where one does not come up, or has
        other code of this project: then none of them is taken. Raises Interrupted too."""
        self.nodes |= {node.name: node for node in nodes}
        others = [node.name for node in nodes if node.name != self._driver]
        for name in others:
            there = NodeAffinitySchedulingStrategy(name, soft=False)
            # Ray starts one that dies again, and asks it once more; it gives one up whose node is lost.
            agent = ray.remote(NodeAgent).options(
                num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=there
            )
            self._agents[name] = agent.remote(is_actor=True)
        try:
            for name in others:
                self._compare_code(name)
        except BaseException:
            for name in others:
                ray.kill(self._agents.pop(name))
                del self.nodes[name]
            raise

    def _compare_code(self, name: str) -> None:
        try:
            digest = self.ask(name, NodeAgent.digest_code, answered_s=STARTED_S)
        except RoleFailed as error:
            raise NodeUnfit(name, str(error)) from error
        if digest != self._here.digest_code():
            raise NodeUnfit(
                name,
                "the code of Slipstream must be the same on every node, got other code on "
                f"{self.nodes[name]} than on {self.nodes[self._driver]} (`scripts/check.sh "
                "cluster.address=auto` compares all that nodes have)",
            )

    def ask(
        self,
        node: str,
        method: Callable[Concatenate[NodeAgent, P], T],
        *arguments: Any,
        answered_s: float = ANSWERED_S,
    ) -> T:
        """Returns what a method of the node's agent returns. Raises what it raises, and RoleFailed where the
        node does not answer; Interrupted."""
        if node == self._driver:
            own: Callable[..., T] = method
            return own(self._here, *arguments)
        ref = getattr(self._agents[node], method.__name__).remote(*arguments)
        wait_for_results([ref], 1, answered_s, self._signals)
        return cast(T, self._read_answer(node, ref, answered_s))

    def ask_others(
        self, method: Callable[Concatenate[NodeAgent, P], T], *arguments: Any
    ) -> Iterator[tuple[str, T | RoleFailed]]:
        """Asks the agents of all nodes but the driver's at the same time. Yields each node's name, and what
        `ask` would return or raise. Raises Interrupted."""
        refs = {
            name: getattr(agent, method.__name__).remote(*arguments) for name, agent in self._agents.items()
        }
        wait_for_results(list(refs.values()), len(refs), ANSWERED_S, self._signals)
        for name in list(refs):
            try:
                yield name, cast(T, self._read_answer(name, refs.pop(name), ANSWERED_S))
            except RoleFailed as error:
                yield name, error

    def _read_answer(self, node: str, ref: Any, waited_s: float) -> Any:
        """Returns the result of an agent's method, which had `waited_s` for it. Raises as `ask`."""
        if not wait_for_results([ref], 1, 0.0, self._signals):
            raise RoleFailed(f"{self.nodes[node]} has not answered within {waited_s:g} s")
        try:
            return ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ValueError):
                raise error.cause from None
            what = f": {error.cause}" if isinstance(error.cause, OSError) else f" has failed:\n{error}"
            raise RoleFailed(f"{self.nodes[node]}{what}") from None
        except ray.exceptions.RayError as error:
            raise RoleFailed(f"{self.nodes[node]} does not answer: {explain_lost_actor(error)}") from None

    def bring_timelines(self, run: Path) -> list[str]:
        """Brings the timelines of roles on other nodes into the run's folder, as
        `timeline/<host>/<role>.json`: those of nodes that do not share that folder. Returns a line about each
        node whose timelines are missing. Raises Interrupted."""
        missing = []
        mark = run / TIMELINES / f".seen_{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):  # then all nodes count as others
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        try:
            for name, files in self.ask_others(NodeAgent.read_timelines, run, mark.name):
                node = self.nodes[name]
                try:
                    if isinstance(files, RoleFailed):
                        raise files
                    folder = mark.with_name(f"{node.hostname}-{node.address}")
                    for file, data in files.items():
                        folder.mkdir(parents=True, exist_ok=True)
                        replace_file(folder / file, data, sync=False)
                except (RoleFailed, DiskFull, OSError) as error:
                    missing.append(f"the timeline lacks the roles on {node}: {error}")
        finally:
            with contextlib.suppress(OSError):
                mark.unlink()
        return missing

    def wait_until_gone(self, processes: Sequence[tuple[str, int]], limit_s: float) -> None:
        """Waits for processes [node and number] that are to end, up to `limit_s`, and kills those that do not
        listen. Raises Interrupted."""
        alive, began = list(processes), time.monotonic()
        while alive and (waited_s := time.monotonic() - began) < limit_s:
            time.sleep(LOOK_S)
            look = NodeAgent.kill_process if waited_s > LISTENING_S else NodeAgent.is_alive
            left, silent = [], set[str]()
            for node, pid in alive:
                try:
                    if node in silent or self.ask(node, look, pid, answered_s=LISTENING_S):
                        left.append((node, pid))
                except RoleFailed:  # those of other nodes do not wait for it
                    silent.add(node)
                    left.append((node, pid))
            alive = left

    def sweep(self) -> None:
        """Cleans up on all other nodes, as far as they answer."""
        refs = [agent.sweep.remote() for agent in self._agents.values()]
        wait_for_results(refs, len(refs), ANSWERED_S, self._signals)
