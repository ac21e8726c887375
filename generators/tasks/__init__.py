"""The tasks. A file here with a class `Task` is a task of the file's name; `module:Class` names any other."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.plugins import call_plugin, find_plugin
from generators.task import Task


def load_task(name: str, args: Mapping[str, Any]) -> Task:
    """Makes the task. Raises ValueError that names `task.name` or `task.args`, the rule and the value."""
    task: Task = call_plugin(find_task_class(name), name, args, "task.args")
    return task


def find_task_class(name: str) -> type:
    """Returns the class that `task.name` names. Raises ValueError that names it, the rule and the value."""
    files = Path(__file__).parent.glob("[a-z]*.py")
    known = {path.stem: f"{__name__}.{path.stem}:Task" for path in files}
    return find_plugin(name, known, "task.name")
