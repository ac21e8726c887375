"""The groups that a generator has leases for, from the lease to the message that hands them in.

    waiting (leased, not begun) ──▶ sampling (in the engine) ──▶ scoring (in the scoring pool)
                                      │                            └─▶ SubmitGroups or SubmitEvaluation
                                      └── on an error, in each state ──▶ FailLease

The buffer may revoke a lease in each of these states. The task is user code: whatever it raises fails its own
group.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable
from functools import partial

from buffers import messages as m
from buffers.client import BufferClient, send_groups
from buffers.run_status import GeneratorReport
from buffers.trajectory import GREEDY, Trajectory, to_batch
from configs.schema import Config
from generators.engine import Completion, Engine, Sample
from generators.episode import Episodes
from generators.group import (
    SampledGroup,
    make_sample_id,
    make_sample_seed,
    make_trajectory,
    parse_lease_id,
    parse_sample_index,
)
from generators.probe import PROBE_LEASE
from generators.score_checks import describe_error
from generators.scoring import ScoringPool, ScoringResult

log = logging.getLogger("slipstream.generator")


class LeasedGroups:
    def __init__(
        self,
        generator: str,
        config: Config,
        client: BufferClient,
        engine: Engine,
        episodes: Episodes,
        totals: GeneratorReport,
    ) -> None:
        """`totals` is where sampled tokens are counted."""
        self._generator, self._client, self._engine, self._episodes = generator, client, engine, episodes
        self._totals = totals
        self._max_tokens = config.sampling.max_tokens
        self._max_sequences = config.generators.max_sequences
        self._makes_baselines = config.algo.needs_greedy_response
        self._samples_per_group = config.learner.samples_per_prompt + self._makes_baselines
        self._waiting: deque[m.Lease] = deque()
        self._sampling: dict[int, SampledGroup] = {}
        """By lease id."""
        self._scoring: dict[int, SampledGroup] = {}
        """By lease id."""
        self._scores = ScoringPool(config.generators.score_threads, config.generators.score_timeout_s)

    @property
    def lease_ids(self) -> frozenset[int]:
        """Ids of all leases that this generator works on or will work on."""
        return frozenset([lease.id for lease in self._waiting] + [*self._sampling, *self._scoring])

    @property
    def is_scoring(self) -> bool:
        return bool(self._scoring)

    @property
    def awaited_version(self) -> int | None:
        """Oldest version that may begin the next lease; None when no lease waits."""
        return self._waiting[0].min_version if self._waiting else None

    @property
    def num_abandoned_scores(self) -> int:
        return self._scores.num_abandoned

    def count_missing_leases(self, num_rollouts: int) -> int:
        """Returns how many more leases fill the engine, which has `num_rollouts` unfinished samples of
        groups. At most 0: it is full.

        Groups that wait for their scores count as well, beyond one engine's worth of samples. So a generator
        whose scoring cannot keep up does not pile up groups.
        """
        backlog = max(0, len(self._scoring) * self._samples_per_group - self._max_sequences)
        num_used = num_rollouts + len(self._waiting) * self._samples_per_group + backlog
        return (self._max_sequences - num_used) // self._samples_per_group

    def count_tokens(self) -> dict[int, int]:
        """Returns the tokens sampled so far, by lease id."""
        counts = {lease.id: 0 for lease in self._waiting}
        for lease_id, group in (self._sampling | self._scoring).items():
            counts[lease_id] = group.count_tokens(group.completions.values())
        for sample_id, num_tokens in self._engine.count_sampled_tokens().items():
            lease_id = parse_lease_id(sample_id)
            if lease_id != PROBE_LEASE and self._sampling[lease_id].is_trained(sample_id):
                counts[lease_id] += num_tokens
        return counts

    def add_leases(self, leases: Iterable[m.Lease]) -> None:
        self._waiting.extend(leases)

    def begin_groups(self, held_version: int) -> None:
        """Begins leases in order, as far as `held_version`, the engine's, is at or above their floor."""
        while self._waiting and self._waiting[0].min_version <= held_version:
            self._begin_group(self._waiting.popleft())

    def take_completion(self, completion: Completion) -> None:
        """Takes a finished sample. The last one of a group starts its scoring."""
        self._totals.sampled_tokens += len(completion.tokens)
        group = self._sampling[parse_lease_id(completion.id)]
        group.completions[parse_sample_index(completion.id)] = completion
        if len(group.completions) == self._count_samples(group.lease):
            self._start_scoring(group)

    def submit_scored_groups(self, wait_s: float) -> None:
        """Hands in all groups that have been scored, in one message; waits up to `wait_s` for the first."""
        rows_by_lease: dict[int, list[Trajectory]] = {}
        for result in self._scores.collect_results(wait_s):
            rows = self._make_rows(self._scoring.pop(result.lease), result)
            if rows is not None:
                rows_by_lease[result.lease] = rows
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
        self._scores.forget_group(lease_id)
        group = self._sampling.pop(lease_id, None) or self._scoring.pop(lease_id, None)
        num_tokens = 0
        if group is not None:
            indices = range(self._count_samples(group.lease))
            unfinished = [
                make_sample_id(lease_id, index) for index in indices if index not in group.completions
            ]
            aborted = self._engine.abort_samples(unfinished)
            self._totals.sampled_tokens += sum(len(completion.tokens) for completion in aborted)
            num_tokens = group.count_tokens([*aborted, *group.completions.values()])
        self._client.send_request(
            m.FailLease(
                generator=self._generator,
                lease=lease_id,
                num_tokens=num_tokens,
                error="revoked",
                revoked=True,
            )
        )

    def close(self) -> None:
        """Lets go of the scores that are under way, without waiting for them."""
        self._scores.close()

    def _count_samples(self, lease: m.Lease) -> int:
        """Returns the samples to be made for a lease: a group's, and for ReMax a greedy one after them. The
        greedy sample is scored and not trained. Like evaluation, it stands outside the ledger."""
        return lease.num_samples + (self._makes_baselines and lease.split == "train")

    def _begin_group(self, lease: m.Lease) -> None:
        """Puts all samples of a lease into the engine, or none of them: then the group has failed."""
        try:
            encoded = self._episodes.encode_prompt(lease)
        # The task is user code. Whatever it raises, `SystemExit` included, fails this group and not the run.
        except BaseException as error:
            self._report_failure(lease, 0, "begun", describe_error(error), error)
            return
        sample_ids = [make_sample_id(lease.id, index) for index in range(self._count_samples(lease))]
        try:
            samples = [
                Sample(
                    id=sample_id,
                    prompt=encoded.tokens,
                    max_tokens=self._max_tokens,
                    seed=make_sample_seed(lease.seed, lease.split, lease.group, index),
                    greedy=index == lease.num_samples,
                )
                for index, sample_id in enumerate(sample_ids)
            ]
            for sample in samples:
                self._engine.add_sample(sample)
        # An engine refuses a prompt that is too long, for example.
        except Exception as error:
            self._engine.abort_samples(sample_ids)
            self._report_failure(lease, 0, "begun", describe_error(error), error)
            return
        self._sampling[lease.id] = SampledGroup(lease, encoded, time.time())

    def _start_scoring(self, group: SampledGroup) -> None:
        """Gives a whole group to the scoring pool. The engine goes on meanwhile."""
        lease = group.lease
        self._scoring[lease.id] = self._sampling.pop(lease.id)
        calls = [
            partial(self._episodes.score_tokens, group.prompt, completion.tokens)
            for completion in group.list_completions()
        ]
        self._scores.submit_group(lease.id, calls, _name_prompt(lease))

    def _make_rows(self, group: SampledGroup, result: ScoringResult) -> list[Trajectory] | None:
        """Returns the rows of a scored group. Reports the outcome and returns None for an evaluation prompt,
        which becomes no rows, and for a group that could not be scored."""
        lease, scores, completions = group.lease, result.scores, group.list_completions()
        if result.error is not None:
            num_tokens = group.count_tokens(completions)
            self._report_failure(lease, num_tokens, "scored", result.error, result.raised)
            return None
        if lease.split == "eval":
            reward = scores[0].reward
            self._client.send_request(
                m.SubmitEvaluation(generator=self._generator, lease=lease.id, reward=reward)
            )
            return None
        baseline = {GREEDY: scores[-1].reward} if len(scores) > lease.num_samples else {}
        return [
            make_trajectory(group, index, completions[index], scores[index], baseline, self._generator)
            for index in range(lease.num_samples)
        ]

    def _report_failure(
        self, lease: m.Lease, num_tokens: int, undone: str, error: str, raised: BaseException | None
    ) -> None:
        """`undone` says what could not be done with the prompt: `begun` or `scored`."""
        log.error("%s could not be %s: %s", _name_prompt(lease), undone, error, exc_info=raised)
        self._client.send_request(
            m.FailLease(generator=self._generator, lease=lease.id, num_tokens=num_tokens, error=error)
        )


def _name_prompt(lease: m.Lease) -> str:
    return f"prompt {lease.index} of task {lease.task}"
