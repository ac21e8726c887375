"""All trackers of a run, as the driver sees them. None of them can stop or slow the run."""

import dataclasses
import json
import re
import socket
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import OmegaConf

from buffers.message_fields import GroupSlice
from configs.disk import DiskFull
from configs.generators import EngineKind
from configs.load import dump_values, to_yaml
from configs.schema import Config
from configs.tracking import TENSORBOARD, TRACKER_PACKAGES
from slipstream.stop_signals import Interrupted, StopSignals
from slipstream.tracking.orders import CloseRun, LogMetrics, LogSamples, OpenRun
from slipstream.tracking.remote import RemoteTracker, try_tracker
from slipstream.tracking.samples import SampleReader
from slipstream.tracking.tensorboard_files import TensorBoardFiles
from slipstream.tracking.tracker import TrackedRun, hide_secrets

HURRIED_S = 3.0
"""Seconds that trackers have to end when the user has asked a second time."""


class Trackers:
    """Call `start` once, `log_*` with all that comes, and `finish` with how the run has ended.

    Raises DiskFull where TensorBoard's files find the disk full, as the run's other files would.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        first_step: int,
        say: Callable[[str], None],
        before: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """`before` is `trackers` of the summary that the run has so far."""
        self._config, self._folder, self._say, self._before = config, folder, say, before
        self._files = (
            TensorBoardFiles(
                folder / "tensorboard", first_step, list_texts(describe_run(config, folder, first_step))
            )
            if TENSORBOARD in config.tracking.trackers
            else None
        )
        self._num_in_files = self._num_lost_in_files = 0
        self._files_reason: str | None = None
        """Why TensorBoard was dropped; None while it is not."""
        self._remote = [
            RemoteTracker(
                name,
                make_opening(config, folder, first_step, name),
                folder / "logs" / f"tracker-{make_file_name(name)}.log",
                config.tracking.timeout_s,
                say,
            )
            for name in config.tracking.trackers
            if name != TENSORBOARD
        ]
        self._reader: SampleReader | None = None
        # The samples of a simulated engine hold no text.
        self._reads_samples = (
            bool(config.tracking.trackers) and config.generators.engine is not EngineKind.simulated
        )

    def start(self) -> None:
        if self._remote:
            (self._folder / "trackers").mkdir(parents=True, exist_ok=True)
            (self._folder / "logs").mkdir(parents=True, exist_ok=True)
        for tracker in self._remote:
            tracker.start()

    def log_metrics(self, step: int, metrics: Mapping[str, float], *, is_evaluation: bool = False) -> None:
        """`step` of an evaluation is its version."""
        self._write_files(lambda files: files.log_metrics(step, metrics), num_records=1)
        for tracker in self._remote:
            tracker.log_record(LogMetrics(step=step, metrics=dict(metrics), is_evaluation=is_evaluation))

    def log_samples(self, step: int, slices: Sequence[GroupSlice]) -> None:
        """Reads the samples from the journal, and hands them to the trackers."""
        if not slices or not self._reads_samples:
            return
        try:
            if self._reader is None:
                self._reader = SampleReader(self._config, self._folder / "journal")
            samples = self._reader.read_samples(step, slices)
        # A table of samples is worth no run: tokenizers raise what they like.
        except Exception as error:
            self._reads_samples = False
            self._say(f"trackers get no samples: {type(error).__name__}: {error}")
            return
        if not samples:
            return
        self._write_files(lambda files: files.log_samples(step, samples), num_records=1)
        for tracker in self._remote:
            tracker.log_record(LogSamples(step=step, samples=samples))

    def flush_files(self) -> None:
        self._write_files(TensorBoardFiles.flush)

    def rewind_to_step(self, step: int) -> None:
        """Steps from `step` on are trained again. Other trackers keep them as they were logged first."""
        self._write_files(lambda files: files.rewind_to_step(step))

    def close_files(self) -> None:
        self._write_files(TensorBoardFiles.close)

    def _write_files(self, write: Callable[[TensorBoardFiles], None], num_records: int = 0) -> None:
        """Writes TensorBoard's files. They are dropped where that fails, unless the disk is full."""
        if self._files is None:
            self._num_lost_in_files += num_records
            return
        try:
            write(self._files)
            self._num_in_files += num_records
        except DiskFull:
            raise
        except Exception as error:
            self._files, self._num_lost_in_files = None, self._num_lost_in_files + num_records
            self._files_reason = f"{type(error).__name__}: {error}"
            self._say(f"{TENSORBOARD} is dropped, and the run goes on without it: {self._files_reason}")

    def finish(self, status: str, signals: StopSignals) -> None:
        """Lets the trackers flush, for `tracking.timeout_s` at most, or until the second Ctrl-C. Leaves no
        process."""
        if not self._remote:
            return
        summary, curves = self._folder / "summary.json", self._folder / "curves.png"
        # Without TensorBoard's files the picture is none, or an older one.
        files = [summary, curves] if self._files is not None else [summary]
        order = CloseRun(
            status=status,
            summary=json.loads(summary.read_text()) if summary.exists() else {},
            files=[str(path) for path in files if path.exists()],
        )
        for tracker in self._remote:
            tracker.ask_to_close(order)
        reason = self._wait_for_ends(signals)
        for tracker in self._remote:
            tracker.kill(reason)

    def _wait_for_ends(self, signals: StopSignals) -> str:
        """Returns why those that have not ended by now are to be killed."""
        timeout_s = self._config.tracking.timeout_s
        wait_s = min(HURRIED_S, timeout_s) if signals.was_hurried else timeout_s
        deadline, said = time.monotonic() + wait_s, False
        try:
            while left := [tracker.name for tracker in self._remote if not tracker.has_ended]:
                if (now := time.monotonic()) > deadline:
                    return f"it took longer than {wait_s:g} s to end"
                if not said and now > deadline - wait_s + 1.0:
                    said = True
                    again = " again" if signals.received else " twice"
                    self._say(
                        f"waiting for {', '.join(left)}, at most {wait_s:g} s (Ctrl-C{again}: not at all)"
                    )
                with signals.interruptible():
                    time.sleep(0.05)
        except Interrupted:
            return "the run was told to end at once"
        return ""

    def describe_each(self) -> dict[str, dict[str, Any]]:
        """Returns the trackers as in the summary. Counts are of all lives of the run."""
        found = {
            tracker.name: {
                "status": "ok" if tracker.reason is None else "dropped",
                "reason": tracker.reason,
                "logged": tracker.num_logged,
                "lost": tracker.num_lost,
            }
            for tracker in self._remote
        }
        found[TENSORBOARD] = {
            "status": "ok" if self._files_reason is None else "dropped",
            "reason": self._files_reason,
            "logged": self._num_in_files,
            "lost": self._num_lost_in_files,
        }
        for name, one in found.items():
            for count in ("logged", "lost"):
                one[count] += self._before.get(name, {}).get(count, 0)
        return {name: found[name] for name in self._config.tracking.trackers}

    def describe_losses(self) -> list[str]:
        """Returns a line for each tracker that lacks something."""
        return [
            (f"{name} was dropped: {one['reason']}; it" if one["reason"] else name)
            + f" lacks {one['lost']} of {one['logged'] + one['lost']} records"
            for name, one in self.describe_each().items()
            if one["reason"] or one["lost"]
        ]


def check_own_trackers(config: Config) -> None:
    """Makes each tracker of the user's own once, in a process of its own.

    Raises ValueError, in the words of the configuration, where that fails or takes longer than
    `tracking.timeout_s`.
    """
    for name in config.tracking.trackers:
        if name != TENSORBOARD and name not in TRACKER_PACKAGES:
            opening = make_opening(config, Path(config.run.outputs), 0, name)
            try_tracker(name, msgspec.structs.replace(opening, ledger=""), config.tracking.timeout_s)


def make_opening(config: Config, folder: Path, first_step: int, name: str) -> OpenRun:
    """Returns the first order to a tracker."""
    tracking = config.tracking
    return OpenRun(
        target=name,
        args=dataclasses.asdict(getattr(tracking, name)) if name in TRACKER_PACKAGES else tracking.args,
        run=describe_run(config, folder, first_step),
        ledger=str(folder / "trackers" / f"{make_file_name(name)}.jsonl"),
    )


def describe_run(config: Config, folder: Path, first_step: int) -> TrackedRun:
    keys = OmegaConf.to_container(OmegaConf.create(to_yaml(config)), resolve=True)
    assert isinstance(keys, dict)
    # What one tracker needs to log in is no other tracker's business.
    del keys["tracking"]["args"], keys["tracking"]["mlflow"]["uri"]
    return TrackedRun(
        name=config.run.name or folder.name,
        folder=str(folder),
        host=socket.gethostname(),
        outputs=str(folder.parent),
        project=config.tracking.project,
        tags=list(config.tracking.tags),
        config=hide_secrets(keys),
        first_step=first_step,
    )


def list_texts(run: TrackedRun) -> dict[str, str]:
    """Returns what TensorBoard shows of a run beside its steps, as Markdown, by tag."""
    code = {"run_folder": f"{run.host}:{run.folder}", "config": dump_values(run.config)}
    return {tag: textwrap.indent(text, "    ") for tag, text in code.items()}


def make_file_name(name: str) -> str:
    """Returns a tracker's name as a file can have it."""
    return re.sub(r"[^\w.-]+", "_", name).strip("_")
