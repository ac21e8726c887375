"""Every transport of the table keeps the same promises. A new row is tested here without further changes."""

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.host import boot_id
from configs.load import load_config
from configs.transports import Transport
from sync.digest import tensor_digest
from sync.manifest import DigestMismatch, Manifest
from sync.publisher import Publisher, open_publisher, weights_folder
from sync.snapshot import Snapshot
from sync.stream import whole_parts
from sync.subscriber import Subscriber, open_subscriber
from sync.transports.ends import SocketGuards, TransportModule, load_transport

ON_A_HOST = [one for one in Transport if one is not Transport.nccl]
"""Transports that need no GPU. tests/test_gpu_transports.py tries the others with vLLM's own engine."""


class HostEngine:
    """An engine on a CPU that holds copies of the published tensors."""

    is_on_cpu = True

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def check_manifest(self, manifest: Manifest) -> None:
        """Accepts every model."""

    def load_snapshot(self, snapshot: Snapshot) -> dict[str, str]:
        self.tensors = {name: tensor.clone() for name, tensor in snapshot.named_tensors()}
        return self.held_digests(snapshot.manifest)

    def receive_update(
        self, manifest: Manifest, update: dict[str, Any], group: dict[str, Any] | None = None
    ) -> None:
        raise AssertionError("there is no GPU here")

    def held_digests(self, manifest: Manifest) -> dict[str, str]:
        return {name: tensor_digest(tensor) for name, tensor in self.tensors.items()}


Pair = tuple[Publisher, Subscriber]


@pytest.fixture
def open_pair(tmp_path: Path) -> Iterator[Callable[[Transport], Pair]]:
    """Opens both sides of a transport, as a learner and a generator do."""
    opened: list[Pair] = []

    def open_both(transport: Transport) -> Pair:
        config = load_config([f"sync.transport={transport}", f"run.name={tmp_path.name}"])
        publisher = open_publisher(config, tmp_path, "life", SocketGuards())
        opened.append((publisher, open_subscriber(config, f"tcp://{tmp_path.name}:1", SocketGuards())))
        return opened[-1]

    yield open_both
    for publisher, subscriber in opened:
        subscriber.close()
        publisher.close()
        assert not list(publisher.folder.glob("v*")), "no version stays behind"


def make_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(300, 64, generator=generator), "b": torch.randn(64, generator=generator)}


def announce_to_generator(publisher: Publisher, manifest: Manifest) -> str:
    """Returns the announcement as another host sees it, where the transport serves other hosts."""
    announced = publisher.announce_version(manifest)
    return announced if announced.startswith("#") else announced.replace(boot_id(), "another host")


@pytest.mark.parametrize("transport", ON_A_HOST)
def test_an_engine_gets_the_bits_that_were_published(
    transport: Transport, open_pair: Callable[[Transport], Pair]
) -> None:
    publisher, subscriber = open_pair(transport)
    engine = HostEngine()
    for version in range(4):
        manifest = publisher.publish_version(version, whole_parts(make_weights(version)))
        source = subscriber.prepare_version(announce_to_generator(publisher, manifest))
        assert source.manifest.digest == manifest.digest and source.checks <= 1
        held = source.load_into(engine)
        assert held == {entry.name: entry.digest for entry in manifest.tensors}
        assert all(torch.equal(engine.tensors[name], it) for name, it in make_weights(version).items())
        subscriber.refresh_spare()
        publisher.check_alive()


@pytest.mark.parametrize("transport", ON_A_HOST)
def test_a_version_that_is_gone_or_damaged_is_refused(
    transport: Transport, open_pair: Callable[[Transport], Pair]
) -> None:
    publisher, subscriber = open_pair(transport)
    manifests = [
        publisher.publish_version(version, whole_parts(make_weights(version))) for version in range(3)
    ]
    with pytest.raises(FileNotFoundError):
        subscriber.prepare_version(announce_to_generator(publisher, manifests[0]))
    path = Path(manifests[2].path)
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DigestMismatch, match="1 of 2 tensors"):
        subscriber.prepare_version(announce_to_generator(publisher, manifests[2]))
    raw[-5] ^= 1
    path.write_bytes(raw)
    source = subscriber.prepare_version(announce_to_generator(publisher, manifests[2]), again=True)
    assert source.manifest.version == 2, "it is brought anew when it is asked for again"


@pytest.mark.parametrize("transport", Transport)
def test_the_module_of_every_transport_makes_both_ends(transport: Transport) -> None:
    module = load_transport(transport)
    for name in ("open_learner_ends", "open_generator_end"):
        expected = list(inspect.signature(getattr(TransportModule, name)).parameters)[1:]
        assert list(inspect.signature(getattr(module, name)).parameters) == expected


@pytest.mark.parametrize("transport", Transport)
def test_snapshots_lie_in_a_folder_of_all_hosts_or_in_shared_memory(
    transport: Transport, tmp_path: Path
) -> None:
    folder = weights_folder(load_config([f"sync.transport={transport}"]), tmp_path)
    assert folder.is_relative_to(tmp_path if transport.row.shares_folder else "/dev/shm")


def test_a_run_over_tcp_imports_neither_nccl_nor_vllm() -> None:
    code = (
        "import sys\n"
        "import sync.publisher, sync.subscriber\n"
        "from configs.transports import Transport\n"
        "from sync.transports.ends import load_transport\n"
        "load_transport(Transport.tcp)\n"
        "wrong = [name for name in sys.modules if name == 'vllm' or 'nccl' in name and 'sync' in name]\n"
        "sys.exit(str(wrong) if wrong else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], text=True, check=False)
    assert done.returncode == 0
