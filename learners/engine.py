"""The protocol between the learner and a training engine: `fsdp` (FSDP2), `megatron` (Megatron-core),
`simulated`.

An engine holds a policy, which gives log-probabilities, or a critic, which gives values.
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
"""(logprobs or values [T], entropy [T], microbatch) -> scalar: this microbatch's part of a sum whose
denominator is global."""


class ModelKind(StrEnum):
    """The kinds of model that an engine can hold."""

    policy = "policy"
    frozen = "frozen"
    """A policy that is never updated: no optimizer, no gradients."""
    critic = "critic"


@dataclass(frozen=True, slots=True)
class Share:
    """The part of every batch that a rank computes.

    Ranks that divide one model between them (tensor, pipeline or sequence parallel) have the same share.
    """

    index: int = 0
    count: int = 1
    holds_results: bool = True
    """True on the one rank of a share whose results are used; the results of its other ranks are thrown
    away."""
    pad_multiple: int = 1
    """The engine pads each microbatch to a multiple of this many tokens."""


class Engine(Protocol):
    """One rank of a sharded model with its optimizer.

    Every method is collective: all ranks call it in step.
    """

    @property
    def share(self) -> Share: ...

    def infer(self, microbatches: Sequence[Packed]) -> list[torch.Tensor]:
        """Returns for each microbatch [T] float32, without gradient.

        A policy gives the log-probability of each sampled token, a critic the value before it, given the
        tokens before it in its sequence; other tokens, and the first of a sequence, get 0. The numbers count
        where `share.holds_results`; other ranks return anything of this shape.
        """
        ...

    def update(self, microbatches: Sequence[Packed], loss_fn: LossFn, lr: float) -> float:
        """Makes one optimizer step on the sum of `loss_fn` over all microbatches of all shares; returns the
        gradient norm.

        The engine calls `loss_fn` once for each microbatch on the ranks that have the log-probabilities,
        which are at least those with `share.holds_results`. All shares have equally many microbatches. Raises
        FloatingPointError, and updates nothing, when the gradient is not finite.
        """
        ...

    @property
    def routing_metrics(self) -> dict[str, float]:
        """How evenly the last update spread its tokens over a mixture's experts, over all ranks
        (`learners.routing`).

        Empty for other models.
        """
        ...

    def stream_weights(self) -> Iterator[TensorPart]:
        """Yields this rank's rows of the model by Hugging Face name, in the published dtype, a bucket at a
        time. Collective. The ranks together yield every element once."""
        ...

    def copy_state(self) -> StateWriter:
        """Copies model, optimizer and random state; returns the function that writes the copy.

        All ranks call that function once, with the same folder. Another thread may call it while training
        goes on, so its collectives use process groups that nothing else uses.
        """
        ...

    def load_state(self, folder: Path) -> None:
        """Loads a copy that as many ranks wrote, or more, or fewer. A frozen engine loads the model alone.

        Raises ValueError when it does not fit the model.
        """
        ...

    def offload(self) -> None:
        """Moves what this rank has on its GPU (parameters, gradients, optimizer) to the host's memory, for
        the engines that share the GPU (`learners.device_memory`). Nothing but `onload` may be called then.

        Not collective. Does nothing where the model is in the host's memory.
        """
        ...

    def onload(self) -> None:
        """Moves all of it back, bit for bit. Not collective."""
        ...


class AbsentEngine:
    """Stands in the place of an engine that other ranks hold: gives zeros, trains nothing."""

    share = Share(holds_results=False)
    routing_metrics: dict[str, float] = {}

    def infer(self, microbatches: Sequence[Packed]) -> list[torch.Tensor]:
        return [torch.zeros(len(packed.tokens)) for packed in microbatches]

    def update(self, microbatches: Sequence[Packed], loss_fn: LossFn, lr: float) -> float:
        return 0.0

    def stream_weights(self) -> Iterator[TensorPart]:
        return iter(())

    def copy_state(self) -> StateWriter:
        return lambda folder: []

    def load_state(self, folder: Path) -> None:
        pass

    def offload(self) -> None: ...

    def onload(self) -> None: ...
