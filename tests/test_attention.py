"""Ulysses around FlashAttention, with a stand-in for its kernel: no GPU is needed here."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from configs.learner import Attention
from learners.attention import packed_sdpa

CU_SEQLENS = torch.tensor([0, 9, 12, 30], dtype=torch.int32)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    """As the kernel's: [T, heads, d], a window counts the tokens before a query's own, and 0 is no cap."""
    assert (
        causal
        and window_size[1] == 0
        and torch.equal(cu_seqlens_q, cu_seqlens_k)
        and max_seqlen_q == max_seqlen_k == 18
    )
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    window = None if window_size[0] < 0 else window_size[0] + 1
    return packed_sdpa(
        nn.Module(),
        query,
        key,
        value,
        None,
        softmax_scale,
        cu_seq_lens_q=cu_seqlens_q,
        sliding_window=window,
        softcap=softcap or None,
    )[0][0]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "more", [{}, {"sliding_window": 5}, {"softcap": 3.0}, {"sliding_window": 4, "softcap": 3.0}]
)
def test_ulysses_computes_its_heads_by_flash_attention(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = ModuleType("flash_attn")
    kernel.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", kernel)
    layer: Any = nn.Module()
    layer.config, layer.is_causal = SimpleNamespace(_attn_implementation="ulysses"), True
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 30, 8), torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 8)
    lengths = {
        "cu_seq_lens_q": CU_SEQLENS,
        "cu_seq_lens_k": CU_SEQLENS,
        "max_length_q": 18,
        "max_length_k": 18,
    }
    found, _ = ALL_ATTENTION_FUNCTIONS["ulysses"](
        layer, query, key, value, more.get("sliding_window"), inner=str(Attention.flash_attention_2),
        sequence_group=dist.group.WORLD, **lengths, **more,
    )  # fmt: skip
    expected, _ = packed_sdpa(layer, query, key, value, None, cu_seq_lens_q=CU_SEQLENS, **more)
    torch.testing.assert_close(found, expected)
