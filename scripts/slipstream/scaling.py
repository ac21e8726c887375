"""Changes the number of a run's generators while the run goes on.

    scripts/scale.sh ── ScaleGenerators ──▶ buffer ── RunStatus.scaling ──▶ driver: starts or ends some
         ▲                                    │ ▲                             │
         └────────── RunStatus.scaling ───────┘ └──────── ReportScaling ──────┘

The driver has one order at a time, and keeps it: it reports its order again to a buffer that was started
again. A driver that is killed takes its generators along, so nothing of a change is left.
"""

import time
from collections.abc import Callable

from msgspec import structs

from buffers import messages as m
from buffers.message_fields import shorten
from buffers.role_registry import GONE_S, name_some
from buffers.run_status import RunStatus, Scaling
from slipstream.answers import GIVEN_UP_S
from slipstream.own_generators import OwnGenerators
from slipstream.role_failures import RoleFailed


class GeneratorScaling:
    """Carries out orders for another number of generators, one after the other."""

    def __init__(
        self,
        generators: OwnGenerators,
        send: Callable[[m.Request], object],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`send` sends a request to the buffer; `say` prints a line."""
        self._generators, self._send, self._say, self._clock = generators, send, say, clock
        self._order: Scaling | None = None
        """The order under way, or the last one."""

    def follow(self, status: RunStatus) -> None:
        """Takes up an order that the status holds, gets on with the one under way, and reports what has
        changed. Raises Interrupted."""
        asked, own = status.scaling, self._order
        if asked is not None and not asked.ended and (own is None or own.ended and asked.order != own.order):
            self._begin(asked, status)
        if self._order is not None and not self._order.ended:
            self._get_on(status)
        own = self._order
        # A buffer that was started again knows no order.
        if own is not None and asked != own and (asked is None or asked.order == own.order or not own.ended):
            self._send(m.ReportScaling(scaling=own))

    def _begin(self, asked: Scaling, status: RunStatus) -> None:
        generators, running = self._generators, len(self._generators.training)
        self._order = structs.replace(asked, progress=self._count())
        generators.failure = ""
        if generators.waits_for_learner:
            self._order = None  # they are started first
        elif asked.count == 0 and not find_others(status, generators):
            self._end(
                "the number must be at least 1 as long as no other command's generator has joined the run, "
                "got 0: it would wait for ever",
                failed=True,
            )
        elif asked.count > running:
            self._add(asked.count - running)
        else:
            generators.forget_lost()
            generators.let_newest_leave(running - asked.count)

    def _add(self, number: int) -> None:
        running = len(self._generators.training)
        try:
            self._generators.add(number)
        except (ValueError, RoleFailed) as error:
            self._end(
                f"{running + number} generators are {number} more than run, and what is free is not enough "
                f"for these: {error}",
                failed=True,
            )
        else:
            self._generators.forget_lost()

    def _get_on(self, status: RunStatus) -> None:
        assert self._order is not None, "an order is under way"
        generators = self._generators
        generators.note_versions(status)
        for name, heard_at in list(generators.newcomers.items()):
            if self._clock() - heard_at > GIVEN_UP_S:
                generators.give_up(name, f"{name} has not been heard of for {GIVEN_UP_S:.0f} s")
        if generators.newcomers:
            self._tell(f"starting: {name_some([*generators.newcomers])}")
        elif generators.leaving:
            self._tell(f"handing in what they have begun: {name_some(generators.leaving)}")
        elif generators.failure:
            self._end(f"{self._count()}; {generators.failure}", failed=True)
        elif len(generators.training) != self._order.count:
            self._end(f"{self._count()}; others have left meanwhile", failed=True)
        else:
            self._end(self._count())

    def _count(self) -> str:
        return f"generators of the run: {len(self._generators.training)}"

    def _tell(self, progress: str) -> None:
        assert self._order is not None, "an order is under way"
        if progress != self._order.progress:
            self._order = structs.replace(self._order, progress=shorten(progress))

    def _end(self, progress: str, *, failed: bool = False) -> None:
        assert self._order is not None, "an order is under way"
        self._order = structs.replace(self._order, progress=shorten(progress), ended=True, failed=failed)
        self._say(f"scripts/scale.sh {self._order.count}: {progress}")


def find_others(status: RunStatus, generators: OwnGenerators) -> list[str]:
    """Returns the generators for training that other commands have started and that are heard of."""
    own = {*generators.training, *generators.leaving, *status.evaluators}
    heard = [name for name, role in status.roles.items() if role.last_heard_s <= GONE_S]
    return [name for name in heard if name in status.generators and name not in own]
