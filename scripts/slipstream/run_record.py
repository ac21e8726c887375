"""The files that a run leaves behind: `summary.json`, rewritten at every step, and TensorBoard's event files.

Definitions: `wall_s` is the driver's time; rates divide by the seconds since version 0 was published;
`reward.first` and `reward.last` are means over the first and the last (up to) five steps; `idle.learner` is
the share of its life that the learner waited for batches, `idle.generators` the share of their lives,
together, in which engines had nothing to do. `weights`: docs/weights.md.
"""

import contextlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from buffers import messages as m
from buffers.files import replace_file
from buffers.run_status import EvaluationRecord, RunStatus
from configs.disk import disk_full, is_disk_full
from configs.schema import Config

NUM_AVERAGED = 5
EVENT_BYTES = 1 << 16
"""Bytes that TensorBoard writes from one flush to the next, about."""


class RunRecord:
    """Writes `summary.json` and TensorBoard's files into one run's folder.

    Call `record_news` with all news as they come, and `close` with how the run ended. Both raise DiskFull.
    """

    def __init__(self, config: Config, folder: Path, resume_step: int | None) -> None:
        self._config, self._folder, self._first_step = config, folder, resume_step or 0
        self._began = time.monotonic()
        self._command_began = psutil.Process().create_time()
        self._start_s: dict[str, float] = {}
        self._writer: EventFileWriter | None = None
        self._rewards: dict[int, float] = {}
        """Mean reward by step."""
        self._publish_s: list[float] = []
        self._lags: dict[str, list[int]] = {}
        """Generator -> versions that it was behind at each recorded step, as far as it had reported."""
        self._purge_step, self._num_restarts = self._first_step, 0
        self._status: RunStatus | None = None
        self._before = self._read_before() if resume_step is not None else {}
        self._evaluations: dict[int, dict[str, Any]] = {
            one["version"]: one
            for one in self._before.get("evaluations", [])
            if one["version"] < self._first_step
        }
        """Summary entries by version, of all lives of the run."""
        self.num_steps = 0
        """Number of step records so far."""

    def note_milestone(self, what: str) -> None:
        """Notes the time at which this part of the start was done."""
        self._start_s[what] = round(time.time() - self._command_began, 3)

    @property
    def start_s(self) -> dict[str, float]:
        """Seconds from the command until each part of the run had started. Parts start side by side."""
        reached = {} if self._status is None else self._status.milestones
        return self._start_s | {what: round(at - self._command_began, 3) for what, at in reached.items()}

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """All evaluations so far as in the summary, in the order of their versions."""
        return [self._evaluations[version] for version in sorted(self._evaluations)]

    def _read_before(self) -> dict[str, Any]:
        path = self._folder / "summary.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def record_news(self, news: m.RunNews) -> None:
        self._status = news.status
        for record in news.records:
            self.num_steps += 1
            if (reward := record.metrics.get("reward/mean")) is not None:
                self._rewards[record.step] = reward
            self._log_metrics(record.step, record.metrics | {"time/seconds": record.time})
        for evaluation in news.evaluations:
            if evaluation.version not in self._evaluations:
                self._evaluations[evaluation.version] = summarize_evaluation(evaluation)
                self._log_metrics(evaluation.version, {"eval/reward": evaluation.reward})
        self._publish_s += [
            seconds
            for record in news.records
            if (seconds := record.metrics.get("weights/publish_s")) is not None
        ]
        if news.records:
            for name, report in news.status.generators.items():
                if report.version >= 0:
                    self._lags.setdefault(name, []).append(max(0, news.status.version - report.version))
            self._log_metrics(news.records[-1].step, list_status_metrics(news.status))
            # Before the summary: a driver that is killed has recorded every step that its summary knows.
            with self._name_full_disk():
                self._writer.flush()  # type: ignore[union-attr]
            self._write_summary("running")

    def rewind_to_step(self, step: int) -> None:
        """Voids the records of steps from `step` on: the learner was lost, and trains them again."""
        self._num_restarts += 1
        self._rewards = {trained: reward for trained, reward in self._rewards.items() if trained < step}
        self._evaluations = {version: one for version, one in self._evaluations.items() if version < step}
        self._close_writer()
        self._purge_step = step

    def close(self, status: str) -> None:
        try:
            if self._status is not None:
                self._write_summary(status)
        finally:
            self._close_writer()

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with self._name_full_disk():
                writer.close()

    @contextlib.contextmanager
    def _name_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if is_disk_full(error):
                raise disk_full(self._folder / "tensorboard", EVENT_BYTES) from error
            raise

    def _log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if self._writer is None:
            with self._name_full_disk():
                self._writer = EventFileWriter(str(self._folder / "tensorboard"), flush_secs=10)
            # Readers drop the events that older files have of this step and later ones.
            if self._purge_step is not None:
                start = SessionLog(status=SessionLog.START)
                self._writer.add_event(Event(wall_time=time.time(), step=self._purge_step, session_log=start))
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        # An error of the writer's own thread is raised here.
        with self._name_full_disk():
            self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _write_summary(self, status: str) -> None:
        assert self._status is not None
        summary = json.dumps(self.make_summary(self._status, status), indent=1) + "\n"
        replace_file(self._folder / "summary.json", summary.encode(), sync=False)

    def make_summary(self, news: RunStatus, status: str) -> dict[str, Any]:
        rewards = list(self._rewards.values())
        tokens, groups = news.tokens, news.groups
        seconds = max(news.elapsed_s, 1e-9)
        return {
            "mode": str(self._config.mode),
            "status": status,
            "steps": news.num_trained_steps,
            "version": news.version,
            "wall_s": round(time.monotonic() - self._began + self._before.get("wall_s", 0.0), 3),
            "start_s": self.start_s,
            "restarts": {"learner": self._before.get("restarts", {}).get("learner", 0) + self._num_restarts},
            "reward": {
                "first": self._before.get("reward", {}).get("first")
                or average_or_none(rewards[:NUM_AVERAGED]),
                "last": average_or_none(rewards[-NUM_AVERAGED:]),
            },
            "evaluations": self.evaluations,
            "tokens": {
                "generated": tokens.total,
                "trained": tokens.trained,
                "masked": tokens.masked,
                "rejected": tokens.rejected,
                "in_flight": tokens.in_flight,
            },
            "groups": {
                "leased": groups.total,
                "trained": groups.trained,
                "rejected": groups.rejected,
                "in_flight": groups.in_flight,
                "trained_twice": news.trained_twice,
            },
            "staleness": self._summarize_staleness(news),
            "throughput": {
                "generated_tokens_per_s": tokens.total / seconds,
                "trained_tokens_per_s": tokens.trained / seconds,
                "steps_per_s": (news.num_trained_steps - self._first_step) / seconds,
            },
            "idle": {"learner": news.learner_idle_share, "generators": news.generator_idle_share},
            "weights": self._summarize_weights(news),
        }

    def _summarize_staleness(self, news: RunStatus) -> dict[str, Any]:
        count = sum(news.staleness_histogram.values())
        return {
            "max_versions": self._config.max_versions,
            "admission_lag": news.admission_lag,
            "max": max(news.staleness_histogram, default=0),
            "mean": sum(k * n for k, n in news.staleness_histogram.items()) / count if count else 0.0,
            "histogram": {
                str(k): news.staleness_histogram.get(k, 0) for k in range(self._config.max_versions + 1)
            },
        }

    def _summarize_weights(self, news: RunStatus) -> dict[str, Any]:
        return {
            "updates": news.weight_updates,
            "bytes": news.weight_bytes,
            "fetched_bytes": news.fetched_bytes,
            "gb_per_s": compute_gb_per_s(news),
            "prepare_s_mean": news.prepare_s_mean,
            "pause_s_mean": news.pause_s_mean,
            "publish_s_mean": average_or_none(self._publish_s),
            "lag": {
                name: {"mean": average_or_none(lags), "max": max(lags)} for name, lags in self._lags.items()
            },
            "digest_checks": news.digest_checks,
            "digest_mismatches": news.digest_mismatches,
        }


def summarize_evaluation(evaluation: EvaluationRecord) -> dict[str, Any]:
    """Returns an evaluation with the 95 % interval of its mean (normal approximation)."""
    arm = 1.96 * evaluation.std / math.sqrt(evaluation.num_prompts)
    interval = [round(evaluation.reward - arm, 4), round(evaluation.reward + arm, 4)]
    return {
        "version": evaluation.version,
        "reward": round(evaluation.reward, 4),
        "n": evaluation.num_prompts,
        "ci95": interval,
    }


def list_status_metrics(status: RunStatus) -> dict[str, float]:
    """Lists the buffer's side of a step, for TensorBoard."""
    seconds = max(status.elapsed_s, 1e-9)
    metrics = {
        "throughput/generated_tokens_per_s": status.tokens.total / seconds,
        "throughput/trained_tokens_per_s": status.tokens.trained / seconds,
        "idle/learner": status.learner_idle_share,
        "idle/generators": status.generator_idle_share,
        "weights/bytes": status.weight_bytes,
        "weights/fetched_bytes": status.fetched_bytes,
        "weights/gb_per_s": compute_gb_per_s(status),
        "weights/prepare_s_mean": status.prepare_s_mean,
        "weights/pause_s_mean": status.pause_s_mean,
        "weights/digest_checks": status.digest_checks,
        "weights/digest_mismatches": status.digest_mismatches,
        "ledger/generated": status.tokens.total,
        "ledger/trained": status.tokens.trained,
        "ledger/masked": status.tokens.masked,
        "ledger/in_flight": status.tokens.in_flight,
    }
    metrics |= {f"ledger/rejected_{reason}": count for reason, count in status.tokens.rejected.items()}
    metrics["scoring/abandoned"] = status.abandoned_scores
    metrics["episode/discarded_tokens"] = status.discarded_tokens
    metrics |= {
        f"refused/{reason.replace(' ', '_')}": count for reason, count in status.refused_requests.items()
    }
    metrics |= {
        f"weights/lag_{name}": max(0, status.version - report.version)
        for name, report in status.generators.items()
        if report.version >= 0
    }
    return {name: float(value) for name, value in metrics.items()}


def compute_gb_per_s(status: RunStatus) -> float:
    """Bytes of the versions taken up, over the seconds from announced to in service (waiting for the engine
    left out)."""
    seconds = status.weight_updates * (status.prepare_s_mean + status.pause_s_mean)
    return status.weight_bytes / seconds / 1e9 if seconds else 0.0


def average_or_none(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
