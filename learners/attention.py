"""Attention over packed sequences, none of which sees another: the functions that transformers' attention
interface calls in each layer.

All take [1, heads, T, d] and the sequences' ends as `cu_seq_lens_q` [n + 1], and return [1, T, heads, d]. A
layer may have a sliding window (a token sees itself and the `sliding_window` - 1 tokens before it) and cap
its scores (`softcap` · tanh(score / `softcap`)). `flash_attention_2` is transformers' own, except inside of
`ulysses_attention`.
"""

from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from configs.learner import Attention
from configs.model import Dtype
from configs.sizes import count_exchanged_heads
from learners.sequence_ranks import exchange_parts

BLOCK = 1024
"""Most queries whose scores exist at the same time, where a layer has a window or a cap."""
MAX_PADDED_SHARE, MAX_PADDED_EXTRA = 2, 1024
"""Padded attention may make at most so many times the batch's tokens, plus so many."""
LONG = 2048
"""Mean length of sequences from which padding is not worth its copies of queries, keys and values."""
LENGTH_DEPENDENT_ROPES = {"dynamic", "longrope"}
"""Rotary embeddings (`rope_type`) for which transformers looks at the largest position."""
UNKNOWN_ARGUMENTS = ("s_aux", "position_bias", "indices", "block_indices")
"""Arguments that transformers gives to the attention of some families, and that no function here applies."""
NO_CAPS = (
    "learner.attention must be packed_sdpa or flash_attention_2 for a model that caps its scores (at {}), "
    "got varlen"
)


def _attend_causally(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Causal attention of n sequences side by side. [n, heads, L, d] -> [n, heads, L, d]."""
    length, times = query.shape[2], query.shape[1] // key.shape[1]
    if softcap is None and (window is None or window >= length):
        if times > 1 and query.is_cuda and query.dtype is torch.float32:
            # No kernel of torch's for float32 on a GPU knows groups of heads, and without a kernel all scores
            # exist at the same time.
            key, value, times = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1), 1
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=times > 1
        )
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    window, parts = min(window or length, length), []
    block, masks = min(window, BLOCK), dict[tuple[int, int], Tensor]()
    # torch's SDPA has no window and no cap, so this makes scores itself. A block of queries sees only the
    # keys of the block and of one window before it: memory is block × (block + window) and not length².
    for begin in range(0, length, block):
        end, first = min(begin + block, length), max(0, begin - window + 1)
        q, k, v = query[:, :, begin:end], key[:, :, first:end], value[:, :, first:end]
        if softcap is not None:
            scale = q.shape[-1] ** -0.5 if scaling is None else scaling
            # The scores of all blocks would be length², so the backward pass makes them again.
            out = checkpoint(
                _attend_capped, q, k, v, window, scale, softcap, use_reentrant=False, preserve_rng_state=False
            )
        else:
            shape = end - begin, begin - first
            if shape not in masks:  # all blocks but the first ones and the last have one mask between them
                seen = _find_seen(*shape, window, query.device)
                masks[shape] = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(
                    ~seen, float("-inf")
                )
            out = F.scaled_dot_product_attention(q, k, v, masks[shape], scale=scaling)
        parts.append(out)
    return torch.cat(parts, 2)


def _find_seen(size: int, before: int, window: int, device: torch.device) -> Tensor:
    """Returns [size, before + size] bool: the keys that each query of a block sees. `before` counts the keys
    before the block."""
    places = torch.arange(before + size, device=device)
    distance = places[before:, None] - places
    return (distance >= 0) & (distance < window)


def _attend_capped(q: Tensor, k: Tensor, v: Tensor, window: int, scaling: float, softcap: float) -> Tensor:
    size = q.shape[2]
    seen = _find_seen(size, k.shape[2] - size, window, q.device)
    scores = softcap * torch.tanh((q @ k.transpose(2, 3)).float() * (scaling / softcap))
    return scores.masked_fill(~seen, float("-inf")).softmax(-1).to(v.dtype) @ v


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence, one sequence after another.

    [1, heads, T, d] -> [1, T, heads, d].
    """
    assert cu_seq_lens_q is not None, "packed attention needs the lengths of the sequences"
    lengths = cu_seq_lens_q.diff().tolist()
    parts = [
        _attend_causally(q, k, v, scaling, sliding_window, softcap)
        for q, k, v in zip(
            query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True
        )
    ]
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


def padded_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Computes the same as `packed_sdpa` in one call for all sequences, which are padded for the attention
    alone.

    With many short sequences, the fixed cost of one call each outweighs the attention. Where sequences are
    long, or differ so much in length that padding would more than double the work, it calls `packed_sdpa`.
    """
    assert cu_seq_lens_q is not None, "packed attention needs the lengths of the sequences"
    lengths = cu_seq_lens_q.diff()
    num_places = len(lengths) * max_length_q
    is_long = query.shape[2] >= LONG * len(lengths)
    if is_long or num_places > MAX_PADDED_SHARE * query.shape[2] + MAX_PADDED_EXTRA:
        return packed_sdpa(
            module,
            query,
            key,
            value,
            None,
            scaling,
            cu_seq_lens_q=cu_seq_lens_q,
            sliding_window=sliding_window,
            softcap=softcap,
        )
    column = torch.arange(max_length_q, device=query.device)
    # [n, longest] index of the packed token in each place. A place beyond the end of its sequence repeats the
    # last token, because `index_select`, which needs a valid index everywhere, is several times faster than
    # scattering tokens into zeros.
    index = torch.minimum(cu_seq_lens_q[:-1, None] + column, cu_seq_lens_q[1:, None] - 1)
    real = (column < lengths[:, None]).flatten().nonzero()[:, 0]
    # [1, heads, T, d] -> [T, heads, d] -> [n · longest, heads, d] -> [n, heads, longest, d]
    q, k, v = (
        packed[0].transpose(0, 1).index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)
        for packed in (query, key, value)
    )
    # The repeated tokens need no mask of their own: they stand behind every real token of their sequence, so
    # the causal mask hides them from it. Their own outputs are dropped: `real` selects the rest, in the
    # packed order. Dropped outputs have gradient zero, so nothing flows back through the repetition.
    out = _attend_causally(q, k, v, scaling, sliding_window, softcap)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, real)[None], None


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Computes the same by torch's own variable-length kernel (CUDA, bfloat16), which caps no scores."""
    from torch.nn.attention.varlen import varlen_attn

    if softcap is not None:
        raise ValueError(NO_CAPS.format(softcap))
    q, k, v = (packed[0].transpose(0, 1).contiguous() for packed in (query, key, value))
    out = varlen_attn(
        q,
        k,
        v,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        window_size=(_count_before(sliding_window), 0),
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[None], None


def flash_varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Computes the same by FlashAttention 2, inside of `ulysses_attention`.

    transformers' own function looks for a kernel by the name of the attention that the model was made with,
    and no kernel is called ulysses.
    """
    from flash_attn import flash_attn_varlen_func

    q, k, v = (packed[0].transpose(0, 1).contiguous() for packed in (query, key, value))
    out = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        softmax_scale=scaling,
        causal=True,
        window_size=(_count_before(sliding_window), 0),
        softcap=softcap or 0.0,
    )
    return out[None], None


def _count_before(sliding_window: int | None) -> int:
    """Returns a window as these kernels count it: tokens before the query's own, -1 for all of them."""
    return -1 if sliding_window is None else sliding_window - 1


def ulysses_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None,
    *,
    inner: str,
    sequence_group: dist.ProcessGroup,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention over tokens that a group's ranks divide: each rank computes some heads for all tokens.

    DeepSpeed-Ulysses (Jacobs et al., 2023, arXiv 2309.14509). [1, heads, T / ranks, d] -> [1, T / ranks,
    heads, d]. Where the ranks do not divide the number of key heads, key heads are repeated until they do.
    """
    ranks, heads = sequence_group.size(), query.shape[1]
    times = count_exchanged_heads(heads, key.shape[1], ranks) // key.shape[1]
    if times > 1:
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    query, key, value = (exchange_parts(x, 1, 2, sequence_group) for x in (query, key, value))
    attend = flash_varlen if inner == Attention.flash_attention_2 else ALL_ATTENTION_FUNCTIONS[inner]
    out, _ = attend(module, query, key, value, None, **more)
    return exchange_parts(out, 1, 2, sequence_group), None


def check_ulysses(config: Any, ranks: int) -> None:
    """Raises ValueError for a model whose sequences so many ranks cannot share. `config`: Hugging Face's."""
    config = config.get_text_config()
    if config.num_attention_heads % ranks:
        raise ValueError(
            "learner.fsdp.sequence_parallel must divide the attention heads "
            f"({config.num_attention_heads}), got {ranks}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {one.get("rope_type") for one in (rope, *rope.values()) if isinstance(one, dict)}
    if ranks > 1 and (found := kinds & LENGTH_DEPENDENT_ROPES):
        raise ValueError(
            "learner.fsdp.sequence_parallel must be 1 for a model whose rotary embedding depends on the "
            f"length of what is computed (rope_type {found.pop()}), got {ranks}: each rank computes a part"
        )


# ---- registration with transformers


def _refuse_unknown(attend: Callable[..., tuple[Tensor, None]]) -> Callable[..., tuple[Tensor, None]]:
    """Wraps `attend` for transformers: raises ValueError for an argument or a mask of a layer that `attend`
    would ignore."""

    @wraps(attend)
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: int | None, **asked: Any
    ) -> tuple[Tensor, None]:
        window = asked.get("sliding_window")
        if attention_mask not in (None, window):
            raise ValueError(
                "the layers of model.path must attend to a window of their mask's size "
                f"({attention_mask}), got {window} in {type(module).__name__}"
            )
        if unknown := [name for name in UNKNOWN_ARGUMENTS if asked.get(name) is not None]:
            raise ValueError(
                "the layers of model.path must not ask their attention for "
                f"{', '.join(UNKNOWN_ARGUMENTS)}, got {unknown[0]} in {type(module).__name__}"
            )
        return attend(module, query, key, value, None, **asked)

    return attention


def _describe_mask(*_: Any, local_size: int | None = None, **__: Any) -> int | None:
    """Returns the size of a layer's window, or of its chunks, in the place of its mask; None where a token
    sees all before it.

    The mask itself would have [T, T] elements, and no function here needs it.
    """
    return local_size


for _name, _function in (
    ("packed_sdpa", padded_sdpa),
    ("varlen", varlen_attention),
    ("ulysses", ulysses_attention),
):
    AttentionInterface.register(_name, _refuse_unknown(_function))
    AttentionMaskInterface.register(_name, _describe_mask)


def choose_attention(
    wanted: Attention, device: torch.device, dtype: Dtype, softcap: float | None = None
) -> Attention:
    """Returns the attention that `auto` stands for here, or the wanted one. `softcap`: the model's cap of
    attention scores.

    Raises ValueError for a kernel that this device or dtype lacks, or that caps no scores where the model
    does.
    """
    flash = device.type == "cuda" and dtype is Dtype.bfloat16
    if wanted is Attention.auto:
        if flash and find_spec("flash_attn"):
            return Attention.flash_attention_2
        return Attention.varlen if flash and softcap is None else Attention.packed_sdpa
    if wanted is not Attention.packed_sdpa and not flash:
        raise ValueError(
            "learner.attention must be auto or packed_sdpa except on a GPU with model.dtype=bfloat16, "
            f"got {wanted} on {device.type} with {dtype}"
        )
    if wanted is Attention.varlen and softcap is not None:
        raise ValueError(NO_CAPS.format(softcap))
    return wanted
