"""How many tokens the model knows, as its folder tells: a token beyond would end the learner at its embedding, on a GPU for good."""

import json
from pathlib import Path

ANY = 2**31
"""Tokens are kept in 32 bits."""


def read_vocabulary(model: Path) -> int:
    """The rows of the embedding, from a Hugging Face model's `config.json`; `ANY` where there is none, or it does not say."""
    try:
        told = json.loads((model / "config.json").read_text())
    except FileNotFoundError:
        return ANY
    size = told.get("vocab_size") or told.get("text_config", {}).get("vocab_size")
    return size if isinstance(size, int) else ANY
