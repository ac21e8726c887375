"""The tasks. A file here with a class `Task` is a task of the file's name; `module:Class` names any other."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.plugins import make_plugin
from generators.task import Task


def load_task(name: str, args: Mapping[str, Any]) -> Task:
    """Makes the task. Raises ValueError that names `task.name` or `task.args`, the rule and the value."""
    files = Path(__file__).parent.glob("[a-z]*.py")
    known = {path.stem: f"{__name__}.{path.stem}:Task" for path in files}
    task: Task = make_plugin(name, args, known, "task.name", "task.args")
    return task
