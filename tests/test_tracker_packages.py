"""The real packages of trackers, offline: what they were given is in the files that they write, once."""

import importlib.util
import json
import os
import sqlite3
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracked_folders import TrackedFolder, wait_until

from configs.load import load_config
from slipstream.stop_signals import StopSignals
from slipstream.tracking.trackers import make_opening

MARK = "SLIPSTREAM_TRACKER_TEST"
FIRST_LIFE = """
for step in range(3):
    odd = {"data/數學<500/../b//c": 7.0, "data/數學>500/../b//c": 8.0}
    trackers.log_metrics(step, odd | {"reward/mean": step / 4, "loss": float("nan")})
trackers.log_metrics(2, {"eval/reward": 0.5}, is_evaluation=True)
row = SampleRow(
    group=3, source="sums", prompt="1 + 1\\n=", reply=" 2<|end|>", reward=1.0, components={"right": 1.0},
    staleness=1, tokens=2, stop="completed",
)
for tracker in trackers._remote:
    tracker.log_record(LogSamples(step=2, samples=[row]))
while any(one["logged"] + one["lost"] < 5 for one in list(trackers.describe_each().values())[1:]):
    time.sleep(0.01)
trackers.flush_files()
Path(sys.argv[2], "all logged").touch()
"""


@dataclass
class Shown:
    """A run as a tracker's files hold it."""

    runs: set[str] = field(default_factory=set)
    metrics: list[tuple[str, int, float]] = field(default_factory=list)
    """(name, step, value), as often as they are there."""
    config: dict[str, Any] = field(default_factory=dict)
    """By the keys' full names."""
    ends: list[str] = field(default_factory=list)
    samples: str = ""
    """The text of the tables."""
    files: set[str] = field(default_factory=set)


def read_wandb_records(path: Path) -> Iterator[Any]:
    """Yields the records of an offline run: a log of LevelDB, whose records may span blocks."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def read_wandb(folder: Path) -> Shown:
    shown, rows = Shown(), []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        ends = list[str]()
        for record in read_wandb_records(path):
            match record.WhichOneof("record_type"):
                case "run":
                    shown.runs.add(record.run.run_id)
                case "config":
                    for item in record.config.update:
                        shown.config[item.key] = json.loads(item.value_json)
                case "history":
                    row = {
                        item.key or "/".join(item.nested_key): item.value_json for item in record.history.item
                    }
                    rows.append((record.history.step.num, int(row["trainer/step"])))
                    shown.metrics += [
                        (name, rows[-1][1], float(json.loads(value.replace("NaN", '"nan"'))))
                        for name, value in row.items()
                        if name[0] not in "_st"
                    ]
                case "summary":
                    for item in record.summary.update:
                        ends += [json.loads(item.value_json)] if item.key == "status" else []
        shown.ends += ends[-1:]
        files = path.parent / "files"
        shown.samples += "".join(table.read_text() for table in files.glob("media/table/samples*"))
        shown.files |= {file.name for file in files.iterdir()}
    assert [number for number, _ in rows] == list(range(len(rows))), "the library drops rows that go back"
    shown.config |= {f"learner.{key}": value for key, value in shown.config["learner"].items()}
    return shown


def read_mlflow(folder: Path) -> Shown:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder.parent}/mlflow.db")
    (experiment,) = (one for one in client.search_experiments() if one.name == "tests")
    (run,) = client.search_runs([experiment.experiment_id])
    history = [one for name in run.data.metrics for one in client.get_metric_history(run.info.run_id, name)]
    tables = [
        Path(client.download_artifacts(run.info.run_id, one.path))
        for one in client.list_artifacts(run.info.run_id, "samples")
    ]
    return Shown(
        runs={run.info.run_id},
        metrics=[(one.key, one.step, one.value) for one in history],
        config=run.data.params | run.data.tags,
        ends=[run.info.status, run.data.tags["status"]],
        samples="".join(table.read_text() for table in tables),
        files={one.path for one in client.list_artifacts(run.info.run_id)},
    )


def read_trackio(folder: Path) -> Shown:
    shown, (path,) = Shown(), folder.parent.glob("trackio/tests.db")
    with sqlite3.connect(path) as database:
        for run, step, text in database.execute("SELECT run_id, step, metrics FROM metrics"):
            shown.runs.add(run)
            for name, value in json.loads(text).items():
                if name == "samples":
                    shown.samples += json.dumps(value)
                else:
                    shown.metrics.append((name, step, float(value)))
        shown.config = json.loads(database.execute("SELECT config FROM configs").fetchone()[0])
        shown.ends = [title for (title,) in database.execute("SELECT title FROM alerts ORDER BY id")]
    shown.config |= {f"learner.{key}": value for key, value in shown.config["learner"].items()}
    shown.files = (
        {"summary.json", "curves.png"} if list(folder.parent.glob("trackio/artifacts/**/*")) else set()
    )
    return shown


ENDS = {
    "wandb": ["killed", "finished"],
    "mlflow": ["FINISHED", "finished"],
    "trackio": ["run killed", "run finished"],
}


def skip_without(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: it comes with the extra `test`")


def list_marked_processes(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="module")
def twice_started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TrackedFolder, dict[str, Any]]]:
    """A run in two lives with all packages at once, the first of which was killed, and how it ended."""
    names = [name for name in ENDS if importlib.util.find_spec(name) is not None]
    if not names:
        pytest.skip("no package of a tracker is installed: they come with the extra `test`")
    folder, root = tmp_path_factory.mktemp("tracked"), Path(__file__).parents[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, str(folder))
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        patch.setenv("WANDB_MODE", "online")  # the key stands above it
        patch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(root / "scripts")]))
        run = TrackedFolder(
            folder / "run",
            f"tracking.trackers=[tensorboard,{','.join(names)}]",
            "tracking.wandb.mode=offline",
            "tracking.project=tests",
            "tracking.tags=[a tag,another]",
            "tracking.timeout_s=300",
            "learner.lr=0.03125",
            "task.args={token: hush}",
        )
        run.config.run.name = "a run: lr = 1e-6, 1+1 ü"
        driver = run.start_driver(FIRST_LIFE, leave_s=300.0)
        wait_until(lambda: (run.folder / "all logged").exists(), "records")
        driver.kill()
        driver.wait()
        (run.folder / "summary.json").write_text('{"steps": 5}')
        (run.folder / "curves.png").write_bytes(b"png")
        trackers = run.start(first_step=1)
        for step in range(1, 5):
            trackers.log_metrics(step, {"reward/mean": step / 4})
        trackers.log_metrics(2, {"eval/reward": 0.5}, is_evaluation=True)
        trackers.finish("finished", StopSignals())
        trackers.close_files()
        told = trackers.describe_each()
        yield run, told


@pytest.mark.parametrize("name", ENDS)
def test_a_run_is_whole_in_the_files_of_a_tracker_after_a_kill_and_a_resumption(
    twice_started: tuple[TrackedFolder, dict[str, Any]], name: str
) -> None:
    skip_without(name)
    run, told = twice_started
    assert told[name] == {"status": "ok", "reason": None, "logged": 2, "lost": 0}, run.said
    assert not list_marked_processes(str(run.folder.parent))

    shown = {"wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}[name](run.folder)
    assert len(shown.runs) == 1
    rewards = sorted((step, value) for metric, step, value in shown.metrics if metric == "reward/mean")
    assert rewards == [(step, step / 4) for step in range(5)]
    assert [one for one in shown.metrics if one[0] == "eval/reward"] == [("eval/reward", 2, 0.5)]
    losses = [value for metric, _, value in shown.metrics if metric == "loss"]
    assert len(losses) == 3 and all(value != value for value in losses)
    odd = {metric for metric, _, value in shown.metrics if value in (7.0, 8.0)}
    assert len(odd) == 2, "a name of any kind is kept, and two stay two"
    assert float(shown.config["learner.lr"]) == 0.03125 and "hush" not in repr(shown.config)
    assert str(shown.config["run_folder"]).endswith(f":{run.folder}")
    assert shown.ends == ENDS[name]
    assert {"summary.json", "curves.png"} <= shown.files
    assert "1 + 1" in shown.samples and "2<|end|>" in shown.samples and "right 1" in shown.samples


def test_tensorboard_has_each_step_once_and_the_configuration_and_the_folder(
    twice_started: tuple[TrackedFolder, dict[str, Any]],
) -> None:
    run, _ = twice_started
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    rewards = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert rewards == [(step, step / 4) for step in range(5)]
    config, folder = (
        events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in ("config", "run_folder")
    )
    assert "      lr: 0.03125\n" in config and "hush" not in config
    assert folder.endswith(f":{run.folder}")


def test_what_trackio_waits_to_write_is_written_whatever_fails_and_its_space_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = dict[str, Any]()

    def refuse_artifact(*arguments: object, **named: object) -> None:
        raise ValueError("no such artifact")

    library: Any = ModuleType("trackio")
    library.init, library.alert = lambda **named: calls.update(named), lambda *arguments, **named: None
    library.AlertLevel, library.log_artifact = MagicMock(), refuse_artifact
    library.finish = lambda: calls.update(was_finished=True)
    monkeypatch.setitem(sys.modules, "trackio", library)
    monkeypatch.delitem(sys.modules, "slipstream.tracking.trackio_run", raising=False)
    from slipstream.tracking.trackio_run import TrackioRun

    monkeypatch.delitem(sys.modules, "slipstream.tracking.trackio_run")
    config = load_config(["tracking.trackers=[trackio]", "tracking.trackio.space=me/mine"])
    opening = make_opening(config, tmp_path, 0, "trackio")
    opening.run.id = "known"
    tracker = TrackioRun(**opening.args)
    tracker.open(opening.run)
    with pytest.raises(ValueError, match="no such artifact"):
        tracker.close("finished", {}, ["summary.json"])
    assert calls["was_finished"] and calls["private"] and calls["space_id"] == "me/mine"


@given(st.one_of(st.text(max_size=300), st.text(alphabet="ab./\\ :-_%~", max_size=12)))
def test_mlflow_takes_metrics_of_any_name(name: str) -> None:
    skip_without("mlflow")
    from mlflow.entities import Metric
    from mlflow.utils.validation import _validate_metric

    from slipstream.tracking.mlflow_run import clean_name

    metric = Metric(clean_name(name), 1.0, 0, 0)
    _validate_metric(metric.key, metric.value, metric.timestamp, metric.step)
