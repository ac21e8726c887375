"""The protocol of an inference engine, with its requests and results.

`vllm_engine` and `transformers_engine` are the real engines. `simulated_engine` keeps time like a real one
and computes nothing.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sync.weight_source import WeightSource


class EngineDied(RuntimeError):
    """A process of the engine has died. Nothing more can be sampled, and another process may do better."""


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
    temperature: float | None = None
    """None: that of the engine. Above 0 otherwise."""
    stop_tokens: frozenset[int] = frozenset()
    """Tokens that end this sample, beside the model's own ends."""
    forced: bool = False
    """True for the parity probe: the engine samples exactly `max_tokens` tokens, past the end of sequence
    too, from the whole distribution (no top-p, top-k or min-p)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished sample of n tokens. An aborted sample has the n tokens that it had until then."""

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
    """[prompt + n, layers · k] int16 experts that each token was sent to, -1 for the last token. None where
    the engine does not record them."""


def check_sample(sample: Sample, max_model_len: int, vocabulary: int) -> None:
    """Raises ValueError for a sample that a model cannot take."""
    length = len(sample.prompt)
    if length < 1 or sample.max_tokens < 1 or length + sample.max_tokens > max_model_len:
        raise ValueError(
            "prompt and max_tokens must each be at least 1 token, and together at most "
            f"generators.max_model_len={max_model_len}, got {length} + {sample.max_tokens}"
        )
    if not 0 <= min(sample.prompt) <= max(sample.prompt) < vocabulary:
        found = f"{min(sample.prompt)} .. {max(sample.prompt)}"
        raise ValueError(f"prompt must have token ids in 0 .. {vocabulary - 1}, got {found}")


class Engine(Protocol):
    """Samples for one thread, which adds samples and steps until they are done. Weights change between two
    steps.

    The engine starts without a version: `load_version` must be called once before the first `add_sample`.
    """

    version: int | None
    """Version of the weights that the next step samples from; None before the first `load_version`."""

    def add_sample(self, sample: Sample) -> None: ...

    def abort_samples(self, ids: list[str]) -> list[Completion]:
        """Ends samples at once; returns what each had. Unknown ids are passed over."""
        ...

    def step(self) -> list[Completion]:
        """Runs one decoding step over the running batch; returns the samples that it finished. Raises
        EngineDied, as all methods do that need the engine's processes."""
        ...

    def count_sampled_tokens(self) -> dict[str, int]:
        """Returns the tokens sampled so far by each unfinished sample, by its id."""
        ...

    def read_tokens(self, sample_id: str, start: int) -> list[int]:
        """Returns the tokens of an unfinished sample from place `start` on; none for an unknown id."""
        ...

    @property
    def num_unfinished(self) -> int: ...

    def load_version(self, source: WeightSource) -> None:
        """Loads a version while requests are kept, and verifies that the engine then holds what the
        manifest's digests say.

        Raises FileNotFoundError when the version is gone (a newer one has replaced it), and
        `sync.manifest.DigestMismatch` when it is not what was published: the old version stays in service.
        Raises `sync.manifest.EngineMismatch` when the engine does not hold what it was given: nothing may be
        sampled before a later `load_version` succeeds.
        """
        ...

    def sleep(self, *, keep_weights: bool) -> None:
        """Gives the memory of its GPUs to the learner (`placement.mode=colocated`). Samples are kept; until
        `wake` they may be counted and aborted, and nothing else be asked.

        An engine that loses its weights has no version from then on: `load_version` must succeed after `wake`
        before the next step. With `keep_weights` it loses none. One on a CPU merely is not stepped.
        """
        ...

    def wake(self) -> None:
        """Takes the memory back."""
        ...

    def shutdown(self) -> None: ...
