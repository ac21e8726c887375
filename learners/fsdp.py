"""The FSDP2 engine: a Hugging Face causal LM under `fully_shard`, on gloo (CPU) or NCCL.

float32 master weights; on a GPU with `dtype=bfloat16` forward and backward compute in bfloat16 and gradients are reduced
in float32.
"""

import math
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
)
from transformers.core_model_loading import revert_weight_conversion

from configs.learner import Attention
from configs.schema import Dtype
from learners.engine import Kind, LossFn, Share, Write
from learners.heads import LogprobHead, ValueHead
from learners.packing import Packed
from sync.stream import BUCKET_BYTES, Part, parts, stream


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence, by one SDPA call a sequence. [1, heads, T, d] -> [1, T, heads, d]."""
    assert cu_seq_lens_q is not None, "packed attention needs the lengths of the sequences"
    lengths = cu_seq_lens_q.diff().tolist()
    grouped = query.shape[1] != key.shape[1]
    parts = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    ]
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


def padded_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **_: Any,
) -> tuple[Tensor, None]:
    """As `packed_sdpa`, for many short sequences: they are padded for the attention alone, one call in all.

    Padding stands behind every real token of its sequence: the causal mask hides it, and its own output is left out.
    """
    assert cu_seq_lens_q is not None, "packed attention needs the lengths of the sequences"
    lengths = cu_seq_lens_q.diff()
    if len(lengths) * max_length_q > 2 * query.shape[2] + 1024:
        return packed_sdpa(module, query, key, value, attention_mask, scaling, cu_seq_lens_q=cu_seq_lens_q)
    column = torch.arange(max_length_q, device=query.device)
    # A place beyond the end of its sequence repeats the last token: index_select is several times faster than scattering.
    index = torch.minimum(cu_seq_lens_q[:-1, None] + column, cu_seq_lens_q[1:, None] - 1)
    real = (column < lengths[:, None]).flatten().nonzero()[:, 0]
    q, k, v = (
        packed[0].transpose(0, 1).index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)
        for packed in (query, key, value)
    )
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, real)[None], None


def varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **_: Any,
) -> tuple[Tensor, None]:
    """The same by torch's own variable-length kernel (CUDA, bfloat16)."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (packed[0].transpose(0, 1).contiguous() for packed in (query, key, value))
    out = varlen_attn(
        q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, window_size=(-1, 0), scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return out[None], None


for _name, _function in (("packed_sdpa", padded_sdpa), ("varlen", varlen)):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, lambda *args, **kwargs: None)


def choose_attention(wanted: Attention, device: torch.device, dtype: Dtype) -> Attention:
    """What `auto` stands for here. Raises ValueError for a kernel that this device or dtype has not."""
    flash = device.type == "cuda" and dtype is Dtype.bfloat16
    if wanted is Attention.auto:
        if not flash:
            return Attention.packed_sdpa
        return Attention.flash_attention_2 if find_spec("flash_attn") else Attention.varlen
    if wanted is not Attention.packed_sdpa and not flash:
        raise ValueError(
            "learner.attention must be auto or packed_sdpa except on a GPU with model.dtype=bfloat16, "
            f"got {wanted} on {device.type} with {dtype}"
        )
    return wanted


class FsdpEngine:
    """See `learners.engine.Engine`. The process group must be initialised."""

    def __init__(
        self,
        path: str | Path,
        *,
        kind: Kind = Kind.policy,
        dtype: Dtype = Dtype.float32,
        temperature: float = 1.0,
        attention: Attention = Attention.auto,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        activation_checkpointing: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        entropy_gradient: bool = False,
    ) -> None:
        """`bucket_bytes`: of weights that are gathered at a time, for publication. `entropy_gradient`: whether a loss may lead
        through the entropy, which then costs memory for another [chunk, vocabulary]."""
        cuda = torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._publish_dtype = getattr(torch, dtype)
        self._max_grad_norm, self._bucket_bytes = max_grad_norm, bucket_bytes
        attention = choose_attention(attention, self._device, dtype)
        auto, sizes = (
            (AutoModelForTokenClassification, {"num_labels": 1}) if kind is Kind.critic else (AutoModelForCausalLM, {})
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)  # a critic's head is drawn at random, the same on all ranks
            model = auto.from_pretrained(path, dtype=torch.float32, attn_implementation=str(attention), **sizes)
        layers = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
        model.eval()  # dropout would make every log-probability a random number
        if activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in layers:
                layer.training = True  # the layer's own flag, not its children's: layers checkpoint only in training
        if kind is Kind.critic:
            self._head: LogprobHead | ValueHead = ValueHead(model.score)
        else:
            self._head = LogprobHead(model.get_output_embeddings(), temperature, entropy_gradient)
        mesh = init_device_mesh(self._device.type, (dist.get_world_size(),))
        compute = torch.bfloat16 if cuda and dtype is Dtype.bfloat16 else None
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32 if compute else None)
        # All modules reshard after a forward pass, the root too: one left gathered by a forward without backward would go on
        # computing with the weights from before the next update.
        for module in (*layers, model):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        self.share = Share(dist.get_rank(), dist.get_world_size())
        self._writers = dist.new_group(backend="gloo")  # for a thread that writes a checkpoint
        self._model = model
        self._named = dict(model.named_parameters())
        self._published_names = {name: self._published_name(name) for name in self._named}
        if kind is Kind.frozen:
            model.requires_grad_(False)
            return
        self._optimizer = torch.optim.AdamW(
            self._named.values(), lr=0.0, betas=betas, weight_decay=weight_decay, fused=True
        )
        # What AdamW would make at its first step: so a fresh engine has a place to load into.
        for parameter in self._named.values():
            self._optimizer.state[parameter] = {
                "step": torch.zeros((), device=self._device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def _forward(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """[T] log-probability, or value, and [T] entropy, on the CPU, of each token given those before it; 0 where there are none."""
        targets = packed.positions.nonzero()[:, 0]
        tokens, cu_seqlens = packed.tokens.to(self._device), packed.cu_seqlens.to(self._device)
        self._head.ask(sources=(targets - 1).to(self._device), targets=packed.tokens[targets].to(self._device))
        out = self._model(
            input_ids=tokens[None],
            position_ids=packed.positions.to(self._device)[None],
            use_cache=False,  # with a cache, transformers lets packed sequences see each other
            cu_seq_lens_q=cu_seqlens,
            cu_seq_lens_k=cu_seqlens,
            max_length_q=packed.max_seqlen,
            max_length_k=packed.max_seqlen,
        ).logits[0]
        spread = torch.zeros(len(tokens), 2).index_copy(0, targets, out.cpu())
        return spread[:, 0], spread[:, 1]

    @torch.no_grad()
    def infer(self, microbatches: Sequence[Packed]) -> list[Tensor]:
        return [self._forward(packed)[0] for packed in microbatches]

    def update(self, microbatches: Sequence[Packed], loss_fn: LossFn, lr: float) -> float:
        """Raises FloatingPointError, and updates nothing, when the gradient is not finite."""
        world = dist.get_world_size()
        for number, packed in enumerate(microbatches):
            self._model.set_requires_gradient_sync(number == len(microbatches) - 1)
            logprobs, entropy = self._forward(packed)
            (loss_fn(logprobs, entropy, packed) * world).backward()  # FSDP averages over ranks, the loss is a sum
        grad_norm = self._clip()
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        return grad_norm

    def _clip(self) -> float:
        """Scales the gradient to `max_grad_norm` where it is longer; returns its norm before."""
        shards = [p.grad.to_local() for p in self._named.values() if p.grad is not None]
        squared = torch.stack(torch._foreach_norm(shards)).square().sum()
        dist.all_reduce(squared)
        norm = math.sqrt(squared.item())
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient norm must be finite, got {norm}: nothing was updated")
        if norm > self._max_grad_norm:
            torch._foreach_mul_(shards, self._max_grad_norm / (norm + 1e-6))
        return norm

    def _published_name(self, name: str) -> str | None:
        """None for a parameter that is published as several (the experts of a layer), which need it whole."""
        probe = torch.empty(self._named[name].shape, device="meta")
        published = revert_weight_conversion(self._model, {name: probe})
        return next((name for name, tensor in published.items() if tensor is probe), None)

    def weights(self) -> Iterator[Part]:
        for name, parameter in self._named.items():
            if (published := self._published_names[name]) is not None:
                yield from stream(published, parameter.detach(), self._publish_dtype, self._bucket_bytes)
                continue
            whole = parameter.detach().to(self._publish_dtype).full_tensor()  # cast first: less to gather
            if dist.get_rank() == 0:
                yield from parts(revert_weight_conversion(self._model, {name: whole.cpu()}))

    def snapshot(self) -> Write:
        state = {name: _copy(tensor) for name, tensor in self._state().items()}
        random = self._random()

        def write(folder: Path) -> None:
            """Shards of plain safetensors, which a different number of ranks can load."""
            (folder / "random").mkdir(parents=True, exist_ok=True)
            writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
            dcp.save(state, storage_writer=writer, process_group=self._writers)
            save_file(random, folder / "random" / f"rank_{dist.get_rank()}.safetensors")

        return write

    def load(self, folder: Path) -> None:
        """Raises FileNotFoundError, or what torch raises, when the folder is not a checkpoint of this model."""
        dcp.load(self._state(), storage_reader=HuggingFaceStorageReader(str(folder)))
        state = folder / "random" / f"rank_{dist.get_rank()}.safetensors"
        if state.exists():  # with more ranks than wrote it, a new one keeps its own
            random = load_file(state)
            torch.set_rng_state(random["cpu"])
            if "cuda" in random:
                torch.cuda.set_rng_state(random["cuda"])

    def _state(self) -> dict[str, Tensor]:
        """Model and optimizer by name: the live tensors, so that loading writes into them."""
        state: dict[str, Tensor] = {}
        for name, parameter in self._named.items():
            state[f"model.{name}"] = parameter.detach()
            state |= {f"{key}.{name}": value for key, value in self._optimizer.state[parameter].items()}
        return state

    def _random(self) -> dict[str, Tensor]:
        cuda = {"cuda": torch.cuda.get_rng_state()} if self._device.type == "cuda" else {}
        return {"cpu": torch.get_rng_state(), **cuda}


def _copy(tensor: Tensor) -> Tensor:
    """The same, sharded alike, in the host's memory."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    local = tensor.to_local().detach().to("cpu", copy=True)
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
