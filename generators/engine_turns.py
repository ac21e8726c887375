"""An engine's side of turns on GPUs that it shares with the learner (`sync.turns`).

    AWAKE ── a rank of the learner calls ──▶ `Engine.sleep`, gives up ──▶ ASLEEP
      ▲                                                                      │
      └── `Engine.wake` ◀── takes all turns ◀── nobody calls, all are free ──┘

The generator's loop goes round in both states. While the engine sleeps, the generator asks for leases,
begins groups, scores, hands in and sends heartbeats, and the newest version is fetched. Only what needs the
engine waits.
"""

import logging
import time
from collections.abc import Callable

from buffers.heartbeat import HeartbeatThread
from buffers.role_registry import AWAITING_START, STARTING
from generators.engine import Engine
from sync.turns import LOOK_S, SAY_S, TurnLocks

log = logging.getLogger("slipstream.generator")


class EngineTurns:
    """All methods belong to the generator's loop."""

    def __init__(self, locks: TurnLocks, *, keeps_weights: bool) -> None:
        """`keeps_weights`: samples under way go on with the weights that they began with
        (`sync.in_flight=false`), so the engine must not lose these in its sleep."""
        self._locks, self._keeps_weights = locks, keeps_weights
        self._asleep_since: float | None = None
        self._say_s = SAY_S

    @property
    def is_awake(self) -> bool:
        """True while the engine has the turn."""
        return self._locks.is_holding

    def wait_for_start(self, heart: HeartbeatThread, sleep: Callable[[float], None] = time.sleep) -> None:
        """Waits for the turn in which the engine starts."""
        while not self._locks.take_together(STARTING):
            self._note_sleep()
            heart.set_activity(AWAITING_START)
            sleep(LOOK_S)
        self._asleep_since = None
        heart.set_activity(STARTING)

    def exchange(self, engine: Engine, heart: HeartbeatThread) -> None:
        """Gives the turn up where the learner calls for it, and takes it where nobody does."""
        if self.is_awake:
            if self._locks.is_called():
                heart.set_activity("giving the GPU to the learner")
                engine.sleep(keep_weights=self._keeps_weights)
                self._locks.give_up()
        elif self._locks.take_together("sampling"):
            heart.set_activity("taking the GPU back from the learner")
            engine.wake()
            self._asleep_since = None
        else:
            self._note_sleep()

    def _note_sleep(self) -> None:
        """Logs who has the turn, where that takes long."""
        now = time.monotonic()
        if self._asleep_since is None:
            self._asleep_since, self._say_s = now, SAY_S
        if now - self._asleep_since > self._say_s:
            self._say_s *= 2
            named = (
                " and ".join(map(str, self._locks.find_holders()))
                or "nobody that lives, and one calls for it"
            )
            log.info("has been asleep for %.0f s: %s has the GPU", now - self._asleep_since, named)

    def close(self) -> None:
        self._locks.close()
