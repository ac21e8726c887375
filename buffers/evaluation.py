"""Held-out evaluation: prompts given to the same generators, scored, averaged, and kept out of training and ledger."""

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
    rewards: list[float] = field(default_factory=list)
    num_failed: int = 0

    @property
    def done(self) -> bool:
        return len(self.rewards) + self.num_failed == self.num_prompts


def score_of(sweep: Sweep, seconds: float) -> EvaluationRecord:
    """The result of a sweep that is done, `seconds` after the run's first version."""
    std = stdev(sweep.rewards) if len(sweep.rewards) > 1 else 0.0
    mean, number = fmean(sweep.rewards), len(sweep.rewards)
    return EvaluationRecord(version=sweep.version, time=seconds, reward=mean, std=std, num_prompts=number)


@dataclass(slots=True)
class Leased:
    """A prompt that a generator is answering."""

    sweep: Sweep
    index: int
    generator: str
    deadline: float


class Evaluations:
    """Sweeps under way, oldest first. A prompt whose lease fails or expires is asked again, up to `max_attempts`."""

    def __init__(self, task: str, seed: int, lease_s: float, max_attempts: int) -> None:
        self._task, self._seed, self._lease_s, self._max_attempts = task, seed, lease_s, max_attempts
        self._sweeps: deque[Sweep] = deque()
        self._leased: dict[int, Leased] = {}
        self._failures: dict[tuple[int, int], int] = {}  # (version, prompt) -> times

    @property
    def pending(self) -> int:
        """Prompts without an answer."""
        return sum(s.num_prompts - len(s.rewards) - s.num_failed for s in self._sweeps)

    @property
    def num_waiting(self) -> int:
        """Prompts that nobody answers yet."""
        return sum(len(sweep.waiting) for sweep in self._sweeps)

    def unscored(self) -> list[int]:
        """Versions whose evaluation is not done."""
        return [sweep.version for sweep in self._sweeps]

    def request(self, version: int, num_prompts: int) -> None:
        if num_prompts:
            self._sweeps.append(Sweep(version, num_prompts, deque(range(num_prompts))))

    def lease(self, lease_ids: Iterator[int], generator: str, now: float) -> Lease | None:
        for sweep in self._sweeps:
            if sweep.waiting:
                index, lease_id = sweep.waiting.popleft(), next(lease_ids)
                self._leased[lease_id] = Leased(sweep, index, generator, now + self._lease_s)
                return Lease(
                    id=lease_id, split="eval", task=self._task, index=index, seed=self._seed, group=index,
                    due=sweep.version, min_version=sweep.version, num_samples=1,
                )  # fmt: skip
        return None

    def owns(self, lease_id: int) -> bool:
        return lease_id in self._leased

    def holder(self, lease_id: int) -> str:
        """Who is to answer it; empty where nobody is."""
        return self._leased[lease_id].generator if lease_id in self._leased else ""

    def renew(self, lease_id: int, now: float) -> None:
        self._leased[lease_id].deadline = now + self._lease_s

    def submit(self, lease_id: int, reward: float) -> None:
        self._leased.pop(lease_id).sweep.rewards.append(reward)

    def fail(self, lease_id: int) -> None:
        leased = self._leased.pop(lease_id)
        sweep, index = leased.sweep, leased.index
        times = self._failures[sweep.version, index] = self._failures.get((sweep.version, index), 0) + 1
        if times < self._max_attempts:
            sweep.waiting.append(index)
        else:
            sweep.num_failed += 1

    def withdraw(self, version: int) -> None:
        """This version is scored already."""
        self._sweeps = deque(sweep for sweep in self._sweeps if sweep.version != version)

    def clear(self) -> None:
        """Forgets all sweeps. Answers to what is leased of them are taken, and lead to nothing."""
        self._sweeps.clear()

    def expire(self, now: float) -> None:
        for lease_id in [lease_id for lease_id, leased in self._leased.items() if leased.deadline <= now]:
            self.fail(lease_id)

    def release(self, generator: str) -> None:
        """Gives up what an earlier life of `generator` held."""
        for lease_id in [
            lease_id for lease_id, leased in self._leased.items() if leased.generator == generator
        ]:
            self.fail(lease_id)

    def take_done(self) -> list[Sweep]:
        """Finished sweeps, each once."""
        done = [sweep for sweep in self._sweeps if sweep.done]
        self._sweeps = deque(sweep for sweep in self._sweeps if not sweep.done)
        return done
