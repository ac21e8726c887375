"""Actors that Ray has placed, and that nothing has been heard of: a worker process that never comes up says nothing itself."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from slipstream.ray_waits import wait_for
from slipstream.roles import RoleFailed
from slipstream.stop_signals import StopSignals

NAMED_S = 45.0
"""How long an actor may take to answer before it is named. Its process starts in a second or two, and imports little before it answers."""
GIVEN_UP_S = 300.0
"""How long before the run ends: a file system that is slow today may only need longer."""


@dataclass(slots=True)
class Silent:
    name: str
    actor: Any
    since: float
    is_named: bool = False


class Answers:
    """The first answers of a command's actors."""

    def __init__(
        self, say: Callable[[str], None], signals: StopSignals, named_s: float = NAMED_S,
        given_up_s: float = GIVEN_UP_S, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`say` is told of each actor that has not answered within `named_s`."""
        self._say, self._signals = say, signals
        self._named_s, self._given_up_s, self._clock = named_s, given_up_s, clock
        self._silent: dict[Any, Silent] = {}

    def expect(self, name: str, actor: Any, answer: Any = None) -> None:
        """`answer`: what its `pid` will return, if it was asked already. To be called before anything that takes the actor's time."""
        self._silent[actor.pid.remote() if answer is None else answer] = Silent(name, actor, self._clock())

    def check(self) -> None:
        """Names who is silent for too long, and what it waits for. Raises RoleFailed where that has lasted."""
        if not self._silent:
            return
        answered, _ = ray.wait(list(self._silent), num_returns=len(self._silent), timeout=0)
        for ref in answered:  # an error too is an answer: whoever waits for the role meets it
            del self._silent[ref]
        for silent in self._silent.values():
            waited_s = self._clock() - silent.since
            if waited_s >= self._given_up_s:
                raise RoleFailed(
                    f"{silent.name} must answer within {self._given_up_s:g} s: {waits_for(silent.actor)}"
                )
            if waited_s >= self._named_s and not silent.is_named:
                silent.is_named = True
                self._say(
                    f"{silent.name} has been placed, and has not answered for {waited_s:.0f} s: {waits_for(silent.actor)}"
                )

    def get(self, ref: Any, get: Callable[[Any], Any]) -> Any:
        """`get(ref)`, and who is silent meanwhile is named."""
        while not wait_for([ref], 1, 1.0, self._signals):
            self.check()
        return get(ref)


def waits_for(actor: Any) -> str:
    found = ray._private.state.actors(actor._actor_id.hex())
    state = found.get("State", "not known")
    if state == "ALIVE":
        return f"its process {found['Pid']} is up and answers no call"
    logs = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs"
    return f"it waits for a worker process, which has not come up (Ray calls the actor {state}; Ray's logs: {logs})"
