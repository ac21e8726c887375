"""`run`: the run's name, its folder, its length and its seed."""

from dataclasses import dataclass

from configs.rules import NOT_NEGATIVE, POSITIVE, Rule
from configs.setting import Condition, Section, setting

FOLDER_NAME = Rule(
    "a plain folder name", lambda name: bool(name) and "/" not in name and not name.startswith(".")
)


@dataclass(kw_only=True, slots=True)
class RunConfig(Section):
    """Name, folder, length and seed of a run."""

    name: str | None = setting(None, FOLDER_NAME)
    """Name of the run. Its folder is `<outputs>/<name>`. Null: task, algorithm and the time of day."""
    outputs: str = setting("outputs")
    """Folder that holds the runs."""
    overwrite: bool = setting(False)
    """Start anew in a folder that already holds a run. The old run is deleted."""
    resume: str | None = setting(None)
    """Folder of a run to continue. It goes on in that folder from its newest checkpoint, or from the
    beginning where it has none. Keys that are named beside it are changed, also for later. `auto`: the folder
    of `run.name` where it holds a run, else a new run begins there; so the same command may be started again
    and again."""
    steps: int = setting(320, POSITIVE)
    """Steps to train. Each step consumes `learner.groups_per_step` groups and publishes one new version."""
    seed: int = setting(0, NOT_NEGATIVE)
    """Seed of the prompt order, of every sampled trajectory and of the learner."""

    def conditions(self) -> list[Condition]:
        return [
            Condition(
                not (self.overwrite and self.resume is not None),
                "run.overwrite",
                "be false when run.resume is set",
                f"true with run.resume={self.resume}",
            )
        ]
