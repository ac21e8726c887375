"""A checkpoint of the Megatron engine, which ranks in any other layout can take up.

Each rank writes what its optimizer holds, `rank_<r>.safetensors`: of each parameter the float32 weights and AdamW's two moments,
as a range of elements of one tensor-parallel shard. The header says which. A reader puts together what it needs from all files,
in Hugging Face's layout in between where the number of shards has changed. Nobody communicates.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from learners.megatron.model import ParallelSizes
from learners.megatron.names import Parameter, ParameterNames

KEYS = ("param", "exp_avg", "exp_avg_sq")


class ShardRange(msgspec.Struct, frozen=True, array_like=True):
    """Elements from `start` to `end` of shard `index` of `count`."""

    index: int
    count: int
    start: int
    end: int


class RankHeader(msgspec.Struct, frozen=True):
    ranks: int
    sizes: ParallelSizes
    step: int
    """Updates of the optimizer."""
    places: dict[str, ShardRange]
    """By parameter's name: what of it is in this file."""


@dataclass(frozen=True, slots=True)
class OptimizerSlice:
    """What one rank's optimizer holds of a parameter."""

    parameter: Parameter
    place: ShardRange
    state: dict[str, Tensor]
    """The live tensors: those of `KEYS`, flat float32, and `step`."""
    written: bool
    """False where another rank holds the same."""


def write(folder: Path, rank: int, header: RankHeader, tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"header": msgspec.json.encode(header).decode()}
    save_file(tensors, folder / f"rank_{rank}.safetensors", metadata)


class SavedState:
    """A checkpoint to read from."""

    def __init__(self, folder: Path, names: ParameterNames) -> None:
        """Raises FileNotFoundError when a rank's file is not there."""
        self._folder, self._names = folder, names
        self._files: list[Any] = [safe_open(folder / "rank_0.safetensors", "pt")]
        self._headers = [_header(self._files[0])]
        for rank in range(1, self._headers[0].ranks):
            self._files.append(safe_open(folder / f"rank_{rank}.safetensors", "pt"))
            self._headers.append(_header(self._files[-1]))
        self.step = max(header.step for header in self._headers)

    def read(self, key: str, parameter: Parameter, place: ShardRange) -> Tensor:
        """[end - start], float32. Raises ValueError when it is not all there."""
        saved = {
            header.places[parameter.name].count for header in self._headers if parameter.name in header.places
        }
        if saved <= {place.count}:
            return self._elements(key, parameter.name, place)
        (count,) = saved
        shape = self._names.shape(parameter, count)
        shards = [
            self._elements(key, parameter.name, ShardRange(index, count, 0, shape.numel())).view(shape)
            for index in range(count)
        ]
        whole = self._names.whole(parameter.layout, shards)
        return self._names.shard(parameter.layout, whole, place.index, place.count).reshape(-1)[
            place.start : place.end
        ]

    def _elements(self, key: str, name: str, wanted: ShardRange) -> Tensor:
        """Of a shard as it was written."""
        out, found = torch.empty(wanted.end - wanted.start), 0
        for file, header in zip(self._files, self._headers, strict=True):
            held = header.places.get(name)
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

    def random(self, rank: int, ranks: int, sizes: ParallelSizes) -> dict[str, Tensor]:
        """The random states of a rank, by name; none for ranks in another layout."""
        if (ranks, sizes) != (self._headers[0].ranks, self._headers[0].sizes):
            return {}
        file, mark = self._files[rank], "random."
        return {
            name.removeprefix(mark): file.get_tensor(name)
            for name in list(file.keys())
            if name.startswith(mark)
        }


def _header(file: Any) -> RankHeader:
    return msgspec.json.decode(file.metadata()["header"], type=RankHeader)
