"""The policy as episodes see it: they ask for a reply and wait, and the engine's loop answers.

    episode thread                             the engine's loop
    sample_turn(sample) ──▶ queue, wake-up ──▶ exchange_samples() ──▶ engine.add_sample()
          ▲                                                            engine.step()
          └───────────── the completion ◀──── take_completion() ◀─────────┘

An episode that is canceled withdraws its sample: the engine aborts it before it steps again.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from generators.engine import Completion, Engine, Sample


class Policy(Protocol):
    async def sample_turn(self, sample: Sample) -> Completion:
        """Samples one reply. Raises ValueError for a prompt that the engine cannot take."""
        ...


class EnginePolicy:
    """Hands samples from the episode thread to the engine's loop, and completions back.

    `sample_turn` belongs to the episode thread; all other methods to the engine's loop.
    """

    def __init__(self, wake_loop: Callable[[], None]) -> None:
        """`wake_loop` ends a wait of the engine's loop; any thread may call it."""
        self._wake_loop = wake_loop
        self._lock = threading.Lock()
        """Guards the two queues."""
        self._asked: deque[tuple[Sample, asyncio.Future[Completion]]] = deque()
        self._withdrawn: list[str] = []
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        """By sample id: episodes that wait for a sample which is in the engine."""

    async def sample_turn(self, sample: Sample) -> Completion:
        reply: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._asked.append((sample, reply))
        self._wake_loop()
        try:
            return await reply
        except asyncio.CancelledError:
            with self._lock:
                self._withdrawn.append(sample.id)
            self._wake_loop()
            raise

    @property
    def has_requests(self) -> bool:
        """True when a sample waits to go into the engine, or to be aborted."""
        return bool(self._asked or self._withdrawn)

    def exchange_samples(self, engine: Engine, may_add: bool) -> list[Completion]:
        """Adds the samples that are asked for, and aborts those that nobody waits for any more.

        Returns what the aborted ones had. `may_add=False` leaves new samples in the queue.
        """
        with self._lock:
            withdrawn, self._withdrawn = set(self._withdrawn), []
            if withdrawn:
                self._asked = deque(one for one in self._asked if one[0].id not in withdrawn)
            asked = list(self._asked) if may_add else []
            if may_add:
                self._asked.clear()
        for sample_id in withdrawn:
            self._waiting.pop(sample_id, None)
        aborted = engine.abort_samples(list(withdrawn)) if withdrawn else []
        for sample, reply in asked:
            try:
                engine.add_sample(sample)
            # An engine refuses a prompt that is too long, for example.
            except Exception as error:
                _answer(reply, error)
            else:
                self._waiting[sample.id] = reply
        return aborted

    def take_completion(self, completion: Completion) -> None:
        """Wakes the episode that waits for the sample."""
        if (reply := self._waiting.pop(completion.id, None)) is not None:
            _answer(reply, completion)

    def withdraw_lease(self, engine: Engine, is_of_lease: Callable[[str], bool]) -> list[Completion]:
        """Aborts at once what the engine samples for a lease; returns what it had."""
        ids = [sample_id for sample_id in self._waiting if is_of_lease(sample_id)]
        for sample_id in ids:
            del self._waiting[sample_id]
        return engine.abort_samples(ids)


def _answer(reply: asyncio.Future[Completion], answer: Completion | Exception) -> None:
    """Gives the waiting episode its answer, in its own thread. The episode may have ended meanwhile."""

    def settle() -> None:
        if reply.done():
            return
        if isinstance(answer, Exception):
            reply.set_exception(answer)
        else:
            reply.set_result(answer)

    try:
        reply.get_loop().call_soon_threadsafe(settle)
    # The episode thread has ended.
    except RuntimeError:
        return
