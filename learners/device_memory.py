"""Memory of a GPU that an engine gives away while it does not train, and takes back bit for bit
(`placement.mode=colocated`).

The storages are emptied and filled again, not replaced, so all that shares them stays as it is: the views of
FSDP2 and of Megatron's flat buffers, tied weights, and the optimizer's references. FSDP2 frees gathered
parameters in this way, and Megatron-core its gradients (`_ParamAndGradBuffer.offload_to_cpu`).
"""

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

FREED_S = 20.0
"""Seconds in which the memory of a process that was killed becomes free. The kernel may have dropped its
locks before."""
RETRY_S = 0.1


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


class DeviceMemory:
    """Moves the tensors of one rank's model to pinned memory of the host, and back."""

    def __init__(
        self,
        list_kept: Callable[[], Iterable[Tensor]],
        list_dropped: Callable[[], Iterable[Tensor]] = tuple,
        moves: Callable[[Tensor], bool] = is_on_gpu,
    ) -> None:
        """`list_kept` names the tensors whose contents come back; `list_dropped` those that are written anew
        before they are read, such as buffers of gradients. Tensors for which `moves` is false stay: those
        that are in the host's memory already."""
        self._list_kept, self._list_dropped, self._moves = list_kept, list_dropped, moves
        self._away: list[tuple[UntypedStorage, int]] = []
        """Emptied storages, with their bytes; those that are kept come first."""
        self._copies: list[Tensor] = []
        """Contents of the kept ones, pinned. They stay for the next time, because pinning takes long."""

    @property
    def num_bytes_away(self) -> int:
        return sum(num_bytes for _, num_bytes in self._away)

    def offload(self) -> None:
        """Gives the memory away. Nothing of the engine may be used before `onload`."""
        assert not self._away, "the engine is offloaded already"
        kept = self._find_storages(self._list_kept())
        dropped = {
            key: one for key, one in self._find_storages(self._list_dropped()).items() if key not in kept
        }
        if not kept and not dropped:
            return
        copies = [copy for copy in self._copies if copy.numel()]
        self._copies = []
        for number, storage in enumerate(kept.values()):
            fits = number < len(copies) and copies[number].numel() == storage.nbytes()
            copy = copies[number] if fits else _allocate_host(storage)
            copy.copy_(_view_bytes(storage), non_blocking=True)
            self._copies.append(copy)
        self._wait_for_copies()
        self._away = [(storage, storage.nbytes()) for storage in (*kept.values(), *dropped.values())]
        for storage, _ in self._away:
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Takes the memory back, with what it held. Raises torch.OutOfMemoryError where others have it."""
        deadline = time.monotonic() + FREED_S
        for storage, num_bytes in self._away:
            while not _try_resize(storage, num_bytes, is_last=time.monotonic() > deadline):
                time.sleep(RETRY_S)
        for (storage, _), copy in zip(self._away, self._copies, strict=False):
            _view_bytes(storage).copy_(copy, non_blocking=True)
        self._wait_for_copies()
        self._away = []

    def _find_storages(self, tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
        """Returns the storages of those that move, each once, by address."""
        found = {}
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.detach().untyped_storage()
            if storage.nbytes() and self._moves(local):
                found[storage.data_ptr()] = storage
        return found

    def _wait_for_copies(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _try_resize(storage: UntypedStorage, num_bytes: int, *, is_last: bool) -> bool:
    try:
        storage.resize_(num_bytes)
    except torch.OutOfMemoryError:
        if is_last:
            raise
        return False
    return True


def _allocate_host(storage: UntypedStorage) -> Tensor:
    return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def _view_bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
