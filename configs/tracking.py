"""`tracking`: where a run's metrics go, beside its folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from configs.rules import POSITIVE, Rule
from configs.setting import Section, section, setting

TENSORBOARD = "tensorboard"
TRACKER_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
"""Import name of the package that a tracker needs, by the tracker's name, which is also that of the extra."""


def _are_trackers(names: Sequence[str]) -> bool:
    known = {TENSORBOARD, *TRACKER_PACKAGES}
    return len(set(names)) == len(names) and all(_names_class(name) or name in known for name in names)


def _names_class(name: str) -> bool:
    place, _, class_name = name.rpartition(":")
    return bool(place) and class_name.isidentifier()


class WandbMode(StrEnum):
    online = "online"
    """Metrics go to the server at once."""
    offline = "offline"
    """Metrics stay in the run's folder until `wandb sync`."""


@dataclass(kw_only=True, slots=True)
class WandbConfig(Section):
    """Settings of the tracker `wandb`."""

    mode: WandbMode | None = setting(None)
    """Null: as the library decides (`WANDB_MODE`; online)."""
    entity: str | None = setting(None)
    """User or team that the run belongs to. Null: as the library decides (`WANDB_ENTITY`; your default)."""
    group: str | None = setting(None)
    """Name under which the library's pages show several runs together."""


@dataclass(kw_only=True, slots=True)
class MlflowConfig(Section):
    """Settings of the tracker `mlflow`."""

    uri: str | None = setting(None)
    """Server or database: `http://HOST:5000`, `sqlite:////PATH/mlflow.db`. Null: `MLFLOW_TRACKING_URI`, else
    the file `mlflow.db` in `run.outputs`."""


@dataclass(kw_only=True, slots=True)
class TrackioConfig(Section):
    """Settings of the tracker `trackio`."""

    space: str | None = setting(None)
    """Hugging Face Space that shows the run: `USER/NAME`. Null: `TRACKIO_SPACE_ID`, else a database on this
    machine (`TRACKIO_DIR`)."""
    private: bool = setting(True)
    """Whether a Space that does not exist yet is made private. The library's own default is a public one."""


@dataclass(kw_only=True, slots=True)
class SampleTables(Section):
    """The tables of samples, which the driver reads from the journal."""

    count: int = setting(4, Rule("in 0 .. 64", lambda count: 0 <= count <= 64))
    """Samples of a table, each of another group as far as there are as many. 0: no tables."""
    every: int = setting(10, POSITIVE)
    """Steps from one table to the next."""


@dataclass(kw_only=True, slots=True)
class TrackingConfig(Section):
    """The trackers that a run's metrics go to."""

    trackers: list[str] = setting(
        [TENSORBOARD],
        Rule(
            f"a list of {TENSORBOARD}, {', '.join(TRACKER_PACKAGES)}, module:Class, path.py:Class, each once",
            _are_trackers,
        ),
    )
    """Any of `tensorboard`, `wandb`, `mlflow` and `trackio` (each but the first an extra of that name),
    several at once, and `module:Class` or `path.py:Class` for one of your own."""
    args: dict[str, Any] = setting({})
    """Keyword arguments for your own tracker's class: `tracking.args.url=...`."""
    project: str = setting("slipstream", Rule("a name", lambda name: bool(name.strip())))
    """Project of wandb and trackio, experiment of mlflow."""
    tags: list[str] = setting([])
    """Words by which the trackers find the run."""
    samples: SampleTables = section(SampleTables)
    timeout_s: float = setting(60.0, POSITIVE)
    """Seconds that a tracker may take to begin, for one record, and at the end of the run for all that is
    left. A tracker that takes longer is dropped, and the run goes on without it."""
    wandb: WandbConfig = section(WandbConfig)
    mlflow: MlflowConfig = section(MlflowConfig)
    trackio: TrackioConfig = section(TrackioConfig)
