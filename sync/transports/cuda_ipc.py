"""Weights between processes that share a GPU: the learner keeps the newest version on the device, engines copy it from there.

Beside a snapshot lies `v<k>-<life>.ipc`: how to open each of its tensors on the device (CUDA IPC handles, as plain data). It is
offered to engines that have asked for it, by a file `gpu-<uuid>` in the folder of the snapshots. An engine holds a shared lock on
the handles while it copies; a learner that finds it held leaves the device's copy as it is, and engines take the snapshot in
shared memory instead, as they do whenever there are no handles. What arrives has the manifest's digests or does not serve.

Exercised with a stand-in for CUDA only; never run on a GPU.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.multiprocessing.reductions import reduce_tensor

from sync.manifest import Manifest, dtype_name
from sync.stream import TensorPart

SUFFIX = ".ipc"


class SharedTensors(msgspec.Struct):
    gpu: str
    """Its uuid."""
    tensors: list[tuple[str, str, tuple[int, ...], list[Any]]]
    """Name, dtype and shape of each, and its arguments for `rebuild_cuda_tensor`, classes and dtype left out."""


class DeviceCopy:
    """The learner's side: a copy of the newest version on its device."""

    def __init__(self, folder: Path, gpu: str, device: torch.device, always: bool = False) -> None:
        """`gpu`: the device's uuid. `always`: also if no engine has asked for it yet."""
        self._folder, self._gpu, self._device, self._always = folder, gpu, device, always
        self._tensors: dict[str, torch.Tensor] = {}
        self._handles: dict[str, list[Any]] = {}
        """Of each tensor what opens it. It is shared once, for torch keeps a counter and an event for each time until the tensor goes."""
        self._offered: int | None = None  # descriptor of the handles on offer
        self._path = folder / "none"
        self._writing = False

    def tee_parts(self, parts: Iterable[TensorPart]) -> Iterator[TensorPart]:
        """Hands the parts on, and keeps them on the device."""
        self._writing = (
            self._always or (self._folder / f"gpu-{self._gpu}").exists()
        ) and self._withdraw_offer()
        at: dict[str, int] = {}
        for part in parts:
            if self._writing:
                self._keep_part(part, at.setdefault(part.name, 0))
                at[part.name] += part.elements.numel()
            yield part

    def _keep_part(self, part: TensorPart, begin: int) -> None:
        kept = self._tensors.get(part.name)
        if kept is None or kept.shape != part.shape or kept.dtype != part.elements.dtype:
            # Parts of an offloaded model come from the host's memory.
            kept = torch.empty(part.shape, dtype=part.elements.dtype, device=self._device)
            self._tensors[part.name] = kept
            self._handles.pop(part.name, None)
        kept.view(-1)[begin : begin + part.elements.numel()].copy_(part.elements.reshape(-1))

    def _withdraw_offer(self) -> bool:
        """May the copy be written over? First nobody can begin to read it, then nobody may be at it."""
        self._path.unlink(missing_ok=True)
        if self._offered is None:
            return True
        try:
            fcntl.flock(self._offered, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        os.close(self._offered)
        self._offered = None
        return True

    def offer_version(self, manifest: Manifest) -> None:
        """The snapshot of what `tee` has handed on is complete."""
        if not self._writing:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        tensors = []
        for name, tensor in self._tensors.items():
            if name not in self._handles:
                self._handles[name] = [_to_plain(value) for value in reduce_tensor(tensor)[1]]
            tensors.append((name, dtype_name(tensor.dtype), tuple(tensor.shape), self._handles[name]))
        self._path = Path(manifest.locator).with_suffix(SUFFIX)
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_bytes(msgspec.msgpack.encode(SharedTensors(self._gpu, tensors)))
        self._offered = os.open(unfinished, os.O_RDONLY | os.O_CLOEXEC)
        unfinished.rename(self._path)


@contextlib.contextmanager
def open_device_copy(manifest: Manifest, gpu: str) -> Iterator[dict[str, Any] | None]:
    """What vLLM's IPC engine takes as an update, good for as long as the context lasts; None where nothing is on offer.

    Then the learner is asked to offer its next version.
    """
    path = Path(manifest.locator).with_suffix(SUFFIX)
    try:
        file = path.open("rb")
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            (path.parent / f"gpu-{gpu}").touch()
        yield None
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # the learner is withdrawing it
            yield None
            return
        shared = msgspec.msgpack.decode(file.read(), type=SharedTensors)
        if not path.exists() or shared.gpu != gpu:  # withdrawn meanwhile, or another device's
            yield None
            return
        yield {
            "names": [name for name, *_ in shared.tensors],
            "dtype_names": [dtype for _, dtype, *_ in shared.tensors],
            "shapes": [list(shape) for *_, shape, _ in shared.tensors],
            "ipc_handles": [
                {gpu: _rebuild_arguments(values, dtype)} for _, dtype, _, values in shared.tensors
            ],
        }


def gpu_uuid() -> str:
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _to_plain(value: Any) -> Any:
    """Numbers and bytes as they are, sizes as lists; what a receiver knows by itself as None."""
    if isinstance(value, type | torch.dtype):
        return None
    return list(value) if isinstance(value, tuple) else value


def _rebuild_arguments(values: list[Any], dtype: str) -> tuple[Any, ...]:
    """As `reduce_tensor` gives them: class, size, stride, offset, class of the storage, dtype, and what names the memory."""
    _, size, stride, offset, _, _, *memory = values
    return (
        torch.Tensor,
        torch.Size(size),
        tuple(stride),
        offset,
        torch.storage.TypedStorage,
        getattr(torch, dtype),
        *memory,
    )
