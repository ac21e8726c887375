"""Held-out evaluation: prompts that the same generators answer, scored, averaged, and kept out of training
and ledger."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean, stdev

from buffers.messages import Lease
from buffers.run_status import EvaluationRecord


@dataclass(slots=True)
class Sweep:
    """One evaluation of one version."""

    version: int
    num_prompts: int
    waiting: deque[int]
    """Indices of the prompts that nobody answers at present."""
    rewards: list[float] = field(default_factory=list)
    num_failed: int = 0
    """Prompts that have failed `buffer.max_attempts` times."""

    @property
    def num_unanswered(self) -> int:
        return self.num_prompts - len(self.rewards) - self.num_failed

    def make_record(self, elapsed_s: float) -> EvaluationRecord:
        """Returns the result of a finished sweep, `elapsed_s` seconds after the run's first version."""
        return EvaluationRecord(
            version=self.version,
            time=elapsed_s,
            reward=fmean(self.rewards),
            std=stdev(self.rewards) if len(self.rewards) > 1 else 0.0,
            num_prompts=len(self.rewards),
        )


@dataclass(slots=True)
class PromptLease:
    """A held-out prompt that a generator answers at present."""

    sweep: Sweep
    index: int
    """Index of the prompt among the held-out ones."""
    generator: str
    deadline: float
    """When the lease expires, in seconds on the buffer's clock."""


class Evaluations:
    """Sweeps under way, oldest first.

    A prompt whose lease fails or expires is asked again, up to `max_attempts` times.
    """

    def __init__(self, task: str, seed: int, lease_s: float, max_attempts: int) -> None:
        self._task, self._seed, self._lease_s, self._max_attempts = task, seed, lease_s, max_attempts
        self._sweeps: deque[Sweep] = deque()
        self._leases: dict[int, PromptLease] = {}
        self._failures: dict[tuple[int, int], int] = {}
        """Number of failures by (version, prompt)."""
        self.records: list[EvaluationRecord] = []
        """Results of the versions that were evaluated in this life of the buffer."""

    @property
    def num_unanswered(self) -> int:
        """Number of held-out prompts without an answer."""
        return sum(sweep.num_unanswered for sweep in self._sweeps)

    @property
    def num_waiting(self) -> int:
        """Number of held-out prompts that nobody answers at present."""
        return sum(len(sweep.waiting) for sweep in self._sweeps)

    def list_unfinished(self) -> list[int]:
        """Returns the versions whose evaluation is not finished."""
        return [sweep.version for sweep in self._sweeps]

    def request_sweep(self, version: int, num_prompts: int) -> None:
        if num_prompts:
            self._sweeps.append(Sweep(version, num_prompts, deque(range(num_prompts))))

    # ---- leases of prompts

    def lease_next(self, lease_ids: Iterator[int], generator: str, now: float) -> Lease | None:
        """Leases the next prompt of the oldest sweep; None when no prompt waits."""
        sweep = next((sweep for sweep in self._sweeps if sweep.waiting), None)
        if sweep is None:
            return None
        index, lease_id = sweep.waiting.popleft(), next(lease_ids)
        self._leases[lease_id] = PromptLease(sweep, index, generator, now + self._lease_s)
        return Lease(
            id=lease_id,
            split="eval",
            task=self._task,
            index=index,
            seed=self._seed,
            group=index,
            due=sweep.version,
            min_version=sweep.version,
            num_samples=1,
        )

    def has_lease(self, lease_id: int) -> bool:
        return lease_id in self._leases

    def find_holder(self, lease_id: int) -> str:
        """Returns the generator that is to answer; empty where no prompt has this lease."""
        return self._leases[lease_id].generator if lease_id in self._leases else ""

    def renew_lease(self, lease_id: int, now: float) -> None:
        self._leases[lease_id].deadline = now + self._lease_s

    def submit_reward(self, lease_id: int, reward: float) -> None:
        self._leases.pop(lease_id).sweep.rewards.append(reward)

    def fail_lease(self, lease_id: int) -> None:
        lease = self._leases.pop(lease_id)
        sweep, index = lease.sweep, lease.index
        times = self._failures[sweep.version, index] = self._failures.get((sweep.version, index), 0) + 1
        if times < self._max_attempts:
            sweep.waiting.append(index)
        else:
            sweep.num_failed += 1

    def expire_leases(self, now: float) -> None:
        for lease_id in [lease_id for lease_id, lease in self._leases.items() if lease.deadline <= now]:
            self.fail_lease(lease_id)

    def release_generator(self, generator: str) -> None:
        """Takes back what an earlier life of `generator` held."""
        held = [lease_id for lease_id, lease in self._leases.items() if lease.generator == generator]
        for lease_id in held:
            self.fail_lease(lease_id)

    # ---- ends of sweeps

    def finish_sweeps(self, elapsed_s: float) -> list[EvaluationRecord]:
        """Ends the sweeps that have all answers, and returns their results. A sweep without a reward has
        none.

        `elapsed_s`: seconds since the run's first version.
        """
        done = [sweep for sweep in self._sweeps if not sweep.num_unanswered]
        self._sweeps = deque(sweep for sweep in self._sweeps if sweep.num_unanswered)
        records = [sweep.make_record(elapsed_s) for sweep in done if sweep.rewards]
        self.records += records
        return records

    def withdraw_version(self, version: int) -> None:
        """Drops the sweep of a version that is evaluated already."""
        self._sweeps = deque(sweep for sweep in self._sweeps if sweep.version != version)

    def drop_sweeps(self) -> None:
        """Drops all sweeps. Answers to prompts that are leased for them are taken, and lead to nothing."""
        self._sweeps.clear()

    def rewind_to(self, step: int) -> None:
        """The learner goes on from version `step`, which it will publish again: later results count no
        more."""
        self.drop_sweeps()
        self.records = [record for record in self.records if record.version < step]
