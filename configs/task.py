"""`task`: the prompts and the reward."""

from dataclasses import dataclass
from typing import Any

from configs.rules import POSITIVE
from configs.setting import Section, setting


@dataclass(kw_only=True, slots=True)
class TaskConfig(Section):
    """The prompts and the reward."""

    name: str = setting("sorting")
    """A file of `generators/tasks/` or `generators/environments/`, or `module:Class` for a task of your
    own. `task=NAME` is short for it."""
    args: dict[str, Any] = setting({})
    """Keyword arguments for the task's class: `task.args.numbers=4`."""
    size: int | None = setting(None, POSITIVE)
    """Number of training prompts. Epochs walk through them, each in an order of its own. Null: the
    `num_prompts` of the task, or prompts without end."""
    sources: list[Any] = setting([])
    """The task's sources of prompts, `{name, size, weight, level}` each: found at the start of a run,
    and kept with it. Not for the command line."""
    versions: dict[str, str] = setting({})
    """Versions of the packages that make the task's prompts, found and kept so too. A resumed run, and a
    generator that joins, warn where theirs are others."""
