"""The learner as the driver sees it: ranks that start together and end together.

    start ──▶ they train ──▶ all end well
      ▲            │
      │            └──▶ one dies or fails: the others would wait for it in a collective, so all are killed
      └── the driver rewinds the buffer to the newest checkpoint, and generators go on meanwhile

The driver sees the processes of its own node. Of ranks on other nodes it hears by Ray, and by their
heartbeats to the buffer: a node that is out of reach is given up, and its ranks go on elsewhere.

A failure that the user or the code has caused would come again in another life, so it ends the run. So does a
loss after `learner.max_restarts` restarts.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from buffers.run_status import RoleState
from configs.schema import Config
from slipstream.answers import FirstAnswers
from slipstream.node_agents import NodeAgent
from slipstream.ray_waits import is_ready
from slipstream.role_failures import (
    RankFailure,
    RoleFailed,
    describe_death,
    explain_lost_actor,
    has_not_begun,
)
from slipstream.role_places import RolePlaces
from slipstream.run_network import RunNetwork, describe_learner
from slipstream.stop_signals import StopSignals

SETTLE_S = 1.0
"""Seconds after the first sign of a loss in which an earlier one is looked for: ranks that only noticed it
are not its cause."""
LISTENING_S = 2.0
"""Seconds that a process has to end when Ray tells it to; then it is killed."""
GONE_S = 30.0
"""Seconds that a killed process may take to end: one that waits for a device cannot be hurried."""
SILENT_S = 30.0
"""Seconds without a heartbeat after which a rank on another node is lost: its host or its link is down."""
REPEATED_S = 5.0
"""Seconds for which a buffer that answers must go on to say so: one that stood still itself catches up."""


@dataclass(frozen=True, slots=True)
class LostRank:
    """A rank of the learner that has died or failed."""

    name: str
    failure: RankFailure | None
    """The exception that it raised; None when its process has died, or is out of reach."""
    silent_s: float | None = None
    """Seconds without a heartbeat of a rank on another node; None for one that is known to have ended."""

    def __str__(self) -> str:
        if self.silent_s is not None:
            return f"{self.name} has not been heard of for {self.silent_s:.0f} s"
        if self.failure is None:
            return f"{self.name} has died"
        return f"{self.name} has failed ({self.failure.error})"

    def describe_loss(self, read_log_end: Callable[[str], str]) -> str:
        """Returns all that is known of the loss, with the end of a dead rank's log."""
        if self.silent_s is not None:
            return str(self)
        if self.failure is None:
            return describe_death(self.name, read_log_end)
        return f"{self.name}{self.failure.report}"

    @property
    def at(self) -> float:
        """Unix time in seconds; 0 for a process that died. A death comes before what its peers raise, whoever
        is heard first."""
        return 0.0 if self.failure is None else self.failure.at


@dataclass(slots=True)
class RankProcess:
    """One rank in one of its lives."""

    name: str
    actor: Any
    pid: Any
    """Result of `RoleProcess.get_pid`, ready as soon as there is a process."""
    end: Any
    """Result of `LearnerRole.run`."""
    is_near: bool = True
    """True on the driver's node, where its process can be looked at."""
    process: psutil.Process | None = None

    def find_loss(self) -> LostRank | None:
        if not self.has_ended():
            return LostRank(self.name, None) if self.has_died() else None
        try:
            failure = ray.get(self.end)
        except ray.exceptions.RayTaskError as error:
            raise RoleFailed(f"{self.name} has failed:\n{error}") from error
        except ray.exceptions.RayError as error:
            if has_not_begun(error):
                why = explain_lost_actor(error)
                return LostRank(self.name, RankFailure(why, f" cannot begin: {why}", False, time.time()))
            return LostRank(self.name, None)
        return None if failure is None else LostRank(self.name, failure)

    def has_ended(self) -> bool:
        """True when `run` has returned or raised, or Ray has noticed that the process died."""
        return is_ready(self.end)

    def has_died(self) -> bool:
        """True as soon as the process on this node is gone. Ray says so a moment later, when other ranks may
        have raised what they noticed."""
        if not self.is_near:
            return False
        try:
            if self.process is None and (number := self.find_pid()) is not None:
                self.process = psutil.Process(number)
            return self.process is not None and not _is_alive(self.process)
        except (psutil.NoSuchProcess, ray.exceptions.RayError):
            return True

    def find_pid(self) -> int | None:
        """Returns the number of the process, None as long as it is not known. Raises RayError when the
        process has died before it was."""
        return int(ray.get(self.pid)) if is_ready(self.pid) else None

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.process.kill()


class LearnerRanks:
    """All ranks of a learner, one life of them after the other."""

    def __init__(
        self, config: Config, folder: Path, address: str, places: RolePlaces, network: RunNetwork,
        signals: StopSignals,
    ) -> None:  # fmt: skip
        """`address` is the buffer's."""
        self._config, self._folder, self._address = config, folder, address
        self._places, self._network, self._signals = places, network, signals
        self._ranks: list[RankProcess] = []
        self.num_restarts = -1
        """Starts after the first; -1 before it."""
        self._started_at = 0.0
        self._last_heard: dict[str, float] = {}
        """Time of the clock of the last heartbeat of each rank in this life."""
        self._silent_since: dict[str, float] = {}
        """Time of the clock at which a rank was first seen to be silent for too long."""
        self._told_at = 0.0
        """Time of the clock at which the buffer has said last what it has heard."""
        self._lost_nodes: set[str] = set()

    def start(self, step: int | None, answers: FirstAnswers | None = None) -> None:
        """Starts all ranks from the checkpoint of `step`, or from the model itself. They meet at a port of
        their own.

        `answers` will name ranks that do not come up. Raises RoleFailed where a node does not answer.
        """
        placed, rendezvous = self._network.place_learner(self._config)
        if self._places.spans_nodes:
            self._places.say(describe_learner(placed, rendezvous))
        self.num_restarts += 1
        self._ranks, self._started_at = [], time.monotonic()
        self._last_heard, self._silent_since = {}, {}
        for rank in range(self._config.num_learner_ranks):
            name, config = f"learner-{rank}", self._network.configure_rank(placed, rank)
            actor = self._places.start_rank(rank)
            pid = actor.get_pid.remote()
            if answers is not None:
                answers.expect_answer(name, actor, pid)
            end = actor.run.remote(config, self._folder, self._address, rank, rendezvous, step)
            self._ranks.append(
                RankProcess(name, actor, pid, end, is_near=self._places.is_on_driver_node(name))
            )

    def has_finished(self) -> bool:
        """True when the learner has trained all its steps. Its first rank is the last to end."""
        first = self._ranks[0]
        return first.has_ended() and first.find_loss() is None

    def note_heartbeats(self, roles: Mapping[str, RoleState]) -> None:
        """Takes what the buffer has heard of the ranks."""
        now = time.monotonic()
        if now - self._told_at > REPEATED_S:
            self._silent_since.clear()
        self._told_at = now
        for rank in self._ranks:
            if (state := roles.get(rank.name)) is None or rank.is_near:
                self._silent_since.pop(rank.name, None)
                continue
            # What was heard before this life began was another life's.
            if state.last_heard_s < now - self._started_at:
                self._last_heard[rank.name] = now - state.last_heard_s
            if now - self._last_heard.get(rank.name, now) > SILENT_S:
                self._silent_since.setdefault(rank.name, now)
            else:
                self._silent_since.pop(rank.name, None)

    def find_lost_rank(self) -> LostRank | None:
        """Returns the rank that was lost first, if any was. Raises RoleFailed where another life would end as
        this one."""
        losses, deadline = self._find_losses(), time.monotonic() + SETTLE_S
        if not losses:
            return None
        # Until a death is found, which comes before all else, or all ranks are lost.
        while (
            min(loss.at for loss in losses) and len(losses) < len(self._ranks) and time.monotonic() < deadline
        ):
            self._signals.raise_if_hurried()
            time.sleep(0.05)
            losses = self._find_losses()
        first = min(losses, key=lambda loss: loss.at)
        is_last_life = self.num_restarts >= self._config.learner.max_restarts
        if is_last_life or (first.failure is not None and first.failure.final):
            raise RoleFailed(first.describe_loss(self._places.read_log_end))
        return first

    def _find_losses(self) -> list[LostRank]:
        losses = [loss for rank in self._ranks if (loss := rank.find_loss()) is not None]
        known, now = {loss.name for loss in losses}, time.monotonic()
        for name, since in self._silent_since.items():
            if name not in known and self._told_at - since > REPEATED_S:
                self._lost_nodes.add(self._places.find_node(name).name)
                losses.append(LostRank(name, None, silent_s=now - self._last_heard[name]))
        return losses + [LostRank(name, None) for name in self._find_unborn_ranks() if name not in known]

    def _find_unborn_ranks(self) -> list[str]:
        """Returns the names of ranks whose node is lost, and that had no process there yet: Ray lets them
        wait for the node for ever."""
        unborn = [rank.name for rank in self._ranks if not (rank.is_near or is_ready(rank.pid))]
        gone = {node.name for node in self._places.find_lost_nodes()} if unborn else set[str]()
        self._lost_nodes |= gone
        return [name for name in unborn if self._places.find_node(name).name in gone]

    def kill(self) -> None:
        """Returns when no rank is alive any more, so that ports, files and devices are free; a node that is
        out of reach is not waited for. Raises RoleFailed, Interrupted."""
        began = time.monotonic()
        for rank in self._ranks:
            ray.kill(rank.actor)
        while alive := [rank for rank in self._ranks if not self._is_gone(rank)]:
            if time.monotonic() - began > GONE_S:
                names = " and ".join(rank.name for rank in alive)
                raise RoleFailed(f"{names} must be gone {GONE_S:.0f} s after a kill, and still live")
            if time.monotonic() - began > LISTENING_S:
                for rank in alive:
                    self._kill_process(rank)
            self._signals.raise_if_hurried()
            time.sleep(0.02)

    def _is_gone(self, rank: RankProcess) -> bool:
        if rank.is_near:
            return rank.has_ended() and rank.has_died()
        try:
            number = rank.find_pid()
            node = self._places.find_node(rank.name).name
            return (
                node in self._lost_nodes
                or (number is None and rank.has_ended())
                or (
                    number is not None
                    and not self._places.agents.ask(node, NodeAgent.is_alive, number, answered_s=LISTENING_S)
                )
            )
        except ray.exceptions.RayError:
            return True
        except RoleFailed:  # the node does not answer
            return self._note_lost_nodes(rank)

    def _note_lost_nodes(self, rank: RankProcess) -> bool:
        """Tells whether Ray has given up the node of a rank."""
        self._lost_nodes |= {node.name for node in self._places.find_lost_nodes()}
        return self._places.find_node(rank.name).name in self._lost_nodes

    def _kill_process(self, rank: RankProcess) -> None:
        if rank.is_near:
            return rank.kill()
        node = self._places.find_node(rank.name).name
        with contextlib.suppress(ray.exceptions.RayError, RoleFailed):
            if (number := rank.find_pid()) is not None:
                self._places.agents.ask(node, NodeAgent.kill_process, number, answered_s=LISTENING_S)

    def find_newest_step(self, oldest: int) -> int | None:
        """Returns the step of the newest checkpoint, as the node sees it on which the learner goes on: ranks
        of lost nodes get other places. `oldest`: step of the oldest checkpoint that the buffer knows of.

        Raises RoleFailed where no place is left, or the checkpoint is out of reach.
        """
        moved = self._places.replace_lost_ranks(self._lost_nodes)
        node = self._places.find_node("learner-0")
        checkpoints = self._folder / "checkpoints"
        newest = self._places.agents.ask(node.name, NodeAgent.find_newest_step, checkpoints)
        if (newest or 0) < oldest:
            raise RoleFailed(
                f"the learner's checkpoints (of step {oldest} and later) must be in {checkpoints} on {node}, "
                f"got {'none' if newest is None else f'step {newest}'}: checkpoints that outlive their host "
                "need a file system that the hosts share (docs/cluster.md)"
            )
        self._lost_nodes = set()
        for line in moved:
            self._places.say(line)
        return newest


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
