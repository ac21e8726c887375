"""The sizes of a model, counted from its Hugging Face configuration.

A row of `FAMILIES` says in what a kind of model differs from Llama. `tests/test_sizes.py` compares each row
with the parameters of transformers' own model.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


class HeadNorms(StrEnum):
    """The norms of queries and keys in each layer."""

    none = "none"
    dimension = "dimension"
    """One weight for each dimension of a head."""
    width = "width"
    """One weight for each element of all heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyShape:
    """The ways in which models of one `model_type` differ from Llama without biases."""

    norms: int = 2
    """Norms of a layer, each as wide as the residual stream."""
    head_norms: HeadNorms = HeadNorms.none
    head_norms_key: str | None = None
    """Key that says whether there are norms of heads. None: there are."""
    bias_key: str | None = "attention_bias"
    """Key that says whether the attention's matrices have biases; None: the default says so."""
    has_bias: bool = False
    """The default of `bias_key`."""
    biases_output: bool = True
    """Biases stand after the attention's output too."""
    ties: bool = False
    """The default of `tie_word_embeddings`."""
    head_dim: int | None = None
    """The default of `head_dim`. None: the width over the number of heads."""
    is_mixture: bool = False
    may_bias_mlp: bool = False
    """`mlp_bias` says whether MLPs have biases."""
    fuses_mlp: bool = False
    """MLPs hold gate and up projection as one matrix."""
    fuses_attention: bool = False
    """Layers hold the projections of queries, keys and values as one matrix."""
    has_latent_attention: bool = False
    """Keys and values come from a short vector (DeepSeek-V2, 2024, arXiv 2405.04434)."""


FAMILIES = {
    "llama": FamilyShape(may_bias_mlp=True),
    "mistral": FamilyShape(bias_key=None),
    "mixtral": FamilyShape(bias_key=None, is_mixture=True),
    "qwen2": FamilyShape(bias_key=None, has_bias=True, biases_output=False),
    "qwen2_moe": FamilyShape(bias_key="qkv_bias", has_bias=True, biases_output=False, is_mixture=True),
    "qwen3": FamilyShape(head_norms=HeadNorms.dimension, head_dim=128),
    "qwen3_moe": FamilyShape(head_norms=HeadNorms.dimension, is_mixture=True),
    "gemma": FamilyShape(ties=True, head_dim=256),
    "gemma2": FamilyShape(norms=4, ties=True, head_dim=256),
    "gemma3_text": FamilyShape(norms=4, head_norms=HeadNorms.dimension, ties=True, head_dim=256),
    "granite": FamilyShape(may_bias_mlp=True),
    "cohere": FamilyShape(norms=1, head_norms=HeadNorms.width, head_norms_key="use_qk_norm", ties=True),
    "cohere2": FamilyShape(norms=1, ties=True, head_dim=128),
    "phi3": FamilyShape(bias_key=None, fuses_mlp=True, fuses_attention=True),
    "olmo2": FamilyShape(head_norms=HeadNorms.width),
    "olmo3": FamilyShape(head_norms=HeadNorms.width),
    "smollm3": FamilyShape(ties=True, may_bias_mlp=True),
    "glm4": FamilyShape(norms=4, has_bias=True, biases_output=False, head_dim=128, fuses_mlp=True),
    "exaone4": FamilyShape(head_norms=HeadNorms.dimension, bias_key=None),
    "deepseek_v3": FamilyShape(is_mixture=True, has_latent_attention=True),
}
"""By `model_type`."""


SIZE_KEYS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size",
    "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
    "decoder_sparse_step", "first_k_dense_replace", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim",
    "qk_nope_head_dim", "v_head_dim",
)  # fmt: skip
"""Keys of a Hugging Face configuration whose numbers count."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes of one layer, in elements."""

    divided: int
    """Parameters of the matrices that tensor parallelism divides between its ranks."""
    whole: int
    """Parameters that each of these ranks has whole: norms, a router, the projections to latent vectors."""
    experts: int
    """Parameters of all experts of a mixture but the shared ones."""
    num_experts: int
    key_value: int
    """The part of `divided` that makes keys and values; 0 with latent attention."""
    activations: int
    """Activations that one token leaves for the backward pass."""
    adapters: int
    """Parameters of adapters of rank 1 on all linear layers."""
    buffers: int
    """Elements that are published and not trained: a router's correction bias."""

    @property
    def parameters(self) -> int:
        return self.divided + self.whole + self.experts


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model. Numbers count elements, unless their names say otherwise."""

    model_type: str
    layers: tuple[LayerSizes, ...]
    hidden: int
    """Width of the residual stream."""
    vocabulary: int
    is_tied: bool
    """The head is the embedding."""
    num_heads: int
    num_key_value_heads: int
    """1 with latent attention: no rank of tensor parallelism holds less than all of a token."""
    head_kv: int
    """Elements of KV cache that one token takes in one layer, for each of `num_key_value_heads`."""
    caps_logits: bool
    """True when the model caps its logits."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def matrix_parameters(self) -> int:
        """Parameters of the embedding, which are as many as the head's."""
        return self.vocabulary * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters that stand in no layer: embedding, head, and the norm before the head."""
        return self.matrix_parameters * (1 if self.is_tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        return sum(layer.parameters for layer in self.layers) + self.embedding_parameters

    @property
    def published(self) -> int:
        """Elements of a published version: all parameters, and buffers that a model's file holds."""
        return self.parameters + sum(layer.buffers for layer in self.layers)

    @property
    def layer_parameters(self) -> int:
        """Parameters of the largest layer."""
        return max(layer.parameters for layer in self.layers)

    @property
    def layer_activations(self) -> int:
        """Activations of one token in the layer that keeps most."""
        return max(layer.activations for layer in self.layers)

    @property
    def activations(self) -> int:
        """Activations of one token in all layers."""
        return sum(layer.activations for layer in self.layers)

    @property
    def lora_parameters_per_rank(self) -> int:
        """Parameters of adapters of rank 1 on all linear layers."""
        return sum(layer.adapters for layer in self.layers)

    def count_repeated_kv(self, tensor: int, ranks: int) -> int:
        """Counts the elements of keys and values that one token has in a layer more than once, where `ranks`
        ranks share a sequence: each computes whole heads of a tensor-parallel rank's, so those of keys and
        values are repeated where there are too few."""
        heads, key_heads = self.num_heads // tensor, max(1, self.num_key_value_heads // tensor)
        if self.layers[0].key_value == 0:
            return 0
        return self.head_kv * (count_exchanged_heads(heads, key_heads, ranks) - key_heads)

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0 where the model is no mixture."""
        return max(layer.num_experts for layer in self.layers)


def count_exchanged_heads(num_heads: int, num_key_heads: int, ranks: int) -> int:
    """Returns how many key heads ranks exchange that share the tokens of a sequence and compute some heads of
    all tokens in attention.

    Each must get whole ones, so key heads are repeated where the ranks do not divide their number.
    """
    if num_key_heads % ranks == 0:
        return num_key_heads
    return ranks if ranks % num_key_heads == 0 else num_heads


def find_config_file(path: Path) -> Path:
    """Returns the configuration's file of a model that is named by its folder, or by this file."""
    return path / "config.json" if path.is_dir() else path


def read_sizes(path: Path) -> Sizes:
    """Counts the model of a folder, or of a file `config.json`. Raises OSError, and ValueError as
    `count_sizes` and for what is no JSON."""
    return count_sizes(read_model_config(path))


def read_model_config(path: Path) -> dict[str, Any]:
    """Reads a model's Hugging Face configuration. Raises OSError, and ValueError for what is no JSON
    object."""
    file = find_config_file(path)
    try:
        found = json.loads(file.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} must be JSON, got {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} must be a JSON object, got {type(found).__name__}")
    return found


Matrices = list[tuple[int, int]]
"""(inputs, outputs) of each."""


def count_sizes(hf: dict[str, Any]) -> Sizes:
    """Counts from a Hugging Face configuration. Raises ValueError for a kind of model that is not in
    `FAMILIES`, and for one that lacks a size."""
    kind = hf.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(
            f"model_type of a model must be one of {', '.join(FAMILIES)} for its sizes to be counted, "
            f"got {kind}"
        )
    for key in SIZE_KEYS:
        least = 1 if key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size") else 0
        value = hf.get(key)
        if value is not None and (not isinstance(value, int) or value < least):
            raise ValueError(f"{key} of a model must be a whole number of at least {least}, got {value!r}")
    try:
        return _count_family(hf, FAMILIES[kind])
    except KeyError as error:
        raise ValueError(f"the configuration of a model must have {error.args[0]}, got one without") from None


def _count_family(hf: dict[str, Any], family: FamilyShape) -> Sizes:
    heads = hf["num_attention_heads"]
    key_heads = 1 if family.has_latent_attention else hf.get("num_key_value_heads") or heads
    latent = hf["kv_lora_rank"] + hf["qk_rope_head_dim"] if family.has_latent_attention else 0
    mixtures = _find_mixtures(hf, family)
    kinds = {is_mixture: _count_layer(hf, family, is_mixture) for is_mixture in set(mixtures)}
    return Sizes(
        model_type=hf["model_type"],
        layers=tuple(kinds[is_mixture] for is_mixture in mixtures),
        hidden=hf["hidden_size"],
        vocabulary=hf["vocab_size"],
        is_tied=bool(_or_default(hf, "tie_word_embeddings", family.ties)),
        num_heads=heads,
        num_key_value_heads=key_heads,
        head_kv=latent or 2 * _find_head_dim(hf, family),
        caps_logits=bool(hf.get("final_logit_softcapping")),
    )


def _find_mixtures(hf: dict[str, Any], family: FamilyShape) -> list[bool]:
    """Returns for each layer whether it holds experts."""
    count = range(hf["num_hidden_layers"])
    if not family.is_mixture:
        return [False for _ in count]
    if "first_k_dense_replace" in hf:
        return [layer >= hf["first_k_dense_replace"] for layer in count]
    dense, step = hf.get("mlp_only_layers") or (), hf.get("decoder_sparse_step") or 1
    return [layer not in dense and (layer + 1) % step == 0 for layer in count]


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerPart:
    """Attention, or the MLP, of one layer."""

    divided: Matrices
    """Those that tensor parallelism divides."""
    latent: Matrices = field(default_factory=list)
    """Those that it leaves whole."""
    linear: Matrices
    """All linear layers, as the model holds them: adapters may stand beside each."""
    biases: int = 0
    whole: int = 0
    """Parameters of norms and routers."""
    experts: int = 0
    num_experts: int = 0
    kept: int
    """Activations of one token."""
    buffers: int = 0


def _count_layer(hf: dict[str, Any], family: FamilyShape, is_mixture: bool) -> LayerSizes:
    attention = _count_latent_attention(hf) if family.has_latent_attention else _count_attention(hf, family)
    mlp = _count_experts(hf, family) if is_mixture else _count_mlp(hf, family)
    hidden, linear = hf["hidden_size"], attention.linear + mlp.linear
    return LayerSizes(
        divided=_multiply(attention.divided + mlp.divided) + attention.biases + mlp.biases,
        whole=_multiply(attention.latent) + attention.whole + mlp.whole + family.norms * hidden,
        experts=mlp.experts,
        num_experts=mlp.num_experts,
        key_value=0 if family.has_latent_attention else _multiply(attention.divided[1:3]),
        activations=6 * hidden + attention.kept + mlp.kept,
        adapters=sum(inputs + outputs for inputs, outputs in linear),
        buffers=mlp.buffers,
    )


def _count_attention(hf: dict[str, Any], family: FamilyShape) -> _LayerPart:
    hidden, heads, dim = hf["hidden_size"], hf["num_attention_heads"], _find_head_dim(hf, family)
    query, key = heads * dim, (hf.get("num_key_value_heads") or heads) * dim
    matrices = [(hidden, query), (hidden, key), (hidden, key), (query, hidden)]
    norms = {HeadNorms.none: 0, HeadNorms.dimension: 2 * dim, HeadNorms.width: query + key}[family.head_norms]
    has_norms = family.head_norms_key is None or hf.get(family.head_norms_key)
    has_bias = _or_default(hf, family.bias_key, family.has_bias)
    return _LayerPart(
        divided=matrices,
        linear=_fuse(matrices[:3], family.fuses_attention) + matrices[3:],
        biases=has_bias * (query + 2 * key + family.biases_output * hidden),
        whole=norms if has_norms else 0,
        kept=6 * query + 5 * key,
    )


def _count_latent_attention(hf: dict[str, Any]) -> _LayerPart:
    hidden, heads, rope = hf["hidden_size"], hf["num_attention_heads"], hf["qk_rope_head_dim"]
    low_query, low_key = hf["q_lora_rank"] or 0, hf["kv_lora_rank"]
    query, value = heads * (hf["qk_nope_head_dim"] + rope), heads * hf["v_head_dim"]
    key = heads * hf["qk_nope_head_dim"] + value
    divided = [(low_query or hidden, query), (low_key, key), (value, hidden)]
    latent = [(hidden, low_query)] * bool(low_query) + [(hidden, low_key + rope)]
    return _LayerPart(
        divided=divided,
        latent=latent,
        linear=divided + latent,
        biases=bool(hf.get("attention_bias")) * (low_query + low_key + rope + hidden),
        whole=low_query + low_key,
        kept=6 * query + 5 * value + 3 * low_query + 3 * low_key,
    )


def _count_mlp(hf: dict[str, Any], family: FamilyShape) -> _LayerPart:
    hidden, width = hf["hidden_size"], hf["intermediate_size"]
    matrices = [(hidden, width), (hidden, width), (width, hidden)]
    return _LayerPart(
        divided=matrices,
        linear=_fuse(matrices[:2], family.fuses_mlp) + matrices[2:],
        biases=(family.may_bias_mlp and bool(hf.get("mlp_bias"))) * (2 * width + hidden),
        kept=5 * width,
    )


def _count_experts(hf: dict[str, Any], family: FamilyShape) -> _LayerPart:
    """Counts a mixture: its router, its experts, and those that every token goes through."""
    hidden = hf["hidden_size"]
    names = [key for key in ("n_routed_experts", "num_experts", "num_local_experts") if key in hf]
    experts = hf[names[0] if names else "num_experts"]
    width = hf.get("moe_intermediate_size") or hf["intermediate_size"]
    gated = hf.get("shared_expert_intermediate_size")
    shared = gated or (hf.get("n_shared_experts") or 0) * width
    matrices = [(hidden, shared), (hidden, shared), (shared, hidden)] if shared else []
    return _LayerPart(
        divided=matrices,
        linear=matrices + ([(hidden, 1)] if gated else []),
        whole=hidden * experts + (hidden if gated else 0),
        experts=3 * hidden * width * experts,
        num_experts=experts,
        kept=hf["num_experts_per_tok"] * (5 * width + 3 * hidden) + 5 * shared,
        buffers=experts if family.has_latent_attention else 0,
    )


def _find_head_dim(hf: dict[str, Any], family: FamilyShape) -> int:
    return hf.get("head_dim") or family.head_dim or hf["hidden_size"] // hf["num_attention_heads"]


def _or_default(hf: dict[str, Any], key: str | None, default: bool) -> bool:
    found = None if key is None else hf.get(key)
    return default if found is None else bool(found)


def _fuse(matrices: Matrices, is_fused: bool) -> Matrices:
    """Returns the matrices as they are held: side by side as one, or each alone."""
    if not is_fused or not matrices:
        return matrices
    return [(matrices[0][0], sum(outputs for _, outputs in matrices))]


def _multiply(matrices: Sequence[tuple[int, int]]) -> int:
    return sum(inputs * outputs for inputs, outputs in matrices)
