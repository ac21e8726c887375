"""Attention over packed sequences, none of which sees another: what transformers' attention interface calls in each layer.

All take [1, heads, T, d] and the lengths as `cu_seq_lens_q` [n + 1], and give [1, T, heads, d]. `flash_attention_2` is transformers' own.
"""

from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from configs.learner import Attention
from configs.schema import Dtype


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


class _Swap(torch.autograd.Function):
    """All-to-all: each rank gives away all but its part of dimension `scatter`, and gets the others' parts of dimension `gather`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scatter: int, gather: int, group: dist.ProcessGroup) -> Tensor:
        ctx.back = gather, scatter, group
        parts = torch.stack(x.chunk(group.size(), scatter))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return torch.cat(received.unbind(), gather)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Swap.apply(grad, *ctx.back), None, None, None


def ulysses(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    inner: str,
    sequence_group: dist.ProcessGroup,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention of tokens that the ranks of a group share (DeepSpeed-Ulysses, 2023): each does some of the heads, for all tokens.

    [1, heads, T / ranks, d] -> [1, T / ranks, heads, d]. Where the ranks do not divide the key heads, those are repeated.
    """
    ranks, heads = sequence_group.size(), query.shape[1]
    if key.shape[1] % ranks:
        times = (ranks if ranks % key.shape[1] == 0 else heads) // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    query, key, value = (_Swap.apply(x, 1, 2, sequence_group) for x in (query, key, value))
    out, _ = ALL_ATTENTION_FUNCTIONS[inner](module, query, key, value, None, **more)
    return _Swap.apply(out, 1, 2, sequence_group), None


for _name, _function in (("packed_sdpa", padded_sdpa), ("varlen", varlen), ("ulysses", ulysses)):
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
