"""Checks of the ways that weights travel."""

import multiprocessing as mp
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from slipstream.check_machine import MIB, NotHere, count_gpus
from slipstream.check_models import make_model


def make_weights() -> dict[str, Any]:
    import torch

    seed = torch.Generator().manual_seed(0)
    return {f"layer.{number}.weight": torch.randn(256, 512, generator=seed) for number in range(4)}


def must_hold(snapshot: Any) -> str:
    """Every byte of the snapshot is what `make_weights` has made."""
    import torch

    snapshot.verify_bytes()
    found, expected = dict(snapshot.named_tensors()), make_weights()
    if set(found) != set(expected) or not all(torch.equal(found[name], expected[name]) for name in expected):
        raise RuntimeError("what was fetched must be what was published, got other weights")
    return f"{snapshot.manifest.num_bytes / MIB:.0f} MiB, digests verified"


def check_transport_on_host(in_memory: bool) -> str:
    """Weights through shared memory, or through a folder."""
    from sync.announcement import announce_version
    from sync.folders import shared_memory_folder
    from sync.publisher import Publisher
    from sync.stream import whole_parts
    from sync.subscriber import Subscriber

    with tempfile.TemporaryDirectory() as folder:
        where = shared_memory_folder(f"check-{os.getpid()}") if in_memory else Path(folder) / "weights"
        publisher, subscriber = Publisher(where, "check"), Subscriber()
        try:
            return must_hold(
                subscriber.prepare_version(
                    announce_version(publisher.publish_version(0, whole_parts(make_weights())))
                )
            )
        finally:
            subscriber.close()
            publisher.close()
            shutil.rmtree(where, ignore_errors=True)


def check_transport_tcp(with_keys: bool) -> str:
    """Weights over the loopback interface, as another host fetches them."""
    from buffers.keys import KeyRole, make_keys, show_key, start_authenticator
    from configs.host import boot_id
    from sync.announcement import announce_version
    from sync.publisher import Publisher
    from sync.stream import whole_parts
    from sync.subscriber import Subscriber
    from sync.transports.fetcher import Fetcher
    from sync.transports.server import SnapshotServer
    from sync.transports.tcp import FetchingEnd

    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        make_keys(keys, list(KeyRole))
        door = (lambda at: start_authenticator(at, keys)) if with_keys else None
        show = (lambda at: show_key(at, keys)) if with_keys else None
        server = SnapshotServer(Path(folder) / "weights", secure=door)
        publisher = Publisher(Path(folder) / "weights", "check", ends=[server])
        subscriber = Subscriber(FetchingEnd(Fetcher(Path(folder) / "fetched", secure=show)))
        try:
            announced = announce_version(
                publisher.publish_version(0, whole_parts(make_weights())), server.address
            )
            words = must_hold(subscriber.prepare_version(announced.replace(boot_id(), "another host")))
            return words + (", encrypted" if with_keys else "")
        finally:
            subscriber.close()
            publisher.close()


def publish_on_gpu(model: Path, folder: Path, by_nccl: bool, say: Any, wait: Any) -> None:
    """Publishes in a process of its own, as the learner does: handles of CUDA IPC are for other processes,
    and so is a group of NCCL."""
    import torch
    from safetensors.torch import load_file

    from sync.publisher import Publisher
    from sync.stream import whole_parts
    from sync.transports.cuda_ipc import DeviceCopy, gpu_uuid
    from sync.transports.ends import LearnerEnd, SocketGuards
    from sync.transports.nccl import open_nccl_server

    device = torch.device("cuda", torch.cuda.current_device())
    gpu = {name: tensor.cuda() for name, tensor in load_file(model / "model.safetensors").items()}
    end: LearnerEnd
    if by_nccl:
        end = open_nccl_server(folder, "tcp://127.0.0.1:0", SocketGuards())
    else:
        end = DeviceCopy(folder, gpu_uuid(), device, always=True)
    publisher = Publisher(folder, "check", ends=[end])
    manifest = publisher.publish_version(0, whole_parts(gpu))
    say.put(publisher.announce_version(manifest))
    wait.get()
    publisher.close()


def check_transport_on_gpu(by_nccl: bool) -> str:
    """Weights from a learner's GPU to an engine: on the same one by CUDA IPC, on the next one by NCCL."""
    if by_nccl and count_gpus() < 2:
        raise NotHere("NCCL takes two GPUs, found 1")
    with tempfile.TemporaryDirectory() as folder:
        context, model, where = (
            mp.get_context("spawn"),
            make_model(Path(folder) / "model"),
            Path(folder) / "weights",
        )
        say, wait = context.Queue(), context.Queue()
        learner = context.Process(target=publish_on_gpu, args=(model, where, by_nccl, say, wait))
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        if by_nccl:  # as Ray gives each rank its own
            os.environ["CUDA_VISIBLE_DEVICES"] = "1" if before is None else before.split(",")[1]
        learner.start()
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
        from generators.vllm_engine import VllmEngine
        from sync.subscriber import Subscriber
        from sync.transports.cuda_ipc import SharedGpuEnd
        from sync.transports.fetcher import Fetcher
        from sync.transports.nccl import BroadcastEnd
        from sync.transports.shared_memory import FolderEnd

        served = VllmEngine(
            str(model), dtype="float32", max_model_len=64, max_sequences=8, gpu_memory_fraction=0.2,
            transfer="nccl" if by_nccl else "ipc",
        )  # fmt: skip
        fetched = Path(folder) / "fetched"
        subscriber = Subscriber(BroadcastEnd(Fetcher(fetched)) if by_nccl else SharedGpuEnd(FolderEnd()))
        source = subscriber.prepare_version(say.get())
        served.load_version(source)
        held = served.held_digests(source.manifest)
        wait.put("done")
        learner.join()
        if held != {entry.name: entry.digest for entry in source.manifest.tensors}:
            raise RuntimeError("an engine must hold what was published, got other digests")
    return "attested"
