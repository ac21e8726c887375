"""The groups that a generator has leases for, from the lease to the message that hands them in.

    waiting (leased, not begun) ──▶ playing (episodes beside the engine) ──▶ SubmitGroups or SubmitEvaluation
                                      └── on an error ──▶ FailLease

The buffer may revoke a lease in each of these states. A generator that leaves gives back those that wait.
Environments and scores are user code: whatever they do
fails their own group.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

from buffers import messages as m
from buffers.client import BufferClient, send_evaluation, send_groups
from buffers.run_status import GeneratorReport
from buffers.trajectory import Trajectory, to_batch
from configs.schema import Config
from generators.engine import Completion, Engine
from generators.episode import Episodes, play_group
from generators.episode_thread import EpisodeThread
from generators.episode_times import EpisodeTimes
from generators.group import (
    GroupProgress,
    PlayedEpisode,
    log_failure,
    make_answer,
    make_rows,
    parse_lease_id,
    parse_sample_index,
)
from generators.policy import EnginePolicy
from generators.probe import PROBE_LEASE
from generators.user_code.errors import WorkerDied

log = logging.getLogger("slipstream.generator")


@dataclass(slots=True)
class LeasedGroup:
    """A group that is being played."""

    lease: m.Lease
    progress: GroupProgress
    started_at: float
    """Unix time in seconds."""
    played: "Future[list[PlayedEpisode]]"
    digest: str = ""
    """Digest of the weights that the engine held when the group began."""


class LeasedGroups:
    """All methods are for the engine's loop."""

    def __init__(
        self,
        generator: str,
        config: Config,
        client: BufferClient,
        engine: Engine,
        episodes: Episodes,
        policy: EnginePolicy,
        totals: GeneratorReport,
        wake_loop: Callable[[], None],
    ) -> None:
        """`totals` is where sampled tokens are counted; `wake_loop` ends a wait of the engine's loop.
        Raises what `episodes.open` raises."""
        self._generator, self._client, self._engine, self._episodes = generator, client, engine, episodes
        self._policy, self._totals, self._wake_loop = policy, totals, wake_loop
        self._config, self._timeout_s = config, config.episodes.timeout_s
        self._makes_baselines = config.algo.needs_greedy_response
        self._waiting: deque[m.Lease] = deque()
        self._playing: dict[int, LeasedGroup] = {}
        """By lease id."""
        self._is_leaving = False
        self._thread, self._times = EpisodeThread(), EpisodeTimes()
        try:
            self._thread.start_coroutine(episodes.open()).result()
        except BaseException:
            self._thread.close(episodes.close())
            raise
        self._max_concurrent = episodes.limit_concurrency(config.max_episodes)

    @property
    def lease_ids(self) -> frozenset[int]:
        """Ids of all leases that this generator works on or will work on."""
        return frozenset([lease.id for lease in self._waiting] + [*self._playing])

    @property
    def waiting_ids(self) -> list[int]:
        """Ids of the leases that are not begun: they wait for a newer version."""
        return [lease.id for lease in self._waiting]

    @property
    def is_playing(self) -> bool:
        return bool(self._playing)

    @property
    def activity(self) -> str:
        """Says what the episodes wait for while the engine has nothing to do."""
        if any(group.progress.num_playing for group in self._playing.values()):
            return "waiting for environments"
        return "scoring"

    @property
    def awaited_version(self) -> int | None:
        """Oldest version that may begin the next lease; None when no lease waits."""
        return min((lease.min_version for lease in self._waiting), default=None)

    def count_room(self) -> int:
        """Returns how many more samples keep `episodes.max_concurrent` episodes under way. At most 0: they
        are.

        Groups that only wait for their scores count as well, beyond as many samples. So a generator whose
        scoring cannot keep up does not pile up groups.
        """
        groups = self._playing.values()
        num_playing = sum(group.progress.num_playing for group in groups)
        num_scoring = sum(group.progress.num_samples for group in groups) - num_playing
        backlog = max(0, num_scoring - self._max_concurrent)
        num_waiting = sum(self._count_samples(lease) for lease in self._waiting)
        num_used = num_playing + num_waiting + backlog
        return self._max_concurrent - num_used

    def count_evaluation_room(self) -> int:
        """Returns how many more samples of evaluation prompts this generator takes while the run trains:
        `eval.share` of its episodes, less those under way. At least one where none is: a prompt may have more
        samples than the share."""
        num_held = sum(lease.num_samples for lease in self._list_leases() if lease.evaluation)
        return max(0, int(self._config.eval.share * self._max_concurrent) - num_held, int(not num_held))

    @property
    def is_evaluating(self) -> bool:
        """True while this generator has an evaluation prompt."""
        return any(lease.evaluation for lease in self._list_leases())

    def _list_leases(self) -> list[m.Lease]:
        return [*self._waiting, *(group.lease for group in self._playing.values())]

    def _count_samples(self, lease: m.Lease) -> int:
        """Returns the number of samples that a lease asks for. ReMax's greedy sample is scored and not
        trained. Like evaluation, it stands outside the ledger."""
        return lease.num_samples + (self._makes_baselines and not lease.evaluation)

    def count_tokens(self) -> dict[int, int]:
        """Returns the tokens sampled so far, by lease id."""
        counts = {lease.id: 0 for lease in self._waiting}
        counts |= {lease_id: group.progress.num_tokens for lease_id, group in self._playing.items()}
        for sample_id, num_tokens in self._engine.count_sampled_tokens().items():
            group = self._playing.get(parse_lease_id(sample_id))
            if group is not None and _is_trained(group.lease, sample_id):
                counts[group.lease.id] += num_tokens
        return counts

    def add_leases(self, leases: Iterable[m.Lease]) -> None:
        self._waiting.extend(leases)

    def begin_groups(self, held_version: int, digest: str = "") -> None:
        """Begins the leases whose floor `held_version`, the engine's, has reached; others hold none of them
        up. `digest` is that of the version's weights."""
        ready = [lease for lease in self._waiting if lease.min_version <= held_version]
        if ready:
            self._waiting = deque(lease for lease in self._waiting if lease.min_version > held_version)
        for lease in ready:
            num_samples = self._count_samples(lease)
            progress = GroupProgress(num_samples, num_playing=num_samples)
            named = self._config.eval.sets.get(lease.evaluation)
            playing = play_group(
                self._episodes,
                self._policy,
                lease,
                progress,
                (named and named.max_tokens) or self._config.sampling.max_tokens,
                self._timeout_s,
                None if named is None else named.temperature,
                self._times,
            )
            played = self._thread.start_coroutine(playing)
            played.add_done_callback(lambda _: self._wake_loop())
            self._playing[lease.id] = LeasedGroup(lease, progress, time.time(), played, digest)

    def leave(self) -> None:
        """Gives back the leases that are not begun: others get them at once. A group that fails from now on
        does not count as failed: who ends this host may have ended the processes of the task's code
        already."""
        self._is_leaving = True
        while self._waiting:
            self._fail_lease(self._waiting.popleft().id, 0, f"{self._generator} leaves", revoked=True)

    def exchange_samples(self, may_add: bool) -> None:
        """Gives the engine what the episodes ask for. `may_add=False`: it only aborts what they withdraw."""
        if self._policy.has_requests:
            for aborted in self._policy.exchange_samples(self._engine, may_add):
                self._count_tokens_of(aborted)

    def take_completion(self, completion: Completion) -> None:
        """Takes a finished sample: one turn of an episode."""
        self._count_tokens_of(completion)
        self._policy.take_completion(completion)

    def show_progress(self) -> None:
        """Shows the tokens of this step to the episodes that watch their replies."""
        self._policy.show_progress(self._engine)

    def submit_played_groups(self) -> None:
        """Hands in all groups that have been played, in one message."""
        ended = [group for group in self._playing.values() if group.played.done()]
        if not ended:
            return
        # What the episodes of a failed group have withdrawn counts for it.
        self.exchange_samples(may_add=False)
        rows_by_lease: dict[int, list[Trajectory]] = {}
        for group in ended:
            del self._playing[group.lease.id]
            rows = self._make_rows(group)
            if rows is not None:
                rows_by_lease[group.lease.id] = rows
        if rows_by_lease:
            batch = to_batch([row for rows in rows_by_lease.values() for row in rows])
            counts = [len(rows) for rows in rows_by_lease.values()]
            send_groups(self._client, self._generator, list(rows_by_lease), counts, batch)

    def drop_lease(self, lease_id: int) -> None:
        """Stops a group whose lease the buffer has revoked, and reports how many tokens it had. The lease may
        have been handed in meanwhile: then nothing happens."""
        if lease_id not in self.lease_ids:
            return
        self._waiting = deque(lease for lease in self._waiting if lease.id != lease_id)
        num_tokens = 0
        if (group := self._playing.get(lease_id)) is not None:
            group.played.cancel()
            for aborted in self._policy.withdraw_lease(
                self._engine, lambda sample_id: parse_lease_id(sample_id) == lease_id
            ):
                self._count_tokens_of(aborted)
            num_tokens = group.progress.num_tokens
            del self._playing[lease_id]
        self._fail_lease(lease_id, num_tokens, "revoked", revoked=True)

    def pause_episodes(self, paused: bool) -> None:
        """Stops the time of the episodes under way, or lets it go on: `paused` while the engine sleeps."""
        self._thread.start_coroutine(self._times.pause() if paused else self._times.resume())

    def close(self) -> None:
        """Ends all episodes, and what runs their code."""
        self._thread.close(self._episodes.close())

    def _count_tokens_of(self, completion: Completion) -> None:
        self._totals.sampled_tokens += len(completion.tokens)
        group = self._playing.get(parse_lease_id(completion.id))
        if group is not None and _is_trained(group.lease, completion.id):
            group.progress.num_tokens += len(completion.tokens)

    def _make_rows(self, group: LeasedGroup) -> list[Trajectory] | None:
        """Returns the rows of a group. Reports the outcome and returns None for an evaluation prompt, which
        becomes no rows, and for a group that could not be played."""
        lease = group.lease
        try:
            played = group.played.result()
        # `SystemExit` of user code included: it fails this group and not the run.
        except (Exception, SystemExit, CancelledError) as error:
            self._report_failure(group, error)
            return None
        if lease.evaluation:
            rows = make_rows(lease, played, self._generator, group.started_at)
            answer = make_answer(self._generator, lease, played, group.digest)
            send_evaluation(self._client, answer, to_batch(rows))
            return None
        rows = make_rows(lease, played, self._generator, group.started_at)
        kept = sum(sum(row.sampled) for row in rows)
        self._totals.discarded_tokens += max(0, group.progress.num_tokens - kept)
        return rows

    def _report_failure(self, group: LeasedGroup, error: BaseException) -> None:
        self._totals.abandoned_scores += isinstance(error, WorkerDied)
        said = log_failure(log, group.lease, error)
        self._fail_lease(group.lease.id, group.progress.num_tokens, said, revoked=self._is_leaving)

    def _fail_lease(self, lease_id: int, num_tokens: int, error: str, *, revoked: bool = False) -> None:
        self._client.send_request(
            m.FailLease(
                generator=self._generator,
                lease=lease_id,
                num_tokens=num_tokens,
                error=error,
                revoked=revoked,
            )
        )


def _is_trained(lease: m.Lease, sample_id: str) -> bool:
    """True for the group's own samples, false for ReMax's greedy one."""
    return parse_lease_id(sample_id) != PROBE_LEASE and parse_sample_index(sample_id) < lease.num_samples
