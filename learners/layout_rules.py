"""The rules that the sizes of a model must keep to be divided over ranks and GPUs, asked before anything is
loaded. The engines ask them again with the model in hand (`learners/megatron/model.py`, transformers, vLLM).

This file does not need torch.
"""

from typing import Any

from configs.generators import EngineKind
from configs.learner import LearnerKind
from configs.schema import Config

MEGATRON_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Families that `learners.megatron` builds."""
MEGATRON_ROPES = ("default", "linear", "llama3")
"""Kinds of rotary embeddings that it computes."""


def find_layout_problems(config: Config, hf: dict[str, Any]) -> list[str]:
    """Returns a sentence for each rule that a model with this Hugging Face configuration breaks."""
    is_megatron = config.learner.engine is LearnerKind.megatron
    return [
        *(_find_megatron_problems(config, hf) if is_megatron else _find_fsdp_problems(config, hf)),
        *(_find_engine_problems(config, hf) if config.engine_names else []),
    ]


def _find_fsdp_problems(config: Config, hf: dict[str, Any]) -> list[str]:
    ranks, heads = config.learner.fsdp.sequence_parallel, hf["num_attention_heads"]
    if heads % ranks == 0:
        return []
    return [f"learner.fsdp.sequence_parallel must divide the attention heads ({heads}), got {ranks}"]


def _find_megatron_problems(config: Config, hf: dict[str, Any]) -> list[str]:
    if hf["model_type"] not in MEGATRON_FAMILIES:
        return [
            f"model_type of model.path must be one of {', '.join(MEGATRON_FAMILIES)} (Megatron), "
            f"got {hf['model_type']}"
        ]
    layout, experts = config.learner.megatron, hf.get("num_experts") or 0
    heads = hf["num_attention_heads"]
    rules = [
        ("tensor_parallel", layout.tensor_parallel, "the number of attention heads", heads),
        (
            "tensor_parallel",
            layout.tensor_parallel,
            "the number of key-value heads",
            hf.get("num_key_value_heads") or heads,
        ),
        ("tensor_parallel", layout.tensor_parallel, "the size of the vocabulary", hf["vocab_size"]),
        ("tensor_parallel", layout.tensor_parallel, "the intermediate size", hf["intermediate_size"]),
        ("pipeline_parallel", layout.pipeline_parallel, "the number of layers", hf["num_hidden_layers"]),
        (
            "context_parallel",
            layout.context_parallel,
            "the attention heads of a tensor-parallel rank",
            heads // layout.tensor_parallel,
        ),
    ]
    if experts:
        rules += [
            ("expert_parallel", layout.expert_parallel, "the number of experts", experts),
            (
                "tensor_parallel",
                layout.tensor_parallel,
                "the intermediate size of an expert",
                hf["moe_intermediate_size"],
            ),
        ]
    found = [
        f"learner.megatron.{key} must divide {what}, got {value} for {number}"
        for key, value, what, number in rules
        if number % value
    ]
    if not experts and layout.expert_parallel != 1:
        found.append(
            "learner.megatron.expert_parallel must be 1 for a model without experts, "
            f"got {layout.expert_parallel}"
        )
    return found + _find_megatron_lacks(hf)


def _find_megatron_lacks(hf: dict[str, Any]) -> list[str]:
    """Returns what Megatron's model does not compute, whatever its layout."""
    found = []
    if (activation := hf.get("hidden_act") or "silu") != "silu":
        found.append(f"hidden_act of model.path must be silu, got {activation}")
    # Files that transformers before 5 has written say `rope_scaling`, and `type`.
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in MEGATRON_ROPES:
        found.append(f"rope_type of model.path must be one of {MEGATRON_ROPES}, got {kind}")
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
