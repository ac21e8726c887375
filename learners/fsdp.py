"""The FSDP2 engine: a Hugging Face causal LM under `fully_shard`, on gloo (CPU) or NCCL.

Master weights are float32; on a GPU with `dtype=bfloat16` forward and backward compute in bfloat16 and
gradients are reduced in float32. Ranks are laid out twice: for weights as replicas × shards, for data as
shares × ranks of a sequence (Ulysses).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification
from transformers.core_model_loading import revert_weight_conversion

from configs.learner import ADAM_BETAS, Attention
from configs.model import Dtype
from configs.parallel import Accumulate, FsdpConfig, LoraConfig, LoraPublish
from learners import lora as adapters
from learners.attention import check_ulysses, choose_attention
from learners.checkpoint import StateWriter
from learners.device_memory import DeviceMemory
from learners.engine import LossFn, ModelKind, Share
from learners.heads import LogprobHead, ValueHead
from learners.model_loading import ModelLoading
from learners.model_source import ModelSource
from learners.packing import Packed, pad_packed
from learners.published_experts import ExpertNames, find_expert_names
from learners.routing import ForwardPass, LoadBalance, check_replay, watch_routers
from learners.sequence_ranks import OwnTokens, join_outputs
from learners.shards import find_own_rows
from learners.state_files import copy_own_rows, load_rows, write_rows
from learners.world import LONG_TIMEOUT, join_pool
from sync.stream import (
    BUCKET_BYTES,
    TensorPart,
    absent_part,
    list_saved_buffers,
    stream_rows,
    stream_tensor,
    whole_parts,
)


class FsdpEngine:
    """Implements `learners.engine.Engine` in torch's default process group, which must exist already."""

    def __init__(
        self,
        path: str | Path,
        *,
        kind: ModelKind = ModelKind.policy,
        dtype: Dtype = Dtype.float32,
        temperature: float = 1.0,
        attention: Attention = Attention.auto,
        betas: tuple[float, float] = ADAM_BETAS,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        activation_checkpointing: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        entropy_gradient: bool = False,
        layout: FsdpConfig | None = None,
        lora: LoraConfig | None = None,
        aux_loss_coefficient: float = 0.0,
        router_replay: bool = False,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`bucket_bytes`: size of the weights that are cast at a time for publication.
        `entropy_gradient`: a loss may have a gradient through the entropy, which costs memory for another
        [chunk, vocabulary]. `aux_loss_coefficient` is for a mixture's load balancing, and with
        `router_replay` tokens go to the experts that a batch records (`learners.routing`). `on_progress` is
        called whenever some of the model has been read.

        Raises ValueError for a setting that this model or machine cannot have.
        """
        layout, cuda = layout or FsdpConfig(), torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._publish_dtype = getattr(torch, dtype)
        self._max_grad_norm, self._bucket_bytes = max_grad_norm, bucket_bytes
        self._accumulate = layout.accumulate
        self._lora = lora if lora is not None and lora.rank is not None and kind is ModelKind.policy else None
        softcap = getattr(AutoConfig.from_pretrained(path).get_text_config(), "attn_logit_softcapping", None)
        self._attention = choose_attention(attention, self._device, dtype, softcap)
        for field in ("compile", "liger"):
            if getattr(layout, field) and not cuda:
                raise ValueError(f"learner.fsdp.{field} must be false without a GPU, got true")
        self._make_meshes(layout)
        # Kept, because a rank that ends it might break off what another one still sends.
        self._pool = join_pool()
        source = ModelSource(Path(path), self._pool, on_progress)
        model, loading = self._build_model(path, source, kind, layout)
        layers = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
        # Dropout would make every log-probability a random number.
        model.eval()
        if activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            # Layers checkpoint only in training mode. This sets the layer's own flag and leaves its
            # children's dropout off.
            for layer in layers:
                layer.training = True
        if layout.compile:
            for layer in layers:
                layer.compile(dynamic=True)
        if kind is ModelKind.critic:
            self._head: LogprobHead | ValueHead = ValueHead(model.score)
        else:
            self._head = LogprobHead(model, temperature, entropy_gradient)
        # FSDP averages gradients over ranks, and losses are sums: the balance's loss is scaled up by as much.
        self._balance = LoadBalance(model.config, aux_loss_coefficient, scale=dist.get_world_size())
        self._forward_pass, self._replays = ForwardPass(), router_replay
        if router_replay:
            check_replay(model.config)
        watch_routers(model, self._balance, self._forward_pass)
        compute_dtype = torch.bfloat16 if cuda and dtype is Dtype.bfloat16 else None
        self._shard_model(model, loading, layers, compute_dtype, layout.cpu_offload)
        # Ranks that load a checkpoint wait for each other as long as files are read.
        self._readers = dist.new_group(backend="gloo", timeout=LONG_TIMEOUT)
        self._model = model
        self._named = dict(model.named_parameters())
        self._memory = DeviceMemory(self._list_tensors)
        self._published_names = {name: self._find_published_name(name) for name in self._named}
        if kind is ModelKind.frozen:
            model.requires_grad_(False)
        self._trained = {
            name: parameter for name, parameter in self._named.items() if parameter.requires_grad
        }
        if not self._trained:
            return
        self._optimizer = torch.optim.AdamW(
            self._trained.values(), lr=0.0, betas=betas, weight_decay=weight_decay, fused=True
        )
        # AdamW makes this state at its first step. Made now, a fresh engine has a place to load a checkpoint
        # into.
        for parameter in self._trained.values():
            self._optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    # ---- ranks and shards

    def _make_meshes(self, layout: FsdpConfig) -> None:
        """Lays out the ranks for weights and for data.

        Raises ValueError where a size does not divide the number of ranks.
        """
        world, rank = dist.get_world_size(), dist.get_rank()
        for field, size in (("replicas", layout.replicas), ("sequence_parallel", layout.sequence_parallel)):
            if world % size:
                raise ValueError(
                    f"learner.fsdp.{field} must divide the ranks of the engine ({world}), got {size}"
                )
        shape = (world,) if layout.replicas == 1 else (layout.replicas, world // layout.replicas)
        self._mesh = init_device_mesh(
            self._device.type, shape, mesh_dim_names=("replica", "shard")[-len(shape) :]
        )
        ranks = layout.sequence_parallel
        self.share = Share(rank // ranks, world // ranks, holds_results=rank % ranks == 0, pad_multiple=ranks)
        self._sequence_group: dist.ProcessGroup | None = None
        """The ranks that share this rank's sequences; None without sequence parallelism."""
        if ranks > 1:
            self._sequence_group = init_device_mesh(self._device.type, (world // ranks, ranks)).get_group(1)

    def _build_model(
        self, path: str | Path, source: ModelSource, kind: ModelKind, layout: FsdpConfig
    ) -> tuple[Any, ModelLoading]:
        """Returns the model without memory (`meta`), and its way into shards. Raises ValueError where its
        files do not fit it."""
        auto, sizes = (
            (AutoModelForTokenClassification, {"num_labels": 1})
            if kind is ModelKind.critic
            else (AutoModelForCausalLM, {})
        )
        config = AutoConfig.from_pretrained(path, **sizes)
        check_ulysses(config, layout.sequence_parallel)
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError("model.path must hold weights that are not quantized, got a quantization_config")
        options = {
            "dtype": torch.float32,
            "attn_implementation": "ulysses" if layout.sequence_parallel > 1 else str(self._attention),
        }
        with torch.random.fork_rng():
            # A critic's head and adapters are drawn at random: the same ones on any number of ranks.
            torch.manual_seed(0)
            with torch.device("meta"):
                model = auto.from_config(config, **options)
            loading = ModelLoading(model, source, is_critic=kind is ModelKind.critic)
            if self._lora is not None:
                adapters.inject_adapters(model, self._lora)
                loading.take_drawn(model)
        if layout.liger:
            from liger_kernel.transformers import _apply_liger_kernel_to_instance

            _apply_liger_kernel_to_instance(
                model=model, cross_entropy=False, fused_linear_cross_entropy=False
            )
        return model, loading

    def _shard_model(
        self,
        model: Any,
        loading: ModelLoading,
        layers: list[nn.Module],
        compute: torch.dtype | None,
        offload: bool,
    ) -> None:
        """Gives each rank its part of the model, which it reads by itself."""
        model.to(device="meta")
        # A move unties tied weights.
        model.tie_weights()
        where: OffloadPolicy = (
            CPUOffloadPolicy(pin_memory=self._device.type == "cuda") if offload else OffloadPolicy()
        )
        precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32 if compute else None)
        # All modules reshard after a forward pass, the root too. A module that a forward pass without a
        # backward pass left gathered would go on computing with the weights from before the next update.
        for module in (*layers, model):
            fully_shard(
                module, mesh=self._mesh, mp_policy=precision, offload_policy=where, reshard_after_forward=True
            )
        model.to_empty(device="cpu" if offload else self._device)
        model.tie_weights()
        loading.fill_shards(model)

    # ---- training

    def _compute_outputs(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """Returns [T] log-probability, or value, and [T] entropy of each sampled token given those before it;
        0 elsewhere.

        Both are on the CPU. With sequence parallelism each rank computes its slice of the tokens, and all
        ranks return the whole.
        """
        group, row = self._sequence_group, pad_packed(packed, self.share.pad_multiple)
        own = OwnTokens.of_rank(
            len(row.tokens), 0 if group is None else group.rank(), self.share.pad_multiple
        )
        mine, targets = own.slice, packed.targets[own.find_targets(packed.targets)]
        extra = {} if group is None else {"inner": str(self._attention), "sequence_group": group}
        self._forward_pass.begin_pass(packed, row, mine, self._model.config, self._replays, self._device)
        cu_seqlens = row.cu_seqlens.to(self._device)
        self._head.ask_tokens(
            sources=(targets - 1 - own.start).to(self._device),
            targets=packed.tokens[targets].to(self._device),
        )
        out = self._model(
            input_ids=row.tokens[mine].to(self._device)[None],
            position_ids=row.positions[mine].to(self._device)[None],
            # With a cache, transformers lets packed sequences see each other.
            use_cache=False,
            cu_seq_lens_q=cu_seqlens,
            cu_seq_lens_k=cu_seqlens,
            max_length_q=row.max_seqlen,
            max_length_k=row.max_seqlen,
            **extra,
        ).logits[0]
        spread = torch.zeros(len(packed.tokens), 2, device=out.device).index_copy(
            0, targets.to(out.device), out
        )
        if group is not None:
            spread = join_outputs(spread, group)
        return tuple(spread.cpu().unbind(-1))

    @torch.no_grad()
    def infer(self, microbatches: Sequence[Packed]) -> list[Tensor]:
        return [self._compute_outputs(packed)[0] for packed in microbatches]

    def update(self, microbatches: Sequence[Packed], loss_fn: LossFn, lr: float) -> float:
        """Raises FloatingPointError, and updates nothing, when the gradient is not finite."""
        world = dist.get_world_size()
        self._balance.begin_update(self._device)
        if self._balance.needs_counting:
            self.infer(microbatches)
            self._balance.finish_counting()
        for number, packed in enumerate(microbatches):
            is_last = number == len(microbatches) - 1
            self._model.set_requires_gradient_sync(is_last or self._accumulate is Accumulate.reduce)
            logprobs, entropy = self._compute_outputs(packed)
            # FSDP averages gradients over ranks, and the loss is a sum over them.
            (loss_fn(logprobs, entropy, packed) * world).backward()
        self._balance.end_update()
        grad_norm = self._clip_gradient()
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        return grad_norm

    @property
    def routing_metrics(self) -> dict[str, float]:
        return self._balance.metrics

    def _clip_gradient(self) -> float:
        """Scales a gradient longer than `max_grad_norm` to that length; returns its norm before.

        Collective.
        """
        shards = [p.grad.to_local() for p in self._trained.values() if p.grad is not None]
        squared = torch.stack(torch._foreach_norm(shards)).square().sum()
        # Over the shards of one replica: the others have the same gradient.
        dist.all_reduce(squared, group=self._mesh.get_group(self._mesh.ndim - 1))
        norm = math.sqrt(squared.item())
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient norm must be finite, got {norm}: nothing was updated")
        if norm > self._max_grad_norm:
            torch._foreach_mul_(shards, self._max_grad_norm / (norm + 1e-6))
        return norm

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Makes the model what it was before any training, while the context lasts."""
        with adapters.disable_adapters(self._model):
            yield

    # ---- turns

    def _list_tensors(self) -> Iterator[Tensor]:
        """Yields all that the engine keeps between two calls. There are no gradients then."""
        yield from chain(self._model.parameters(), self._model.buffers())
        for parameter in self._trained.values():
            yield from self._optimizer.state[parameter].values()

    def offload(self) -> None:
        self._memory.offload()

    def onload(self) -> None:
        self._memory.onload()

    # ---- publication

    def _find_published_name(self, name: str) -> str | ExpertNames | None:
        """Returns the parameter's Hugging Face name, or the names of the experts that it stacks; None for one
        that is published in other pieces."""
        shape = self._named[name].shape
        probe = torch.empty(shape, device="meta")
        published = revert_weight_conversion(self._model, {adapters.base_name(name): probe})
        whole = next((name for name, tensor in published.items() if tensor is probe), None)
        return whole or find_expert_names(
            lambda tensor: revert_weight_conversion(self._model, {name: tensor}), shape
        )

    def stream_weights(self) -> Iterator[TensorPart]:
        """Yields parameters in the published dtype, and the model's buffers in their own (a router's
        correction bias, float32)."""
        if self._lora is not None and self._lora.publish is LoraPublish.adapter:
            for name, parameter in self._trained.items():
                yield from self._stream_own_rows(
                    adapters.published_name(name), parameter.detach(), torch.float32
                )
            return
        merged = adapters.make_merges(self._model) if self._lora is not None else {}
        for name, parameter in self._named.items():
            if adapters.is_adapter(name):
                continue
            tensor = merged[name]() if name in merged else parameter.detach()
            published = self._published_names[name]
            if isinstance(published, str):
                yield from self._stream_own_rows(published, tensor, self._publish_dtype)
            elif published is not None:
                first, experts = find_own_rows(tensor)
                for its_name, expert in published.split_experts(first, experts, self._bucket_bytes):
                    yield from stream_tensor(its_name, expert, self._publish_dtype, self._bucket_bytes)
                if dist.get_rank() == 0:
                    for its_name, shape in published.list_from(len(experts)):
                        yield absent_part(its_name, shape, self._publish_dtype)
            else:
                # The cast comes first, so there is less to gather.
                whole = tensor.to(self._publish_dtype).full_tensor()
                if dist.get_rank() == 0:
                    yield from whole_parts(revert_weight_conversion(self._model, {name: whole.cpu()}))
        # Every rank holds buffers whole: the first one publishes them.
        if dist.get_rank() == 0:
            yield from whole_parts(
                {name: buffer.detach().cpu() for name, buffer in list_saved_buffers(self._model)}
            )

    def _stream_own_rows(self, name: str, tensor: DTensor, dtype: torch.dtype) -> Iterator[TensorPart]:
        first, rows = find_own_rows(tensor)
        return stream_rows(name, tuple(tensor.shape), first, rows, dtype, self._bucket_bytes)

    # ---- checkpoints

    def copy_state(self) -> StateWriter:
        rank = dist.get_rank()
        copied, random = copy_own_rows(self._collect_state(), rank), self._read_random_state()

        def write(folder: Path) -> list[Path]:
            own = folder / "random" / f"rank_{rank}.safetensors"
            own.parent.mkdir(parents=True, exist_ok=True)
            save_file(random, own)
            return [write_rows(folder, rank, copied), own]

        return write

    def load_state(self, folder: Path) -> None:
        """Raises ValueError, on all ranks, when the folder is no whole checkpoint of this model."""
        try:
            load_rows(folder, self._collect_state(), self._readers)
        except CheckpointException as error:
            # It is no Exception: a role that it ends could not say why.
            why = next(failure for failure, _ in error.failures.values())
            raise ValueError(f"{folder} must hold this model and its optimizer, got: {why}") from error
        state = folder / "random" / f"rank_{dist.get_rank()}.safetensors"
        # With more ranks than wrote the checkpoint, a rank without a file keeps its own random state.
        if state.exists():
            random = load_file(state)
            torch.set_rng_state(random["cpu"])
            if "cuda" in random:
                torch.cuda.set_rng_state(random["cuda"])

    def _collect_state(self) -> dict[str, Tensor]:
        """Returns the trained parameters and their optimizer's state by name: the live tensors, so that
        loading writes into them. A frozen engine has its parameters alone."""
        state = {f"model.{name}": one.detach() for name, one in (self._trained or self._named).items()}
        for name, parameter in self._trained.items():
            state |= {f"{key}.{name}": value for key, value in self._optimizer.state[parameter].items()}
        return state

    def _read_random_state(self) -> dict[str, Tensor]:
        cuda = {"cuda": torch.cuda.get_rng_state()} if self._device.type == "cuda" else {}
        return {"cpu": torch.get_rng_state(), **cuda}
