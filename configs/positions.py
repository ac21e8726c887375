"""The number of positions that a model knows, read from its Hugging Face configuration."""

import os
from typing import Any

SCALED_ALREADY = ("default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Rotary embeddings (`rope_type`) whose configuration states the positions with their scaling; others count
`factor` times as many. vLLM reads them so."""
SCALED_ALREADY_FAMILY = "gemma3"
"""A part of the `model_type` of families whose configurations state the scaled positions, whatever their
rotary embedding. vLLM reads them so."""
ALLOWED_BY = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
"""The variable with which vLLM takes more positions than a model has."""


def count_positions(hf: dict[str, Any]) -> int | None:
    """Returns how many positions a model has been made for; None where its configuration does not say."""
    text = hf.get("text_config") or hf
    # Cohere's state in the first one what they have been made for, and in the second one a sixteenth of it.
    positions = text.get("model_max_length") or text.get("max_position_embeddings")
    if not isinstance(positions, int):
        return None
    if SCALED_ALREADY_FAMILY in hf.get("model_type", ""):
        return positions
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    # Some families have one for each kind of layer.
    by_layer = [one for one in rope.values() if isinstance(one, dict)] or [rope]
    factors = [
        one.get("factor") or 1.0
        for one in by_layer
        if one.get("rope_type", one.get("type", "default")) not in SCALED_ALREADY
    ]
    return int(positions * max(factors, default=1.0))


def check_positions(hf: dict[str, Any], max_model_len: int) -> None:
    """Raises ValueError where sequences would be longer than the positions that the model knows."""
    positions = count_positions(hf)
    is_allowed = os.environ.get(ALLOWED_BY, "").strip().lower() in ("1", "true")
    if positions is None or max_model_len <= positions or is_allowed:
        return
    raise ValueError(
        f"generators.max_model_len must be at most {positions:,}, the positions of model.path "
        f"(max_position_embeddings of its config.json, times its rotary embedding's factor; {ALLOWED_BY}=1 "
        f"lifts this), got {max_model_len:,}"
    )
