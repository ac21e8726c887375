"""Floating-point operations of a training step, by the usual count, for shares of a machine's peak (MFU;
PaLM, Chowdhery et al., 2022, arXiv 2204.02311, appendix B)."""

from collections.abc import Sequence
from typing import Any


def count_step_flops(config: Any, lengths: Sequence[int]) -> float:
    """Counts forward and backward pass over sequences of these lengths, with nothing computed twice.

    6 N T + 6 L A Σ n²   T = Σ n tokens, N = `count_matrix_parameters`, L layers, A = heads × head dimension

    6: a product takes 2 operations for each parameter and token in the forward pass, and 4 in the backward
    pass. Attention is counted causal: twice that (12 L A Σ n²) would be the full squares, of which a causal
    kernel computes half. The head counts for every token. Element-wise work (norms, softmax, rope, the
    optimizer) and the look-up of embeddings count nothing. `config`: Hugging Face's, of model_type llama,
    qwen2, qwen3 or qwen3_moe. Raises ValueError for others, and for sliding windows.
    """
    return 6.0 * count_matrix_parameters(config) * sum(lengths) + count_attention_flops(config, lengths)


def count_attention_flops(config: Any, lengths: Sequence[int]) -> float:
    """Counts the products of queries with keys and of weights with values, forward and backward, causal."""
    width = config.num_attention_heads * head_dim(config)
    return 6.0 * config.num_hidden_layers * width * sum(length**2 for length in lengths)


def count_matrix_parameters(config: Any) -> int:
    """Counts the parameters that multiply each token: layers and head, and of a mixture its router and the
    experts of a token."""
    if config.model_type not in ("llama", "qwen2", "qwen3", "qwen3_moe"):
        raise ValueError(
            f"model_type must be llama, qwen2, qwen3 or qwen3_moe to be counted, got {config.model_type}"
        )
    if getattr(config, "use_sliding_window", False):
        raise ValueError(
            "use_sliding_window must be false: attention is counted over whole sequences, got true"
        )
    hidden, dim = config.hidden_size, head_dim(config)
    attention = 2 * hidden * dim * (config.num_attention_heads + config.num_key_value_heads)
    dense = 3 * hidden * config.intermediate_size
    num_sparse = _count_sparse_layers(config)
    total = config.num_hidden_layers * attention + (config.num_hidden_layers - num_sparse) * dense
    if num_sparse:
        experts = 3 * hidden * config.moe_intermediate_size * config.num_experts_per_tok
        total += num_sparse * (experts + hidden * config.num_experts)
    return total + hidden * config.vocab_size


def head_dim(config: Any) -> int:
    """Returns the width of one attention head. `config`: Hugging Face's."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _count_sparse_layers(config: Any) -> int:
    """Counts the layers with experts."""
    if config.model_type != "qwen3_moe":
        return 0
    steps = range(1, config.num_hidden_layers + 1)
    return sum(i - 1 not in config.mlp_only_layers and i % config.decoder_sparse_step == 0 for i in steps)
