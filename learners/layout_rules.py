"""The rules that the sizes of a model must keep to be divided over ranks and GPUs, asked before anything is
loaded. Megatron's engine asks the same ones with the model in hand; transformers and vLLM have their own.

This file does not need torch.
"""

from dataclasses import dataclass
from typing import Any

from configs.generators import EngineKind
from configs.learner import LearnerKind
from configs.schema import Config

MEGATRON_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Families that `learners.megatron` builds."""
MEGATRON_ROPES = ("default", "linear", "llama3")
"""Kinds of rotary embeddings that it computes."""
BIASES = ("attention_bias", "mlp_bias")
"""Keys of a Hugging Face configuration that say whether matrices have biases, which it lacks."""


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Numbers of ranks that divide one model between them; see `configs.parallel.MegatronConfig`."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    context_parallel: int = 1

    @property
    def expert_tensor_parallel(self) -> int:
        """Number of ranks that divide one expert: none is divided where the experts are dealt out to ranks
        already."""
        return 1 if self.expert_parallel > 1 else self.tensor_parallel


def find_layout_problems(config: Config, hf: dict[str, Any]) -> list[str]:
    """Returns a sentence for each rule that a model with this Hugging Face configuration breaks."""
    given = config.learner.megatron
    sizes = ParallelSizes(
        given.tensor_parallel, given.pipeline_parallel, given.expert_parallel, given.context_parallel
    )
    is_megatron = config.learner.engine is LearnerKind.megatron
    return [
        *(find_megatron_problems(sizes, hf) if is_megatron else _find_fsdp_problems(config, hf)),
        *(_find_engine_problems(config, hf) if config.engine_names else []),
    ]


def _find_fsdp_problems(config: Config, hf: dict[str, Any]) -> list[str]:
    ranks, heads = config.learner.fsdp.sequence_parallel, hf["num_attention_heads"]
    if heads % ranks == 0:
        return []
    return [f"learner.fsdp.sequence_parallel must divide the attention heads ({heads}), got {ranks}"]


def find_megatron_problems(sizes: ParallelSizes, hf: dict[str, Any]) -> list[str]:
    """Returns why `learners.megatron` cannot divide this model so, or not build it at all.

    `hf`: what config.json holds, or transformers' configuration as a dict.
    """
    if hf["model_type"] not in MEGATRON_FAMILIES:
        return [
            f"model_type of model.path must be one of {', '.join(MEGATRON_FAMILIES)} (Megatron), "
            f"got {hf['model_type']}"
        ]
    tensor, heads = sizes.tensor_parallel, hf["num_attention_heads"]
    rules = [
        ("tensor_parallel", "the number of attention heads", heads),
        ("tensor_parallel", "the number of key-value heads", hf.get("num_key_value_heads") or heads),
        ("tensor_parallel", "the size of the vocabulary", hf["vocab_size"]),
        ("tensor_parallel", "the intermediate size", hf["intermediate_size"]),
        ("pipeline_parallel", "the number of layers", hf["num_hidden_layers"]),
    ]
    if heads % tensor == 0:
        rules.append(("context_parallel", "the attention heads of a tensor-parallel rank", heads // tensor))
    # transformers 5 writes the second name.
    if experts := hf.get("num_experts") or hf.get("num_local_experts"):
        rules += [
            ("expert_parallel", "the number of experts", experts),
            ("tensor_parallel", "the intermediate size of an expert", hf["moe_intermediate_size"]),
        ]
    found = [
        f"learner.megatron.{key} must divide {what}, got {getattr(sizes, key)} for {number}"
        for key, what, number in rules
        if number % getattr(sizes, key)
    ]
    if not experts and sizes.expert_parallel != 1:
        found.append(
            "learner.megatron.expert_parallel must be 1 for a model without experts, "
            f"got {sizes.expert_parallel}"
        )
    return found + _find_megatron_lacks(hf)


def _find_megatron_lacks(hf: dict[str, Any]) -> list[str]:
    """Returns what Megatron's model does not compute, whatever its layout."""
    found = []
    if (activation := hf.get("hidden_act") or "silu") != "silu":
        found.append(f"hidden_act of model.path must be silu, got {activation}")
    # Qwen2's biases of queries, keys and values have no key.
    found += [f"{key} of model.path must be false, got true" for key in BIASES if hf.get(key)]
    # Files that transformers before 5 has written say `rope_scaling`, and `type`.
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in MEGATRON_ROPES:
        found.append(f"rope_type of model.path must be one of {MEGATRON_ROPES}, got {kind}")
    if (part := rope.get("partial_rotary_factor", hf.get("partial_rotary_factor") or 1.0)) != 1.0:
        found.append(f"partial_rotary_factor of model.path must be 1, got {part}")
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    some = window is not None and hf.get("max_window_layers", 28) < hf["num_hidden_layers"]
    if hf["model_type"] == "qwen3_moe" and window is not None:  # of all its layers
        found.append(f"sliding_window of model.path must be none, got {window}")
    elif "sliding_attention" in (hf.get("layer_types") or ()) or (some and not hf.get("layer_types")):
        found.append("layer_types of model.path must be full_attention, got sliding_attention")
    return found


def _find_engine_problems(config: Config, hf: dict[str, Any]) -> list[str]:
    """Returns what keeps an engine's GPUs from sharing the model: heads and widths are divided, heads of keys
    and values may also be copied."""
    tensor = config.generators.tensor_parallel
    if tensor == 1 or config.generators.engine is not EngineKind.vllm:
        return []
    heads = hf["num_attention_heads"]
    rules = [("the number of attention heads", heads, heads % tensor)]
    if "kv_lora_rank" not in hf:
        key_heads = hf.get("num_key_value_heads") or heads
        rules.append(
            (
                "the number of key-value heads, or be a multiple of it",
                key_heads,
                min(key_heads % tensor, tensor % key_heads),
            )
        )
    for key in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if hf.get(key):
            rules.append((f"{key} of the model", hf[key], hf[key] % tensor))
    return [
        f"generators.tensor_parallel must divide {what}, got {tensor} for {number}"
        for what, number, remainder in rules
        if remainder
    ]
