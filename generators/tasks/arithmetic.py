"""Sums from the `reasoning-gym` library, such as "Calculate 3 + 7 + 10." The library scores the response."""

import random
from collections.abc import Iterator
from typing import Any

from reasoning_gym.arithmetic.basic_arithmetic import BasicArithmeticDataset, BasicArithmeticDatasetConfig

from generators.task import Prompt, Score
from generators.tasks._questions import draw_entry


class Task:
    name = "arithmetic"
    packages = ("reasoning-gym",)

    def __init__(self, terms: int = 3, digits: int = 1, operators: tuple[str, ...] = ("+",)) -> None:
        config = BasicArithmeticDatasetConfig(
            min_terms=terms,
            max_terms=terms,
            min_digits=digits,
            max_digits=digits,
            operators=list(operators),
            allow_parentheses=False,
            allow_negation=False,
            seed=0,
            size=1,
        )
        config.validate()
        self._questions = BasicArithmeticDataset(config)

    def make_prompt(self, split: str, index: int, seed: int) -> Prompt:
        entry = self._draw_entry(split, random.Random(f"{seed}/{split}/{index}"))
        return Prompt(_write_question(entry), entry)

    def score_response(self, prompt: Prompt, response: str) -> Score:
        correct = float(self._questions.score_answer(response.strip(), prompt.entry) == 1.0)
        return Score(correct, {"correct": correct})

    def solved_examples(self, split: str, seed: int) -> Iterator[tuple[str, str]]:
        """Yields (question, answer) without end; the tiny model is warm-started on them."""
        rng = random.Random(seed)
        while True:
            entry = self._draw_entry(split, rng)
            yield _write_question(entry), entry["answer"]

    def _draw_entry(self, split: str, rng: random.Random) -> dict[str, Any]:
        return draw_entry(self._questions, _write_question, split, rng)


def _write_question(entry: dict[str, Any]) -> str:
    return str(entry["question"])
