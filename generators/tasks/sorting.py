"""Sorting, by the `reasoning-gym` library: "Sort 3 7 1 9 4 2 ascending." The response is right when it is the library's answer.

Two million questions of six digits exist, so a model that answers those it never saw has learned to sort.
"""

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

from reasoning_gym.algorithmic.number_sorting import NumberSortingConfig, NumberSortingDataset

from generators.task import Prompt, Score
from generators.tasks._questions import draw_entry


class Task:
    name = "sorting"

    def __init__(self, numbers: int = 6, low: int = 0, high: int = 9, longest: int | None = None) -> None:
        """`numbers` whole numbers from `low` to `high`, both included. With `longest` some lists are longer, up to that: their
        lengths have a long tail (Pareto's with α = 2, so half of the lists are of fewer than 1.5 × `numbers`)."""
        if longest is not None and longest < numbers:
            raise ValueError(f"longest must be at least numbers, got {longest} and {numbers}")
        self._numbers, self._low, self._high, self._longest = numbers, low, high, longest
        self._lists = cache(self._lists_of)
        self._lists(numbers)  # refuses what the library refuses

    def _lists_of(self, count: int) -> NumberSortingDataset:
        config = NumberSortingConfig(
            min_numbers=count, max_numbers=count, min_decimals=0, max_decimals=0,
            min_value=self._low - 0.5, max_value=self._high + 0.5, seed=0, size=1,
        )  # fmt: skip
        config.validate()
        return NumberSortingDataset(config)

    def make_prompt(self, split: str, index: int, seed: int) -> Prompt:
        entry = self._draw(split, random.Random(f"{seed}/{split}/{index}"))
        return Prompt(_question(entry), entry)

    def score_response(self, prompt: Prompt, response: str) -> Score:
        """The library's own score takes numbers that are off by one for right."""
        correct = float(response.split() == _plain(prompt.entry["metadata"]["sorted_numbers"]).split())
        return Score(correct, {"correct": correct})

    def solved_examples(self, split: str, seed: int) -> Iterator[tuple[str, str]]:
        """(question, answer), without end: what a model is warm-started on."""
        rng = random.Random(seed)
        while True:
            entry = self._draw(split, rng)
            yield _question(entry), _plain(entry["metadata"]["sorted_numbers"])

    def _draw(self, split: str, rng: random.Random) -> dict[str, Any]:
        count = self._numbers
        if self._longest is not None:
            count = min(self._longest, int(count * rng.paretovariate(2)))
        return draw_entry(self._lists(count), _question, split, rng)


def _question(entry: dict[str, Any]) -> str:
    """The library's own says in 90 words how to format a list."""
    return f"Sort {_plain(entry['metadata']['original_numbers'])} {entry['metadata']['direction']}."


def _plain(numbers: list[str]) -> str:
    """The library writes whole numbers as `3.0`, and zero as `-0.0` now and then."""
    return " ".join(str(int(float(number))) for number in numbers)
