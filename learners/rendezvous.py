"""The place where the ranks of a learner meet, and the network interface over which they then talk.

Rank 0 listens at an address of its own host. Left to themselves, gloo and NCCL choose an interface by the
host's name or by the interfaces' order, which may be one that other hosts cannot reach (Debian gives a host's
own name to 127.0.1.1). So each rank takes the interface over which its host reaches rank 0.
"""

import logging
import os
import socket
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import SplitResult, urlsplit

import psutil
import torch
import torch.distributed as dist

from configs.addresses import is_loopback
from configs.learner import LearnerKind
from configs.schema import Config
from learners.world import LONG_TIMEOUT, TIMEOUT, World

log = logging.getLogger("slipstream.learner")

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Gloo reads it for every process group, and takes the first address of the interface with this name."""
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"
"""NCCL reads it once in a process. A name after `=` is meant as it is, else as the beginning of names."""


class Pool(StrEnum):
    """Ranks that hold the same engines: all ranks, or those of the policy and those of a critic of its
    own."""

    all = "all"
    policy = "policy"
    critic = "critic"


@dataclass(frozen=True, slots=True)
class JoinedRank:
    """One rank that has met all others. Torch's default process group is that of its pool."""

    pool: Pool
    world: World
    """All ranks."""
    writers: World
    """All ranks, for collectives of the thread that writes checkpoints, which wait however long it takes."""
    publishers: World
    """The same for the thread that publishes versions."""


def join_ranks(config: Config, rank: int, rendezvous: str) -> JoinedRank:
    """Joins all ranks at `rendezvous` (`open_store`).

    Raises ValueError for a network interface that this host does not have, RuntimeError where the ranks
    cannot meet.
    """
    learner, total = config.learner, config.num_learner_ranks
    if learner.engine is LearnerKind.simulated:
        return JoinedRank(Pool.all, World(), World(), World())
    choose_interface(rendezvous, learner.interface)
    # The first ranks hold the policy; those behind them, if any, a critic of its own.
    if total == learner.ranks:
        pool, pool_rank, pool_size = Pool.all, rank, total
    elif rank < learner.ranks:
        pool, pool_rank, pool_size = Pool.policy, rank, learner.ranks
    else:
        pool, pool_rank, pool_size = Pool.critic, rank - learner.ranks, total - learner.ranks
    store = open_store(rendezvous, rank, total)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=dist.PrefixStore(str(pool), store),
        rank=pool_rank,
        world_size=pool_size,
        timeout=TIMEOUT,
    )
    world = World(rank, total, dist.PrefixStore("world", store))
    beside = (
        World(rank, total, dist.PrefixStore(name, store), LONG_TIMEOUT) for name in ("writers", "publishers")
    )
    return JoinedRank(pool, world, *beside)


def open_store(rendezvous: str, rank: int, size: int) -> dist.Store:
    """Opens the ranks' store at `tcp://HOST:PORT`, which rank 0 keeps, or `file://PATH`.

    Raises RuntimeError, with the address, where the ranks cannot meet there.
    """
    place = urlsplit(rendezvous)
    if place.scheme == "file":
        return dist.FileStore(place.path, size)
    host, port = _split_place(place)
    try:
        # Rank 0 listens at this one address: torch would listen on all interfaces.
        listener = _listen(host, port) if rank == 0 else None
        return dist.TCPStore(
            host, port, is_master=rank == 0, timeout=TIMEOUT, wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )  # fmt: skip
    except (OSError, RuntimeError) as error:  # torch's network errors are RuntimeErrors
        raise RuntimeError(
            f"rank {rank} on {os.uname().nodename} must reach the first rank at {rendezvous}, got: {error}"
        ) from error


def choose_interface(rendezvous: str, named: str | None) -> None:
    """Sets the network interface of this process's groups: the one that is named, else the one over which
    this host reaches the rendezvous.

    Without a name, ranks that meet on a loopback address change nothing, and what the environment says
    already stays. Raises ValueError for an interface that this host does not have.
    """
    place = urlsplit(rendezvous)
    if named is None and (place.scheme != "tcp" or is_loopback(_split_place(place)[0])):
        return
    if named is None and (told := os.environ.get(GLOO_VARIABLE)):
        for name in told.split(","):  # gloo takes several
            _check_interface(name, GLOO_VARIABLE)
        return
    name = find_interface(*_split_place(place)) if named is None else named
    _check_interface(name, "learner.interface")
    os.environ[GLOO_VARIABLE] = name
    if named is not None or NCCL_VARIABLE not in os.environ:
        os.environ[NCCL_VARIABLE] = f"={name}"
    log.info("the ranks talk over the network interface %s", name)


def find_interface(host: str, port: int) -> str:
    """Returns the name of the interface over which this host reaches an address. Sends nothing.

    Raises RuntimeError where there is no way.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            own = probe.getsockname()[0].partition("%")[0]
    except OSError as error:
        raise RuntimeError(
            f"{os.uname().nodename} must reach the learner's first rank at {host}:{port}, got: {error}"
        ) from error
    for name, addresses in _list_interfaces().items():
        if own in addresses:
            return name
    raise RuntimeError(f"an interface of {os.uname().nodename} must have its address {own}, got none")


def _check_interface(name: str, key: str) -> None:
    if name not in (interfaces := _list_interfaces()):
        there = ", ".join(f"{one} ({addresses[0]})" for one, addresses in interfaces.items())
        raise ValueError(
            f"{key} must be a network interface with an address on every host of the learner's ranks, got "
            f"{name}; {os.uname().nodename} has {there}"
        )


def _list_interfaces() -> dict[str, list[str]]:
    """Returns the addresses of this host's interfaces that have any, by name; none that hold for one link
    only."""
    found: dict[str, list[str]] = {}
    for name, told in psutil.net_if_addrs().items():
        for one in told:
            if one.family in (socket.AF_INET, socket.AF_INET6) and not one.address.startswith("fe80:"):
                found.setdefault(name, []).append(one.address)
    return found


def _listen(host: str, port: int) -> socket.socket:
    return socket.create_server(
        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024
    )


def _split_place(place: SplitResult) -> tuple[str, int]:
    assert place.scheme == "tcp" and place.hostname is not None and place.port is not None, place.geturl()
    return place.hostname, place.port
