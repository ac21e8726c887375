"""The transports from GPU to GPU, through vLLM's own transfer engines, with stand-ins for CUDA IPC and NCCL.

No GPU is needed here.
"""

import json
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_rig import VllmRig, make_prompts

from configs.sizes import count_sizes
from generators.shared_gpu import compute_kv_cache_bytes
from sync import vllm_plugin
from sync.announcement import announce_version
from sync.manifest import EngineMismatch, Manifest
from sync.publisher import Publisher
from sync.snapshot import Snapshot
from sync.stream import whole_parts
from sync.subscriber import Subscriber
from sync.transports import cuda_ipc
from sync.transports.cuda_ipc import DeviceCopy, SharedGpuSource
from sync.transports.ends import SocketGuards
from sync.transports.fetcher import Fetcher
from sync.transports.messages import RequestBroadcast
from sync.transports.nccl import BroadcastEnd, NcclLinks, open_nccl_server
from sync.transports.server import SnapshotServer

GPU = "GPU-1"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmRig]:
    set_num_threads, disabled = torch.set_num_threads, torch._dynamo.config.disable
    rig = VllmRig(tmp_path_factory.mktemp("rig"), tied=False, end=None)
    yield rig
    rig.engine.shutdown()
    rig.publisher.close()
    torch.set_num_threads, torch._dynamo.config.disable = set_num_threads, disabled


def give_transfer_engine(rig: VllmRig, backend: str) -> None:
    """Gives the worker a transfer engine, as vLLM does on a GPU when its configuration says so."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    worker = rig.engine._core.engine_core.model_executor.driver_worker.worker
    worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend=backend),
        worker.vllm_config,
        worker.device,
        worker.model_runner.get_model(),
    )


def is_served(rig: VllmRig, manifest: Manifest) -> bool:
    """True when the engine holds the version, and samples from it."""
    sample = rig.add_sample(make_prompts(1)[0], 12, seed=manifest.version)
    completion = rig.finish_samples()[sample.id]
    expected = rig.compute_logprobs(manifest.version % 2, sample.prompt + completion.tokens)[:-1]
    held = rig.engine.held_digests(manifest) == {entry.name: entry.digest for entry in manifest.tensors}
    return held and rig.find_difference(sample, completion, expected, 0, 12) < 1e-4


def load_from_gpu(rig: VllmRig, model: int) -> Manifest:
    """Publishes a model, and loads it as an engine does that shares the learner's GPU."""
    manifest = rig.publish_model(model)
    rig.engine.load_version(SharedGpuSource(Snapshot(manifest)))
    return manifest


@pytest.fixture
def ipc(rig: VllmRig, monkeypatch: pytest.MonkeyPatch) -> dict[bytes, torch.Tensor]:
    """A stand-in for CUDA IPC: handles are names of tensors in this process. Returns them."""
    from vllm.distributed.weight_transfer import ipc_engine

    memory: dict[bytes, torch.Tensor] = {}

    def share(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        handle = f"handle {len(memory)}".encode()
        memory[handle] = tensor
        kinds = (torch.Tensor, tensor.size(), tensor.stride(), 0, torch.storage.TypedStorage, tensor.dtype)
        return None, (*kinds, 0, handle, tensor.nbytes, 0, False, b"counter", 0, b"event", False)

    def rebuild(*arguments: Any) -> torch.Tensor:
        kind, size, stride, _, storage, dtype, _, handle, num_bytes, *_ = arguments
        tensor = memory[handle]
        assert (kind, storage, num_bytes) == (torch.Tensor, torch.storage.TypedStorage, tensor.nbytes)
        assert (tensor.size(), tensor.stride(), tensor.dtype) == (size, stride, dtype)
        return tensor

    monkeypatch.setattr(cuda_ipc, "reduce_tensor", share)
    monkeypatch.setattr(ipc_engine, "rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=GPU))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(cuda_ipc, "gpu_uuid", lambda: GPU)
    monkeypatch.setattr(vllm_plugin, "_is_on_cpu", lambda model: False)
    give_transfer_engine(rig, "ipc")
    monkeypatch.setattr(rig.publisher, "ends", [DeviceCopy(rig.publisher.folder, GPU, torch.device("cpu"))])
    return memory


def test_an_engine_on_the_learners_gpu_asks_for_the_devices_copy_and_gets_it(
    rig: VllmRig, ipc: dict[bytes, torch.Tensor]
) -> None:
    assert is_served(rig, load_from_gpu(rig, 0)), "through shared memory: nobody had asked"
    assert not ipc and (rig.publisher.folder / f"gpu-{GPU}").exists()
    for model in (1, 0, 1):
        manifest = load_from_gpu(rig, model)
        assert len(ipc) == len(manifest.tensors) and is_served(rig, manifest), (
            "each tensor is shared once for all versions"
        )
        assert len(list(rig.publisher.folder.glob("*.ipc"))) == 1, "only the newest is on the device"


def test_a_copy_that_an_engine_is_reading_is_not_written_over(
    rig: VllmRig, ipc: dict[bytes, torch.Tensor]
) -> None:
    load_from_gpu(rig, 0)
    held = load_from_gpu(rig, 1)
    with cuda_ipc.open_device_copy(held, GPU) as update:
        assert update is not None and set(update["names"]) == {entry.name for entry in held.tensors}
        before = {handle: tensor.clone() for handle, tensor in ipc.items()}
        manifest = rig.publish_model(0)
        assert all(torch.equal(ipc[handle], tensor) for handle, tensor in before.items())
    rig.engine.load_version(SharedGpuSource(Snapshot(manifest)))
    assert is_served(rig, manifest), "through shared memory"
    assert is_served(rig, load_from_gpu(rig, 1)) and list(rig.publisher.folder.glob("*.ipc")), (
        "and then again from the device"
    )


def test_a_wrong_byte_on_the_device_is_found_out(rig: VllmRig, ipc: dict[bytes, torch.Tensor]) -> None:
    load_from_gpu(rig, 0)
    manifest = rig.publish_model(1)
    next(reversed(ipc.values())).view(-1)[7] += 1
    with pytest.raises(EngineMismatch, match="1 of .* tensors in the engine"):
        rig.engine.load_version(SharedGpuSource(Snapshot(manifest)))
    assert rig.engine.version is None, "nothing is sampled"
    assert is_served(rig, load_from_gpu(rig, 0))


def test_copies_are_made_for_engines_of_the_same_gpu_only(
    tmp_path: Path, ipc: dict[bytes, torch.Tensor]
) -> None:
    (tmp_path / "gpu-another").touch()
    publisher = Publisher(tmp_path / "w", "1", ends=[DeviceCopy(tmp_path / "w", GPU, torch.device("cpu"))])
    for version, asked in enumerate(("another", GPU)):
        (publisher.folder / f"gpu-{asked}").touch()
        publisher.publish_version(version, whole_parts({"a": torch.ones(3)}))
        assert bool(list(publisher.folder.glob("*.ipc"))) == (asked == GPU)
    publisher.close()


def test_what_is_offered_is_on_the_device_wherever_the_learner_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is in the host's memory, which CUDA IPC cannot share. A tensor of another shape is shared
    anew."""
    shared: list[torch.Tensor] = []
    monkeypatch.setattr(
        cuda_ipc, "reduce_tensor", lambda tensor: (None, (shared.append(tensor), len(shared)))
    )
    folder = tmp_path / "weights"
    publisher = Publisher(folder, "1", ends=[DeviceCopy(folder, GPU, torch.device("meta"), always=True)])
    for version, size in enumerate((3, 3, 4)):
        publisher.publish_version(version, whole_parts({"a": torch.ones(size), "b": torch.ones(2)}))
    publisher.close()
    assert [(tensor.device.type, len(tensor)) for tensor in shared] == [("meta", 3), ("meta", 2), ("meta", 4)]


def test_an_engine_that_shares_its_gpu_is_told_how_much_kv_to_keep(
    rig: VllmRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from generators import vllm_engine
    from generators.vllm_engine import VllmEngine

    class Told(Exception):
        pass

    def core(config: Any, *_: Any, **__: Any) -> Any:
        raise Told(config)

    def told(**more: Any) -> Any:
        with pytest.raises(Told) as caught:
            VllmEngine(
                str(model), dtype="bfloat16", max_model_len=160, max_sequences=32, shares_gpu=True, **more
            )
        return caught.value.args[0]

    model = rig.publisher.folder.parent / "model"
    monkeypatch.setattr(vllm_engine, "InprocClient", core)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=80 << 30)
    )
    config = told()
    expected = compute_kv_cache_bytes(
        count_sizes(json.loads((model / "config.json").read_text())),
        budget=config.cache_config.gpu_memory_utilization * (80 << 30),
        element_bytes=2,
        max_sequences=32,
        tokens_per_step=config.scheduler_config.max_num_batched_tokens,
    )
    assert config.cache_config.kv_cache_memory_bytes == expected > 60 << 30
    assert told(kv_cache_mb=16).cache_config.kv_cache_memory_bytes == 16 << 20, "or as much as the user says"
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=1 << 30)
    )
    with pytest.raises(ValueError, match="generators.gpu_memory_fraction must leave room for KV"):
        VllmEngine(str(model), dtype="bfloat16", max_model_len=160, max_sequences=32, shares_gpu=True)


class NcclWire:
    """A stand-in for a NCCL group of two: what one broadcasts the other receives, in order."""

    def __init__(self) -> None:
        self.tensors: queue.Queue[torch.Tensor] = queue.Queue()
        self.joined = self.left = 0

    def end(self, sends: bool) -> Any:
        self.joined += 1

        def broadcast(tensor: torch.Tensor, src: int, stream: object) -> None:
            assert src == 0
            if sends:
                self.tensors.put(tensor.clone())
            else:
                tensor.copy_(self.tensors.get(timeout=10))

        def destroy() -> None:
            self.left += 1

        return SimpleNamespace(broadcast=broadcast, destroy=destroy)


@pytest.fixture
def nccl(
    rig: VllmRig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[NcclWire, SnapshotServer, Subscriber]]:
    from vllm.distributed.weight_transfer import nccl_engine

    wire = NcclWire()
    monkeypatch.setattr(nccl_engine, "worker_init_process_group", lambda info, config: wire.end(sends=False))
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: wire.end(sends=True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    give_transfer_engine(rig, "nccl")
    server = open_nccl_server(rig.publisher.folder, "tcp://127.0.0.1:0", SocketGuards())
    subscriber = Subscriber(BroadcastEnd(Fetcher(tmp_path / "far", timeout_s=3)))
    yield wire, server, subscriber
    subscriber.close()
    server.close()


def test_versions_come_by_nccl_when_the_engine_takes_them_up(
    rig: VllmRig, nccl: tuple[NcclWire, SnapshotServer, Subscriber]
) -> None:
    wire, server, subscriber = nccl
    for model in (0, 1, 0):
        manifest = rig.publish_model(model)
        rig.engine.load_version(subscriber.prepare_version(announce_version(manifest, server.address)))
        assert is_served(rig, manifest)
    assert wire.joined == 2, "one group for the life of both"
    gone = subscriber.prepare_version(announce_version(rig.publish_model(1), server.address))
    for model in (0, 1, 0):
        manifest = rig.publish_model(model)
    with pytest.raises(FileNotFoundError, match="is gone"):
        rig.engine.load_version(gone)
    rig.engine.load_version(subscriber.prepare_version(announce_version(manifest, server.address)))
    assert is_served(rig, manifest)


def test_a_receiver_that_dies_in_a_broadcast_does_not_hold_the_learners_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's kernel runs until the group is aborted: `destroy` is what vLLM calls that."""
    from vllm.distributed.weight_transfer import nccl_engine

    aborted, begun = threading.Event(), threading.Event()

    def broadcast(tensor: torch.Tensor, src: int, stream: object) -> None:
        begun.set()
        assert aborted.wait(60), "the kernel spins for ever"

    group = SimpleNamespace(broadcast=broadcast, destroy=aborted.set)
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: group)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr("sync.transports.nccl.STALLED_S", 0.2)
    publisher = Publisher(tmp_path, "1")
    manifest = publisher.publish_version(0, whole_parts({"a": torch.ones(3)}))
    links = NcclLinks(tmp_path, "127.0.0.1")
    first = links.send_snapshot(RequestBroadcast(Path(manifest.path).stem, "0" * 16))
    (link,) = links.links.values()
    assert first.fresh and begun.wait(60) and aborted.wait(60)
    deadline = time.monotonic() + 60
    while not link.broken:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert links.send_snapshot(RequestBroadcast(Path(manifest.path).stem, "0" * 16)).fresh, (
        "who comes back gets a group of its own"
    )
    links.close()
    publisher.close()


def test_what_nccl_delivers_wrong_is_found_out_and_sent_again(
    rig: VllmRig, nccl: tuple[NcclWire, SnapshotServer, Subscriber], monkeypatch: pytest.MonkeyPatch
) -> None:
    wire, server, subscriber = nccl
    manifest = rig.publish_model(1)
    source = subscriber.prepare_version(announce_version(manifest, server.address))
    received = wire.tensors.get
    monkeypatch.setattr(wire.tensors, "get", lambda timeout: received(timeout=timeout).add(1))
    with pytest.raises(EngineMismatch):
        rig.engine.load_version(source)
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    rig.engine.load_version(
        subscriber.prepare_version(announce_version(manifest, server.address), again=True)
    )
    assert is_served(rig, manifest)
