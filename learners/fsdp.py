"""The FSDP2 engine: a Hugging Face causal LM under `fully_shard`, on gloo (CPU) or NCCL.

float32 master weights; with `dtype=bfloat16` forward and backward compute in bfloat16 and gradients are reduced in float32.
The language-model head never makes [tokens, vocabulary] at once: it returns log-probabilities, chunk by chunk.
"""

import math
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from configs.schema import Attention
from learners.engine import LossFn
from learners.packing import Packed

CHUNK = 4096
"""Tokens whose logits exist at the same time."""


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
    """As `packed_sdpa`, for many short sequences on a CPU: they are padded for the attention alone, one call in all.

    A padded key stands behind every real query of its sequence, so the causal mask hides it.
    """
    assert cu_seq_lens_q is not None, "packed attention needs the lengths of the sequences"
    lengths = cu_seq_lens_q.diff()
    if len(lengths) * max_length_q > 2 * query.shape[2] + 1024:
        return packed_sdpa(module, query, key, value, attention_mask, scaling, cu_seq_lens_q=cu_seq_lens_q)
    real = torch.arange(max_length_q, device=query.device) < lengths[:, None]

    def pad(packed: Tensor) -> Tensor:
        padded = packed.new_zeros(len(lengths), max_length_q, packed.shape[1], packed.shape[3])
        return padded.masked_scatter(real[..., None, None], packed[0].transpose(0, 1).contiguous()).transpose(1, 2)

    out = F.scaled_dot_product_attention(
        pad(query), pad(key), pad(value), is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2)[real][None].contiguous(), None


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
    """The same by torch's own variable-length kernel (CUDA, bfloat16 or float16)."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))
    out = varlen_attn(
        q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, window_size=(-1, 0), scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return out[None], None


for _name, _function in (("packed_sdpa", padded_sdpa), ("varlen", varlen)):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, lambda *args, **kwargs: None)


def choose_attention(wanted: Attention) -> str:
    if wanted is not Attention.auto:
        return str(wanted)
    if not torch.cuda.is_available():
        return "packed_sdpa"
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        return "varlen"
    return "flash_attention_2"


def _head_forward(self: Any, hidden: Tensor) -> Tensor:
    """Replaces the head's forward: [1, T, H] -> [1, T, 2], log-probability of `targets` and entropy at each position."""

    def chunk(h: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(h, self.weight, self.bias).float() / self.temperature
        normalizer = torch.logsumexp(logits, -1)
        logprobs = logits.gather(-1, targets[:, None])[:, 0] - normalizer
        with torch.no_grad():
            entropy = normalizer - ((logits - normalizer[:, None]).exp() * logits).sum(-1)
        return torch.stack([logprobs, entropy], -1)

    parts = zip(hidden[0].split(CHUNK), self.targets.split(CHUNK), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([chunk(h, t) for h, t in parts])[None]
    if len(hidden[0]) <= CHUNK:
        return chunk(hidden[0], self.targets)[None]
    return torch.cat([checkpoint(chunk, h, t, use_reentrant=False) for h, t in parts])[None]


class FsdpEngine:
    """See `learners.engine.Engine`. The process group must be initialised."""

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: str = "float32",
        temperature: float = 1.0,
        attention: Attention = Attention.auto,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        activation_checkpointing: bool = False,
    ) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self._publish_dtype = getattr(torch, dtype)
        self._max_grad_norm = max_grad_norm
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=choose_attention(attention)
        ).to(self._device)
        if activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.lm_head.forward = types.MethodType(_head_forward, model.lm_head)
        model.lm_head.temperature = temperature
        mesh = init_device_mesh(self._device.type, (dist.get_world_size(),))
        compute = torch.bfloat16 if dtype == "bfloat16" else None
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32 if compute else None)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        self._model = model.train()
        self._parameters = list(model.parameters())
        self._optimizer = torch.optim.AdamW(self._parameters, lr=0.0, betas=betas, weight_decay=weight_decay)

    def _forward(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """[T] log-probability and [T] entropy of each token given those before it; 0 for the first of a sequence."""
        tokens, cu_seqlens = packed.tokens.to(self._device), packed.cu_seqlens.to(self._device)
        self._model.lm_head.targets = tokens.roll(-1)
        out = self._model(
            input_ids=tokens[None],
            position_ids=packed.positions.to(self._device)[None],
            use_cache=False,  # with a cache, packed sequences would see each other
            cu_seq_lens_q=cu_seqlens,
            cu_seq_lens_k=cu_seqlens,
            max_length_q=packed.max_seqlen,
            max_length_k=packed.max_seqlen,
        ).logits[0]
        first = packed.positions.to(self._device) == 0
        shifted = torch.where(first[:, None], 0.0, out.roll(1, 0)).cpu()
        return shifted[:, 0], shifted[:, 1]

    @torch.no_grad()
    def logprobs(self, microbatches: Sequence[Packed]) -> list[Tensor]:
        found = [self._forward(packed)[0] for packed in microbatches]
        for module in self._model.modules():  # a forward without backward leaves some unsharded: their weights would go stale
            if isinstance(module, FSDPModule):
                module.reshard()
        return found

    def update(self, microbatches: Sequence[Packed], loss_fn: LossFn, lr: float) -> float:
        world = dist.get_world_size()
        for number, packed in enumerate(microbatches):
            self._model.set_requires_gradient_sync(number == len(microbatches) - 1)
            logprobs, entropy = self._forward(packed)
            (loss_fn(logprobs, entropy, packed) * world).backward()  # FSDP averages over ranks, the loss is a sum
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        grad_norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        if not math.isfinite(grad_norm):
            raise FloatingPointError(f"the gradient norm must be finite, got {grad_norm}: nothing was updated")
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        return grad_norm

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            cast = parameter.detach().to(self._publish_dtype)
            yield name, (cast.full_tensor() if isinstance(cast, DTensor) else cast).cpu()

    def save(self, folder: Path) -> None:
        dcp.save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self._model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        torch.set_rng_state(state["rng"])

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer, "rng": torch.get_rng_state()}
