"""Questions of a `reasoning-gym` dataset, divided between training and evaluation."""

import random
from collections.abc import Callable
from typing import Any

from generators.splits import draw_for_split


def draw_entry(
    questions: Any, text_of: Callable[[dict[str, Any]], str], split: str, rng: random.Random
) -> dict[str, Any]:
    """Draws an entry of the dataset `questions` whose text belongs to `split`. Raises ValueError when none is
    found."""

    def draw_question(rng: random.Random) -> dict[str, Any]:
        entry: dict[str, Any] = questions[rng.randrange(1 << 40)]
        return entry

    return draw_for_split(draw_question, text_of, split, rng)
