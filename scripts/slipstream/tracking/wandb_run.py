"""Weights & Biases."""

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from slipstream.tracking.tracker import COLUMNS, OpenedRun, SampleRow, TrackedRun, list_cells

STEP = "trainer/step"
"""The axis of all charts. The library's own step may only grow: it counts records here."""


class WandbRun:
    def __init__(self, mode: str | None, entity: str | None, group: str | None) -> None:
        self._mode: Any = mode
        self._entity, self._group = entity, group
        self._num_records = 0

    def open(self, run: TrackedRun) -> OpenedRun:
        self._run = wandb.init(
            project=run.project,
            entity=self._entity,
            group=self._group,
            name=run.name,
            id=run.id or uuid.uuid4().hex[:12],
            resume="allow",
            mode=self._mode,
            dir=run.folder,
            tags=run.tags or None,
            settings=wandb.Settings(console="off"),
        )
        facts = {"run_folder": f"{run.host}:{run.folder}", "machine": run.machine}
        self._run.config.update(run.config | facts, allow_val_change=True)
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        # A run that goes on without the server, offline, would count from 0 again.
        self._num_records = max(run.num_records, self._run.step)
        return OpenedRun(id=self._run.id, place=self._run.url or str(Path(self._run.dir).parent))

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log_record({STEP: step, **metrics})

    def log_samples(self, step: int, samples: Sequence[SampleRow]) -> None:
        table = wandb.Table(columns=list(COLUMNS), data=[list_cells(sample) for sample in samples])
        self._log_record({STEP: step, "samples": table})

    def _log_record(self, record: dict[str, Any]) -> None:
        self._run.log(record, step=self._num_records)
        self._num_records += 1

    def close(self, status: str, summary: Mapping[str, Any], files: Sequence[str]) -> None:
        self._run.summary["status"] = status
        for path in files:
            self._run.save(path, base_path=str(Path(path).parent), policy="now")
        exit_code = 0 if status == "finished" else 1
        self._run.finish(exit_code=exit_code)
        # `finish` does not wait until the library's own process has written the run's file to its end.
        wandb.teardown(exit_code=exit_code)
