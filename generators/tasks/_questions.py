"""Questions of a `reasoning-gym` dataset, divided between training and evaluation."""

import random
from collections.abc import Callable
from typing import Any

import xxhash

NUM_BUCKETS = 8
"""Number of buckets that a hash of a question's text chooses from. Bucket 0 is held out, so that `eval` never
shares a question with `train`."""
MAX_DRAWS = 10_000
"""Draws after which a dataset counts as having no question for a split."""


def draw_entry(
    questions: Any, text_of: Callable[[dict[str, Any]], str], split: str, rng: random.Random
) -> dict[str, Any]:
    """Draws an entry of the dataset `questions` whose text belongs to `split`. Raises ValueError when none is
    found."""
    if split not in ("train", "eval"):
        raise ValueError(f"split must be train or eval, got {split!r}")
    for _ in range(MAX_DRAWS):
        entry: dict[str, Any] = questions[rng.randrange(1 << 40)]
        held_out = xxhash.xxh3_64_intdigest(text_of(entry).encode()) % NUM_BUCKETS == 0
        if held_out == (split == "eval"):
            return entry
    raise ValueError(f"task.args must leave questions for {split}, found none in {MAX_DRAWS} draws")
