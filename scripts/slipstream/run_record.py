"""The record that a run leaves behind: `summary.json`, rewritten at every step, and what its trackers show.

Definitions: `wall_s` is the driver's time; rates divide by the seconds since version 0 was published;
`reward.first` and `reward.last` are means over the first and the last (up to) five steps; `idle.learner` is
the share of its life that the learner waited for batches, `idle.generators` the share of their lives,
together, in which engines had nothing to do. `weights`: docs/weights.md.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from buffers import messages as m
from buffers.files import replace_file
from buffers.role_registry import SILENT_S
from buffers.run_status import RunStatus, SourceReport
from configs.disk import DiskFull
from configs.schema import Config
from slipstream.evaluation_report import Entry, list_metrics, make_entry, sort_entries, upgrade_entry
from slipstream.stop_signals import StopSignals
from slipstream.throughput import Throughput, TokenRates
from slipstream.tracking.trackers import Trackers

NUM_AVERAGED = 5
MAX_LAGS = 1000
"""Generators whose lags the summary lists. Beyond that, those that are gone are added up as `others`."""
MAX_LAG_FIGURES = 32
"""Generators at most for each of which trackers have a figure of its own."""


@dataclass(frozen=True, slots=True)
class LagAccount:
    """How far a generator was behind the newest version."""

    num_steps: int = 0
    total: int = 0
    """Sum over the steps, in versions."""
    most: int = 0

    def add(self, other: "LagAccount") -> "LagAccount":
        return LagAccount(
            self.num_steps + other.num_steps, self.total + other.total, max(self.most, other.most)
        )

    def summarize(self) -> dict[str, float]:
        return {"mean": self.total / self.num_steps, "max": self.most}


class RunRecord:
    """Writes `summary.json` into one run's folder, and hands what it records to the trackers.

    Call `start_trackers` once, `record_news` with all news as they come, `close` with how the run ended, and
    `close_trackers` when nothing more is written. `record_news` and `close` raise DiskFull.
    """

    def __init__(
        self, config: Config, folder: Path, resume_step: int | None, say: Callable[[str], None] = print
    ) -> None:
        """`say` is called with a line for the user."""
        self._config, self._folder, self._first_step = config, folder, resume_step or 0
        self._began = time.monotonic()
        self._command_began = psutil.Process().create_time()
        self._start_s: dict[str, float] = {}
        self._rewards: dict[int, float] = {}
        """Mean reward by step."""
        self._publish_s: list[float] = []
        self._write_s: list[float] = []
        self._lags: dict[str, LagAccount] = {}
        """By generator, over the recorded steps at which it was heard of."""
        self._other_lags = LagAccount()
        """The sum of those that are gone and are not listed any more."""
        self._num_restarts = self._num_buffer_restarts = 0
        self._status: RunStatus | None = None
        self._throughput = Throughput(is_resumed=resume_step is not None)
        self._before = self._read_before() if resume_step is not None else {}
        self._evaluations: dict[tuple[str, int], Entry] = {
            (one["set"], one["version"]): one
            for one in map(upgrade_entry, self._before.get("evaluations", []))
            if one["version"] < self._first_step
        }
        """Summary entries by set and version, of all lives of the run."""
        self.last_evaluation = 0
        """Number of the newest evaluation record."""
        self.num_steps = 0
        """Number of step records so far."""
        self._trackers = Trackers(
            config, folder, self._first_step, say, before=self._before.get("trackers", {})
        )

    def start_trackers(self) -> None:
        self._trackers.start()

    def note_milestone(self, what: str) -> None:
        """Notes the time at which this part of the start was done."""
        self._start_s[what] = round(time.time() - self._command_began, 3)

    @property
    def start_s(self) -> dict[str, float]:
        """Seconds from the command until each part of the run had started. Parts start side by side."""
        reached = {} if self._status is None else self._status.milestones
        new = {what: at for what, at in reached.items() if what not in self._start_s}
        return self._start_s | {what: round(at - self._command_began, 3) for what, at in new.items()}

    @property
    def evaluations(self) -> list[Entry]:
        """All evaluations so far as in the summary, in the order of their versions."""
        return sort_entries(self._evaluations.values())

    def _read_before(self) -> dict[str, Any]:
        path = self._folder / "summary.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def record_news(self, news: m.RunNews) -> None:
        self._status = news.status
        self._throughput.note_status(news.status)
        for record in news.records:
            self.num_steps += 1
            if (reward := record.metrics.get("reward/mean")) is not None:
                self._rewards[record.step] = reward
            metrics = record.metrics | {"time/seconds": record.time}
            if record is news.records[-1]:
                metrics |= list_status_metrics(news.status, self._throughput.measure(news.status))
            self._trackers.log_metrics(record.step, metrics)
            self._trackers.log_samples(record.step, record.samples)
        for evaluation in news.evaluations:
            self.last_evaluation = max(self.last_evaluation, evaluation.number)
            entry = make_entry(evaluation)
            if (entry["set"], entry["version"]) not in self._evaluations:
                self._evaluations[entry["set"], entry["version"]] = entry
                self._trackers.log_metrics(entry["version"], list_metrics(entry), is_evaluation=True)
        for found, name in ((self._publish_s, "publish_s"), (self._write_s, "write_s")):
            told = (record.metrics.get(f"weights/{name}") for record in news.records)
            found += [seconds for seconds in told if seconds is not None]
        if news.records:
            self._note_lags(measure_lags(news.status))
            # Before the summary: a driver that is killed has recorded every step that its summary knows.
            self._trackers.flush_files()
            self._write_summary("running")

    def _note_lags(self, lags: dict[str, int]) -> None:
        for name, lag in lags.items():
            self._lags[name] = self._lags.get(name, LagAccount()).add(LagAccount(1, lag, lag))
        num_over = max(0, len(self._lags) - MAX_LAGS)
        for name in [name for name in self._lags if name not in lags][:num_over]:
            self._other_lags = self._other_lags.add(self._lags.pop(name))

    def _summarize_lags(self) -> dict[str, dict[str, float]]:
        others = {"others": self._other_lags} if self._other_lags.num_steps else {}
        return {name: lags.summarize() for name, lags in (self._lags | others).items()}

    def rewind_to_step(self, step: int) -> None:
        """Voids the records of steps from `step` on: the learner was lost, and trains them again."""
        self._num_restarts += 1
        self._rewards = {trained: reward for trained, reward in self._rewards.items() if trained < step}
        self._evaluations = {key: one for key, one in self._evaluations.items() if key[1] < step}
        self._trackers.rewind_to_step(step)

    def note_buffer_restart(self) -> None:
        """Keeps the milestones of the start: another life of the buffer has its own."""
        self._num_buffer_restarts += 1
        self._start_s = self.start_s

    def close(self, status: str) -> None:
        try:
            if self._status is not None:
                self._write_summary(status)
        finally:
            self._trackers.close_files()

    def close_trackers(self, status: str, signals: StopSignals) -> list[str]:
        """Lets the trackers flush, for a bounded time. Returns a line for each that lacks something."""
        self._trackers.finish(status, signals)
        if self._status is not None and self._config.tracking.trackers:
            with suppress(DiskFull):  # `close` has named it
                self._write_summary(status)
        return self._trackers.describe_losses()

    def _write_summary(self, status: str) -> None:
        assert self._status is not None
        summary = json.dumps(self.make_summary(self._status, status), indent=1) + "\n"
        replace_file(self._folder / "summary.json", summary.encode(), sync=False)

    def make_summary(self, news: RunStatus, status: str) -> dict[str, Any]:
        tokens, groups = news.tokens, news.groups
        rates, seconds = self._throughput.measure(news), max(news.elapsed_s, 1e-9)
        return {
            "mode": str(self._config.mode),
            "status": status,
            "steps": news.num_trained_steps,
            "version": news.version,
            "wall_s": round(time.monotonic() - self._began + self._before.get("wall_s", 0.0), 3),
            "start_s": self.start_s,
            "restarts": {
                "learner": self._before.get("restarts", {}).get("learner", 0) + self._num_restarts,
                "buffer": self._before.get("restarts", {}).get("buffer", 0) + self._num_buffer_restarts,
            },
            "reward": {
                "first": self._average_first_rewards(),
                "last": average_or_none(self._list_rewards()[-NUM_AVERAGED:]),
            },
            "evaluations": self.evaluations,
            "skipped_evaluations": self._before.get("skipped_evaluations", 0) + news.skipped_evaluations,
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
            "data": {name: summarize_source(report) for name, report in news.sources.items()},
            "staleness": self._summarize_staleness(news),
            "throughput": {
                "generated_tokens_per_s": rates.generated,
                "trained_tokens_per_s": rates.trained,
                "steps_per_s": (news.num_trained_steps - self._first_step) / seconds,
            },
            "idle": {"learner": news.learner_idle_share, "generators": news.generator_idle_share},
            "weights": self._summarize_weights(news),
            "trackers": self._trackers.describe_each(),
        }

    def _average_first_rewards(self) -> float | None:
        """Returns the mean over the run's first steps: those that earlier lives have recorded, then those of
        this life."""
        known = self._before.get("reward", {}).get("first")
        num_known = 0 if known is None else min(self._before.get("steps", NUM_AVERAGED), NUM_AVERAGED)
        new = self._list_rewards(from_step=num_known)
        return average_or_none([known] * num_known + new[: NUM_AVERAGED - num_known])

    def _list_rewards(self, from_step: int = 0) -> list[float]:
        return [reward for step, reward in sorted(self._rewards.items()) if step >= from_step]

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
            "write_s_mean": average_or_none(self._write_s),
            "lag": self._summarize_lags(),
            "digest_checks": news.digest_checks,
            "digest_mismatches": news.digest_mismatches,
        }


def summarize_source(report: SourceReport) -> dict[str, Any]:
    """Returns the account of a source of prompts."""
    return {
        "groups": {"leased": report.leased, "trained": report.trained, "rejected": report.rejected},
        "reward": report.reward_mean,
        "epochs": report.epochs,
    }


def list_status_metrics(status: RunStatus, rates: TokenRates) -> dict[str, float]:
    """Lists the buffer's side of a step, for the trackers."""
    metrics = {
        "throughput/generated_tokens_per_s": rates.generated,
        "throughput/trained_tokens_per_s": rates.trained,
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
    for name, report in status.sources.items():
        figures = {"groups": report.leased, "reward_mean": report.reward_mean, "epoch": report.epochs}
        metrics |= {f"data/{name}/{key}": value for key, value in figures.items() if value is not None}
    metrics |= {f"curriculum/{name}": value for name, value in status.curriculum.items()}
    metrics |= {f"ledger/rejected_{reason}": count for reason, count in status.tokens.rejected.items()}
    metrics["scoring/abandoned"] = status.abandoned_scores
    metrics["episode/discarded_tokens"] = status.discarded_tokens
    metrics |= {
        f"refused/{reason.replace(' ', '_')}": count for reason, count in status.refused_requests.items()
    }
    if lags := measure_lags(status):
        metrics |= {"weights/lag_mean": sum(lags.values()) / len(lags), "weights/lag_max": max(lags.values())}
        if len(lags) <= MAX_LAG_FIGURES:
            metrics |= {f"weights/lag_{name}": lag for name, lag in lags.items()}
    return {name: float(value) for name, value in metrics.items()}


def measure_lags(status: RunStatus) -> dict[str, int]:
    """Returns how many versions each generator is behind the newest. One that has left, that is not heard of,
    that evaluates alone or that has no weights yet has no lag."""
    heard = {name for name, role in status.roles.items() if role.last_heard_s <= SILENT_S}
    return {
        name: max(0, status.version - report.version)
        for name, report in status.generators.items()
        if report.version >= 0 and name in heard and name not in status.evaluators
    }


def compute_gb_per_s(status: RunStatus) -> float:
    """Bytes of the versions taken up, over the seconds from announced to in service (waiting for the engine
    left out)."""
    seconds = status.weight_updates * (status.prepare_s_mean + status.pause_s_mean)
    return status.weight_bytes / seconds / 1e9 if seconds else 0.0


def average_or_none(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
