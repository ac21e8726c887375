"""The simulated engine keeps time like a real one and computes nothing. Benchmarks of overlap use it."""

import heapq
import math
import random
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from generators.engine import Completion, Sample
from sync.weight_source import WeightSource

TOKEN = 1
"""Id of every simulated token."""


@dataclass(slots=True, order=True)
class DecodingSample:
    """A sample in a slot. Its token i, counted from 1, is decoded at `started_at + i / rate`."""

    ends_at: float
    order: int
    sample: Sample = field(compare=False)
    num_tokens: int = field(compare=False)
    started_at: float = field(compare=False)


class SimulatedEngine:
    """An `Engine` in real time: `slots` samples decode side by side at `tokens_per_s` each, and others queue.

    Time is kept exactly. A sample ends num_tokens / tokens_per_s after it got its slot, and its slot passes
    to the next sample at that very moment, however late the caller asks. Lengths are lognormal with mean
    `mean_tokens` and coefficient of variation `cv`, cut at 8 × the mean and at the sample's `max_tokens`.
    They are drawn from the sample's seed. Every log-probability is 0.
    """

    def __init__(
        self,
        *,
        tokens_per_s: float,
        slots: int,
        mean_tokens: float,
        cv: float,
        patience_s: float = 0.005,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`patience_s`: the longest that a step sleeps, so that the caller comes back to weights and
        leases."""
        self.version: int | None = None
        self._rate, self._slots, self._patience_s = tokens_per_s, slots, patience_s
        self._sigma = math.sqrt(math.log1p(cv**2))
        self._mean_tokens = mean_tokens
        self._clock, self._sleep = clock, sleep
        self._decoding: list[DecodingSample] = []
        """A heap: the sample that ends first is first."""
        self._waiting: deque[Sample] = deque()
        self._ended: list[Completion] = []
        """Samples that have ended and that `step` has not returned yet."""
        self._loaded_at: list[float] = []
        self._versions: list[int] = []
        """Every version that was loaded, in step with the times in `_loaded_at`."""
        self._order = 0
        self._slept_s = 0.0
        """Seconds by which the engine's time is behind: it stands still while the engine sleeps."""
        self._asleep_at: float | None = None

    def add_sample(self, sample: Sample) -> None:
        assert self.version is not None, "load_version must be called before the first sample"
        now = self._advance_to_now()
        self._waiting.append(sample)
        self._fill_slots(now)

    def abort_samples(self, ids: list[str]) -> list[Completion]:
        now, unwanted = self._advance_to_now(), set(ids)
        running = [decoding for decoding in self._decoding if decoding.sample.id in unwanted]
        aborted = [
            self._end_sample(decoding, self._count_decoded(decoding, now), "abort") for decoding in running
        ]
        aborted += [
            _make_completion(sample, [], "abort") for sample in self._waiting if sample.id in unwanted
        ]
        aborted += [completion for completion in self._ended if completion.id in unwanted]
        self._ended = [completion for completion in self._ended if completion.id not in unwanted]
        self._decoding = [d for d in self._decoding if d.sample.id not in unwanted]
        heapq.heapify(self._decoding)
        self._waiting = deque(sample for sample in self._waiting if sample.id not in unwanted)
        self._fill_slots(now)
        return aborted

    def step(self) -> list[Completion]:
        """Sleeps until the next sample ends, or for `patience_s`. Returns the samples that have ended."""
        now = self._advance_to_now()
        if not self._ended and self._decoding:
            self._sleep(min(self._patience_s, self._decoding[0].ends_at - now))
            self._advance_to_now()
        ended, self._ended = self._ended, []
        return ended

    def count_sampled_tokens(self) -> dict[str, int]:
        now = self._advance_to_now()
        counts = {completion.id: len(completion.tokens) for completion in self._ended}
        counts |= {d.sample.id: self._count_decoded(d, now) for d in self._decoding}
        return counts | {sample.id: 0 for sample in self._waiting}

    def read_tokens(self, sample_id: str, start: int) -> list[int]:
        return [TOKEN] * max(0, self.count_sampled_tokens().get(sample_id, 0) - start)

    @property
    def num_unfinished(self) -> int:
        return len(self._ended) + len(self._decoding) + len(self._waiting)

    def load_version(self, source: WeightSource) -> None:
        """Marks tokens that are decoded from now on with its version. The file is not read."""
        self._loaded_at.append(self._advance_to_now())
        self.version = source.manifest.version
        self._versions.append(self.version)

    def sleep(self, *, keep_weights: bool) -> None:
        self._asleep_at = self._advance_to_now()

    def wake(self) -> None:
        assert self._asleep_at is not None, "it sleeps"
        slept, self._asleep_at = self._asleep_at, None
        self._slept_s += self._read_time() - slept

    def shutdown(self) -> None: ...

    def _advance_to_now(self) -> float:
        """Ends the samples whose time has come and gives their slots to others. Returns the present time."""
        now = self._read_time()
        while self._decoding and self._decoding[0].ends_at <= now:
            first = heapq.heappop(self._decoding)
            self._ended.append(self._end_sample(first, first.num_tokens, self._choose_finish_reason(first)))
            self._fill_slots(first.ends_at)
        return now

    def _read_time(self) -> float:
        return (self._clock() - self._slept_s) if self._asleep_at is None else self._asleep_at

    def _fill_slots(self, now: float) -> None:
        """Gives free slots to waiting samples."""
        while self._waiting and len(self._decoding) < self._slots:
            sample = self._waiting.popleft()
            num_tokens = min(self._draw_length(sample), sample.max_tokens)
            ends_at = now + num_tokens / self._rate
            heapq.heappush(self._decoding, DecodingSample(ends_at, self._order, sample, num_tokens, now))
            self._order += 1

    def _draw_length(self, sample: Sample) -> int:
        mu = math.log(self._mean_tokens) - self._sigma**2 / 2
        length = random.Random(sample.seed).lognormvariate(mu, self._sigma)
        return max(1, round(min(length, 8 * self._mean_tokens)))

    def _choose_finish_reason(self, decoding: DecodingSample) -> str:
        return "length" if self._draw_length(decoding.sample) > decoding.sample.max_tokens else "stop"

    def _count_decoded(self, decoding: DecodingSample, now: float) -> int:
        return min(decoding.num_tokens, int((now - decoding.started_at) * self._rate))

    def _end_sample(self, decoding: DecodingSample, num_tokens: int, finish_reason: str) -> Completion:
        times = [decoding.started_at + i / self._rate for i in range(1, num_tokens + 1)]
        # A token that is decoded at the very moment of an update still belongs to the old version.
        versions = [self._versions[bisect_left(self._loaded_at, t) - 1] for t in times]
        return _make_completion(decoding.sample, versions, finish_reason)


def _make_completion(sample: Sample, versions: list[int], finish_reason: str) -> Completion:
    """Returns a completion with one token for each of `versions`."""
    count = len(versions)
    return Completion(
        id=sample.id,
        tokens=[TOKEN] * count,
        logprobs=[0.0] * count,
        versions=versions,
        finish_reason=finish_reason,
    )
