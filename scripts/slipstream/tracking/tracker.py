"""The protocol of a tracker, and the records that it is given."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec


class TrackedRun(msgspec.Struct, kw_only=True):
    """A run as a tracker is told of it."""

    name: str
    folder: str
    """The run's folder on `host`."""
    host: str
    outputs: str
    """Folder that holds this run and others."""
    project: str
    tags: list[str]
    config: dict[str, Any]
    """Every key of the resolved configuration, by section."""
    first_step: int
    """The step that is trained first: 0, or that of the checkpoint which the run goes on from."""
    machine: dict[str, str] = {}
    """Facts about the machine, as `scripts/check.sh` prints them."""
    id: str | None = None
    """The `id` that `open` has returned when the run was opened before; None at the first time."""
    num_records: int = 0
    """Number of tables and sets of metrics that earlier lives of the run have given to this tracker."""


class OpenedRun(msgspec.Struct, kw_only=True):
    """A run as the tracker knows it."""

    id: str
    """Name under which the tracker can go on with the run."""
    place: str = ""
    """Page or folder where the user finds the run."""


class SampleRow(msgspec.Struct, kw_only=True):
    """One sample of a group that a step has trained. Long texts are cut in the middle."""

    group: int
    source: str
    """Source of the prompt, or the task."""
    prompt: str
    reply: str
    reward: float
    components: dict[str, float]
    """Parts of the reward by name."""
    staleness: int
    """Staleness of its oldest token, in versions."""
    tokens: int
    """Number of sampled tokens."""
    stop: str
    """The end of the episode."""


class Tracker(Protocol):
    """Shows runs. Calls come one after the other: `open` first, `close` last.

    A tracker of your own is a class with these methods. It lives in a process of its own, whose output is
    `logs/tracker-NAME.log`. It is dropped, and the run goes on, when a call raises or lasts longer than
    `tracking.timeout_s`. No step and no evaluation comes twice, also where a run goes back and trains again.
    """

    def open(self, run: TrackedRun) -> OpenedRun | None:
        """Begins to show the run, or goes on with the run of this `run.id`. None stands for no id."""

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a trained step, or an evaluation (`eval/...`), whose `step` is its version.

        Evaluations come late: their steps may lie behind those of other metrics. Values may be NaN.
        """

    def log_samples(self, step: int, samples: Sequence[SampleRow]) -> None:
        """Takes a table of samples that this step has trained."""

    def close(self, status: str, summary: Mapping[str, Any], files: Sequence[str]) -> None:
        """Flushes everything. `status` is finished, failed, interrupted, or killed where the driver has died.

        `summary` is that of `summary.json`. `files` are paths worth keeping: `summary.json`, `curves.png`.
        """


COLUMNS = ("source", "prompt", "reply", "reward", "components", "staleness", "tokens", "stop", "group")
"""Columns of a table of samples."""


def list_cells(sample: SampleRow) -> list[str | float | int]:
    """Returns the cells of a sample's row, in the order of `COLUMNS`."""
    components = ", ".join(f"{name} {value:g}" for name, value in sample.components.items())
    return [components if column == "components" else getattr(sample, column) for column in COLUMNS]


SECRET = re.compile(
    r"^key$|(api|access|secret|private)_?key$|(secret|token|password|passwd|credentials|authorization)$", re.I
)
"""Names of keys whose texts are nobody's business."""


def hide_secrets(value: Any, name: str = "") -> Any:
    """Returns the value without texts under such a name, and without the logins of addresses."""
    match value:
        case Mapping():
            return {str(key): hide_secrets(one, str(key)) for key, one in value.items()}
        case list():
            return [hide_secrets(one, name) for one in value]
        case str():
            return "(hidden)" if value and SECRET.search(name) else hide_login(value)
    return value


def hide_login(address: str) -> str:
    """Returns the address without the name and the password that it may hold."""
    return re.sub(r"//[^/@\s]*@", "//", address)


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns every key by its full name: `learner.lr`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= flatten_config(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return flat
