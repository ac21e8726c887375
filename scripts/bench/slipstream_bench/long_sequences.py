"""One update on one long sequence, on the ranks of any layout, and its comparison with one rank's."""

import importlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from configs.learner import LearnerKind
from configs.load import load_config
from configs.schema import Config
from learners.engine import ModelKind
from learners.memory import MemoryMeter
from learners.models import make_engine
from learners.packing import Batch, Packed, pack_rows
from sync.stream import TensorPart, collect_tensors

VOCABULARY, HIDDEN, HEADS, HEAD_DIM, LAYERS = 64, 32, 2, 16, 2
LR = 1e-3
LAYOUTS: dict[str, list[str]] = {
    "fsdp, 1 rank": [],
    "ulysses, 2 ranks": ["learner.ranks=2", "learner.fsdp.sequence_parallel=2"],
    "megatron, 1 rank": ["learner.engine=megatron"],
    "megatron CP, 2 ranks": [
        "learner.engine=megatron", "learner.ranks=2", "learner.megatron.context_parallel=2",
    ],
}  # fmt: skip
"""Settings by name. The first is what the others are compared with."""


@dataclass(slots=True)
class LongOutcome:
    """One rank's results of an update on one sequence of T tokens."""

    logprobs: Tensor
    """[T]"""
    grad_norm: float
    parts: list[tuple[str, tuple[int, ...], Tensor, int]]
    """The rank's parts of the published weights after the update: name, shape, elements and their place."""
    seconds: float
    peak_bytes: float
    """Most memory that the rank has needed, its model included."""


@dataclass(frozen=True, slots=True)
class Distance:
    """The difference of two outcomes of the same update."""

    logprobs: float
    """Largest difference of a token's log-probability."""
    grad_norm: float
    """Difference of the gradient norms over the second one."""
    weights: float
    """Share of the weights that differ by more than 2 % of a step of AdamW."""


def save_long_model(folder: Path, num_positions: int) -> Path:
    """Writes a narrow Qwen3 with random weights for sequences of up to so many tokens."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=num_positions,
        # Angles that turn by whole circles within a sequence tell far positions apart.
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        # Far from initial values, so that tokens far away count.
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def configure_layout(name: str, folder: Path, num_tokens: int, *settings: str) -> Config:
    """Returns the configuration of a run that would train sequences of so many tokens in this layout."""
    return load_config(
        [
            f"model.path={folder}",
            "algo=grpo",
            "eval.prompts=0",
            f"learner.lr={LR}",
            "learner.groups_per_step=4",
            f"learner.tokens_per_microbatch={num_tokens}",
            f"generators.max_model_len={num_tokens}",
            f"sampling.max_tokens={num_tokens // 2}",
            *LAYOUTS[name],
            *settings,
        ]
    )


def draw_long_batch(lengths: list[int]) -> Batch:
    """Makes a batch of sequences of random tokens, the same at each call; an eighth of each is its prompt."""
    rng, count = np.random.default_rng(0), len(lengths)
    offsets = np.cumsum([0, *lengths])
    sampled = np.concatenate([np.arange(length) >= max(1, length // 8) for length in lengths])
    return Batch(
        tokens=torch.from_numpy(rng.integers(1, VOCABULARY, offsets[-1], dtype=np.int32)),
        sampled=torch.from_numpy(sampled),
        behavior_logprobs=torch.zeros(len(sampled)),
        versions=torch.from_numpy(np.where(sampled, 0, -1).astype(np.int32)),
        offsets=offsets,
        rewards=torch.zeros(count),
        groups=torch.arange(count),
        group_weights=torch.ones(count),
        truncated=torch.zeros(count, dtype=torch.bool),
        greedy_rewards=torch.full((count,), math.nan),
    )


def train_long(config: Config, batch: Batch) -> LongOutcome:
    """Makes one update on the whole batch as one microbatch, in torch's default process group. Collective.

    The loss is the mean negative log-likelihood of the sampled tokens.
    """
    # The library is no part of what the model needs.
    importlib.import_module(f"learners.{config.learner.engine}")
    if config.learner.engine is LearnerKind.megatron:
        importlib.import_module("learners.megatron.engine")
    meter = MemoryMeter(cuda=torch.cuda.is_available())
    engine, packed = make_engine(config, ModelKind.policy), pack_rows(batch, range(batch.num_sequences))
    found, began = torch.zeros(0), time.perf_counter()

    def compute_loss(logprobs: Tensor, entropy: Tensor, packed: Packed) -> Tensor:
        nonlocal found
        found = logprobs.detach().clone()
        return -logprobs.sum() / packed.num_sampled

    norm = engine.update([packed], compute_loss, LR)
    seconds, peak = time.perf_counter() - began, meter.measure_peak()
    parts = [(one.name, one.shape, one.cast_elements().clone(), one.begin) for one in engine.stream_weights()]
    return LongOutcome(found, norm, parts, seconds, peak)


def join_weights(ranks: Sequence[LongOutcome]) -> dict[str, Tensor]:
    """Returns the whole published weights, whose parts the ranks have."""
    return collect_tensors(TensorPart(*part) for one in ranks for part in one.parts)


def compare_outcomes(these: Sequence[LongOutcome], those: Sequence[LongOutcome]) -> Distance:
    """Compares the results of the ranks of two layouts."""
    one, other, mine, theirs = these[0], those[0], join_weights(these), join_weights(those)
    apart = torch.cat([(mine[name] - theirs[name]).abs().flatten() for name in theirs])
    return Distance(
        logprobs=float((one.logprobs - other.logprobs).abs().max()),
        grad_norm=abs(one.grad_norm / other.grad_norm - 1),
        weights=float((apart > 0.02 * LR).float().mean()),
    )


def count_sent_bytes(config: Config) -> float:
    """Returns the bytes that a rank sends for each of its tokens and each layer in one update: its queries,
    keys, values and outputs, all but its own part, forward and backward."""
    learner = config.learner
    ranks = max(learner.fsdp.sequence_parallel, learner.megatron.context_parallel)
    passes = 3 if learner.activation_checkpointing else 2
    return 4.0 * passes * 4 * HEADS * HEAD_DIM * (ranks - 1) / ranks
