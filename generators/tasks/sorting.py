"""Sorting, by the `reasoning-gym` library: "Sort 3 7 1 9 4 2 ascending." The response is right when it is the library's answer.

Two million questions of six digits exist, so a model that answers those it never saw has learned to sort.
"""

import random
from collections.abc import Iterator
from typing import Any

import xxhash
from reasoning_gym.algorithmic.number_sorting import NumberSortingConfig, NumberSortingDataset

from generators.task import Prompt, Score

NUM_BUCKETS = 8
"""Questions are divided by a hash of their text: bucket 0 is held out, so that `eval` never shares one with `train`."""
MAX_DRAWS = 10_000


class Task:
    name = "sorting"

    def __init__(self, numbers: int = 6, low: int = 0, high: int = 9) -> None:
        """`numbers` whole numbers from `low` to `high`, both included."""
        config = NumberSortingConfig(
            min_numbers=numbers, max_numbers=numbers, min_decimals=0, max_decimals=0, min_value=low - 0.5, max_value=high + 0.5,
            seed=0, size=1,
        )  # fmt: skip
        config.validate()
        self._questions = NumberSortingDataset(config)

    def prompt(self, split: str, index: int, seed: int) -> Prompt:
        entry = self._draw(split, random.Random(f"{seed}/{split}/{index}"))
        return Prompt(_question(entry), entry)

    def score(self, prompt: Prompt, response: str) -> Score:
        """The library's own score takes numbers that are off by one for right."""
        correct = float(response.split() == _plain(prompt.entry["metadata"]["sorted_numbers"]).split())
        return Score(correct, {"correct": correct})

    def solved(self, split: str, seed: int) -> Iterator[tuple[str, str]]:
        """(question, answer), without end: what a model is warm-started on."""
        rng = random.Random(seed)
        while True:
            entry = self._draw(split, rng)
            yield _question(entry), _plain(entry["metadata"]["sorted_numbers"])

    def _draw(self, split: str, rng: random.Random) -> dict[str, Any]:
        if split not in ("train", "eval"):
            raise ValueError(f"split must be train or eval, got {split!r}")
        for _ in range(MAX_DRAWS):
            entry = self._questions[rng.randrange(1 << 40)]
            held_out = xxhash.xxh3_64_intdigest(_question(entry).encode()) % NUM_BUCKETS == 0
            if held_out == (split == "eval"):
                return entry
        raise ValueError(f"task.args must leave questions for {split}, found none in {MAX_DRAWS} draws")


def _question(entry: dict[str, Any]) -> str:
    """The library's own says in 90 words how to format a list."""
    return f"Sort {_plain(entry['metadata']['original_numbers'])} {entry['metadata']['direction']}."


def _plain(numbers: list[str]) -> str:
    """The library writes whole numbers as `3.0`, and zero as `-0.0` now and then."""
    return " ".join(str(int(float(number))) for number in numbers)
