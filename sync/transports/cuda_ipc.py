"""Weights between processes that share a GPU: the learner keeps the newest version on the device, engines
copy it from there.

Beside a snapshot lies `v<k>-<life>.ipc`: how to open each of its tensors on the device (CUDA IPC handles, as
plain data). The learner offers it to engines that have asked for it, by a file `gpu-<uuid>` in the folder of
the snapshots. An engine holds a shared lock on the handles while it copies. A learner that finds the lock
held leaves the device's copy as it is, and engines take the snapshot in shared memory instead, as they do
whenever there are no handles. What arrives has the manifest's digests or does not serve.

Exercised with a stand-in for CUDA only; never run on a GPU.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.multiprocessing.reductions import reduce_tensor

from configs.schema import Config
from configs.transports import TransportUse
from sync.announcement import Announcement
from sync.manifest import Manifest, dtype_name
from sync.snapshot import Snapshot
from sync.transports.ends import GeneratorEnd, LearnerEnd, SocketGuards
from sync.transports.shared_memory import FolderEnd
from sync.weight_source import EngineWeights, WeightSource

SUFFIX = ".ipc"


class SharedTensors(msgspec.Struct):
    """Contents of the file of handles."""

    gpu: str
    """Uuid of the device."""
    tensors: list[tuple[str, str, tuple[int, ...], list[Any]]]
    """Name, dtype and shape of each tensor, and its arguments for `rebuild_cuda_tensor` without classes and
    dtype."""


class DeviceCopy(LearnerEnd):
    """The learner's end: a copy of the newest version on its device."""

    carries_adapters = False

    def __init__(self, folder: Path, gpu: str, device: torch.device, always: bool = False) -> None:
        """`gpu`: the device's uuid. `always`: also while no engine has asked for a copy."""
        self._folder, self._gpu, self._device, self._always = folder, gpu, device, always
        self._tensors: dict[str, torch.Tensor] = {}
        self._handles: dict[str, list[Any]] = {}
        """By name, the arguments that open a tensor. Each tensor is shared once, because torch keeps a
        counter and an event for each time that it is shared until the tensor goes."""
        self._offered: int | None = None
        """Descriptor of the handles on offer."""
        self._path = folder / "none"

    def _keep_tensor(self, name: str, tensor: torch.Tensor) -> None:
        kept = self._tensors.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            self._tensors[name] = kept
            self._handles.pop(name, None)
        kept.copy_(tensor)

    def _withdraw_offer(self) -> bool:
        """Returns whether the copy may be written over. First the file goes, so that no engine begins to
        read; then the lock shows whether one is reading."""
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
        """Copies the version from its file to the device, and offers the copy.

        Not where engines have not asked for one, while one of them reads the copy before, nor where ranks on
        several hosts have written the file.
        """
        is_wanted = self._always or (self._folder / f"gpu-{self._gpu}").exists()
        if manifest.parts is not None or not is_wanted or not self._withdraw_offer():
            return
        for name, tensor in Snapshot(manifest).named_tensors():
            self._keep_tensor(name, tensor)
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


class SharedGpuSource:
    """A snapshot that an engine copies from its GPU, where the learner offers a copy there, and else from the
    host."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot, self.manifest = snapshot, snapshot.manifest

    @property
    def checks(self) -> int:
        return self.snapshot.checks

    def attest(self) -> None:
        self.snapshot.attest()

    def load_into(self, engine: EngineWeights) -> dict[str, str]:
        if engine.is_on_cpu:
            return engine.load_snapshot(self.snapshot)
        engine.check_manifest(self.manifest)
        self.attest()
        with open_device_copy(self.manifest, gpu_uuid()) as update:
            if update is not None:
                engine.receive_update(self.manifest, update)
        return engine.load_snapshot(self.snapshot) if update is None else engine.held_digests(self.manifest)


class SharedGpuEnd:
    """Brings versions as another end does, and lets engines look for a copy on their GPU."""

    def __init__(self, end: GeneratorEnd) -> None:
        self._end = end

    @property
    def fetched_bytes(self) -> int:
        return self._end.fetched_bytes

    def bring_version(self, announcement: Announcement, *, again: bool = False) -> WeightSource:
        source = self._end.bring_version(announcement, again=again)
        # Adapters are merged on the host first.
        is_whole = isinstance(source, Snapshot) and source.manifest.adapter is None
        return SharedGpuSource(source) if isinstance(source, Snapshot) and is_whole else source

    def refresh_spare(self) -> None:
        self._end.refresh_spare()

    def close(self) -> None:
        self._end.close()


@contextlib.contextmanager
def open_device_copy(manifest: Manifest, gpu: str) -> Iterator[dict[str, Any] | None]:
    """Yields the update for vLLM's IPC engine, good for as long as the context lasts; None where nothing is
    on offer.

    Where there are no handles, the learner is asked to offer its next version.
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
        except BlockingIOError:
            # The learner is withdrawing its offer.
            yield None
            return
        shared = msgspec.msgpack.decode(file.read(), type=SharedTensors)
        # The offer may have been withdrawn before the lock was held, or may be another device's.
        if not path.exists() or shared.gpu != gpu:
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
    """Returns numbers and bytes as they are, sizes as lists, and None for what a receiver knows by itself."""
    if isinstance(value, type | torch.dtype):
        return None
    return list(value) if isinstance(value, tuple) else value


def _rebuild_arguments(values: list[Any], dtype: str) -> tuple[Any, ...]:
    """Returns the arguments as `reduce_tensor` gives them: class, size, stride, offset, class of the storage,
    dtype, and those that name the memory."""
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


def open_learner_ends(config: Config, folder: Path, guards: SocketGuards) -> list[LearnerEnd]:
    if not torch.cuda.is_available():
        return []
    always = config.sync.transport.row.copies_to_device is TransportUse.always
    device = torch.device("cuda", torch.cuda.current_device())
    return [DeviceCopy(folder, gpu_uuid(), device, always)]


def open_generator_end(config: Config, folder: Path, guards: SocketGuards) -> GeneratorEnd:
    return SharedGpuEnd(FolderEnd())
