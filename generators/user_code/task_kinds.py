"""The kinds of class that `task.name` may name, told apart by their methods."""

import inspect
import math
import operator
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from generators.plain_values import show_value
from generators.task import SOURCE_NAME_RULE, PromptSource, is_source_name


class TaskKind(StrEnum):
    one_turn = "one_turn"
    """`generators.task.Task`: makes prompts and scores responses."""
    environment = "environment"
    """`generators.environment.Environment`: one instance plays one episode."""
    environments = "environments"
    """`generators.environment.EnvironmentTask`: makes rows and environments."""
    agent = "agent"
    """Makes rows, and runs an agent that speaks with the gateway."""


_METHODS = {
    TaskKind.one_turn: ("make_prompt", "score_response"),
    TaskKind.environment: ("reset", "step", "close"),
    TaskKind.environments: ("make_row", "make_environment"),
}
AGENT_STARTS = ("agent_command", "run_agent")
"""An agent task has one of these, and `make_row`."""


def find_kind(task_class: type, name: str) -> TaskKind:
    """Raises ValueError that names `task.name` and the methods that the class lacks."""
    starts = [start for start in AGENT_STARTS if _has_member(task_class, start)]
    if len(starts) > 1:
        raise ValueError(
            f"task.name must name a class with agent_command or run_agent, got {name!r} with both"
        )
    if starts:
        if not _has_member(task_class, "make_row"):
            raise ValueError(
                f"task.name must name a class with make_row beside {starts[0]}, got {name!r} without "
                "`make_row`"
            )
        return TaskKind.agent
    missing = {
        kind: [method for method in methods if not callable(getattr(task_class, method, None))]
        for kind, methods in _METHODS.items()
    }
    if whole := [kind for kind, lacking in missing.items() if not lacking]:
        if whole[0] is TaskKind.environment:
            _require_class_methods(task_class, name)
        return whole[0]
    # The kind that the class comes closest to says best what it lacks.
    closest = min(missing, key=lambda kind: len(missing[kind]) / len(_METHODS[kind]))
    lacking = " and ".join(f"`{method}`" for method in missing[closest])
    raise ValueError(
        "task.name must name a class with make_prompt and score_response, or reset, step and close, or "
        f"make_row and make_environment, got {name!r} without {lacking}"
    )


def check_environment(made: Any) -> Any:
    """Returns what `make_environment` has made. Raises ValueError for what is no environment."""
    methods = _METHODS[TaskKind.environment]
    missing = [method for method in methods if not callable(getattr(made, method, None))]
    if isinstance(made, type):
        raise ValueError(f"make_environment must return an environment, got the class {made.__name__}")
    if missing:
        lacking = " and ".join(f"`{method}`" for method in missing)
        raise ValueError(
            f"make_environment must return an environment, got {show_value(made)} without {lacking}"
        )
    return made


def read_num_prompts(task: Any, attribute: str = "num_prompts") -> int | None:
    """Returns the number of a task's training prompts (`num_eval_prompts`: of its held-out ones), None where
    there is no end of them. Raises ValueError for anything else."""
    value = getattr(task, attribute, None)
    if value is None:
        return None
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < 1:
        raise ValueError(f"{attribute} of a task must be a whole number above 0, got {show_value(value)}")
    return number


def find_size(task: Any, wanted: int | None) -> int | None:
    """Returns the number of training prompts in an epoch: `wanted`, or all that the task has. None: it has no
    end of them, or several sources. Raises ValueError where it has fewer than `wanted`."""
    known, sources = read_num_prompts(task), read_sources(task)
    most = known if known is not None or len(sources) != 1 else sources[0].size
    if wanted is not None and most is not None and wanted > most:
        raise ValueError(f"task.size must be at most the {most:,} prompts that the task has, got {wanted:,}")
    return known if wanted is None else wanted


def read_sources(task: Any) -> list[PromptSource]:
    """Returns the sources of a task; none where it says nothing of sources. Raises ValueError for anything
    else than `PromptSource`s with names of their own."""
    sources = getattr(task, "sources", None) or ()
    if not isinstance(sources, Sequence) or not all(isinstance(one, PromptSource) for one in sources):
        raise ValueError(
            "sources of a task must be a list of generators.task.PromptSource, got " + show_value(sources)
        )
    names = [one.name for one in sources]
    for place, one in enumerate(sources):
        field = f"sources[{place}]"
        if not isinstance(one.name, str) or not one.name or one.name in names[:place]:
            raise ValueError(f"{field}.name must be a text that no other source has, got {one.name!r}")
        if not is_source_name(one.name):
            raise ValueError(f"{field}.name must {SOURCE_NAME_RULE}, got {one.name!r}")
        if not isinstance(one.made_of, str):
            raise ValueError(f"{field}.made_of must be a text, got {one.made_of!r}")
        if not _is_number(one.weight) or not 0 < one.weight < math.inf:
            raise ValueError(f"{field}.weight must be a finite number above 0, got {one.weight!r}")
        if one.size is not None and (not _is_whole(one.size) or one.size < 1):
            raise ValueError(f"{field}.size must be a whole number above 0, or None, got {one.size!r}")
        if one.level is not None and not _is_whole(one.level):
            raise ValueError(f"{field}.level must be a whole number, or None, got {one.level!r}")
    return list(sources)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or isinstance(value, float)


def _require_class_methods(environment_class: type, name: str) -> None:
    """Raises ValueError for a method of all episodes that an environment has for itself alone."""
    for method in ("make_row", "score_group"):
        found = inspect.getattr_static(environment_class, method, None)
        if found is not None and not isinstance(found, staticmethod | classmethod):
            raise ValueError(
                f"task.name must name an environment whose {method} is a static or a class method (one "
                f"instance plays one episode), got {name!r} with another"
            )


def _has_member(task_class: Any, name: str) -> bool:
    return getattr(task_class, name, None) is not None
