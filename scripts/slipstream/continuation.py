"""The same command again goes on with its run: `run.resume=auto`, with which the files in `scripts/cluster/`
start runs that may be stopped and queued again."""

import json
from collections.abc import Sequence
from pathlib import Path

from buffers.files import replace_file
from configs.load import load_config, load_resumed_config

AUTO = "run.resume=auto"
COMMAND_FILE = "command.json"
"""Lists the overrides with which a run was started and resumed."""
SUMMARY_FILE = "summary.json"


class AlreadyFinished(Exception):
    """The run of this name has trained all its steps."""


def continue_run(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides with a folder in the place of `auto` where the folder of `run.name` holds a run,
    and without `auto` where it does not.

    Of a run that goes on, overrides that it was started with are left out: its `config.yaml` holds what they
    said. Raises AlreadyFinished, and ValueError for a run without a name.
    """
    if AUTO not in overrides:
        return list(overrides)
    others = [override for override in overrides if override != AUTO]
    config = load_config(others)
    if config.run.name is None:
        raise ValueError(f"run.name must be set with {AUTO} (the run is found by its name), got none")
    folder = Path(config.run.outputs) / config.run.name
    if not (folder / "config.yaml").is_file():
        # A command that was killed before its run had begun leaves the folder.
        return [*others, "run.overwrite=true"]
    known = read_command(folder)
    changed = [override for override in others if override not in known]
    steps = load_resumed_config(folder, changed).run.steps
    if has_finished(folder, steps):
        raise AlreadyFinished(f"{folder} has trained its {steps} steps already")
    return [*changed, f"run.resume={folder}"]


def has_finished(folder: Path, steps: int) -> bool:
    """True when the run has ended well after so many steps, or more."""
    path = folder / SUMMARY_FILE
    if not path.is_file():
        return False
    summary = json.loads(path.read_text())
    return bool(summary["status"] == "finished" and summary["steps"] >= steps)


def read_command(folder: Path) -> list[str]:
    path = folder / COMMAND_FILE
    return list(json.loads(path.read_text())) if path.is_file() else []


def note_command(folder: Path, overrides: Sequence[str]) -> None:
    """Adds overrides to those that the run in `folder` was started and resumed with."""
    known = read_command(folder)
    new = [
        one for one in overrides if one not in known and not one.startswith(("run.resume=", "run.overwrite="))
    ]
    # A key that is changed and changed back must count again.
    keys = {one.partition("=")[0] for one in new}
    kept = [one for one in known if one.partition("=")[0] not in keys]
    if new:
        replace_file(folder / COMMAND_FILE, json.dumps([*kept, *new], indent=1).encode())
