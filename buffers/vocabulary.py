"""How many tokens and experts the model has, as its folder tells: a token beyond would end the learner at its embedding, on a GPU for good."""

import json
from pathlib import Path
from typing import Any

from buffers.trajectory import Routing

ANY = 2**31
"""Tokens are kept in 32 bits."""


def read_vocabulary(model: Path) -> int:
    """The rows of the embedding, from a Hugging Face model's `config.json`; `ANY` where there is none, or it does not say."""
    size = _read(model, "vocab_size")
    return size if isinstance(size, int) else ANY


def read_routing(model: Path, is_recorded: bool) -> Routing:
    """What a run's trajectories hold in `experts`: something only where it `is_recorded` (`learner.moe.router_replay`).

    Raises ValueError for a model without experts.
    """
    if not is_recorded:
        return Routing()
    layers, per_token = _read(model, "num_hidden_layers"), _read(model, "num_experts_per_tok")
    experts = (
        _read(model, "num_experts") or _read(model, "num_local_experts") or _read(model, "n_routed_experts")
    )
    if not (layers and per_token and experts):
        raise ValueError(
            f"learner.moe.router_replay must be false for a model without experts, got true with {model}"
        )
    return Routing(layers * per_token, experts)


def _read(model: Path, key: str) -> Any:
    try:
        told = json.loads((model / "config.json").read_text())
    except FileNotFoundError:
        return None
    return told.get(key) or told.get("text_config", {}).get(key)
