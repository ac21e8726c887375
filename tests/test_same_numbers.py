"""The same numbers from every engine: one step from the same weights and batch, however model and batch are
divided.

The reference is Hugging Face's eager attention in float32, one sequence at a time, and torch's own AdamW and
clipping.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_batches import (
    BALANCE,
    BETAS,
    LR,
    MAX_GRAD_NORM,
    TEMPERATURE,
    WEIGHT_DECAY,
    EngineRow,
    draw_advantages,
    draw_experts,
    make_batch,
    make_engine,
    pair_sequences,
    save_model,
    sum_policy_gradient,
)
from ranks import gather_weights, on_ranks
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
)

from configs.parallel import Accumulate
from learners.packing import Packed, pack_rows
from learners.world import World
from slipstream_bench.network_hosts import NetworkHosts, find_obstacle

ENGINE_ROWS = {
    "fsdp": EngineRow("fsdp", 1),
    "fsdp, llama": EngineRow("fsdp", 1, "llama"),
    "fsdp, qwen2 (tied)": EngineRow("fsdp", 1, "qwen2"),
    "fsdp, qwen3_moe": EngineRow("fsdp", 1, "qwen3_moe"),
    "fsdp 2": EngineRow("fsdp", 2),
    "fsdp 2, qwen2 (tied)": EngineRow("fsdp", 2, "qwen2"),
    "fsdp 2, qwen3_moe": EngineRow("fsdp", 2, "qwen3_moe"),
    "fsdp 2, offload": EngineRow("fsdp", 2, options={"cpu_offload": True}),
    "fsdp 2, whole gradients": EngineRow("fsdp", 2, options={"accumulate": Accumulate.whole}),
    "fsdp 4": EngineRow("fsdp", 4),
    "fsdp 2 x 2 replicas": EngineRow("fsdp", 4, options={"replicas": 2}),
    "ulysses 2": EngineRow("fsdp", 2, options={"sequence_parallel": 2}),
    "ulysses 2, llama": EngineRow("fsdp", 2, "llama", {"sequence_parallel": 2}),
    "ulysses 4 of 2 key heads, 2 replicas": EngineRow(
        "fsdp", 4, "qwen2", {"sequence_parallel": 4, "replicas": 2}
    ),
    "fsdp 2 x ulysses 2": EngineRow("fsdp", 4, "qwen3", {"sequence_parallel": 2}),
    "megatron": EngineRow("megatron", 1),
    "megatron TP2": EngineRow("megatron", 2, "qwen3", {"tensor_parallel": 2}),
    "megatron TP2, qwen2 (tied)": EngineRow("megatron", 2, "qwen2", {"tensor_parallel": 2}),
    "megatron PP2": EngineRow("megatron", 2, "llama", {"pipeline_parallel": 2}),
    "megatron PP2, qwen2 (tied)": EngineRow("megatron", 2, "qwen2", {"pipeline_parallel": 2}),
    "megatron DP2": EngineRow("megatron", 2),
    "megatron TP2 x PP2": EngineRow("megatron", 4, "qwen3", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "megatron EP2": EngineRow("megatron", 2, "qwen3_moe", {"expert_parallel": 2}),
    "megatron TP2 x EP2": EngineRow("megatron", 4, "qwen3_moe", {"tensor_parallel": 2, "expert_parallel": 2}),
    "megatron CP2": EngineRow("megatron", 2, "qwen3", {"context_parallel": 2}),
    "megatron CP2, qwen2 (tied), branches": EngineRow(
        "megatron", 2, "qwen2", {"context_parallel": 2}, branched=True
    ),
    "megatron CP2 x TP2": EngineRow("megatron", 4, "qwen3", {"context_parallel": 2, "tensor_parallel": 2}),
    "megatron CP2 x PP2, qwen2 (tied)": EngineRow(
        "megatron", 4, "qwen2", {"context_parallel": 2, "pipeline_parallel": 2}
    ),
    "megatron CP2 x DP2": EngineRow("megatron", 4, "llama", {"context_parallel": 2}),
    "megatron CP2 = EP2, balanced, replayed": EngineRow(
        "megatron", 2, "qwen3_moe", {"context_parallel": 2, "expert_parallel": 2}, BALANCE, True
    ),
    "megatron CP4 of 2 key heads": EngineRow("megatron", 4, "qwen3", {"context_parallel": 4}),
    "fsdp 2, two hosts": EngineRow("fsdp", 2, num_hosts=2),
    "megatron TP2, two hosts": EngineRow("megatron", 2, "qwen3", {"tensor_parallel": 2}, num_hosts=2),
    "megatron PP2, two hosts": EngineRow("megatron", 2, "llama", {"pipeline_parallel": 2}, num_hosts=2),
    "megatron CP2, two hosts": EngineRow("megatron", 2, "qwen3", {"context_parallel": 2}, num_hosts=2),
    "fsdp 2, branches": EngineRow("fsdp", 2, branched=True),
    "ulysses 2, branches": EngineRow("fsdp", 2, "qwen3", {"sequence_parallel": 2}, branched=True),
    "megatron TP2, branches": EngineRow("megatron", 2, "qwen3", {"tensor_parallel": 2}, branched=True),
    "megatron PP2, branches, replayed": EngineRow(
        "megatron", 2, "qwen3_moe", {"pipeline_parallel": 2}, replay=True, branched=True
    ),
    "fsdp 2, balanced": EngineRow("fsdp", 2, "qwen3_moe", balance=BALANCE),
    "ulysses 2, balanced": EngineRow("fsdp", 2, "qwen3_moe", {"sequence_parallel": 2}, BALANCE),
    "ulysses 2, balanced, replayed": EngineRow(
        "fsdp", 2, "qwen3_moe", {"sequence_parallel": 2}, BALANCE, True
    ),
    "megatron PP2, replayed": EngineRow("megatron", 2, "qwen3_moe", {"pipeline_parallel": 2}, replay=True),
    "megatron TP2 x EP2, balanced, replayed": EngineRow(
        "megatron", 4, "qwen3_moe", {"tensor_parallel": 2, "expert_parallel": 2}, BALANCE, True
    ),
    "megatron PP2, balanced": EngineRow("megatron", 2, "qwen3_moe", {"pipeline_parallel": 2}, BALANCE),
    "megatron TP2 x EP2, balanced": EngineRow(
        "megatron", 4, "qwen3_moe", {"tensor_parallel": 2, "expert_parallel": 2}, BALANCE
    ),
}


@dataclass
class EngineOutcome:
    loss: float
    grad_norm: float
    logprobs: Tensor
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    routing: dict[str, float] = field(default_factory=dict)


def replay_experts(model: Any, recorded: Tensor | None) -> Callable[[int, int], None]:
    """Replaces the choice of each of a Hugging Face model's routers; returns what says which tokens come
    next."""
    span = [0, 0]

    def replace_choice(layer: int, outputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, chosen = outputs[0], outputs[1].clone(), outputs[2].clone()
        for token in range(len(logits)):
            experts = recorded[span[0] + token].view(2, 2)[layer].long()
            if experts[0] >= 0:
                chosen[token] = experts
                weights[token] = logits[token][experts].softmax(0)
        return logits, weights, chosen

    for number, layer in enumerate(model.model.layers if recorded is not None else ()):
        layer.mlp.gate.register_forward_hook(
            lambda module, inputs, outputs, number=number: replace_choice(number, outputs)
        )
    return lambda start, end: span.__setitem__(slice(None), [start, end])


def measure_balance(router_logits: list[Tensor], recorded: Tensor | None) -> tuple[Tensor, dict[str, float]]:
    """E Σ_i f_i P_i summed over the layers, from the logits [T, E] of each, and the figures of
    `Engine.routing_metrics`."""
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


def train_reference(folder: Path, balance: float, replay: bool) -> EngineOutcome:
    model, batch = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"), make_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)
    advantages, logprobs, total = draw_advantages(batch), torch.zeros(len(batch.tokens)), 0.0
    mixture, routers = model.config.model_type == "qwen3_moe", []
    recorded = draw_experts() if replay else None
    before_pass = replay_experts(model, recorded)
    for start, end in zip(batch.offsets, batch.offsets[1:], strict=False):
        tokens = batch.tokens[start:end]
        before_pass(start, end)
        out = model(tokens[None], use_cache=False, **({"output_router_logits": True} if mixture else {}))
        routers.append(out.router_logits if mixture else ())
        scores = (out.logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        found = torch.cat([torch.zeros(1), scores.gather(-1, tokens[1:, None])[:, 0]])
        loss = sum_policy_gradient(
            found, batch.behavior_logprobs[start:end], torch.arange(int(end - start)), advantages[start:end]
        )
        loss.backward(retain_graph=True)
        logprobs[start:end] = found.detach()
        total += float(loss.detach())
    routing = {}
    if mixture:
        loss, routing = measure_balance([torch.cat(layer) for layer in zip(*routers, strict=True)], recorded)
        (balance * loss).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM))
    optimizer.step()
    model.save_pretrained(folder / f"stepped-{balance}-{replay}")  # by the names that files have
    return EngineOutcome(
        total, norm, logprobs, load_published(folder / f"stepped-{balance}-{replay}"), gradients, routing
    )


def load_published(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def train_steps(world: World, row: EngineRow, folder: Path) -> list[EngineOutcome]:
    """With one microbatch a share, and with four."""
    return [train_step(world, row, folder, num_microbatches) for num_microbatches in (1, 4)]


def train_step(world: World, row: EngineRow, folder: Path, num_microbatches: int) -> EngineOutcome:
    torch.manual_seed(world.rank)
    engine, batch = make_engine(row, folder), make_batch(row.replay)
    share, advantages = engine.share, draw_advantages(batch)
    batch = pair_sequences(batch) if row.branched else batch
    mine = list(range(batch.num_sequences))[share.index :: share.count]
    parts = [pack_rows(batch, mine[number::num_microbatches]) for number in range(num_microbatches)]
    losses, logprobs = torch.zeros(1), torch.zeros(len(batch.tokens))
    for part, found in zip(parts, engine.infer(parts), strict=True):
        logprobs[part.index] = found * share.holds_results

    def loss_fn(logprobs: Tensor, entropy: Tensor, packed: Packed) -> Tensor:
        loss = sum_policy_gradient(
            logprobs, packed.behavior_logprobs, packed.positions, advantages[packed.index]
        )
        losses.add_(loss.detach() * share.holds_results)
        return loss

    norm = engine.update(parts, loss_fn, LR)
    weights = gather_weights(engine.stream_weights())
    return EngineOutcome(
        float(world.add_tensor(losses)),
        norm,
        world.add_tensor(logprobs),
        weights,
        routing=engine.routing_metrics,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def references(folder: Path) -> Callable[[str, float, bool], EngineOutcome]:
    return cache(lambda model, balance, replay: train_reference(save_model(model, folder), balance, replay))


@pytest.fixture(scope="module")
def hosts() -> Iterator[NetworkHosts]:
    if obstacle := find_obstacle():
        pytest.skip(obstacle)
    with NetworkHosts(2) as hosts:
        yield hosts


@pytest.mark.parametrize("name", ENGINE_ROWS)
def test_a_step_gives_the_same_loss_gradient_norm_and_weights(
    name: str,
    folder: Path,
    references: Callable[[str, float, bool], EngineOutcome],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Log-probabilities within 2e-6, loss and gradient norm within 1e-5 of their size; weights within 2 % of
    a step of AdamW.

    Where a gradient is below a thousandth of its tensor's largest, AdamW makes a whole step of what is
    rounding: there, weights are within two steps.
    """
    row = ENGINE_ROWS[name]
    expected = references(row.model, row.balance, row.replay)
    assert expected.grad_norm > 2 * MAX_GRAD_NORM, "gradients must be clipped"
    model = save_model(row.model, folder)
    places = request.getfixturevalue("hosts") if row.num_hosts > 1 else ()
    ranks = on_ranks(row.ranks, train_steps, tmp_path / "ranks", row, model, hosts=places)
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
            gradient = find_gradient(key, expected.gradients)
            large = gradient.abs() > 1e-3 * gradient.abs().max()
            assert large.float().mean() > 0.5, "the comparison must be of most elements"
            assert apart[large].max() <= 0.02 * LR, key


def find_gradient(name: str, gradients: dict[str, Tensor]) -> Tensor:
    """By the name in a file, which has experts one by one where the model has them fused: [E, 2 I, H] and
    [E, H, I]."""
    if name in gradients:
        return gradients[name]
    before, _, after = name.partition(".experts.")
    number, matrix, _ = after.split(".")
    if matrix == "down_proj":
        return gradients[f"{before}.experts.down_proj"][int(number)]
    gate, up = gradients[f"{before}.experts.gate_up_proj"][int(number)].chunk(2)
    return gate if matrix == "gate_proj" else up
