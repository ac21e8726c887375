"""The tasks. A file with a class `Task` here, or in `generators/environments/`, is a task of the file's name;
`module:Class` names any other."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.plugins import call_plugin, find_plugin

FOLDERS = ("tasks", "environments")
"""Folders of `generators` that hold shipped tasks. No two files have one name."""


def load_task(name: str, args: Mapping[str, Any]) -> Any:
    """Makes the task. Raises ValueError that names `task.name` or `task.args`, the rule and the value."""
    return call_plugin(find_task_class(name), name, args, "task.args")


def find_task_class(name: str) -> type:
    """Returns the class that `task.name` names. Raises ValueError that names it, the rule and the value."""
    return find_plugin(name, list_tasks(), "task.name")


def list_tasks() -> dict[str, str]:
    """Returns the shipped tasks: `module:Class` by name."""
    root = Path(__file__).parents[1]
    return {
        path.stem: f"generators.{folder}.{path.stem}:Task"
        for folder in FOLDERS
        for path in sorted((root / folder).glob("[a-z]*.py"))
    }
