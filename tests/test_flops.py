"""The count of a step's operations, beside what torch counts while a model computes."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from learners.flops import count_attention_flops, count_matrix_parameters, count_step_flops

SIZES: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "eager",
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "experts_implementation": "eager",
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2, tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16),
    "qwen3_moe, some layers dense": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8, mlp_only_layers=[1]),
    "qwen3_moe, every second": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8, decoder_sparse_step=2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_products_are_counted_as_torch_counts_them(name: str) -> None:
    """Counts the linear layers exactly.

    Eager attention computes whole squares, of which the count takes half: also exactly.
    """
    config, (rows, length) = CONFIGS[name], (3, 10)
    model = AutoModelForCausalLM.from_config(config)
    tokens = torch.randint(0, config.vocab_size, (rows, length))
    with FlopCounterMode(display=False) as counter:
        model(tokens, use_cache=False).logits.sum().backward()
    layers = 6 * count_matrix_parameters(config) * rows * length
    assert counter.get_total_flops() == layers + 2 * count_attention_flops(config, [length] * rows)


def test_a_step_is_its_layers_and_half_the_squares_of_its_lengths() -> None:
    config, lengths = CONFIGS["qwen3"], [3, 40, 7]
    layers = 6 * count_matrix_parameters(config) * 50
    assert count_step_flops(config, lengths) == layers + 12 * 3 * 64 * (9 + 1600 + 49) / 2


def test_parameters_are_those_of_the_model_that_multiply() -> None:
    for name in ("llama", "qwen3"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
        matrices = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)]
        assert count_matrix_parameters(CONFIGS[name]) == sum(matrices)


def test_an_architecture_that_is_not_known_is_refused() -> None:
    config = LlamaConfig(**SIZES)
    config.model_type = "mamba"
    with pytest.raises(ValueError, match="model_type must be .* got mamba"):
        count_step_flops(config, [1])
