"""The learner's side of turns on GPUs that it shares with engines (`sync.turns`)."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from sync.turns import LOOK_S, SAY_S, TurnLocks

log = logging.getLogger("slipstream.learner")


class Offloaded(Protocol):
    """The models of a rank, which leave the GPU while it is the engines' turn."""

    def offload(self) -> None: ...

    def onload(self) -> None: ...


class OwnGpu:
    """The GPU of a rank that shares it with no engine, or has a part of it: it is always the rank's turn."""

    are_shared = False
    """True when engines have the GPU in turns of their own."""
    waited_s = 0.0

    def begin(self, doing: str) -> None: ...

    def end(self) -> None: ...

    @contextmanager
    def hold(self, doing: str) -> Iterator[None]:
        yield

    def hand_over(self, models: Offloaded) -> None: ...

    def close(self) -> None: ...


class LearnerTurns(OwnGpu):
    """Has the turn from `begin` to `end`. A rank's models are on its GPU then, and in the host's memory
    otherwise."""

    are_shared = True

    def __init__(
        self, locks: TurnLocks, say: Callable[..., None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`say(activity, moved)` tells the heartbeat what the rank does, and whether it gets on with it."""
        self._locks, self._say, self._clock = locks, say, clock
        self._models: Offloaded | None = None
        self._is_loaded = True
        self.waited_s = 0.0
        """Seconds spent waiting for turns."""

    def hand_over(self, models: Offloaded) -> None:
        """Takes the rank's models, which were loaded in its turn."""
        self._models = models

    def begin(self, doing: str) -> None:
        """Waits for the turn, and brings the models back. Does nothing within a turn."""
        if self._locks.is_holding:
            return
        began, say_s = self._clock(), SAY_S
        while not self._locks.call_and_take(doing):
            waited_s = self._clock() - began
            holders = " and ".join(f"{one.role} (process {one.pid})" for one in self._locks.find_holders())
            # Neither work nor silence: the watchdog goes on to count, and the status shows it.
            self._say(f"{doing}: asks for the GPU, which {holders or 'nobody'} has", False)
            if waited_s > say_s:
                say_s *= 2
                named = " and ".join(map(str, self._locks.find_holders())) or "nobody that lives"
                log.warning("has asked for its turn for %.0f s: %s has it", waited_s, named)
            time.sleep(LOOK_S)
        self.waited_s += self._clock() - began
        self._say(doing)
        if self._models is not None and not self._is_loaded:
            self._models.onload()
            self._is_loaded = True

    def end(self) -> None:
        """Offloads the models, and gives the turn to the engines. Does nothing without a turn."""
        if not self._locks.is_holding:
            return
        self._say("giving the GPU to the engines")
        if self._models is not None:
            self._models.offload()
            self._is_loaded = False
        self._locks.give_up()

    @contextmanager
    def hold(self, doing: str) -> Iterator[None]:
        """Has the turn while the context lasts, or until the first `end` in it, that of an inner context too.
        An error leaves all as it is: the process ends, and the kernel takes its turn."""
        self.begin(doing)
        yield
        self.end()

    def close(self) -> None:
        self._locks.close()
