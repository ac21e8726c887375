"""Plays episodes with an engine and no buffer, and measures what they cost."""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from buffers.messages import Lease
from buffers.wake_up import WakeUp
from generators.engine import Engine
from generators.episode import Episodes, play_group
from generators.episode_thread import EpisodeThread
from generators.group import GroupProgress, PlayedEpisode
from generators.policy import EnginePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeCost:
    """The work of some episodes, and what it took."""

    num_tokens: int
    """Sampled tokens."""
    num_turns: int
    num_failed: int
    """Groups that could not be played."""
    wall_s: float
    """Seconds until the engine's last reply. What is scored after it costs no engine anything."""
    cpu_s: float
    """Processor time of this process, the engine's included."""
    step_cpu_s: float
    """The part of it that the engine's steps took, in the loop's thread."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s

    @property
    def cpu_ms_per_turn(self) -> float:
        """Our own processor time: all but the engine's steps."""
        return 1000 * (self.cpu_s - self.step_cpu_s) / max(1, self.num_turns)


class EpisodeDriver:
    """The part of a generator's loop between a lease and its rows."""

    def __init__(self, engine: Engine, episodes: Episodes, max_tokens: int) -> None:
        self._engine, self._episodes, self._max_tokens = engine, episodes, max_tokens
        self._wake_up = WakeUp()
        self._policy = EnginePolicy(self._wake_up)
        self._thread = EpisodeThread()
        self._thread.start_coroutine(episodes.open()).result()

    def play_groups(self, num_groups: int, num_samples: int, max_episodes: int) -> EpisodeCost:
        """Plays groups, at most `max_episodes` episodes at a time."""
        began, cpu_began, step_cpu_s, num_tokens = time.monotonic(), time.process_time(), 0.0, 0
        to_begin, playing = list(range(num_groups)), dict[int, Future[list[PlayedEpisode]]]()
        ended: list[Future[list[PlayedEpisode]]] = []
        last_reply_at = began
        while to_begin or playing:
            while to_begin and (len(playing) + 1) * num_samples <= max_episodes:
                index = to_begin.pop(0)
                playing[index] = self._begin_group(index, num_samples)
            self._policy.exchange_samples(self._engine, may_add=True)
            if self._engine.num_unfinished:
                step_began = time.thread_time()
                completions = self._engine.step()
                step_cpu_s += time.thread_time() - step_began
                last_reply_at = time.monotonic() if completions else last_reply_at
                for completion in completions:
                    num_tokens += len(completion.tokens)
                    self._policy.take_completion(completion)
            else:
                time.sleep(0.0005)
            for index in [index for index, future in playing.items() if future.done()]:
                ended.append(playing.pop(index))
        wall_s, cpu_s = last_reply_at - began, time.process_time() - cpu_began
        played = [episode for future in ended if future.exception() is None for episode in future.result()]
        return EpisodeCost(
            num_tokens=num_tokens,
            num_turns=sum(episode.branches.num_turns for episode in played),
            num_failed=sum(future.exception() is not None for future in ended),
            wall_s=wall_s,
            cpu_s=cpu_s,
            step_cpu_s=step_cpu_s,
        )

    def close(self) -> None:
        self._thread.close(self._episodes.close())
        self._wake_up.close()

    def _begin_group(self, index: int, num_samples: int) -> "Future[list[PlayedEpisode]]":
        lease = Lease(
            id=index, split="train", task="t", index=index, seed=0, group=index, due=0, min_version=0,
            num_samples=num_samples,
        )  # fmt: skip
        progress = GroupProgress(num_samples, num_playing=num_samples)
        return self._thread.start_coroutine(
            play_group(self._episodes, self._policy, lease, progress, self._max_tokens, 3600.0)
        )


@contextmanager
def open_driver(engine: Engine, episodes: Episodes, max_tokens: int) -> Iterator[EpisodeDriver]:
    driver = EpisodeDriver(engine, episodes, max_tokens)
    try:
        yield driver
    finally:
        driver.close()
