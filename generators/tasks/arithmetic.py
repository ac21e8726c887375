"""Sums, by the `reasoning-gym` library: "Calculate 3 + 7 + 10." The response is right when the library says so."""

import random
from collections.abc import Iterator
from typing import Any

import xxhash
from reasoning_gym.arithmetic.basic_arithmetic import BasicArithmeticDataset, BasicArithmeticDatasetConfig

from generators.task import Prompt, Score

NUM_BUCKETS = 8
"""Questions are divided by a hash of their text: bucket 0 is held out, so that `eval` never shares one with `train`."""
MAX_DRAWS = 10_000


class Task:
    name = "arithmetic"

    def __init__(self, terms: int = 3, digits: int = 1, operators: tuple[str, ...] = ("+",)) -> None:
        config = BasicArithmeticDatasetConfig(
            min_terms=terms, max_terms=terms, min_digits=digits, max_digits=digits, operators=list(operators),
            allow_parentheses=False, allow_negation=False, seed=0, size=1,
        )  # fmt: skip
        config.validate()
        self._questions = BasicArithmeticDataset(config)

    def prompt(self, split: str, index: int, seed: int) -> Prompt:
        entry = self._draw(split, random.Random(f"{seed}/{split}/{index}"))
        return Prompt(entry["question"], entry)

    def score(self, prompt: Prompt, response: str) -> Score:
        correct = float(self._questions.score_answer(response.strip(), prompt.entry) == 1.0)
        return Score(correct, {"correct": correct})

    def solved(self, split: str, seed: int) -> Iterator[tuple[str, str]]:
        """(question, answer), without end: what a model is warm-started on."""
        rng = random.Random(seed)
        while True:
            entry = self._draw(split, rng)
            yield entry["question"], entry["answer"]

    def _draw(self, split: str, rng: random.Random) -> dict[str, Any]:
        if split not in ("train", "eval"):
            raise ValueError(f"split must be train or eval, got {split!r}")
        for _ in range(MAX_DRAWS):
            entry = self._questions[rng.randrange(1 << 40)]
            held_out = xxhash.xxh3_64_intdigest(entry["question"].encode()) % NUM_BUCKETS == 0
            if held_out == (split == "eval"):
                return entry
        raise ValueError(f"task.args must leave questions for {split}, found none in {MAX_DRAWS} draws")
