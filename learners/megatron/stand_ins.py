"""Stand-ins for what Megatron-core 0.16.1 lacks without TransformerEngine or CUDA, each with its reason.

Call `install_stand_ins()` before any model is made, and wrap everything that Megatron computes in
`use_available_device()`.
"""

import contextlib
import warnings
from collections.abc import Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import optimizer
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor
from torch.overrides import TorchFunctionMode

from configs.learner import Attention

HAVE_TE = torch.cuda.is_available() and find_spec("transformer_engine") is not None

REPEATED_WARNINGS = [
    "full scope is deprecated",
    "When using sequence parallelism",
    "The .grad attribute of a Tensor that is not a leaf",
    ".*torch.distributed.* is deprecated",
]
"""Warnings at each step about Megatron's own way of calling torch, and about settings for CUDA: a user cannot
act on them."""


@cache
def install_stand_ins() -> None:
    """Replaces the parts of Megatron and torch that fail on this machine, once for each process."""
    for message in REPEATED_WARNINGS:
        warnings.filterwarnings("ignore", message)
    # Without TransformerEngine Megatron takes torch's AdamW, with it another one. Always torch's: checkpoints
    # have one form.
    optimizer.USING_PYTORCH_OPTIMIZER = True
    # The router asks whether this is None, but the name does not exist where TransformerEngine is missing.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    if torch.cuda.is_available():
        return
    # Megatron asks `torch.cuda` for device and streams; torch has the same functions for the CPU.
    for name in ("current_device", "synchronize", "stream", "current_stream"):
        setattr(torch.cuda, name, getattr(torch.cpu, name))
    torch.cuda.Stream = _Stream
    # Megatron's tracker of random states then keeps the CPU's.
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # The dispatcher of experts needs its sizes as numpy arrays, and makes them only from tensors that it
    # moves off a GPU.
    token_dispatcher.maybe_move_tensor_to_cpu = _as_numpy


class _Stream(torch.cpu.Stream):
    """A CPU stream that records events: the dispatcher of experts makes a stream of its own and records
    events on it."""

    def record_event(self, *_: Any) -> torch.cpu.Event:
        return torch.cpu.Event()


def _as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


class _CpuForCuda(TorchFunctionMode):
    """Puts the CPU where Megatron writes `device="cuda"` or `.cuda()`, or compares a type with
    "torch.cuda.FloatTensor"."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)


def use_available_device() -> contextlib.AbstractContextManager[Any]:
    """Makes Megatron's "cuda" the device of this machine while the context lasts."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _CpuForCuda()


class RMSNorm(torch.nn.RMSNorm):
    """Replaces Megatron's own norm, which refuses sequence parallelism without TransformerEngine."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        # Each rank then has the gradient of its own tokens, and Megatron adds these up.
        self.weight.sequence_parallel = config.sequence_parallel


class OneRank:
    """Stands for the context-parallel group within Megatron's layers.

    Megatron divides every sequence of its own into twice as many parts as there are ranks, and rotates
    queries and keys for that. Here a rank has one run of tokens, with the ends of sequences anywhere, and
    layers see it as a whole: only `PackedAttention` knows of the other ranks.
    """

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def make_layer_groups() -> ProcessGroupCollection:
    """Returns the process groups of a model's layers."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.cp = OneRank()
    return groups


class PackedAttention(MegatronModule):
    """Replaces Megatron's own attention, which refuses packed sequences without TransformerEngine, and
    TransformerEngine's where ranks share the tokens: each then computes some heads of all ranks' tokens
    (`learners.attention.ulysses_attention`)."""

    def __init__(
        self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any
    ) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: PackedSeqParams,
        **__: Any,
    ) -> Tensor:
        """[T, heads, d], [T, groups, d] twice -> [T, heads · d]."""
        from learners.attention import padded_sdpa, ulysses_attention, varlen_attention

        has_kernel, group = query.is_cuda and query.dtype is torch.bfloat16, mpu.get_context_parallel_group()
        attend = varlen_attention if has_kernel else padded_sdpa
        if group.size() > 1:
            inner = str(Attention.varlen if has_kernel else Attention.packed_sdpa)
            attend = partial(ulysses_attention, inner=inner, sequence_group=group)
        q, k, v = (packed.transpose(0, 1)[None] for packed in (query, key, value))
        out, _nothing = attend(
            self,
            q,
            k,
            v,
            None,
            scaling=self._scale,
            cu_seq_lens_q=packed_seq_params.cu_seqlens_q,
            max_length_q=packed_seq_params.max_seqlen_q,
        )
        return out[0].flatten(1)


def make_block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Returns the layers of this pipeline stage: TransformerEngine's, or Megatron's own with the classes
    above."""
    if HAVE_TE:
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
        for layer in block.layer_specs if config.context_parallel_size > 1 else ():
            layer.submodules.self_attention.submodules.core_attention = PackedAttention
        return block
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    block.layer_norm = RMSNorm
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        attention = parts.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    return block
