"""The learner's end of a NCCL group of two, as vLLM's own trainer engine. Written against vLLM 0.32."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from sync.snapshot import Snapshot


class NcclSender:
    """Sends snapshots to one generator."""

    def __init__(self, host: str, port: int) -> None:
        """Waits for the generator to join."""
        group = NCCLTrainerInitInfo(
            master_address=host, master_port=port, world_size=2, packed=torch.cuda.is_available(), rank=0
        )
        self._engine = NCCLTrainerWeightTransferEngine.trainer_init(
            group, client=SelfDrivenClient(), source=SnapshotTensors()
        )
        self.moved_at = time.monotonic()
        """Monotonic time at which the last tensor was taken to be sent."""

    def send_snapshot(self, snapshot: Snapshot) -> None:
        """Returns when the generator has received all of it."""
        self._engine.source = SnapshotTensors(snapshot, self._note_move)
        self._engine.send_weights()

    def close(self) -> None:
        """Aborts what is under way, from any thread."""
        self._engine.shutdown()

    def _note_move(self) -> None:
        self.moved_at = time.monotonic()


class SelfDrivenClient:
    """Stands for the engine that vLLM's trainer would drive from here. Its methods do nothing, because our
    generators pull."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class SnapshotTensors(WeightSource):
    """The tensors of a snapshot, on the GPU one at a time."""

    def __init__(
        self, snapshot: Snapshot | None = None, note_move: Callable[[], None] = lambda: None
    ) -> None:
        """`note_move` is called for each tensor: vLLM asks for one when there is room for it among those that
        are on their way."""
        self._snapshot, self._note_move = snapshot, note_move

    def metadata(self) -> list[ParamMeta]:
        assert self._snapshot is not None
        return [
            ParamMeta(entry.name, getattr(torch, entry.dtype), tuple(entry.shape))
            for entry in self._snapshot.manifest.tensors
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self._snapshot is not None
        device = "cuda" if torch.cuda.is_available() else "cpu"
        for name, tensor in self._snapshot.named_tensors():
            self._note_move()
            yield name, tensor.to(device)
