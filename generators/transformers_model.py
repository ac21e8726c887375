"""A model of transformers for its continuous batching: built without its weights, which come as published
versions."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers.activations
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.initialization import no_init_weights

from sync.steady_linear import steady_activation, steady_linear

PAGED_LAYERS = {"full_attention", "sliding_attention"}
"""The kinds of layers that continuous batching keeps keys and values of."""

ACTIVATIONS = (nn.SiLU.__module__, transformers.activations.__name__)
"""Modules whose classes compute each element by itself."""


def build_model(path: str | Path, dtype: str, device: torch.device) -> Any:
    """Returns the causal LM of a model folder, its parameters unwritten.

    Buffers that are computed from the configuration are right; those that a file holds are float32, as
    learners publish them. Raises ValueError for a model that continuous batching cannot serve.
    """
    config = AutoConfig.from_pretrained(path)
    if (why := find_unserved(config.get_text_config())) is not None:
        raise ValueError(
            "generators.engine must be vllm for this model.path (transformers' continuous batching serves "
            f"layers of full and of sliding attention), got {config.model_type} with {why}"
        )
    # Memory that nobody has written to costs nothing until it is: a snapshot takes its place on a CPU.
    with torch.device(device), no_init_weights():
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation="eager"
        )
    model.tie_weights()
    saved = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point():
            buffer.data = buffer.data.float()
    if device.type == "cpu":
        for module in model.modules():
            if type(module) is nn.Linear:
                module.forward = partial(_compute_linear, module)
            elif type(module).__module__ in ACTIVATIONS:
                module.forward = partial(steady_activation, module.forward)
    return model.eval().requires_grad_(False)


def _compute_linear(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return steady_linear(x, module.weight, module.bias)


def find_unserved(config: Any) -> str | None:
    """Returns what continuous batching cannot serve in a model's configuration; None where it can."""
    if getattr(config, "num_attention_heads", None) is None:
        return "no attention"
    if getattr(config, "kv_lora_rank", None) is not None:
        return "latent attention (kv_lora_rank)"
    others = set(getattr(config, "layer_types", None) or []) - PAGED_LAYERS
    return f"layers of {', '.join(sorted(others))}" if others else None


def count_page_token_bytes(config: Any, dtype: str) -> int:
    """Returns the bytes of keys and values of one token in all layers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * getattr(torch, dtype).itemsize


def read_end_tokens(path: str | Path, config: Any) -> list[int]:
    """Returns the end-of-sequence ids of the model's generation config; of its config where the generation
    config has none."""
    try:
        ids = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        ids = None
    ids = config.eos_token_id if ids is None else ids
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
