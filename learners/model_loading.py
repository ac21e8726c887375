"""Loads a Hugging Face model into the shards of its ranks, none of which ever holds it whole.

config.json ─▶ the model on `meta` ─▶ what the files lack is drawn ─▶ shards (`learners.fsdp`)
    ─▶ each rank's rows of each tensor, straight from the files

Names are translated by transformers' own tables, as `from_pretrained` does. Some tensors of a model are made
of several of the files: a layer's experts, which a rank reads one by one, or anything else that transformers
converts, which each rank makes whole, one at a time.
"""

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from learners import lora as adapters
from learners.model_files import StoredTensor
from learners.model_source import BUCKET_BYTES, ModelSource

COMPUTED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
"""Buffers in files of older models, which today's models compute."""


@dataclass(slots=True)
class Conversion:
    """Tensors of the files, and the tensors of the model that they become."""

    target: str
    """Name of the model's tensor; of the first one, where there are several."""
    converter: WeightConverter | None
    """None where one tensor becomes one tensor as it is."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Names in the files, in their order, by transformers' pattern."""

    @property
    def names(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]

    @property
    def is_stacked(self) -> bool:
        """True where row i of the target is made of the i-th tensors of each pattern alone: a layer's
        experts."""
        if self.converter is None:
            return False
        first, *rest = self.converter.operations
        return (
            isinstance(first, MergeModulelist)
            and first.dim == 0
            and len(self.converter.target_patterns) == 1
            and all(isinstance(one, Concatenate) and one.dim >= 1 for one in rest)
        )

    def convert(self, model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the model's tensors, by name, from those of the files; of a stack, the rows that
        `tensors` are for."""
        if self.converter is None:
            return {self.target: tensors[self.names[0]]}
        converter = deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names:
                if name in tensors:
                    converter.add_tensor(self.target, name, pattern, tensors[name])
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


@dataclass(slots=True)
class _OwnRows:
    """The rows of a tensor that this rank holds: those from `start` on."""

    local: Tensor
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.local)

    def place(self, first: int, rows: Tensor) -> None:
        """Takes from `rows`, which begin with row `first`, those that are its own."""
        begin, end = max(first, self.start), min(first + len(rows), self.end)
        if begin < end:
            self.local[begin - self.start : end - self.start].copy_(rows[begin - first : end - first])


@dataclass(slots=True)
class _Step:
    """Some rows to read, and what to do with them."""

    reads: list[tuple[str, int, int]]
    """Name, first row, and the row after the last one."""
    place: Callable[[list[Tensor]], None]


class ModelLoading:
    """The way of a model from its files into shards."""

    def __init__(self, model: Any, source: ModelSource, *, is_critic: bool) -> None:
        """`model` is on `meta`, and unchanged. The files may lack the head of a critic, which is drawn from
        torch's random state, as `from_pretrained` draws it.

        Raises ValueError, which names tensor and file, where files and model differ.
        """
        self._source = source
        self._tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", {}))
        """By the name of a tensor that is another one in truth: the name of that one."""
        mapping = get_model_conversion_mapping(model)
        self._conversions = _translate_names(model, mapping, source.entries)
        # `revert_weight_conversion` translates names back by those that were used.
        model._weight_conversions = [one for one in mapping if one.was_used()]
        absent = self._check_tensors(model, is_critic)
        self._drawn = _draw_tensors(model, absent)

    def _check_tensors(self, model: Any, is_critic: bool) -> set[str]:
        """Keeps the conversions that the model needs; returns the names of tensors that no file has, and that
        may be drawn."""
        wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        ignored = [*COMPUTED, *(model._keys_to_ignore_on_load_unexpected or ())]
        # Heads of other models are nothing to a critic, which may lack its own.
        base, kind = f"{model.base_model_prefix}.", type(model).__name__
        found: set[str] = set()
        kept = []
        for conversion in self._conversions:
            made, place = self._convert_shapes(model, conversion), self._describe_place(conversion)
            if all(name not in wanted for name in made):
                if not _matches(conversion.target, ignored) and not (
                    is_critic and not conversion.target.startswith(base)
                ):
                    raise ValueError(f"model.path must hold no tensors but those of {kind}, got {place}")
                continue
            for name, shape in made.items():
                if shape != wanted.get(name):
                    raise ValueError(
                        f"{name} of model.path must have the shape {list(wanted.get(name, ()))} by its "
                        f"config.json, got {list(shape)} from {place}"
                    )
            found |= made.keys()
            kept.append(conversion)
        self._conversions = [one for one in kept if not self._is_copy(one.target, found)]
        found |= {name for name, same in self._tied.items() if same in found}
        found |= {same for name, same in self._tied.items() if name in found}
        absent = wanted.keys() - found
        optional = [*(model._keys_to_ignore_on_load_missing or ())]
        for name in sorted(absent):
            if not (is_critic and not name.startswith(base)) and not _matches(name, optional):
                raise ValueError(f"model.path must hold all tensors of {kind}, got none called {name}")
        return set(absent)

    def _is_copy(self, name: str, found: set[str]) -> bool:
        """True for a tensor that is tied to one that the files hold too."""
        return self._tied.get(name) in found

    def _convert_shapes(self, model: Any, conversion: Conversion) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of what a conversion makes, without reading anything."""
        entries = self._source.entries
        shapes = {name: entries[name].make_rows(entries[name].num_rows, "meta") for name in conversion.names}
        try:
            made = conversion.convert(model, shapes)
        except Exception as error:  # of an operation of transformers on tensors that it does not expect
            raise ValueError(
                f"{conversion.target} of model.path must be what transformers makes of "
                f"{self._describe_place(conversion)}, got: {error}"
            ) from error
        return {name: tuple(tensor.shape) for name, tensor in made.items()}

    def _describe_place(self, conversion: Conversion) -> str:
        first, *others = conversion.names
        more = f" and {len(others)} others" if others else ""
        return f"{first}{more} in {self._source.entries[first].file}"

    # ---- into shards

    def take_drawn(self, model: nn.Module) -> None:
        """Keeps the adapters, which are drawn in memory when they are put into the model."""
        for name, parameter in model.named_parameters():
            if adapters.is_adapter(name):
                self._drawn[name] = parameter.detach()

    @torch.no_grad()
    def fill_shards(self, model: Any) -> None:
        """Fills the model's shards, and the buffers that every rank holds whole. Collective.

        Raises the same kind of error on all ranks where a file cannot be read on one of them.
        """
        own = {
            adapters.base_name(name): _find_own_rows(tensor)
            for name, tensor in chain(model.named_parameters(), model.named_buffers())
        }
        for name in list(self._drawn):
            drawn = self._drawn.pop(name)
            own[adapters.base_name(name)].place(0, _as_rows(drawn))
        for step in self._list_steps(model, own):
            rows = [self._source.read_rows(*read) for read in step.reads]
            if self._source.failure is None:
                with self._source.note_failure():
                    step.place(rows)
            elif not self._source.is_sent:
                break
        self._source.raise_failures()

    def _list_steps(self, model: Any, own: dict[str, _OwnRows]) -> Iterator[_Step]:
        """Yields the steps of this rank; the steps of all ranks, in one order, where the first one reads for
        all."""
        for conversion in self._conversions:
            mine = own[self._tied.get(conversion.target, conversion.target)]
            if conversion.is_stacked:
                count = len(next(iter(conversion.sources.values())))
                for number in range(count) if self._source.is_sent else range(mine.start, mine.end):
                    names = [names[number] for names in conversion.sources.values()]
                    yield self._make_step(model, own, conversion, names, number)
            elif conversion.converter is not None:
                yield self._make_step(model, own, conversion, conversion.names, 0)
            else:
                yield from self._list_rows(conversion.names[0], mine)

    def _make_step(
        self, model: Any, own: dict[str, _OwnRows], conversion: Conversion, names: list[str], first: int
    ) -> _Step:
        """Makes the step that reads whole tensors, and converts them to the rows from `first` on."""

        def place(tensors: list[Tensor]) -> None:
            made = conversion.convert(model, dict(zip(names, tensors, strict=True)))
            for name, rows in made.items():
                own[self._tied.get(name, name)].place(first, _as_rows(rows))

        return _Step([(name, 0, self._source.entries[name].num_rows) for name in names], place)

    def _list_rows(self, name: str, mine: _OwnRows) -> Iterator[_Step]:
        """Yields the steps that read a tensor which becomes one of the model as it is."""
        entry = self._source.entries[name]
        start, end = (0, entry.num_rows) if self._source.is_sent else (mine.start, mine.end)
        size = max(1, BUCKET_BYTES // max(1, entry.row_bytes))
        for first in range(start, end, size):
            yield _Step([(name, first, min(first + size, end))], partial(self._place_rows, mine, first))

    @staticmethod
    def _place_rows(mine: _OwnRows, first: int, read: list[Tensor]) -> None:
        mine.place(first, _as_rows(read[0]))


def _translate_names(model: Any, mapping: list[Any], entries: dict[str, StoredTensor]) -> list[Conversion]:
    """Returns the conversions of all tensors of the files, as `convert_and_load_state_dict_in_model` of
    transformers chooses them."""
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    wanted, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, Conversion] = {}
    for name in sorted(entries, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = rename_source_key(name, [], [], prefix, wanted)
        converter = None if pattern is None else by_pattern[pattern]
        conversion = found.setdefault(target, Conversion(target, converter))
        conversion.sources.setdefault(pattern or name, []).append(name)
    return list(found.values())


def _draw_tensors(model: Any, absent: set[str]) -> dict[str, Tensor]:
    """Returns what no file holds, in the host's memory: absent tensors as transformers draws them, and the
    buffers that are computed from the configuration."""
    absent = absent | {name for name, _ in model.named_non_persistent_buffers()}
    everything = chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    for name, tensor in list(everything):
        if name not in absent:
            tensor._is_hf_initialized = True  # transformers' mark for what it must not draw
            continue
        path, _, last = name.rpartition(".")
        module, value = model.get_submodule(path), torch.zeros_like(tensor, device="cpu")
        if last in module._parameters:
            module._parameters[last] = nn.Parameter(value, requires_grad=tensor.requires_grad)
        else:
            module._buffers[last] = value
    model.initialize_weights()
    return {name: model.get_parameter_or_buffer(name).detach() for name in absent}


def _find_own_rows(tensor: Tensor) -> _OwnRows:
    if not isinstance(tensor, DTensor):
        return _OwnRows(_as_rows(tensor.detach()), 0)
    assert all(one.is_replicate() or one == Shard(0) for one in tensor.placements), tensor.placements
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return _OwnRows(tensor.to_local().detach(), offset[0])


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim else tensor.reshape(1)


def _matches(name: str, patterns: list[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
