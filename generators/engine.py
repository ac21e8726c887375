"""What a generator asks of an inference engine. `vllm_engine` is the real one, `simulated_engine` keeps time like one."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sync.snapshot import Snapshot
from sync.transports.nccl import NcclBroadcast


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A request for one sampled sequence."""

    id: str
    prompt: list[int]
    """Token ids, without padding."""
    max_tokens: int
    seed: int
    """The same prompt, seed and weights give the same tokens, whatever else the engine is doing."""
    greedy: bool = False
    forced: bool = False
    """All of `max_tokens` are sampled, whatever comes, from the whole distribution (no top-p, top-k or min-p): for the parity probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished sample of n tokens. An aborted one comes back too, with what it had."""

    id: str
    tokens: list[int]
    """[n] ids; the end-of-sequence token included where the model sampled it."""
    logprobs: list[float]
    """[n] log-probability under the distribution that was sampled from (after temperature)."""
    versions: list[int]
    """[n] version of the weights that sampled each token, as the engine reports it."""
    finish_reason: str
    """`stop`, `length` or `abort`."""
    experts: np.ndarray | None = None
    """[prompt + n, layers · k] int16 experts that each token was sent to, -1 for the last; None where that is not recorded."""


class Engine(Protocol):
    """Driven by one thread: `add` requests, `step` until they are done; weights change between two steps.

    The engine starts without a version: `load` must be called once before the first `add`.
    """

    version: int | None
    """Version of the weights that the next step samples from; None before the first `load`."""

    def add(self, sample: Sample) -> None: ...

    def abort(self, ids: list[str]) -> list[Completion]:
        """Ends samples at once; returns what each had (unknown ids are passed over)."""
        ...

    def step(self) -> list[Completion]:
        """One decoding step over the running batch; returns the samples that it finished."""
        ...

    def progress(self) -> dict[str, int]:
        """Tokens sampled so far by each unfinished sample."""
        ...

    @property
    def num_unfinished(self) -> int: ...

    def load(self, source: Snapshot | NcclBroadcast) -> None:
        """Takes up a version, requests kept, and verifies that what the engine now holds has the manifest's digest.

        Raises FileNotFoundError when it is gone (a newer one has replaced it) and `sync.manifest.DigestMismatch` when it is
        not what was published: the old version stays in service. Raises `sync.manifest.EngineMismatch` when the engine does
        not hold what it was given: nothing may be sampled before a later `load` succeeds.
        """
        ...

    def shutdown(self) -> None: ...
