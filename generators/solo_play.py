"""Plays leases with an engine and no buffer: what a generator does between a lease and its rows, alone."""

import asyncio
import logging
import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass

from buffers.messages import Lease
from buffers.trajectory import Trajectory
from buffers.wake_up import WakeUp
from generators.engine import Engine
from generators.episode import Episodes, play_group
from generators.episode_thread import EpisodeThread
from generators.group import GroupProgress, PlayedEpisode, log_failure, make_rows
from generators.policy import EnginePolicy

log = logging.getLogger("slipstream.solo")

IDLE_S = 1.0
"""Longest wait for episodes while the engine has nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoloGroup:
    """A lease that has come to its end."""

    lease: Lease
    rows: Sequence[Trajectory] = ()
    """Sorted by (sample, branch). Empty where the group could not be played."""
    episodes: Sequence[PlayedEpisode] = ()
    """One for each sample, with its messages."""
    error: str = ""
    """Why the last attempt failed."""


@dataclass(slots=True)
class SoloLease:
    """A lease that is being played."""

    lease: Lease
    attempt: int
    progress: GroupProgress
    started_at: float
    """Unix time in seconds."""
    played: "Future[list[PlayedEpisode]]"


class SoloPlayer:
    """Plays leases with the version that the engine holds. All methods are for one thread."""

    def __init__(
        self,
        engine: Engine,
        episodes: Episodes,
        *,
        max_tokens: int,
        max_episodes: int,
        timeout_s: float = 3600.0,
        max_attempts: int = 1,
        temperature: float | None = None,
    ) -> None:
        """`max_tokens`: the longest reply. `max_episodes`: the most that are under way at a time, unless one
        group has more. `timeout_s`: the longest episode. A lease that fails is played `max_attempts` times.
        `temperature`: 0 takes the likeliest token, None is the engine's own.

        Raises what `episodes.open` raises.
        """
        self._engine, self._episodes, self._max_tokens = engine, episodes, max_tokens
        self._timeout_s, self._max_attempts, self._temperature = timeout_s, max_attempts, temperature
        self._wake_up = WakeUp()
        self._poller = select.poll()
        self._poller.register(self._wake_up, select.POLLIN)
        self._policy = EnginePolicy(self._wake_up)
        self._playing: dict[int, SoloLease] = {}
        """By lease id."""
        self._tasks: set[asyncio.Task[list[PlayedEpisode]]] = set()
        """Groups under way. Belongs to the episode thread."""
        self._thread = EpisodeThread()
        try:
            self._thread.start_coroutine(episodes.open()).result()
        except BaseException:
            self.close()
            raise
        self._max_episodes = episodes.limit_concurrency(max_episodes)

    def play_leases(
        self,
        leases: Iterable[Lease],
        *,
        generator: str = "solo",
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[SoloGroup]:
        """Yields each lease's group when it has ended, in whatever order. Their ids must differ.

        `leases` is read as places become free, so it may be long. `generator` is written into the rows.
        `should_stop` is asked between two steps of the engine. When it says so, or when the caller leaves the
        loop early, all that is under way is dropped; the engine is idle then, and can be used again. After a
        `KeyboardInterrupt` it cannot.
        """
        coming, waiting = iter(leases), deque[tuple[Lease, int]]()
        try:
            while True:
                self._begin_leases(coming, waiting)
                if not self._playing or should_stop():
                    break
                self._advance_engine()
                for ended in [one for one in self._playing.values() if one.played.done()]:
                    del self._playing[ended.lease.id]
                    group = _end_group(ended, generator)
                    if group.error:
                        # Its samples leave the engine before others of the same ids come.
                        self._policy.exchange_samples(self._engine, may_add=False)
                    if group.error and ended.attempt < self._max_attempts:
                        waiting.append((ended.lease, ended.attempt + 1))
                    else:
                        yield group
        except GeneratorExit:
            pass
        except BaseException:
            self._drop_groups()
            raise
        self._drop_groups()
        self._policy.exchange_samples(self._engine, may_add=False)

    def close(self) -> None:
        """Ends all episodes, and what runs their code."""
        self._thread.close(self._episodes.close())
        self._wake_up.close()

    def _begin_leases(self, coming: Iterator[Lease], waiting: deque[tuple[Lease, int]]) -> None:
        """Begins leases while there is room. `waiting` holds leases with the number of their attempt."""
        while True:
            if not waiting:
                lease = next(coming, None)
                if lease is None:
                    return
                waiting.append((lease, 1))
            if not self._has_room_for(waiting[0][0]):
                return
            self._begin_lease(*waiting.popleft())

    def _has_room_for(self, lease: Lease) -> bool:
        """True where the group may begin.

        Groups that only wait for their scores count beyond `max_episodes`, so they do not pile up.
        """
        playing = sum(one.progress.num_playing for one in self._playing.values())
        scoring = sum(one.progress.num_samples for one in self._playing.values()) - playing
        used = playing + max(0, scoring - self._max_episodes)
        return not self._playing or used + lease.num_samples <= self._max_episodes

    def _begin_lease(self, lease: Lease, attempt: int) -> None:
        assert lease.id not in self._playing, f"two leases have the id {lease.id}"
        progress = GroupProgress(lease.num_samples, num_playing=lease.num_samples)
        played = self._thread.start_coroutine(self._play_group(lease, progress))
        played.add_done_callback(lambda _: self._wake_up())
        self._playing[lease.id] = SoloLease(lease, attempt, progress, time.time(), played)

    async def _play_group(self, lease: Lease, progress: GroupProgress) -> list[PlayedEpisode]:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await play_group(
                self._episodes,
                self._policy,
                lease,
                progress,
                self._max_tokens,
                self._timeout_s,
                self._temperature,
            )
        finally:
            self._tasks.discard(task)

    def _drop_groups(self) -> None:
        self._thread.start_coroutine(self._cancel_all()).result()
        self._playing.clear()

    async def _cancel_all(self) -> None:
        """Ends the episodes under way, and waits until they have withdrawn their samples."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _advance_engine(self) -> None:
        """Steps the engine once, or waits until an episode wants something of it or has ended."""
        if self._policy.has_requests:
            self._policy.exchange_samples(self._engine, may_add=True)
        if self._engine.num_unfinished:
            for completion in self._engine.step():
                self._policy.take_completion(completion)
            self._policy.show_progress(self._engine)
        else:
            self._poller.poll(IDLE_S * 1000)
            self._wake_up.clear()


def _end_group(ended: SoloLease, generator: str) -> SoloGroup:
    try:
        episodes = ended.played.result()
    # `SystemExit` of user code included: it fails this group alone.
    except (Exception, SystemExit, CancelledError) as error:
        return SoloGroup(lease=ended.lease, error=log_failure(log, ended.lease, error))
    rows = make_rows(ended.lease, episodes, generator, ended.started_at)
    return SoloGroup(lease=ended.lease, rows=rows, episodes=episodes)


@contextmanager
def open_player(
    engine: Engine,
    episodes: Episodes,
    *,
    max_tokens: int,
    max_episodes: int,
    timeout_s: float = 3600.0,
    max_attempts: int = 1,
    temperature: float | None = None,
) -> Iterator[SoloPlayer]:
    """Opens a `SoloPlayer` with the same arguments. Leaving the context ends its processes."""
    player = SoloPlayer(
        engine,
        episodes,
        max_tokens=max_tokens,
        max_episodes=max_episodes,
        timeout_s=timeout_s,
        max_attempts=max_attempts,
        temperature=temperature,
    )
    try:
        yield player
    finally:
        player.close()
