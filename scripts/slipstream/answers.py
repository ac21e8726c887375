"""Roles that Ray has placed, and that have not answered yet: a worker process that never comes up says
nothing itself."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from slipstream.cluster import has_own_cluster, list_dead_processes
from slipstream.ray_waits import wait_for_results
from slipstream.role_failures import RoleFailed
from slipstream.stop_signals import StopSignals

NAMED_S = 45.0
"""Seconds without an answer after which a role is named. Its process starts in one or two, and imports little
before it answers."""
GIVEN_UP_S = 300.0
"""Seconds without an answer after which the run ends: a file system that is slow today may only need
longer."""
CHECKED_EVERY_S = 1.0


@dataclass(slots=True)
class SilentRole:
    """A role that has not answered."""

    name: str
    actor: Any
    since: float
    """Time of the clock in seconds."""
    is_named: bool = False


class FirstAnswers:
    """The first answers of a command's roles, and who is silent for too long."""

    def __init__(
        self, say: Callable[[str], None], signals: StopSignals, named_s: float = NAMED_S,
        given_up_s: float = GIVEN_UP_S, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`say` prints a line about each role that has not answered within `named_s`."""
        self._say, self._signals = say, signals
        self._named_s, self._given_up_s, self._clock = named_s, given_up_s, clock
        self._silent: dict[Any, SilentRole] = {}
        """By the result that the role owes."""

    def expect_answer(self, name: str, actor: Any, pid: Any = None) -> None:
        """Asks the role for its process number. `pid` is that result where it was asked already.

        Call it before any method that takes the actor's time: an actor answers in order.
        """
        self._silent[actor.get_pid.remote() if pid is None else pid] = SilentRole(name, actor, self._clock())

    def check_silent_roles(self) -> None:
        """Names roles that are silent for too long, and what each waits for. Raises RoleFailed after
        `given_up_s`, and as soon as no role can be started here any more."""
        check_this_node()
        if not self._silent:
            return
        # An error is an answer too: whoever waits for the role's method meets it.
        answered, _ = ray.wait(list(self._silent), num_returns=len(self._silent), timeout=0)
        for ref in answered:
            del self._silent[ref]
        for silent in self._silent.values():
            waited_s = self._clock() - silent.since
            if waited_s >= self._given_up_s:
                raise RoleFailed(
                    f"{silent.name} must answer within {self._given_up_s:g} s: {describe_wait(silent.actor)}"
                )
            if waited_s >= self._named_s and not silent.is_named:
                silent.is_named = True
                self._say(
                    f"{silent.name} has been placed, and has not answered for {waited_s:.0f} s: "
                    f"{describe_wait(silent.actor)}"
                )

    def wait_for_result(self, ref: Any, get: Callable[[Any], Any]) -> Any:
        """Returns `get(ref)` once it is ready, and names silent roles meanwhile. Raises Interrupted, and what
        `get` raises."""
        while not wait_for_results([ref], 1, CHECKED_EVERY_S, self._signals):
            self.check_silent_roles()
        return get(ref)


def check_this_node() -> None:
    """Raises RoleFailed when Ray's processes here have died, or Ray has given up this host: it starts no
    process here again."""
    died = list_dead_processes()
    if not has_own_cluster():
        here = ray.get_runtime_context().get_node_id()
        died = [] if any(found["NodeID"] == here and found["Alive"] for found in ray.nodes()) else ["raylet"]
    if died:
        raise RoleFailed(f"Ray's own process on this host ({died[0]}) has died: no role can be started again")


def describe_wait(actor: Any) -> str:
    """Says what keeps an actor from answering, as far as Ray knows."""
    found = ray._private.state.actors(actor._actor_id.hex())
    state = found.get("State", "not known")
    if state == "ALIVE":
        return f"its process {found['Pid']} is up and answers no call"
    logs = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs"
    return (
        "it waits for a worker process, which has not come up "
        f"(Ray calls the actor {state}; Ray's logs: {logs})"
    )
