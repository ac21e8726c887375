"""The sizes of models, against transformers' own models of the same configuration."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from public_models import PARAMETERS, PUBLIC_MODELS
from transformers import AutoConfig, AutoModelForCausalLM

from configs.parallel import LoraConfig
from configs.sizes import FAMILIES, Sizes, count_sizes, read_sizes
from generators.shared_gpu import count_engine_weights, count_kv_token_bytes, count_kv_tokens
from learners.families import TESTED_FAMILIES
from learners.lora import inject_adapters

SMALL: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
MORE: dict[str, list[dict[str, Any]]] = {
    "llama": [dict(attention_bias=True), dict(mlp_bias=True), dict(head_dim=16)],
    "mixtral": [dict(num_local_experts=4)],
    "qwen2_moe": [
        EXPERTS | dict(shared_expert_intermediate_size=20),
        EXPERTS | dict(shared_expert_intermediate_size=20, qkv_bias=False, mlp_only_layers=[1]),
    ],
    "qwen3_moe": [EXPERTS, EXPERTS | dict(decoder_sparse_step=2, head_dim=16)],
    "cohere": [dict(use_qk_norm=True)],
    "glm4": [dict(attention_bias=False)],
    "deepseek_v3": [
        dict(
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            n_routed_experts=8,
            n_shared_experts=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            num_key_value_heads=4,
            kv_lora_rank=24,
            qk_rope_head_dim=8,
            qk_nope_head_dim=12,
            v_head_dim=10,
            **more,
        )
        for more in (dict(q_lora_rank=16), dict(q_lora_rank=16, attention_bias=True), dict(q_lora_rank=None))
    ],
}
"""Configurations of a family besides the smallest; those of mixtures in its place."""


def list_configurations(family: str) -> list[dict[str, Any]]:
    plain = [] if FAMILIES[family].is_mixture else [{}]
    found = [*plain, *MORE.get(family, [])]
    return [SMALL | found[0] | dict(tie_word_embeddings=True), *(SMALL | one for one in found)]


def make_model(hf: dict[str, Any], family: str) -> Any:
    """Returns the model without memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **hf))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_a_family_is_counted(family: str) -> None:
    for hf in list_configurations(family):
        model = make_model(hf, family)
        sizes = count_sizes(json.loads(model.config.to_json_string()))
        assert sizes.parameters == sum(one.numel() for one in model.parameters()), hf
        biases = [one.numel() for name, one in model.named_buffers() if name.endswith("correction_bias")]
        assert sizes.published == sizes.parameters + sum(biases)
        for number, layer in enumerate(model.model.layers):
            assert sizes.layers[number].parameters == sum(one.numel() for one in layer.parameters()), hf


@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "deepseek_v3"])
def test_adapters_stand_beside_every_linear_layer(family: str) -> None:
    """Not deepseek_v3's: there peft takes the experts' tensors for those of its MLPs."""
    hf = list_configurations(family)[0]
    model = make_model(hf, family)
    sizes = count_sizes(json.loads(model.config.to_json_string()))
    with torch.device("meta"):
        inject_adapters(model, LoraConfig(rank=1))
    adapters = sum(one.numel() for name, one in model.named_parameters() if "lora_" in name)
    assert sizes.lora_parameters_per_rank == adapters


@pytest.mark.parametrize("name", PUBLIC_MODELS)
def test_public_models_have_the_parameters_that_their_pages_name(name: str) -> None:
    hf = dict(PUBLIC_MODELS[name])
    model = make_model(hf, hf.pop("model_type"))
    counted = count_sizes(PUBLIC_MODELS[name]).parameters
    assert counted == sum(one.numel() for one in model.parameters()) == PARAMETERS[name]


def test_families_that_are_trained_are_counted() -> None:
    assert set(TESTED_FAMILIES) <= FAMILIES.keys()


def test_what_cannot_be_counted_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model_type .* must be one of llama, .*, got mamba$"):
        count_sizes({"model_type": "mamba", "d_model": 64})
    with pytest.raises(ValueError, match="must have intermediate_size, got one without"):
        count_sizes(
            {key: value for key, value in PUBLIC_MODELS["Qwen3-8B"].items() if key != "intermediate_size"}
        )
    with pytest.raises(ValueError, match="must have num_experts, got one without"):
        count_sizes(PUBLIC_MODELS["Qwen3-8B"] | {"model_type": "qwen3_moe"})
    for key, value in (("num_hidden_layers", 0), ("hidden_size", "4096"), ("head_dim", -1)):
        with pytest.raises(ValueError, match=f"{key} of a model must be a whole number of at least"):
            count_sizes(PUBLIC_MODELS["Qwen3-8B"] | {key: value})
    for text, wrong in (("{", "must be JSON"), ("[1]", "must be a JSON object, got list")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=wrong):
            read_sizes(tmp_path)


def test_a_model_is_named_by_its_folder_or_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(PUBLIC_MODELS["Qwen3-8B"]))
    assert read_sizes(tmp_path) == read_sizes(file) == count_sizes(PUBLIC_MODELS["Qwen3-8B"])


# ---- what engines hold of it


def sizes_of(name: str) -> Sizes:
    return count_sizes(PUBLIC_MODELS[name])


@pytest.mark.parametrize(
    ("name", "tensor_parallel", "elements"),
    [
        ("Qwen3-8B", 1, 2 * 8 * 128),
        ("Qwen3-8B", 4, 2 * 2 * 128),
        ("Qwen3-8B", 16, 2 * 1 * 128),  # ranks beyond the heads hold copies
        ("Qwen3-235B-A22B", 8, 2 * 1 * 128),
        ("DeepSeek-V3", 1, 512 + 64),
        ("DeepSeek-V3", 8, 512 + 64),  # a latent vector is not divided
    ],
)
def test_a_tokens_kv_is_what_vllm_keeps_of_it(name: str, tensor_parallel: int, elements: int) -> None:
    sizes = sizes_of(name)
    assert count_kv_token_bytes(sizes, 2, tensor_parallel) == 2 * elements * sizes.num_layers


def test_heads_that_ranks_of_a_sequence_repeat_are_counted() -> None:
    """Qwen3-8B has 32 heads, and 8 of keys and values, of 128 each."""
    sizes = sizes_of("Qwen3-8B")
    for tensor, ranks, heads in ((1, 8, 0), (1, 16, 8), (1, 32, 24), (4, 2, 0), (4, 8, 6), (8, 4, 3)):
        assert sizes.count_repeated_kv(tensor, ranks) == 2 * 128 * heads
    assert sizes_of("DeepSeek-V3").count_repeated_kv(1, 64) == 0, "its attention has as many of both"


def test_kv_comes_in_whole_blocks() -> None:
    assert count_kv_tokens(100 * 1000, 1000) == 96 and count_kv_tokens(15_999, 1000) == 0


@pytest.mark.parametrize("name", PUBLIC_MODELS)
def test_gpus_of_an_engine_hold_the_model_between_them(name: str) -> None:
    sizes = sizes_of(name)
    assert count_engine_weights(sizes) == sizes.published
    whole = sum(layer.whole + layer.buffers for layer in sizes.layers) + sizes.hidden
    key_value = sum(layer.key_value for layer in sizes.layers)
    for tensor in (2, 4, 8):
        copies = max(1, tensor / sizes.num_key_value_heads) if key_value else 1
        held = tensor * count_engine_weights(sizes, tensor)
        assert held == pytest.approx(sizes.published + (tensor - 1) * whole + (copies - 1) * key_value)
