"""What the learner asks of a training engine. `fsdp` is the real one; Megatron-core fits behind the same protocol.

An engine holds a policy, which says log-probabilities, or a critic, which says values.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from learners.packing import Packed
from sync.stream import Part

LossFn = Callable[[torch.Tensor, torch.Tensor, Packed], torch.Tensor]
"""(logprobs or values [T], entropy [T], microbatch) -> scalar: this microbatch's part of a sum whose denominator is global."""


class Engine(Protocol):
    """One rank of a sharded model with its optimizer. Every method is collective: all ranks call it in step."""

    def infer(self, microbatches: Sequence[Packed]) -> list[torch.Tensor]:
        """[T] float32 log-probability of each token, or value before it, given those before it in its sequence (0 for the first);
        no gradient."""
        ...

    def update(self, microbatches: Sequence[Packed], loss_fn: LossFn, lr: float) -> float:
        """One optimizer step on the sum of `loss_fn` over all microbatches of all ranks; returns the gradient norm."""
        ...

    def weights(self) -> Iterator[Part]:
        """The model by Hugging Face name, in the published dtype, a bucket at a time; on rank 0 (elsewhere nothing comes)."""
        ...

    def save(self, folder: Path) -> None:
        """Writes model, optimizer and RNG state."""
        ...

    def load(self, folder: Path) -> None: ...
