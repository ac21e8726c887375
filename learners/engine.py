"""What the learner asks of a training engine: `fsdp` (FSDP2), `megatron` (Megatron-core), `simulated`.

An engine holds a policy, which says log-probabilities, or a critic, which says values.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import torch

from learners.checkpoint import StateWriter
from learners.packing import Packed
from sync.stream import TensorPart

LossFn = Callable[[torch.Tensor, torch.Tensor, Packed], torch.Tensor]
"""(logprobs or values [T], entropy [T], microbatch) -> scalar: this microbatch's part of a sum whose denominator is global."""


class ModelKind(StrEnum):
    """What an engine holds."""

    policy = "policy"
    frozen = "frozen"
    """A policy that is never updated: no optimizer, no gradients."""
    critic = "critic"


@dataclass(frozen=True, slots=True)
class Share:
    """The part of every batch that a rank computes. Ranks that divide one model between them (tensor, pipeline or sequence
    parallel) have the same share."""

    index: int = 0
    count: int = 1
    holds_results: bool = True
    """Of the ranks of a share, whose results count: the others' are to be thrown away."""
    pad_multiple: int = 1
    """The engine pads each microbatch to a multiple of so many tokens."""


class Engine(Protocol):
    """One rank of a sharded model with its optimizer. Every method is collective: all ranks call it in step."""

    @property
    def share(self) -> Share: ...

    def infer(self, microbatches: Sequence[Packed]) -> list[torch.Tensor]:
        """[T] float32 log-probability of each sampled token, or value before it, given those before it in its sequence; 0 for other
        tokens and for a sequence's first; no gradient. All of it where `share.holds_results`; elsewhere anything of this shape."""
        ...

    def update(self, microbatches: Sequence[Packed], loss_fn: LossFn, lr: float) -> float:
        """One optimizer step on the sum of `loss_fn` over all microbatches of all shares; returns the gradient norm.

        `loss_fn` is called once a microbatch where the log-probabilities are, which is at least where `share.holds_results`. All shares
        have equally many microbatches. Raises FloatingPointError, and updates nothing, when the gradient is not finite.
        """
        ...

    @property
    def routing_metrics(self) -> dict[str, float]:
        """How evenly the last update's tokens were spread over a mixture's experts, over all ranks (`learners.routing`); empty
        for other models."""
        ...

    def stream_weights(self) -> Iterator[TensorPart]:
        """The model by Hugging Face name, in the published dtype, a bucket at a time; on rank 0 (elsewhere nothing comes)."""
        ...

    def copy_state(self) -> StateWriter:
        """Copies model, optimizer and RNG state; what it returns writes the copy, also from another thread while training goes on:
        of collectives it uses only such groups as nothing else uses. All ranks call it, each once, with the same folder."""
        ...

    def load_state(self, folder: Path) -> None:
        """Takes up what was written there, by as many ranks or by others. Raises what torch raises when it does not fit."""
        ...


class AbsentEngine:
    """In the place of an engine that other ranks hold: says nothing, trains nothing."""

    share = Share(holds_results=False)
    routing_metrics: dict[str, float] = {}

    def infer(self, microbatches: Sequence[Packed]) -> list[torch.Tensor]:
        return [torch.zeros(len(packed.tokens)) for packed in microbatches]

    def update(self, microbatches: Sequence[Packed], loss_fn: LossFn, lr: float) -> float:
        return 0.0

    def stream_weights(self) -> Iterator[TensorPart]:
        return iter(())

    def copy_state(self) -> StateWriter:
        return lambda folder: None

    def load_state(self, folder: Path) -> None:
        pass
