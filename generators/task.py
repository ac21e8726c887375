"""The protocol of a task, which makes prompts and scores responses. The tasks are in `generators/tasks/`."""

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    entry: Any = None
    """Anything that the task needs to score a response to this prompt."""


@dataclass(frozen=True, slots=True)
class Score:
    reward: float
    """The number that training raises. It must be finite, in float32 too."""
    components: dict[str, float] = field(default_factory=dict)
    """Parts of the reward by name, for the record: at most 64 numbers, finite in float32 too, with names of
    at most 200 characters."""


class Task(Protocol):
    """Makes prompts that are named by (split, index, seed), so that a lease needs to carry no text.

    The same three give the same prompt in every process. `train` and `eval` never share a prompt.

    A task with a fixed number of training prompts says so in an attribute `num_prompts`: their indices are 0
    .. num_prompts - 1, and the buffer walks through them in epochs. Without it, indices go on for ever.

    A task with an attribute `max_scores` has at most so many calls of `score_response` under way in a
    generator (of an environment: of `step`). The others wait before their deadline begins: so a judge that is
    slower than the engine fails nobody.

    A task with a method `solved_examples(split, seed)` yields pairs of question and answer without end. The
    tiny model is warm-started on them; without the method a run needs a model folder.
    """

    name: str

    def make_prompt(self, split: str, index: int, seed: int) -> Prompt:
        """Runs in a worker process, and again where another worker scores the response. It may be `async`."""
        ...

    def score_response(self, prompt: Prompt, response: str) -> Score:
        """Runs in a worker process, while the engine goes on. It may be `async`."""
        ...
