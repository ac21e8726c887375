"""Scoring beside the engine's loop: user code that hangs, raises or exits costs its own group only.

    submit_group(lease, calls) ─▶ queue ─▶ a thread: score after score, each within the deadline
                                             ├─▶ all scored ─▶ collect_results()
                                             └─▶ one past the deadline ─▶ the group fails, the thread is
                                                 abandoned, and another takes its place

A thread cannot be killed, so one that hangs stays until the process ends. The threads are daemons, so none of
them holds up that end.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from generators.score_checks import check_score, describe_error
from generators.task import Score

MAX_HANGING = 32
"""Hanging threads that a generator bears; with one more it ends. Their memory, and whatever they hold, is
lost until then. A thread that was only late does not count any more once it has come back."""


class TooManyScoresHang(ValueError):
    """More scores hang than `MAX_HANGING`, so the task is at fault."""


@dataclass(slots=True, eq=False)
class ScoringResult:
    """The scores of a group, or the error that has failed it."""

    lease: int
    scores: list[Score]
    error: str | None = None
    raised: BaseException | None = None


@dataclass(slots=True, eq=False)
class ScoringJob:
    """A group to be scored, by one thread."""

    lease: int
    calls: Sequence[Callable[[], Score]]
    """One for each sample of the group."""
    what: str
    """Names the group in errors."""
    scores: list[Score] = field(default_factory=list)
    began_at: float = 0.0
    """Time of the pool's clock at which the call under way began."""
    is_unwanted: bool = False
    """True when nobody waits for the result: the lease is gone, or the pool is closed."""
    is_abandoned: bool = False
    """True when a call of it has missed the deadline: its group has failed, and its thread ends as soon as
    the call does."""


class ScoringPool:
    """Threads that score groups. Its methods are for one thread, the engine's loop."""

    def __init__(
        self, num_threads: int, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`timeout_s`: how long one call may take, from the moment that a thread begins it."""
        self._timeout_s, self._clock = timeout_s, clock
        self._queue: queue.SimpleQueue[ScoringJob | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """Guards the jobs' states, `_running`, `_results` and `_num_hanging`."""
        self._running: set[ScoringJob] = set()
        self._results: list[ScoringResult] = []
        self._has_results = threading.Event()
        self._jobs: dict[int, ScoringJob] = {}
        """By lease id: the groups whose results are wanted."""
        self.num_abandoned = self._num_hanging = 0
        self._num_threads = num_threads
        for _ in range(num_threads):
            self._start_thread()

    def submit_group(self, lease: int, calls: Sequence[Callable[[], Score]], what: str) -> None:
        """Queues a group. `calls` score its samples, one each, and run in one thread, one after the other.
        `what` names the group in errors."""
        self._jobs[lease] = ScoringJob(lease, calls, what)
        self._queue.put(self._jobs[lease])

    def forget_group(self, lease: int) -> None:
        """Drops a group: its result is not returned, and no further sample of it is scored."""
        if (job := self._jobs.pop(lease, None)) is not None:
            # A call of it that is under way stays in `_running`, so `collect_results` still notices when it
            # hangs.
            job.is_unwanted = True

    def collect_results(self, wait_s: float = 0.0) -> list[ScoringResult]:
        """Returns the groups that are done; waits up to `wait_s` for the first. A group past the deadline has
        failed, with a TimeoutError.

        Raises TooManyScoresHang when more than `MAX_HANGING` threads hang.
        """
        if wait_s > 0:
            self._has_results.wait(wait_s)
        now, late_jobs = self._clock(), []
        with self._lock:
            results, self._results = self._results, []
            self._has_results.clear()
            for job in [job for job in self._running if now - job.began_at > self._timeout_s]:
                self._running.discard(job)
                job.is_abandoned = True
                self._num_hanging += 1
                late_jobs.append(job)
            num_hanging = self._num_hanging
        for job in late_jobs:
            self.num_abandoned += 1
            error = TimeoutError(
                f"a score must take at most {self._timeout_s:g} s (generators.score_timeout_s), got "
                f"{now - job.began_at:.1f} s without an end for sample {len(job.scores)} of {job.what}"
            )
            results.append(ScoringResult(job.lease, [], describe_error(error), error))
            if num_hanging > MAX_HANGING:
                raise TooManyScoresHang(
                    f"at most {MAX_HANGING} scores of a generator may hang at a time, got one more: {error}"
                )
            self._start_thread()
        return [result for result in results if self._jobs.pop(result.lease, None) is not None]

    def close(self) -> None:
        """Tells the threads to end, and does not wait for calls under way."""
        for job in self._jobs.values():
            job.is_unwanted = True
        self._jobs.clear()
        for _ in range(self._num_threads):
            self._queue.put(None)

    def _start_thread(self) -> None:
        threading.Thread(target=self._run_jobs, daemon=True, name="score").start()

    def _run_jobs(self) -> None:
        while (job := self._queue.get()) is not None:
            self._run_job(job)
            if job.is_abandoned:
                # The call has ended after all. Another thread has this one's place, so this one ends.
                with self._lock:
                    self._num_hanging -= 1
                return

    def _run_job(self, job: ScoringJob) -> None:
        result = ScoringResult(job.lease, job.scores)
        try:
            for call in job.calls:
                with self._lock:
                    if job.is_unwanted or job.is_abandoned:
                        break
                    job.began_at = self._clock()
                    self._running.add(job)
                job.scores.append(check_score(call()))
        # User code may raise `SystemExit` or `KeyboardInterrupt`, which end nothing when they are raised in a
        # thread.
        except BaseException as raised:
            result.error, result.raised = describe_error(raised), raised
        with self._lock:
            self._running.discard(job)
            if not job.is_abandoned:
                self._results.append(result)
                self._has_results.set()
