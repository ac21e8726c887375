"""The policy as episodes see it: they ask for a reply and wait, and the engine's loop answers.

    episode thread                             the engine's loop
    sample_turn(sample) ──▶ queue, wake-up ──▶ exchange_samples() ──▶ engine.add_sample()
          ▲                                                            engine.step()
          └───────────── the completion ◀──── take_completion() ◀─────────┘

An episode that is canceled withdraws its sample: the engine aborts it before it steps again. One that watches
its reply sees the tokens as they come, and may end the reply.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from generators.engine import Completion, Engine, Sample

Watch = Callable[[list[int]], bool]
"""Gets the tokens of a reply as they come. Returns True when the policy needs no more of them."""


class Policy(Protocol):
    async def sample_turn(self, sample: Sample, watch: Watch | None = None) -> Completion:
        """Samples one reply. Raises ValueError for a prompt that the engine cannot take, and what `watch`
        raises.

        `watch` is called in the episode thread. The last tokens may stand in the completion only. A reply
        that it has ended has some tokens more, perhaps, and the finish reason `abort` unless it ended itself.
        """
        ...


@dataclass(slots=True, eq=False)
class WatchedSample:
    """A sample in the engine whose tokens are shown as they come."""

    id: str
    watch: Watch
    reply: asyncio.Future[Completion]
    num_shown: int = 0
    """Tokens that were handed over. Belongs to the engine's loop."""
    is_behind: bool = False
    """True from when the engine's loop hands over tokens until the episode thread has taken them."""


class EnginePolicy:
    """Hands samples from the episode thread to the engine's loop, and completions back.

    `sample_turn` belongs to the episode thread; all other methods to the engine's loop.
    """

    def __init__(self, wake_loop: Callable[[], None]) -> None:
        """`wake_loop` ends a wait of the engine's loop; any thread may call it."""
        self._wake_loop = wake_loop
        self._lock = threading.Lock()
        """Guards the two queues."""
        self._asked: deque[tuple[Sample, asyncio.Future[Completion], Watch | None]] = deque()
        self._withdrawn: list[str] = []
        self._ended_early: list[str] = []
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        """By sample id: episodes that wait for a sample which is in the engine."""
        self._watched: dict[str, WatchedSample] = {}
        """By sample id: those of them that watch it."""

    async def sample_turn(self, sample: Sample, watch: Watch | None = None) -> Completion:
        reply: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._asked.append((sample, reply, watch))
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
        return bool(self._asked or self._withdrawn or self._ended_early)

    def exchange_samples(self, engine: Engine, may_add: bool) -> list[Completion]:
        """Adds the samples that are asked for, and aborts those of which nobody needs more.

        Returns what the aborted ones had. `may_add=False` leaves new samples in the queue.
        """
        with self._lock:
            withdrawn, self._withdrawn = set(self._withdrawn), []
            ended_early, self._ended_early = self._ended_early, []
            if withdrawn:
                self._asked = deque(one for one in self._asked if one[0].id not in withdrawn)
            asked = list(self._asked) if may_add else []
            if may_add:
                self._asked.clear()
        for sample_id in withdrawn:
            self._forget_sample(sample_id)
        unneeded = withdrawn.union(one for one in ended_early if one in self._waiting)
        aborted = engine.abort_samples(list(unneeded)) if unneeded else []
        for completion in aborted:
            self.take_completion(completion)
        for sample, reply, watch in asked:
            try:
                engine.add_sample(sample)
            # An engine refuses a prompt that is too long, for example.
            except Exception as error:
                _answer(reply, error)
            else:
                self._waiting[sample.id] = reply
                if watch is not None:
                    self._watched[sample.id] = WatchedSample(sample.id, watch, reply)
        return aborted

    def take_completion(self, completion: Completion) -> None:
        """Wakes the episode that waits for the sample."""
        if (reply := self._forget_sample(completion.id)) is not None:
            _answer(reply, completion)

    def show_progress(self, engine: Engine) -> None:
        """Hands new tokens to the episodes that watch their replies and have taken the last ones."""
        for watched in self._watched.values():
            if watched.is_behind:
                continue
            tokens = engine.read_tokens(watched.id, watched.num_shown)
            if tokens:
                watched.num_shown += len(tokens)
                watched.is_behind = True
                _call_episode(watched.reply, partial(self._show_tokens, watched, tokens))

    def withdraw_lease(self, engine: Engine, is_of_lease: Callable[[str], bool]) -> list[Completion]:
        """Aborts at once what the engine samples for a lease; returns what it had."""
        ids = [sample_id for sample_id in self._waiting if is_of_lease(sample_id)]
        for sample_id in ids:
            self._forget_sample(sample_id)
        return engine.abort_samples(ids)

    def _forget_sample(self, sample_id: str) -> asyncio.Future[Completion] | None:
        self._watched.pop(sample_id, None)
        return self._waiting.pop(sample_id, None)

    def _show_tokens(self, watched: WatchedSample, tokens: list[int]) -> None:
        """Runs in the episode thread."""
        watched.is_behind = False
        if watched.reply.done():
            return
        try:
            is_enough = watched.watch(tokens)
        except Exception as error:
            watched.reply.set_exception(error)
            is_enough = True
        if is_enough:
            with self._lock:
                self._ended_early.append(watched.id)
            self._wake_loop()


def _answer(reply: asyncio.Future[Completion], answer: Completion | Exception) -> None:
    """Gives the waiting episode its answer, in its own thread. The episode may have ended meanwhile."""

    def settle() -> None:
        if reply.done():
            return
        if isinstance(answer, Exception):
            reply.set_exception(answer)
        else:
            reply.set_result(answer)

    _call_episode(reply, settle)


def _call_episode(reply: asyncio.Future[Completion], call: Callable[[], None]) -> None:
    """Calls in the thread of the episode that waits for the reply."""
    try:
        reply.get_loop().call_soon_threadsafe(call)
    # The episode thread has ended.
    except RuntimeError:
        return
