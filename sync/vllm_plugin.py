"""The part that runs inside vLLM's worker: takes up versions in place, and attests what the engine's
parameters then hold.

`sync.vllm_ranks` does the same for a rank of an engine of several GPUs, which holds parts of the tensors that
were digested. Written against vLLM 0.32.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from sync.engine_layout import EngineLayout, ModelStructure
from sync.experts import ExpertLayer
from sync.manifest import Manifest
from sync.rank_slices import RankSlice
from sync.routed_experts import RoutedExpertsRecord
from sync.snapshot import Snapshot
from sync.steady_linear import steady_linear
from sync.weight_source import WeightSource, load_attested


def keep_weights_unpacked() -> None:
    """Tells vLLM, before it builds a model on a CPU, to keep the weights of linear layers as plain
    parameters.

    Otherwise vLLM moves them into packed copies that nothing can be compared with, and that leave a tied head
    stale after an update. The names are private to vLLM 0.32; `WeightSync.prepare_model` raises if they lose
    their effect.
    """
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.utils as linear

    ops._supports_onednn = False
    linear._CPU_SGL_GEMM_MAX_WEIGHT_BYTES = 0


class WeightSync:
    """vLLM's `worker_extension_cls`: its methods become the worker's, called through `collective_rpc`."""

    model_runner: Any
    init_weight_transfer_engine: Callable[[dict[str, Any]], None]
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def prepare_model(self) -> None:
        """Checks, once the model is built, that weights are where updates reach them, and makes linear layers
        on a CPU steady.

        Raises RuntimeError where vLLM holds weights in a form that cannot be updated or attested.
        """
        model = self.model_runner.get_model()
        packed = [name for name, parameter in model.named_parameters() if not parameter.numel()]
        if packed:
            raise RuntimeError(
                f"vLLM has packed weights away, they cannot be updated nor attested: {packed[:3]}"
            )
        find_structure(model)
        for module in model.modules():
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = steady_linear
            if isinstance(module, MultiHeadLatentAttentionWrapper) and _is_on_cpu(model):
                # vLLM's CPU kernel takes [T, heads · d]; given [T, heads, d], as here, it writes beyond its
                # tensors.
                module.rotary_emb._forward_method = module.rotary_emb.forward_native

    def capture_experts(self) -> None:
        """Records the experts of every token from now on. Raises RuntimeError for a model without routers."""
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
        """See `sync.routed_experts.RoutedExpertsRecord.take_experts`."""
        return self._routed_experts.take_experts(request)

    def load_version(self, source: WeightSource, mapped: bool = True) -> None:
        """Takes up a version, and raises, as `load_attested` does. `mapped`: on a CPU, parameters may use the
        snapshot's own memory."""
        self._may_map = mapped
        load_attested(source, self)

    @property
    def is_on_cpu(self) -> bool:
        return _is_on_cpu(self.model_runner.get_model())

    def check_manifest(self, manifest: Manifest) -> None:
        """Raises DigestMismatch unless the manifest's tensors make up the engine's model."""
        self._find_layout(manifest)

    def load_snapshot(self, snapshot: Snapshot) -> dict[str, str]:
        """Maps a snapshot where the engine's layout allows it (on a CPU), and copies the rest. Returns the
        digests of the parameters.

        Mapped tensors are the verified memory itself, byte for byte; copied ones are digested where they end
        up.
        """
        layout = self._find_layout(snapshot.manifest)
        snapshot.attest()
        # Parameters may lie in the memory of the snapshot before: it is unmapped when none of them does any
        # more.
        before, self._held = getattr(self, "_held", None), snapshot if self.is_on_cpu else None
        with torch.no_grad():
            if self.is_on_cpu:
                load = layout.map_snapshot if self._may_map else layout.copy_snapshot
                held = load(snapshot, before)
            else:
                self._load_by_vllm(snapshot)
                held = layout.held_digests()
        if before is not None and before is not snapshot:
            before.release_memory()
        return held

    def _load_by_vllm(self, snapshot: Snapshot) -> None:
        model = self.model_runner.get_model()
        model.load_weights(snapshot.named_tensors())
        for module in _find_latent_attentions(model).values():
            # Computes the matrices that are derived of kv_b_proj anew, in place.
            module.process_weights_after_loading(module.kv_b_proj.weight.dtype)

    def receive_update(
        self, manifest: Manifest, update: dict[str, Any], group: dict[str, Any] | None = None
    ) -> None:
        """Lets vLLM's own transfer engine receive an update, after it has joined `group`, if any.

        The transfer engine may put other parameters in the place of those that were there, so the layout is
        found anew.
        """
        with torch.no_grad():
            if group is not None:
                self.init_weight_transfer_engine(group)
            self.start_weight_update()
            self.update_weights(update)
            self.finish_weight_update()
        model = self.model_runner.get_model()
        self._found_layout = EngineLayout(model, find_structure(model), manifest)

    def held_digests(self, manifest: Manifest) -> dict[str, str]:
        """Computes the digests of what the parameters hold now, by the names of the manifest's tensors."""
        return self._find_layout(manifest).held_digests()

    def _find_layout(self, manifest: Manifest) -> EngineLayout:
        """Returns the layout of the last version, where this one has the same tensors, else a new one."""
        found: EngineLayout | None = getattr(self, "_found_layout", None)
        if found is None or not found.fits_manifest(manifest):
            model = self.model_runner.get_model()
            found = self._found_layout = EngineLayout(model, find_structure(model), manifest)
        return found


def find_structure(model: nn.Module) -> ModelStructure:
    """Finds the modules of a vLLM model that keep weights in another form than they are published in.

    Raises RuntimeError where vLLM keeps experts in a form that cannot be updated or attested.
    """
    vocabulary_rows, slices = {}, {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, VocabParallelEmbedding):
            vocabulary_rows[f"{name}.weight"] = module.shard_indices.num_org_elements
        for kind in ("weight", "bias"):
            if found := _find_slices(module, kind):
                slices[f"{name}.{kind}"] = found
    experts = list(_find_expert_layers(model))
    return ModelStructure(vocabulary_rows, _find_latent_attentions(model), experts, slices)


def _find_slices(module: nn.Module, kind: str) -> tuple[RankSlice, ...]:
    """Returns what this rank holds of the published tensors in a module's `weight` or `bias`, in the order in
    which they lie there. Empty where it holds all of them."""
    if getattr(module, "tp_size", 1) == 1:
        return ()
    match module:
        case VocabParallelEmbedding(shard_indices=rows, org_vocab_size=total):
            return (RankSlice(0, total, ((rows.org_vocab_start_index, rows.num_org_elements),)),)
        case QKVParallelLinear():
            rank, key_rank = module.tp_rank, module.tp_rank // module.num_kv_head_replicas
            parts = [
                (module.total_num_heads * module.head_size, module.num_heads * module.head_size, rank),
                *(
                    (module.total_num_kv_heads * size, module.num_kv_heads * size, key_rank)
                    for size in (module.head_size, module.v_head_size)
                ),
            ]
        case MergedColumnParallelLinear():
            parts = [(total, total // module.tp_size, module.tp_rank) for total in module.output_sizes]
        case ColumnParallelLinear():
            parts = [(module.output_size, module.output_size_per_partition, module.tp_rank)]
        case RowParallelLinear() if kind == "weight":
            size = module.input_size_per_partition
            return (RankSlice(1, module.input_size, ((module.tp_rank * size, size),)),)
        case _:
            return ()
    found, first = [], 0
    for total, size, rank in parts:
        found.append(RankSlice(0, total, ((rank * size, size),), first))
        first += size
    return tuple(found)


def _find_latent_attentions(model: nn.Module) -> dict[str, Any]:
    """Returns vLLM's layers of latent attention (MLA), by the name of their module."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MLAAttention)}


def _find_expert_layers(model: nn.Module) -> Iterator[ExpertLayer]:
    """Yields the layers of experts. Raises RuntimeError where vLLM keeps them in a form that cannot be
    updated or attested."""
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
                f"vLLM must keep the experts of {name} as published (Triton) or packed by its own CPU "
                f"kernel, got {backend}"
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
            rank=moe.tp_rank,
            num_ranks=moe.tp_size,
        )


def _is_on_cpu(model: nn.Module) -> bool:
    return next(model.parameters()).device.type == "cpu"
