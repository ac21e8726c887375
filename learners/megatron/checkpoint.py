"""Checkpoints of the Megatron engine, which ranks in any other layout can load.

Each rank writes the state that its optimizer holds into `rank_<r>.safetensors`: of each parameter the float32
weights and AdamW's two moments, as a range of elements of one tensor-parallel shard. The file's header says
which range. A reader puts together the ranges that it needs from all files, and goes through Hugging Face's
layout where the number of shards has changed. No rank communicates.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from learners.layout_rules import ParallelSizes
from learners.megatron.names import Parameter, ParameterNames

STATE_KEYS = ("param", "exp_avg", "exp_avg_sq")
"""Tensors of a parameter's state: float32 weights, and AdamW's first and second moment."""


class ShardRange(msgspec.Struct, frozen=True, array_like=True):
    """The elements from `start` to `end` of shard `index`, one of `count` shards of a parameter."""

    index: int
    count: int
    start: int
    end: int


class RankHeader(msgspec.Struct, frozen=True):
    """Describes one rank's file."""

    ranks: int
    sizes: ParallelSizes
    step: int
    """Updates that the optimizer has made."""
    ranges: dict[str, ShardRange]
    """The range of each parameter that this file holds, by the parameter's name."""


@dataclass(frozen=True, slots=True)
class OptimizerSlice:
    """The range of a parameter that one rank's optimizer holds, with its state."""

    parameter: Parameter
    range: ShardRange
    state: dict[str, Tensor]
    """The optimizer's own tensors: `STATE_KEYS`, flat float32, and `step`."""
    is_written: bool
    """False where another rank writes the same range."""


def write_rank_file(folder: Path, rank: int, header: RankHeader, tensors: dict[str, Tensor]) -> list[Path]:
    """Writes one rank's file into the folder, which it makes; returns the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"header": msgspec.json.encode(header).decode()}
    path = folder / f"rank_{rank}.safetensors"
    save_file(tensors, path, metadata)
    return [path]


class SavedState:
    """Reads a checkpoint."""

    def __init__(self, folder: Path, names: ParameterNames) -> None:
        """Raises FileNotFoundError when a rank's file is not there."""
        self._folder, self._names = folder, names
        self._files: list[Any] = [safe_open(folder / "rank_0.safetensors", "pt")]
        self._headers = [_read_header(self._files[0])]
        for rank in range(1, self._headers[0].ranks):
            self._files.append(safe_open(folder / f"rank_{rank}.safetensors", "pt"))
            self._headers.append(_read_header(self._files[-1]))
        self.step = max(header.step for header in self._headers)

    def read_range(self, key: str, parameter: Parameter, wanted: ShardRange) -> Tensor:
        """Returns [end - start] float32 of one of `STATE_KEYS`.

        Raises ValueError when the files lack some of it.
        """
        saved = {
            header.ranges[parameter.name].count for header in self._headers if parameter.name in header.ranges
        }
        if saved <= {wanted.count}:
            return self._read_elements(key, parameter.name, wanted)
        # The checkpoint has another number of shards: join all of them, and cut the wanted one out of the
        # whole.
        (count,) = saved
        shape = self._names.find_shape(parameter, count)
        shards = [
            self._read_elements(key, parameter.name, ShardRange(index, count, 0, shape.numel())).view(shape)
            for index in range(count)
        ]
        whole = self._names.join_shards(parameter.layout, shards)
        return self._names.cut_shard(parameter.layout, whole, wanted.index, wanted.count).reshape(-1)[
            wanted.start : wanted.end
        ]

    def _read_elements(self, key: str, name: str, wanted: ShardRange) -> Tensor:
        """Reads a range of a shard that the checkpoint has as it is, from all files that hold some of it."""
        out, found = torch.empty(wanted.end - wanted.start), 0
        for file, header in zip(self._files, self._headers, strict=True):
            held = header.ranges.get(name)
            if held is None or held.index != wanted.index:
                continue
            start, end = max(held.start, wanted.start), min(held.end, wanted.end)
            if start < end:
                part = file.get_slice(f"{key}.{name}")[start - held.start : end - held.start]
                out[start - wanted.start : end - wanted.start] = part
                found += end - start
        if found != len(out):
            raise ValueError(
                f"the checkpoint must hold all of {name}, got {self._folder} with {found} of {len(out)}"
            )
        return out

    def read_random_states(self, rank: int, ranks: int, sizes: ParallelSizes) -> dict[str, Tensor]:
        """Returns the random states of a rank, by name; none for ranks in another layout."""
        if (ranks, sizes) != (self._headers[0].ranks, self._headers[0].sizes):
            return {}
        file, mark = self._files[rank], "random."
        return {
            name.removeprefix(mark): file.get_tensor(name)
            for name in list(file.keys())
            if name.startswith(mark)
        }


def _read_header(file: Any) -> RankHeader:
    return msgspec.json.decode(file.metadata()["header"], type=RankHeader)
