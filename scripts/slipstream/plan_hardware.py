"""The hardware that a run is planned for: told on the command line, or else this machine's."""

import argparse
import shutil
import subprocess
from dataclasses import dataclass, fields

import psutil

from sync.folders import SHARED_MEMORY

GIB = 2**30
GPUS, GPU_GIB = 8, 80.0
"""GPUs of a host, and memory of one, that nobody describes."""
MOST_HOSTS = 4096
HOST_GIB_PER_GPU = 256.0
"""Memory of a host that nobody describes, for each of its GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Speeds in GB/s, by default those of docs/benchmarks.md: two vCPUs of an AMD EPYC, shared."""

    copy: float = 8.3
    """A rank copies its rows, and training waits ("publication by several ranks", bfloat16: 191 MB in 23.0
    ms)."""
    write: float = 1.5
    """A rank digests them and writes them into shared memory, beside training (191 MB in 125 ms)."""
    verify: float = 6.2
    """A host reads a version and compares digests ("verify": 312 ms)."""
    network: float = 0.95
    """Into one host ("fetch" over 8 Gbit/s: 183 MB in 192 ms)."""
    disk: float = 1.26
    """One host writes and syncs, or reads ("write and sync")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Hosts that are all alike."""

    hosts: int
    gpus: int
    """GPUs of one host."""
    gpu_bytes: float
    """Memory of one GPU."""
    host_bytes: float
    """Memory of one host."""
    shared_bytes: float
    """The part of it that may be shared memory (/dev/shm)."""
    note: str = ""
    """Where the numbers come from, for people."""

    @property
    def num_gpus(self) -> int:
        return self.hosts * self.gpus

    def __str__(self) -> str:
        hosts = "1 host" if self.hosts == 1 else f"{self.hosts} hosts, each"
        gpus = (
            f"{self.gpus} GPU{'s' if self.gpus > 1 else ''} of {self.gpu_bytes / GIB:.1f} GiB"
            if self.gpus
            else "no GPU"
        )
        return (
            f"{hosts} with {gpus} and {self.host_bytes / GIB:,.0f} GiB of memory "
            f"({self.shared_bytes / GIB:,.0f} in {SHARED_MEMORY})"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the words for hardware and rates."""
    machine = parser.add_argument_group("hardware (this machine's, where nothing is said)")
    machine.add_argument("--hosts", type=_number_of_hosts, default=1, help="number of hosts, all alike")
    machine.add_argument("--gpus", type=_whole, help="GPUs of each host; 0: all runs on CPUs")
    machine.add_argument("--gpu-memory", type=_positive, metavar="GIB", help="of each GPU")
    machine.add_argument("--host-memory", type=_positive, metavar="GIB", help="of each host")
    machine.add_argument(
        "--shared-memory", type=_positive, metavar="GIB", help="of it in /dev/shm (half, as Linux has it)"
    )
    rates = parser.add_argument_group("rates in GB/s (measured on two vCPUs: docs/benchmarks.md)")
    for name, words in (
        ("copy", "a rank copies its rows of a version"),
        ("write", "a rank writes them into shared memory"),
        ("verify", "a host compares digests"),
        ("network", "into one host"),
        ("disk", "a host writes or reads a checkpoint"),
    ):
        rates.add_argument(
            f"--{name}-rate", type=_positive, default=getattr(Rates(), name), metavar="GB/S",
            help=f"{words} (%(default)s)",
        )  # fmt: skip


def read_rates(told: argparse.Namespace) -> Rates:
    return Rates(**{field.name: getattr(told, f"{field.name}_rate") for field in fields(Rates)})


def read_hardware(told: argparse.Namespace) -> Hardware:
    """Returns what is told; the rest is this machine's, or usual where GPUs are told."""
    is_other, found = told.gpus is not None or told.gpu_memory is not None, list_gpu_bytes()
    gpus = told.gpus if told.gpus is not None else len(found) or (GPUS if is_other else 0)
    gpu_bytes = GIB * told.gpu_memory if told.gpu_memory else min(found, default=GIB * GPU_GIB)
    notes = [] if is_other else ["of this machine"]
    if told.gpus is None and is_other and not found:
        notes.append(f"{GPUS} GPUs assumed (--gpus)")
    if gpus and told.gpu_memory is None and not found:
        notes.append(f"{GPU_GIB:.0f} GiB of a GPU assumed (--gpu-memory)")
    host_bytes = GIB * told.host_memory if told.host_memory else float(psutil.virtual_memory().total)
    if not told.host_memory and is_other and gpus:
        host_bytes = GIB * HOST_GIB_PER_GPU * gpus
        notes.append(f"{HOST_GIB_PER_GPU:.0f} GiB of a host's memory for each GPU assumed (--host-memory)")
    shared = host_bytes / 2
    if told.shared_memory:
        shared = GIB * told.shared_memory
    elif not told.host_memory and not (is_other and gpus):
        shared = float(shutil.disk_usage(SHARED_MEMORY).total)
    if not gpus and told.gpus is None:
        notes.append("which has no GPU: --gpus 8 --gpu-memory 80 plans for others")
    return Hardware(
        hosts=told.hosts,
        gpus=gpus,
        gpu_bytes=gpu_bytes if gpus else 0.0,
        host_bytes=host_bytes,
        shared_bytes=shared,
        note="; ".join(notes),
    )


def list_gpu_bytes() -> list[float]:
    """Returns the memory of each GPU of this machine, as its driver tells; nothing where there is none."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    if shutil.which(query[0]) is None:
        return []
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:  # a driver that hangs has no GPU for a run either
        return []
    return [float(line) * 2**20 for line in asked.stdout.split() if line.isdigit()]


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value


def _whole(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text}")
    return int(text)


def _number_of_hosts(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= MOST_HOSTS:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {MOST_HOSTS}, got {text}")
    return int(text)
