"""What runs inside vLLM's worker: takes up snapshots in place, and attests what the engine's parameters then hold.

vLLM keeps weights in a layout of its own: q, k and v in one matrix, gate and up in another, the vocabulary padded to a
multiple of 64 rows, a tied head not at all, the experts of a mixture in two matrices a layer (`sync.experts`). `EngineLayout`
finds each published tensor in there again, so that what the engine holds can be digested tensor by tensor and compared
with what the learner published.

Tensor parallel size 1 only: a shard does not hold the tensors that were digested. Written against vLLM 0.32.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from sync.digest import StreamDigest, tensor_digest, tensor_digests
from sync.experts import ExpertLayer, ExpertPlace
from sync.manifest import DigestMismatch, EngineMismatch, Manifest, TensorEntry, dtype_name
from sync.routed import RoutedExpertsRecord
from sync.snapshot import Snapshot, expect_digests
from sync.transports.cuda_ipc import gpu_uuid, open_device_copy
from sync.transports.nccl import NcclBroadcast

CHUNK_BYTES = 1 << 19
"""Copied and digested at a time: what a core's own cache holds."""


def keep_weights_unpacked() -> None:
    """CPU only, before the model is built: linear layers keep their weights as plain parameters.

    Otherwise vLLM moves them into packed copies that nothing can be compared with, and that leave a tied head stale
    after an update. The names are private to vLLM 0.32; `WeightSync.prepare_model` notices if they lose their effect.
    """
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.utils as linear

    ops._supports_onednn = False
    linear._CPU_SGL_GEMM_MAX_WEIGHT_BYTES = 0


def steady_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[T, K] -> [T, N]: a linear layer in which no row's result depends on how many others there are.

    In float32 MKL sums in another order below 16 rows than above (found for K from 64 to 4096 and up to 2048 rows);
    padding to 16 is what makes a sample the same, to the last bit, alone and in a crowd.
    """
    missing = 16 - len(x)
    if missing <= 0:
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, missing)), weight, bias)[: len(x)]


class WeightSync:
    """vLLM's `worker_extension_cls`: its methods become the worker's, called through `collective_rpc`."""

    model_runner: Any
    init_weight_transfer_engine: Callable[[dict[str, Any]], None]
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def prepare_model(self) -> None:
        """Once, after the model is built: sees that weights are where updates reach them; makes CPU linears steady.

        Raises RuntimeError where vLLM holds weights in a form that cannot be updated or attested.
        """
        model = self.model_runner.get_model()
        packed = [name for name, parameter in model.named_parameters() if not parameter.numel()]
        if packed:
            raise RuntimeError(
                f"vLLM has packed weights away, they cannot be updated nor attested: {packed[:3]}"
            )
        list(_find_expert_layers(model))
        for module in model.modules():
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = steady_linear
            if isinstance(module, MultiHeadLatentAttentionWrapper) and _is_on_cpu(model):
                # vLLM's CPU kernel takes [T, heads · d]; given [T, heads, d], as here, it writes beyond its tensors.
                module.rotary_emb._forward_method = module.rotary_emb.forward_native

    def capture_experts(self) -> None:
        """From now on the experts of every token are recorded. Raises RuntimeError for a model without routers."""
        model = self.model_runner.get_model()
        runners = [module for module in model.modules() if isinstance(module, MoERunner)]
        if not runners:
            raise RuntimeError(
                "learner.moe.router_replay must be false for a model without experts, got true"
            )
        layers = self.model_runner.model_config.get_total_num_hidden_layers()
        routers = ((runner.layer_id, runner.router) for runner in runners)
        self._routed_experts = RoutedExpertsRecord(self.model_runner, routers, layers)

    def take_experts(self, request: str) -> list[np.ndarray]:
        """See `sync.routed.RoutedExpertsRecord.take_experts`."""
        return self._routed_experts.take_experts(request)

    def load_version(self, source: Snapshot | NcclBroadcast, mapped: bool = True) -> None:
        """Takes up a version. Raises, the parameters untouched, FileNotFoundError when it is gone and DigestMismatch when it is not
        what was published or does not fit the model; EngineMismatch, the parameters in an unknown state, when they do not end
        up with the published digests.
        """
        held = (
            self._load_snapshot(source, mapped)
            if isinstance(source, Snapshot)
            else self._load_broadcast(source)
        )
        expect_digests(source.manifest, held, "the engine", EngineMismatch)

    def _load_snapshot(self, snapshot: Snapshot, mapped: bool) -> dict[str, str]:
        """Maps it where the engine's layout allows (on a CPU, `mapped`), copies it elsewhere. Returns the digests of what the engine holds.

        What is mapped is what was verified, byte for byte the same memory; what is copied is digested where it ends up.
        """
        model = self.model_runner.get_model()
        layout = self._find_layout(snapshot.manifest)
        snapshot.attest()
        before, self._held = getattr(self, "_held", None), snapshot
        with torch.no_grad():
            if _is_on_cpu(model):
                held = layout.map_snapshot(snapshot) if mapped else layout.copy_snapshot(snapshot)
            else:
                with open_device_copy(snapshot.manifest, gpu_uuid()) as update:
                    if update is None:
                        model.load_weights(snapshot.named_tensors())
                        for module in _find_latent_attentions(
                            model
                        ).values():  # what it derives of kv_b_proj, in place
                            module.process_weights_after_loading(module.kv_b_proj.weight.dtype)
                    else:
                        layout = self._receive_update(snapshot.manifest, update)
                held = layout.held_digests()
        if before is not None and before is not snapshot:
            before.release_memory()
        return held

    def _load_broadcast(self, source: NcclBroadcast) -> dict[str, str]:
        """The learner sends while the engine receives. Returns the digests of what the engine then holds."""
        manifest = source.manifest
        self._find_layout(manifest)
        rendezvous = source.ask_to_send()
        if rendezvous.fresh:
            group = {
                "master_address": rendezvous.host,
                "master_port": rendezvous.port,
                "rank_offset": 1,
                "world_size": 2,
            }
            self.init_weight_transfer_engine(group | {"packed": rendezvous.packed})
        update = {
            "names": [entry.name for entry in manifest.tensors],
            "dtype_names": [entry.dtype for entry in manifest.tensors],
            "shapes": [list(entry.shape) for entry in manifest.tensors],
        }
        return self._receive_update(manifest, update).held_digests()

    def _receive_update(self, manifest: Manifest, update: dict[str, Any]) -> "EngineLayout":
        """By vLLM's own transfer engine, which may put other parameters in the place of those that were there."""
        self.start_weight_update()
        self.update_weights(update)
        self.finish_weight_update()
        self._found_layout = EngineLayout(self.model_runner.get_model(), manifest)
        return self._found_layout

    def held_digests(self, manifest: Manifest) -> dict[str, str]:
        """StreamDigest of what the parameters hold now, by the names of the manifest's tensors."""
        return self._find_layout(manifest).held_digests()

    def _find_layout(self, manifest: Manifest) -> "EngineLayout":
        """The one found for the version before, where this one has the same tensors."""
        found: EngineLayout | None = getattr(self, "_found_layout", None)
        if found is None or not found.fits_manifest(manifest):
            found = self._found_layout = EngineLayout(self.model_runner.get_model(), manifest)
        return found


class NcclSender:
    """The learner's end of a group of two, as vLLM's own trainer engine: that of a generator which drives itself."""

    def __init__(self, host: str, port: int) -> None:
        """Waits for the generator to join."""
        group = NCCLTrainerInitInfo(
            master_address=host, master_port=port, world_size=2, packed=torch.cuda.is_available(), rank=0
        )
        self._engine = NCCLTrainerWeightTransferEngine.trainer_init(
            group, client=SelfDriven(), source=SnapshotSource()
        )
        self.moved_at = time.monotonic()
        """When the last tensor was taken to be sent."""

    def send_snapshot(self, snapshot: Snapshot) -> None:
        """Waits for the generator to receive it all."""
        self._engine.source = SnapshotSource(snapshot, self._note_move)
        self._engine.send_weights()

    def close(self) -> None:
        """Aborts what is under way, from any thread."""
        self._engine.shutdown()

    def _note_move(self) -> None:
        self.moved_at = time.monotonic()


class SelfDriven:
    """vLLM's trainer would drive the engine from here; ours pulls."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class SnapshotSource(WeightSource):
    """The tensors of a snapshot, on the GPU one at a time."""

    def __init__(self, snapshot: Snapshot | None = None, moved: Callable[[], None] = lambda: None) -> None:
        """`moved` is called for each tensor: vLLM asks for one when there is room for it among those that are on their way."""
        self._snapshot, self._moved = snapshot, moved

    def metadata(self) -> list[ParamMeta]:
        assert self._snapshot is not None
        return [
            ParamMeta(e.name, getattr(torch, e.dtype), tuple(e.shape))
            for e in self._snapshot.manifest.tensors
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self._snapshot is not None
        device = "cuda" if torch.cuda.is_available() else "cpu"
        for name, tensor in self._snapshot.named_tensors():
            self._moved()
            yield name, tensor.to(device)


class EngineLayout:
    """Where each tensor of a manifest lies in a vLLM model: some rows of some parameter."""

    def __init__(self, model: nn.Module, manifest: Manifest) -> None:
        """Raises DigestMismatch unless the manifest's tensors make up the model's parameters, all of them."""
        self._packed = {
            part: (merged, parts)
            for merged, parts in getattr(model, "packed_modules_mapping", {}).items()
            for part in parts
        }
        self._entries = {entry.name: entry for entry in manifest.tensors}
        self._parameters = dict(
            model.named_parameters(remove_duplicate=False)
        )  # a tied head under both its names
        vocabulary = {
            f"{name}.weight": module.org_vocab_size
            for name, module in model.named_modules(remove_duplicate=False)
            if isinstance(module, VocabParallelEmbedding)
        }
        self._latent = _find_latent_attentions(model)
        derived = {f"{prefix}.{name}" for prefix in self._latent for name in DERIVED}
        orders: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._experts: dict[str, ExpertPlace] = dict(
            place for layer in _find_expert_layers(model) for place in layer.list_places(orders)
        )
        self._places: dict[str, tuple[str, int]] = {}
        parts: dict[int, list[str]] = {}  # of each parameter, in the order of its rows
        rows: dict[int, int] = {}
        for entry in manifest.tensors:
            if entry.name in self._experts:
                self._expect_expert(entry, self._experts[entry.name])
                continue
            name, first = self._find_parameter(entry)
            self._places[entry.name] = (name, first)
            self._view_tensor(entry.name)
            of = id(self._parameters[name])
            parts.setdefault(of, []).append(entry.name)
            rows[of] = max(rows.get(of, 0), first + (entry.shape[0] if entry.shape else 1))
        lacking = [name for name in self._experts if name not in self._entries]
        in_experts = {place.parameter for place in self._experts.values()}
        lacking += [
            name
            for name, parameter in self._parameters.items()
            if name not in in_experts | derived
            and rows.get(id(parameter), 0) != vocabulary.get(name, len(parameter) if parameter.dim() else 1)
        ]
        if lacking:
            raise DigestMismatch(
                f"version {manifest.version} does not fill parameters of the engine: {lacking[:3]}"
            )
        self._parts = [
            (parameter, sorted(parts[id(parameter)], key=lambda name: self._places[name][1]))
            for parameter in {id(parameter): parameter for parameter in self._parameters.values()}.values()
            if id(parameter) in parts
        ]

    def fits_manifest(self, manifest: Manifest) -> bool:
        """Has this manifest the same tensors, whatever is in them?"""
        return len(manifest.tensors) == len(self._entries) and all(
            (known := self._entries.get(entry.name))
            and (known.dtype, known.shape) == (entry.dtype, entry.shape)
            for entry in manifest.tensors
        )

    def map_snapshot(self, snapshot: Snapshot) -> dict[str, str]:
        """Puts the file's own memory in the place of each parameter that has the same layout, copies the others.

        Returns the digests of what the parameters hold: of what is mapped, those that the file was verified to have.
        """
        held = {entry.name: entry.digest for entry in snapshot.manifest.tensors}
        for parameter, names in self._parts:
            merged = snapshot.view_merged(names)
            if merged is not None and merged.shape == parameter.shape:
                parameter.data = merged
            else:
                held |= {
                    name: _copy_and_digest(snapshot.view_tensor(name), self._view_tensor(name))
                    for name in names
                }
        held |= {name: self._write_tensor(name, snapshot.view_tensor(name)) for name in self._experts}
        self._refresh_derived()
        return held

    def copy_snapshot(self, snapshot: Snapshot) -> dict[str, str]:
        """Copies each tensor to where it belongs; returns the digests of what is there."""
        if snapshot.manifest.num_bytes < 1 << 25:
            held = {name: self._write_tensor(name, source) for name, source in snapshot.named_tensors()}
        else:
            with ThreadPoolExecutor(2) as pool:  # copying and digesting let go of the interpreter
                copies = {
                    name: pool.submit(self._write_tensor, name, source)
                    for name, source in snapshot.named_tensors()
                }
            held = {name: copied.result() for name, copied in copies.items()}
        self._refresh_derived()
        return held

    def held_digests(self) -> dict[str, str]:
        experts = {name: (place, self._expert_matrices(place)) for name, place in self._experts.items()}
        views = {
            name: place.read_tensor(matrices)
            for name, (place, matrices) in experts.items()
            if place.elements is None
        }
        held = tensor_digests({name: self._view_tensor(name) for name in self._places} | views)
        copies = experts.keys() - views.keys()  # one after the other: together they are as large as the model
        held |= {name: tensor_digest(experts[name][0].read_tensor(experts[name][1])) for name in copies}
        for (
            module
        ) in self._latent.values():  # attention reads the derived matrices: they are what must be right
            name = next(name for name, p in self._parameters.items() if p is module.kv_b_proj.weight)
            held |= tensor_digests({name: _restore_kv_b_proj(module)})
        return held

    def _refresh_derived(self) -> None:
        """Makes the matrices of latent attention views of the weights that they come from: these are attested."""
        for module in self._latent.values():
            for parameter, view in zip((module.W_UK_T, module.W_UV), _derive_matrices(module), strict=True):
                parameter.data = view

    def _write_tensor(self, name: str, source: torch.Tensor) -> str:
        """Copies one tensor to where it belongs; returns the digest of what is there."""
        place = self._experts.get(name)
        return (
            _copy_and_digest(source, self._view_tensor(name))
            if place is None
            else place.write_tensor(self._expert_matrices(place), source)
        )

    def _expert_matrices(self, place: ExpertPlace) -> torch.Tensor:
        return self._parameters[place.parameter].data

    def _expect_expert(self, entry: TensorEntry, place: ExpertPlace) -> None:
        """Raises DigestMismatch unless an expert's tensor has the shape and type that the engine holds."""
        held = dtype_name(self._parameters[place.parameter].dtype), place.shape
        if (entry.dtype, entry.shape) != held:
            raise DigestMismatch(
                f"{entry.name} was published as {entry.dtype} {entry.shape}, the engine holds {held[0]} {held[1]}"
            )

    def _find_parameter(self, entry: TensorEntry) -> tuple[str, int]:
        """The parameter that holds a tensor, and its first row there."""
        *module, leaf, kind = entry.name.rsplit(".", 2)
        if leaf not in self._packed:
            return entry.name, 0
        merged, parts = self._packed[leaf]
        siblings = [".".join([*module, part, kind]) for part in parts[: parts.index(leaf)]]
        lacking = [name for name in siblings if name not in self._entries]
        if lacking:
            raise DigestMismatch(f"the snapshot has {entry.name} but lacks {lacking}")
        return ".".join([*module, merged, kind]), sum(self._entries[name].shape[0] for name in siblings)

    def _view_tensor(self, tensor: str) -> torch.Tensor:
        """Where a published tensor lies now."""
        entry, (name, first) = self._entries[tensor], self._places[tensor]
        parameter = self._parameters.get(name)
        if parameter is None:
            raise DigestMismatch(f"the engine's model has no place for the published {tensor}")
        view = parameter.data[first : first + entry.shape[0]] if entry.shape else parameter.data
        if (dtype_name(view.dtype), tuple(view.shape)) != (entry.dtype, entry.shape):
            raise DigestMismatch(
                f"{tensor} was published as {entry.dtype} {entry.shape}, "
                f"the engine holds {dtype_name(view.dtype)} {tuple(view.shape)}"
            )
        return view


DERIVED = ("W_UK_T", "W_UV")
"""Matrices that vLLM's latent attention (MLA) makes of `kv_b_proj` once the model is built, and reads in its stead."""


def _find_latent_attentions(model: nn.Module) -> dict[str, Any]:
    """vLLM's MLA layers by the name of their module."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MLAAttention)}


def _derive_matrices(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """[heads, P, L] and [heads, L, V]: views of `kv_b_proj` [heads · (P + V), L], as vLLM 0.32 makes them."""
    by_head = module.kv_b_proj.weight.data.unflatten(0, (module.num_heads, -1))
    up_key, up_value = by_head.split([module.qk_nope_head_dim, module.v_head_dim], dim=1)
    return up_key, up_value.transpose(1, 2)


def _restore_kv_b_proj(module: Any) -> torch.Tensor:
    """The `kv_b_proj` that the derived matrices are of."""
    return torch.cat([module.W_UK_T.data, module.W_UV.data.transpose(1, 2)], 1).flatten(0, 1)


def _find_expert_layers(model: nn.Module) -> Iterator[ExpertLayer]:
    """Raises RuntimeError where vLLM keeps experts in a form that cannot be updated or attested."""
    for name, module in model.named_modules():
        if not isinstance(module, RoutedExperts):
            continue
        method = module.quant_method
        kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        backend = getattr(method, "unquantized_backend", None)
        isa = getattr(kernel, "isa", None)
        if (
            backend is UnquantizedMoeBackend.CPU
            and isa is not None
            and not getattr(kernel, "_use_zentorch", False)
        ):
            pack = partial(cpu_prepack_moe_weight, isa=isa)
        elif backend in (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.CPU):
            pack = None
        else:
            raise RuntimeError(
                f"vLLM must keep the experts of {name} as published (Triton) or packed by its own CPU kernel, got {backend}"
            )
        moe = module.moe_config
        w13, w2 = module.w13_weight.shape[1:], module.w2_weight.shape[1:]
        yield ExpertLayer(
            prefix=name,
            published=name.removesuffix(".routed_experts"),
            gate=module.ckpt_gate_proj_name,
            up=module.ckpt_up_proj_name,
            down=module.ckpt_down_proj_name,
            num_experts=len(module.w13_weight),
            hidden=moe.hidden_dim_unpadded,
            intermediate=moe.intermediate_size_per_partition_unpadded,
            dtype=module.w13_weight.dtype,
            w13=(w13[0], w13[1]),
            w2=(w2[0], w2[1]),
            pack=pack,
        )


def _is_on_cpu(model: nn.Module) -> bool:
    return next(model.parameters()).device.type == "cpu"


def _copy_and_digest(source: torch.Tensor, place: torch.Tensor) -> str:
    """Copies, and digests what has arrived while it is still in the processor's cache. Returns the digest."""
    digest = StreamDigest()
    into, out = (tensor.view(-1).view(torch.uint8).numpy() for tensor in (place, source))
    for begin in range(0, len(out), CHUNK_BYTES):
        chunk = into[begin : begin + CHUNK_BYTES]
        chunk[:] = out[begin : begin + CHUNK_BYTES]
        digest.update(chunk)
    return digest.hexdigest()
