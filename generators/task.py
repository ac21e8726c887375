"""The protocol of a task, which makes prompts and scores responses. The tasks are in `generators/tasks/`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

MAX_SOURCE_NAME = 200
SOURCE_NAME_RULE = f"have 1 to {MAX_SOURCE_NAME} printable characters, and no space at its ends"


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    entry: Any = None
    """Anything that the task needs to score a response to this prompt."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The conversation that the policy replies to, in OpenAI's form. Empty: `text`, as the user's words."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the model's chat template."""


@dataclass(frozen=True, slots=True)
class Score:
    reward: float
    """The number that training raises. It must be finite, in float32 too."""
    components: dict[str, float] = field(default_factory=dict)
    """Parts of the reward by name, for the record: at most 64 numbers, finite in float32 too, with names of
    at most 200 characters."""


@dataclass(frozen=True, slots=True)
class PromptSource:
    """A named supply of prompts: some files, another task, or a level of difficulty."""

    name: str
    size: int | None = None
    """Number of its training prompts. None: prompts without end."""
    weight: float = 1.0
    """Its share of the groups, relative to the other sources of the task. Above 0."""
    level: int | None = None
    """Level of difficulty, where the task's sources are levels."""
    made_of: str = ""
    """Says how its prompts are made, where the task can tell: a resumed run with another text is refused."""


def is_source_name(name: str) -> bool:
    """True for a name that serves as a part of the names of metrics."""
    return name.isprintable() and name == name.strip() and 0 < len(name) <= MAX_SOURCE_NAME


class Task(Protocol):
    """Makes prompts that are named by (split, index, seed), so that a lease needs to carry no text.

    The same three give the same prompt in every process. `train` and `eval` never share a prompt.

    A task with a fixed number of training prompts says so in an attribute `num_prompts`: their indices are 0
    .. num_prompts - 1, and the buffer walks through them in epochs. Without it, indices go on for ever.

    A task with a fixed number of held-out prompts says so in an attribute `num_eval_prompts` likewise.
    An evaluation set (`eval.sets`) of such a task asks each of them once.

    A task of several sources says so in an attribute `sources`, a sequence of `PromptSource`. With n sources,
    index i means row i // n of source i % n. It is read once, at the start of a run, and kept with the run.

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
