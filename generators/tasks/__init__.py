"""The tasks. A file here that holds a class `Task` is a task by the file's name; `module:Class` names one anywhere else."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from generators.task import Task


def load_task(name: str, args: Mapping[str, Any]) -> Task:
    """Raises ValueError that names `task.name` or `task.args`, the rule and the value."""
    module, _, class_name = name.partition(":")
    known = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    if not class_name:
        if name not in known:
            raise ValueError(f"task.name must be one of {known}, or read module:Class, got {name!r}")
        module, class_name = f"{__name__}.{name}", "Task"
    try:
        task_class = getattr(importlib.import_module(module), class_name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(
            f"task.name must name a class that can be imported, got {name!r}: {error}"
        ) from error
    if not isinstance(task_class, type):
        raise ValueError(f"task.name must name a class, got {name!r}, which is a {type(task_class).__name__}")
    try:
        return task_class(**args)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(
            f"task.args must suit {class_name} of {module}, got {dict(args)}: {error}"
        ) from error
