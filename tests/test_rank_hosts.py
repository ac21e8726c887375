"""Ranks on several hosts: how they find each other, one fetch of a batch a host, one folder of checkpoints,
and a rank or a link that goes away."""

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
from ranks import on_ranks

from buffers.trajectory import Trajectory
from configs.disk import DiskFull
from configs.load import load_config
from learners import checkpoint
from learners.feed import Feed
from learners.packing import Batch
from learners.rank_hosts import check_model_files, check_shared_folder, identify_host
from learners.rendezvous import Pool, choose_interface, find_interface, join_ranks
from learners.world import LONG_TIMEOUT, World
from slipstream_bench.network_hosts import NetworkHost, NetworkHosts, find_obstacle

pytestmark = pytest.mark.skipif(bool(find_obstacle()), reason=find_obstacle())


@pytest.fixture(scope="module")
def hosts() -> Iterator[NetworkHosts]:
    with NetworkHosts(2) as hosts:
        hosts[0].run("ip", "addr", "add", "fd77::1/64", "dev", "eth0", "nodad")
        hosts[1].run("ip", "addr", "add", "fd77::2/64", "dev", "eth0", "nodad")
        # A second network, whose interface has an address with a name of its own.
        hosts[1].run("ip", "link", "add", "other0", "type", "bridge")
        hosts[1].run("ip", "addr", "add", "10.78.0.2/24", "dev", "other0", "label", "other0:1")
        hosts[1].run("ip", "link", "set", "other0", "up")
        yield hosts


def raised_by(function, *args) -> str:  # type: ignore[no-untyped-def]
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ---- the interface


def look_for_interfaces(world: World) -> list[str]:
    """They have met already, over what was chosen."""
    chosen = [os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]]
    found = [
        find_interface("10.77.0.1", 1), find_interface("fd77::1", 1), find_interface("10.78.0.2", 1)
        if world.rank else "",
    ]  # fmt: skip
    told = [
        raised_by(find_interface, "10.79.0.1", 1),
        raised_by(choose_interface, "tcp://10.77.0.1:1", "eth7"),
        raised_by(choose_interface, "tcp://10.77.0.1:1", "other0"),  # it has no address of this name
    ]
    with patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "^docker"}):
        choose_interface("tcp://10.77.0.1:1", None)
        told += [os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]]
        choose_interface("tcp://10.77.0.1:1", "eth0")
        told += [os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]]
        os.environ["GLOO_SOCKET_IFNAME"] = "eth8"
        told.append(raised_by(choose_interface, "tcp://10.77.0.1:1", None))
    return [*chosen, *found, *told]


def test_ranks_take_the_interface_over_which_they_reach_the_first_one_or_the_one_that_is_named(
    hosts: NetworkHosts, tmp_path: Path
) -> None:
    for rank, found in enumerate(on_ranks(2, look_for_interfaces, tmp_path, hosts=hosts)):
        there = f"host-{rank + 1} has lo (127.0.0.1), eth0 (10.77.0.{rank + 1})"
        there += ", other0:1 (10.78.0.2)" if rank else ""
        assert found[:4] == ["eth0", "=eth0", "eth0", "eth0"]
        assert found[4] == ("other0:1" if rank else "")
        assert found[5].startswith(
            f"RuntimeError: host-{rank + 1} must reach the learner's first rank at 10.79.0.1:1, got: "
        )
        rule = "must be a network interface with an address on every host of the learner's ranks, got"
        assert found[6] == f"ValueError: learner.interface {rule} eth7; {there}"
        assert found[7] == f"ValueError: learner.interface {rule} other0; {there}"
        assert found[8:12] == ["lo", "^docker", "eth0", "=eth0"]
        assert found[12] == f"ValueError: GLOO_SOCKET_IFNAME {rule} eth8; {there}"


def test_on_one_host_nothing_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for rendezvous in ("tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://localhost:1", "file:///x"):
        choose_interface(rendezvous, None)
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def meet_elsewhere(world: World) -> tuple[float, str]:
    """The ranks meet a second time, over IPv6, and once more at a port that is taken on the first host."""
    config = load_config(["learner.ranks=2"])
    import torch.distributed as dist

    dist.destroy_process_group()
    joined = join_ranks(config, world.rank, "tcp://[fd77::1]:29500")
    total = float(joined.world.gather_messages(b"1")[1])
    taken = raised_by(join_ranks, config, 0, "tcp://10.77.0.1:29400") if world.rank == 0 else ""
    joined.world.barrier()
    return total, taken


def test_ranks_meet_over_ipv6_and_a_port_that_is_taken_is_named(hosts: NetworkHosts, tmp_path: Path) -> None:
    first, second = on_ranks(2, meet_elsewhere, tmp_path, hosts=hosts)
    assert first[0] == second[0] == 1.0
    assert first[1].startswith(
        "RuntimeError: rank 0 on host-1 must reach the first rank at tcp://10.77.0.1:29400, got: "
    )


# ---- the batch


def count_fetches(world: World, rows: list[Trajectory]) -> tuple[str, dict[int, int], int]:
    from test_world import CountingSource

    buffer = CountingSource(rows)
    batch = Feed(buffer, world, print).take_batch(0)
    assert isinstance(batch, Batch)
    return identify_host(), dict(buffer.asked), len(batch.tokens)


def test_one_rank_of_each_host_fetches_the_batch(
    hosts: NetworkHosts, trajectories: list[Trajectory], tmp_path: Path
) -> None:
    here, there = hosts
    found = on_ranks(3, count_fetches, tmp_path, trajectories, hosts=[here, here, there])
    names = [name for name, _, _ in found]
    assert names[0] == names[1] != names[2]
    # The source answers "not ready" once.
    assert [asked for _, asked, _ in found] == [{0: 2}, {}, {0: 2}]
    assert len({num_tokens for _, _, num_tokens in found}) == 1


# ---- what a host must have


def find_folder(world: World, folder: Path) -> tuple[str, list[str]]:
    said: list[str] = []
    with patch("learners.rank_hosts.APPEARS_S", 1.0):
        return raised_by(check_shared_folder, folder, world, said.append), said


def hide(host: NetworkHost, folder: Path) -> None:
    host.run("mount", "-t", "tmpfs", "none", folder)


def protect(host: NetworkHost, folder: Path) -> None:
    host.run("mount", "--bind", folder, folder)
    host.run("mount", "-o", "remount,bind,ro", folder)


def test_a_folder_of_checkpoints_that_the_hosts_do_not_share_is_refused(
    hosts: NetworkHosts, tmp_path: Path
) -> None:
    here, there = hosts
    (tmp_path / "run").mkdir()
    folder = tmp_path / "run" / "checkpoints"
    said = ["loading: looking for the folder of checkpoints on all hosts"]
    assert on_ranks(2, find_folder, tmp_path / "1", folder, hosts=hosts) == [("", said)] * 2
    assert on_ranks(2, find_folder, tmp_path / "2", folder, hosts=[there, there]) == [("", [])] * 2
    rule = (
        "ValueError: run.outputs must be on a file system that all hosts of the learner's ranks share, "
        f"because every rank writes its part of a checkpoint there, got {folder} on host-1,"
    )
    for change, text in (
        (protect, "which cannot be written (Read-only file system) on host-2"),
        (hide, "which is another folder, or none, on host-2"),
    ):
        change(there, tmp_path / "run")
        found = on_ranks(2, find_folder, tmp_path / change.__name__, folder, hosts=hosts)
        there.run("umount", tmp_path / "run")
        assert found == [(f"{rule} {text}", said)] * 2
    assert not list(folder.iterdir()), "the file that was looked for is gone"


@pytest.mark.parametrize(
    ("rank", "engine", "has", "lacks"),
    [
        (0, "fsdp", [], "config.json"),
        (1, "fsdp", [], "config.json"),
        (0, "fsdp", ["config.json"], "*.safetensors"),
        (1, "fsdp", ["config.json"], None),
        (1, "megatron", ["config.json"], "*.safetensors"),
        (1, "megatron", ["config.json", "model.safetensors"], None),
    ],
)
def test_a_host_that_lacks_files_of_the_model_is_named(
    rank: int, engine: str, has: list[str], lacks: str | None, tmp_path: Path
) -> None:
    for name in has:
        (tmp_path / name).touch()
    config = load_config([f"model.path={tmp_path}", f"learner.engine={engine}", "learner.ranks=2"])
    told = raised_by(check_model_files, config, Pool.all, rank)
    place = f"the host of the learner's rank {rank}"
    if engine == "megatron":
        place = "every host of the learner's ranks with learner.engine=megatron"
    expected = f"ValueError: model.path must be on {place}, got {tmp_path}/{lacks}, which "
    assert told == ("" if lacks is None else f"{expected}{os.uname().nodename} lacks")


def find_no_room(world: World, folder: Path) -> str:
    def write(temporary: Path) -> list[Path]:
        if world.rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return []

    writer = checkpoint.CheckpointWriter(folder, 1, world)
    writer.begin_checkpoint(checkpoint.CheckpointManifest(1, "life", 0), write)
    try:
        writer.take_written(wait=True)
    except DiskFull as error:
        return str(error)
    return ""


def test_a_full_disk_is_named_with_its_host(hosts: NetworkHosts, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for told in on_ranks(2, find_no_room, tmp_path / "ranks", folder, hosts=hosts):
        assert told.startswith(f"on host-2, the disk of {folder} must have room for")
    assert not list(folder.iterdir())


# ---- a rank, or a link, that goes away


def lose_rank(world: World, dying: int, patient: bool) -> tuple[str, bool]:
    """Waits for the rank that dies, in a collective, or for its message. Returns the error, and whether it
    came before a collective's time was up."""
    if world.rank == dying:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    if dying == 0:
        told = raised_by(lambda: world.broadcast_message("news", lambda: b"", look_s=1.0))
    else:
        told = raised_by(lambda: world.gather_messages(b"", (lambda: None) if patient else None))
    return told.partition(":")[0], time.monotonic() - began < 60


@pytest.mark.parametrize(("dying", "patient"), [(0, False), (1, False), (1, True)])
def test_a_rank_that_is_killed_ends_what_the_others_wait_for(
    dying: int, patient: bool, hosts: NetworkHosts, tmp_path: Path
) -> None:
    (found,) = on_ranks(2, lose_rank, tmp_path, dying, patient, hosts=hosts, dying={dying})
    assert found == ("DistNetworkError" if dying == 0 else "RuntimeError", True)


def lose_link(world: World, folder: Path) -> str:
    import torch.distributed as dist

    from learners.rendezvous import open_store

    port = 29600
    store = open_store(f"tcp://10.77.0.1:{port}", world.rank, world.size)
    short = World(world.rank, world.size, dist.PrefixStore("short", store), timedelta(seconds=2))
    long = World(world.rank, world.size, dist.PrefixStore("long", store), LONG_TIMEOUT)
    long.barrier()
    (folder / f"ready-{world.rank}").touch()
    while not (folder / "cut").exists():
        time.sleep(0.05)
    return raised_by(short.barrier)


def test_a_collective_over_a_link_that_is_cut_ends_when_its_time_is_up(
    hosts: NetworkHosts, tmp_path: Path
) -> None:
    def cut() -> None:
        while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
            time.sleep(0.05)
        hosts.cut_link(hosts[1])
        (tmp_path / "cut").touch()

    cutter = threading.Thread(target=cut, daemon=True)
    cutter.start()
    try:
        # The ranks do not part in order, because they cannot: none is said to end well.
        found = on_ranks(2, lose_link, tmp_path / "ranks", tmp_path, hosts=hosts, dying={2})
    finally:
        cutter.join()
        hosts.mend_link(hosts[1])
    assert all(text.startswith("RuntimeError") for text in found)
