"""Episodes of the run's task and of its evaluation sets, side by side in one generator.

A set's episodes are opened at its first lease, and closed when none of its prompts has been played for a
while: a set costs nothing between its evaluations.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from buffers.messages import Lease
from configs.schema import Config
from generators.episode import Episodes
from generators.group import PlayedEpisode, Player
from generators.plain_values import describe_error
from generators.task import Score

log = logging.getLogger("slipstream.generator")

IDLE_S = 30.0
"""Seconds after which the episodes of a set that nobody plays are closed."""
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds between two attempts to open a set: what its task needs may come up later than the run does."""


@dataclass(slots=True, eq=False)
class OpenSet:
    """The episodes of an evaluation set while they are in use."""

    name: str
    opening: "asyncio.Task[Episodes]"
    num_users: int = 0
    """Calls under way that need the episodes open."""
    closing: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True)
class SetBeginning:
    """The part that the episodes of one evaluation prompt share."""

    opened: OpenSet
    episodes: Episodes
    shared: Any


class EvaluationEpisodes:
    """`Episodes` of the run's own task, and of each evaluation set by the name in the lease. Everything
    belongs to the episode thread."""

    def __init__(
        self,
        config: Config,
        make_episodes: Callable[[Config], Episodes],
        idle_s: float = IDLE_S,
        pauses_s: Sequence[float] = PAUSES_S,
    ) -> None:
        self._config, self._make_episodes = config, make_episodes
        self._idle_s, self._pauses_s = idle_s, pauses_s
        self._own = make_episodes(config)
        self._open_sets: dict[str, OpenSet] = {}
        self._ends: set[asyncio.Task[None]] = set()
        """Ends of episodes under way."""

    async def open(self) -> None:
        await self._own.open()

    def limit_concurrency(self, most: int) -> int:
        return self._own.limit_concurrency(most)

    async def begin_group(self, lease: Lease) -> Any:
        if lease.evaluation not in self._config.eval.sets:
            return await self._own.begin_group(lease)
        opened = self._find_set(lease.evaluation)
        with self._hold_open(opened):
            # Shielded, because a lease that is revoked must not end what others wait for.
            episodes = await asyncio.shield(opened.opening)
            return SetBeginning(opened, episodes, await episodes.begin_group(lease))

    async def play_episode(self, player: Player, beginning: Any) -> PlayedEpisode:
        if not isinstance(beginning, SetBeginning):
            return await self._own.play_episode(player, beginning)
        with self._hold_open(beginning.opened):
            return await beginning.episodes.play_episode(player, beginning.shared)

    async def score_group(self, beginning: Any, episodes: Sequence[PlayedEpisode]) -> Sequence[Score] | None:
        if not isinstance(beginning, SetBeginning):
            return await self._own.score_group(beginning, episodes)
        with self._hold_open(beginning.opened):
            return await beginning.episodes.score_group(beginning.shared, episodes)

    async def close(self) -> None:
        for opened in list(self._open_sets.values()):
            self._begin_to_close(opened)
        await asyncio.gather(*self._ends, return_exceptions=True)
        await self._own.close()

    def _find_set(self, name: str) -> OpenSet:
        """Returns the episodes of a set; begins to open them where they are not open."""
        if name not in self._open_sets:
            opened = self._open_sets[name] = OpenSet(name, asyncio.ensure_future(self._open_set(name)))
            opened.opening.add_done_callback(lambda _: self._forget_failure(opened))
        return self._open_sets[name]

    def _forget_failure(self, opened: OpenSet) -> None:
        """Has a set that could not be opened tried anew after a while, though its prompts keep coming."""
        if not opened.opening.cancelled() and opened.opening.exception() is not None:
            asyncio.get_running_loop().call_later(self._idle_s, self._begin_to_close, opened)

    async def _open_set(self, name: str) -> Episodes:
        """Opens the episodes of a set, at the last attempt or not at all. Its prompts wait for as long."""
        for attempt, pause_s in enumerate((*self._pauses_s, None), 1):
            episodes = self._make_episodes(self._config.for_evaluation(self._config.eval.sets[name]))
            try:
                await episodes.open()
            except BaseException as error:
                await _close_episodes(name, episodes)
                if pause_s is None or not isinstance(error, Exception):
                    raise
                log.warning(
                    "the evaluation set %s cannot be opened (attempt %d of %d, the next in %g s): %s",
                    name, attempt, len(self._pauses_s) + 1, pause_s, describe_error(error),
                )  # fmt: skip
                await asyncio.sleep(pause_s)
            else:
                return episodes
        raise AssertionError("the last attempt returns or raises")

    @contextmanager
    def _hold_open(self, opened: OpenSet) -> Iterator[None]:
        """Keeps the episodes open for as long as the block lasts, and for a while longer."""
        if opened.closing is not None:
            opened.closing.cancel()
        opened.num_users += 1
        try:
            yield
        finally:
            opened.num_users -= 1
            if not opened.num_users:
                loop = asyncio.get_running_loop()
                opened.closing = loop.call_later(self._idle_s, self._begin_to_close, opened)

    def _begin_to_close(self, opened: OpenSet) -> None:
        if opened.closing is not None:
            opened.closing.cancel()
        if self._open_sets.get(opened.name) is opened:
            del self._open_sets[opened.name]
            end = asyncio.ensure_future(self._close_set(opened))
            self._ends.add(end)
            end.add_done_callback(self._ends.discard)

    async def _close_set(self, opened: OpenSet) -> None:
        await asyncio.wait([opened.opening])
        if not opened.opening.cancelled() and opened.opening.exception() is None:
            await _close_episodes(opened.name, opened.opening.result())


async def _close_episodes(name: str, episodes: Episodes) -> None:
    try:
        await episodes.close()
    except Exception:
        log.exception("the episodes of the evaluation set %s could not be closed", name)
