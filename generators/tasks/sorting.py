"""Sorting, from the `reasoning-gym` library: "Sort 3 7 1 9 4 2 ascending." One answer alone is right.

Two million questions of six digits exist. A model that answers questions that it never saw has therefore
learned to sort.
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
    packages = ("reasoning-gym",)

    def __init__(self, numbers: int = 6, low: int = 0, high: int = 9, longest: int | None = None) -> None:
        """Asks for `numbers` whole numbers from `low` to `high`, both included.

        With `longest` some lists are longer, up to that many numbers. Their lengths have a long tail
        (Pareto's with α = 2, so half of the lists have fewer than 1.5 × `numbers`).
        """
        if longest is not None and longest < numbers:
            raise ValueError(f"longest must be at least numbers, got {longest} and {numbers}")
        self._numbers, self._low, self._high, self._longest = numbers, low, high, longest
        self._dataset_of_length = cache(self._make_dataset)
        # Raises here, at the start, what the library refuses.
        self._dataset_of_length(numbers)

    def make_prompt(self, split: str, index: int, seed: int) -> Prompt:
        entry = self._draw_entry(split, random.Random(f"{seed}/{split}/{index}"))
        return Prompt(_write_question(entry), entry)

    def score_response(self, prompt: Prompt, response: str) -> Score:
        """Compares all numbers exactly, because the library's own score accepts numbers that are off by
        one."""
        correct = float(
            response.split() == _write_numbers(prompt.entry["metadata"]["sorted_numbers"]).split()
        )
        return Score(correct, {"correct": correct})

    def solved_examples(self, split: str, seed: int) -> Iterator[tuple[str, str]]:
        """Yields (question, answer) without end; the tiny model is warm-started on them."""
        rng = random.Random(seed)
        while True:
            entry = self._draw_entry(split, rng)
            yield _write_question(entry), _write_numbers(entry["metadata"]["sorted_numbers"])

    def _make_dataset(self, length: int) -> NumberSortingDataset:
        """Makes the library's dataset of lists with `length` numbers each."""
        config = NumberSortingConfig(
            min_numbers=length,
            max_numbers=length,
            min_decimals=0,
            max_decimals=0,
            min_value=self._low - 0.5,
            max_value=self._high + 0.5,
            seed=0,
            size=1,
        )
        config.validate()
        return NumberSortingDataset(config)

    def _draw_entry(self, split: str, rng: random.Random) -> dict[str, Any]:
        length = self._numbers
        if self._longest is not None:
            length = min(self._longest, int(length * rng.paretovariate(2)))
        return draw_entry(self._dataset_of_length(length), _write_question, split, rng)


def _write_question(entry: dict[str, Any]) -> str:
    """Writes a short question. The library's own takes 90 words to say how to format a list."""
    return f"Sort {_write_numbers(entry['metadata']['original_numbers'])} {entry['metadata']['direction']}."


def _write_numbers(numbers: list[str]) -> str:
    """Writes whole numbers plainly. The library writes them as `3.0`, and zero as `-0.0` now and then."""
    return " ".join(str(int(float(number))) for number in numbers)
