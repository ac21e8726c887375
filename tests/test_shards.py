"""The tensors that ranks of an FSDP engine hold of each other's: copies that stay on the host, and gradients
between microbatches."""

from pathlib import Path

import pytest
import torch
from engine_batches import (
    LR,
    EngineRow,
    draw_advantages,
    make_batch,
    make_engine,
    save_model,
    sum_policy_gradient,
)
from ranks import gather_weights, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from configs.parallel import Accumulate, LoraConfig
from learners import fsdp, lora
from learners.packing import Packed, pack_rows
from learners.state_files import copy_own_rows
from learners.world import World

# ---- a mesh of GPUs, where there is none: whatever is moved to it fails


def offloaded(local: Tensor) -> DTensor:
    """A parameter of an engine on a GPU whose shards are in the host's memory."""
    mesh = DeviceMesh("cuda", torch.arange(1), _init_backend=False, _rank=0)
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    return DTensor(local, DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False)


def test_the_copy_of_a_checkpoint_stays_on_the_host() -> None:
    local = torch.arange(6.0).view(3, 2)
    rows, first = copy_own_rows({"w": offloaded(local)}, 0)["w"]
    assert first == 0 and rows.device.type == "cpu" and torch.equal(rows, local)
    assert rows.data_ptr() != local.data_ptr(), "training goes on while it is written"


def test_adapters_are_merged_where_the_shards_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 6, bias=False))
    model.get_output_embeddings = lambda: None  # type: ignore[assignment]
    lora.inject_adapters(model, LoraConfig(rank=2))
    (layer,) = [layer for _, layer in lora._find_adapted_layers(model)]
    nn.init.normal_(layer.lora_B[lora.ADAPTER].weight)
    plain = {name: merge() for name, merge in lora.make_merges(model).items()}
    monkeypatch.setattr(
        DTensor, "full_tensor", lambda tensor: tensor.to_local()
    )  # one rank: nothing to gather
    for part in (layer.base_layer, layer.lora_A[lora.ADAPTER], layer.lora_B[lora.ADAPTER]):
        part.weight = nn.Parameter(offloaded(part.weight.detach()))
    (found,) = [merge() for merge in lora.make_merges(model).values()]
    assert isinstance(found, DTensor) and found.to_local().device.type == "cpu"
    assert torch.equal(found.to_local(), *plain.values())


# ---- gradients of several microbatches


def accumulated(world: World, folder: Path) -> dict[tuple[Accumulate, int], tuple[int, dict[str, Tensor]]]:
    """By choice and number of microbatches: elements of whole gradients that a rank holds when the last
    microbatch begins, and what the step makes of the weights."""
    return {
        (choice, number): _step(world, folder, choice, number) for choice in Accumulate for number in (1, 3)
    }


def _step(world: World, folder: Path, choice: Accumulate, number: int) -> tuple[int, dict[str, Tensor]]:
    engine, batch, held = (
        make_engine(EngineRow("fsdp", 2, options={"accumulate": choice}), folder),
        make_batch(),
        [0],
    )
    advantages, mine = draw_advantages(batch), list(range(len(batch.offsets) - 1))[engine.share.index :: 2]

    def loss_fn(logprobs: Tensor, entropy: Tensor, packed: Packed) -> Tensor:
        held[0] = _whole_gradients(engine._model)  # type: ignore[attr-defined]
        return sum_policy_gradient(
            logprobs, packed.behavior_logprobs, packed.positions, advantages[packed.index]
        )

    engine.update([pack_rows(batch, mine[first::number]) for first in range(number)], loss_fn, LR)
    return held[0], gather_weights(engine.stream_weights())


def _whole_gradients(model: nn.Module) -> int:
    groups = [
        module._get_fsdp_state()._fsdp_param_groups
        for module in model.modules()
        if isinstance(module, FSDPModule)
    ]
    held = [
        parameter
        for group in sum(groups, [])
        for parameter in group.fsdp_params
        if hasattr(parameter, "_unsharded_param")
    ]
    found = [gradient for p in held for gradient in (p.unsharded_accumulated_grad, p._unsharded_param.grad)]
    return sum(gradient.numel() for gradient in found if gradient is not None)


def test_gradients_are_sharded_after_each_microbatch_unless_they_are_to_stay_whole(tmp_path: Path) -> None:
    folder = save_model("qwen3", tmp_path)
    results = on_ranks(2, accumulated, tmp_path / "ranks", folder)
    weights = results[0]
    parameters = sum(tensor.numel() for tensor in weights[Accumulate.reduce, 1][1].values())
    for rank in results:
        held = {key: held for key, (held, _) in rank.items()}
        assert held == {
            (Accumulate.reduce, 1): 0,
            (Accumulate.reduce, 3): 0,
            (Accumulate.whole, 1): 0,
            (Accumulate.whole, 3): parameters,
        }
    for name, expected in weights[Accumulate.reduce, 1][1].items():
        assert torch.equal(weights[Accumulate.whole, 1][1][name], expected), (
            f"with one microbatch bit for bit: {name}"
        )


# ---- experts that ranks divide


def list_published(world: World, folder: Path) -> list[str]:
    return list(gather_weights(fsdp.FsdpEngine(folder).stream_weights()))


def test_tensors_of_a_mixture_are_published_in_the_order_of_one_rank(tmp_path: Path) -> None:
    # A version's digest covers it, and a checkpoint that is evaluated has the digest of its version.
    folder = save_model("qwen3_moe", tmp_path)
    (expected,) = on_ranks(1, list_published, tmp_path / "one", folder)
    assert on_ranks(2, list_published, tmp_path / "two", folder)[0] == expected
