"""Attention over the pages of transformers' continuous batching, one request after another.

transformers' own functions for a CPU compute the scores of every query with the keys of every request, and
mask most of them; they know neither caps nor the order in which a sum is made. Here each request is a call of
its own, so that its numbers do not depend on what runs beside it, and memory grows with its own length alone.
"""

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "slipstream_paged"
UNKNOWN_ARGUMENTS = ("s_aux", "position_bias", "indices", "block_indices")
"""Arguments that transformers gives to the attention of some families, and that this function does not
apply."""


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Writes keys and values of the batch's T tokens to their pages, and lets each token see its request's
    tokens up to itself, within its layer's window.

    [1, heads, T, d] -> [1, T, heads, d]. Raises ValueError for an argument that would be ignored.
    """
    assert cache is not None and cu_seq_lens_q is not None, "continuous batching gives pages and lengths"
    if unknown := [name for name in UNKNOWN_ARGUMENTS if more.get(name) is not None]:
        raise ValueError(f"{type(module).__name__} asks its attention for {unknown[0]}")
    layer: Any = module.layer_idx
    # It also puts this layer's lengths of keys in the place of all layers'.
    key, value = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=more)
    pages = cache.layer_to_allocator[layer]
    window = pages.sliding_window if pages.layer_type == "sliding_attention" else None
    queries = query.split(cu_seq_lens_q.diff().tolist(), 2)
    lengths = more["cu_seq_lens_k"].diff().tolist()
    parts = [
        _attend(q, k, v, scaling, window, softcap)
        for q, k, v in zip(queries, key.split(lengths, 2), value.split(lengths, 2), strict=True)
    ]
    return torch.cat(parts, 2).transpose(1, 2), None


def choose_attention(model: Any) -> str:
    """Returns the name of the attention for a model: FlashAttention 2 where a GPU and the package are, else
    this one."""
    can_flash = model.device.type == "cuda" and model.dtype in (torch.bfloat16, torch.float16)
    return "flash_attention_2" if can_flash and find_spec("flash_attn") else NAME


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Causal attention of a request's last q of its k tokens. [1, heads, q, d], [1, heads, k, d] -> [1,
    heads, q, d]."""
    count, length = query.shape[2], key.shape[2]
    window = length if window is None else min(window, length)
    is_plain = window == length and count in (1, length)
    seen = None
    if not is_plain or (softcap is not None and count > 1):
        places = torch.arange(length, device=query.device)
        distance = places[length - count :, None] - places
        seen = (distance >= 0) & (distance < window)
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, seen, scale=scaling, is_causal=is_plain and count > 1,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = (query @ key.transpose(2, 3)).float() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1).to(value.dtype) @ value


def _make_no_mask(*_: Any, **__: Any) -> None:
    """Stands in for the mask, whose [T, all keys] elements nothing here needs."""


AttentionInterface.register(NAME, paged_attention)
AttentionMaskInterface.register(NAME, _make_no_mask)
