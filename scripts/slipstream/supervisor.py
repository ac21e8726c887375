"""The learner as the driver sees it: ranks that start together and end together.

    start ──▶ they train ──▶ all end well
      ▲            │
      │            └──▶ one dies or fails: the others would wait for it in a collective, so all are killed
      └── the driver rewinds the buffer to the newest checkpoint, and generators go on meanwhile

A failure that the user or the code has caused would come again in another life, so it ends the run. So does a
loss after `learner.max_restarts` restarts.
"""

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from configs.schema import Config
from learners import checkpoint
from slipstream.answers import FirstAnswers
from slipstream.ray_waits import is_ready
from slipstream.role_failures import RankFailure, RoleFailed, describe_death
from slipstream.stop_signals import StopSignals

SETTLE_S = 1.0
"""Seconds after the first sign of a loss in which an earlier one is looked for: ranks that only noticed it
are not its cause."""
LISTENING_S = 2.0
"""Seconds that a process has to end when Ray tells it to; then it is killed."""
GONE_S = 30.0
"""Seconds that a killed process may take to end: one that waits for a device cannot be hurried."""


@dataclass(frozen=True, slots=True)
class LostRank:
    """A rank of the learner that has died or failed."""

    name: str
    failure: RankFailure | None
    """The exception that it raised; None when its process has died."""

    def __str__(self) -> str:
        if self.failure is None:
            return f"{self.name} has died"
        return f"{self.name} has failed ({self.failure.error})"

    def describe_loss(self, logs: Path) -> str:
        """Returns all that is known of the loss, with the end of a dead rank's log."""
        if self.failure is None:
            return describe_death(self.name, logs)
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
    process: psutil.Process | None = None

    def find_loss(self) -> LostRank | None:
        if not self.has_ended():
            return LostRank(self.name, None) if self.has_died() else None
        try:
            failure = ray.get(self.end)
        except ray.exceptions.RayTaskError as error:
            raise RoleFailed(f"{self.name} has failed:\n{error}") from error
        except ray.exceptions.RayError:
            return LostRank(self.name, None)
        return None if failure is None else LostRank(self.name, failure)

    def has_ended(self) -> bool:
        """True when `run` has returned or raised, or Ray has noticed that the process died."""
        return is_ready(self.end)

    def has_died(self) -> bool:
        """True as soon as the process is gone. Ray says so a moment later, when other ranks may have raised
        what they noticed."""
        try:
            if self.process is None and is_ready(self.pid):
                self.process = psutil.Process(ray.get(self.pid))
            return self.process is not None and not _is_alive(self.process)
        except (psutil.NoSuchProcess, ray.exceptions.RayError):
            return True

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.process.kill()


class LearnerRanks:
    """All ranks of a learner, one life of them after the other."""

    def __init__(
        self, config: Config, folder: Path, address: str, rank_class: Callable[[int], Any],
        common: tuple[Any, ...], signals: StopSignals,
    ) -> None:  # fmt: skip
        """`address` is the buffer's. `rank_class` gives each rank's actor class, and `common` the arguments
        of its constructor after the name."""
        self._config, self._folder, self._address = config, folder, address
        self._rank_class, self._common, self._signals = rank_class, common, signals
        self._ranks: list[RankProcess] = []
        self.num_restarts = -1
        """Starts after the first; -1 before it."""

    def start(self, step: int | None, answers: FirstAnswers | None = None) -> None:
        """Starts all ranks from the checkpoint of `step`, or from the model itself. They meet at a port of
        their own.

        `answers` will name ranks that do not come up.
        """
        rendezvous, self._ranks = f"tcp://127.0.0.1:{find_free_port()}", []
        self.num_restarts += 1
        for rank in range(self._config.num_learner_ranks):
            name = f"learner-{rank}"
            actor = self._rank_class(rank).remote(name, *self._common)
            pid = actor.get_pid.remote()
            if answers is not None:
                answers.expect_answer(name, actor, pid)
            end = actor.run.remote(self._config, self._folder, self._address, rank, rendezvous, step)
            self._ranks.append(RankProcess(name, actor, pid, end))

    def has_finished(self) -> bool:
        """True when the learner has trained all its steps. Its first rank is the last to end."""
        first = self._ranks[0]
        return first.has_ended() and first.find_loss() is None

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
        is_last_life = self.num_restarts == self._config.learner.max_restarts
        if is_last_life or (first.failure is not None and first.failure.final):
            raise RoleFailed(first.describe_loss(self._folder / "logs"))
        return first

    def _find_losses(self) -> list[LostRank]:
        return [loss for rank in self._ranks if (loss := rank.find_loss()) is not None]

    def kill(self) -> None:
        """Returns when no rank is alive any more, so that ports, files and devices are free. Raises
        RoleFailed, Interrupted."""
        began = time.monotonic()
        for rank in self._ranks:
            ray.kill(rank.actor)
        while alive := [rank for rank in self._ranks if not (rank.has_ended() and rank.has_died())]:
            if time.monotonic() - began > GONE_S:
                names = " and ".join(rank.name for rank in alive)
                raise RoleFailed(f"{names} must be gone {GONE_S:.0f} s after a kill, and still live")
            if time.monotonic() - began > LISTENING_S:
                for rank in alive:
                    rank.kill()
            self._signals.raise_if_hurried()
            time.sleep(0.02)

    def find_newest_step(self) -> int | None:
        """Returns the step of the newest checkpoint."""
        newest = checkpoint.find_latest(self._folder / "checkpoints")
        return None if newest is None else newest.manifest.step


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
