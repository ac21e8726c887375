"""Plays episodes with an engine and no buffer, and measures what they cost."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from buffers.messages import Lease
from generators.engine import Completion, Engine
from generators.episode import Episodes
from generators.solo_play import SoloPlayer, open_player


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


class MeteredEngine:
    """An engine whose steps and replies are counted."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.num_tokens, self.step_cpu_s, self.last_reply_at = 0, 0.0, time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[Completion]:
        began = time.thread_time()
        completions = self._engine.step()
        self.step_cpu_s += time.thread_time() - began
        if completions:
            self.last_reply_at = time.monotonic()
            self.num_tokens += sum(len(completion.tokens) for completion in completions)
        return completions


class EpisodeDriver:
    """Plays rounds of groups."""

    def __init__(self, player: SoloPlayer, engine: MeteredEngine) -> None:
        self._player, self._engine = player, engine

    def play_groups(self, num_groups: int, num_samples: int) -> EpisodeCost:
        engine, tokens_before, steps_before = self._engine, self._engine.num_tokens, self._engine.step_cpu_s
        began, cpu_began = time.monotonic(), time.process_time()
        leases = [
            Lease(
                id=index, split="train", task="t", index=index, seed=0, group=index, due=0, min_version=0,
                num_samples=num_samples,
            )
            for index in range(num_groups)
        ]  # fmt: skip
        played = list(self._player.play_leases(leases))
        return EpisodeCost(
            num_tokens=engine.num_tokens - tokens_before,
            num_turns=sum(episode.branches.num_turns for group in played for episode in group.episodes),
            num_failed=sum(bool(group.error) for group in played),
            wall_s=engine.last_reply_at - began,
            cpu_s=time.process_time() - cpu_began,
            step_cpu_s=engine.step_cpu_s - steps_before,
        )


@contextmanager
def open_driver(
    engine: Engine, episodes: Episodes, max_tokens: int, max_episodes: int
) -> Iterator[EpisodeDriver]:
    """Plays at most `max_episodes` episodes at a time."""
    metered = MeteredEngine(engine)
    with open_player(metered, episodes, max_tokens=max_tokens, max_episodes=max_episodes) as player:
        yield EpisodeDriver(player, metered)
