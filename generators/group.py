"""A leased group: its episodes are played side by side, and become trajectory rows.

begin the group ─▶ play its episodes ─▶ score them beside one another, where the task does ─▶ rows
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import xxhash

from buffers.messages import Lease, SubmitEvaluation
from buffers.trajectory import GREEDY, Trajectory
from configs.eval import HELD_OUT
from generators.branches import EpisodeBranches
from generators.engine import Completion, Sample
from generators.plain_values import check_number, describe_error
from generators.policy import Policy, Watch
from generators.score_checks import check_score
from generators.task import Score
from generators.user_code.errors import UserCodeError

T = TypeVar("T")

TRUNCATED = ("max_tokens", "context_overflow")
"""Words for the end of an episode that had no tokens left."""


class EpisodeTimedOut(Exception):
    """An episode has taken longer than `episodes.timeout_s`."""


@dataclass(slots=True)
class GroupProgress:
    """How far a group has come. The episode thread and the engine's loop both read it."""

    num_samples: int
    """Samples to be made: a group's, and for ReMax a greedy one after them."""
    num_playing: int
    """Episodes that may ask the policy again. Written by the episode thread."""
    num_tokens: int = 0
    """Sampled tokens of finished turns of the episodes that are trained. Written by the engine's loop."""


class ReplyFollower(Protocol):
    """Follows one reply while it is sampled."""

    @property
    def watch(self) -> Watch | None:
        """Gets the tokens as they come; None where the whole reply is enough."""
        ...

    def cut_reply(self, completion: Completion) -> Completion:
        """Returns the reply, or its beginning: that is recorded then, as if the engine had stopped there."""
        ...


class Player:
    """One sample of a leased group, as it asks the policy turn by turn."""

    def __init__(
        self,
        policy: Policy,
        lease: Lease,
        index: int,
        max_tokens: int,
        progress: GroupProgress,
        temperature: float | None = None,
    ) -> None:
        """`max_tokens`: the longest reply. `temperature`: 0 takes the likeliest token, None is the engine's
        own."""
        self.lease, self.index = lease, index
        self.branches = EpisodeBranches()
        self._policy, self._max_tokens, self._progress = policy, max_tokens, progress
        self._is_greedy = index == lease.num_samples or temperature == 0
        self._temperature = temperature or None
        self.limit_time: Callable[[bool], None] = lambda is_limited: None
        """With False the time of the whole episode stops, with True it begins anew. An episode that waits for
        a worker has not begun."""
        self._num_asked = 0
        self._has_ended = False

    @contextmanager
    def wait_untimed(self) -> Iterator[None]:
        """Stops the time of the whole episode; it begins anew where the block ends well."""
        self.limit_time(False)
        yield
        self.limit_time(True)

    @property
    def num_asked(self) -> int:
        """Number of turns that were asked for, those that were given up included. It numbers the next one."""
        return self._num_asked

    @property
    def next_sample_id(self) -> str:
        return make_sample_id(self.lease.id, self.index, self._num_asked)

    @property
    def num_turns(self) -> int:
        """Number of finished turns."""
        return self.branches.num_turns

    def ask_policy(
        self,
        prompt: list[int],
        max_tokens: int | None = None,
        follower: ReplyFollower | None = None,
        stop_tokens: frozenset[int] = frozenset(),
    ) -> Coroutine[Any, Any, Completion]:
        """Samples the next turn's reply, and records it. Several turns may be asked side by side: each has
        its number before its coroutine runs.

        The reply has at most `max_tokens` tokens (None: `sampling.max_tokens`). `follower` may see it as
        it comes, and end it. It also ends with one of `stop_tokens`.
        """
        number = self._num_asked
        sample = Sample(
            id=self.next_sample_id,
            prompt=prompt,
            max_tokens=self._max_tokens if max_tokens is None else max_tokens,
            seed=make_sample_seed(
                self.lease.seed, name_split(self.lease), self.lease.group, self.index, number
            ),
            greedy=self._is_greedy,
            temperature=self._temperature,
            stop_tokens=stop_tokens,
        )
        self._num_asked += 1
        return self._sample_turn(sample, number, follower)

    async def _sample_turn(self, sample: Sample, number: int, follower: ReplyFollower | None) -> Completion:
        completion = await self._policy.sample_turn(sample, None if follower is None else follower.watch)
        if follower is not None:
            completion = follower.cut_reply(completion)
        self.branches.append_turn(sample.prompt, completion, number)
        return completion

    def end_sampling(self) -> None:
        """Notes that the episode asks the policy no more. What follows is scoring."""
        if not self._has_ended:
            self._has_ended = True
            self._progress.num_playing -= 1


@dataclass(slots=True, kw_only=True)
class PlayedEpisode:
    """An episode that has come to its end."""

    branches: EpisodeBranches
    score: Score
    """Sum over its turns."""
    stop: str
    """Why it ended, a word of `buffers.trajectory`."""
    messages: Sequence[dict[str, Any]] = ()
    """The whole conversation."""
    renderer: str = ""
    """Name and version of what made tokens of its messages."""
    finished_at: float = field(default_factory=time.time)
    """Unix time in seconds."""

    def replace_score(self, score: Score) -> None:
        """Takes the score that the episode got beside the others of its group; the last turn is paid the
        difference. Raises ValueError where a trajectory cannot hold both."""
        self.branches.pay_last_turn(score.reward - self.score.reward)
        check_number(
            "reward of the last turn, with score_group's", [*self.branches.turn_rewards.values()][-1]
        )
        self.score = check_score(Score(score.reward, {**self.score.components, **score.components}))


def make_sample_id(lease_id: int, index: int, turn: int = 0) -> str:
    return f"{lease_id}/{index}/{turn}"


def parse_lease_id(sample_id: str) -> int:
    return int(sample_id.partition("/")[0])


def parse_sample_index(sample_id: str) -> int:
    return int(sample_id.split("/")[1])


def parse_turn_number(sample_id: str) -> int:
    return int(sample_id.split("/")[2])


def make_sample_seed(run_seed: int, split: str, group: int, index: int, turn: int = 0) -> int:
    """Returns the seed of one turn of a sample: the same for every attempt at the group, in any generator."""
    later = f"/{turn}" if turn else ""
    return xxhash.xxh32_intdigest(f"{run_seed}/{split}/{group}/{index}{later}".encode())


def name_split(lease: Lease) -> str:
    """Returns the split of a lease, with the name of its evaluation set: so no two sets draw alike."""
    is_own = lease.evaluation in ("", HELD_OUT)
    return lease.split if is_own else f"{lease.split}/{lease.evaluation}"


def make_episode_seed(lease: Lease) -> int:
    """Returns the seed that an environment begins with: one for all episodes of a prompt."""
    return xxhash.xxh32_intdigest(f"{lease.seed}/{name_split(lease)}/{lease.index}".encode())


async def wait_for_all(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results in order.

    The first error cancels all others, waits for them, and is raised itself.
    """
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as together:
            tasks += [together.create_task(one) for one in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def log_failure(log: logging.Logger, lease: Lease, error: BaseException) -> str:
    """Says in the log why a group could not be played: what the task's code said, and otherwise where our
    own code was. Returns it in a sentence."""
    if isinstance(error, UserCodeError):
        said, detail = str(error), f"\n{error.detail}" if error.detail else ""
    else:
        said, detail = describe_error(error), ""
    is_own = not isinstance(error, UserCodeError | ValueError | EpisodeTimedOut)
    log.error(
        "prompt %d of task %s failed: %s%s",
        lease.index,
        lease.task,
        said,
        detail,
        exc_info=error if is_own else None,
    )
    return said


def make_answer(
    generator: str, lease: Lease, episodes: Sequence[PlayedEpisode], digest: str
) -> SubmitEvaluation:
    """Returns the answer to an evaluation prompt. `digest`: that of the version which began it."""
    branches = [branch for episode in episodes for branch in episode.branches.branches]
    versions = {version for branch in branches for version in branch.versions if version >= 0}
    return SubmitEvaluation(
        generator=generator,
        lease=lease.id,
        rewards=[episode.score.reward for episode in episodes],
        num_tokens=sum(sum(branch.sampled) for branch in branches),
        num_truncated=sum(episode.stop in TRUNCATED for episode in episodes),
        # An agent may have asked for nothing.
        oldest_version=min(versions, default=lease.min_version),
        newest_version=max(versions, default=lease.min_version),
        digest=digest,
    )


def make_rows(
    lease: Lease, episodes: Sequence[PlayedEpisode], generator: str, started_at: float
) -> list[Trajectory]:
    """Returns the rows of a whole group, sorted by (sample, branch).

    An episode beyond `lease.num_samples` is ReMax's greedy one: its reward goes into the rows of the others.
    """

    def is_plain(branches: EpisodeBranches) -> bool:
        """True for an episode of turn 0 alone, which the record need not say of each token."""
        return list(branches.turn_rewards) == [0]

    greedy = episodes[lease.num_samples :]
    baseline = {GREEDY: greedy[0].score.reward} if greedy else {}
    return [
        Trajectory(
            group=lease.group,
            sample=sample,
            branch=number,
            due=lease.due,
            prompt_id=lease.index,
            task=lease.task,
            tokens=branch.tokens,
            sampled=branch.sampled,
            logprobs=branch.logprobs,
            versions=branch.versions,
            turn=[] if is_plain(episode.branches) else branch.turn,
            token_rewards=token_rewards,
            reward=episode.score.reward,
            rewards={**episode.score.components, **baseline},
            finish_reason=branch.finish_reason,
            stop=episode.stop,
            renderer=episode.renderer,
            generator=generator,
            started_at=started_at,
            finished_at=episode.finished_at,
            experts=[] if branch.experts is None else branch.experts.reshape(-1),
        )
        for sample, episode in enumerate(episodes[: lease.num_samples])
        for number, (branch, token_rewards) in enumerate(
            zip(episode.branches.branches, episode.branches.place_rewards(), strict=True)
        )
    ]
