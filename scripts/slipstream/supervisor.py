"""The learner as the driver sees it: ranks that start together and end together.

    start ──▶ they train ──▶ all end well
      ▲            │
      │            └──▶ one dies or fails: the others would wait for it in a collective, so all are killed
      └── the driver rewinds the buffer to the newest checkpoint, and generators go on meanwhile

What the user or the code has caused, another life would meet again: it ends the run. So does the last of `learner.max_restarts`.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from configs.schema import Config
from learners import checkpoint
from slipstream.answers import Answers
from slipstream.ray_waits import is_ready
from slipstream.roles import Failure, RoleFailed, died, free_port
from slipstream.stop_signals import StopSignals

SETTLE_S = 1.0
"""After the first sign of a failure, how long to look for an earlier one: the ranks that noticed must not be taken for its cause."""
LISTENING_S = 2.0
"""How long a process may take to end when Ray tells it to; then it is killed."""
GONE_S = 30.0
"""How long that may take: a process that waits for a device cannot be hurried."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The rank that was lost first."""

    name: str
    failure: Failure | None
    """What it raised; None: its process has died."""

    def __str__(self) -> str:
        return (
            f"{self.name} has died"
            if self.failure is None
            else f"{self.name} has failed ({self.failure.error})"
        )

    def report(self, logs: Path) -> str:
        """All that is known of it."""
        return died(self.name, logs) if self.failure is None else f"{self.name}{self.failure.report}"

    @property
    def at(self) -> float:
        """A process that is gone was lost before what its peers raised, whoever is heard first."""
        return 0.0 if self.failure is None else self.failure.at


@dataclass(slots=True)
class Rank:
    name: str
    actor: Any
    pid: Any
    """What `LearnerRole.pid` will return, as soon as there is a process."""
    end: Any
    """What `LearnerRole.run` will return."""
    process: psutil.Process | None = None

    def loss(self) -> Loss | None:
        if not self.has_ended():
            return Loss(self.name, None) if self.has_died() else None
        try:
            failure = ray.get(self.end)
        except ray.exceptions.RayTaskError as error:
            raise RoleFailed(f"{self.name} has failed:\n{error}") from error
        except ray.exceptions.RayError:
            return Loss(self.name, None)
        return None if failure is None else Loss(self.name, failure)

    def has_ended(self) -> bool:
        return is_ready(self.end)

    def has_died(self) -> bool:
        """Known at once; Ray says so a moment later, when other ranks may have raised what they noticed of it."""
        try:
            if self.process is None and is_ready(self.pid):
                self.process = psutil.Process(ray.get(self.pid))
            return self.process is not None and not _lives(self.process)
        except (psutil.NoSuchProcess, ray.exceptions.RayError):
            return True

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.process.kill()


class LearnerRanks:
    """All of a learner's ranks, one life of them after the other."""

    def __init__(
        self, config: Config, folder: Path, address: str, role: Callable[[int], Any], common: tuple[Any, ...],
        signals: StopSignals,
    ) -> None:  # fmt: skip
        """`address` is the buffer's; `role` gives each rank's actor class; `common` is what the constructor of any role takes after its
        name."""
        self._config, self._folder, self._address = config, folder, address
        self._role, self._common, self._signals = role, common, signals
        self._ranks: list[Rank] = []
        self.num_restarts = -1

    def start(self, step: int | None, answers: Answers | None = None) -> None:
        """Starts all ranks, which meet at a port of their own, from the checkpoint of `step`, or from the model itself. `answers`
        will name those that do not come up."""
        rendezvous, self._ranks = f"tcp://127.0.0.1:{free_port()}", []
        self.num_restarts += 1
        for rank in range(self._config.num_learner_ranks):
            name = f"learner-{rank}"
            actor = self._role(rank).remote(name, *self._common)
            pid = actor.pid.remote()
            if answers is not None:
                answers.expect(name, actor, pid)
            end = actor.run.remote(self._config, self._folder, self._address, rank, rendezvous, step)
            self._ranks.append(Rank(name, actor, pid, end))

    def ended(self) -> bool:
        """Has the learner done all it had to? Its first rank is the last to end."""
        first = self._ranks[0]
        return first.has_ended() and first.loss() is None

    def loss(self) -> Loss | None:
        """The rank that was lost first, if any was. Raises RoleFailed where another life would end as this one."""
        losses, deadline = self._losses(), time.monotonic() + SETTLE_S
        if not losses:
            return None
        while (
            min(loss.at for loss in losses) and len(losses) < len(self._ranks) and time.monotonic() < deadline
        ):
            self._signals.raise_if_hurried()
            time.sleep(0.05)
            losses = self._losses()
        first = min(losses, key=lambda loss: loss.at)
        last_life = self.num_restarts == self._config.learner.max_restarts
        if last_life or (first.failure is not None and first.failure.final):
            raise RoleFailed(first.report(self._folder / "logs"))
        return first

    def _losses(self) -> list[Loss]:
        return [loss for rank in self._ranks if (loss := rank.loss()) is not None]

    def kill(self) -> None:
        """Returns when no rank lives any more, so that ports, files and devices are free."""
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

    def newest_checkpoint(self) -> int | None:
        """Its step."""
        newest = checkpoint.find_latest(self._folder / "checkpoints")
        return None if newest is None else newest.manifest.step


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
