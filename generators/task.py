"""What a task is: where prompts come from and how a response is scored. One file a task, in `generators/tasks/`."""

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    entry: Any = None
    """Whatever the task needs to score a response to this prompt."""


@dataclass(frozen=True, slots=True)
class Score:
    reward: float
    """What is trained on. Must be finite, in float32 too."""
    components: dict[str, float] = field(default_factory=dict)
    """Parts of the reward by name, for the record: at most 64 numbers of the same kind, names of at most 200 characters."""


class Task(Protocol):
    """Prompts are named by (split, index, seed), so that a lease needs to carry no text.

    The same three give the same prompt in every process. `train` and `eval` never share a prompt.

    A task with a fixed number of training prompts says so in an attribute `num_prompts`: their indices are 0 .. num_prompts - 1,
    and the buffer walks through them in epochs. Without it, indices go on for ever.
    """

    name: str

    def make_prompt(self, split: str, index: int, seed: int) -> Prompt:
        """In the engine's loop, which waits for it."""
        ...

    def score_response(self, prompt: Prompt, response: str) -> Score:
        """In another thread, while the engine goes on: in several at once where `generators.score_threads` says so."""
        ...
