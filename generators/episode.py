"""Episodes stand between a task and the policy: a lease becomes prompts, and replies become scores.

`Episodes` is the protocol. `SimulatedEpisodes` is here; `generators/task_episodes.py` plays a task's.
All of it runs in the episode thread.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from buffers.messages import Lease
from buffers.trajectory import infer_stop
from generators.episode_times import EpisodeTimes
from generators.group import EpisodeTimedOut, GroupProgress, PlayedEpisode, Player, wait_for_all
from generators.policy import Policy
from generators.score_checks import check_score
from generators.task import Score


class Episodes(Protocol):
    async def open(self) -> None:
        """Prepares what all episodes need. Raises ValueError for a task that cannot be played."""
        ...

    def limit_concurrency(self, most: int) -> int:
        """Returns how many episodes, of at most `most`, this host should play side by side."""
        ...

    async def begin_group(self, lease: Lease) -> Any:
        """Makes what the episodes of a group have in common; `play_episode` gets it."""
        ...

    async def play_episode(self, player: Player, beginning: Any) -> PlayedEpisode:
        """Plays one episode to its end. Raises whatever keeps it from that: then its group has failed."""
        ...

    async def score_group(self, beginning: Any, episodes: Sequence[PlayedEpisode]) -> Sequence[Score] | None:
        """Scores the episodes of a group beside one another; None where each keeps its own score."""
        ...

    async def close(self) -> None: ...


async def play_group(
    episodes: Episodes,
    policy: Policy,
    lease: Lease,
    progress: GroupProgress,
    max_tokens: int,
    timeout_s: float,
    temperature: float | None = None,
    times: EpisodeTimes | None = None,
) -> list[PlayedEpisode]:
    """Plays a group's episodes side by side; returns them in order, scored.

    `max_tokens`: the longest reply. `temperature`: as `Player` has it. `times` counts the episodes' time;
    None: it never stands still. Raises EpisodeTimedOut when an episode takes longer than `timeout_s`, and
    whatever an episode raises. The other episodes are canceled then, and withdraw what they have asked for.
    """
    beginning = await episodes.begin_group(lease)
    players = [
        Player(policy, lease, index, max_tokens, progress, temperature)
        for index in range(progress.num_samples)
    ]
    times = times or EpisodeTimes()
    played = await wait_for_all(
        [_play_in_time(episodes, player, beginning, timeout_s, times) for player in players]
    )
    scores = await episodes.score_group(beginning, played[: lease.num_samples])
    if scores is not None:
        for episode, score in zip(played, scores, strict=False):
            episode.replace_score(score)
    return played


async def _play_in_time(
    episodes: Episodes, player: Player, beginning: Any, timeout_s: float, times: EpisodeTimes
) -> PlayedEpisode:
    try:
        async with times.limit_episode(timeout_s) as limit:
            player.limit_time = limit.limit_time
            return await episodes.play_episode(player, beginning)
    except TimeoutError:
        if not limit.has_expired:
            raise
        raise EpisodeTimedOut(
            f"an episode must take at most {timeout_s:g} s (episodes.timeout_s), got no end in turn "
            f"{player.num_turns} of sample {player.index}"
        ) from None
    finally:
        player.end_sampling()


@dataclass(frozen=True, slots=True)
class SimulatedPrompt:
    index: int
    coin: random.Random


class SimulatedEpisodes:
    """Episodes of one turn for the simulated engine: prompts of eight tokens, and a coin toss for a
    reward."""

    async def open(self) -> None:
        """Needs nothing."""

    def limit_concurrency(self, most: int) -> int:
        return most

    async def begin_group(self, lease: Lease) -> SimulatedPrompt:
        return SimulatedPrompt(lease.index, random.Random(f"{lease.seed} {lease.index}"))

    async def play_episode(self, player: Player, beginning: SimulatedPrompt) -> PlayedEpisode:
        completion = await player.ask_policy([0] * 8)
        player.end_sampling()
        score = check_score(await self.score_tokens(beginning, completion.tokens))
        player.branches.pay_last_turn(score.reward)
        stop = infer_stop(completion.finish_reason)
        return PlayedEpisode(branches=player.branches, score=score, stop=stop)

    async def score_group(self, beginning: Any, episodes: Sequence[PlayedEpisode]) -> None:
        """Leaves the scores as they are."""

    async def close(self) -> None:
        """Holds nothing."""

    async def score_tokens(self, prompt: SimulatedPrompt, tokens: list[int]) -> Score:
        return Score(float(prompt.coin.random() < 0.5))
