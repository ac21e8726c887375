"""The number of tokens and experts that a model has, read from its folder.

A token beyond them would end the learner at its embedding, on a GPU for good.
"""

import json
from pathlib import Path
from typing import Any

from buffers.group_checks import ExpertsShape

ANY = 2**31
"""The number of tokens of a model that does not say. Tokens are kept in 32 bits."""


def read_vocabulary(model: Path) -> int:
    """Returns the rows of the embedding, from a Hugging Face model's `config.json`; `ANY` where that is
    missing or does not say."""
    size = _read_key(model, "vocab_size")
    return size if isinstance(size, int) else ANY


def read_routing(model: Path, is_recorded: bool) -> ExpertsShape:
    """Returns the shape of a run's `experts` column. It is empty unless `is_recorded`
    (`learner.moe.router_replay`).

    Raises ValueError for a model without experts.
    """
    if not is_recorded:
        return ExpertsShape()
    layers, per_token = _read_key(model, "num_hidden_layers"), _read_key(model, "num_experts_per_tok")
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next(filter(None, (_read_key(model, name) for name in names)), None)
    if not (layers and per_token and experts):
        raise ValueError(
            f"learner.moe.router_replay must be false for a model without experts, got true with {model}"
        )
    return ExpertsShape(layers * per_token, experts)


def _read_key(model: Path, key: str) -> Any:
    try:
        told = json.loads((model / "config.json").read_text())
    except FileNotFoundError:
        return None
    return told.get(key) or told.get("text_config", {}).get(key)
