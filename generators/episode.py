"""Episodes stand between a task and an engine: leases become token ids, and sampled tokens become scores."""

import random
import threading
from dataclasses import dataclass
from typing import Any, Protocol

from buffers.messages import Lease
from generators.task import Prompt, Score, Task


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A task's prompt and its token ids."""

    prompt: Prompt
    tokens: list[int]


class Episodes(Protocol):
    def encode_prompt(self, lease: Lease) -> EncodedPrompt:
        """Makes the prompt that a lease names. Runs in the engine's loop, which waits for it."""
        ...

    def score_tokens(self, prompt: EncodedPrompt, tokens: list[int]) -> Score:
        """Scores one response of sampled tokens. Runs in a thread of the scoring pool, while the loop encodes
        other prompts."""
        ...


class TextEpisodes:
    """Episodes of one turn: the task's prompt as text, and one sampled response.

    The tokenizer's chat template wraps the prompt where there is one.
    """

    def __init__(self, task: Task, tokenizer: Any) -> None:
        self._task, self._tokenizer = task, tokenizer
        self._tokenizer_lock = threading.Lock()
        """No tokenizer promises that two threads may use it at once."""

    def encode_prompt(self, lease: Lease) -> EncodedPrompt:
        prompt = self._task.make_prompt(lease.split, lease.index, lease.seed)
        with self._tokenizer_lock:
            if self._tokenizer.chat_template:
                turns = [{"role": "user", "content": prompt.text}]
                tokens = self._tokenizer.apply_chat_template(
                    turns, add_generation_prompt=True, return_dict=False
                )
            else:
                tokens = self._tokenizer.encode(prompt.text)
        return EncodedPrompt(prompt, list(tokens))

    def score_tokens(self, prompt: EncodedPrompt, tokens: list[int]) -> Score:
        with self._tokenizer_lock:
            response = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return self._task.score_response(prompt.prompt, response)


class SimulatedEpisodes:
    """Episodes for the simulated engine: prompts of eight tokens, and a coin toss for a reward."""

    def encode_prompt(self, lease: Lease) -> EncodedPrompt:
        coin = random.Random(f"{lease.seed} {lease.index}")
        return EncodedPrompt(Prompt(f"simulated {lease.index}", coin), [0] * 8)

    def score_tokens(self, prompt: EncodedPrompt, tokens: list[int]) -> Score:
        return Score(float(prompt.prompt.entry.random() < 0.5))
