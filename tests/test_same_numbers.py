"""The same numbers from every engine: one step from the same weights and batch, however model and batch are divided.

The reference is Hugging Face's eager attention in float32, one sequence at a time, and torch's own AdamW and clipping.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_ranks
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from configs.learner import Accumulate, FsdpConfig
from learners.engine import Engine
from learners.fsdp import FsdpEngine
from learners.packing import Batch, Packed, pack
from learners.world import World
from sync.stream import collect

LR, MAX_GRAD_NORM, TEMPERATURE, WEIGHT_DECAY, BETAS = 1e-3, 0.5, 0.8, 0.1, (0.9, 0.95)
LENGTHS = [5, 19, 2, 33, 8, 11, 3, 14, 27, 6, 9, 4, 21, 7, 12, 10]
SIZES = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64,
)  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True,
            decoder_sparse_step=1,
        )
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    engine: str
    ranks: int
    model: str = "qwen3"
    options: dict[str, Any] = field(default_factory=dict)
    balance: float = 0.0
    """Coefficient of the auxiliary load-balancing loss"""
    replay: bool = False
    """Tokens go to recorded experts, drawn at random"""


BALANCE = 0.5
ROWS = {
    "fsdp": Row("fsdp", 1),
    "fsdp, llama": Row("fsdp", 1, "llama"),
    "fsdp, qwen2 (tied)": Row("fsdp", 1, "qwen2"),
    "fsdp, qwen3_moe": Row("fsdp", 1, "qwen3_moe"),
    "fsdp 2": Row("fsdp", 2),
    "fsdp 2, qwen2 (tied)": Row("fsdp", 2, "qwen2"),
    "fsdp 2, qwen3_moe": Row("fsdp", 2, "qwen3_moe"),
    "fsdp 2, offload": Row("fsdp", 2, options={"cpu_offload": True}),
    "fsdp 2, whole gradients": Row("fsdp", 2, options={"accumulate": Accumulate.whole}),
    "fsdp 4": Row("fsdp", 4),
    "fsdp 2 x 2 replicas": Row("fsdp", 4, options={"replicas": 2}),
    "ulysses 2": Row("fsdp", 2, options={"sequence_parallel": 2}),
    "ulysses 2, llama": Row("fsdp", 2, "llama", {"sequence_parallel": 2}),
    "ulysses 4 of 2 key heads, 2 replicas": Row("fsdp", 4, "qwen2", {"sequence_parallel": 4, "replicas": 2}),
    "fsdp 2 x ulysses 2": Row("fsdp", 4, "qwen3", {"sequence_parallel": 2}),
    "megatron": Row("megatron", 1),
    "megatron TP2": Row("megatron", 2, "qwen3", {"tensor_parallel": 2}),
    "megatron TP2, qwen2 (tied)": Row("megatron", 2, "qwen2", {"tensor_parallel": 2}),
    "megatron PP2": Row("megatron", 2, "llama", {"pipeline_parallel": 2}),
    "megatron PP2, qwen2 (tied)": Row("megatron", 2, "qwen2", {"pipeline_parallel": 2}),
    "megatron DP2": Row("megatron", 2),
    "megatron TP2 x PP2": Row("megatron", 4, "qwen3", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "megatron EP2": Row("megatron", 2, "qwen3_moe", {"expert_parallel": 2}),
    "megatron TP2 x EP2": Row("megatron", 4, "qwen3_moe", {"tensor_parallel": 2, "expert_parallel": 2}),
    "fsdp 2, balanced": Row("fsdp", 2, "qwen3_moe", balance=BALANCE),
    "ulysses 2, balanced": Row("fsdp", 2, "qwen3_moe", {"sequence_parallel": 2}, BALANCE),
    "ulysses 2, balanced, replayed": Row("fsdp", 2, "qwen3_moe", {"sequence_parallel": 2}, BALANCE, True),
    "megatron PP2, replayed": Row("megatron", 2, "qwen3_moe", {"pipeline_parallel": 2}, replay=True),
    "megatron TP2 x EP2, balanced, replayed": Row(
        "megatron", 4, "qwen3_moe", {"tensor_parallel": 2, "expert_parallel": 2}, BALANCE, True
    ),
    "megatron PP2, balanced": Row("megatron", 2, "qwen3_moe", {"pipeline_parallel": 2}, BALANCE),
    "megatron TP2 x EP2, balanced": Row(
        "megatron", 4, "qwen3_moe", {"tensor_parallel": 2, "expert_parallel": 2}, BALANCE
    ),
}


@dataclass
class Outcome:
    loss: float
    grad_norm: float
    logprobs: Tensor
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    routing: dict[str, float] = field(default_factory=dict)


@cache
def made(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = MODELS[name]()
    for parameter in model.parameters():  # far from initial values, where norms are 1 and biases 0
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder / name)
    return folder / name


def recorded_experts() -> Tensor:
    """[T, 2 layers · 2] random experts, two different ones; the last of each sequence goes unrecorded."""
    rng, ends = np.random.default_rng(2), np.cumsum(LENGTHS) - 1
    chosen = rng.permuted(np.tile(np.arange(4), (sum(LENGTHS), 2, 1)), axis=-1)[..., :2]
    chosen[ends] = -1
    return torch.from_numpy(chosen.reshape(-1, 4).astype(np.int16))


def make_batch(replay: bool = False) -> Batch:
    rng, offsets = np.random.default_rng(0), np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64)
    count, total = len(LENGTHS), int(offsets[-1])
    return Batch(
        tokens=torch.from_numpy(rng.integers(0, SIZES["vocab_size"], total)),
        sampled=torch.ones(total, dtype=torch.bool),
        behavior_logprobs=torch.from_numpy(rng.normal(-4.5, 0.3, total)).float(),
        versions=torch.zeros(total, dtype=torch.int32),
        offsets=offsets,
        rewards=torch.zeros(count),
        groups=torch.arange(count),
        weights=torch.ones(count),
        truncated=torch.zeros(count, dtype=torch.bool),
        greedy=torch.full((count,), float("nan")),
        experts=recorded_experts() if replay else None,
    )


def loss_of(logprobs: Tensor, behavior: Tensor, positions: Tensor, advantages: Tensor) -> Tensor:
    """Importance-weighted policy gradient over all tokens that have a log-probability; the denominator is global."""
    terms = -(logprobs - behavior).clamp(max=2).exp() * advantages
    return terms[positions > 0].sum() / (sum(LENGTHS) - len(LENGTHS))


def advantages_of(batch: Batch) -> Tensor:
    return torch.from_numpy(np.random.default_rng(1).normal(size=len(batch.tokens))).float()


def replaying(model: Any, recorded: Tensor | None) -> Callable[[int, int], None]:
    """Replaces the choice of each of a Hugging Face model's routers; returns what says which tokens come next."""
    span = [0, 0]

    def hook(layer: int, outputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, chosen = outputs[0], outputs[1].clone(), outputs[2].clone()
        for token in range(len(logits)):
            experts = recorded[span[0] + token].view(2, 2)[layer].long()
            if experts[0] >= 0:
                chosen[token] = experts
                weights[token] = logits[token][experts].softmax(0)
        return logits, weights, chosen

    for number, layer in enumerate(model.model.layers if recorded is not None else ()):
        layer.mlp.gate.register_forward_hook(
            lambda module, inputs, outputs, number=number: hook(number, outputs)
        )
    return lambda start, end: span.__setitem__(slice(None), [start, end])


def balance_of(router_logits: list[Tensor], recorded: Tensor | None) -> tuple[Tensor, dict[str, float]]:
    """E Σ_i f_i P_i summed over the layers, from the logits [T, E] of each, and the figures of `Engine.routing`."""
    losses, loads = [], []
    for layer, logits in enumerate(router_logits):
        probabilities = logits.softmax(-1)
        num_tokens, num_experts = probabilities.shape
        load = torch.zeros(num_experts)
        for token in range(num_tokens):
            used = probabilities[token].topk(2).indices
            if recorded is not None and recorded[token][0] >= 0:
                used = recorded[token].view(2, 2)[layer]
            for expert in used.tolist():
                load[expert] += 1 / (2 * num_tokens)
        losses.append(
            num_experts * sum(load[i] * probabilities[:, i].sum() / num_tokens for i in range(num_experts))
        )
        loads.append(load * num_experts)
    loss, load = torch.stack(losses), torch.stack(loads)
    figures = {
        "moe/balance_loss": float(loss.detach().mean()),
        "moe/load_max": float(load.amax(1).mean()),
        "moe/load_min": float(load.amin(1).mean()),
    }
    return loss.sum(), figures


def reference(folder: Path, balance: float, replay: bool) -> Outcome:
    model, batch = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"), make_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)
    advantages, logprobs, total = advantages_of(batch), torch.zeros(len(batch.tokens)), 0.0
    mixture, routers = model.config.model_type == "qwen3_moe", []
    recorded = recorded_experts() if replay else None
    before_pass = replaying(model, recorded)
    for start, end in zip(batch.offsets, batch.offsets[1:], strict=False):
        tokens = batch.tokens[start:end]
        before_pass(start, end)
        out = model(tokens[None], use_cache=False, **({"output_router_logits": True} if mixture else {}))
        routers.append(out.router_logits if mixture else ())
        scores = (out.logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        found = torch.cat([torch.zeros(1), scores.gather(-1, tokens[1:, None])[:, 0]])
        loss = loss_of(
            found, batch.behavior_logprobs[start:end], torch.arange(int(end - start)), advantages[start:end]
        )
        loss.backward(retain_graph=True)
        logprobs[start:end] = found.detach()
        total += float(loss.detach())
    routing = {}
    if mixture:
        loss, routing = balance_of([torch.cat(layer) for layer in zip(*routers, strict=True)], recorded)
        (balance * loss).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM))
    optimizer.step()
    model.save_pretrained(folder / f"stepped-{balance}-{replay}")  # by the names that files have
    return Outcome(
        total, norm, logprobs, published(folder / f"stepped-{balance}-{replay}"), gradients, routing
    )


def published(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def make_engine(row: Row, folder: Path) -> Engine:
    common: dict[str, Any] = dict(
        temperature=TEMPERATURE, betas=BETAS, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM, bucket_bytes=1 << 11,
        aux_loss_coefficient=row.balance, activation_checkpointing=row.balance > 0,  # which routes twice
        router_replay=row.replay,
    )  # fmt: skip
    if row.engine == "fsdp":
        return FsdpEngine(folder, layout=FsdpConfig(**row.options), **common)
    from learners.megatron.engine import MegatronEngine

    return MegatronEngine(folder, **row.options, **common)


def step(world: World, row: Row, folder: Path) -> list[Outcome]:
    """With one microbatch a share, and with four."""
    return [step_in(world, row, folder, num_microbatches) for num_microbatches in (1, 4)]


def step_in(world: World, row: Row, folder: Path, num_microbatches: int) -> Outcome:
    torch.manual_seed(world.rank)
    engine, batch = make_engine(row, folder), make_batch(row.replay)
    share, advantages = engine.share, advantages_of(batch)
    mine = list(range(len(LENGTHS)))[share.index :: share.count]
    parts = [pack(batch, mine[number::num_microbatches]) for number in range(num_microbatches)]
    losses, logprobs = torch.zeros(1), torch.zeros(len(batch.tokens))
    for part, found in zip(parts, engine.infer(parts), strict=True):
        logprobs[part.index] = found * share.speaks

    def loss_fn(logprobs: Tensor, entropy: Tensor, packed: Packed) -> Tensor:
        loss = loss_of(logprobs, packed.behavior_logprobs, packed.positions, advantages[packed.index])
        losses.add_(loss.detach() * share.speaks)
        return loss

    norm = engine.update(parts, loss_fn, LR)
    weights = collect(engine.weights())
    return Outcome(float(world.add(losses)), norm, world.add(logprobs), weights, routing=engine.routing)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def references(folder: Path) -> Callable[[str, float, bool], Outcome]:
    return cache(lambda model, balance, replay: reference(made(model, folder), balance, replay))


@pytest.mark.parametrize("name", ROWS)
def test_a_step_gives_the_same_loss_gradient_norm_and_weights(
    name: str, folder: Path, references: Callable[[str, float, bool], Outcome], tmp_path: Path
) -> None:
    """Log-probabilities within 2e-6, loss and gradient norm within 1e-5 of their size; weights within 2 % of a step of AdamW.

    Where a gradient is below a thousandth of its tensor's largest, AdamW makes a whole step of what is rounding: there, weights are
    within two steps.
    """
    row = ROWS[name]
    expected = references(row.model, row.balance, row.replay)
    assert expected.grad_norm > 2 * MAX_GRAD_NORM, "gradients must be clipped"
    ranks = on_ranks(row.ranks, step, tmp_path / "ranks", row, made(row.model, folder))
    for first, found in zip(ranks[0], [outcome for rank in ranks for outcome in rank], strict=False):
        assert first.grad_norm == found.grad_norm, "every rank knows the gradient norm"
    for found in ranks[0]:
        assert found.routing == pytest.approx(expected.routing, rel=1e-5)
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        torch.testing.assert_close(found.logprobs, expected.logprobs, atol=2e-6, rtol=0)
        assert found.weights.keys() == expected.weights.keys()
        for key, weights in found.weights.items():
            apart = (weights - expected.weights[key]).abs()
            assert apart.max() <= 2 * LR * 1.01, key
            gradient = gradient_of(key, expected.gradients)
            large = gradient.abs() > 1e-3 * gradient.abs().max()
            assert large.float().mean() > 0.5, "the comparison must be of most elements"
            assert apart[large].max() <= 0.02 * LR, key


def gradient_of(name: str, gradients: dict[str, Tensor]) -> Tensor:
    """By the name in a file, which has experts one by one where the model has them fused: [E, 2 I, H] and [E, H, I]."""
    if name in gradients:
        return gradients[name]
    before, _, after = name.partition(".experts.")
    number, matrix, _ = after.split(".")
    if matrix == "down_proj":
        return gradients[f"{before}.experts.down_proj"][int(number)]
    gate, up = gradients[f"{before}.experts.gate_up_proj"][int(number)].chunk(2)
    return gate if matrix == "gate_proj" else up
