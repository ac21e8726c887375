"""Ranks on several hosts publish one version: each host has a part of it, and a host that subscribes fetches
all parts."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from ranks import gather_weights, on_ranks
from test_publication import equal, make_model, split_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from configs.host import boot_id
from learners.megatron.engine import MegatronEngine
from learners.publication import Publication, identify_memory
from learners.world import World
from slipstream_bench.network_hosts import NetworkHosts, find_obstacle
from sync.announcement import Announcement, TransferFailed, parse_announcement
from sync.folders import shared_memory_folder
from sync.manifest import DigestMismatch
from sync.publisher import Publisher
from sync.snapshot import Snapshot, read_manifest
from sync.transports.fetcher import Fetcher
from sync.transports.server import SnapshotServer
from sync.transports.shared_memory import FolderEnd
from sync.transports.tcp import FetchingEnd

SIZE = 4
"""Ranks: two on the first host, one on the second, and on the third one that publishes nothing and
subscribes."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[NetworkHosts]:
    if obstacle := find_obstacle():
        pytest.skip(obstacle)
    with NetworkHosts(3) as hosts:
        yield hosts


class Rank:
    """One of the ranks."""

    def __init__(self, world: World, addresses: list[str]) -> None:
        self.world, self.rank = world, world.rank
        self.folder = shared_memory_folder("parts")
        self.server = None
        publisher = None
        if self.rank in (0, 2):
            self.server = SnapshotServer(self.folder, f"tcp://{addresses[self.rank]}:0")
            publisher = Publisher(self.folder, "life", ends=[self.server])
        memory = identify_memory() if self.rank < 3 else "subscriber"
        self.publication = Publication(world, publisher, memory)
        # Each host hands on what it has fetched.
        fetcher = Fetcher(shared_memory_folder("fetched"), timeout_s=2.0)
        self.end = FetchingEnd(fetcher, lambda folder, address: SnapshotServer(folder, address))

    def publish(self, version: int) -> Announcement:
        """Returns the announcement, on every rank."""
        parts = [] if self.rank == 3 else split_model(make_model(version), self.rank, 3)
        self.publication.begin_version(version, lambda: parts)
        manifest = self.publication.finish_version()
        assert manifest is not None
        own = b""
        if self.rank == 0:
            assert self.publication.publisher is not None
            own = self.publication.publisher.announce_version(manifest).encode()
        return parse_announcement(self.world.gather_messages(own)[0].decode())

    def bring(self, announced: Announcement, version: int, *, again: bool = False) -> Snapshot:
        """Returns what this host has fetched and verified: the version."""
        snapshot = self.end.bring_version(announced, again=again)
        snapshot.attest()
        assert equal(dict(snapshot.named_tensors()), make_model(version))
        return snapshot

    def error_of(self, announced: Announcement, *, again: bool = False) -> str:
        try:
            self.bring(announced, 1, again=again)
        except (TransferFailed, DigestMismatch) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def flip_byte(self, version: int) -> None:
        """Changes a byte of this host's rows."""
        path = self.folder / f"v{version}-life.safetensors"
        with path.open("r+b") as file:
            data = bytearray(path.read_bytes())
            place = next(at for at in range(len(data) - 1, 0, -1) if data[at])
            file.seek(place)
            file.write(bytes([data[place] ^ 1]))

    def close(self) -> None:
        self.end.close()
        self.publication.close()


def fetch_parts(world: World, addresses: list[str]) -> dict[str, object]:
    one, found = Rank(world, addresses), {}
    first = one.publish(0)
    if one.rank in (0, 2):
        path = one.folder / "v0-life.safetensors"
        found["allocated"] = path.stat().st_blocks * 512
        found["size"] = path.stat().st_size
    if one.rank in (2, 3):  # on one of the learner's hosts, and elsewhere
        one.bring(first, 0)
        found["fetched"] = one.end.fetched_bytes
    world.barrier()
    if one.server is not None:
        found["sent"] = one.server.bytes_sent
    world.barrier()
    second = one.publish(1)
    world.barrier()
    if one.rank == 2:
        one.flip_byte(1)
    world.barrier()
    if one.rank == 3:
        found["torn"] = one.error_of(second)
        found["torn again"] = one.error_of(second, again=True)
        assert Snapshot(read_manifest(one.end.fetcher.folder / "v0-life.json")) is not None
    world.barrier()
    if one.rank == 2:
        one.flip_byte(1)
    world.barrier()
    if one.rank == 3:
        one.bring(second, 1, again=True)
    world.barrier()
    third = one.publish(2)
    if one.rank == 2:  # it has gone back to an older life: the file has another name
        (one.folder / "v2-life.safetensors").rename(one.folder / "v2-other.safetensors")
    world.barrier()
    if one.rank == 3:
        found["gone"] = one.error_of(third)
    world.barrier()
    if one.rank == 2:
        assert one.server is not None
        (one.folder / "v2-other.safetensors").rename(one.folder / "v2-life.safetensors")
        one.server.close()
    world.barrier()
    if one.rank == 3:
        began = time.monotonic()
        found["dead"], found["dead_s"] = one.error_of(third), time.monotonic() - began
        newest = sorted(path.name for path in one.end.fetcher.folder.glob("v*.safetensors"))
        found["whole"] = newest
        Snapshot(read_manifest(one.end.fetcher.folder / "v1-life.json")).verify_bytes()
    found["host"] = boot_id()
    world.barrier()
    one.close()
    return found


def test_a_host_fetches_the_parts_of_all_hosts_and_names_the_one_that_is_wrong_or_dead(
    hosts: NetworkHosts, tmp_path: Path
) -> None:
    places = [hosts[0], hosts[0], hosts[1], hosts[2]]
    addresses = [host.address for host in places]
    found = on_ranks(SIZE, fetch_parts, tmp_path / "ranks", addresses, hosts=places)
    size = found[0]["size"]
    assert found[2]["size"] == size and found[0]["allocated"] < 0.8 * size > 2 * found[2]["allocated"]
    assert found[2]["fetched"] == found[3]["fetched"] == size, "each byte comes once"
    assert found[0]["sent"] + found[2]["sent"] < 2 * size, "the second fetches from the first one"
    for how in ("torn", "torn again"):
        assert (
            "DigestMismatch" in found[3][how] and f"rows came from {hosts[1].name} (tcp://" in found[3][how]
        )
        assert hosts[0].name not in found[3][how]
    assert found[3]["gone"].startswith("LackingServer") and addresses[2] in found[3]["gone"]
    assert found[3]["dead"].startswith("SilentServer") and addresses[2] in found[3]["dead"]
    assert found[3]["whole"][0] == "v1-life.safetensors" and len(found[3]["whole"]) == 1


# ---- a file system that all hosts see


def share_folder(world: World, folder: Path, model: Path) -> dict[str, object]:
    """Ranks on two hosts publish four versions through a shared folder, and a third host reads each."""
    rank, opened, found = world.rank, [], {}
    system_open = os.open

    def open_noted(path: object, flags: int, *more: int) -> int:
        if str(path).endswith(".unfinished"):
            opened.append(flags)
        return system_open(path, flags, *more)  # type: ignore[arg-type]

    os.open = open_noted  # type: ignore[assignment]
    publisher = Publisher(folder, "life", model=model) if rank == 0 else None
    publication, end = Publication(world, publisher, "shared"), FolderEnd()
    for version in range(4):
        parts = [] if rank == 2 else split_model(make_model(version), rank, 2)
        publication.begin_version(version, lambda parts=parts: parts)  # type: ignore[misc]
        manifest = publication.finish_version()
        assert manifest is not None
        own = publisher.announce_version(manifest).encode() if publisher is not None else b""
        announced = parse_announcement(world.gather_messages(own)[0].decode())
        if rank == 2:
            snapshot = end.bring_version(announced)
            snapshot.attest()
            assert equal(dict(snapshot.named_tensors()), make_model(version))
        world.barrier()
    found["opened"] = opened
    found["kept"] = sorted(path.suffix for path in folder.glob("v*") if "-" in path.name)
    world.barrier()
    publication.close()
    return found


def test_hosts_that_share_a_folder_write_exactly_their_bytes_and_over_no_file_that_others_may_have_mapped(
    hosts: NetworkHosts, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    shared = tmp_path / "shared"
    found = on_ranks(3, share_folder, tmp_path / "ranks", shared, tmp_path / "model", hosts=list(hosts))
    for told in found[:2]:
        assert len(told["opened"]) == 4 and all(flags & os.O_DSYNC for flags in told["opened"])
    assert ".spare" not in found[0]["kept"] and found[0]["kept"].count(".safetensors") == 2
    assert (shared / "model.safetensors").exists()


def find_sharing(world: World) -> list[bool]:
    """Returns whether the ranks know that they share a file, on one host and on two of the same name."""
    found = []
    for boots in (("here", "here"), ("here", "there")):
        with patch("learners.publication.boot_id", lambda boots=boots: boots[world.rank]):
            publication = Publication(world, None, "shared")
        found.append(publication._shares_file)
        publication.close()
    return found


def test_two_hosts_that_have_one_name_share_a_file_all_the_same(tmp_path: Path) -> None:
    assert on_ranks(2, find_sharing, tmp_path) == [[False, True]] * 2


# ---- Megatron's ranks


def publish_megatron(world: World, addresses: list[str], model: Path, layout: str) -> dict[str, torch.Tensor]:
    """Returns the weights that the ranks hold on the first host, and what the second one has fetched."""
    engine = MegatronEngine(model, bucket_bytes=1 << 11, **{layout: 2})  # type: ignore[arg-type]
    folder = shared_memory_folder("parts")
    server = SnapshotServer(folder, f"tcp://{addresses[world.rank]}:0")
    publisher = Publisher(folder, "life", ends=[server])
    publication = Publication(world, publisher, identify_memory())
    publication.begin_version(0, engine.stream_weights)
    manifest = publication.finish_version()
    assert manifest is not None and publication.is_divided
    own = publisher.announce_version(manifest).encode() if world.rank == 0 else b""
    announced = parse_announcement(world.gather_messages(own)[0].decode())
    found = gather_weights(engine.stream_weights())
    if world.rank == 1:
        fetcher = Fetcher(shared_memory_folder("fetched"), timeout_s=5.0)
        end = FetchingEnd(fetcher, lambda folder, address: SnapshotServer(folder, address))
        snapshot = end.bring_version(announced)
        snapshot.attest()
        found = {name: tensor.clone() for name, tensor in snapshot.named_tensors()}
        end.close()
    world.barrier()
    publication.close()
    return found


@pytest.mark.parametrize("layout", ["tensor_parallel", "expert_parallel"])
def test_megatrons_ranks_on_two_hosts_publish_one_version(
    layout: str, hosts: NetworkHosts, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    places = [hosts[0], hosts[1]]
    addresses = [host.address for host in places]
    held, fetched = on_ranks(
        2, publish_megatron, tmp_path / "ranks", addresses, tmp_path / "model", layout, hosts=places
    )
    assert equal(fetched, held) and any("experts.3.down_proj" in name for name in fetched)
