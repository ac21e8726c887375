"""The sizes of a model, counted from its Hugging Face configuration."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model. Every number but `num_layers` counts elements."""

    parameters: int
    """All parameters."""
    layer_parameters: int
    """Parameters of one layer."""
    embedding_parameters: int
    """Parameters that stand in no layer: embedding, head, and the norm before the head."""
    num_layers: int
    hidden: int
    """Width of the residual stream."""
    vocabulary: int
    layer_activations: int
    """Activations of one token in one layer."""
    lora_parameters_per_rank: int
    """Parameters of adapters of rank 1 on all linear layers."""
    caps_logits: bool
    """True when the model caps its logits."""


def count_sizes(hf: dict[str, Any]) -> Sizes:
    """Counts from a Hugging Face configuration of the Llama kind. Raises KeyError for others."""
    hidden, layers, heads = hf["hidden_size"], hf["num_hidden_layers"], hf["num_attention_heads"]
    dim = hf.get("head_dim") or hidden // heads
    query, key = heads * dim, (hf.get("num_key_value_heads") or heads) * dim
    experts = hf.get("num_experts") or hf.get("num_local_experts") or 0
    width = hf["moe_intermediate_size"] if experts else hf["intermediate_size"]
    mlps, used = (experts, hf["num_experts_per_tok"]) if experts else (1, 1)
    layer = 2 * hidden * (query + key) + 3 * hidden * width * mlps + hidden * experts + 2 * hidden
    embeddings = hf["vocab_size"] * hidden * (1 if hf.get("tie_word_embeddings") else 2)
    adapted = 0 if experts else 3 * (hidden + width)
    return Sizes(
        parameters=layers * layer + embeddings + hidden,
        layer_parameters=layer,
        embedding_parameters=embeddings + hidden,
        num_layers=layers,
        hidden=hidden,
        vocabulary=hf["vocab_size"],
        layer_activations=6 * hidden + 6 * query + 5 * key + 5 * width * used,
        lora_parameters_per_rank=layers * (2 * (hidden + query) + 2 * (hidden + key) + adapted),
        caps_logits=bool(hf.get("final_logit_softcapping")),
    )
