"""The plan of a rank's memory under Megatron, against what ranks on a CPU really hold."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_batches import draw_batch, negate_logprobs, save_model
from public_models import PUBLIC_MODELS
from ranks import on_ranks
from torch import Tensor
from transformers import AutoConfig

from configs.load import load_config
from configs.parallel import MegatronConfig
from configs.sizes import count_sizes, read_sizes
from learners.layout_rules import ParallelSizes, find_layout_problems
from learners.megatron.engine import MegatronEngine
from learners.megatron.memory import MegatronRank, count_rank_parts, count_stage_sizes, count_state_elements
from learners.megatron.model import find_problems
from learners.packing import Packed, pack_share
from learners.world import World
from slipstream.plan_search import apply_changes

LENGTHS = [64] * 8
TOKENS = 128
"""Two sequences a microbatch: four microbatches a rank where there is no data parallelism."""
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "data, tied": ("qwen2", 2, {}),
    "tensor and pipeline": ("llama", 4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "pipeline, tied, checkpointed": (
        "qwen2",
        2,
        {"pipeline_parallel": 2, "activation_checkpointing": True},
    ),
    "experts": ("qwen3_moe", 4, {"expert_parallel": 2}),
}


class KeptActivations:
    """Bytes that autograd keeps at the same time, each storage counted once, without those of parameters."""

    def __init__(self, parameters: set[int]) -> None:
        self._parameters, self._users = parameters, dict[int, int]()
        self.bytes = self.peak = 0

    def note_tensor(self, tensor: Tensor) -> "KeptTensor":
        return KeptTensor(tensor, self)

    def change_users(self, tensor: Tensor, change: int) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._parameters or not tensor.is_floating_point():
            return
        users = self._users.get(address, 0) + change
        self._users[address] = users
        if (change > 0 and users == 1) or users == 0:
            self.bytes += change * storage.nbytes()
        self.peak = max(self.peak, self.bytes)


class KeptTensor:
    def __init__(self, tensor: Tensor, kept: KeptActivations) -> None:
        self.tensor, self._kept = tensor, kept
        kept.change_users(tensor, 1)

    def __del__(self) -> None:
        self._kept.change_users(self.tensor, -1)


def measure_rank(world: World, model: Path, options: dict[str, Any]) -> dict[str, float]:
    """Returns the bytes that this rank holds, by part of the plan."""
    engine = MegatronEngine(model, **options)
    share = engine.share
    parts = pack_share(draw_batch(LENGTHS, 48), range(len(LENGTHS)), TOKENS, share.count, share.index)
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in engine._model.parameters()}
    kept = KeptActivations(set(storages))

    def loss(logprobs: Tensor, entropy: Tensor, packed: Packed) -> Tensor:
        return negate_logprobs(logprobs, entropy, packed)

    with torch.autograd.graph.saved_tensors_hooks(kept.note_tensor, lambda one: one.tensor):
        engine.update(parts, loss, 1e-3)
    buffers = engine._ddp.buffers + engine._ddp.expert_parallel_buffers
    states = [held.state[key] for held in engine._slices for key in ("exp_avg", "exp_avg_sq")]
    return {
        "weights": float(sum(storage.nbytes() for storage in storages.values())),
        "gradients": float(sum(buffer.grad_data.nbytes for buffer in buffers)),
        "optimizer": float(sum(state.nbytes for state in states)),
        "activations": float(kept.peak),
    }


def plan_rank(model: Path, ranks: int, options: dict[str, Any]) -> dict[str, float]:
    layout = {key: value for key, value in options.items() if key != "activation_checkpointing"}
    rank = MegatronRank(
        ranks=ranks,
        num_trained=1,
        num_frozen=0,
        tokens=TOKENS,
        element_bytes=4,
        chunk_elements=1 << 27,
        checkpoints_activations=options.get("activation_checkpointing", False),
    )
    return count_rank_parts(read_sizes(model), MegatronConfig(**layout), rank)


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_hold_what_the_plan_says(name: str, tmp_path: Path) -> None:
    """Megatron pads its buffers, so they are a little larger than what they hold."""
    kind, ranks, options = LAYOUTS[name]
    model = save_model(kind, tmp_path)
    measured = on_ranks(ranks, measure_rank, tmp_path / "ranks", model, options)
    most = {part: max(one[part] for one in measured) for part in measured[0]}
    planned = plan_rank(model, ranks, options)
    for part in ("weights", "gradients", "optimizer"):
        assert planned[part] <= most[part] * 1.001 and most[part] <= 1.1 * planned[part] + 4096, part
    assert (
        0.6 * planned["activations"] <= most["activations"] <= 1.3 * planned["activations"] + planned["head"]
    )


@pytest.mark.parametrize("name", [name for name in PUBLIC_MODELS if name != "DeepSeek-V3"])
def test_the_parts_of_all_ranks_are_the_model(name: str) -> None:
    """But for what each rank of tensor parallelism has whole."""
    sizes = count_sizes(PUBLIC_MODELS[name])
    whole = sum(layer.whole for layer in sizes.layers) + sizes.hidden
    for tensor, pipeline, expert in ((1, 1, 1), (2, 1, 1), (4, 2, 1), (1, 2, 8), (2, 2, 8)):
        layout = MegatronConfig(
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            expert_parallel=expert if sizes.num_experts else 1,
        )
        stages = [count_stage_sizes(sizes, layout, stage) for stage in range(pipeline)]
        dense = tensor * sum(stage.dense for stage in stages)
        pieces = layout.expert_parallel if layout.expert_parallel > 1 else tensor
        experts = pieces * sum(stage.experts for stage in stages)
        copied = sizes.matrix_parameters if sizes.is_tied and pipeline > 1 else 0
        assert dense + experts == sizes.parameters + (tensor - 1) * whole + copied


def test_optimizer_state_is_divided_over_all_ranks_that_hold_the_same() -> None:
    sizes = count_sizes(PUBLIC_MODELS["Qwen3-235B-A22B"])
    one = count_state_elements(sizes, MegatronConfig(), 1)
    assert one == sizes.parameters
    assert count_state_elements(sizes, MegatronConfig(), 64) == one / 64
    dealt = count_state_elements(sizes, MegatronConfig(expert_parallel=8), 64)
    assert dealt == pytest.approx(one / 64), "8 ranks hold each expert, and 64 the rest"


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-8B", "Qwen3-235B-A22B"])
def test_layouts_are_refused_as_megatron_refuses_them(name: str) -> None:
    hf, given = dict(PUBLIC_MODELS[name]), load_config(["learner.engine=megatron"])
    loaded = AutoConfig.for_model(hf.pop("model_type"), **hf)
    for tensor in (1, 2, 3, 4, 8):
        for pipeline in (1, 2, 4, 7, 47):
            for expert in (1, 2, 3, 8):
                ranks = tensor * pipeline * expert
                config = apply_changes(
                    given,
                    {
                        "learner.ranks": ranks,
                        "learner.megatron": MegatronConfig(
                            tensor_parallel=tensor, pipeline_parallel=pipeline, expert_parallel=expert
                        ),
                    },
                )
                theirs = find_problems(loaded, ParallelSizes(tensor, pipeline, expert), ranks)
                ours = find_layout_problems(config, PUBLIC_MODELS[name])
                assert sorted(ours) == sorted(theirs)
                assert find_layout_problems(config, loaded.to_dict()) == ours, "as transformers writes it"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Qwen3-8B", dict(rope_scaling=dict(rope_type="yarn", factor=4.0))),
        ("Qwen3-8B", dict(rope_scaling=dict(type="dynamic", factor=2.0))),
        ("Qwen3-8B", dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e6))),
        ("Qwen3-8B", dict(use_sliding_window=True, sliding_window=4096, max_window_layers=28)),
        ("Qwen3-8B", dict(use_sliding_window=True, sliding_window=4096, max_window_layers=36)),
        ("Qwen3-235B-A22B", dict(use_sliding_window=True, sliding_window=4096)),
        ("Llama-3.1-70B", dict(hidden_act="gelu")),
        ("Llama-3.1-70B", dict(rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0,
                                                 high_freq_factor=4.0,
                                                 original_max_position_embeddings=8192))),
    ],
)  # fmt: skip
def test_models_that_megatron_does_not_compute_are_refused_as_megatron_refuses_them(
    name: str, changes: dict[str, Any]
) -> None:
    hf = PUBLIC_MODELS[name] | changes
    rest = {key: value for key, value in hf.items() if key != "model_type"}
    loaded = AutoConfig.for_model(hf["model_type"], **copy.deepcopy(rest))
    theirs = find_problems(loaded, ParallelSizes(), 1)
    assert sorted(find_layout_problems(load_config(["learner.engine=megatron"]), hf)) == sorted(theirs)
