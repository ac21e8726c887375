"""The weights of a transformers model that an engine samples from: takes up versions in place, and attests
what the model then holds.

Such a model holds nearly every tensor as it is published. Two kinds lie elsewhere: a tied head, which is the
embedding, and the experts of a layer, which transformers 5 stacks in one parameter [experts, rows, columns].
transformers' own conversion, by which a learner publishes, says where each published expert lies in there.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from sync.digest import tensor_digests
from sync.engine_layout import copy_and_digest
from sync.manifest import DigestMismatch, Manifest, TensorEntry, dtype_name
from sync.snapshot import Snapshot, leave_memory
from sync.stream import list_saved_buffers
from sync.weight_source import WeightSource, load_attested

PROBE_COLUMNS = 2
"""Columns of the stand-in for a stacked parameter. With one, transformers would drop the dimension."""


@dataclass(frozen=True, slots=True)
class HeldPlace:
    """Where a published tensor lies in a model: elements of a parameter or buffer, side by side."""

    holder: Tensor
    first: int
    shape: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        return self.shape == tuple(self.holder.shape)

    def view(self) -> Tensor:
        """Returns a view of what the model holds now."""
        held = self.holder.data.view(-1)[self.first : self.first + math.prod(self.shape)]
        return held.view(self.shape)


class TransformersWeights:
    """`sync.weight_source.EngineWeights` on a transformers model."""

    def __init__(self, model: nn.Module) -> None:
        """Raises RuntimeError for a model that holds a tensor in a form that cannot be updated."""
        self._places = dict(_list_places(model))
        self._may_map = True
        self._held: Snapshot | None = None
        """The snapshot in whose memory parameters lie, perhaps."""

    def load_version(self, source: WeightSource, mapped: bool = True) -> None:
        """Takes up a version, and raises, as `load_attested` does. `mapped`: on a CPU, parameters may use the
        snapshot's own memory."""
        self._may_map = mapped
        load_attested(source, self)

    @property
    def is_on_cpu(self) -> bool:
        return next(iter(self._places.values())).holder.device.type == "cpu"

    def check_manifest(self, manifest: Manifest) -> None:
        """Raises DigestMismatch unless the manifest's tensors make up the model's parameters, all of them."""
        filled: dict[tuple[int, int], TensorEntry] = {}
        for entry in manifest.tensors:
            place = self._places.get(entry.name)
            if place is None:
                raise DigestMismatch(f"the engine's model has no place for the published {entry.name}")
            held = dtype_name(place.holder.dtype), place.shape
            if (entry.dtype, entry.shape) != held:
                raise DigestMismatch(
                    f"{entry.name} was published as {entry.dtype} {entry.shape}, "
                    f"the engine holds {held[0]} {held[1]}"
                )
            other = filled.setdefault((id(place.holder), place.first), entry)
            if other.digest != entry.digest:
                raise DigestMismatch(
                    f"{other.name} and {entry.name} were published with other bytes, and are one tensor here"
                )
        lacking = [
            name for name, place in self._places.items() if (id(place.holder), place.first) not in filled
        ]
        if lacking:
            raise DigestMismatch(
                f"version {manifest.version} does not fill parameters of the engine: {lacking[:3]}"
            )

    @torch.no_grad()
    def load_snapshot(self, snapshot: Snapshot) -> dict[str, str]:
        """Maps a snapshot where it may (on a CPU), and copies the rest. Returns the digests of what the model
        holds then.

        Mapped tensors are the verified memory itself; copied ones are digested where they end up.
        """
        self.check_manifest(snapshot.manifest)
        snapshot.attest()
        before, self._held = self._held, snapshot if self.is_on_cpu else None
        held: dict[str, str] = {}
        for entry in snapshot.manifest.tensors:
            place, tensor = self._places[entry.name], snapshot.view_tensor(entry.name)
            if not self.is_on_cpu:
                place.view().copy_(tensor)
            elif self._may_map and place.is_whole:
                place.holder.data, held[entry.name] = tensor, entry.digest
            else:
                leave_memory(place.holder, before)
                held[entry.name] = copy_and_digest(tensor, place.view())
        # Every parameter has been replaced or written, so none lies in the memory of the version before.
        if before is not None and before is not snapshot:
            before.release_memory()
        return held if self.is_on_cpu else self.held_digests(snapshot.manifest)

    def receive_update(
        self, manifest: Manifest, update: dict[str, Any], group: dict[str, Any] | None = None
    ) -> None:
        raise AssertionError("the configuration refuses transports that need a transfer engine")

    def held_digests(self, manifest: Manifest) -> dict[str, str]:
        """Computes the digests of what the model holds now, by the names of the manifest's tensors."""
        return tensor_digests({entry.name: self._places[entry.name].view() for entry in manifest.tensors})


def _list_places(model: nn.Module) -> Iterator[tuple[str, HeldPlace]]:
    """Yields each tensor that may be published, by its published name; a tied one by each of its names."""
    orders: dict[tuple[str, tuple[int, ...]], list[tuple[str, int, tuple[int, ...]]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (published := _find_published_name(model, name, parameter)) is not None:
            yield published, HeldPlace(parameter, 0, tuple(parameter.shape))
            continue
        prefix, layer = _split_at_layer(name)
        key = (name.removeprefix(prefix + layer), tuple(parameter.shape))
        if key not in orders:
            # All layers are alike, and the conversion takes a while with many experts.
            orders[key] = [
                (part.removeprefix(prefix + layer), first, shape)
                for part, first, shape in _find_stacked(model, name, parameter)
            ]
        for part, first, shape in orders[key]:
            yield prefix + layer + part, HeldPlace(parameter, first, shape)
    for name, buffer in list_saved_buffers(model):
        yield name, HeldPlace(buffer, 0, tuple(buffer.shape))


def _find_published_name(model: nn.Module, name: str, parameter: Tensor) -> str | None:
    """Returns a parameter's name in a model's file; None for one that stands there as several tensors."""
    probe = torch.empty(parameter.shape, device="meta")
    published = revert_weight_conversion(model, {name: probe})
    return next((name for name, tensor in published.items() if tensor is probe), None)


def _split_at_layer(name: str) -> tuple[str, str]:
    """Returns the parts `model.layers.` and `7.` of `model.layers.7.mlp.experts.gate_up_proj`."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return ("", "") if at is None else (".".join(parts[:at]) + ".", parts[at] + ".")


def _find_stacked(
    model: nn.Module, name: str, parameter: Tensor
) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Yields (published name, first element, shape) of the tensors that a stacked parameter is published as.

    transformers converts the numbers of the rows in the parameter's place, so that each tensor shows which
    rows it consists of. Raises RuntimeError for tensors that are no rows side by side.
    """
    *rows, columns = parameter.shape
    numbers = torch.arange(math.prod(rows) * PROBE_COLUMNS).view(*rows, PROBE_COLUMNS)
    for published, found in revert_weight_conversion(model, {name: numbers}).items():
        first = int(found.flatten()[0])
        expected = first + torch.arange(found.numel())
        if found.shape[-1] != PROBE_COLUMNS or not torch.equal(found.flatten(), expected):
            raise RuntimeError(f"transformers must keep {published} as rows of {name}, got another order")
        yield published, first // PROBE_COLUMNS * columns, (*found.shape[:-1], columns)
