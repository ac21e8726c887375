"""Trackio, which keeps runs in a database on this machine, or on a Hugging Face Space."""

import contextlib
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trackio

from slipstream.tracking.tracker import COLUMNS, OpenedRun, SampleRow, TrackedRun, list_cells


class TrackioRun:
    def __init__(self, space: str | None, private: bool) -> None:
        self._space, self._private = space, private

    def open(self, run: TrackedRun) -> OpenedRun:
        name = self._name = run.id or self._find_free_name(run)
        trackio.init(
            project=run.project,
            name=name,
            space_id=self._space,
            private=self._private,
            config=run.config
            | {"run_folder": f"{run.host}:{run.folder}", "machine": run.machine, "tags": run.tags},
            resume="allow" if run.id else "never",
            embed=False,
        )
        return OpenedRun(id=name, place=self._space or f"trackio show --project {run.project}")

    def _find_free_name(self, run: TrackedRun) -> str:
        """Returns the run's name, or one that follows from it: the library goes on with a run by its name."""
        taken = set[str]()
        with contextlib.suppress(ValueError):  # the project is new
            taken = {one.name for one in trackio.Api().runs(run.project)}
        names = (run.name if number == 1 else f"{run.name}-{number}" for number in itertools.count(1))
        return next(name for name in names if name not in taken)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        trackio.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[SampleRow]) -> None:
        rows = [list_cells(sample) for sample in samples]
        trackio.log({"samples": trackio.Table(columns=list(COLUMNS), data=rows)}, step=step)

    def close(self, status: str, summary: Mapping[str, Any], files: Sequence[str]) -> None:
        is_well = status in ("finished", "interrupted")
        try:
            trackio.alert(
                f"run {status}", level=trackio.AlertLevel.INFO if is_well else trackio.AlertLevel.ERROR
            )
            for path in files:
                # The library refuses other characters.
                name = re.sub(r"[^A-Za-z0-9._-]", "_", f"{self._name}-{Path(path).stem}")
                trackio.log_artifact(path, name=name, type="run")
        finally:
            # What waits to be written would be lost, whatever has failed above.
            trackio.finish()
