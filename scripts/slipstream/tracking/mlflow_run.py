"""MLflow."""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from slipstream.tracking.tracker import (
    COLUMNS,
    OpenedRun,
    SampleRow,
    TrackedRun,
    flatten_config,
    hide_login,
    list_cells,
)

MAX_AT_ONCE = 100
"""Parameters in a request, by the library's limits; ten times as many metrics."""
MAX_PARAMS = 1000
"""Parameters of a run: the library looks at all of them with each request. The file has every key."""
MAX_NAME, MAX_PARAM, MAX_TAG = 250, 6000, 8000
"""Characters, by the library's limits."""
STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "killed": "KILLED"}


class MlflowRun:
    def __init__(self, uri: str | None) -> None:
        self._uri = uri

    def open(self, run: TrackedRun) -> OpenedRun:
        uri = self._uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.outputs}/mlflow.db"
        self._client = MlflowClient(tracking_uri=uri)
        if run.id is None:
            experiment = self._find_experiment(run, uri)
            self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
            texts = {clean_name(key): str(value) for key, value in flatten_config(run.config).items()}
            params = [Param(key, text[:MAX_PARAM]) for key, text in texts.items()][:MAX_PARAMS]
            for at in range(0, len(params), MAX_AT_ONCE):
                self._client.log_batch(self._id, params=params[at : at + MAX_AT_ONCE])
        else:
            self._id = run.id
            self._client.update_run(self._id, status="RUNNING")
        tags = {"run_folder": f"{run.host}:{run.folder}"}
        tags |= {f"machine.{name.replace(' ', '_')}": fact for name, fact in run.machine.items()}
        tags |= {clean_name(tag): "true" for tag in run.tags}
        self._client.log_batch(self._id, tags=[RunTag(key, value[:MAX_TAG]) for key, value in tags.items()])
        # Parameters cannot change, and what a resumed run has changed is in this file.
        self._client.log_dict(self._id, run.config, f"config_from_step_{run.first_step}.yaml")
        return OpenedRun(id=self._id, place=f"run {self._id} of {hide_login(uri)}")

    def _find_experiment(self, run: TrackedRun, uri: str) -> str:
        found = self._client.get_experiment_by_name(run.project)
        if found is not None:
            id: str = found.experiment_id
            return id
        # A local database would put files into the working directory.
        place = f"{Path(run.outputs).as_uri()}/mlruns" if uri.startswith("sqlite:") else None
        created: str = self._client.create_experiment(run.project, artifact_location=place)
        return created

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        batch = [Metric(clean_name(name), value, now, step) for name, value in metrics.items()]
        for at in range(0, len(batch), 10 * MAX_AT_ONCE):
            self._client.log_batch(self._id, metrics=batch[at : at + 10 * MAX_AT_ONCE])

    def log_samples(self, step: int, samples: Sequence[SampleRow]) -> None:
        # The form in which the library writes its own tables.
        table = {"columns": list(COLUMNS), "data": [list_cells(sample) for sample in samples]}
        self._client.log_text(self._id, json.dumps(table), f"samples/step_{step:06d}.json")

    def close(self, status: str, summary: Mapping[str, object], files: Sequence[str]) -> None:
        self._client.set_tag(self._id, "status", status)
        for path in files:
            self._client.log_artifact(self._id, path)
        self._client.set_terminated(self._id, STATUS[status])


def clean_name(name: str) -> str:
    """Returns the name with none of the parts that the library refuses, and characters as their codes: two
    sources `<500` and `>500` stay two."""
    parts = [re.sub(r"[^\w\-. :]", lambda found: f"_{ord(found[0]):x}_", part) for part in name.split("/")]
    kept = [part for part in parts if part.strip(". ")]
    return "/".join(kept).lstrip(".")[:MAX_NAME].rstrip("/") or "_"
