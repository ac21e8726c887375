"""Whether a model's matrices can be divided between the GPUs of an engine, by its configuration alone."""

import json
from pathlib import Path

DIVIDED = {
    "num_attention_heads": "the number of attention heads",
    "intermediate_size": "the intermediate size",
    "moe_intermediate_size": "the intermediate size of an expert",
    "shared_expert_intermediate_size": "the intermediate size of the shared expert",
}
"""Keys of a Hugging Face configuration whose numbers are divided."""


def check_heads(model: Path, tensor_parallel: int) -> None:
    """Raises ValueError for a model folder whose matrices cannot be divided between so many GPUs. Key-value
    heads that are fewer are held by several GPUs, and the vocabulary is padded."""
    if tensor_parallel == 1:
        return
    found = json.loads((model / "config.json").read_text())
    found = found.get("text_config") or found
    for key, words in DIVIDED.items():
        if (found.get(key) or 0) % tensor_parallel:
            raise ValueError(
                f"generators.tensor_parallel must divide {words}, got {tensor_parallel} and {found[key]} of "
                f"{model}"
            )
    heads = found.get("num_key_value_heads") or found.get("num_attention_heads") or tensor_parallel
    if heads % tensor_parallel and tensor_parallel % heads:
        raise ValueError(
            "generators.tensor_parallel must divide the number of key-value heads, or be a multiple of it, "
            f"got {tensor_parallel} and {heads} of {model}"
        )
