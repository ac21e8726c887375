"""The plan of a learner's memory, against models that are really made."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_batches import MODELS, draw_batch, save_model
from ranks import on_ranks
from torch import Tensor
from training_steps import configure_step

from configs.schema import Config
from configs.sizes import count_sizes
from learners.fsdp import FsdpEngine
from learners.memory import MemoryMeter, explain_shortage, format_bytes, plan_memory
from learners.packing import pack_rows
from learners.world import World

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    where = tmp_path_factory.mktemp("models")
    return lambda name: save_model(name, where)


def sizes_of(folder: Path) -> Any:
    import json

    return count_sizes(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_counted(name: str, folder: Callable[[str], Path]) -> None:
    assert sizes_of(folder(name)).parameters == sum(p.numel() for p in MODELS[name]().parameters())


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_about_what_autograd_keeps(
    name: str, checkpointing: bool, folder: Callable[[str], Path]
) -> None:
    engine, sizes = FsdpEngine(folder(name), activation_checkpointing=checkpointing), sizes_of(folder(name))
    weights = {parameter.to_local().untyped_storage().data_ptr() for parameter in engine._named.values()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.dtype == torch.float32:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    packed = pack_rows(draw_batch([300, 200]), [0, 1])
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        found = engine._compute_outputs(packed)
    del found
    counted = (
        4
        * len(packed.tokens)
        * (sizes.hidden if checkpointing else sizes.layer_activations)
        * sizes.num_layers
    )
    gathered = 4 * sizes.parameters  # what is gathered of one rank's weights is kept too
    head = 3 * 4 * len(packed.tokens) * sizes.vocabulary
    assert 0.7 * counted <= sum(kept.values()) <= 1.3 * counted + gathered + head


def parts(config: Config, *, cuda: bool = False) -> dict[str, float]:
    found = plan_memory(config, cuda=cuda)
    assert found is not None
    return found.parts


def test_the_hosts_memory_holds_what_is_offloaded_copied_and_on_its_way(fixed_model: Path) -> None:
    size = sizes_of(fixed_model).parameters
    settings = ["algo=grpo", "model.dtype=bfloat16", "learner.ranks=2"]
    found = plan_memory(configure_step(fixed_model, *settings), cuda=True)
    assert found is not None
    # AdamW's state and the masters, as they are written: replicas divide them too.
    assert found.host_parts == {"offloaded": 0.0, "checkpoint": 12 * size / 2, "staging": 2 * size / 2}
    assert f"; in the host's memory: checkpoint {format_bytes(6 * size)} + staging" in str(found)
    replicas = plan_memory(configure_step(fixed_model, *settings, "learner.fsdp.replicas=2"), cuda=True)
    assert replicas is not None and replicas.host_parts == found.host_parts
    settings.append("learner.fsdp.cpu_offload=true")
    offloaded = plan_memory(configure_step(fixed_model, *settings), cuda=True)
    assert offloaded is not None and offloaded.host_parts["offloaded"] == 16 * size / 2
    assert offloaded.host_parts["offloaded"] == sum(
        found.parts[name] for name in ("weights", "gradients", "optimizer")
    )


def test_what_makes_the_plan_smaller_does(fixed_model: Path) -> None:
    def changed(config: Config, **learner: Any) -> Config:
        return replace(config, learner=replace(config.learner, **learner))

    config = configure_step(fixed_model, "algo=grpo")
    base = parts(config)
    four = parts(changed(config, ranks=4))
    assert all(four[name] == base[name] / 4 for name in ("weights", "gradients", "optimizer"))
    assert parts(changed(config, activation_checkpointing=True))["activations"] < base["activations"]
    assert parts(changed(config, tokens_per_microbatch=8192))["activations"] == base["activations"] / 2
    low_rank = parts(changed(config, lora=replace(config.learner.lora, rank=2)))
    assert low_rank["weights"] > base["weights"] > 5 * low_rank["gradients"]
    offloaded = changed(config, fsdp=replace(config.learner.fsdp, cpu_offload=True))
    assert parts(offloaded, cuda=True)["optimizer"] == 0 < parts(offloaded)["optimizer"]
    assert parts(configure_step(fixed_model, "algo=ppo"))["optimizer"] == 2 * base["optimizer"]
    assert (
        parts(configure_step(fixed_model, "algo=ppo", "placement.critic=own"))["optimizer"]
        == base["optimizer"]
    )
    assert (
        parts(configure_step(fixed_model, "algo=grpo", "algo.kl.loss_coef=0.1"))["weights"]
        == 2 * base["weights"]
    )


def test_the_plan_counts_what_stands_between_shards_and_whole_tensors(fixed_model: Path) -> None:
    """Elements of the fixed model: 320 × 64 for the embedding and the head each, and a norm; two layers."""
    ends, layer = 2 * 320 * 64 + 64, sizes_of(fixed_model).layer_parameters
    one = parts(configure_step(fixed_model, "algo=grpo"))
    two, whole = (
        parts(
            configure_step(fixed_model, "algo=grpo", "learner.ranks=2", f"learner.fsdp.accumulate={choice}")
        )
        for choice in ("reduce", "whole")
    )
    assert one["gathered"] == 4 * (ends + layer) and two["gathered"] == 4 * (
        ends + layer + max(ends, 2 * layer)
    )
    assert two["reduced"] == 8 * max(ends, layer), "gradients, and the buffer that sends them"
    assert whole["gradients"] == 2 * two["gradients"] == one["gradients"], "of two ranks"
    low_rank = parts(configure_step(fixed_model, "algo=grpo", "learner.lora.rank=2"))
    assert 20 * low_rank["reduced"] < one["reduced"] and low_rank["head"] == one["head"] - 4 * 320 * 64
    assert parts(configure_step(fixed_model, "algo=ppo"))["gradients"] == one["gradients"], (
        "one model after the other"
    )


def test_gradients_that_stay_whole_are_on_the_gpu_whatever_is_offloaded(fixed_model: Path) -> None:
    offloaded = ["algo=grpo", "model.dtype=bfloat16", "learner.fsdp.cpu_offload=true"]
    config = configure_step(fixed_model, *offloaded, "learner.fsdp.accumulate=whole")
    assert parts(config, cuda=True)["gradients"] == 4 * sizes_of(fixed_model).parameters
    assert parts(configure_step(fixed_model, *offloaded), cuda=True)["gradients"] == 0


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ((), 0),
        (("learner.gpu_memory_fraction=0.45",), 1),
        (("learner.gpu_memory_fraction=0.45", "learner.fsdp.cpu_offload=true"), 0),
        (("sync.transport=cuda_ipc",), 1),
        (("learner.gpu_memory_fraction=0.45", "sync.transport=shared_memory"), 0),
        (("learner.gpu_memory_fraction=0.9", "placement.mode=colocated"), 0),
        (("learner.gpu_memory_fraction=0.45", "generators.engine=transformers"), 0),
        (("learner.gpu_memory_fraction=0.45", "generators.tensor_parallel=2"), 0),
    ],
)
def test_a_version_that_engines_copy_from_the_gpu_is_in_the_plan(
    settings: tuple[str, ...], copies: int, fixed_model: Path
) -> None:
    config = configure_step(fixed_model, "algo=grpo", "model.dtype=bfloat16", *settings)
    assert parts(config, cuda=True)["published"] == copies * 2 * sizes_of(fixed_model).parameters
    assert parts(config)["published"] == 0


def test_a_capped_heads_copy_of_the_logits_is_in_the_plan(fixed_model: Path, tmp_path: Path) -> None:
    import json

    hf = json.loads((fixed_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(hf | {"final_logit_softcapping": 30.0}))
    plain, capped = (parts(configure_step(path, "algo=grpo"))["head"] for path in (fixed_model, tmp_path))
    gradient = 4 * 320 * 64
    assert capped - gradient == pytest.approx((plain - gradient) * 4 / 3)


def test_what_does_not_fit_into_the_gpu_is_named_with_the_plan(fixed_model: Path) -> None:
    config = configure_step(fixed_model, "algo=grpo")
    with (
        pytest.raises(
            ValueError,
            match="must fit into its GPU .*got: CUDA out of memory. .*Planned: memory of a learner rank",
        ),
        explain_shortage(config),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")
    with pytest.raises(RuntimeError, match="^another$"), explain_shortage(config):
        raise RuntimeError("another")


def test_a_model_of_another_kind_has_no_plan(fixed_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "d_model": 64}')
    assert plan_memory(configure_step(tmp_path, "algo=grpo"), cuda=False) is None


def measure_block(world: World) -> list[float]:
    meter = MemoryMeter(cuda=False)
    before = meter.measure_peak()
    block = torch.ones(64 << 18)
    held = meter.measure_peak()
    del block
    return [before, held, meter.measure_peak()]


def test_the_meter_counts_from_when_it_was_made(tmp_path: Path) -> None:
    """In a process of its own: one that has held more before shows no peak."""
    [(before, held, after)] = on_ranks(1, measure_block, tmp_path)
    assert held >= max(before, 60 << 20)
    assert after >= 60 << 20, "a peak stays"
