"""Small models of each kind, a batch and a loss for them, and the engines that train them: every engine must
give one step's numbers."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from configs.parallel import FsdpConfig
from learners.engine import Engine
from learners.fsdp import FsdpEngine
from learners.packing import Batch, Packed

LR, MAX_GRAD_NORM, TEMPERATURE, WEIGHT_DECAY, BETAS = 1e-3, 0.5, 0.8, 0.1, (0.9, 0.95)


LENGTHS = [5, 19, 2, 33, 8, 11, 3, 14, 27, 6, 9, 4, 21, 7, 12, 10]


SIZES = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


SMALL = dict(
    vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
"""Sizes of a model for `draw_batch`."""


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=True,
            decoder_sparse_step=1,
        )
    ),
}


@dataclass(frozen=True)
class EngineRow:
    engine: str
    ranks: int
    model: str = "qwen3"
    options: dict[str, Any] = field(default_factory=dict)
    balance: float = 0.0
    """Coefficient of the auxiliary load-balancing loss"""
    replay: bool = False
    """Tokens go to recorded experts, drawn at random"""
    branched: bool = False
    """Two sequences at a time are the branches of one episode"""
    num_hosts: int = 1
    """Hosts that the ranks are divided over"""


BALANCE = 0.5
EPISODE_COLUMNS = ("rewards", "groups", "group_weights", "truncated", "greedy_rewards")


@cache
def save_model(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = MODELS[name]()
    for parameter in model.parameters():  # far from initial values, where norms are 1 and biases 0
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder / name)
    return folder / name


def save_small_qwen3(folder: Path) -> Path:
    """Writes a Qwen3 with initial weights, the same at each call, into the folder."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=False)).save_pretrained(folder)
    return folder


def negate_logprobs(logprobs: Tensor, entropy: Tensor, packed: Packed) -> Tensor:
    """A loss: the negative log-likelihood, over 70."""
    return -logprobs.sum() / 70


def draw_experts() -> Tensor:
    """[T, 2 layers · 2] random experts, two different ones; the last of each sequence goes unrecorded."""
    rng, ends = np.random.default_rng(2), np.cumsum(LENGTHS) - 1
    chosen = rng.permuted(np.tile(np.arange(4), (sum(LENGTHS), 2, 1)), axis=-1)[..., :2]
    chosen[ends] = -1
    return torch.from_numpy(chosen.reshape(-1, 4).astype(np.int16))


def make_batch(replay: bool = False) -> Batch:
    rng, total = np.random.default_rng(0), sum(LENGTHS)
    tokens = torch.from_numpy(rng.integers(0, SIZES["vocab_size"], total))
    behavior_logprobs = torch.from_numpy(rng.normal(-4.5, 0.3, total)).float()
    batch = make_sampled_batch(LENGTHS, tokens)
    return replace(batch, behavior_logprobs=behavior_logprobs, experts=draw_experts() if replay else None)


def pair_sequences(batch: Batch) -> Batch:
    """Makes each two sequences the branches of one episode, with the first one's values."""
    values = {name: getattr(batch, name)[::2] for name in EPISODE_COLUMNS}
    return replace(batch, offsets=batch.offsets[::2], branch_offsets=batch.offsets, **values)


def make_sampled_batch(lengths: list[int], tokens: Tensor) -> Batch:
    """Makes a batch of sequences of these lengths, one a group, in which every token is sampled. tokens
    [T]."""
    count, total = len(lengths), sum(lengths)
    return Batch(
        tokens=tokens,
        sampled=torch.ones(total, dtype=torch.bool),
        behavior_logprobs=torch.zeros(total),
        versions=torch.zeros(total, dtype=torch.int32),
        offsets=np.cumsum([0, *lengths]),
        rewards=torch.zeros(count),
        groups=torch.arange(count),
        group_weights=torch.ones(count),
        truncated=torch.zeros(count, dtype=torch.bool),
        greedy_rewards=torch.full((count,), float("nan")),
    )


def draw_batch(lengths: list[int], vocabulary: int = SMALL["vocab_size"]) -> Batch:
    """Makes a batch of random tokens, the same at each call."""
    rng = torch.Generator().manual_seed(0)
    return make_sampled_batch(lengths, torch.randint(0, vocabulary, (sum(lengths),), generator=rng))


def sum_policy_gradient(logprobs: Tensor, behavior: Tensor, positions: Tensor, advantages: Tensor) -> Tensor:
    """Importance-weighted policy gradient over all tokens that have a log-probability; the denominator is
    global."""
    terms = -(logprobs - behavior).clamp(max=2).exp() * advantages
    return terms[positions > 0].sum() / (sum(LENGTHS) - len(LENGTHS))


def draw_advantages(batch: Batch) -> Tensor:
    return torch.from_numpy(np.random.default_rng(1).normal(size=len(batch.tokens))).float()


def make_engine(row: EngineRow, folder: Path) -> Engine:
    common: dict[str, Any] = dict(
        temperature=TEMPERATURE,
        betas=BETAS,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
        bucket_bytes=1 << 11,
        aux_loss_coefficient=row.balance,
        activation_checkpointing=row.balance > 0,  # which routes twice
        router_replay=row.replay,
    )
    if row.engine == "fsdp":
        return FsdpEngine(folder, layout=FsdpConfig(**row.options), **common)
    from learners.megatron.engine import MegatronEngine

    return MegatronEngine(folder, **row.options, **common)
