"""From a lease to token ids, and from sampled tokens to a score: what lies between the task and the engine."""

import random
import threading
from dataclasses import dataclass
from typing import Any, Protocol

from buffers.messages import Lease
from generators.task import Prompt, Score, Task


@dataclass(frozen=True, slots=True)
class Opening:
    """A prompt, ready for an engine."""

    prompt: Prompt
    tokens: list[int]


class Episodes(Protocol):
    def open(self, lease: Lease) -> Opening:
        """In the engine's loop."""
        ...

    def score(self, opening: Opening, tokens: list[int]) -> Score:
        """In a thread of the scoring pool, while the loop opens others."""
        ...


class TextEpisodes:
    """One turn: the task's prompt as text (through the tokenizer's chat template if it has one), one sampled response."""

    def __init__(self, task: Task, tokenizer: Any) -> None:
        self._task, self._tokenizer = task, tokenizer
        self._lock = (
            threading.Lock()
        )  # of the tokenizer: no other promise is made of using one from two threads

    def open(self, lease: Lease) -> Opening:
        prompt = self._task.make_prompt(lease.split, lease.index, lease.seed)
        with self._lock:
            if self._tokenizer.chat_template:
                turns = [{"role": "user", "content": prompt.text}]
                tokens = self._tokenizer.apply_chat_template(
                    turns, add_generation_prompt=True, return_dict=False
                )
            else:
                tokens = self._tokenizer.encode(prompt.text)
        return Opening(prompt, list(tokens))

    def score(self, opening: Opening, tokens: list[int]) -> Score:
        with self._lock:
            response = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return self._task.score_response(opening.prompt, response)


class SimulatedEpisodes:
    """For the simulated engine: prompts of eight tokens, and rewards by the toss of a coin."""

    def open(self, lease: Lease) -> Opening:
        return Opening(
            Prompt(f"simulated {lease.index}", random.Random(f"{lease.seed} {lease.index}")), [0] * 8
        )

    def score(self, opening: Opening, tokens: list[int]) -> Score:
        return Score(float(opening.prompt.entry.random() < 0.5))
