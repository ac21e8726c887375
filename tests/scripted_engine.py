"""An engine and a buffer that follow a script and record what a generator does with them."""

import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from buffers import messages as m
from buffers.client import Answer
from buffers.trajectory import decode_batch
from generators.engine import Completion, Sample
from generators.group import parse_sample_index
from sync.weight_source import WeightSource


class ScriptedEngine:
    """An engine whose `steps` say which samples end, once all `num_samples` have come. A greedy sample has
    100 tokens, the others of a group one, two, ..."""

    def __init__(self, steps: list[list[str]], num_samples: int) -> None:
        self.version: int | None = 0
        self._num_samples = num_samples
        self.steps, self.samples = steps, dict[str, Sample]()
        self.added: list[Sample] = []

    @property
    def has_all_samples(self) -> bool:
        return len(self.added) >= self._num_samples

    def add_sample(self, sample: Sample) -> None:
        self.samples[sample.id] = sample
        self.added.append(sample)

    def step(self) -> list[Completion]:
        ending = self.steps.pop(0) if self.steps and self.has_all_samples else []
        return [self._end_sample(sample, "stop") for sample in ending]

    def abort_samples(self, ids: list[str]) -> list[Completion]:
        return [self._end_sample(sample, "abort") for sample in ids if sample in self.samples]

    def count_sampled_tokens(self) -> dict[str, int]:
        return {sample: self._count_tokens(sample) for sample in self.samples}

    @property
    def num_unfinished(self) -> int:
        return len(self.samples)

    def load_version(self, source: WeightSource) -> None: ...

    def shutdown(self) -> None: ...

    def _count_tokens(self, sample: str) -> int:
        return 100 if self.samples[sample].greedy else 1 + parse_sample_index(sample)

    def _end_sample(self, sample: str, reason: str) -> Completion:
        n = self._count_tokens(sample)
        del self.samples[sample]
        return Completion(
            id=sample, tokens=[1] * n, logprobs=[0.0] * n, versions=[0] * n, finish_reason=reason
        )


class ScriptedBuffer:
    """A buffer's client and a heartbeat in one. It hands out `answers` one at a time and keeps the requests
    that it gets.

    The second answer comes when the engine has been given all its samples, as episodes ask in their own time.
    The last answer comes after each of `expected` has been requested.
    """

    address, silent_s = "nowhere", 0.0
    expected = (m.SubmitEvaluation, m.SubmitGroups, m.FailLease, m.FailLease)

    def __init__(self, answers: list[m.Reply], engine: ScriptedEngine) -> None:
        self.answers, self.requests = answers, list[m.Request]()
        self._engine, self._num_answers = engine, len(answers)
        self.groups: list[list[dict[str, Any]]] = []
        self.progress: list[dict[int, int]] = []

    def receive_answers(self, wait_s: float) -> list[Answer]:
        if len(self.answers) < self._num_answers and not self._engine.has_all_samples:
            time.sleep(0.001)
            return []
        kinds = [type(request) for request in self.requests]
        if len(self.answers) == 1 and any(
            kinds.count(kind) < self.expected.count(kind) for kind in self.expected
        ):
            time.sleep(0.001)
            return []
        return [Answer(0, self.answers.pop(0), [])]

    def send_request(self, request: m.Request, payload: pa.Buffer | None = None) -> int:
        self.requests.append(request)
        if isinstance(request, m.SubmitGroups) and payload is not None:
            self.groups.append(decode_batch(payload).to_pylist())
        return len(self.requests)

    def open_wake_up(self) -> Callable[[], None]:
        return lambda: None

    def set_activity(self, activity: str, moved: bool = True) -> None: ...

    def set_composer(self, compose: Any) -> None:
        self.progress.append(compose.keywords["progress"])

    def take_standings(self) -> list[m.GeneratorStanding]:
        return []

    def close(self) -> None: ...
