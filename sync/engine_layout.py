"""Where each published tensor lies in an inference engine's model.

vLLM keeps weights in a layout of its own: q, k and v in one matrix, gate and up in another, the vocabulary
padded to a multiple of 64 rows, a tied head not at all, the experts of a mixture in two matrices a layer
(`sync.experts`). `EngineLayout` finds each published tensor in there again, so that what the engine holds can
be digested tensor by tensor and compared with what the learner published. A rank of a tensor-parallel engine
holds parts of most tensors (`sync.rank_slices`).
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sync.digest import StreamDigest, tensor_digest, tensor_digests
from sync.experts import ExpertLayer, ExpertPlace
from sync.manifest import DigestMismatch, Manifest, TensorEntry, dtype_name
from sync.rank_slices import CHUNK_BYTES, RankSlice, copy_pieces, digest_pieces, join_slices
from sync.snapshot import Snapshot, leave_memory

FEW_BYTES = 1 << 25
"""Snapshots below this size are copied by one thread."""
DERIVED = ("W_UK_T", "W_UV")
"""Matrices that vLLM's latent attention (MLA) makes of `kv_b_proj` once the model is built, and reads in its
stead."""


@dataclass(frozen=True, slots=True)
class ModelStructure:
    """The modules of an engine's model that keep weights in another form than they are published in."""

    vocabulary_rows: dict[str, int]
    """By parameter, the rows of an embedding without padding."""
    latent_attentions: dict[str, Any]
    """By name, the modules of latent attention."""
    expert_layers: list[ExpertLayer]
    slices: Mapping[str, Sequence[RankSlice]] = field(default_factory=dict)
    """By parameter, what this rank holds of each published tensor that lies in it, in their order. A
    parameter that is not here holds whole tensors."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of a published tensor, or of this rank's part of it."""

    parameter: str
    first: int
    """First row in the parameter."""
    held: RankSlice | None
    """None: all of it."""

    def cut_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of what is held of a tensor of this shape."""
        return shape if self.held is None else self.held.cut_shape(shape)


class EngineLayout:
    """The place of each tensor of a manifest in a model: some rows of some parameter, or an expert's
    elements."""

    def __init__(self, model: nn.Module, structure: ModelStructure, manifest: Manifest) -> None:
        """Raises DigestMismatch unless the manifest's tensors make up the model's parameters, all of them."""
        self._packed = {
            part: (merged, parts)
            for merged, parts in getattr(model, "packed_modules_mapping", {}).items()
            for part in parts
        }
        self._entries = {entry.name: entry for entry in manifest.tensors}
        # With duplicates, because a tied head stands under both its names.
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._latent, self._slices = structure.latent_attentions, structure.slices
        orders: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._experts: dict[str, ExpertPlace] = dict(
            place for layer in structure.expert_layers for place in layer.list_places(orders)
        )
        self._places: dict[str, TensorPlace] = {}
        """By tensor."""
        tensors: dict[int, list[str]] = {}
        rows: dict[int, int] = {}
        for entry in manifest.tensors:
            if entry.name in self._experts:
                self._expect_expert(entry, self._experts[entry.name])
                continue
            place = self._places[entry.name] = self._find_place(entry)
            self._view_tensor(entry.name)
            parameter = id(self._parameters[place.parameter])
            tensors.setdefault(parameter, []).append(entry.name)
            num_rows = place.cut_shape(entry.shape)[0] if entry.shape else 1
            rows[parameter] = max(rows.get(parameter, 0), place.first + num_rows)
        if lacking := self._find_unfilled(structure, rows):
            raise DigestMismatch(
                f"version {manifest.version} does not fill parameters of the engine: {lacking[:3]}"
            )
        self._parts = [
            (parameter, sorted(tensors[id(parameter)], key=lambda name: self._places[name].first))
            for parameter in {id(parameter): parameter for parameter in self._parameters.values()}.values()
            if id(parameter) in tensors
        ]
        """Each parameter with its tensors, in the order of its rows."""

    def _find_unfilled(self, structure: ModelStructure, rows: dict[int, int]) -> list[str]:
        """Returns experts that were not published, and parameters whose last published row is not their last
        one."""
        derived = {f"{prefix}.{name}" for prefix in self._latent for name in DERIVED}
        in_experts = {place.parameter for place in self._experts.values()}
        unfilled = [name for name in self._experts if name not in self._entries]
        for name, parameter in self._parameters.items():
            if name in in_experts | derived:
                continue
            num_rows = structure.vocabulary_rows.get(name, len(parameter) if parameter.dim() else 1)
            if rows.get(id(parameter), 0) != num_rows:
                unfilled.append(name)
        return unfilled

    def fits_manifest(self, manifest: Manifest) -> bool:
        """True when the manifest has the same tensors as the one that the layout was made for, whatever is in
        them."""
        return len(manifest.tensors) == len(self._entries) and all(
            (known := self._entries.get(entry.name))
            and (known.dtype, known.shape) == (entry.dtype, entry.shape)
            for entry in manifest.tensors
        )

    def map_snapshot(self, snapshot: Snapshot, before: Snapshot | None = None) -> dict[str, str]:
        """Puts the file's own memory in the place of each parameter that has the same layout, and copies the
        others. `before`: the snapshot in whose memory parameters may lie.

        Returns the digests of what the parameters hold: of mapped tensors, those that the file was verified
        to have.
        """
        held = {entry.name: entry.digest for entry in snapshot.manifest.tensors}
        for parameter, names in self._parts:
            merged = snapshot.view_merged(names)
            if merged is not None and merged.shape == parameter.shape:
                parameter.data = merged
            else:
                leave_memory(parameter, before)
                for name in names:
                    held[name] = copy_and_digest(snapshot.view_tensor(name), self._view_tensor(name))
        held |= {name: self._write_tensor(name, snapshot.view_tensor(name)) for name in self._experts}
        self._refresh_derived()
        return held

    def copy_snapshot(self, snapshot: Snapshot, before: Snapshot | None = None) -> dict[str, str]:
        """Copies each tensor to where it belongs; returns the digests of what is there. `before`: as in
        `map_snapshot`."""
        for parameter, _ in self._parts:
            leave_memory(parameter, before)
        if snapshot.manifest.num_bytes < FEW_BYTES:
            held = {name: self._write_tensor(name, source) for name, source in snapshot.named_tensors()}
        else:
            # Two threads, because copying and digesting release the interpreter's lock.
            with ThreadPoolExecutor(2) as pool:
                copies = {
                    name: pool.submit(self._write_tensor, name, source)
                    for name, source in snapshot.named_tensors()
                }
            held = {name: copied.result() for name, copied in copies.items()}
        self._refresh_derived()
        return held

    def copy_parts(self, snapshot: Snapshot) -> tuple[dict[str, str], dict[str, str]]:
        """Copies this rank's part of each tensor to where it belongs. Returns the digests of the parts in the
        file, and of what has arrived, by the names of the tensors."""
        published, held = {}, {}
        for name in self._places:
            pieces = self._cut_tensor(name, snapshot)
            published[name], held[name] = copy_pieces(pieces, self._view_tensor(name))
        for name, place in self._experts.items():
            (piece,) = self._cut_tensor(name, snapshot)
            published[name] = digest_pieces([piece])
            held[name] = place.write_tensor(self._expert_matrices(place), piece)
        self._refresh_derived()
        return published, held

    def part_digests(self, snapshot: Snapshot) -> dict[str, str]:
        """Computes the digest of this rank's part of each tensor in the file."""
        return {name: digest_pieces(self._cut_tensor(name, snapshot)) for name in self._entries}

    def _cut_tensor(self, name: str, snapshot: Snapshot) -> list[torch.Tensor]:
        """Returns the pieces of a published tensor that this rank holds, as views of the file."""
        tensor = snapshot.view_tensor(name)
        held = self._experts[name].held if name in self._experts else self._places[name].held
        return [tensor] if held is None else held.cut_tensor(tensor)

    def held_digests(self) -> dict[str, str]:
        """Computes the digest of what the parameters hold now, by the names of the published tensors."""
        experts = {name: (place, self._expert_matrices(place)) for name, place in self._experts.items()}
        views = {
            name: place.read_tensor(matrices)
            for name, (place, matrices) in experts.items()
            if place.elements is None
        }
        held = tensor_digests({name: self._view_tensor(name) for name in self._places} | views)
        # Experts that are no views are copied one after the other: together they are as large as the model.
        for name in experts.keys() - views.keys():
            place, matrices = experts[name]
            held[name] = tensor_digest(place.read_tensor(matrices))
        # Attention reads the derived matrices, so the digest of `kv_b_proj` is taken of them.
        for module in self._latent.values():
            name = next(name for name, p in self._parameters.items() if p is module.kv_b_proj.weight)
            held |= tensor_digests({name: _restore_kv_b_proj(module)})
        return held

    def _refresh_derived(self) -> None:
        """Makes the matrices of latent attention views of the weights that they come from, which are
        attested."""
        for module in self._latent.values():
            for parameter, view in zip((module.W_UK_T, module.W_UV), _derive_matrices(module), strict=True):
                parameter.data = view

    def _write_tensor(self, name: str, source: torch.Tensor) -> str:
        """Copies one tensor to where it belongs; returns the digest of what is there."""
        place = self._experts.get(name)
        if place is None:
            return copy_and_digest(source, self._view_tensor(name))
        return place.write_tensor(self._expert_matrices(place), source)

    def _expert_matrices(self, place: ExpertPlace) -> torch.Tensor:
        return self._parameters[place.parameter].data

    def _expect_expert(self, entry: TensorEntry, place: ExpertPlace) -> None:
        """Raises DigestMismatch unless an expert's tensor has the shape and type that the engine holds."""
        held = dtype_name(self._parameters[place.parameter].dtype), place.published_shape
        if (entry.dtype, entry.shape) != held:
            raise _form_mismatch(entry, *held)

    def _find_place(self, entry: TensorEntry) -> TensorPlace:
        """Returns the parameter that holds a tensor, and the tensor's first row there. Raises DigestMismatch
        for one that was published in another size."""
        *module, leaf, kind = entry.name.rsplit(".", 2)
        merged, parts = self._packed.get(leaf, (leaf, [leaf]))
        siblings = [".".join([*module, part, kind]) for part in parts[: parts.index(leaf)]]
        lacking = [name for name in siblings if name not in self._entries]
        if lacking:
            raise DigestMismatch(f"the snapshot has {entry.name} but lacks {lacking}")
        parameter = ".".join([*module, merged, kind])
        if parameter not in self._slices:
            return TensorPlace(parameter, sum(self._entries[name].shape[0] for name in siblings), None)
        slices = self._slices[parameter]
        held = slices[parts.index(leaf)] if len(slices) == len(parts) else join_slices(slices)
        if len(parts) not in (1, len(slices)) or not held.fits_shape(entry.shape):
            raise DigestMismatch(
                f"{entry.name} was published as {entry.shape}, the engine divides {held.total} elements of "
                f"dimension {held.dim} between its ranks"
            )
        return TensorPlace(parameter, held.first, held)

    def _view_tensor(self, tensor: str) -> torch.Tensor:
        """Returns a view of the parameter's rows that hold a published tensor now."""
        entry, place = self._entries[tensor], self._places[tensor]
        parameter, shape = self._parameters.get(place.parameter), place.cut_shape(entry.shape)
        if parameter is None:
            raise DigestMismatch(f"the engine's model has no place for the published {tensor}")
        view = parameter.data[place.first : place.first + shape[0]] if shape else parameter.data
        held = dtype_name(view.dtype), tuple(view.shape)
        if (entry.dtype, shape) != held:
            raise _form_mismatch(entry, *held)
        return view


def _form_mismatch(entry: TensorEntry, dtype: str, shape: tuple[int, ...]) -> DigestMismatch:
    return DigestMismatch(
        f"{entry.name} was published as {entry.dtype} {entry.shape}, the engine holds {dtype} {shape}"
    )


def _derive_matrices(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [heads, P, L] and [heads, L, V]: views of `kv_b_proj` [heads · (P + V), L], as vLLM 0.32 makes
    them."""
    by_head = module.kv_b_proj.weight.data.unflatten(0, (module.num_heads, -1))
    up_key, up_value = by_head.split([module.qk_nope_head_dim, module.v_head_dim], dim=1)
    return up_key, up_value.transpose(1, 2)


def _restore_kv_b_proj(module: Any) -> torch.Tensor:
    """Returns the `kv_b_proj` [heads · (P + V), L] that the derived matrices come from."""
    return torch.cat([module.W_UK_T.data, module.W_UV.data.transpose(1, 2)], 1).flatten(0, 1)


def copy_and_digest(source: torch.Tensor, place: torch.Tensor) -> str:
    """Copies a tensor, and digests what has arrived while it is still in the processor's cache. Returns the
    digest."""
    digest = StreamDigest()
    into, out = (tensor.view(-1).view(torch.uint8).numpy() for tensor in (place, source))
    for begin in range(0, len(out), CHUNK_BYTES):
        chunk = into[begin : begin + CHUNK_BYTES]
        chunk[:] = out[begin : begin + CHUNK_BYTES]
        digest.update(chunk)
    return digest.hexdigest()
