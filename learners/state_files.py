"""The files of an FSDP engine's state, which any number of ranks can load.

Each rank writes the rows that it publishes into `rank_<r>.safetensors`, straight from their memory. The
file's header says where they belong, in the words of `HuggingFaceStorageReader`, which also reads what its
own writer has written (older checkpoints). That writer makes two more copies of a rank's part in memory, so
it is not used. No rank communicates to write.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from learners.shards import find_own_rows


class WholeReader(HuggingFaceStorageReader):
    """Refuses files that lack rows of a tensor: torch would leave these as they were."""

    def read_metadata(self) -> Metadata:
        metadata = super().read_metadata()
        for name, told in metadata.state_dict_metadata.items():
            held = sum(chunk.sizes.numel() for chunk in told.chunks)
            if held != told.size.numel():
                raise ValueError(
                    f"the checkpoint must hold all of {name}, got {self.path} with {held:,} of "
                    f"{told.size.numel():,} elements or more"
                )
        return metadata


class CopiedRows(NamedTuple):
    """Rows of a tensor, in the host's memory."""

    rows: Tensor
    """[n, ...]; a tensor without dimensions as it is."""
    first: int
    """Number of the first of them in the tensor."""


def copy_own_rows(state: Mapping[str, Tensor], rank: int) -> dict[str, CopiedRows]:
    """Copies what a rank writes: its rows of tensors that are divided; all of the others on the first rank.

    All ranks together copy each element once, replicas too.
    """
    copied = {}
    for name, tensor in state.items():
        if isinstance(tensor, DTensor):
            first, rows = find_own_rows(tensor)
            is_written = rows.numel() > 0
        else:
            first, rows, is_written = 0, tensor.detach(), rank == 0
        if is_written:
            own = rows.to("cpu", copy=True, memory_format=torch.contiguous_format)
            copied[name] = CopiedRows(own, first)
    return copied


def write_rows(folder: Path, rank: int, copied: Mapping[str, CopiedRows]) -> Path:
    """Writes one rank's file into the folder; returns its path."""
    places = {
        name: {"saved_offsets": [first, *(0 for _ in rows.shape[1:])] if rows.ndim else []}
        for name, (rows, first) in copied.items()
    }
    path = folder / f"rank_{rank}.safetensors"
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
    save_file({name: rows for name, (rows, _) in copied.items()}, path, metadata)
    return path


def load_rows(folder: Path, state: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Reads this rank's shards into the tensors of `state`, from all files of the folder.

    Collective in `group`, whose collectives must have time for it. Raises FileNotFoundError, or what torch
    raises, when the folder does not hold these tensors.
    """
    dcp.load(dict(state), storage_reader=WholeReader(str(folder)), process_group=group)
