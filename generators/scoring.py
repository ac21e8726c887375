"""Scoring beside the engine's loop: user code that is slow, hangs, raises or exits costs its own group and nothing else.

    submit(lease, calls) ─▶ queue ─▶ a thread: score after score, each within the deadline ─▶ collect()
                                       └── past it ─▶ the group fails; its thread is abandoned, and another takes its place

A thread cannot be killed, so one that hangs stays until the process ends. They are daemons: none holds up that end.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from buffers.message_fields import MAX_FLOAT32
from buffers.trajectory import GREEDY
from generators.task import Score

MAX_HANGING = 32
"""Threads that hang, at which the generator ends: their memory and whatever they hold is lost until then. One that was only late
hangs no more."""
MAX_COMPONENTS = 64
MAX_NAME = 200
MAX_ERROR = 2000
"""Characters of an error that travel."""


class ScoresHang(ValueError):
    """So many scores hang that the task is at fault."""


@dataclass(slots=True, eq=False)
class Scored:
    """What has become of a group: scores, or an error."""

    lease: int
    scores: list[Score]
    error: str | None = None
    raised: BaseException | None = None


@dataclass(slots=True, eq=False)
class Job:
    lease: int
    calls: Sequence[Callable[[], Score]]
    """One for each sample of the group."""
    what: str
    scores: list[Score] = field(default_factory=list)
    began_at: float = 0.0
    """When the call under way began."""
    unwanted: bool = False
    """Nobody waits for it any more: its thread has been abandoned, or the lease is gone."""
    abandoned: bool = False


class ScoringPool:
    """`submit`, `collect` and `forget` are for one thread, the engine's loop."""

    def __init__(
        self, num_threads: int, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`timeout_s`: how long one call may take, from the moment that a thread begins it."""
        self._timeout_s, self._clock = timeout_s, clock
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of jobs' states, `_running`, `_done` and `_num_hanging`
        self._running: set[Job] = set()
        self._done: list[Scored] = []
        self._is_done = threading.Event()  # there is something in `_done`
        self._jobs: dict[int, Job] = {}
        self.num_abandoned = self._num_hanging = 0
        self._num_threads = num_threads
        for _ in range(num_threads):
            self._start_thread()

    def submit(self, lease: int, calls: Sequence[Callable[[], Score]], what: str) -> None:
        """`calls` score the samples of the lease's group, one each; they run in a thread, one after the other. `what` names
        the group in errors."""
        self._jobs[lease] = Job(lease, calls, what)
        self._queue.put(self._jobs[lease])

    def forget(self, lease: int) -> None:
        """Nobody wants the group any more."""
        if (job := self._jobs.pop(lease, None)) is not None:
            job.unwanted = True  # a call under way is still watched: see `collect`

    def collect(self, wait_s: float = 0.0) -> list[Scored]:
        """Groups that are done; waits up to `wait_s` for the first. Those past the deadline have failed, with a TimeoutError.

        Raises ScoresHang when more than `MAX_HANGING` threads hang.
        """
        if wait_s > 0:
            self._is_done.wait(wait_s)
        now, late = self._clock(), []
        with self._lock:
            done, self._done = self._done, []
            self._is_done.clear()
            for job in [job for job in self._running if now - job.began_at > self._timeout_s]:
                self._running.discard(job)
                job.abandoned = True
                self._num_hanging += 1
                late.append(job)
            num_hanging = self._num_hanging
        for job in late:
            self.num_abandoned += 1
            error = TimeoutError(
                f"a score must take at most {self._timeout_s:g} s (generators.score_timeout_s), got {now - job.began_at:.1f} s "
                f"without an end for sample {len(job.scores)} of {job.what}"
            )
            done.append(Scored(job.lease, [], describe(error), error))
            if num_hanging > MAX_HANGING:
                raise ScoresHang(
                    f"at most {MAX_HANGING} scores of a generator may hang at a time, got one more: {error}"
                )
            self._start_thread()
        return [scored for scored in done if self._jobs.pop(scored.lease, None) is not None]

    def close(self) -> None:
        """Does not wait: what is under way is let go."""
        for job in self._jobs.values():
            job.unwanted = True
        self._jobs.clear()
        for _ in range(self._num_threads):
            self._queue.put(None)

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, daemon=True, name="score").start()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            self._score(job)
            if job.abandoned:
                with self._lock:
                    self._num_hanging -= 1  # it has ended after all
                return

    def _score(self, job: Job) -> None:
        scored = Scored(job.lease, job.scores)
        try:
            for call in job.calls:
                with self._lock:
                    if job.unwanted or job.abandoned:
                        break
                    job.began_at = self._clock()
                    self._running.add(job)
                job.scores.append(checked(call()))
        except BaseException as raised:  # user code may exit, or interrupt: in a thread that ends nothing
            scored.error, scored.raised = describe(raised), raised
        with self._lock:
            self._running.discard(job)
            if not job.abandoned:
                self._done.append(scored)
                self._is_done.set()


def checked(score: Any) -> Score:
    """The score in plain floats. Raises ValueError for what a trajectory cannot hold."""
    if not isinstance(score, Score):
        raise ValueError(f"score must be a generators.task.Score, got {_shown(score)}")
    parts = score.components
    if not isinstance(parts, Mapping):
        raise ValueError(f"components must be a dict of numbers by name, got {_shown(parts)}")
    if len(parts) > MAX_COMPONENTS:
        raise ValueError(f"components must be at most {MAX_COMPONENTS}, got {len(parts)}")
    for name in parts:
        if not isinstance(name, str) or len(name) > MAX_NAME or name == GREEDY or not _is_text(name):
            raise ValueError(
                f"names of components must be text of at most {MAX_NAME} characters other than {GREEDY!r}, got {_shown(name)}"
            )
    components = {name: _number(f"components[{name!r}]", value) for name, value in parts.items()}
    return Score(_number("reward", score.reward), components)


def _number(what: str, value: Any) -> float:
    """Anything that says of itself that it is one number: of Python, numpy or torch."""
    if isinstance(value, str | bytes | bytearray) or not (
        hasattr(value, "__float__") or hasattr(value, "__index__")
    ):
        raise ValueError(f"{what} must be a number, got {_shown(value)}")
    try:
        number = float(value)
    except OverflowError:  # an integer of more than 300 digits
        number = MAX_FLOAT32 * 2
    except Exception as error:
        raise ValueError(f"{what} must be a number, got {_shown(value)} ({describe(error)})") from error
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite, got {number}")
    if abs(number) > MAX_FLOAT32:
        raise ValueError(f"{what} must be within ± 3.4e38 (it is kept in float32), got {_shown(value)}")
    return number


def _shown(value: Any) -> str:
    """A value as an error shows it, whatever its own `repr` does."""
    try:
        text = repr(value)
    except Exception:
        text = object.__repr__(value)
    return text if len(text) <= 200 else f"{text[:200]}… ({type(value).__name__})"


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def describe(error: BaseException) -> str:
    """An error in words that can travel: at most `MAX_ERROR` characters, whatever its own `str` does."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = f"{type(error).__name__} (its text cannot be shown)"
    return text[:MAX_ERROR].encode(errors="replace").decode()
