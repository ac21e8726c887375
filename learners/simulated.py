"""A simulated training engine, for benchmarks of overlap: it takes as long as training would, uses no CPU and
learns nothing."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from learners.checkpoint import StateWriter
from learners.engine import LossFn, Share
from learners.packing import Packed
from sync.stream import TensorPart


class SimulatedTrainingEngine:
    """Implements `learners.engine.Engine`. One update of n sampled tokens lasts n / tokens_per_s seconds."""

    share = Share()
    routing_metrics: dict[str, float] = {}

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s

    def infer(self, microbatches: Sequence[Packed]) -> list[Tensor]:
        return [packed.behavior_logprobs for packed in microbatches]

    def update(self, microbatches: Sequence[Packed], loss_fn: LossFn, lr: float) -> float:
        deadline = time.monotonic() + sum(packed.num_sampled for packed in microbatches) / self._tokens_per_s
        for packed in microbatches:
            loss_fn(packed.behavior_logprobs, torch.zeros_like(packed.behavior_logprobs), packed)
        time.sleep(max(0.0, deadline - time.monotonic()))
        return 0.0

    def stream_weights(self) -> Iterator[TensorPart]:
        yield TensorPart("simulated", (1,), torch.zeros(1))

    def copy_state(self) -> StateWriter:
        def write(folder: Path) -> list[Path]:
            folder.mkdir(parents=True, exist_ok=True)
            return []

        return write

    def load_state(self, folder: Path) -> None:
        pass

    def offload(self) -> None: ...

    def onload(self) -> None: ...
