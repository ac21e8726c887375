"""The division of what a task draws between training and evaluation, by a hash of its text."""

import random
from collections.abc import Callable
from typing import TypeVar

import xxhash

NUM_BUCKETS = 8
"""Number of buckets that a hash of the text chooses from. Bucket 0 is held out, so that `eval` never shares a
question with `train`."""
MAX_DRAWS = 10_000
"""Draws after which a task counts as having nothing for a split."""

Drawn = TypeVar("Drawn")


def draw_for_split(
    draw: Callable[[random.Random], Drawn], text_of: Callable[[Drawn], str], split: str, rng: random.Random
) -> Drawn:
    """Draws until the text belongs to `split`. Raises ValueError when nothing is found."""
    if split not in ("train", "eval"):
        raise ValueError(f"split must be train or eval, got {split!r}")
    for _ in range(MAX_DRAWS):
        drawn = draw(rng)
        held_out = xxhash.xxh3_64_intdigest(text_of(drawn).encode()) % NUM_BUCKETS == 0
        if held_out == (split == "eval"):
            return drawn
    raise ValueError(f"task.args must leave questions for {split}, found none in {MAX_DRAWS} draws")
