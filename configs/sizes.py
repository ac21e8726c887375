"""The sizes of a model, counted from its Hugging Face configuration."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model, in elements."""

    parameters: int
    layer: int
    embeddings: int
    """Embedding and head, and the norm before it: what no layer holds"""
    layers: int
    hidden: int
    vocabulary: int
    activations: int
    """Of one token in one layer"""
    lora_per_rank: int
    """Parameters of adapters of rank 1 on all linear layers"""
    caps: bool
    """Whether logits are capped"""


def sizes_of(hf: dict[str, Any]) -> Sizes:
    """From a Hugging Face configuration of the Llama kind. Raises KeyError for others."""
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
        layer=layer,
        embeddings=embeddings + hidden,
        layers=layers,
        hidden=hidden,
        vocabulary=hf["vocab_size"],
        activations=6 * hidden + 6 * query + 5 * key + 5 * width * used,
        lora_per_rank=layers * (2 * (hidden + query) + 2 * (hidden + key) + adapted),
        caps=bool(hf.get("final_logit_softcapping")),
    )
