"""The table of transports: one row for each way in which weights come from the learner to the generators."""

from dataclasses import dataclass
from enum import StrEnum


class TransportUse(StrEnum):
    never = "never"
    where_it_helps = "where_it_helps"
    """Only where the run or the machine calls for it."""
    always = "always"


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportRow:
    """The properties of a transport that configuration and placement need. All else is in its module."""

    module: str
    """Module with both ends of the transport (`sync.transports.ends.TransportModule`). Only a run that uses
    it imports it."""
    serves_hosts: TransportUse = TransportUse.never
    """The learner serves weights to other hosts at `sync.address`."""
    shares_folder: bool = False
    """Snapshots lie in `sync.folder`, which all hosts see, and not in the learner's shared memory."""
    copies_to_device: TransportUse = TransportUse.never
    """The learner keeps the newest version on its GPU, for engines that share the GPU."""
    carries_adapters: bool = True
    """Adapters alone may travel, because each host has its base model and merges them
    (`learner.lora.publish=adapter`)."""
    brings_older: bool = True
    """Versions that are not the newest any more may be brought."""
    brings_parts: bool = False
    """Brings versions whose rows lie on several hosts of the learner's ranks."""
    feeds_ranks: bool = True
    """Engines of several GPUs may take up versions (`generators.tensor_parallel`)."""
    vllm_engine: str | None = None
    """vLLM's weight-transfer engine that a generator on a GPU starts."""


class Transport(StrEnum):
    """The way of model weights from the learner to the generators.

    Each member is a row of the table: its name and a `TransportRow`. To add a transport, add its row here and
    its module in `sync/transports/` (CONTRIBUTING.md).
    """

    row: TransportRow

    def __new__(cls, name: str, row: TransportRow) -> "Transport":
        member = str.__new__(cls, name)
        member._value_ = name
        member.row = row
        return member

    auto = (
        "auto",
        TransportRow(
            module="sync.transports.auto",
            serves_hosts=TransportUse.where_it_helps,
            copies_to_device=TransportUse.where_it_helps,
            brings_parts=True,
            vllm_engine="ipc",
        ),
    )
    """Through memory on the learner's host (and its GPU, where an engine shares it), over `tcp` elsewhere."""
    shared_memory = "shared_memory", TransportRow(module="sync.transports.shared_memory")
    """Through memory, on the learner's host only."""
    tcp = (
        "tcp",
        TransportRow(module="sync.transports.tcp", serves_hosts=TransportUse.always, brings_parts=True),
    )
    """Over ZeroMQ, to any host."""
    disk = "disk", TransportRow(module="sync.transports.disk", shares_folder=True)
    """Through `sync.folder`, for hosts that share a file system. At the end the folder is a model folder."""
    nccl = (
        "nccl",
        TransportRow(
            module="sync.transports.nccl",
            serves_hosts=TransportUse.always,
            carries_adapters=False,
            brings_older=False,
            feeds_ranks=False,
            vllm_engine="nccl",
        ),
    )
    """From GPU to GPU."""
    cuda_ipc = (
        "cuda_ipc",
        TransportRow(
            module="sync.transports.cuda_ipc",
            copies_to_device=TransportUse.always,
            carries_adapters=False,
            feeds_ranks=False,
            vllm_engine="ipc",
        ),
    )
    """Through the memory of the GPU that the learner's rank and the engine share."""
